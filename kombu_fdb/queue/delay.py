"""Delays: messages that are not ready before a moment, and their promotion when it comes.

A delayed message stands in a range of its own, ordered by its due time, so no claim ever walks over it and no worker
holds it. One consumer process at a time (``session.hold_role``) promotes what is due: its record moves to the end of
the ready range, or of its rank there. Only this uses the wall clock, and a wrong one moves a start by its error and
harms nothing else. Two promoters at once are harmless too: they conflict on the messages they both want.

``("waiting", queue)`` says that a queue may have delayed messages; it is cleared by a promoter that read the whole
range, serializably, as empty: a message delayed meanwhile makes that transaction fail.
"""

from __future__ import annotations

from kombu_fdb.keyspace.codec import due_from, names_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.queue.publish import store_ready
from kombu_fdb.queue.tally import DELAYED, Tally
from kombu_fdb.queue.whereabouts import forget
from kombu_fdb.store.protocol import Transaction

__all__ = ["MESSAGES_PER_TRANSACTION", "promote", "thaw", "waiting"]

MESSAGES_PER_TRANSACTION = 200


def waiting(tr: Transaction, keys: Keyspace) -> list[str]:
    """Queues that may have delayed messages."""
    queues = []
    for key, _ in tr.get_range(*keys.all_waiting, snapshot=True):
        queue = keys.unpack(key)[1]
        assert isinstance(queue, str)
        queues.append(queue)
    return queues


def promote(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, now_ms: int) -> tuple[int, int | None]:
    """Make up to :data:`MESSAGES_PER_TRANSACTION` due messages ready. Returns how many, and when the next is due."""
    begin, end = keys.delayed_until(queue, now_ms)
    due = tr.get_range(begin, end, limit=MESSAGES_PER_TRANSACTION, snapshot=True)
    for key, value in due:
        tr.add_read_conflict_key(key)
        tr.clear(key)
        due_ms, rank = keys.split_delayed(queue, key)
        fair_key, task_id = names_of(value)
        forget(tr, keys, task_id, key)
        store_ready(tr, keys, tally, queue, fair_key, rank, due_from(value, due_ms), task_id=task_id)
    tally.change(queue, DELAYED, -len(due))
    return len(due), _next_due(tr, keys, queue)


def thaw(tr: Transaction, keys: Keyspace, now_ms: int) -> int | None:
    """Ring for keys whose rate allows a message again. Returns when the next one is due."""
    for entry, _ in tr.get_range(*keys.thawed_until(now_ms), limit=MESSAGES_PER_TRANSACTION, snapshot=True):
        _tag, _due_ms, queue, key = keys.unpack(entry)
        tr.clear(entry)
        tr.set(keys.freed(str(queue), str(key)), b"")
        tr.set_versionstamped_value(keys.bell(str(queue)))
    following = tr.get_range(*keys.all_thaws, limit=1, snapshot=True)
    if not following:
        return None
    due_ms = keys.unpack(following[0][0])[1]
    assert isinstance(due_ms, int)
    return due_ms


def _next_due(tr: Transaction, keys: Keyspace, queue: str) -> int | None:
    whole = range_of(keys.delayed(queue))
    head = tr.get_range(*whole, limit=1, snapshot=True)
    if head:
        return keys.split_delayed(queue, head[0][0])[0]
    tr.add_read_conflict_range(*whole)
    tr.clear(keys.waiting(queue))
    return None
