"""Counts what each transaction costs, so that a test can assert it exactly.

Wrap any database: ``counted = CountingDatabase(database)``. ``counted.transactions`` lists the cost of each
transaction begun since the last :meth:`CountingDatabase.reset`, in that order; ``counted.total()`` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from kombu_fdb.errors import Conflict
from kombu_fdb.store.protocol import Database, KeyValue, Transaction, Watch
from kombu_fdb.testing.clock import ManualClock


@dataclass(slots=True)
class Cost:
    """What one transaction did.

    ``round_trips`` counts FoundationDB's: the read version (1, with the first read; a blind write needs one
    ten times a second), each ``get``, ``get_many`` and ``get_range`` (1), and the commit of a writing transaction (1).
    """

    point_reads: int = 0
    range_reads: int = 0
    rows: int = 0
    sets: int = 0
    clears: int = 0
    clear_ranges: int = 0
    atomics: int = 0
    stamps: int = 0
    conflict_keys: int = 0
    conflict_ranges: int = 0
    watches: int = 0
    round_trips: int = 0
    commits: int = 0
    bytes_written: int = 0
    conflicts: int = 0

    @property
    def writes(self) -> int:
        return self.sets + self.clears + self.clear_ranges + self.atomics + self.stamps

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class CountingDatabase:
    """A database that does what ``inner`` does, and counts."""

    def __init__(self, inner: Database, *, clock: ManualClock | None = None, trip_s: float = 0.0) -> None:
        """``trip_s``: what each round trip takes, by that clock."""
        self.inner = inner
        self.clock = clock
        self.trip_s = trip_s
        self.commit_may_be_unknown = inner.commit_may_be_unknown
        self.writers_take_turns = inner.writers_take_turns
        self.transactions: list[Cost] = []

    def begin(self, *, timeout_s: float, read_only: bool = False) -> CountingTransaction:
        cost = Cost()
        self.transactions.append(cost)
        return CountingTransaction(self.inner.begin(timeout_s=timeout_s, read_only=read_only), cost, self.travel)

    def travel(self, round_trips: int) -> None:
        if self.clock is not None:
            self.clock.advance(round_trips * self.trip_s)

    def close(self) -> None:
        self.inner.close()

    @property
    def last(self) -> Cost:
        return self.transactions[-1]

    def total(self) -> Cost:
        return sum(self.transactions, Cost())

    def worst(self) -> Cost:
        """Of each number the largest in any one transaction."""
        return Cost(*map(max, zip(*map(astuple, self.transactions), strict=True)))

    def reset(self) -> None:
        self.transactions.clear()


class CountingTransaction:
    def __init__(self, inner: Transaction, cost: Cost, travel: Callable[[int], None]) -> None:
        self._inner = inner
        self._cost = cost
        self._travel = travel

    @property
    def read_only(self) -> bool:
        return self._inner.read_only

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        self._trip()
        self._cost.point_reads += 1
        self._cost.conflict_keys += not snapshot
        return self._inner.get(key, snapshot=snapshot)

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        return self.get_together(keys, (), snapshot=snapshot)[0]

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        self._trip()
        rows = self._inner.get_range(begin, end, limit=limit, reverse=reverse, snapshot=snapshot)
        self._cost.range_reads += 1
        self._cost.rows += len(rows)
        self._cost.conflict_ranges += not snapshot
        return rows

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        return self.get_together((), ranges, snapshot=snapshot)[1]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        self._trip()
        values, answers = self._inner.get_together(keys, ranges, snapshot=snapshot)
        self._cost.point_reads += len(keys)
        self._cost.range_reads += len(ranges)
        self._cost.rows += sum(map(len, answers))
        if not snapshot:
            self._cost.conflict_keys += len(keys)
            self._cost.conflict_ranges += len(ranges)
        return values, answers

    def set(self, key: bytes, value: bytes) -> None:
        self._cost.sets += 1
        self._cost.bytes_written += len(key) + len(value)
        self._inner.set(key, value)

    def clear(self, key: bytes) -> None:
        self._cost.clears += 1
        self._inner.clear(key)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        self._cost.clear_ranges += 1
        self._inner.clear_range(begin, end)

    def clear_run(self, keys: Sequence[bytes]) -> None:
        if len(keys) == 1:
            self._cost.clears += 1
        else:
            self._cost.clear_ranges += 1
        self._inner.clear_run(keys)

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        self._cost.atomics += 1
        self._cost.bytes_written += len(key) + width
        self._inner.add(key, delta, width=width)

    def byte_max(self, key: bytes, value: bytes) -> None:
        self._cost.atomics += 1
        self._cost.bytes_written += len(key) + len(value)
        self._inner.byte_max(key, value)

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        self._cost.stamps += 1
        self._cost.bytes_written += len(prefix) + 10 + len(suffix) + len(value)
        self._inner.set_versionstamped_key(prefix, suffix, value)

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        self._cost.stamps += 1
        self._cost.bytes_written += len(key) + len(prefix) + 10 + len(suffix)
        self._inner.set_versionstamped_value(key, prefix, suffix)

    def fill(self, *, moving: bool = False) -> None:
        self._inner.fill(moving=moving)

    def add_read_conflict_key(self, key: bytes) -> None:
        self._cost.conflict_keys += 1
        self._inner.add_read_conflict_key(key)

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        self._cost.conflict_ranges += 1
        self._inner.add_read_conflict_range(begin, end)

    def watch(self, key: bytes) -> Watch:
        self._cost.watches += 1
        return self._inner.watch(key)

    def commit(self) -> None:
        if not self._inner.read_only:
            self._trip(first=1)
            self._cost.commits += 1
        try:
            self._inner.commit()
        except Conflict:
            self._cost.conflicts += 1
            raise

    def cancel(self) -> None:
        self._inner.cancel()

    def _trip(self, first: int = 2) -> None:
        """The first read follows the read version."""
        round_trips = 1 if self._cost.round_trips else first
        self._cost.round_trips += round_trips
        self._travel(round_trips)


def cost(counted: CountingDatabase, verb: Callable[[], object]) -> Cost:
    """What the verb costs, all its transactions together."""
    counted.reset()
    verb()
    return counted.total()
