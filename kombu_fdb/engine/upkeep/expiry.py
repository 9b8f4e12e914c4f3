"""Expiry: messages whose time to live is over are dropped, even if no consumer claims.

A claim drops the expired messages that it meets, but a queue without a consumer has no claims. So if a queue has a time
to live (``x-message-ttl``) or a dead-letter exchange, the duties look at its head when that message expires. As in
RabbitMQ, a time to live, of the queue or of each message, thus makes a delay if there is a dead-letter exchange
(https://www.rabbitmq.com/docs/ttl#per-message-ttl-caveats). In a queue with keys each key has a head; :data:`MOST_KEYS`
are looked at. The duties find other expired messages by a periodic walk through all ready ones. A time to live begins
by the publisher's clock, and ends by that of the process that looks (SKEW).
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine import parts
from kombu_fdb.engine.messages.bury import drop_expired
from kombu_fdb.engine.messages.message import take_out
from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace.codec import Message, Record
from kombu_fdb.keyspace.layout import range_of, read_or

ROWS_PER_TRANSACTION = 200
#: How many keys of each queue have their heads checked.
MOST_KEYS = 100


def at_heads(work: Work, queues: Sequence[str]) -> tuple[dict[str, list[bytes]], int | None]:
    """The cursors of expired messages at the heads of ``queues``, and when the next head expires; at snapshot.

    Each key of a queue has a head.
    """
    if not queues:
        return {}, None
    named = work.tr.get_ranges([(*work.keys.backlogs(queue), MOST_KEYS) for queue in queues], snapshot=True)
    places = [
        (queue, key)
        for queue, rows in zip(queues, named, strict=True)
        for key in ("", *(key for (_queue, key), _ in work.keys.read(rows, str, str)))
    ]
    ranges = [(*work.keys.all_items(queue, key), 1) for queue, key in places]
    due: dict[str, list[bytes]] = {}
    next_ms = None
    for (queue, _key), rows in zip(places, work.tr.get_ranges(ranges, snapshot=True), strict=True):
        for row, value in rows:
            record = Record.known(value)
            if record.has_expired(work.now_ms):
                due.setdefault(queue, []).append(row)
            elif record.expires_ms:
                next_ms = record.expires_ms if next_ms is None else min(next_ms, record.expires_ms)
    return due, next_ms


def drop_part(work: Work, limit: int, queue: str, cursor: bytes = b"") -> tuple[int, bytes]:
    """Look at up to ``limit`` messages. Returns how many were dropped, and where to continue; b"" at the end.

    Conflicts only with a transaction that takes one of the dropped messages.
    """
    ranges = [range_of(work.keys.keyed(queue)), range_of(work.keys.ready(queue))]
    rows, following = parts.rows_from(work.tr, ranges, cursor, limit)
    found = [(row, read_or(None, Record.decode, row[1])) for row in rows]  # a claim buries unreadable ones
    expired = [(row, record) for row, record in found if record is not None and record.has_expired(work.now_ms)]
    take_out(work, queue, [row for row, _ in expired])
    for row, record in expired:
        drop_expired(work, Message(queue, *row), record)
    return len(expired), following
