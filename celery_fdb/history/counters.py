"""Numbers by task that no scan has to find: how many runs ended how, and how long they took.

A row is one integer that is added to atomically: its fields, the lowest first, are counters that never become negative,
so none carries into the next one. First come 64-bit fields: the states of :data:`~celery_fdb.history.run.ENDED`, then
the sum of the runtimes in microseconds, then how many runs took up to each of :data:`BOUNDS_S`, and longer. They are
all that the row of a total has. The row of a slot has 32-bit fields behind them: how many runs took up to
:data:`SHORTEST_S`, and then up to each further power of :data:`STEP` times that. So an estimate in the middle of its
bucket is at most :data:`ERROR` off, as in DDSketch (Masson, Rim, Lee, VLDB 2019). Runtimes are counted of runs that
succeeded or failed.

A worker of version 0.2 writes slots as short as totals, and cuts those that it adds to: what it counted has no
percentiles.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple, Self

from celery import states

from celery_fdb.history.run import ENDED, Run
from kombu_fdb.errors import FormatError

#: Upper bounds of the buckets that Prometheus is told, in seconds; behind the last one there is one without.
BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)

#: Of the sketch: the relative error of a percentile between the shortest and the longest runtime, and what follows.
ERROR, SHORTEST_S, LONGEST_S = 0.05, 0.0001, 100_000.0
STEP = (1 + ERROR) / (1 - ERROR)
_SKETCHED = 2 + math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(STEP))

#: Length of a slot in seconds, and for how long it is kept: one to show an hour by, and one for days.
SLOTS = {300: 2 * 3600, 3600: 8 * 86_400}

_SUM = len(ENDED)
_BUCKETS = _SUM + 1
_FIELDS = _BUCKETS + len(BOUNDS_S) + 1
_TOTAL, _SLOT = struct.Struct(f"<{_FIELDS}Q"), struct.Struct(f"<{_FIELDS}Q{_SKETCHED}I")
#: Bytes of a row: of a total, and of a slot.
TOTAL_WIDTH, SLOT_WIDTH = _TOTAL.size, _SLOT.size
_TIMED = (states.SUCCESS, states.FAILURE)
_AT = {state: at for at, state in enumerate(ENDED)}
#: A year: more is a clock that jumped.
_LONGEST_S = 366 * 86_400


class Counters(NamedTuple):
    """Of some runs. ``states``: in the order of ``ENDED``; ``buckets`` and ``sketch``: by runtime, not cumulative."""

    states: tuple[int, ...] = (0,) * len(ENDED)
    runtime_us: int = 0
    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sketch: tuple[int, ...] = (0,) * _SKETCHED

    def of(self, state: str) -> int:
        """How many ended in it."""
        return self.states[_AT[state]]

    def plus(self, other: Self) -> Self:
        return type(self)(
            tuple(map(sum, zip(self.states, other.states, strict=True))),
            self.runtime_us + other.runtime_us,
            tuple(map(sum, zip(self.buckets, other.buckets, strict=True))),
            tuple(map(sum, zip(self.sketch, other.sketch, strict=True))),
        )

    @property
    def runs(self) -> int:
        return sum(self.states)

    def quantile_s(self, share: float) -> float | None:
        """The runtime that ``share`` of the runs stayed below, at most :data:`ERROR` off; None without runs.

        Of what is shorter than :data:`SHORTEST_S` or longer than :data:`LONGEST_S`, about that.
        """
        rank = max(share * sum(self.sketch), 1)
        for at, number in enumerate(self.sketch):
            rank -= number
            if number and rank <= 0:
                return SHORTEST_S * STEP**at * (1 - ERROR)
        return None


def deltas_of(runs: Iterable[Run]) -> tuple[int, int]:
    """What is added for these to the row of a total, and to that of a slot."""
    fields, sketch = [0] * _FIELDS, [0] * _SKETCHED
    for run in runs:
        fields[_AT[run.state]] += 1
        if run.runtime_s is not None and run.state in _TIMED:
            fields[_SUM] += int(min(max(run.runtime_s, 0.0), _LONGEST_S) * 1e6)
            fields[_BUCKETS + bisect_left(BOUNDS_S, run.runtime_s)] += 1
            sketch[_place(run.runtime_s)] += 1
    slot = _SLOT.pack(*fields, *sketch)
    return int.from_bytes(slot[:TOTAL_WIDTH], "little"), int.from_bytes(slot, "little")


def _place(runtime_s: float) -> int:
    """Of a runtime in the sketch."""
    if runtime_s <= SHORTEST_S:
        return 0
    return math.ceil(math.log(min(runtime_s, LONGEST_S) / SHORTEST_S) / math.log(STEP))


def unpack(value: bytes) -> Counters:
    """Raises ``FormatError``."""
    if len(value) not in {TOTAL_WIDTH, SLOT_WIDTH}:
        raise FormatError("unreadable counters", length=len(value))
    fields = _SLOT.unpack(value.ljust(SLOT_WIDTH, b"\0"))
    return Counters(fields[:_SUM], fields[_SUM], fields[_BUCKETS:_FIELDS], fields[_FIELDS:])
