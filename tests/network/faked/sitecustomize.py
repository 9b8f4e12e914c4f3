"""Where libfaketime shows the clock: it refuses a sleep that is over when it begins, on a busy machine any."""

from __future__ import annotations

import errno
import time

_sleep = time.sleep


def sleep(seconds: float) -> None:
    try:
        _sleep(seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


time.sleep = sleep
