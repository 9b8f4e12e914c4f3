"""Whether the program is there to take what is claimed for a connection.

Model. A connection is *attended*

* while a drain runs, its callbacks included;
* for ``patience_s`` seconds after one, as the next one follows soon in a program that consumes;
* while an event loop has it registered.

Before the first of these, and later whenever none holds, it is *left alone*: a program that sits at a prompt, or has
forgotten its consumer. No time is watched for that: a turn that wants to claim asks.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from weakref import WeakSet


class Drain:
    """One that runs. Only the draining thread refers to it, so it ends even if an exception skips ``end``."""


class Attendance:
    """Of one connection. Thread-safe without a lock: an exception may end a drain at any point."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = monotonic) -> None:
        #: An event loop has it registered.
        self.looped = False
        self._patience_s = patience_s
        self._clock = clock
        self._drains: WeakSet[Drain] = WeakSet()
        self._until = float("-inf")

    @property
    def given(self) -> bool:
        return self.looped or len(self._drains) > 0 or self._clock() < self._until

    def begin(self, drain: Drain) -> None:
        self._drains.add(drain)

    def end(self, drain: Drain) -> None:
        """Harmless if it has not begun."""
        self._until = self._clock() + self._patience_s
        self._drains.discard(drain)
