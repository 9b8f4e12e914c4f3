"""The queues of dead letters: ``<queue>.dead``, and those that dead-letter exchanges lead to."""

from __future__ import annotations

from celery_fdb.inspection.overview import Overview, QueueView
from kombu_fdb import Broker
from kombu_fdb.errors import QueueError


def dead_queues(broker: Broker, seen: Overview) -> dict[str, set[str]]:
    """Each of them, and the queues whose letters it holds."""
    homes = {each.name: {each.dead_of} for each in seen.queues if each.dead_of is not None}
    for each in seen.queues:
        for name in _led_to(broker, each):
            homes.setdefault(name, set()).add(each.name)
    return homes


def _led_to(broker: Broker, view: QueueView) -> list[str]:
    exchange = view.arguments.get("x-dead-letter-exchange")
    routing_key = view.arguments.get("x-dead-letter-routing-key") or view.name
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        return []
    try:
        return broker.topology.route(exchange, routing_key)
    except QueueError:  # it is not there, so the letters are in <queue>.dead
        return []
