"""``/dead`` and ``/causes``: the queues of dead letters, and what the letters died of, in one of them or in all."""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.inspection.dead_letters import Groups, dead_queues, group, group_all
from celery_fdb.inspection.overview import look
from celery_fdb.operations.actions import offered_on_cause
from celery_fdb.web.pages.messages import wanted_of
from celery_fdb.web.visit import MOST_SHOWN, Visit
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

#: Causes that are shown.
MOST_GROUPS = 100


def dead(visit: Visit, broker: Broker) -> Response:
    """``queue``: by their causes; without it, the queues that hold them."""
    if "queue" in visit.request.query_params:
        name = visit.asked("queue")
        found = group(broker, name, wanted_of(visit))
        return _causes(visit, found, queue=name, home=name.removesuffix(DEAD_SUFFIX))
    seen = look(broker)
    homes = dead_queues(broker, seen)
    held = [each for each in seen.queues if each.name in homes]
    held.sort(key=lambda each: (-each.ready, each.name))
    shown = [(each, ", ".join(sorted(homes[each.name]))) for each in held[:MOST_SHOWN]]
    return visit.page("dead", queues=shown, total=len(held))


def causes(visit: Visit, broker: Broker) -> Response:
    """Of all queues of dead letters, the longest first."""
    seen = look(broker)
    homes = dead_queues(broker, seen)
    held = sorted((each for each in seen.queues if each.name in homes), key=lambda each: (-each.ready, each.name))
    found = group_all(broker, [each.name for each in held if each.ready], wanted_of(visit))
    return _causes(visit, found, queue=None, home="all queues")


def _causes(visit: Visit, found: Groups, *, queue: str | None, home: str) -> Response:
    """``queue``: None for all."""
    return visit.page(
        "causes",
        queue=queue,
        home=home,
        found=found,
        groups=found.groups[:MOST_GROUPS],
        hidden=max(len(found.groups) - MOST_GROUPS, 0),
        actions=offered_on_cause(everywhere=queue is None),
    )
