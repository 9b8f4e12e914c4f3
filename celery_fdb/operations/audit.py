"""The audit: an entry for each action, begun before it and completed after it, however it ends.

So nothing is done without an entry. One that was begun and never completed means that the process died in between.
The caller decides where entries are kept: the Django admin writes its own log, other callers may write a program's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
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


class Audit(Protocol):
    """Where one person's actions are recorded."""

    def begin(self, queue: str, text: str) -> Callable[[str], None]:
        """Before the action; what is returned completes the entry. What this raises, the action is not done."""


@dataclass(frozen=True, slots=True)
class LogAudit:
    """Entries in the log ``celery_fdb.audit``, two lines each, at the level INFO."""

    user: str

    def begin(self, queue: str, text: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            log().info("%s on %s: %s", plain(self.user), plain(queue), plain(text))

        tell(text)
        return tell
