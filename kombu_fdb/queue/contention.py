"""How a consumer keeps out of its rivals' way without talking to them.

A lost race costs more than the whole transaction, so rivals should claim different messages. Each consumer estimates
how many it has from what happens to it: a conflict doubles the estimate, a success lowers it by 5 %. It then reads
``slices`` windows from the head and claims one of them at random. With no rival there is one slice: the head, and so
strict first-in, first-out order. (Model and numbers: research, "adaptive slice".)
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Contention"]

MOST_RIVALS = 64.0
DECAY = 0.95


class Chance(Protocol):
    def randrange(self, start: int, /) -> int: ...


class Contention:
    """One consumer's estimate for one set of queues. A wrong one costs time, never correctness, so no lock."""

    __slots__ = ("_attempts", "_rivals", "_rng")

    def __init__(self, rng: Chance) -> None:
        self._rng = rng
        self._rivals = 1.0
        self._attempts = 0

    def begin(self) -> None:
        """A new claim begins; the last one, however many attempts it took, has ended."""
        self._attempts = 0
        self._rivals = max(1.0, self._rivals * DECAY)

    def next_slice(self) -> int:
        """Which window to claim in this attempt; 0 is the head. Every attempt after the first is a lost race."""
        if self._attempts:
            self._rivals = min(self._rivals * 2, MOST_RIVALS)
        self._attempts += 1
        slices = int(self._rivals)
        return self._rng.randrange(slices) if slices > 1 else 0
