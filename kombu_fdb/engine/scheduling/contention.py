"""How a consumer keeps out of its rivals' way without talking to them.

A lost race costs more than the whole transaction, so rivals should claim different messages. Each consumer estimates
how many it has from what happens to it: a conflict raises the estimate by half, a claim lowers it by 5 %. It then reads
that many windows from the head, rounded down, and claims one of them at random. With no rival, or after a single lost
race, there is one window: the head, and so strict first-in, first-out order. (Model and numbers: research, "adaptive
slice".)
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Contention"]

MOST_RIVALS = 64.0
GROWTH = 1.5
DECAY = 0.95


class Chance(Protocol):
    def randrange(self, start: int, /) -> int: ...


class Contention:
    """One consumer's estimate for one set of queues. A wrong one costs time, never correctness, so no lock."""

    __slots__ = ("_rivals", "_rng")

    def __init__(self, rng: Chance) -> None:
        self._rng = rng
        self._rivals = 1.0

    def begin(self) -> None:
        """A new claim begins; the last one, however many attempts it took, has ended."""
        self._rivals = max(1.0, self._rivals * DECAY)

    def lost(self) -> None:
        """A rival's claim was faster."""
        self._rivals = min(self._rivals * GROWTH, MOST_RIVALS)

    def next_slice(self) -> int:
        """Which window to claim in this attempt; 0 is the head."""
        slices = int(self._rivals)
        return self._rng.randrange(slices) if slices > 1 else 0
