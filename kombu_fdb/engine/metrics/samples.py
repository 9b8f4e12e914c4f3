"""Samples: what the queues held and did at regular moments, for charts of the last hour, day and week.

Model. A round-robin archive, as RRDtool's (https://oss.oetiker.ch/rrdtool/doc/rrdtool.en.html): each :class:`Series`
has a fixed number of slots, and a moment's slot is the number of its step modulo the number of slots. A new sample
overwrites the oldest one, so the number of rows is bounded and nothing needs trimming. The duties of one process write
them (``process/duties.py``), with blind sets.

What happens at each failure. While no process consumes, no samples are taken, and a chart has a gap. If two processes
both believe that they have the role, they write the same slot, and either value is right. After a clock jump, other
slots are written; a reader ignores samples that are older than the series or ahead of its own clock, and sorts the
others. It skips a row that can't be read. A sample holds running totals (``totals.py``), so a missing sample does not
affect later ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kombu_fdb.engine.metrics.totals import OTHERS
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_json, encode_json

#: How many queues a sample names, the busiest ones. This many of the longest names fit into a row.
QUEUES_SAMPLED = 50
#: How many slots one transaction reads: if all are full, they take half of its limit.
SLOTS_PER_READ = 60
#: The totals that are sampled, in the order of the row.
EVENTS = ("published", "claimed", "acked", "returned", "dead")
_MOST = 2**63


class Series(NamedTuple):
    """``slots`` samples, ``step_s`` seconds apart."""

    step_s: int
    slots: int

    def moment(self, time_ms: int) -> int:
        """The number of the step that contains this time."""
        return time_ms // (self.step_s * 1000)

    @property
    def span_ms(self) -> int:
        return self.step_s * self.slots * 1000


#: For how long there are samples, and the series that is as long as that.
Span = Literal["hour", "day", "week"]
SERIES: Mapping[Span, Series] = {"hour": Series(15, 240), "day": Series(300, 288), "week": Series(1_800, 336)}


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One queue, or the others together. ``oldest_ms``: how long the oldest ready message had waited; None: none.

    ``totals``: all messages so far, by event. They restart when the queue is deleted.
    """

    ready: int
    delayed: int
    leased: int
    oldest_ms: int | None
    totals: Mapping[str, int]

    @property
    def backlog(self) -> int:
        return self.ready + self.delayed + self.leased

    def __add__(self, other: QueueSample) -> QueueSample:
        """The sum of both."""
        ages = [each for each in (self.oldest_ms, other.oldest_ms) if each is not None]
        totals = {event: self.totals.get(event, 0) + other.totals.get(event, 0) for event in EVENTS}
        return QueueSample(
            self.ready + other.ready,
            self.delayed + other.delayed,
            self.leased + other.leased,
            max(ages, default=None),
            totals,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """``taken_ms``: by the wall clock of its process. ``queues``: by name, and :data:`OTHERS` if there are more."""

    taken_ms: int
    queues: Mapping[str, QueueSample]


def busiest(queues: Mapping[str, QueueSample], before: Sample | None) -> dict[str, QueueSample]:
    """The queues with the largest backlog or traffic since ``before``, by name, and the sum of the others."""
    was = {} if before is None else before.queues
    named = queues.keys() - {OTHERS}
    kept = heapq.nlargest(QUEUES_SAMPLED, named, key=lambda name: (_traffic(queues[name], was.get(name)), name))
    found = {name: queues[name] for name in sorted(kept)}
    others = [queue for name, queue in queues.items() if name not in found]
    if others:
        found[OTHERS] = sum(others, start=QueueSample(0, 0, 0, None, {}))
    return found


def _traffic(now: QueueSample, before: QueueSample | None) -> int:
    done = sum(now.totals.values()) - (0 if before is None else sum(before.totals.values()))
    return now.backlog + max(0, done)


def write(work: Work, series: Sequence[Series], sample: Sample) -> None:
    """Write the sample into its slot of each series, replacing an older one."""
    work.tr.fill()
    value = _encode(sample)
    for each in series:
        work.tr.set(work.keys.sample(each.step_s, each.moment(sample.taken_ms) % each.slots), value)


def read_part(work: Work, series: Series, first: int) -> list[Sample]:
    """The samples of :data:`SLOTS_PER_READ` slots from ``first`` on, unordered, without those out of time."""
    whole = work.keys.samples(series.step_s, first, first + SLOTS_PER_READ)
    rows = work.tr.get_range(*whole, snapshot=True)
    found = []
    for (_step_s, slot), value in work.keys.read(rows, int, int):
        sample = _decode(value)
        if sample is not None and series.moment(sample.taken_ms) % series.slots == slot:
            found.append(sample)
    return [each for each in found if 0 <= work.now_ms - each.taken_ms < series.span_ms]


def _encode(sample: Sample) -> bytes:
    return encode_json([sample.taken_ms, {name: _fields(each) for name, each in sample.queues.items()}])


def _fields(queue: QueueSample) -> list[int | None]:
    """Clamped to the readable range: one damaged counter would make the whole sample unreadable."""
    numbers = [queue.ready, queue.delayed, queue.leased, *(queue.totals.get(event, 0) for event in EVENTS)]
    ready, delayed, leased, *totals = (min(max(each, 1 - _MOST), _MOST - 1) for each in numbers)
    return [ready, delayed, leased, queue.oldest_ms, *totals]


def _decode(value: bytes) -> Sample | None:
    """None if celery-fdb can't have written it."""
    try:
        taken_ms, queues = decode_json(value)
        return Sample(_number(taken_ms), {name: _queue(*fields) for name, fields in queues.items()})
    except (FormatError, AttributeError, TypeError, ValueError):
        return None


def _queue(ready: Any, delayed: Any, leased: Any, oldest_ms: Any, *totals: Any) -> QueueSample:
    age_ms = None if oldest_ms is None else _number(oldest_ms)
    numbers = [_number(each) for each in totals]
    return QueueSample(
        _number(ready), _number(delayed), _number(leased), age_ms, dict(zip(EVENTS, numbers, strict=True))
    )


def _number(value: Any) -> int:
    if type(value) is not int or not -_MOST < value < _MOST:
        raise ValueError(value)
    return value
