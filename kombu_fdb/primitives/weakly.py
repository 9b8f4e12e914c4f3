"""Calls that do not keep their object alive: for timers and watches, which outlive the connections they serve.

The method of a collected object has nothing to do any more, so calling it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakMethod

R = TypeVar("R")


def weakly(method: Callable[..., R], *args: Any, otherwise: R) -> Callable[[], R]:
    """``method(*args)`` of a bound method; ``otherwise`` once its object was collected."""
    reference = WeakMethod(method)

    def call() -> R:
        alive = reference()
        return otherwise if alive is None else alive(*args)

    return call
