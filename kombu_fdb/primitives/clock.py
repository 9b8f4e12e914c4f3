"""Time, identifiers and chance as arguments, so that a simulation can supply them.

The two clocks must not be mixed. :meth:`Clock.wall_ms` returns the time of day and decides only when a delayed message
becomes due. :meth:`Clock.monotonic` measures this process's own durations and decides whether a session is dead. No
decision about safety ever compares two machines' clocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from random import Random

#: Returns 16 bytes, different each time.
IdSource = Callable[[], bytes]


class Clock:
    """This machine's time, and a way to wait; a subclass may simulate both."""

    #: Seconds from an arbitrary start; never goes back. The function itself, without a wrapper, as it is called a dozen
    #: times for each message.
    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        """Milliseconds since 1970 UTC; may jump in both directions."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


#: The number of steps in an interval.
STEPS = 20


def in_step(wall_ms: int, rng: Random, interval_s: float) -> float:
    """A random pause, no longer than the interval, that ends on a step of the wall clock.

    So the periodic transactions of a fleet's processes reach the store together, and a cluster handles many
    simultaneous transactions at little more than the cost of one. A wrong clock only loses that saving.
    """
    pause_s = rng.uniform(0.9, 1.0) * interval_s
    return pause_s - (wall_ms / 1000 + pause_s) % (interval_s / STEPS)


#: 16 random bytes.
random_id: IdSource = partial(os.urandom, 16)
