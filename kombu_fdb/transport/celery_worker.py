"""What the transport tells, and learns from, the Celery worker that it runs in. Nothing here imports Celery."""

from __future__ import annotations

import sys
import threading
from typing import Any

from kombu_fdb.transport.poison import mend

__all__ = ["end_stopping_worker", "is_stopping", "join_workers"]

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
        signals.task_received.connect(mend, weak=False, dispatch_uid="kombu_fdb.transport.poison")
        signals.worker_ready.connect(read_results_to_the_end, weak=False, dispatch_uid="kombu_fdb.transport.results")


def is_stopping() -> bool:
    """Whether this is a Celery worker that got its SIGTERM: what it still has to tell others waits for no store."""
    state = sys.modules.get("celery.worker.state")
    told = (getattr(state, name, None) for name in ("should_stop", "should_terminate"))
    return any(each is not None and each is not False for each in told)


def end_stopping_worker() -> None:
    """A worker that was told to stop does so as where Celery itself connects: it raises ``WorkerShutdown``.

    Its heartbeat event is repeated for ever, in the event loop, until there is a connection.
    """
    if is_stopping() and threading.current_thread() is threading.main_thread():
        sys.modules["celery.worker.state"].maybe_shutdown()


def read_results_to_the_end(sender: Any, **_: Any) -> None:
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
