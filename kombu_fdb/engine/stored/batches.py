"""Batches: how much one transaction, one claim or one step of a duty takes.

Budget: how much of a duty is done at a time, and how many messages a transaction holds.

Two bounds of different kinds. A :class:`Budget` is of the caller: so much time and so many transactions, then it is
the next caller's turn. A :class:`Portion` is of the store: it is not known beforehand how many messages fit into a
transaction, whose size and age are limited, so it is found out, as TCP finds its window (RFC 5681): halved when it was
too much, doubled when it was not. A wrong portion costs time, never correctness, so it has no lock.

Room: what one claim can hold besides a number of messages.

It writes each record into a lease, and reads each payload: a transaction takes 10,000,000 bytes, and 5 seconds. The
first message always has room, so the largest one gets through, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from kombu_fdb.engine.stored.task_index import STAMP_BYTES
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import CommitUnknown, LimitExceeded, StoreFull, StoreUnavailable, TransactionTooOld
from kombu_fdb.keyspace.codec import size_of
from kombu_fdb.keyspace.layout import Range
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import KeyValue

# -- time and messages -------------------------------------------------------------------------------------------------


T = TypeVar("T")


class Budget:
    """So many seconds and transactions, whichever ends first. Not thread-safe."""

    def __init__(self, clock: Clock, *, seconds: float = math.inf, transactions: float = math.inf) -> None:
        self._clock = clock
        self._deadline = clock.monotonic() + seconds
        self._left = transactions
        #: More was wanted than there was: the work is not done.
        self.is_spent = False

    def spend(self) -> bool:
        """Take one transaction. False if there is none left, or no time."""
        if self._left < 1 or self._clock.monotonic() >= self._deadline:
            self.is_spent = True
            return False
        self._left -= 1
        return True


class Portion:
    """How many messages one transaction takes: at most ``most``, at least one."""

    def __init__(self, most: int, halved_by: type[Exception] | tuple[type[Exception], ...] = LimitExceeded) -> None:
        """``halved_by``: what else than the store's limits a message may be in the way with."""
        self._most = most
        self._halved_by = halved_by
        self.size = most

    def run(self, part: Callable[[int], T], wanted: float = math.inf) -> T:
        """``part`` of as many messages as fit, ``wanted`` at most. Raises the store's error if one alone is too much.

        What was too large is tried again at once with half of it. What was too old, or not answered in time, has cost
        its caller that time: it is half as much at the next call. What a full disk refuses for what it adds to the
        messages that it moves has cost none, and may be in the way of messages that nothing is added to.
        """
        while True:
            size = int(min(self.size, wanted))
            try:
                result = part(size)
            except CommitUnknown:
                raise
            except (StoreUnavailable, TransactionTooOld) as error:
                self.size = max(1, size // 2)
                if size <= 1 or not (isinstance(error, StoreFull) and error.moves):
                    raise
            except self._halved_by:
                self.size = max(1, size // 2)
                if size <= 1:
                    raise
            else:
                self.size = min(self._most, max(self.size, size * 2))
                return result


# -- bytes -------------------------------------------------------------------------------------------------------------


RECORD_BYTES = 2_000_000
PAYLOAD_BYTES = 8_000_000


class Room:
    """What is left of it, in one attempt of one claim."""

    __slots__ = ("_most_payloads", "_most_records", "_payloads", "_records", "is_full")

    def __init__(self, records: float = RECORD_BYTES, payloads: float = PAYLOAD_BYTES) -> None:
        """Bytes; who only looks has infinite room."""
        self._most_records = records
        self._most_payloads = payloads
        self._records = 0
        self._payloads = 0
        #: Something did not fit, so nothing behind it is taken either: the order stays.
        self.is_full = False

    def take(self, rows: Sequence[KeyValue]) -> int:
        """How many of these messages fit, from the first on; they take their room."""
        for number, (_key, value) in enumerate(rows):
            if not self.fits(value):
                return number
            self._records += len(value)
            self._payloads += size_of(value)
        return len(rows)

    def fits(self, value: bytes) -> bool:
        """Whether there is room for this record."""
        records, payloads = self._records + len(value), self._payloads + size_of(value)
        heavy = records > self._most_records or payloads > self._most_payloads
        self.is_full = self.is_full or (heavy and self._records > 0)
        return not self.is_full


# -- ranges in parts ---------------------------------------------------------------------------------------------------


def rows_from(work: Work, ranges: Sequence[Range], cursor: bytes, most: int) -> tuple[list[KeyValue], bytes]:
    """Up to ``most`` rows of the ranges, which stand in the order of their keys, and where to go on; b"" at the end.

    ``cursor``: b"" to begin with. Snapshot, in one round trip.
    """
    left = [(max(begin, cursor), end, most) for begin, end in ranges if cursor < end]
    rows = [row for part in work.tr.get_ranges(left, snapshot=True) for row in part][:most] if left else []
    return rows, rows[-1][0] + b"\x00" if len(rows) == most else b""


def came_by(last: bytes, key: bytes) -> bool:
    """Whether the message at the key had come by the last version's stamp, a mark of its queue."""
    return key[-STAMP_BYTES:][: len(last)] <= last
