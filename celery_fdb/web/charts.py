"""Charts of numbers that workers store: the same for all users, whether or not a page was open at the time.

There are two kinds of series: samples of the queues, which one consuming process takes
(``kombu_fdb/engine/metrics/samples.py``), and, with a history, counters of all runs by slots
(``celery_fdb/history/layout.py``). A time without data is a gap, neither a zero nor a line across. A slot in which no
run ended is a zero only if there is a sample of that time, which shows that a worker was running. If only the end of a
period is known, as in a broker's first minutes, the chart begins there.

A page draws its charts as SVG on request; the cost is bounded by the number of slots.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from celery_fdb.history.layout import Counters
from celery_fdb.history.views.runs import HistoryOff, Slot, look_at_series
from celery_fdb.inspection.overview import Overview
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics.samples import SERIES, QueueSample, Sample, Series, Span
from kombu_fdb.engine.metrics.totals import OTHERS
from kombu_fdb.model import is_internal
from kombu_fdb.primitives.clock import Clock

#: Queues with a line of their own, those with the longest backlogs; the others are added up.
MOST_LINES = 5
#: The size of the drawing, which is stretched to the room there is.
WIDTH, HEIGHT = 600, 100
#: Labels below a chart.
TICKS = 5
#: A slot is drawn once this share of it has passed: a rate over a few seconds says little.
LEAST_OF_A_SLOT = 0.1
#: The shortest axis, in steps of the samples.
LEAST_STEPS = 5
#: The longest axis, in seconds, whose labels show seconds; and the longest whose labels show no days.
SECONDS_UP_TO_S, MINUTES_UP_TO_S = 600, 2 * 86_400

#: Seconds since 1970, and the value then; None for a gap.
Point = tuple[float, float | None]
#: A label, a tone (the CSS class of the line), and the points.
Curve = tuple[str, str, Sequence[Point]]
#: The beginning and the end of a time, and the value in it.
Step = tuple[float, float, float | None]


def charts_of(broker: Broker, asked: str, clock: Clock, seen: Overview, *, queue: str | None = None) -> dict[str, Any]:
    """What the page draws of the last hour, day or week: of all the application's queues and runs, or of one queue.

    ``seen``: the queues as the page shows them; the charts end with these values. Of what it returns, ``ticks``: the
    labelled moments of the time axis; ``trends``: paths by queue, for a table; ``rates``: the rate of each line of
    messages since the last sample, by the line's label.
    """
    span: Span = next((each for each in SERIES if each == asked), "hour")
    series, slots, lacks_history = SERIES[span], [], False
    kept = _samples(broker, span, clock)
    if queue is None:
        try:
            slots = look_at_series(broker, period_s=series.span_ms // 1000, clock=clock)
        except HistoryOff:
            lacks_history = True
    plot, samples = _plot(series, clock, kept, slots), _until_now(kept, seen, clock, series)
    ticks = [plot.begin + at * (plot.end - plot.begin) / (TICKS - 1) for at in range(TICKS)]
    charts = _of_queues(plot, samples) if queue is None else _of_queue(plot, samples, queue)
    if slots:
        charts += _of_runs(plot, slots, [each.taken_ms / 1000 for each in kept])
    return {
        "span": span,
        "charts": charts,
        "rates": {each["label"]: each["latest"] for each in charts[0]["lines"]},
        "ticks": ticks,
        "tick_form": _tick_form(ticks[-1] - ticks[0]),
        "trends": _trends(plot, samples) if queue is None else {},
        "lacks_history": lacks_history,
    }


def _tick_form(seconds: float) -> str:
    """How a moment of an axis of this length is written, so that no two are the same."""
    return "seconds" if seconds <= SECONDS_UP_TO_S else "minute" if seconds <= MINUTES_UP_TO_S else "day"


def trends(broker: Broker, clock: Clock, seen: Overview) -> dict[str, str]:
    """The ready messages of each queue in the last hour, as paths, each to its own scale."""
    kept = _samples(broker, "hour", clock)
    return _trends(_plot(SERIES["hour"], clock, kept), _until_now(kept, seen, clock, SERIES["hour"]))


def _samples(broker: Broker, span: Span, clock: Clock) -> list[Sample]:
    begin_ms = clock.wall_ms() - SERIES[span].span_ms
    return [each for each in broker.inspect.samples(span) if each.taken_ms > begin_ms]


def _until_now(kept: list[Sample], seen: Overview, clock: Clock, series: Series) -> list[Sample]:
    """The samples and, if there are any, one of the present, which replaces a sample that is hardly older."""
    if not kept:
        return []
    now_ms, last, queues = clock.wall_ms(), kept[-1], dict[str, QueueSample]()
    for each in seen.queues:
        name = OTHERS if OTHERS in last.queues and each.name not in last.queues else each.name
        oldest_ms = None if each.oldest_age_s is None else int(each.oldest_age_s * 1000)
        sample = QueueSample(each.ready, each.delayed, each.leased, oldest_ms, each.totals)
        queues[name] = queues[name] + sample if name in queues else sample
    is_of_now = now_ms - last.taken_ms < series.step_s * 500
    return [*(kept[:-1] if is_of_now else kept), Sample(now_ms, queues)]


def _plot(series: Series, clock: Clock, samples: Sequence[Sample], slots: Sequence[Slot] = ()) -> _Plot:
    """The plot of the period, or of its known part: from a slot with runs, or a step before the first sample."""
    end, step_s = clock.wall_ms() / 1000, series.step_s
    first = samples[0].taken_ms / 1000 if samples else end
    ended = [begin for begin, until, counted in slots if counted and until <= first]
    known = min([first - step_s if samples else end, *ended])
    begin = end - series.span_ms // 1000
    is_young = begin < known < end
    return _Plot(min(known, end - LEAST_STEPS * step_s) if is_young else begin, end, 2 * step_s, is_young)


# -- what is known ----------------------------------------------------------------------------------------------------


def _of_queues(plot: _Plot, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    shown = [(each.taken_ms / 1000, _shown(each)) for each in samples]
    names = {name for _, queues in shown for name in queues} - {OTHERS}
    by_peak = sorted(names, key=lambda name: (-max(_ready(queues, {name}) or 0 for _, queues in shown), name))
    lines = [(name or "(no name)", f"q{at}", {name}) for at, name in enumerate(by_peak[:MOST_LINES])]
    rest = {*by_peak[MOST_LINES:], OTHERS}
    if any(rest & queues.keys() for _, queues in shown):
        lines.append(("others", "rest", rest))
    backlog = [(label, tone, [(at, _ready(each, of)) for at, each in shown]) for label, tone, of in lines]
    return [_messages(plot, shown), plot.chart("Backlog by queue, ready", "number", backlog)]


def _of_queue(plot: _Plot, samples: Sequence[Sample], name: str) -> list[dict[str, Any]]:
    """One queue's charts, with gaps where it was not among the busiest queues, which alone are sampled by name."""
    shown = [(each.taken_ms / 1000, {name: each.queues[name]} if name in each.queues else {}) for each in samples]
    oldest: list[Point] = [(at, (each[name].oldest_ms or 0) / 1000 if each else None) for at, each in shown]
    return [
        _messages(plot, shown),
        plot.chart(
            "Held in the queue",
            "number",
            [
                (label, tone, [(at, getattr(each[name], label) if each else None) for at, each in shown])
                for label, tone in (("ready", "q0"), ("leased", "q1"), ("delayed", "q2"))
            ],
        ),
        plot.chart("Age of the oldest that is ready", "took", [("oldest", "q0", oldest)]),
    ]


