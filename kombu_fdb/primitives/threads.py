"""Threads, and what stands in for them: started where a signal handler may interrupt, and told from an event loop."""

from __future__ import annotations

import sys
import threading

__all__ = ["in_hub", "start"]


def start(thread: threading.Thread) -> None:
    """``thread.start()``, out of which an exception of a signal handler comes as itself.

    If it strikes when the thread runs already, CPython's clean-up of a thread that could not be started raises a
    ``KeyError`` in its place (``Thread.start`` in ``threading.py``): Celery would not know its soft time limit.
    """
    try:
        thread.start()
    except KeyError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None


def in_hub() -> bool:
    """Whether this is the event loop of gevent or eventlet, which runs signal handlers: what waits here is refused."""
    gevent, eventlet, hubs = (sys.modules.get(name) for name in ("gevent", "eventlet", "eventlet.hubs"))
    if gevent is not None and isinstance(gevent.getcurrent(), gevent.hub.Hub):
        return True
    hub = getattr(getattr(hubs, "_threadlocal", None), "hub", None)  # get_hub would make one for this thread
    return eventlet is not None and hub is not None and hub.greenlet is eventlet.getcurrent()
