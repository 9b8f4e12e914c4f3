"""FoundationDB's transactions in memory: the same conflicts, stamps and limits, deterministic and fast.

Model. The committed state is a :class:`VersionedMap` and a log of what each
commit wrote. A transaction takes its read version at its first read, keeps its writes to itself, and remembers what it
read serializably. Its commit

1. fails with ``Conflict`` if a commit after its read version wrote into what it read (blind writers never fail);
2. replays its mutations in order on the newest state under a new version, which is also its versionstamp;
3. fires the watches of the keys it changed.

Versions run at a million per second of the clock, whatever the load, as FoundationDB's do. Nothing here starts a
thread: watches are fired by the thread that commits. With a ``ManualClock``, a run can be repeated exactly. A lock
guards the state all the same, for the tests that do use threads.
"""

from __future__ import annotations

import heapq
import struct
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from kombu_fdb.errors import Conflict, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import KeyValue, Transaction, Watch, check_key, check_size, check_value

try:
    from sortedcontainers import SortedDict  # type: ignore[import-untyped]  # it has no stubs
except ModuleNotFoundError as error:
    message = "stores in memory need the extra [testing], or: pip install sortedcontainers"
    raise ModuleNotFoundError(message, name="sortedcontainers") from error

VERSIONS_PER_S = 1_000_000

#: Key, old and new value.
Change = tuple[bytes, bytes | None, bytes | None]

# -- versions ----------------------------------------------------------------------------------------------------------


Chain = list[tuple[int, bytes | None]]
Range = tuple[bytes, bytes]


class VersionedMap:
    """Ordered keys, each with the values it had at the versions that may still be read."""

    def __init__(self) -> None:
        self._chains = SortedDict()
        self._tombstones: deque[tuple[int, bytes]] = deque()

    def at(self, key: bytes, version: int) -> bytes | None:
        return _value_at(self._chains.get(key), version)

    def scan(self, begin: bytes, end: bytes, version: int, *, reverse: bool) -> Iterator[KeyValue]:
        chains = self._chains
        for key in chains.irange(begin, end, inclusive=(True, False), reverse=reverse):
            value = _value_at(chains[key], version)
            if value is not None:
                yield key, value

    def keys(self, begin: bytes, end: bytes) -> list[bytes]:
        return list(self._chains.irange(begin, end, inclusive=(True, False)))

    def put(self, key: bytes, version: int, value: bytes | None, oldest: int) -> None:
        """Write one version; versions below ``oldest`` will not be read again."""
        chain: Chain | None = self._chains.get(key)
        if chain is None:
            if value is not None:
                self._chains[key] = [(version, value)]
            return
        while len(chain) > 1 and chain[1][0] <= oldest:
            del chain[0]
        chain.append((version, value))
        if value is None:
            self._tombstones.append((version, key))

    def bury(self, oldest: int) -> None:
        """Forget keys that were cleared before every version still read."""
        while self._tombstones and self._tombstones[0][0] <= oldest:
            version, key = self._tombstones.popleft()
            chain = self._chains.get(key)
            if chain is not None and chain[-1] == (version, None):
                del self._chains[key]


def _value_at(chain: Chain | None, version: int) -> bytes | None:
    if chain is None:
        return None
    for written, value in reversed(chain):
        if written <= version:
            return value
    return None


@dataclass(frozen=True, slots=True)
class Mutation:
    """One write as FoundationDB would log it.

    ``kind``: set, clear, clear_range, add, byte_max, stamp_key, stamp_value.
    """

    kind: str
    key: bytes
    value: bytes = b""
    suffix: bytes = b""

    @property
    def is_atomic(self) -> bool:
        """Whether the old value matters."""
        return self.kind in ("add", "byte_max")

    def over(self, old: bytes | None) -> bytes | None:
        """What it makes of the old value of its key, as FoundationDB's ADD with COMPARE_AND_CLEAR, and BYTE_MAX, do."""
        if not self.is_atomic:
            return None if self.kind == "clear" else self.value
        if self.kind == "byte_max":
            return self.value if old is None else max(old, self.value)
        width = len(self.value)
        padded = (old or b"")[:width].ljust(width, b"\0")
        total = int.from_bytes(padded, "little") + int.from_bytes(self.value, "little")
        total %= 1 << 8 * width
        return total.to_bytes(width, "little") if total else None


