"""``/``: how the broker is, and what needs attention."""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.inspection.overview import concerns, look
from celery_fdb.web.charts import charts_of
from celery_fdb.web.live import LiveStats
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

#: Queues on this page; the others are on theirs.
TOP = 12


def overview(visit: Visit, broker: Broker) -> Response:
    seen = look(broker)
    queues = seen.own_queues
    return visit.page(
        "overview",
        seen=seen,
        drawn=charts_of(broker, visit.asked("span"), visit.settings.clock, seen),
        summary=LiveStats().told(seen)["summary"],
        queues=queues[:TOP],
        more=max(len(queues) - TOP, 0),
        concerns=concerns(seen),
    )
