"""How fast dead letters are replayed, and when it is over."""

from __future__ import annotations

from collections.abc import Callable

from kombu_fdb.engine.dead_letters import LETTERS_PER_TRANSACTION
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import MOST, SLOWEST, is_number, shown

__all__ = ["Pace", "Stop", "never"]

#: A paced replay moves what is due in so many seconds at a time, and looks at ``stop`` so often.
PART_S = 0.5

Stop = Callable[[], bool]


def never() -> bool:
    """Says that it is not to stop."""
    return False


class Pace:
    """At most ``rate`` messages a second on the caller's clock; None for as fast as it goes."""

    def __init__(self, clock: Clock, rate: float | None) -> None:
        """Raises ``InvalidArgument``."""
        if rate is not None and not is_number(rate, SLOWEST, MOST):
            raise InvalidArgument("a rate is more than 0 messages a second", rate=shown(rate))
        self._clock = clock
        self._rate = rate
        self._begin = clock.monotonic()

    @property
    def part(self) -> int:
        """How many may go at once."""
        if self._rate is None:
            return LETTERS_PER_TRANSACTION
        return max(1, min(LETTERS_PER_TRANSACTION, int(self._rate * PART_S)))

    def wait(self, moved: int, stop: Stop) -> None:
        """Until the next one may follow the first ``moved``, or until told to stop."""
        if self._rate is None:
            return
        due = self._begin + moved / self._rate
        while (left := due - self._clock.monotonic()) > 0 and not stop():
            self._clock.sleep(min(left, PART_S))
