"""Move: messages from one queue to the end of another, as they are.

A message leaves its queue and enters the other in one transaction (ONE-PLACE). It keeps id, payload, key, priority,
due time, end of life, redeliveries and history of deaths; what it was before it, of its key and priority, still is. The
capacity of a key is not asked; a queue that grows over its maximum is trimmed by its own rule, so callers look at that
before.
"""

from __future__ import annotations

from itertools import accumulate

from kombu_fdb.engine.messages.publish import store_delayed, store_ready
from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.stored.tally import DELAYED, Tally
from kombu_fdb.engine.stored.whereabouts import forget
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import names_of, size_of
from kombu_fdb.keyspace.layout import Keyspace, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["MESSAGES_PER_TRANSACTION", "move"]

MESSAGES_PER_TRANSACTION = 200
#: Of the records; what else a message adds to a transaction is small.
MOST_BYTES = 2_000_000


def move(
    tr: Transaction, keys: Keyspace, tally: Tally, source: str, target: str, limit: int, *, key: str | None = None
) -> int:
    """Move up to ``limit`` messages, ready ones first, then delayed ones. Returns how many.

    ``key``: the ready ones of this key only. Conflicts with a claim, or another move, of the same ones.
    """
    ready, delayed = _rows(tr, keys, source, limit, key)
    for row in ready:
        _move_ready(tr, keys, tally, source, target, row)
    turns.leave_places(tr, keys, source, [row[0] for row in ready])
    for name, value in delayed:
        due_ms, rank = keys.split_delayed(source, name)
        task_id = _take(tr, keys, (name, value))
        store_delayed(tr, keys, tally, target, due_ms, rank, value, task_id=task_id)
    tally.change(source, DELAYED, -len(delayed))
    return len(ready) + len(delayed)


def _rows(
    tr: Transaction, keys: Keyspace, source: str, limit: int, key: str | None
) -> tuple[list[KeyValue], list[KeyValue]]:
    if key is not None:
        rows = tr.get_range(*range_of(keys.items(source, key, b"")), limit=limit, snapshot=True)
        return _light([row for row in rows if _is_readable(keys, row[0])]), []
    prefixes = (keys.ready(source), keys.keyed(source), keys.delayed(source))
    found = tr.get_ranges([(*range_of(each), limit) for each in prefixes], snapshot=True)
    unkeyed, keyed, delayed = ([row for row in rows if _is_readable(keys, row[0])] for rows in found)
    ready = _light((unkeyed + keyed)[:limit])
    return ready, [] if ready else _light(delayed)


def _is_readable(keys: Keyspace, key: bytes) -> bool:
    """What is at a place that can't be read stays there."""
    try:
        keys.queue_of(key)
    except FormatError:
        return False
    return True


def _light(rows: list[KeyValue]) -> list[KeyValue]:
    """As many as one transaction holds: a dead letter's history may be long. At least one, if there is one."""
    sizes = accumulate(len(value) for _, value in rows)
    return [row for number, (row, size) in enumerate(zip(rows, sizes, strict=True)) if not number or size <= MOST_BYTES]


def _move_ready(tr: Transaction, keys: Keyspace, tally: Tally, source: str, target: str, row: KeyValue) -> None:
    key, rank = split_place(keys.place(source, row[0]))
    task_id = _take(tr, keys, row)
    tally.unready(source, size_of(row[1]))
    if key:
        tally.went(source, key)
    store_ready(tr, keys, tally, target, key, rank, row[1], task_id=task_id)


def _take(tr: Transaction, keys: Keyspace, row: KeyValue) -> str:
    """Take a row out of its queue; the id of its task."""
    tr.add_read_conflict_key(row[0])
    tr.clear(row[0])
    task_id = names_of(row[1])[1]
    forget(tr, keys, task_id, row[0])
    return task_id
