"""A clock that stands still until a test moves it."""

from __future__ import annotations

from kombu_fdb.primitives.clock import Clock


class ManualClock(Clock):
    """Both clocks in one; ``sleep`` moves it, so no test waits for time."""

    def __init__(self, monotonic: float = 1_000.0, wall_ms: int = 1_767_225_600_000) -> None:
        self._monotonic = monotonic
        self._wall_ms = float(wall_ms)

    def wall_ms(self) -> int:
        return int(self._wall_ms)

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let both clocks run on."""
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as NTP or an operator does; durations don't change."""
        self._wall_ms += seconds * 1000
