"""What wall clocks decide, held against the true time (SKEW). Model: ``docs/guarantees.md``, "What clocks decide".

The skew is how far the processes' wall clocks were ever apart in this run, and jumped, and how long a transaction took
from its first read, where it reads its clock, to its commit. In any time T a key is served ``burst + rate * (T +
skew)`` messages at most; and what waits for a rate is looked at in time, whatever the promoter's
clock says. Times to live, delays and dedup windows are judged message by message (``rights.py``), by the clocks of the
very processes that took part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kit.simulation.ledgers.keys import Key, KeyLedger
from kit.simulation.violation import Violation
from kombu_fdb.model import KeyLimits

#: Buckets count milliseconds, and whole messages.
TOLERANCE = 0.01
#: How much later than it was to wait a key may be looked at: another promoter takes over, and looks once a beat.
LATE_S = 20.0


@dataclass
class Skew:
    """The wall clocks that were seen, as they differ from the true time, and the slowest transaction."""

    lowest_ms: int = 0
    highest_ms: int = 0
    took_s: float = 0.0

    def note(self, offset_ms: int) -> None:
        self.lowest_ms = min(self.lowest_ms, offset_ms)
        self.highest_ms = max(self.highest_ms, offset_ms)

    @property
    def seconds(self) -> float:
        return (self.highest_ms - self.lowest_ms) / 1000 + self.took_s


@dataclass
class _Served:
    """What a key was served by these limits: the most in any time until ``at_s``, less what its rate allows for it."""

    limits: KeyLimits
    level: float
    at_s: float


class ClockLedger:
    """Books in true time."""

    def __init__(self, turns: KeyLedger, skew: Skew) -> None:
        self._turns = turns
        self._skew = skew
        self._served: dict[Key, _Served] = {}
        #: When each entry of a key that waits for its rate was written, and how long it is to wait.
        self._waits: dict[bytes, tuple[float, float]] = {}

    def note(self, changes: Sequence[tuple[bytes, bytes | None, bytes | None]], now_s: float, *, took_s: float) -> None:
        """A commit that the other books have entered. Raises ``Violation``."""
        self._skew.took_s = max(self._skew.took_s, took_s)
        first, end = self._turns.keys.all_unparks
        for key, _, value in changes:
            if first <= key < end:
                self._waits.pop(key, None)
                if value is not None:
                    self._waits[key] = now_s, int.from_bytes(value, "big") / 1000
        self._forget_changed()
        for served, number in Counter(self._turns.claimed).items():
            self._serve(served, number, now_s)

    def _forget_changed(self) -> None:
        """Who gets a rate, and had none for a moment, begins with a full bucket, also if it is the same rate again."""
        for key, served in list(self._served.items()):
            if self._turns.limits_of(*key) != served.limits:
                del self._served[key]

    def _serve(self, key: Key, number: int, now_s: float) -> None:
        limits = self._turns.limits_of(*key)
        before = self._served.get(key)
        if before is None or before.limits != limits:
            before = _Served(limits, 0.0, now_s)
        if limits.rate is None:
            self._served[key] = before
            return
        level = max(0.0, before.level - limits.rate * (now_s - before.at_s)) + number
        self._served[key] = _Served(limits, level, now_s)
        most = limits.burst + limits.rate * self._skew.seconds
        if level > most + TOLERANCE:
            beyond = f"{level:.1f} messages beyond its rate, not {most:.1f}"
            raise Violation("SKEW", f"{key} was served {beyond}; the skew is {self._skew.seconds:.0f} s")

    def check_waits(self, calm_since_s: float, now_s: float) -> None:
        """All has gone well since that moment. Raises ``Violation``."""
        for written_s, wait_s in self._waits.values():
            if now_s >= max(written_s, calm_since_s) + wait_s + LATE_S:
                late_s = now_s - written_s - wait_s
                raise Violation("SKEW", f"a key that waits for its rate is looked at {late_s:.0f} s too late")
