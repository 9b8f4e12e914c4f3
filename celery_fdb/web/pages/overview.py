"""``/``: how the broker is, and what needs somebody's attention."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from celery_fdb.inspection.overview import Overview, look
from celery_fdb.web.live.vitals import Vitals, shown
from celery_fdb.web.pages.sessions import silent
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.primitives.plural import plural

__all__ = ["overview"]

#: Queues on this page; the others are on theirs.
TOP = 12
#: Seconds after which the oldest message of a queue with consumers is a concern.
LATE_S = 300.0


class Concern(NamedTuple):
    """``page`` and ``queue``: where to act."""

    text: str
    page: str
    queue: str | None = None


def overview(visit: Visit, broker: Broker) -> Response:
    seen = look(broker)
    live = shown(seen)
    return visit.page(
        "overview",
        seen=seen,
        summary=Vitals().told(seen)["summary"],
        queues=live[:TOP],
        more=max(len(live) - TOP, 0),
        concerns=concerns(seen),
    )


def concerns(seen: Overview) -> list[Concern]:
    """What a person on call would want to know, the worst first."""
    found = [
        Concern(f"{plural(len(quiet), 'session')} without a heartbeat: {quiet[0].host} {quiet[0].pid}", "sessions")
        for quiet in [silent(seen)]
        if quiet
    ]
    if seen.asides:
        found.append(Concern(f"{plural(len(seen.asides), 'thing')} set aside by duties: run fdb doctor", "sessions"))
    for each in shown(seen):
        if each.dead:
            found.append(Concern(f"{plural(each.dead, 'dead letter')} of {each.name}", "queue", each.name))
        if each.paused and each.ready:
            found.append(Concern(f"{each.name} is paused with {plural(each.ready, 'message')}", "queue", each.name))
        elif each.ready and not each.consumers:
            found.append(Concern(f"nobody consumes {each.name}, where {each.ready:,} wait", "queue", each.name))
        elif each.oldest_age_s is not None and each.oldest_age_s > LATE_S:
            minutes = each.oldest_age_s / 60
            found.append(Concern(f"the oldest message of {each.name} waits for {minutes:,.0f} min", "queue", each.name))
    return found[:TOP]
