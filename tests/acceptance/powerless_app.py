"""The acceptance tests' application in a worker that is bound by file permissions even if root runs it.

Root may open files that no other user may. On Linux that is a capability, which this root drops for itself
and its children.
"""

import ctypes
import os

from acceptance_app import app

__all__ = ["app"]

#: ``linux/capability.h``: version 3 of the call; capabilities 1 and 2 pass over a file's rights.
VERSION = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2


def give_up_overrides():
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    #: Effective, permitted and inheritable, of capabilities 0 to 31 and of those behind them.
    sets = (ctypes.c_uint32 * 6)()
    for call in (libc.capget, libc.capset):
        if call(header, sets):
            raise OSError(ctypes.get_errno(), "capabilities")
        for number in range(3):
            sets[number] &= ~OVERRIDES


if os.getuid() == 0:
    give_up_overrides()