def _shown(sample: Sample) -> dict[str, QueueSample]:
    """The sampled queues, without Celery's own and those of dead letters (unless these are among the others)."""
    return {
        name: each for name, each in sample.queues.items() if not is_internal(name) and not name.endswith(DEAD_SUFFIX)
    }


def _ready(queues: Mapping[str, QueueSample], names: Collection[str]) -> float | None:
    here = [queues[name].ready for name in names if name in queues]
    return sum(here) if here else None


def _messages(plot: _Plot, shown: Sequence[tuple[float, Mapping[str, QueueSample]]]) -> dict[str, Any]:
    pairs = [each for each in pairwise(shown) if 0 < each[1][0] - each[0][0] <= plot.gap_s]
    lines = [
        _steps(
            label,
            tone,
            [
                (before, at, _done(was, now, event) / (at - before) if was and now else None)
                for (before, was), (at, now) in pairs
            ],
        )
        for label, tone, event in (("published", "in", "published"), ("done", "out", "acked"), ("died", "dead", "dead"))
    ]
    return plot.chart("Messages", "rate", lines)


def _done(was: Mapping[str, QueueSample], now: Mapping[str, QueueSample], event: str) -> int:
    """How many events there were in the queues of both samples.

    The other queues, taken together, are comparable only if both samples name the same queues.
    """
    names = was.keys() & now.keys()
    if was.keys() != now.keys():
        names -= {OTHERS}
    return sum(max(now[name].totals.get(event, 0) - was[name].totals.get(event, 0), 0) for name in names)


