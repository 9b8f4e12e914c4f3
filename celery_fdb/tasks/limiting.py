"""A task's limits, written into the store for each key it is published to, once per process and key.

What was written is remembered, so a publish to a known key costs nothing more. A key whose limits in the store are
those of the task already costs one read; a new one, or a changed number, one write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task

from kombu_fdb import Broker, Queue
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.errors import amqp_errors

#: Keys remembered at most; a forgotten one is read again.
MOST_KEYS = 10_000

_known: dict[tuple[str, str, str], Mapping[str, Any]] = {}


def limit_keys(
    task: Task, key: str, limits: Mapping[str, Any], args: Any, kwargs: Any, options: dict[str, Any]
) -> None:
    """See that ``limits`` hold for ``key`` in every queue the message will reach. Raises as publishing does."""
    app = task.app
    route = app.amqp.router.route(dict(options), task.name, args or (), kwargs or {}, task)
    exchange, routing_key = _destination(app, route)
    place = f"{app.conf.broker_write_url}"
    if not exchange and _known.get((place, routing_key, key)) == limits:
        return
    with app.producer_or_acquire(options.get("producer")) as producer:
        channel = producer.channel
        if not isinstance(channel, Channel):
            return  # another broker has no limits of keys
        with amqp_errors("basic_publish"):
            broker = Broker.of(channel.client)
            for queue in broker.topology.route(exchange, routing_key) if exchange else [routing_key]:
                if _known.get((place, queue, key)) != limits:
                    _limit(broker.queue(queue), key, limits)
                    _remember((place, queue, key), limits)


def _destination(app: Any, route: Mapping[str, Any]) -> tuple[str, str]:
    """Exchange and routing key, as Celery's ``send_task_message`` finds them."""
    queue: Any = route.get("queue")
    exchange, routing_key = route.get("exchange"), route.get("routing_key")
    if queue is None and exchange is None:
        queue = app.amqp.default_queue
    if isinstance(queue, str):
        queue = app.amqp.queues[queue]
    kind = "direct" if queue is None or queue.exchange is None else queue.exchange.type
    if queue is not None and kind == "direct" and not (exchange and routing_key):
        return "", queue.name
    name = getattr(exchange, "name", exchange)
    return name or queue.exchange.name, routing_key or queue.routing_key or app.conf.task_default_routing_key


def _limit(queue: Queue, key: str, limits: Mapping[str, Any]) -> None:
    held = queue.limits(key)
    if any(getattr(held, name) != value for name, value in limits.items()):
        queue.limit(key, **limits)


def _remember(place: tuple[str, str, str], limits: Mapping[str, Any]) -> None:
    if len(_known) >= MOST_KEYS:
        _known.clear()
    _known[place] = limits
