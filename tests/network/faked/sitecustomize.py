"""Where libfaketime shows the clock: it refuses sleeps, most of all on a busy machine, and leaves ``select`` alone."""

from __future__ import annotations

import time
from select import select


def sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select([], [], [], seconds)


time.sleep = sleep
