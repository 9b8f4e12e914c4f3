"""Expired: messages that outlived their time where no consumer claims them.

A claim drops what has expired when it meets it. In a queue without a consumer no claim meets it. Where messages have
one time to live (``x-message-ttl``), or go on when they expire (a dead-letter exchange), the duties look at the queue's
head when that one's life is over: as in RabbitMQ, where a time to live, of the queue or of each message, and a
dead-letter exchange make a delay (https://www.rabbitmq.com/docs/ttl#per-message-ttl-caveats). In a queue with keys each
key has a head; :data:`MOST_KEYS` are looked at. What is not at a head, they find by a walk through all ready messages
now and then. A life ends by the clock of the process that looks, and began by its publisher's (SKEW).
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.messages.bury import drop_expired
from kombu_fdb.engine.messages.message import Message, take_out
from kombu_fdb.engine.stored.batches import rows_from
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_record, outline_of
from kombu_fdb.keyspace.layout import EVERY_RANK
from kombu_fdb.keyspace.tuples import range_of

ROWS_PER_TRANSACTION = 200
#: Of each queue, those whose heads are looked at.
MOST_KEYS = 100


def at_heads(work: Work, queues: Sequence[str]) -> tuple[dict[str, list[bytes]], int | None]:
    """The cursors at which a message has expired, at the heads of ``queues``, and when the next one does; at snapshot.

    A queue's keys have a head each.
    """
    if not queues:
        return {}, None
    named = work.tr.get_ranges([(*work.keys.backlogs(queue), MOST_KEYS) for queue in queues], snapshot=True)
    places = [
        (queue, key)
        for queue, rows in zip(queues, named, strict=True)
        for key in ("", *(key for (_queue, key), _ in work.keys.read(rows, str, str)))
    ]
    ranges = [(*range_of(work.keys.items(queue, key, EVERY_RANK)), 1) for queue, key in places]
    due: dict[str, list[bytes]] = {}
    next_ms = None
    for (queue, _key), rows in zip(places, work.tr.get_ranges(ranges, snapshot=True), strict=True):
        for row, value in rows:
            expires_ms = _expires_ms(value)
            if 0 < expires_ms <= work.now_ms:
                due.setdefault(queue, []).append(row)
            elif expires_ms:
                next_ms = expires_ms if next_ms is None else min(next_ms, expires_ms)
    return due, next_ms


def _expires_ms(value: bytes) -> int:
    try:
        return outline_of(value).expires_ms
    except FormatError:
        return 0


def drop_part(work: Work, queue: str, cursor: bytes, limit: int) -> tuple[int, bytes]:
    """Look at up to ``limit`` messages. Returns how many were dropped, and where to go on; b"" at the end.

    Conflicts with a transaction that takes one that is dropped, and with no other.
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
    except FormatError:  # the claim that takes it will see
        return None
    return record if 0 < record.expires_ms <= now_ms else None
