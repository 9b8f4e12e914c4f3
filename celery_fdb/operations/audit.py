"""The audit: an entry for each action, begun before it and completed after it, however it ends.

So nothing is done without an entry. One that was begun and never completed means that the process died in between.
Where entries are kept is the caller's: the Django admin writes its own log, everybody else may write a program's.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kombu_fdb.primitives.masking import plain

NAME = "celery_fdb.audit"
#: Of a line on stderr.
LINE = "%(asctime)s %(name)s: %(message)s"


def log() -> logging.Logger:
    """The log, which is heard: on stderr, unless the program sends it elsewhere or has set a level of its own for it.

    Python shows warnings only where no program has set logging up, and so do Django and most servers.
    """
    found = logging.getLogger(NAME)
    if not found.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LINE))
        found.addHandler(handler)
    if found.level == logging.NOTSET and not found.isEnabledFor(logging.INFO):
        found.setLevel(logging.INFO)
    return found


class Entry(Protocol):
    """One action's."""

    def complete(self, text: str) -> None:
        """Tell how it ended."""


class Audit(Protocol):
    """Where one person's actions are told of."""

    def begin(self, queue: str, text: str) -> Entry:
        """Before the action. What this raises, the action is not done."""


class LogAudit:
    """Entries in the log ``celery_fdb.audit``, two lines each, at the level INFO."""

    def __init__(self, user: str) -> None:
        self.user = user

    def begin(self, queue: str, text: str) -> Entry:
        return _Lines(self.user, queue).begun(text)


class _Lines:
    def __init__(self, user: str, queue: str) -> None:
        self.user = user
        self.queue = queue

    def begun(self, text: str) -> _Lines:
        self.complete(text)
        return self

    def complete(self, text: str) -> None:
        log().info("%s on %s: %s", plain(self.user), plain(self.queue), plain(text))
