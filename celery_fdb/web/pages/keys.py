"""``/keys``: a queue's fairness keys by name, all or those that begin with a text."""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.inspection.keys import find_keys
from celery_fdb.operations.actions import offered_on_key
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker


def keys(visit: Visit, broker: Broker) -> Response:
    name, prefix = visit.asked("queue"), visit.asked("prefix")
    after = visit.request.query_params.get("after")
    found = find_keys(broker, name, visit.settings.page_size, prefix=prefix, after=after)
    control = broker.queue(name).control()
    return visit.page("keys", queue=name, prefix=prefix, found=found, control=control, offered_on_key=offered_on_key)
