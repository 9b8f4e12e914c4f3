"""``/``, ``/queues``, ``/queue`` and ``/keys``: the broker's overview, all queues, one queue, and its keys by name."""

from __future__ import annotations

from itertools import islice

from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_fdb.inspection.overview import find_keys, look, look_at_keys
from celery_fdb.operations.action import Action
from celery_fdb.operations.catalogue import named
from celery_fdb.web.charts import charts_of, trends
from celery_fdb.web.live import LiveStats
from celery_fdb.web.request_context import MOST_SHOWN, RequestContext
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.model import KeyLimits
from kombu_fdb.primitives.masking import masked

#: The most queues on the first page; all are on the page of queues.
TOP = 12
#: The most keys on a queue's own page; all are on the page of keys.
TOP_KEYS = 20
#: The events that are counted in a queue, in words.
TOTALS = {
    "published": "published",
    "claimed": "delivered to workers",
    "acked": "done",
    "returned": "given back by workers",
    "dead": "became dead letters",
    "lost": "taken back from dead workers",
    "late": "settled too late",
    "conflicts": "claims that another was faster than",
}


def overview(context: RequestContext, broker: Broker) -> Response:
    """The first page: the numbers of the broker, and what needs attention."""
    seen = look(broker)
    queues, told = seen.own_queues, LiveStats().told(seen)
    return context.page(
        "overview",
        seen=seen,
        drawn=charts_of(broker, context.asked("span"), context.settings.clock, seen),
        summary=told["summary"],
        queues=queues[:TOP],
        more=max(len(queues) - TOP, 0),
        alerts=told["alerts"],
    )


def queues(context: RequestContext, broker: Broker) -> Response:
    """All queues; Celery's own, for replies and remote control, only on request."""
    seen = look(broker)
    shows_all = bool(context.asked("all"))
    name = context.asked("q").casefold()
    views = seen.live_queues if shows_all else seen.own_queues
    views = [each for each in views if name in each.name.casefold()]
    hidden = 0 if shows_all else sum(each.is_internal for each in seen.live_queues)
    shown = views[:MOST_SHOWN]
    return context.page(
        "queues",
        queues=shown,
        total=len(views),
        hidden=hidden,
        shows_all=shows_all,
        q=context.asked("q"),
        trends=trends(broker, context.settings.clock, seen),
    )


def queue(context: RequestContext, broker: Broker) -> Response:
    name = context.asked("queue")
    try:
        seen = look(broker, queues=[name])
    except QueueNotFound:
        raise HTTPException(404, f"There is no queue “{name}”. It may have been deleted.") from None
    (view,) = seen.queues
    keys = look_at_keys(broker, name, top=TOP_KEYS + 1)
    return context.page(
        "queue",
        queue=view,
        drawn=charts_of(broker, context.asked("span"), context.settings.clock, seen, queue=name),
        arguments=sorted((each, masked(each, value)) for each, value in view.arguments.items()),
        control=broker.queue(name).control(),
        keys=dict(islice(keys.items(), TOP_KEYS)),
        actions=named(
            "resume" if view.paused else "pause", "limit", "unlimit", "publish", "move", "purge", "delete_queue"
        ),
        totals=[(label, view.totals[event]) for event, label in TOTALS.items() if event in view.totals],
        has_more_keys=len(keys) > TOP_KEYS,
        dead_queue=name + DEAD_SUFFIX if view.dead_of is None else None,
    )


def keys(context: RequestContext, broker: Broker) -> Response:
    name, prefix = context.asked("queue"), context.asked("prefix")
    after = context.request.query_params.get("after")
    found, following = find_keys(broker, name, context.settings.page_size, prefix=prefix, after=after)
    control = broker.queue(name).control()
    return context.page(
        "keys",
        queue=name,
        prefix=prefix,
        keys=found,
        following=following,
        control=control,
        offered_on_key=_offered_on_key,
    )


def _offered_on_key(limits: KeyLimits | None) -> list[Action]:
    if limits is not None and limits.paused:
        return named("resume", "limit", "move")
    return named("pause", "limit", *(["unlimit"] if limits is not None else []), "move")