def _of_runs(plot: _Plot, slots: Sequence[Slot], sampled: Sequence[float]) -> list[dict[str, Any]]:
    first, following, _ = slots[0]
    length_s = following - first
    #: From when to when each is drawn; in how many seconds it was counted, and what.
    drawn: list[tuple[float, float, float, Counters | None]] = []
    for slot_begin, end, counted in slots:
        begin = max(slot_begin, plot.begin)
        if end - begin < LEAST_OF_A_SLOT * length_s:
            continue
        at = bisect_left(sampled, slot_begin)
        was_there = at < len(sampled) and sampled[at] < slot_begin + length_s
        seconds = end - (begin if plot.is_young else slot_begin)
        drawn.append((begin, end, seconds, counted or (Counters() if was_there else None)))
    plot = plot._replace(gap_s=2 * length_s)

    def curve(label: str, tone: str, value: Callable[[Counters, float], float | None]) -> Curve:
        return _steps(
            label, tone, [(begin, end, counted and value(counted, seconds)) for begin, end, seconds, counted in drawn]
        )

    def percentiles(of: Literal["sketch", "waits"]) -> list[Curve]:
        return [
            curve("median", "q0", lambda counted, _: counted.quantile_s(0.5, of)),
            curve("95 %", "q1", lambda counted, _: counted.quantile_s(0.95, of)),
        ]

    runs = [
        curve("ended", "out", lambda counted, seconds: counted.runs / seconds),
        curve("failed", "dead", lambda counted, seconds: counted.failed / seconds),
    ]
    return [
        plot.chart("Runs of tasks", "rate", runs),
        plot.chart("Latency: from published or due until begun", "took", percentiles("waits")),
        plot.chart("Runtime", "took", percentiles("sketch")),
    ]


def _steps(label: str, tone: str, values: Iterable[Step]) -> Curve:
    """A curve of counts. Each value holds for all of its time, so a single value is a line and not a dot."""
    return label, tone, [(at, value) for begin, end, value in values for at in (begin, end)]


# -- the drawing ------------------------------------------------------------------------------------------------------


class _Plot(NamedTuple):
    """The time axis. No line crosses more than ``gap_s``. ``is_young``: there is no data from before ``begin``."""

    begin: float
    end: float
    gap_s: float
    is_young: bool

    def chart(self, title: str, kind: str, raw: Sequence[Curve]) -> dict[str, Any]:
        """A chart as the page draws it. ``kind``: the format of its values: rate, number or took.

        ``top``: the upper end of its scale. ``latest``: a line's newest value, None if it is old.
        """
        tops = [max((value for _, value in points if value is not None), default=None) for _, _, points in raw]
        top = rounded_up(max((each for each in tops if each is not None), default=0.0))
        lines = [
            {
                "label": label,
                "tone": tone,
                "latest": self._latest(points),
                "most": most,
                "path": self.path(points, top),
            }
            for (label, tone, points), most in zip(raw, tops, strict=True)
        ]
        is_empty = not any(each["path"] for each in lines)
        return {"title": title, "kind": kind, "top": top, "lines": lines, "is_empty": is_empty}

    def _latest(self, points: Sequence[Point]) -> float | None:
        return points[-1][1] if points and self.end - points[-1][0] <= self.gap_s else None

    def path(self, points: Sequence[Point], top: float) -> str:
        """The path of the SVG. A point between two gaps is a line of no length, which round ends make a dot."""
        parts: list[str] = []
        before: float | None = None
        for at, value in points:
            if value is None or at < self.begin:
                before = None
                continue
            x = (at - self.begin) / (self.end - self.begin) * WIDTH
            place = f"{x:.1f} {HEIGHT - min(max(value, 0) / top, 1) * HEIGHT:.1f}"
            joined = before is not None and at - before <= self.gap_s
            parts.append(f"L{place}" if joined else f"M{place}h0")
            before = at
        return "".join(parts)


def rounded_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten, so that half of it is a round number, too; 1 for no value."""
    if not 0 < value < math.inf:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 5) if value <= step * power), 10 * power)


def _trends(plot: _Plot, samples: Sequence[Sample]) -> dict[str, str]:
    found = {}
    for name in {name for each in samples for name in each.queues} - {OTHERS}:
        points: list[Point] = [(each.taken_ms / 1000, _ready(each.queues, {name})) for each in samples]
        found[name] = plot.path(points, max((value or 0 for _, value in points), default=0) or 1)
    return found
