"""An hour or a day for the overview's charts, from the samples that the duties of the consumers keep in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from starlette.responses import JSONResponse, Response

from celery_fdb.inspection.overview import is_internal
from celery_fdb.web.page import NotThere
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics.samples import OTHERS, QueueSample, Sample


def trend(visit: Visit, broker: Broker) -> Response:
    """``span``: hour or day."""
    span = visit.asked("span")
    if span == "hour":
        return JSONResponse({"points": points(broker.inspect.samples("hour"))})
    if span == "day":
        return JSONResponse({"points": points(broker.inspect.samples("day"))})
    raise NotThere("There is an hour, and a day.")


def points(samples: Sequence[Sample]) -> list[list[float | None]]:
    """Time in seconds, backlog, published and acked per second since the sample before."""
    found = [_point(before, now) for before, now in pairwise(samples)]
    return [each for each in found if each is not None]


def _point(before: Sample, now: Sample) -> list[float | None] | None:
    seconds = (now.taken_ms - before.taken_ms) / 1000
    if seconds <= 0:
        return None
    was, is_ = _shown(before), _shown(now)
    backlog = sum(each.ready + each.delayed for each in is_.values())
    return [now.taken_ms / 1000, backlog, *(_done(was, is_, event) / seconds for event in ("published", "acked"))]


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
