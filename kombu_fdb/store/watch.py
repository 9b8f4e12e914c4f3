"""The watch every store hands out: fires once, from any thread, never after it was cancelled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class OneShotWatch:
    """``release`` frees what the store holds for it, when it is cancelled."""

    __slots__ = ("_callback", "_cancelled", "_fired", "_lock", "_release", "key", "seen")

    def __init__(self, key: bytes, release: Callable[[OneShotWatch], None], seen: bytes | None = None) -> None:
        self.key = key
        #: The key's value as the arming transaction saw it, where the store needs to compare.
        self.seen = seen
        self._release = release
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self._fired = False
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Fired or cancelled: nothing will come of it any more."""
        return self._fired or self._cancelled

    def on_fire(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callback = callback
            due = self._fired and not self._cancelled
        if due:
            self._call(callback)

    def cancel(self) -> None:
        with self._lock:
            done, self._cancelled = self.done, True
            self._callback = None
        if not done:
            self._release(self)

    def fire(self) -> None:
        with self._lock:
            if self.done:
                return
            self._fired = True
            callback = self._callback
        if callback is not None:
            self._call(callback)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # the thread that fires serves other watches too
            logger.exception("the callback of a watch failed")
