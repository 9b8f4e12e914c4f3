"""Failure detector: which of many values have been unchanged for so long that their owners must have failed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Observation:
    value: bytes
    ttl_s: float
    unchanged_s: float = 0.0
    #: Whether it was ever seen to change.
    changed: bool = False


class FailureDetector(Generic[K]):
    """Finds out which of many values have not changed for their time to live, by the caller's own monotonic clock.

    It then suspects that their owners have failed: sessions, by their heartbeats, and the writers of rows that were
    left behind.

    Only time *under observation* counts: between two successful looks at most a quarter of the value's time to live. So
    a store that did not answer for minutes, or an observer that was frozen, makes no session look silent: that takes
    four looks or more, spread over the whole time.
    """

    def __init__(self) -> None:
        self._observations: dict[K, _Observation] = {}
        self._looked = 0.0

    def look(self, values: Iterable[tuple[K, bytes, float]], now: float) -> None:
        """Note the keys, values and times to live (seconds) of one successful look; other keys are forgotten."""
        gap_s = now - self._looked
        seen: dict[K, _Observation] = {}
        for key, value, ttl_s in values:
            before = self._observations.get(key)
            same = before is not None and before.value == value
            unchanged_s = before.unchanged_s + counted_gap(gap_s, ttl_s / 4) if before is not None and same else 0.0
            changed = before is not None and (before.changed or not same)
            seen[key] = _Observation(value, ttl_s, unchanged_s, changed)
        self._observations, self._looked = seen, now

    def forget(self) -> None:
        """Start over: earlier looks no longer count."""
        self._observations.clear()

    def half_silent(self) -> list[tuple[K, float]]:
        """The keys unchanged for half of their time to live, each with that time to live."""
        return [(key, seen.ttl_s) for key, seen in self._observations.items() if seen.unchanged_s >= seen.ttl_s / 2]

    def note_alive(self, key: K) -> None:
        """Note another sign of life from the key's owner, as if the value had just changed."""
        self._observations[key].unchanged_s, self._observations[key].changed = 0.0, True

    def is_alive(self, key: K) -> bool:
        """Whether it was seen to change within a quarter of its time to live."""
        seen = self._observations.get(key)
        return seen is not None and seen.changed and seen.unchanged_s < seen.ttl_s / 4

    def next_silent_s(self) -> float:
        """How soon the next of those not yet silent will have been silent for too long; infinite if there is none."""
        left_s = [
            seen.ttl_s - seen.unchanged_s for seen in self._observations.values() if seen.unchanged_s < seen.ttl_s
        ]
        return min(left_s, default=math.inf)

    def silent(self) -> list[tuple[K, bytes]]:
        """The keys unchanged for at least their time to live, with their values."""
        return [(key, seen.value) for key, seen in self._observations.items() if seen.unchanged_s >= seen.ttl_s]


def counted_gap(gap_s: float, longest_s: float) -> float:
    """How much of the time since the last look counts as observed."""
    return min(gap_s, longest_s)
