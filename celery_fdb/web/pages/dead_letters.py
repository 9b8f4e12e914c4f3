"""``/dead``: the queues of dead letters, and in one of them what its letters died of."""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.inspection.dead_queues import dead_queues
from celery_fdb.inspection.groups import group
from celery_fdb.inspection.overview import look
from celery_fdb.operations.catalogue import DEEDS
from celery_fdb.web.pages.messages import wanted_of
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

__all__ = ["dead"]

#: Causes that are shown.
MOST_GROUPS = 100


def dead(visit: Visit, broker: Broker) -> Response:
    """``queue``: by their causes; without it, the queues that hold them."""
    if "queue" in visit.request.query_params:
        return _causes(visit, broker, visit.asked("queue"))
    seen = look(broker)
    homes = dead_queues(broker, seen)
    held = [each for each in seen.queues if each.name in homes]
    held.sort(key=lambda each: (-each.ready, each.name))
    return visit.page("dead", queues=[(each, ", ".join(sorted(homes[each.name]))) for each in held])


def _causes(visit: Visit, broker: Broker, name: str) -> Response:
    found = group(broker, name, wanted_of(visit.request.query_params))
    return visit.page(
        "causes",
        queue=name,
        home=name.removesuffix(DEAD_SUFFIX),
        found=found,
        groups=found.groups[:MOST_GROUPS],
        hidden=max(len(found.groups) - MOST_GROUPS, 0),
        deeds=[DEEDS["replay_all"], DEEDS["discard_all"]],
    )
