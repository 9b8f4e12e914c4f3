"""Cancel: take a task back that nobody has begun, by its id; and find where a task is.

Both go by the index (``whereabouts.py``), so they read as many rows as the task has messages, whatever else is in the
store. A message under a lease is its consumer's, and stays: only the worker can stop what it runs.
"""

from __future__ import annotations

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.stored.tally import Tally
from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES, places
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease, names_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import Peeked
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["find_task", "take_back"]


def take_back(tr: Transaction, keys: Keyspace, tally: Tally, task_id: str) -> list[Peeked]:
    """Delete the task's messages that are ready, delayed or dead. Returns what they were.

    Serializable: a message that moves meanwhile, or is just being published, makes the transaction start again.
    """
    found = [row for row in _rows(tr, places(tr, keys, task_id)) if names_of(row[1])[1] == task_id]
    taken = [browse.look(tr, keys, _queue(keys, row[0]), row) for row in found]
    for key, value in found:
        browse.remove(tr, keys, tally, _queue(keys, key), key, value)
    return taken


def find_task(tr: Transaction, keys: Keyspace, task_id: str) -> list[Peeked]:
    """All messages of the task, in any state. Reads the leases, all of them, only if one of its messages is leased."""
    wanted = places(tr, keys, task_id, snapshot=True)
    rows = _rows(tr, wanted, snapshot=True)
    waiting = [browse.look(tr, keys, _queue(keys, row[0]), row) for row in rows]
    leased = {key[-STAMP_BYTES:] for key in wanted} - {key[-STAMP_BYTES:] for key, _ in rows}
    return waiting + (_leased(tr, keys, leased) if leased else [])


def _leased(tr: Transaction, keys: Keyspace, stamps: set[bytes]) -> list[Peeked]:
    found = []
    for key, value in tr.get_range(*keys.all_leases, snapshot=True):
        try:
            queue, place, _record = decode_lease(value)
        except FormatError:  # nobody's task
            continue
        if place[-STAMP_BYTES:] in stamps:
            found.append(browse.look(tr, keys, queue, (key, value)))
    return found


def _rows(tr: Transaction, wanted: list[bytes], *, snapshot: bool = False) -> list[KeyValue]:
    values = tr.get_many(wanted, snapshot=snapshot)
    return [(key, value) for key, value in zip(wanted, values, strict=True) if value is not None]


def _queue(keys: Keyspace, key: bytes) -> str:
    return keys.queue_of(key)
