"""A worker claims a task only when a process is free to run it, as ``worker_disable_prefetch`` does on Redis.

Without it, a worker claims up to concurrency x ``worker_prefetch_multiplier`` messages ahead; with tasks acknowledged
early, it holds that many in addition to those that run. Short tasks then wait behind long ones in one worker while
another worker is idle.

Model. The event loop, which hands messages to the pool, counts at each of its turns how many requests the worker has
(``worker.state.reserved_requests``, and ``active_requests``, as after a lost connection the former lack some that run)
and how many messages it had been handed by then. So what may be claimed now is: slots - requests then - messages handed
out since - messages that wait in the inbox. A turn follows each end of a task, because its result comes in through the
loop. For the prefork pool, whose results come so; with another pool a warning says that nothing is limited.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state

from kombu_fdb.transport.channel import Channel

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
    channel.limit_slots(_slots(consumer) - len(state.reserved_requests.union(state.active_requests)))


def _slots(consumer: Any) -> int:
    """The most processes that the pool may have: remote control changes the autoscaler's number, or the pool's."""
    autoscaler = getattr(consumer.controller, "autoscaler", None)
    slots: int = consumer.pool.num_processes if autoscaler is None else autoscaler.max_concurrency
    return slots
