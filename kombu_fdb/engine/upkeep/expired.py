"""Expired: messages that outlived their time where nobody claims them.

A claim drops what has expired when it meets it. In a queue that nobody consumes nobody meets it: there the duties walk
through the ready messages now and then. RabbitMQ does so at the head of a queue only
(https://www.rabbitmq.com/docs/ttl#per-message-ttl-caveats). A life ends by the clock of whoever looks, and began by its
publisher's (SKEW).
"""

from __future__ import annotations

from kombu_fdb.engine.messages.bury import drop_expired
from kombu_fdb.engine.messages.message import Message, take_out
from kombu_fdb.engine.stored.walking import rows_from
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_record
from kombu_fdb.keyspace.tuples import range_of

__all__ = ["ROWS_PER_TRANSACTION", "drop_part"]

ROWS_PER_TRANSACTION = 200


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
