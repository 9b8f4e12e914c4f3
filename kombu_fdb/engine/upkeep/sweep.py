"""Sweep: find dead sessions and bring their messages back. Guarantees BACK-SOON and NOT-TWICE.

Every consumer process observes the sessions that follow its own in the ring of all session ids (``duties.py``); nobody
is elected, so the death of a sweeper delays nothing. Which of several sweepers ends a session is decided by the fencing
transaction, and two that bring the same messages back conflict on the leases. See ``session.py`` for the states.

A lease that can't be brought back, though it is alone in its transaction, is skipped and stays; the others come back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kombu_fdb.engine.messages.deadletter import Graves, bury
from kombu_fdb.engine.messages.settle import end_of_lease, put_back
from kombu_fdb.engine.scheduling import single
from kombu_fdb.engine.stored import newer
from kombu_fdb.engine.stored.tally import LOST, Tally
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease
from kombu_fdb.keyspace.layout import Keyspace, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.store.protocol import Transaction

__all__ = ["LEASES_PER_TRANSACTION", "Observer", "forget", "release_part", "skip"]

LEASES_PER_TRANSACTION = 200

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Sighting:
    value: bytes
    ttl_s: float
    unchanged_s: float = 0.0
    #: It was seen to change, sometime.
    changed: bool = False


class Observer(Generic[K]):
    """Tells which of many values have not changed for as long as they live, by the caller's own monotonic clock.

    What counts is the time *under observation*: between two successful looks at most a quarter of the value's time to
    live. So a store that answered nobody for minutes, or an observer that was frozen, makes nobody look silent: it
    takes four looks or more, spread over the whole time.
    """

    def __init__(self) -> None:
        self._sightings: dict[K, _Sighting] = {}
        self._looked = 0.0

    def look(self, values: Iterable[tuple[K, bytes, float]], now: float) -> None:
        """Note key, value and time to live (seconds) of one successful look; what is not among them is forgotten."""
        gap_s = now - self._looked
        seen: dict[K, _Sighting] = {}
        for key, value, ttl_s in values:
            before = self._sightings.get(key)
            same = before is not None and before.value == value
            unchanged_s = before.unchanged_s + counted_gap(gap_s, ttl_s / 4) if before is not None and same else 0.0
            changed = before is not None and (before.changed or not same)
            seen[key] = _Sighting(value, ttl_s, unchanged_s, changed)
        self._sightings, self._looked = seen, now

    def forget(self) -> None:
        """Begin anew: what was seen so far says nothing."""
        self._sightings.clear()

    def is_half_silent(self, key: K) -> bool:
        """Whether it has not changed for half of its time to live."""
        seen = self._sightings.get(key)
        return seen is not None and seen.unchanged_s >= seen.ttl_s / 2

    def is_alive(self, key: K) -> bool:
        """Whether it was seen to change within a quarter of its time to live."""
        seen = self._sightings.get(key)
        return seen is not None and seen.changed and seen.unchanged_s < seen.ttl_s / 4

    def next_silent_s(self) -> float:
        """How soon one of those that may still change will have been silent for too long; infinite if there is none."""
        left_s = [seen.ttl_s - seen.unchanged_s for seen in self._sightings.values() if seen.unchanged_s < seen.ttl_s]
        return min(left_s, default=math.inf)

    def silent(self) -> list[tuple[K, bytes]]:
        """Those unchanged for at least their time to live."""
        return [(key, seen.value) for key, seen in self._sightings.items() if seen.unchanged_s >= seen.ttl_s]


def counted_gap(gap_s: float, longest_s: float) -> float:
    """How much of the time since the last look counts as observed."""
    return min(gap_s, longest_s)


def release_part(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    session_id: bytes,
    now_ms: int,
    *,
    counted: bool,
    cursor: bytes = b"",
    limit: int = LEASES_PER_TRANSACTION,
) -> tuple[int, bytes]:
    """Bring up to ``limit`` messages of a fenced session back. Returns how many, and where to go on; b"" at the end.

    The leases are conflict keys: an acknowledgement that commits meanwhile makes this transaction start again.
    """
    keys = graves.keys
    if tr.get(keys.session(session_id)) is not None:
        return 0, b""  # beaten and never fenced: not ours to take
    begin, end = range_of(keys.leases(session_id))
    rows = tr.get_range(max(begin, cursor), end, limit=limit, snapshot=True)
    for key, value in rows:
        tr.add_read_conflict_key(key)
        tr.clear(key)
        _bring_back(tr, graves, tally, value, now_ms, counted=counted)
    if rows:
        return len(rows), rows[-1][0] + b"\x00"
    if not cursor or not tr.get_range(begin, cursor, limit=1, snapshot=True):
        single.leave_all(tr, keys, session_id)
    return 0, b""


def skip(tr: Transaction, keys: Keyspace, session_id: bytes, cursor: bytes) -> bytes:
    """Where to go on behind the next lease, which can't be brought back; b"" if there is none."""
    begin, end = range_of(keys.leases(session_id))
    rows = tr.get_range(max(begin, cursor), end, limit=1, snapshot=True)
    return rows[0][0] + b"\x00" if rows else b""


def forget(tr: Transaction, keys: Keyspace, session_id: bytes) -> None:
    """The last trace of a fenced session, by which it is found if whoever cleans up after it dies meanwhile.

    It stays while a lease does: one that could not be brought back is tried again with the next sweep.
    """
    held = tr.get_range(*range_of(keys.leases(session_id)), limit=1)
    if not held and tr.get(keys.session(session_id)) is None:
        tr.clear(keys.beat(session_id))


def _bring_back(tr: Transaction, graves: Graves, tally: Tally, value: bytes, now_ms: int, *, counted: bool) -> None:
    if (kept := newer.keep_lease(tr, graves.keys, tally, value)) is not None:
        tally.note(kept[0], LOST, split_place(kept[1])[0])
        end_of_lease(tally, *kept)
        return
    try:
        queue, place, record = decode_lease(value)
    except FormatError as error:  # its queue is not known any more; kept for a person to look at
        bury(tr, graves, tally, "unreadable", value, "malformed", now_ms, place=b"", details={"error": str(error)})
        return
    if counted:  # else its owner gave it back
        tally.note(queue, LOST, split_place(place)[0])
    end_of_lease(tally, queue, place)
    put_back(tr, graves, tally, queue, place, record, now_ms, counted=counted)