class OwnWrites:
    """A transaction's own writes: a view for its reads, and the log that the commit replays."""

    def __init__(self) -> None:
        self.log: list[Mutation] = []
        #: Those that count for each key: the last one that is not atomic, if there is one, and what follows it.
        self._counting: dict[bytes, list[Mutation]] = {}
        self._keys: list[bytes] = []
        self._cleared: list[Range] = []
        #: Where versionstamped keys may end up: can't be read before the commit.
        self.unreadable: list[Range] = []

    def record(self, mutation: Mutation) -> None:
        self.log.append(mutation)
        match mutation.kind:
            case "clear_range":
                self._clear_range(mutation.key, mutation.value)
            case "stamp_key":
                first, last = (mutation.key + stamp + mutation.suffix for stamp in (bytes(10), b"\xff" * 10))
                self.unreadable.append((first, last + b"\0"))
            case _:
                before = self.of(mutation.key) if mutation.is_atomic else []
                if mutation.key not in self._counting:
                    insort(self._keys, mutation.key)
                self._counting[mutation.key] = [*before, mutation]

    def of(self, key: bytes) -> list[Mutation]:
        """The mutations that count for this key."""
        if key not in self._counting and any(begin <= key < end for begin, end in self._cleared):
            return [Mutation("clear", key)]
        return self._counting.get(key, [])

    def cover(self, key: bytes) -> bool:
        """Whether the stored value no longer matters."""
        return any(not each.is_atomic for each in self.of(key))

    def are_unreadable(self, begin: bytes, end: bytes) -> bool:
        """Whether the range may hold a versionstamp that is not known yet."""
        if any(b < end and begin < e for b, e in self.unreadable):
            return True
        return any(each.kind == "stamp_value" for key in self.keys(begin, end) for each in self.of(key))

    def keys(self, begin: bytes, end: bytes) -> list[bytes]:
        """Own keys in the range, including cleared ones, but not ranges that were cleared as a whole."""
        return self._keys[bisect_left(self._keys, begin) : bisect_left(self._keys, end)]

    def unknown_parts(self, begin: bytes, end: bytes) -> list[Range]:
        """The range without what this transaction itself has overwritten: only the rest can conflict."""
        holes = [(k, k + b"\0") for k in self.keys(begin, end) if self.cover(k)]
        holes += [(b, e) for b, e in self._cleared if b < end and begin < e]
        edges = [(begin, begin), *sorted(holes), (end, end)]
        parts = []
        reached = begin
        for (_, hole_end), (next_begin, _) in pairwise(edges):
            reached = max(reached, hole_end)
            if reached < min(next_begin, end):
                parts.append((reached, next_begin))
        return parts

    def _clear_range(self, begin: bytes, end: bytes) -> None:
        low, high = bisect_left(self._keys, begin), bisect_left(self._keys, end)
        for key in self._keys[low:high]:
            del self._counting[key]
        del self._keys[low:high]
        self._cleared.append((begin, end))


def pack_stamp(version: int) -> bytes:
    return struct.pack(">QH", version, 0)


# -- transactions ------------------------------------------------------------------------------------------------------


#: What FoundationDB counts for the structures around one mutation and one conflict range.
MUTATION_BYTES = 40
RANGE_BYTES = 24
#: How long the version that a transaction reads is kept.
TRANSACTION_AGE_S = 5.0


