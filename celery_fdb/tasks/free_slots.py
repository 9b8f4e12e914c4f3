"""A worker claims a task only when a process is free to run it, as ``worker_disable_prefetch`` does on Redis.

Without it a worker claims up to concurrency x ``worker_prefetch_multiplier`` messages ahead; with tasks acknowledged
early it holds as many beside those that run. Long tasks then keep short ones waiting in one worker while another is
idle.

Model. The event loop, which hands messages to the pool, counts at each of its turns how many requests the worker has
(``worker.state.reserved_requests``, the running ones among them) and how many messages it had been handed by then. So
what may be claimed now is: slots - requests then - messages handed out since - messages that wait in the inbox. A turn
follows each end of a task, because its result comes in through the loop. For the prefork pool, whose results come so;
with another pool a warning says that nothing is limited.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state

from kombu_fdb.transport.channel import Channel

__all__ = ["FreeSlots"]

logger = logging.getLogger(__name__)


class FreeSlots(bootsteps.StartStopStep):
    """A step of the worker's consumer; see :func:`celery_fdb.install`."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        self._hub: Any = None
        self._count: Any = None
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        channel = consumer.task_consumer.channel
        if not isinstance(channel, Channel):
            return
        if consumer.hub is None or not consumer.pool.uses_semaphore:
            logger.warning("claim_free_slots_only needs the prefork pool: this pool claims ahead as usual")
            return
        self._hub = consumer.hub
        self._count = partial(_count, consumer, channel)
        self._count()
        self._hub.on_tick.add(self._count)

    def stop(self, consumer: Any) -> None:  # noqa: ARG002 - Celery's signature
        if self._hub is not None:
            self._hub.on_tick.discard(self._count)
            self._hub = None


def _count(consumer: Any, channel: Channel, *_hub: Any) -> None:
    slots = getattr(consumer.controller, "max_concurrency", None) or consumer.pool.num_processes
    channel.limit_slots(slots - len(state.reserved_requests))
