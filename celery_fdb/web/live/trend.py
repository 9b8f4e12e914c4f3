"""An hour or a day for the overview's charts, from the samples that the duties of the consumers keep in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from starlette.responses import JSONResponse, Response

from celery_fdb.web.page import NotThere
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics.samples import DAY, HOUR, OTHERS, QueueSample, Sample
from kombu_fdb.model import is_internal


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
