"""What all threads of a process need and one does for all, such as opening the store.

Guarantee BOUNDED: while the store does not answer, threads that come at the same time wait for the same attempt and
share its error; they don't wait one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kombu_fdb.errors import ClientUnusable, StoreError, StoreUnavailable
from kombu_fdb.primitives.locks import FairLock, Turn, surely

T = TypeVar("T")


class Attempt(Generic[T]):
    """Thread-safe, also against exceptions out of signal handlers."""

    def __init__(self, found: Callable[[], T | None]) -> None:
        """``found``: what an earlier attempt has left, while it can be used."""
        self._found = found
        self._lock = FairLock()
        self._failed: StoreError | None = None

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """What is there, or ``work()``, which leaves it for the others.

        Raises what ``work`` raises. A thread that waited raises ``StoreUnavailable`` if the attempt that it waited for
        has failed, or has not ended within ``timeout_s`` seconds.
        """
        before, turn = self._failed, Turn()
        return surely(lambda: self._in_turn(work, turn, timeout_s, before), lambda: self._lock.release(turn))

    def _in_turn(self, work: Callable[[], T], turn: Turn, timeout_s: float, before: StoreError | None) -> T:
        if not self._lock.acquire(turn, timeout_s):
            raise StoreUnavailable("the store has not answered another thread of this process yet")
        found = self._found()
        if found is not None:
            return found
        if self._failed is not None and self._failed is not before:
            kind = ClientUnusable if isinstance(self._failed, ClientUnusable) else StoreUnavailable
            raise kind(self._failed.text, **self._failed.attributes) from self._failed
        try:
            return work()
        except StoreError as error:
            self._failed = error
            raise