class MemoryTransaction(Transaction):
    """One transaction; ended by ``commit`` or ``cancel``."""

    def __init__(self, database: MemoryDatabase, timeout_s: float, read_only: bool) -> None:
        self._db = database
        self._deadline = database.clock.monotonic() + timeout_s
        self.born_s: float | None = None
        self._declared_read_only = read_only
        self._size = 0
        self._ended = False
        self._watches: list[Watch] = []
        self.read_version: int | None = None
        #: What it read serializably.
        self.keys_read: set[bytes] = set()
        self.ranges_read: list[Range] = []
        self.writes = OwnWrites()

    @property
    def read_only(self) -> bool:
        return not self.writes.log

    @property
    def can_conflict(self) -> bool:
        return bool(self.keys_read or self.ranges_read)

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        with self._db.lock:
            self._before_read()
            return self._get(key, snapshot)

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        with self._db.lock:
            self._before_read()
            return [self._get(key, snapshot) for key in keys]

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        with self._db.lock:
            self._before_read()
            if begin >= end:
                return []
            rows = self._merged(begin, end, limit, reverse)
            if limit and len(rows) >= limit:  # only what was read may conflict
                last = rows[-1][0]
                begin, end = (last, end) if reverse else (begin, last + b"\0")
            self._refuse_unreadable(begin, end)
            if not snapshot:
                self.ranges_read += self.writes.unknown_parts(begin, end)
            return rows

    def _get(self, key: bytes, snapshot: bool) -> bytes | None:
        self._refuse_unreadable(key, key + b"\0")
        if not snapshot:
            self._note_read(key)
        return self._seen(key)

    def _note_read(self, key: bytes) -> None:
        if not self.writes.cover(key):
            self.keys_read.add(key)

    def _seen(self, key: bytes) -> bytes | None:
        """The value as this transaction sees it; any value for one that is unreadable."""
        assert self.read_version is not None
        value = self._db.map.at(key, self.read_version)
        for each in self.writes.of(key):
            value = each.over(value)
        return value

    def _merged(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[KeyValue]:
        assert self.read_version is not None
        stored = self._db.map.scan(begin, end, self.read_version, reverse=reverse)
        if not self.writes.log:
            return list(islice(stored, limit or None))
        own = [(key, self._seen(key)) for key in self.writes.keys(begin, end)]
        others = ((k, v) for k, v in stored if not self.writes.of(k))
        mine = ((k, v) for k, v in (reversed(own) if reverse else own) if v is not None)
        return list(islice(heapq.merge(others, mine, reverse=reverse), limit or None))

    def _refuse_unreadable(self, begin: bytes, end: bytes) -> None:
        if self.writes.are_unreadable(begin, end):
            raise StoreError("can't read what depends on this transaction's own versionstamp", key=begin)

    def _before_read(self) -> None:
        self._check_alive()
        self._ensure_read_version()

    def _ensure_read_version(self) -> None:
        if self.read_version is None:
            self.born_s = self._db.clock.monotonic()
            self.read_version = self._db.take_read_version(self)
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

    def clear_run(self, keys: Sequence[bytes]) -> None:
        self.clear_range(keys[0], keys[-1] + b"\x00")  # as FoundationDB does it: what stands between them is lost

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        self._record(Mutation("add", key, delta.to_bytes(width, "little", signed=True)))

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

    def fill(self, *, moving: bool = False) -> None:
        pass

    def _record(self, mutation: Mutation) -> None:
        self._check_alive()
        check_key(mutation.key)
        if self._declared_read_only:
            raise StoreError("can't write in a transaction that was begun read-only", key=mutation.key)
        self._size += 3 * len(mutation.key) + len(mutation.value) + len(mutation.suffix) + MUTATION_BYTES + RANGE_BYTES
        self.writes.record(mutation)

    # Conflicts, watches and the end

    def add_read_conflict_key(self, key: bytes) -> None:
        self._check_alive()
        check_key(key)
        self._note_read(key)

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        self._check_alive()
        if begin < end:
            self.ranges_read += self.writes.unknown_parts(begin, end)

    def watch(self, key: bytes) -> Watch:
        """Also reads the key serializably, as FoundationDB's watches do."""
        with self._db.lock:
            self._check_alive()
            self._ensure_read_version()
            self._note_read(key)
        watch = Watch(key, self._db.disarm)
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        with self._db.lock:
            self._check_alive()
            self._ended = True
            try:
                fired = [] if self.read_only else self._commit_writes()
                fired += self._arm_watches()
            finally:
                self._db.release(self)
        for watch in fired:
            watch.fire()

    def _commit_writes(self) -> list[Watch]:
        check_size(self._size + sum(2 * len(key) + RANGE_BYTES for key in self.keys_read))
        self._check_age()
        return self._db.commit(self)

    def _arm_watches(self) -> list[Watch]:
        """Compare with what was written since this transaction's read version, so that no change falls between."""
        version = self.read_version if self.read_only else self._db.version
        return [watch for watch in self._watches if not self._db.arm(watch, version or 0)]

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            with self._db.lock:
                self._db.release(self)

    def _check_alive(self) -> None:
        if self._ended:
            raise StoreError("the transaction has ended")
        if self._db.closed:
            raise StoreUnavailable("the database was closed")
        if self._db.clock.monotonic() > self._deadline:
            raise StoreUnavailable("no answer within the deadline")

    def is_too_old(self, now_s: float) -> bool:
        """Whether its read version will be out of the store's window at that moment of the clock."""
        return self.born_s is not None and now_s - self.born_s > TRANSACTION_AGE_S

    def _check_age(self) -> None:
        if self.is_too_old(self._db.clock.monotonic()):
            raise TransactionTooOld


# -- the database ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Committed:
    """What one commit wrote."""

    version: int
    keys: list[bytes]
    ranges: list[Range]

    def touches(self, keys: set[bytes], ranges: Sequence[Range] = ()) -> bool:
        """Whether it wrote something of these."""
        return (
            any(key in keys for key in self.keys)
            or any(_any_key_in(sorted(keys), begin, end) for begin, end in self.ranges)
            or any(b < end and begin < e for begin, end in self.ranges for b, e in ranges)
            or any(_any_key_in(self.keys, begin, end) for begin, end in ranges)
        )


def _any_key_in(keys: list[bytes], begin: bytes, end: bytes) -> bool:
    return bisect_left(keys, begin) < bisect_left(keys, end)


class MemoryDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in this process's memory; see the module's text."""

    commit_may_be_unknown = False
    writers_take_turns = False

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.lock = threading.RLock()
        self.map = VersionedMap()
        self._log: list[_Committed] = []
        self.version = 1
        self._ticked = self.clock.monotonic()
        self._readers: dict[int, MemoryTransaction] = {}
        self._watches: dict[bytes, list[Watch]] = {}
        self.closed = False

    def begin(self, *, timeout_s: float, read_only: bool = False) -> MemoryTransaction:
        if self.closed:
            raise StoreUnavailable("the database was closed")
        return MemoryTransaction(self, timeout_s, read_only)

    def close(self) -> None:
        self.closed = True

    def items(self, begin: bytes = b"", end: bytes = b"\xff") -> list[KeyValue]:
        """Everything committed, without transaction or cost; for invariants."""
        with self.lock:
            return list(self.map.scan(begin, end, self.version, reverse=False))

    @property
    def armed_watches(self) -> int:
        """How many watches wait; for tests that look for leaks."""
        with self.lock:
            return sum(len(watches) for watches in self._watches.values())

    # What transactions call, under the lock.

    def take_read_version(self, transaction: MemoryTransaction) -> int:
        self._readers[id(transaction)] = transaction
        return self.version

    def release(self, transaction: MemoryTransaction) -> None:
        self._readers.pop(id(transaction), None)

    def commit(self, transaction: MemoryTransaction) -> list[Watch]:
        """Commit and return the watches to fire, which the caller does without the lock."""
        self.release(transaction)
        self._check_conflicts(transaction)
        self.version = self._next_version()
        changes, ranges = self._replay(transaction)
        keys = [key for key, _, _ in changes]
        self._log.append(_Committed(self.version, sorted(keys), ranges))
        self._trim()
        return self._due_watches(keys)

    def _check_conflicts(self, transaction: MemoryTransaction) -> None:
        version = transaction.read_version
        if version is None or not transaction.can_conflict:
            return
        first = bisect_right(self._log, version, key=lambda committed: committed.version)
        read = transaction.keys_read, transaction.ranges_read
        if any(committed.touches(*read) for committed in islice(self._log, first, None)):
            raise Conflict

    def _next_version(self) -> int:
        now = self.clock.monotonic()
        passed, self._ticked = now - self._ticked, now
        return self.version + max(1, int(passed * VERSIONS_PER_S))

    def _replay(self, transaction: MemoryTransaction) -> tuple[list[Change], list[Range]]:
        state: dict[bytes, bytes | None] = {}
        ranges: list[Range] = []
        stamp = pack_stamp(self.version)
        for mutation in transaction.writes.log:
            self._mutate(mutation, state, ranges, stamp)
        oldest = self._oldest_read()
        changes = [(key, self.map.at(key, self.version), value) for key, value in state.items()]
        for key, _, value in changes:
            self.map.put(key, self.version, value, oldest)
        return changes, ranges

    def _mutate(self, mutation: Mutation, state: dict[bytes, bytes | None], ranges: list[Range], stamp: bytes) -> None:
        key, value, suffix = mutation.key, mutation.value, mutation.suffix
        match mutation.kind:
            case "clear_range":
                own = [k for k in state if key <= k < value]
                state.update(dict.fromkeys([*self.map.keys(key, value), *own]))
                ranges.append((key, value))
            case "stamp_key":
                state[key + stamp + suffix] = value
            case "stamp_value":
                state[key] = value + stamp + suffix
            case _:
                state[key] = mutation.over(state[key] if key in state else self.map.at(key, self.version))

    def _oldest_read(self) -> int:
        """The oldest version that is still read."""
        versions = (reader.read_version for reader in self._readers.values())
        return min((version for version in versions if version is not None), default=self.version)

    def _trim(self) -> None:
        oldest = self._oldest_read()
        self.map.bury(oldest)
        if len(self._log) > 64 and self._log[len(self._log) // 2].version <= oldest:
            del self._log[: bisect_right(self._log, oldest, key=lambda committed: committed.version)]

    def _due_watches(self, keys: list[bytes]) -> list[Watch]:
        changed = sorted(key for key in keys if key in self._watches)
        return [watch for key in changed for watch in self._watches.pop(key)]

    def arm(self, watch: Watch, read_version: int) -> bool:
        """False when the key has been changed since; the watch must fire at once then."""
        if watch.done:
            return True
        first = bisect_right(self._log, read_version, key=lambda committed: committed.version)
        if any(committed.touches({watch.key}) for committed in islice(self._log, first, None)):
            return False
        self._watches.setdefault(watch.key, []).append(watch)
        return True

    def disarm(self, watch: Watch) -> None:
        with self.lock:
            waiting = self._watches.get(watch.key, [])
            if watch in waiting:
                waiting.remove(watch)
            if not waiting:
                self._watches.pop(watch.key, None)
