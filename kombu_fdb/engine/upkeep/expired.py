"""Expired: messages that outlived their time where nobody claims them.

A claim drops what has expired when it meets it. In a queue that nobody consumes nobody meets it. The messages of a
queue with ``x-message-ttl`` expire in their order, so there the duties look at its head when that one's life is over:
as in RabbitMQ, where such a queue and a dead-letter exchange make a delay
(https://www.rabbitmq.com/docs/ttl#per-message-ttl-caveats). What is not at the head, they find by a walk through all
ready messages now and then. A life ends by the clock of whoever looks, and began by its publisher's (SKEW).
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.messages.bury import drop_expired
from kombu_fdb.engine.messages.message import Message, take_out
from kombu_fdb.engine.stored.walking import rows_from
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_record, outline_of
from kombu_fdb.keyspace.tuples import range_of

ROWS_PER_TRANSACTION = 200


def at_heads(work: Work, queues: Sequence[str]) -> tuple[list[str], int | None]:
    """Those of ``queues`` at whose head a message has expired, and when the next of the others does; at snapshot."""
    ranges = [range_of(prefix) for queue in queues for prefix in (work.keys.keyed(queue), work.keys.ready(queue))]
    heads = work.tr.get_ranges([(*each, 1) for each in ranges], snapshot=True) if ranges else []
    due, next_ms = set(), None
    for number, rows in enumerate(heads):
        for _, value in rows:
            expires_ms = _expires_ms(value)
            if 0 < expires_ms <= work.now_ms:
                due.add(queues[number // 2])
            elif expires_ms:
                next_ms = expires_ms if next_ms is None else min(next_ms, expires_ms)
    return sorted(due), next_ms


def _expires_ms(value: bytes) -> int:
    try:
        return outline_of(value).expires_ms
    except FormatError:
        return 0


def drop_part(work: Work, queue: str, cursor: bytes, limit: int) -> tuple[int, bytes]:
    """Look at up to ``limit`` messages. Returns how many were dropped, and where to go on; b"" at the end.

    Conflicts with whoever takes one that is dropped, and with nobody else.
    """
    ranges = [range_of(work.keys.keyed(queue)), range_of(work.keys.ready(queue))]
    rows, following = rows_from(work, ranges, cursor, limit)
    expired = [(row, record) for row in rows if (record := _expired(row[1], work.now_ms)) is not None]
    take_out(work, queue, [row for row, _ in expired])
    for row, record in expired:
        drop_expired(work, Message(queue, *row), record)
    return len(expired), following


def _expired(value: bytes, now_ms: int) -> Record | None:
    try:
        record = decode_record(value)
    except FormatError:  # whoever claims it will see
        return None
    return record if 0 < record.expires_ms <= now_ms else None
