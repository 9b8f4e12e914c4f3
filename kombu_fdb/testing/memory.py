"""FoundationDB's transactions in memory: the same conflicts, stamps, limits and failures, deterministic and fast.

Model. The committed state is a :class:`~kombu_fdb.testing.memory_transaction.VersionedMap` and a log of what each
commit wrote. A transaction takes its read version at its first read, keeps its writes to itself, and remembers what it
read serializably. Its commit

1. fails with ``Conflict`` if a commit after its read version wrote into what it read (blind writers never fail);
2. replays its mutations in order on the newest state under a new version, which is also its versionstamp;
3. fires the watches of the keys it changed.

A commit whose caller gave up waiting (``Fault.COMMIT_LATE``) does all of that up to
:data:`~kombu_fdb.testing.faults.LATEST_LANDING_S` later, against the read version it was sent with, or never: other
transactions begin and commit in between. Some land where it hurts most: behind the reads of the next transaction, and
before its commit.

Versions run at a million per second of the clock, whatever the load, as FoundationDB's do. Nothing here starts a
thread: watches are fired by the thread that commits. With a ``ManualClock`` and a seeded ``rng`` a run can be repeated
exactly. A lock guards the state all the same, for the tests that do use threads.
"""

from __future__ import annotations

import math
import random
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock, SystemClock
from kombu_fdb.store.protocol import KeyValue, OneShotWatch
from kombu_fdb.testing.faults import Fault, Faults, Interrupted
from kombu_fdb.testing.memory_transaction import (
    MemoryTransaction,
    Mutation,
    Range,
    Reads,
    VersionedMap,
    apply_atomic,
    pack_stamp,
)

__all__ = ["Change", "MemoryDatabase"]

VERSIONS_PER_S = 1_000_000

#: Key, old and new value.
Change = tuple[bytes, bytes | None, bytes | None]


@dataclass(eq=False, slots=True)
class _Late:
    """A commit that was sent, and not answered."""

    lands_s: float
    transaction: MemoryTransaction
    #: Or between the look and the commit of another, if that comes first.
    after_a_look: bool


@dataclass(slots=True)
class _Committed:
    """What one commit wrote."""

    version: int
    keys: list[bytes]
    ranges: list[Range]

    def touches(self, read: Reads) -> bool:
        return (
            any(read.has_key(key) for key in self.keys)
            or any(_any_key_in(read.sorted_keys(), begin, end) for begin, end in self.ranges)
            or any(b < end and begin < e for begin, end in self.ranges for b, e in read.ranges)
            or any(_any_key_in(self.keys, begin, end) for begin, end in read.ranges)
        )


def _any_key_in(keys: list[bytes], begin: bytes, end: bytes) -> bool:
    return bisect_left(keys, begin) < bisect_left(keys, end)


class MemoryDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in this process's memory; see the module's text."""

    commit_may_be_unknown = True
    writers_take_turns = False

    def __init__(
        self, *, clock: Clock | None = None, rng: random.Random | None = None, faults: Faults | None = None
    ) -> None:
        self.clock = clock or SystemClock()
        self.faults = faults or Faults()
        #: Called before each writing commit, so that a simulation can let others run exactly there.
        self.before_commit: Callable[[], None] | None = None
        #: Told of each commit when it happens, late ones too: the transaction, and what it changed.
        self.after_commit: Callable[[MemoryTransaction, list[Change]], None] | None = None
        #: Called after each writing commit that is answered, before its caller hears of it.
        self.after_answer: Callable[[], None] | None = None
        self._rng = rng or random.Random(0)
        self.lock = threading.RLock()
        self.map = VersionedMap()
        self._log: list[_Committed] = []
        self.version = 1
        self._ticked = self.clock.monotonic()
        self._readers: dict[int, MemoryTransaction] = {}
        self._watches: dict[bytes, list[OneShotWatch]] = {}
        self._late: list[_Late] = []
        self._closed = False
        self.recovered = 0

    def begin(self, *, timeout_s: float, read_only: bool = False) -> MemoryTransaction:
        if self._closed:
            raise StoreUnavailable("the database was closed")
        return MemoryTransaction(self, timeout_s, read_only)

    def close(self) -> None:
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    def items(self, begin: bytes = b"", end: bytes = b"\xff") -> list[KeyValue]:
        """Everything committed, without transaction, faults or cost; for invariants."""
        with self.lock:
            return list(self.map.scan(begin, end, self.version, reverse=False))

    def land_late_commits(self, *, before_s: float = math.inf) -> None:
        """Let the late commits happen that land before that moment of the clock; by default all that ever will."""
        with self.lock:
            self._land([late for late in self._late if late.lands_s <= before_s])

    def _land(self, due: list[_Late]) -> None:
        for late in sorted(due, key=lambda late: late.lands_s):
            self._try_apply(late.transaction)
            self._late.remove(late)  # not before: as long as it waits, the log is kept for it

    def recover(self, versions: int = 100_000_000) -> None:
        """The cluster gets a new transaction system.

        Versions jump by ``versions``, transactions that have read are too old, and every watch fires, as
        FoundationDB's may.
        """
        with self.lock:
            self.land_late_commits()
            self.version += versions
            self.recovered = self.version
            fired = [watch for _, watches in sorted(self._watches.items()) for watch in watches]
            self._watches.clear()
        for watch in fired:
            watch.fire()

    @property
    def open_transactions(self) -> int:
        """How many have read and were neither committed nor cancelled; for tests that look for leaks."""
        with self.lock:
            return len(self._readers)

    @property
    def armed_watches(self) -> int:
        """How many watches wait; for tests that look for leaks."""
        with self.lock:
            return sum(len(watches) for watches in self._watches.values())

    # What transactions call, under the lock.

    def take_read_version(self, transaction: MemoryTransaction) -> int:
        self._land_due()
        self._readers[id(transaction)] = transaction
        return self.version

    def _land_due(self) -> None:
        if self._late:
            self.land_late_commits(before_s=self.clock.monotonic())

    def release(self, transaction: MemoryTransaction) -> None:
        self._readers.pop(id(transaction), None)

    def commit(self, transaction: MemoryTransaction) -> list[OneShotWatch]:
        """Commit and return the watches to fire, which the caller does without the lock."""
        self._land_due()
        if transaction.read_version is not None:
            self._land([late for late in self._late if late.after_a_look])
        fault = self.faults.next_at_commit(can_conflict=bool(transaction.reads))
        match fault:
            case None:
                return self._apply(transaction)
            case Fault.CONFLICT:
                raise Conflict
            case Fault.TOO_OLD:
                raise TransactionTooOld
            case Fault.UNAVAILABLE:
                raise StoreUnavailable("a fault was injected")
            case Fault.ANSWER_LOST_APPLIED:
                transaction.lost_watches = self._apply(transaction)
                raise CommitUnknown
            case Fault.INTERRUPTED:
                transaction.lost_watches = self._apply(transaction)
                raise Interrupted
            case Fault.COMMIT_LATE:
                self._send_late(transaction)
                raise CommitUnknown(in_flight=True)
            case _:
                raise CommitUnknown

    def _send_late(self, transaction: MemoryTransaction) -> None:
        """Its read version is of now, if it has none yet: it was sent."""
        landing = self.faults.landing()
        if landing is None:
            return
        if transaction.reads and transaction.read_version is None:
            transaction.read_version = self.version
        lands_s = self.clock.monotonic() + landing.lateness_s
        if not transaction.is_too_old(lands_s):
            self._late.append(_Late(lands_s, transaction, landing.after_a_look))

    def _try_apply(self, transaction: MemoryTransaction) -> None:
        try:
            fired = self._apply(transaction)
        except StoreError:  # too late
            return
        for watch in fired:
            watch.fire()

    def _apply(self, transaction: MemoryTransaction) -> list[OneShotWatch]:
        self.release(transaction)
        self._check_conflicts(transaction)
        self.version = self._next_version()
        changes, ranges = self._replay(transaction.pending.log)
        keys = [key for key, _, _ in changes]
        self._log.append(_Committed(self.version, sorted(keys), ranges))
        self._trim()
        if self.after_commit is not None:
            self.after_commit(transaction, changes)
        return self._due_watches(keys)

    def _check_conflicts(self, transaction: MemoryTransaction) -> None:
        version = transaction.read_version
        if version is None or not transaction.reads:
            return
        if version < self.recovered:
            raise TransactionTooOld
        first = bisect_right(self._log, version, key=lambda committed: committed.version)
        if any(committed.touches(transaction.reads) for committed in islice(self._log, first, None)):
            raise Conflict

    def _next_version(self) -> int:
        now = self.clock.monotonic()
        passed, self._ticked = now - self._ticked, now
        return self.version + max(1, int(passed * VERSIONS_PER_S))

    def _replay(self, log: list[Mutation]) -> tuple[list[Change], list[Range]]:
        state: dict[bytes, bytes | None] = {}
        ranges: list[Range] = []
        stamp = pack_stamp(self.version)
        for mutation in log:
            self._mutate(mutation, state, ranges, stamp)
        oldest = self._oldest_read()
        changes = [(key, self.map.at(key, self.version), value) for key, value in state.items()]
        for key, _, value in changes:
            self.map.put(key, self.version, value, oldest)
        return changes, ranges

    def _mutate(self, mutation: Mutation, state: dict[bytes, bytes | None], ranges: list[Range], stamp: bytes) -> None:
        key, value, suffix = mutation.key, mutation.value, mutation.suffix
        match mutation.kind:
            case "set":
                state[key] = value
            case "clear":
                state[key] = None
            case "clear_range":
                own = [k for k in state if key <= k < value]
                state.update(dict.fromkeys([*self.map.keys(key, value), *own]))
                ranges.append((key, value))
            case "stamp_key":
                state[key + stamp + suffix] = value
            case "stamp_value":
                state[key] = value + stamp + suffix
            case kind:
                old = state[key] if key in state else self.map.at(key, self.version)
                state[key] = apply_atomic(kind, old, value)

    def _oldest_read(self) -> int:
        """The oldest version that is still read, or can conflict with a commit that is still to land."""
        readers = [*self._readers.values(), *(late.transaction for late in self._late)]
        versions = (reader.read_version for reader in readers)
        return min((version for version in versions if version is not None), default=self.version)

    def _trim(self) -> None:
        oldest = self._oldest_read()
        self.map.bury(oldest)
        if len(self._log) > 64 and self._log[len(self._log) // 2].version <= oldest:
            del self._log[: bisect_right(self._log, oldest, key=lambda committed: committed.version)]

    def _due_watches(self, keys: list[bytes]) -> list[OneShotWatch]:
        if not self._watches:
            return []
        changed = sorted(key for key in keys if key in self._watches)
        due = [watch for key in changed for watch in self._watches.pop(key)]
        due = [watch for watch in due if not self.faults.loses_watch()]
        if self._watches and self.faults.fires_for_nothing():
            due += self._watches.pop(self._rng.choice(sorted(self._watches)))
        return due

    def arm(self, watch: OneShotWatch, read_version: int) -> bool:
        """False when the key has been changed since; the watch must fire at once then."""
        if watch.done:
            return True
        first = bisect_right(self._log, read_version, key=lambda committed: committed.version)
        alone = Reads(keys={watch.key})
        if any(committed.touches(alone) for committed in islice(self._log, first, None)):
            return False
        self._watches.setdefault(watch.key, []).append(watch)
        return True

    def disarm(self, watch: OneShotWatch) -> None:
        with self.lock:
            waiting = self._watches.get(watch.key, [])
            if watch in waiting:
                waiting.remove(watch)
            if not waiting:
                self._watches.pop(watch.key, None)
