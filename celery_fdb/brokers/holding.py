"""One open broker for a part of a process: opened when it is first asked for, and anew after a failure or a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kombu_fdb import Broker


class Holding:
    """Thread-safe. ``open_`` opens the broker; what it raises comes out of :meth:`broker`."""

    def __init__(self, open_: Callable[[], Broker]) -> None:
        self._open = open_
        self._lock = threading.Lock()
        #: By process: a forked child opens its own, and leaves its parent's alone.
        self._held: dict[int, Broker] = {}

    def broker(self) -> Broker:
        """The open broker. Raises ``OptionError`` or a ``StoreError``."""
        with self._lock:
            found = self._held.get(os.getpid())
            if found is None:
                found = self._held[os.getpid()] = self._open()
            return found

    def forget(self) -> Broker | None:
        """After an error: the next call opens it anew. The old one closes when it is unused."""
        with self._lock:
            return self._held.pop(os.getpid(), None)

    def close(self) -> None:
        """The same, and it closes now: no other thread uses it."""
        held = self.forget()
        if held is not None:
            held.close()
