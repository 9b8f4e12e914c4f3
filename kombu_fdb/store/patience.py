"""How long a process that ends waits for a store that does not answer: altogether, not for each call.

Model. While nothing ends, each call has its own deadline. What ends (a closing connection, a program that was told to
stop) makes many calls, one after the other, and each would wait for its own. So they share :data:`ENDING_S` seconds of
waiting in vain: a call that fails uses up what it took, later ones get the rest, at least :data:`LEAST_S`. A commit
gives everything back: a store that works, however much there is to do, is never cut short; one that only answers reads
(a locked file, a full disk) is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Of waiting in vain, in seconds: twice (a child process, then its parent) is well within the 10 s after which
#: service managers begin to kill.
ENDING_S = 4.0
LEAST_S = 0.05

_ending: ContextVar[bool] = ContextVar("kombu_fdb_ending", default=False)


class Patience:
    """Of one process with one store. Thread-safe: what two threads waste at the same time counts once or twice."""

    def __init__(self) -> None:
        #: Whether the program was told to stop.
        self.stopping: Callable[[], bool] = lambda: False
        #: What may still be wasted.
        self.left_s = ENDING_S

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What this thread does inside belongs to an end."""
        token = _ending.set(True)
        try:
            yield
        finally:
            _ending.reset(token)

    def allow(self, timeout_s: float) -> float:
        """How long a call that wants so many seconds may take."""
        if _ending.get() or self.stopping():
            return min(timeout_s, max(self.left_s, LEAST_S))
        return timeout_s

    def wasted(self, seconds: float) -> None:
        """A call has waited for so long in vain."""
        if _ending.get() or self.stopping():
            self.left_s = max(0.0, self.left_s - seconds)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def answered(self) -> None:
        """The store took a commit."""
        self.left_s = ENDING_S
