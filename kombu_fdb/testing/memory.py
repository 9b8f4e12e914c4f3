"""FoundationDB's transactions in memory: the same conflicts, stamps, limits and failures, deterministic and fast.

Model. The committed state is a :class:`~kombu_fdb.testing.mvcc.VersionedMap` and a log of what each commit wrote. A
transaction takes its read version at its first read, keeps its writes to itself, and remembers what it read
serializably. Its commit

1. fails with ``Conflict`` if a commit after its read version wrote into what it read (blind writers never fail);
2. replays its mutations in order on the newest state under a new version, which is also its versionstamp;
3. fires the watches of the keys it changed.

Versions run at a million per second of the clock, whatever the load, as FoundationDB's do. Nothing here starts a
thread: watches are fired by the thread that commits. With a ``ManualClock`` and a seeded ``rng`` a run can be repeated
exactly. A lock guards the state all the same, for the tests that do use threads.
"""

from __future__ import annotations

import heapq
import random
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kombu_fdb.clock import Clock, SystemClock
from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.store.limits import TRANSACTION_AGE_S, check_key, check_size, check_value
from kombu_fdb.store.protocol import KeyValue
from kombu_fdb.testing.faults import Fault, Faults
from kombu_fdb.testing.mvcc import Mutation, Pending, Range, VersionedMap, apply_atomic, pack_stamp

__all__ = ["MemoryDatabase", "MemoryTransaction", "MemoryWatch"]

VERSIONS_PER_S = 1_000_000
#: What FoundationDB counts for the structures around one mutation and one conflict range.
MUTATION_BYTES = 40
RANGE_BYTES = 24


@dataclass(slots=True)
class _Committed:
    """What one commit wrote."""

    version: int
    keys: list[bytes]
    ranges: list[Range]

    def touches(self, read: _Reads) -> bool:
        return (
            any(read.has_key(key) for key in self.keys)
            or any(_any_key_in(read.sorted_keys(), begin, end) for begin, end in self.ranges)
            or any(b < end and begin < e for begin, end in self.ranges for b, e in read.ranges)
            or any(_any_key_in(self.keys, begin, end) for begin, end in read.ranges)
        )


