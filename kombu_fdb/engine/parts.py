"""Parts: work too large for one transaction or one turn; how large a part is, and where the next begins.

A part has two bounds. A :class:`Budget` limits the caller: when its time or its transactions are used up, the next
caller has its turn. An :class:`AdaptiveBatch` adapts to the store: a transaction's size and age are limited, and how
many messages fit is not known in advance. So the number is found as TCP finds its window (RFC 5681): halved after a
batch that was too large, doubled after one that was not. A wrong batch costs time, never correctness, so it needs no
lock.

A *run* is a series of adjacent rows that a transaction has read, and clears in one call. With FoundationDB each call
costs its client 20 to 40 us of CPU, as it wakes the network thread. Of the six such calls for a message without a key
that is claimed and acknowledged, four cleared adjacent rows, or conflicted on them. The price is a conflict with a
concurrent transaction that adds a row between them. So runs are used where that is rare: publishers write after such
rows, and released messages usually return before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from kombu_fdb.engine.work import Work
from kombu_fdb.errors import CommitUnknown, LimitExceeded, StoreFull, StoreUnavailable, TransactionTooOld
from kombu_fdb.keyspace.layout import STAMP_BYTES, Range
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import KeyValue, Transaction

# -- how large ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class Budget:
    """A number of seconds and of transactions, whichever runs out first. Not thread-safe."""

    def __init__(self, clock: Clock, *, seconds: float = math.inf, transactions: float = math.inf) -> None:
        self._clock = clock
        self._deadline = clock.monotonic() + seconds
        self._left = transactions
        #: Whether anything was taken from it.
        self.is_used = False
        #: Whether the budget was too small, so the work is unfinished.
        self.is_spent = False

    def spend(self) -> bool:
        """Take one transaction. False if none is left, or no time."""
        if self._left < 1 or self._clock.monotonic() >= self._deadline:
            self.is_spent = True
            return False
        self._left -= 1
        self.is_used = True
        return True


class AdaptiveBatch:
    """How many messages one transaction takes: at most ``most``, at least one."""

    def __init__(self, most: int, halved_by: type[Exception] | tuple[type[Exception], ...] = LimitExceeded) -> None:
        """``halved_by``: the errors that a smaller part may avoid."""
        self._most = most
        self._halved_by = halved_by
        self.size = most

    def run(self, part: Callable[[int], T], wanted: float = math.inf) -> T:
        """Run ``part`` with as many messages as fit, ``wanted`` at most. Raises the store's error if even one fails.

        A part that was too large is tried again at once with half as many. One that was too old, or not answered in
        time, has used up the caller's time: the next call takes half as many. A full disk refuses a part that adds to
        the messages it moves. That costs no time, and may hold up messages that would not grow, so such a part is also
        halved at once.
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


# -- where the next part begins ----------------------------------------------------------------------------------------


def rows_from(tr: Transaction, ranges: Sequence[Range], cursor: bytes, most: int) -> tuple[list[KeyValue], bytes]:
    """Up to ``most`` rows of the ranges, which are in key order, and where to continue; b"" at the end.

    ``cursor``: b"" to begin with. Snapshot, in one round trip.
    """
    left = [(max(begin, cursor), end, most) for begin, end in ranges if cursor < end]
    rows = [row for part in tr.get_ranges(left, snapshot=True) for row in part][:most] if left else []
    return rows, rows[-1][0] + b"\x00" if len(rows) == most else b""


#: The first bytes of a stamp: the version of the commit.
VERSION_BYTES = 10
#: The version of a queue that has never had a message: it bounds nothing.
NO_LAST = b"\xff" * VERSION_BYTES


def came_by(last: bytes, key: bytes) -> bool:
    """Whether the message at the key was in its queue at the version ``last``."""
    return key[-STAMP_BYTES:][: len(last)] <= last


def rows_by(work: Work, ranges: Sequence[Range], cursor: bytes, most: int, last: bytes) -> tuple[list[KeyValue], bytes]:
    """The rows of :func:`rows_from` that were there at ``last``; adjacent later rows are skipped together.

    So a walk ends, however fast messages arrive.
    """
    rows, following = rows_from(work.tr, ranges, cursor, most)
    if following and not came_by(last, rows[-1][0]):
        following = rows[-1][0][:-STAMP_BYTES] + b"\xff" * (STAMP_BYTES + 1)
    return [row for row in rows if came_by(last, row[0])], following


def mark(last: bytes, cursor: bytes) -> bytes:
    """What a caller keeps between two parts of a walk that ends at ``last``; b"" at the end."""
    return last[:VERSION_BYTES] + cursor if cursor else b""


def split_mark(mark: bytes) -> tuple[bytes, bytes]:
    """The version at which the walk ends, and the cursor; for b"", both are empty."""
    return mark[:VERSION_BYTES], mark[VERSION_BYTES:]


# -- runs --------------------------------------------------------------------------------------------------------------


def runs_of(rows: Iterable[bytes], taken: Collection[bytes]) -> list[list[bytes]]:
    """The ``taken`` rows as runs; ``rows`` are in the order in which they were read."""
    return [list(run) for is_taken, run in groupby(rows, taken.__contains__) if is_taken]


def take_run(tr: Transaction, run: Sequence[bytes]) -> None:
    """Clear the run. Conflicts with a transaction that writes to one of its rows, or between them."""
    if len(run) == 1:
        tr.add_read_conflict_key(run[0])
    else:
        tr.add_read_conflict_range(run[0], run[-1] + b"\x00")
    tr.clear_run(run)
