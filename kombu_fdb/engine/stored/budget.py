"""Budget: how much of a duty is done at a time, and how many messages a transaction holds.

Two bounds of different kinds. A :class:`Budget` is of the caller: so much time and so many transactions, then it is
the next caller's turn. A :class:`Portion` is of the store: it is not known beforehand how many messages fit into a
transaction, whose size and age are limited, so it is found out, as TCP finds its window (RFC 5681): halved when it was
too much, doubled when it was not. A wrong portion costs time, never correctness, so it has no lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from kombu_fdb.errors import CommitUnknown, LimitExceeded, StoreFull, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock

T = TypeVar("T")


class Budget:
    """So many seconds and transactions, whichever ends first. Not thread-safe."""

    def __init__(self, clock: Clock, *, seconds: float = math.inf, transactions: float = math.inf) -> None:
        self._clock = clock
        self._deadline = clock.monotonic() + seconds
        self._left = transactions
        #: More was wanted than there was: the work is not done.
        self.is_spent = False

    def spend(self) -> bool:
        """Take one transaction. False if there is none left, or no time."""
        if self._left < 1 or self._clock.monotonic() >= self._deadline:
            self.is_spent = True
            return False
        self._left -= 1
        return True


class Portion:
    """How many messages one transaction takes: at most ``most``, at least one."""

    def __init__(self, most: int, halved_by: type[Exception] | tuple[type[Exception], ...] = LimitExceeded) -> None:
        """``halved_by``: what else than the store's limits a message may be in the way with."""
        self._most = most
        self._halved_by = halved_by
        self.size = most

    def run(self, part: Callable[[int], T], wanted: float = math.inf) -> T:
        """``part`` of as many messages as fit, ``wanted`` at most. Raises the store's error if one alone is too much.

        What was too large is tried again at once with half of it. What was too old, or not answered in time, has cost
        its caller that time: it is half as much at the next call. What a full disk refuses for what it adds to the
        messages that it moves has cost none, and may be in the way of messages that nothing is added to.
        """
        while True:
            size = int(min(self.size, wanted))
            try:
                result = part(size)
            except CommitUnknown:
                raise
            except (StoreUnavailable, TransactionTooOld) as error:
                self.size = max(1, size // 2)
                if size <= 1 or not (isinstance(error, StoreFull) and error.moves):
                    raise
            except self._halved_by:
                self.size = max(1, size // 2)
                if size <= 1:
                    raise
            else:
                self.size = min(self._most, max(self.size, size * 2))
                return result
