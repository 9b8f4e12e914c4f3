"""Expired: messages that outlived their time where nobody claims them.

A claim drops what has expired when it meets it. In a queue that nobody consumes nobody meets it: there the duties walk
through the ready messages now and then. RabbitMQ does so at the head of a queue only
(https://www.rabbitmq.com/docs/ttl#per-message-ttl-caveats). A life ends by the clock of whoever looks, and began by its
publisher's (SKEW).
"""

from __future__ import annotations

from kombu_fdb.engine.messages.deadletter import Graves, drop_expired
from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.stored.tally import Tally
from kombu_fdb.engine.stored.walking import rows_from
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_record, size_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.store.protocol import Transaction

__all__ = ["ROWS_PER_TRANSACTION", "drop_part"]

ROWS_PER_TRANSACTION = 200


def drop_part(
    tr: Transaction, graves: Graves, tally: Tally, queue: str, cursor: bytes, now_ms: int, limit: int
) -> tuple[int, bytes]:
    """Look at up to ``limit`` messages. Returns how many were dropped, and where to go on; b"" at the end.

    Conflicts with whoever takes one that is dropped, and with nobody else.
    """
    keys = graves.keys
    ranges = [range_of(keys.keyed(queue)), range_of(keys.ready(queue))]
    rows, following = rows_from(tr, ranges, cursor, limit)
    expired = [(key, value, record) for key, value in rows if (record := _expired(value, now_ms)) is not None]
    for key, value, _ in expired:
        _take_out(tr, keys, tally, queue, key, value)
    turns.leave_places(tr, keys, queue, [key for key, _, _ in expired])  # before anything is stored: it reads
    for key, value, record in expired:
        drop_expired(tr, graves, tally, queue, record, value, now_ms, place=key)
    return len(expired), following


def _take_out(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: bytes, value: bytes) -> None:
    tr.add_read_conflict_key(key)
    tr.clear(key)
    tally.unready(queue, size_of(value))
    if key.startswith(keys.keyed(queue)):
        tally.went(queue, keys.key_at(queue, key))


def _expired(value: bytes, now_ms: int) -> Record | None:
    try:
        record = decode_record(value)
    except FormatError:  # whoever claims it will see
        return None
    return record if 0 < record.expires_ms <= now_ms else None
