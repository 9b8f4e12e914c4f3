"""What one transaction does to the counters and whom it wakes, collected and written once at its end.

Guarantee COUNTS: every verb that moves a message says so here, in the transaction that moves it.
"""

from __future__ import annotations

from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.store.protocol import Transaction

__all__ = ["DELAYED", "LEASED", "READY", "Tally"]

READY = "ready"
DELAYED = "delayed"
LEASED = "leased"


class Tally:
    """Counts and bells of one transaction; also numbers its new messages."""

    __slots__ = ("_alarm", "_bells", "_counts", "_stamped")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._bells: set[str] = set()
        self._alarm = False
        self._stamped = 0

    def change(self, queue: str, state: str, by: int) -> None:
        """``by`` more (or fewer) messages of ``queue`` are in ``state``."""
        key = (queue, state)
        self._counts[key] = self._counts.get(key, 0) + by

    def ready(self, queue: str, by: int = 1) -> None:
        """Messages became ready: count them and wake who waits for them."""
        self.change(queue, READY, by)
        self._bells.add(queue)

    def delayed(self, queue: str) -> None:
        """A message was delayed: count it and let the promoter look at its due time."""
        self.change(queue, DELAYED, 1)
        self._alarm = True

    def next_user_version(self) -> bytes:
        """The 2 bytes that order this transaction's new messages."""
        number = self._stamped
        self._stamped += 1
        return Keyspace.user_version(number)

    def write(self, tr: Transaction, keys: Keyspace) -> None:
        """Put it all into the transaction: one atomic add per changed counter, one blind set per bell."""
        for (queue, state), by in self._counts.items():
            if by:
                tr.add(keys.count(queue, state), by)
        for queue in self._bells:
            tr.set_versionstamped_value(keys.bell(queue))
        if self._alarm:
            tr.set_versionstamped_value(keys.alarm)
