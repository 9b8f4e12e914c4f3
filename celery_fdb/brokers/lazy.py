"""One broker per address and process, opened when first asked for; and the clocks of those who ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from statistics import median_low

from kombu_fdb import Broker
from kombu_fdb.model import SessionFacts


def common_ms(sessions: Iterable[SessionFacts], own_ms: int) -> int:
    """By the clocks of most workers, as of their last heartbeats; ``own_ms`` if there are none.

    For deleting what others have written: one process whose clock is ahead deletes nothing too early. Of two that
    differ, the one behind is believed.
    """
    return median_low([each.beat_ms for each in sessions if each.open and each.beat_ms] or [own_ms])


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
