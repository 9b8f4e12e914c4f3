"""Whether an error keeps the frames that it went through, with what they hold: a job would stay leased."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable


class _Held:
    """What a caller has in a local."""


def keeps_frames(call: Callable[[], object]) -> bool:
    """Whether the locals of who calls it live on after ``call`` has raised, until Python looks for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _after(call)() is not None
    finally:
        if enabled:
            gc.enable()


def _after(call: Callable[[], object]) -> weakref.ref[_Held]:
    held = _Held()
    try:
        call()
    except Exception:
        return weakref.ref(held)
    raise AssertionError("it raised nothing")
