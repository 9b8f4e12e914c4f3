"""The audit: an entry for each action, begun before it and completed after it, however it ends.

So nothing is done without an entry. One that was begun and never completed means that the process died in between.
Where entries are kept is the caller's: the Django admin writes its own log, everybody else may write a program's.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kombu_fdb.primitives.masking import plain

logger = logging.getLogger("celery_fdb.audit")


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
        logger.info("%s on %s: %s", plain(self.user), plain(self.queue), plain(text))