@dataclass(slots=True)
class _Reads:
    """What a transaction read serializably."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[Range] = field(default_factory=list)

    def has_key(self, key: bytes) -> bool:
        return key in self.keys

    def sorted_keys(self) -> list[bytes]:
        return sorted(self.keys)

    def __bool__(self) -> bool:
        return bool(self.keys or self.ranges)


def _any_key_in(keys: list[bytes], begin: bytes, end: bytes) -> bool:
    return bisect_left(keys, begin) < bisect_left(keys, end)


class MemoryDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in this process's memory; see the module's text."""

    commit_may_be_unknown = True

    def __init__(
        self, *, clock: Clock | None = None, rng: random.Random | None = None, faults: Faults | None = None
    ) -> None:
        self.clock = clock or SystemClock()
        self.faults = faults or Faults()
        #: Called before each writing commit, so that a simulation can let others run exactly there.
        self.before_commit: Callable[[], None] | None = None
        self._rng = rng or random.Random(0)
        self._lock = threading.RLock()
        self._map = VersionedMap()
        self._log: list[_Committed] = []
        self._version = 1
        self._ticked = self.clock.monotonic()
        self._readers: dict[int, MemoryTransaction] = {}
        self._watches: dict[bytes, list[MemoryWatch]] = {}
        self._late: list[MemoryTransaction] = []
        self._closed = False

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
        with self._lock:
            return list(self._map.scan(begin, end, self._version, reverse=False))

    def land_late_commits(self) -> None:
        """Settle the commits whose callers gave up waiting (``Fault.COMMIT_LATE``): each happens, or never will."""
        with self._lock:
            late, self._late = self._late, []
            for transaction in late:
                if self.faults.coin():
                    self._try_apply(transaction)

    @property
    def armed_watches(self) -> int:
        """How many watches wait; for tests that look for leaks."""
        with self._lock:
            return sum(len(watches) for watches in self._watches.values())

    # What transactions call, under the lock.

    def _take_read_version(self, transaction: MemoryTransaction) -> int:
        self.land_late_commits()
        self._readers[id(transaction)] = transaction
        return self._version

    def _release(self, transaction: MemoryTransaction) -> None:
        self._readers.pop(id(transaction), None)

    def _commit(self, transaction: MemoryTransaction) -> list[MemoryWatch]:
        """Commit and return the watches to fire, which the caller does without the lock."""
        self.land_late_commits()
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
            case Fault.COMMIT_LATE:
                self._late.append(transaction)
                raise CommitUnknown(in_flight=True)
            case _:
                raise CommitUnknown

    def _try_apply(self, transaction: MemoryTransaction) -> None:
        try:
            fired = self._apply(transaction)
        except StoreError:
            return
        for watch in fired:
            watch.fire()

    def _apply(self, transaction: MemoryTransaction) -> list[MemoryWatch]:
        self._release(transaction)
        self._check_conflicts(transaction)
        self._version = self._next_version()
        keys, ranges = self._replay(transaction.pending.log)
        self._log.append(_Committed(self._version, sorted(keys), ranges))
        self._trim()
        return self._due_watches(keys)

    def _check_conflicts(self, transaction: MemoryTransaction) -> None:
        version = transaction.read_version
        if version is None or not transaction.reads:
            return
        first = bisect_right(self._log, version, key=lambda committed: committed.version)
        if any(committed.touches(transaction.reads) for committed in islice(self._log, first, None)):
            raise Conflict

    def _next_version(self) -> int:
        now = self.clock.monotonic()
        passed, self._ticked = now - self._ticked, now
        return self._version + max(1, int(passed * VERSIONS_PER_S))

    def _replay(self, log: list[Mutation]) -> tuple[set[bytes], list[Range]]:
        state: dict[bytes, bytes | None] = {}
        ranges: list[Range] = []
        stamp = pack_stamp(self._version)
        for mutation in log:
            self._mutate(mutation, state, ranges, stamp)
        oldest = self._oldest_read()
        for key, value in state.items():
            self._map.put(key, self._version, value, oldest)
        return set(state), ranges

    def _mutate(
        self, mutation: Mutation, state: dict[bytes, bytes | None], ranges: list[Range], stamp: bytes
    ) -> None:
        key, value, suffix = mutation.key, mutation.value, mutation.suffix
        match mutation.kind:
            case "set":
                state[key] = value
            case "clear":
                state[key] = None
            case "clear_range":
                own = [k for k in state if key <= k < value]
                state.update(dict.fromkeys([*self._map.keys(key, value), *own]))
                ranges.append((key, value))
            case "stamp_key":
                state[key + stamp + suffix] = value
            case "stamp_value":
                state[key] = value + stamp + suffix
            case kind:
                old = state[key] if key in state else self._map.at(key, self._version)
                state[key] = apply_atomic(kind, old, value)

    def _oldest_read(self) -> int:
        versions = (reader.read_version for reader in self._readers.values())
        return min((version for version in versions if version is not None), default=self._version)

    def _trim(self) -> None:
        oldest = self._oldest_read()
        self._map.bury(oldest)
        if len(self._log) > 64 and self._log[len(self._log) // 2].version <= oldest:
            del self._log[: bisect_right(self._log, oldest, key=lambda committed: committed.version)]

    def _due_watches(self, keys: set[bytes]) -> list[MemoryWatch]:
        if not self._watches:
            return []
        changed = sorted(key for key in keys if key in self._watches)
        due = [watch for key in changed for watch in self._watches.pop(key)]
        due = [watch for watch in due if not self.faults.loses_watch()]
        if self._watches and self.faults.fires_for_nothing():
            due += self._watches.pop(self._rng.choice(sorted(self._watches)))
        return due

    def _arm(self, watch: MemoryWatch, read_version: int) -> bool:
        """False when the key has been changed since; the watch must fire at once then."""
        first = bisect_right(self._log, read_version, key=lambda committed: committed.version)
        alone = _Reads(keys={watch.key})
        if any(committed.touches(alone) for committed in islice(self._log, first, None)):
            return False
        self._watches.setdefault(watch.key, []).append(watch)
        return True

    def _disarm(self, watch: MemoryWatch) -> None:
        with self._lock:
            waiting = self._watches.get(watch.key, [])
            if watch in waiting:
                waiting.remove(watch)
            if not waiting:
                self._watches.pop(watch.key, None)


class MemoryTransaction:
    """One transaction; ended by ``commit`` or ``cancel``."""

    def __init__(self, database: MemoryDatabase, timeout_s: float, read_only: bool) -> None:
        self._db = database
        self._deadline = database.clock.monotonic() + timeout_s
        self._born: float | None = None
        self._declared_read_only = read_only
        self._size = 0
        self._ended = False
        self._watches: list[MemoryWatch] = []
        self.read_version: int | None = None
        self.reads = _Reads()
        self.pending = Pending()
        #: Fired although the committer never got its answer.
        self.lost_watches: list[MemoryWatch] = []

    @property
    def read_only(self) -> bool:
        return not self.pending.log

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        with self._db._lock:
            self._before_read()
            return self._get(key, snapshot)

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        with self._db._lock:
            self._before_read()
            return [self._get(key, snapshot) for key in keys]

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        with self._db._lock:
            self._before_read()
            if begin >= end:
                return []
            rows = self._merged(begin, end, limit, reverse)
            if limit and len(rows) >= limit:  # only what was read may conflict
                last = rows[-1][0]
                begin, end = (last, end) if reverse else (begin, last + b"\0")
            self._refuse_unreadable(begin, end)
            if not snapshot:
                self.reads.ranges += self.pending.unknown_parts(begin, end)
            return rows

    def _get(self, key: bytes, snapshot: bool) -> bytes | None:
        self._refuse_unreadable(key, key + b"\0")
        op = self.pending.op(key)
        if op is not None and op.independent:
            return op.over(None)
        if not snapshot:
            self.reads.keys.add(key)
        stored = self._stored(key)
        return stored if op is None else op.over(stored)

    def _stored(self, key: bytes) -> bytes | None:
        assert self.read_version is not None
        return self._db._map.at(key, self.read_version)

    def _merged(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[KeyValue]:
        assert self.read_version is not None
        stored = self._db._map.scan(begin, end, self.read_version, reverse=reverse)
        if not self.pending.log:
            return list(islice(stored, limit or None))
        own = [(key, self._own_value(key)) for key in self.pending.keys(begin, end)]
        others = ((k, v) for k, v in stored if self.pending.op(k) is None)
        mine = ((k, v) for k, v in (reversed(own) if reverse else own) if v is not None)
        return list(islice(heapq.merge(others, mine, reverse=reverse), limit or None))

    def _own_value(self, key: bytes) -> bytes | None:
        op = self.pending.op(key)
        assert op is not None
        if op.unreadable:
            return b"?"  # present; whoever reads as far as this is refused
        return op.over(None if op.independent else self._stored(key))

    def _refuse_unreadable(self, begin: bytes, end: bytes) -> None:
        pending = self.pending
        stamped = any(b < end and begin < e for b, e in pending.unreadable)
        if stamped or any(op.unreadable for op in map(pending.op, pending.keys(begin, end)) if op):
            raise StoreError("read what depends on this transaction's own versionstamp", key=begin)

    def _before_read(self) -> None:
        self._check_alive()
        match self._db.faults.next_at_read():
            case Fault.TOO_OLD:
                raise TransactionTooOld
            case Fault.UNAVAILABLE:
                raise StoreUnavailable("a fault was injected")
            case _:
                self._ensure_read_version()

    def _ensure_read_version(self) -> None:
        if self.read_version is None:
            self._born = self._db.clock.monotonic()
            self.read_version = self._db._take_read_version(self)
        self._check_age()

    # Writes

    def set(self, key: bytes, value: bytes) -> None:
        check_value(value)
        self._record(Mutation("set", key, value))

    def clear(self, key: bytes) -> None:
        self._record(Mutation("clear", key))

    def clear_range(self, begin: bytes, end: bytes) -> None:
        if begin < end:
            self._record(Mutation("clear_range", begin, end))

    def add(self, key: bytes, delta: int) -> None:
        self._record(Mutation("add", key, struct.pack("<q", delta)))

    def byte_max(self, key: bytes, value: bytes) -> None:
        check_value(value)
        self._record(Mutation("byte_max", key, value))

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        check_key(prefix + bytes(10) + suffix)
        check_value(value)
        self._record(Mutation("stamp_key", prefix, value, suffix))

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        check_value(prefix + bytes(10) + suffix)
        self._record(Mutation("stamp_value", key, prefix, suffix))

    def _record(self, mutation: Mutation) -> None:
        self._check_alive()
        check_key(mutation.key)
        if self._declared_read_only:
            raise StoreError("write in a transaction that was begun read-only", key=mutation.key)
        self._size += 3 * len(mutation.key) + len(mutation.value) + len(mutation.suffix) + MUTATION_BYTES + RANGE_BYTES
        self.pending.record(mutation)

    # Conflicts, watches and the end

    def add_read_conflict_key(self, key: bytes) -> None:
        self._check_alive()
        check_key(key)
        op = self.pending.op(key)
        if op is None or not op.independent:
            self.reads.keys.add(key)

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        self._check_alive()
        if begin < end:
            self.reads.ranges += self.pending.unknown_parts(begin, end)

    def watch(self, key: bytes) -> MemoryWatch:
        """Also reads the key serializably, as FoundationDB's watches do."""
        with self._db._lock:
            self._check_alive()
            self._ensure_read_version()
            op = self.pending.op(key)
            if op is None or not op.independent:
                self.reads.keys.add(key)
        watch = MemoryWatch(self._db, key)
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        db = self._db
        if not self.read_only and db.before_commit is not None:
            db.before_commit()
        with db._lock:
            self._check_alive()
            self._ended = True
            try:
                fired = [] if self.read_only else self._commit_writes()
                fired += self._arm_watches()
            finally:
                db._release(self)
        self._fire(fired)

    def _commit_writes(self) -> list[MemoryWatch]:
        check_size(self._size + sum(2 * len(key) + RANGE_BYTES for key in self.reads.keys))
        self._check_age()
        try:
            return self._db._commit(self)
        except CommitUnknown:
            self._fire(self.lost_watches)
            raise

    def _arm_watches(self) -> list[MemoryWatch]:
        """Compare with what was written since this transaction's read version, so that no change falls between."""
        version = self.read_version if self.read_only else self._db._version
        return [watch for watch in self._watches if not watch.arm(version or 0)]

    @staticmethod
    def _fire(watches: list[MemoryWatch]) -> None:
        for watch in watches:
            watch.fire()

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            with self._db._lock:
                self._db._release(self)

    def _check_alive(self) -> None:
        if self._ended:
            raise StoreError("the transaction has ended")
        if self._db.closed:
            raise StoreUnavailable("the database was closed")
        if self._db.clock.monotonic() > self._deadline:
            raise StoreUnavailable("no answer within the deadline")

    def _check_age(self) -> None:
        if self._born is not None and self._db.clock.monotonic() - self._born > TRANSACTION_AGE_S:
            raise TransactionTooOld


class MemoryWatch:
    """Waits for one key to change; fires once."""

    def __init__(self, database: MemoryDatabase, key: bytes) -> None:
        self.key = key
        self._db = database
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self._fired = False
        self._cancelled = False

    def on_fire(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callback = callback
            due = self._fired and not self._cancelled
        if due:
            callback()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            self._callback = None
        self._db._disarm(self)

    def arm(self, version: int) -> bool:
        return self._cancelled or self._db._arm(self, version)

    def fire(self) -> None:
        with self._lock:
            if self._fired or self._cancelled:
                return
            self._fired = True
            callback = self._callback
        if callback is not None:
            callback()
