"""Threads and greenlets: start one although a signal handler may interrupt, and tell whether this is an event loop."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable


def start(thread: threading.Thread) -> None:
    """``thread.start()`` that lets an exception of a signal handler through as it is.

    If it strikes when the thread runs already, CPython's clean-up of a thread that could not be started raises a
    ``KeyError`` in its place (``Thread.start`` in ``threading.py``): Celery would not know its soft time limit.
    """
    try:
        thread.start()
    except KeyError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None


def instead_of_threads() -> str:
    """``"gevent"`` or ``"eventlet"`` if it has replaced threads by greenlets, else nothing."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    return "eventlet" if eventlet is not None and eventlet.is_monkey_patched("thread") else ""


def start_native(run: Callable[[], object]) -> None:
    """Run it in a native thread, also where gevent has replaced them. It keeps no process alive."""
    importlib.import_module("gevent.monkey").get_original("_thread", "start_new_thread")(run, ())


def in_hub() -> bool:
    """Whether this is the event loop of gevent or eventlet, which runs signal handlers: what waits here is refused."""
    gevent, eventlet, hubs = (sys.modules.get(name) for name in ("gevent", "eventlet", "eventlet.hubs"))
    if gevent is not None and isinstance(gevent.getcurrent(), gevent.hub.Hub):
        return True
    hub = getattr(getattr(hubs, "_threadlocal", None), "hub", None)  # get_hub would make one for this thread
    return eventlet is not None and hub is not None and hub.greenlet is eventlet.getcurrent()
