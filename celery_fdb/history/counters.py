"""Numbers by task that no scan has to find: how many runs ended how, and how long they took.

A row is one integer that is added to atomically: its 64-bit fields, the lowest first, are counters that never become
negative, so none carries into the next one. First come the states of :data:`~celery_fdb.history.run.ENDED`, then the
sum of the runtimes in microseconds, then how many runs took up to each of :data:`BOUNDS_S`, and longer. Runtimes are
counted of runs that succeeded or failed.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple, Self

from celery import states

from celery_fdb.history.run import ENDED, Run
from kombu_fdb.errors import FormatError

#: Upper bounds of the histogram's buckets, in seconds; behind the last one there is one without.
BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)

#: Length of a slot in seconds, and for how long it is kept: one to show an hour by, and one for days.
SLOTS = {300: 2 * 3600, 3600: 8 * 86_400}

_SUM = len(ENDED)
_BUCKETS = _SUM + 1
_FIELDS = _BUCKETS + len(BOUNDS_S) + 1
_STRUCT = struct.Struct(f"<{_FIELDS}Q")
#: Bytes of a row.
WIDTH = _STRUCT.size
_TIMED = (states.SUCCESS, states.FAILURE)
_AT = {state: at for at, state in enumerate(ENDED)}
#: A year: more is a clock that jumped.
_LONGEST_S = 366 * 86_400


class Counters(NamedTuple):
    """Of some runs. ``states``: in the order of ``ENDED``; ``buckets``: by runtime, not cumulative."""

    states: tuple[int, ...] = (0,) * len(ENDED)
    runtime_us: int = 0
    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)

    def of(self, state: str) -> int:
        """How many ended in it."""
        return self.states[_AT[state]]

    def plus(self, other: Self) -> Self:
        return type(self)(
            tuple(map(sum, zip(self.states, other.states, strict=True))),
            self.runtime_us + other.runtime_us,
            tuple(map(sum, zip(self.buckets, other.buckets, strict=True))),
        )

    @property
    def runs(self) -> int:
        return sum(self.states)

    def quantile_s(self, share: float) -> float | None:
        """The runtime that ``share`` of the runs stayed below, estimated inside of its bucket; None without runs.

        Of what is behind the last bound, that bound.
        """
        rank = share * sum(self.buckets)
        lower = 0.0
        for bound, number in zip(BOUNDS_S, self.buckets, strict=False):
            if number and number >= rank:
                return lower + (bound - lower) * max(rank, 0.0) / number
            rank -= number
            lower = bound
        return BOUNDS_S[-1] if self.buckets[-1] else None


def delta_of(runs: Iterable[Run]) -> int:
    """What is added to a row for these."""
    fields = [0] * _FIELDS
    for run in runs:
        fields[_AT[run.state]] += 1
        if run.runtime_s is not None and run.state in _TIMED:
            fields[_SUM] += int(min(max(run.runtime_s, 0.0), _LONGEST_S) * 1e6)
            fields[_BUCKETS + bisect_left(BOUNDS_S, run.runtime_s)] += 1
    return int.from_bytes(_STRUCT.pack(*fields), "little")


def unpack(value: bytes) -> Counters:
    """Raises ``FormatError``."""
    if len(value) != WIDTH:
        raise FormatError("unreadable counters", length=len(value))
    fields = _STRUCT.unpack(value)
    return Counters(fields[:_SUM], fields[_SUM], fields[_BUCKETS:])
