"""Live stats: the numbers of the overview, now and over an hour or a day.

The broker's vital signs, from looks at it that are some seconds apart.

All numbers are of the application's queues: not of those that Celery makes for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from celery_fdb.inspection.overview import Overview, QueueView, concerns, rates
from celery_fdb.web.page import NotThere
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics.samples import DAY, HOUR, OTHERS, QueueSample, Sample
from kombu_fdb.model import is_internal
from kombu_fdb.primitives.masking import plain

# -- over time ---------------------------------------------------------------------------------------------------------


def trend(visit: Visit, broker: Broker) -> Response:
    """``span``: hour or day."""
    span = visit.asked("span")
    if span == "hour":
        return JSONResponse({"points": points(broker.inspect.samples("hour"), HOUR.step_s)})
    if span == "day":
        return JSONResponse({"points": points(broker.inspect.samples("day"), DAY.step_s)})
    raise NotThere("There is an hour, and a day.")


def points(samples: Sequence[Sample], step_s: float) -> list[list[float | None]]:
    """Time in seconds, backlog, published and acked per second since the sample before.

    ``step_s``: between two samples. Where more than twice that is between them, nothing is known: a point of None says
    that, and so does the rate of the one behind.
    """
    found: list[list[float | None]] = []
    for before, now in pairwise(samples):
        seconds = (now.taken_ms - before.taken_ms) / 1000
        if seconds <= 0:
            continue
        was, is_ = _shown(before), _shown(now)
        backlog = sum(each.ready + each.delayed for each in is_.values())
        rates: list[float | None] = [_done(was, is_, event) / seconds for event in ("published", "acked")]
        if seconds > 2 * step_s:
            found.append([before.taken_ms / 1000 + 1, None, None, None])
            rates = [None, None]
        found.append([now.taken_ms / 1000, backlog, *rates])
    return found


def _shown(sample: Sample) -> dict[str, QueueSample]:
    """Neither Celery's own queues nor those of dead letters, unless they stand among the others."""
    return {
        name: each for name, each in sample.queues.items() if not is_internal(name) and not name.endswith(DEAD_SUFFIX)
    }


def _done(was: Mapping[str, QueueSample], now: Mapping[str, QueueSample], event: str) -> int:
    """Of queues that stand in both samples. The others are the same ones only if the named are."""
    names = was.keys() & now.keys()
    if was.keys() != now.keys():
        names -= {OTHERS}
    return sum(max(now[name].totals.get(event, 0) - was[name].totals.get(event, 0), 0) for name in names)


# -- now ---------------------------------------------------------------------------------------------------------------


#: Queues that are told of in each event; the others are on their pages.
MOST_QUEUES = 500
#: Points of the charts that are remembered: at two seconds each, five minutes.
REMEMBERED = 150
#: Rates are of the last so many milliseconds, so that they are calm.
WINDOW_MS = 10_000
STATES = ("ready", "delayed", "leased", "dead")


@dataclass(frozen=True, slots=True)
class Moment:
    """What the charts show of one look. Rates per second; None for what one look can't tell."""

    at_ms: int
    backlog: int
    published: float | None
    acked: float | None


class Runs(NamedTuple):
    """Of tasks, ever, as the history counts them."""

    ended: int
    failed: int


class LiveStats:
    """Told of one look after the other. Thread-safe: a look that came too late may overlap with the next one."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: Those of the last :data:`WINDOW_MS`: each holds every queue.
        self._looks: list[tuple[Overview, Runs | None]] = []
        self._moments: deque[Moment] = deque(maxlen=REMEMBERED)

    def told(self, look: Overview, runs: Runs | None = None) -> dict[str, Any]:
        """The event for the pages that are open, ready for JSON. ``runs``: if there is a history."""
        with self._lock:
            return self._told(look, runs)

    def _told(self, look: Overview, runs: Runs | None) -> dict[str, Any]:
        recent = [each for each in self._looks if 0 <= look.taken_ms - each[0].taken_ms <= WINDOW_MS]
        self._looks = [*recent, (look, runs)]
        before, runs_before = self._looks[0]
        speeds = rates(before, look)
        live = look.own_queues
        summary = _summary(look, live, speeds)
        if runs is not None and runs_before is not None:
            ended = runs.ended - runs_before.ended
            summary["failures"] = (runs.failed - runs_before.failed) / ended if ended > 0 else None
        self._moments.append(
            Moment(look.taken_ms, summary["ready"] + summary["delayed"], summary["published"], summary["acked"])
        )
        queues = {each.name: {**counts_of(each), **_speeds(speeds, each.name)} for each in live[:MOST_QUEUES]}
        return {
            "at": look.taken_ms,
            "summary": summary,
            "queues": queues,
            "concerns": [{"text": plain(each.text), "queue": each.queue} for each in concerns(look)],
            "point": _point(self._moments[-1]),
        }

    def points(self) -> list[list[float | None]]:
        """What was so far, for a page that was opened just now: time in seconds, backlog, published, acked."""
        with self._lock:
            return [_point(each) for each in self._moments]


def counts_of(view: QueueView) -> dict[str, Any]:
    facts = {"oldest": view.oldest_age_s, "paused": view.paused, "consumers": view.consumers}
    return {**{state: getattr(view, state) for state in STATES}, **facts}


def _speeds(speeds: dict[str, dict[str, float]], queue: str) -> dict[str, float | None]:
    found = speeds.get(queue)
    return {event: None if found is None else found.get(event, 0.0) for event in ("published", "acked")}


def _summary(look: Overview, live: list[QueueView], speeds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """``wait``: seconds that a message published now would wait, at the present speed (Little's law).

    ``failures``: which share of the messages that ended became dead letters; with a history, of the runs that failed.
    """
    names = {each.name for each in live}
    totals: dict[str, float | None] = {
        event: sum(found.get(event, 0.0) for name, found in speeds.items() if name in names) if speeds else None
        for event in ("published", "claimed", "acked", "dead")
    }
    claimed, dead, acked = totals["claimed"], totals["dead"], totals["acked"]
    ready = look.total("ready")
    ended = None if dead is None or acked is None else dead + acked
    return {
        **{state: look.total(state) for state in STATES},
        **{f"{event}_rate" if event == "dead" else event: value for event, value in totals.items()},
        "oldest": max((each.oldest_age_s for each in live if each.oldest_age_s is not None), default=None),
        "wait": None if not claimed else ready / claimed,
        "failures": None if not ended or dead is None else dead / ended,
        "sessions": sum(each.open for each in look.sessions),
    }


def _point(moment: Moment) -> list[float | None]:
    return [moment.at_ms / 1000, moment.backlog, moment.published, moment.acked]
