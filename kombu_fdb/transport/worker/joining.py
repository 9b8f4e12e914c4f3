"""What the transport tells the Celery worker that it runs in, where its own checks would miss something."""

from __future__ import annotations

import sys
from typing import Any

from kombu_fdb.transport.worker import options
from kombu_fdb.transport.worker.requests import guard_pool, receive

#: Stands for the requests under way while a pool ends: it is empty when its children have ended.
UNTIL_THE_CHILDREN_END = {"until": "the children have ended"}


def join_workers(driver_type: str) -> None:
    """Let Celery's mingle and gossip know that fanout and events work here; and see to what it does not check.

    They ask for the driver type before they look at their set, and construct a transport for it: this one.
    """
    for module, step in (("mingle", "Mingle"), ("gossip", "Gossip")):
        loaded = sys.modules.get(f"celery.worker.consumer.{module}")
        if loaded is not None:
            getattr(loaded, step).compatible_transports |= {driver_type}
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.task_received.connect(receive, weak=False, dispatch_uid="kombu_fdb.transport.worker.requests")
        signals.worker_ready.connect(see_to_the_worker, weak=False, dispatch_uid="kombu_fdb.transport.worker")


def see_to_the_worker(sender: Any, **_: Any) -> None:
    """The worker is about to consume."""
    guard_pool(sender.pool)
    read_results_to_the_end(sender)
    options.warn(sender.app)


def read_results_to_the_end(sender: Any) -> None:
    """Let a prefork pool that ends read what its children say for as long as one of them lives.

    Celery (5.7, ``asynpool.ResultHandler.on_stop_not_started``) stops reading once it knows of no request under way,
    and it forgets those whose start it has not read yet. A parent that waited for its store has not. Billiard's child
    then waits 30 seconds for its result to be read (``billiard.pool.Worker._ensure_messages_consumed``), and the
    parent for the child: as long as Kubernetes waits before it kills.
    """
    handler = getattr(getattr(sender.pool, "_pool", None), "_result_handler", None)
    if handler is not None and hasattr(
        handler, "fileno_to_outq"
    ):  # billiard's own handler, of a pool with threads, reads in another way
        handler.cache = UNTIL_THE_CHILDREN_END
