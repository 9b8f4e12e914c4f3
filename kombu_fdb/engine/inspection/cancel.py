"""Cancel: take a task back that no worker has begun, by its id; and find where a task is.

Both go by the index (``whereabouts.py``), so they read as many rows as the task has messages, whatever else is in the
store. A message under a lease is its consumer's, and stays: only the worker can stop what it runs.
"""

from __future__ import annotations

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES, places
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease, names_of
from kombu_fdb.model import Peeked, Stamp
from kombu_fdb.store.protocol import KeyValue

#: A queue, and a row of one of its messages.
Found = tuple[str, KeyValue]


def cancel(work: Work, task_id: str, after: bytes) -> tuple[list[Peeked], bytes]:
    """Delete the task's messages that are ready, delayed or dead. Returns what they were, and where the others begin.

    Serializable: a message that moves meanwhile, or is just being published, makes the transaction start again.
    """
    wanted, following = places(work, task_id, after)
    rows = _rows(work, wanted)
    found = [(work.keys.queue_of(row[0]), row) for row in rows if names_of(row[1])[1] == task_id]
    taken = browse.look_all(work, found)
    for each in found:
        browse.remove(work, *each)
    return taken, following


def find_task(work: Work, task_id: str) -> list[Peeked]:
    """The task's first messages, in any state."""
    return browse.look_all(work, where(work, task_id))


def where(work: Work, task_id: str) -> list[Found]:
    """The task's first messages. Reads the leases, all of them, only if one of those is leased. Snapshot."""
    wanted, _ = places(work, task_id, snapshot=True)
    rows = _rows(work, wanted, snapshot=True)
    waiting = [(work.keys.queue_of(row[0]), row) for row in rows]
    leased = {Stamp(key[-STAMP_BYTES:]) for key in wanted} - {Stamp(key[-STAMP_BYTES:]) for key, _ in rows}
    return waiting + (_leased(work, leased) if leased else [])


def _leased(work: Work, stamps: set[Stamp]) -> list[Found]:
    found = []
    for row in work.tr.get_range(*work.keys.all_leases, snapshot=True):
        try:
            queue, place, _record = decode_lease(row[1])
        except FormatError:  # no task's
            continue
        if place[-STAMP_BYTES:] in stamps:
            found.append((queue, row))
    return found


def _rows(work: Work, wanted: list[bytes], *, snapshot: bool = False) -> list[KeyValue]:
    values = work.tr.get_many(wanted, snapshot=snapshot) if wanted else []
    return [(key, value) for key, value in zip(wanted, values, strict=True) if value is not None]
