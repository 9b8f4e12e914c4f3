"""Sweep: find dead sessions and release their messages. Guarantees BACK-SOON and NOT-TWICE.

Every consumer process observes the sessions that follow its own in the ring of session ids, and decides which of them
are dead (``process/duty_cycle.py``; this module measures their silence, and releases messages). No process is elected,
so the death of a sweeper delays nothing. The fencing transaction decides which of several sweepers ends a session, and
two that release the same messages conflict on the leases. See ``session.py`` for the states.

A lease that can't be released even alone in a transaction is skipped, and stays; the others are released.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kombu_fdb.engine.messages.bury import bury_malformed
from kombu_fdb.engine.messages.message import end_lease
from kombu_fdb.engine.messages.settle import release_message
from kombu_fdb.engine.scheduling import line, single
from kombu_fdb.engine.stored import newer
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message
from kombu_fdb.keyspace.layout import range_of, split_place
from kombu_fdb.model import SessionId

LEASES_PER_TRANSACTION = 200

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Observation:
    value: bytes
    ttl_s: float
    unchanged_s: float = 0.0
    #: Whether it was ever seen to change.
    changed: bool = False


class FailureDetector(Generic[K]):
    """Finds out which of many values have not changed for their time to live, by the caller's own monotonic clock.

    It then suspects that their owners have failed: sessions, by their heartbeats, and the writers of rows that were
    left behind.

    What counts is the time *under observation*: between two successful looks at most a quarter of the value's time to
    live. So a store that did not answer for minutes, or an observer that was frozen, makes no session look silent: it
    takes four looks or more, spread over the whole time.
    """

    def __init__(self) -> None:
        self._observations: dict[K, _Observation] = {}
        self._looked = 0.0

    def look(self, values: Iterable[tuple[K, bytes, float]], now: float) -> None:
        """Note key, value and time to live (seconds) of one successful look; keys not among them are forgotten."""
        gap_s = now - self._looked
        seen: dict[K, _Observation] = {}
        for key, value, ttl_s in values:
            before = self._observations.get(key)
            same = before is not None and before.value == value
            unchanged_s = before.unchanged_s + counted_gap(gap_s, ttl_s / 4) if before is not None and same else 0.0
            changed = before is not None and (before.changed or not same)
            seen[key] = _Observation(value, ttl_s, unchanged_s, changed)
        self._observations, self._looked = seen, now

    def forget(self) -> None:
        """Begin anew: earlier looks no longer count."""
        self._observations.clear()

    def half_silent(self) -> list[tuple[K, float]]:
        """The keys unchanged for half of their time to live, each with that time to live."""
        return [(key, seen.ttl_s) for key, seen in self._observations.items() if seen.unchanged_s >= seen.ttl_s / 2]

    def note_alive(self, key: K) -> None:
        """Note another sign of life of the key's owner: as if the value had changed just now."""
        self._observations[key].unchanged_s, self._observations[key].changed = 0.0, True

    def is_alive(self, key: K) -> bool:
        """Whether it was seen to change within a quarter of its time to live."""
        seen = self._observations.get(key)
        return seen is not None and seen.changed and seen.unchanged_s < seen.ttl_s / 4

    def next_silent_s(self) -> float:
        """How soon one of those that may still change will have been silent for too long; infinite if there is none."""
        left_s = [
            seen.ttl_s - seen.unchanged_s for seen in self._observations.values() if seen.unchanged_s < seen.ttl_s
        ]
        return min(left_s, default=math.inf)

    def silent(self) -> list[tuple[K, bytes]]:
        """The keys unchanged for at least their time to live, with their values."""
        return [(key, seen.value) for key, seen in self._observations.items() if seen.unchanged_s >= seen.ttl_s]


def counted_gap(gap_s: float, longest_s: float) -> float:
    """How much of the time since the last look counts as observed."""
    return min(gap_s, longest_s)


def release_part(
    work: Work, limit: int, session_id: SessionId, cursor: bytes = b"", *, counted: bool = True
) -> tuple[int, bytes]:
    """Release up to ``limit`` messages of a fenced session. Returns how many, and where to go on; b"" at the end.

    The leases are conflict keys: an acknowledgement that commits meanwhile makes this transaction start again.
    """
    if work.tr.get(work.keys.session(session_id)) is not None:
        return 0, b""  # still open: not ours to take
    begin, end = range_of(work.keys.leases(session_id))
    rows = work.tr.get_range(max(begin, cursor), end, limit=limit, snapshot=True)
    for key, value in rows:
        work.tr.add_read_conflict_key(key)
        work.tr.clear(key)
        _release(work, value, counted=counted)
    if rows:
        return len(rows), rows[-1][0] + b"\x00"
    if not cursor or not work.tr.get_range(begin, cursor, limit=1, snapshot=True):
        single.leave_each(work, session_id, work.tr.get_range(*work.keys.all_singles, snapshot=True))
    return 0, b""


def skip(work: Work, session_id: SessionId, cursor: bytes) -> bytes:
    """Where to go on after the next lease, which can't be released; b"" at the end."""
    begin, end = range_of(work.keys.leases(session_id))
    rows = work.tr.get_range(max(begin, cursor), end, limit=1, snapshot=True)
    return rows[0][0] + b"\x00" if rows else b""


def forget(work: Work, session_id: SessionId) -> None:
    """Clear the last row of a fenced session, by which others find it if the process that cleans up dies meanwhile.

    It stays as long as a lease does: the next sweep tries again to release it.
    """
    held = work.tr.get_range(*range_of(work.keys.leases(session_id)), limit=1)
    if not held and work.tr.get(work.keys.session(session_id)) is None:
        line.forget(work, session_id)
        work.tr.clear(work.keys.beat(session_id))


def _release(work: Work, lease: bytes, *, counted: bool) -> None:
    if (kept := newer.keep_lease(work, lease)) is not None:
        work.effects.note(kept[0], "lost", split_place(kept[1])[0])
        end_lease(work, *kept)
        return
    try:
        message = Message.of_lease(lease)
    except FormatError as error:  # its queue is unknown; it is kept for a person to look at
        bury_malformed(work, Message("unreadable", b"", lease), error)
        return
    if counted:  # otherwise its owner has released it
        work.effects.note(message.queue, "lost", split_place(message.place)[0])
    end_lease(work, message.queue, message.place)
    release_message(work, message, "counted" if counted else "none")
