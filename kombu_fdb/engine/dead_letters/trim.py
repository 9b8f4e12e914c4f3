"""Trim: what ``<queue>.dead`` keeps no longer, the expired and the oldest beyond its length, goes in parts.

Done by the duties now and then, not by each burial, which therefore never conflicts.
"""

from __future__ import annotations

from kombu_fdb.engine.messages.message import Message, delete, take_out
from kombu_fdb.engine.stored.effects import READY
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_amount, outline_of
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.store.protocol import KeyValue

TRIMMED_PER_TRANSACTION = 200


def trim(work: Work, queue: str, limit: int = TRIMMED_PER_TRANSACTION) -> int:
    """Drop some of them. Those that wait among the messages of their key, as they do after a delay, go last.

    Returns how many.
    """
    stored = work.tr.get(work.keys.count(queue, READY), snapshot=True)
    excess = decode_amount(stored)[0] - work.policy.dead_length
    ranges = [(*range_of(prefix), limit) for prefix in (work.keys.ready(queue), work.keys.keyed(queue))]
    unkeyed, keyed = work.tr.get_ranges(ranges, snapshot=True)
    dropped: list[KeyValue] = []
    for row in (unkeyed + keyed)[:limit]:
        if len(dropped) < excess or _is_expired(row[1], work.now_ms):
            dropped.append(row)
    take_out(work, queue, dropped)
    for key, value in dropped:
        delete(work, Message(queue, key, value))
    return len(dropped)


def _is_expired(value: bytes, now_ms: int) -> bool:
    try:
        return 0 < outline_of(value).expires_ms <= now_ms
    except FormatError:
        return False
