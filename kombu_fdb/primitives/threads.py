"""Starting a thread from code that a signal handler may interrupt."""

from __future__ import annotations

import threading

__all__ = ["start"]


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
