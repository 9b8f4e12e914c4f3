"""A Celery worker that was told to stop waits for no store."""

from __future__ import annotations

import sys
import threading


def is_stopping() -> bool:
    """Whether this is a Celery worker that got its SIGTERM: what it still has to tell others waits for no store."""
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return False
    stop, terminate = getattr(state, "should_stop", None), getattr(state, "should_terminate", None)
    return (stop is not None and stop is not False) or (terminate is not None and terminate is not False)


def end_stopping_worker() -> None:
    """A worker that was told to stop does so as where Celery itself connects: it raises ``WorkerShutdown``.

    Its heartbeat event is repeated for ever, in the event loop, until there is a connection.
    """
    if is_stopping() and threading.current_thread() is threading.main_thread():
        sys.modules["celery.worker.state"].maybe_shutdown()
