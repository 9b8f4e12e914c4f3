"""Where libfaketime (0.9.10) shows the clock, for what it does wrong.

It refuses sleeps, most of all on a busy machine, and leaves ``select`` alone. Where its clock is ahead it also refuses
timers that are to go off at once (``timerfd_settime``), so the client library's network thread slept until a packet
came: seeds 4020 and 5001 had a child that waited for its answer for three minutes. A library that is bound to its own
dependencies first sees the true clock, and needs no other.
"""

from __future__ import annotations

import ctypes
import os
import time
from select import select


def sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select([], [], [], seconds)


time.sleep = sleep
_, *rest = ctypes.CDLL.__init__.__defaults__ or ()
ctypes.CDLL.__init__.__defaults__ = (os.RTLD_DEEPBIND, *rest)
