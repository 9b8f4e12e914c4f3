"""A run: what the history stores of one attempt of a task, from its publishing to its end.

Celery's messages do not say when they were published, so the application's own ``AMQP`` class adds a header that does.
A retry copies the headers of the previous attempt over it, so a signal handler, which runs last, sets it again.

Model. A *run* is one attempt in one worker. It is *active* from the moment a process of the pool accepted it, and ends
in one of these states, Celery's names but for the last:

========== ===========================================================================================================
SUCCESS    it returned
FAILURE    it raised, passed its hard time limit, or its process died and it does not run again
RETRY      another run follows: it asked for a retry, or its message was released
REVOKED    revoked or expired; if that was before it began, ``start_ms`` is 0
REJECTED   it raised ``Reject``
IGNORED    it raised ``Ignore``: its result is set elsewhere
LOST       its worker died while it ran; written by another worker (``recorder.py``)
========== ===========================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from celery import states
from celery.app import amqp
from celery.signals import before_task_publish

from kombu_fdb.primitives.clock import Clock

# -- when it was published --------------------------------------------------------------------------------------------


#: The header: milliseconds since 1970 by the publisher's clock. A retry has its own.
PUBLISHED = "fdb_published"
CLOCK = Clock()


class AMQP(amqp.AMQP):
    """The ``AMQP`` of an application that keeps a history (``installing.py``)."""

    def as_task_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Make a task's message, and note the time in it. Celery makes every message of a task here."""
        message = super().as_task_v2(*args, **kwargs)
        message.headers[PUBLISHED] = CLOCK.wall_ms()
        return message


@before_task_publish.connect(weak=False, dispatch_uid=__name__)
def _note(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict) and PUBLISHED in headers:
        headers[PUBLISHED] = CLOCK.wall_ms()


# -- the run -----------------------------------------------------------------------------------------------------------


ACTIVE: str = states.STARTED
LOST = "LOST"
#: The states of runs that have ended, in the order in which they are counted (``layout.py``).
ENDED: tuple[str, ...] = (
    states.SUCCESS,
    states.FAILURE,
    states.RETRY,
    states.REVOKED,
    LOST,
    states.REJECTED,
    states.IGNORED,
)
STATES = (ACTIVE, *ENDED)
#: After a run with one of these states, nothing of its chain follows.
FAILED = frozenset({states.FAILURE, states.REVOKED, states.REJECTED})

#: Characters of a name that are kept.
NAME_LENGTH = 200


class Run(NamedTuple):
    """Moments are by the worker's wall clock, 0 for never. ``runtime_s``: by its monotonic clock, None if unknown.

    ``published_ms``: by its publisher's clock, ``due_ms`` of a task with a delay; 0 if the message does not say.
    ``root`` and ``parent``: task ids, "" for the task itself and for none. ``redeliveries``: how often the message had
    been delivered before. ``followers``: id and name of each task that is published when the run has succeeded: of its
    chain, or the body of its chord.
    """

    id: str
    task: str
    queue: str = ""
    worker: str = ""
    state: str = ACTIVE
    start_ms: int = 0
    end_ms: int = 0
    runtime_s: float | None = None
    args: str = ""
    kwargs: str = ""
    published_ms: int = 0
    due_ms: int = 0
    key: str = ""
    retries: int = 0
    redeliveries: int = 0
    root: str = ""
    parent: str = ""
    error_class: str = ""
    error: str = ""
    traceback: str = ""
    group: str = ""
    followers: Sequence[tuple[str, str]] = ()

    @property
    def attempt(self) -> int:
        """The number of the attempt; 1 for the first."""
        return self.retries + 1

    @property
    def wait_s(self) -> float | None:
        """Seconds from its publish, or due time, until it began; None if unknown, or if it was delivered before."""
        since_ms = max(self.published_ms, self.due_ms)
        known = self.start_ms and since_ms and not self.redeliveries
        return max(self.start_ms - since_ms, 0) / 1000 if known else None


def bounded(value: Any, most: int = NAME_LENGTH, *, end: bool = False) -> str:
    """A text as it may be stored: cut, and without what has no UTF-8 form. An id is also looked for in this form."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    if len(text) > most:
        text = text[-most:] if end else text[:most]
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()[:most]
