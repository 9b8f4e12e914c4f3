"""Transactions of the memory store: versions of each key, and the optimistic checks of a cluster."""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from threading import RLock
from typing import Protocol

from kombu_fdb.errors import CommitUnknown, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import TRANSACTION_AGE_S, KeyValue, OneShotWatch, check_key, check_size, check_value
from kombu_fdb.testing.faults import Fault, Faults, Interrupted

__all__ = [
    "MemoryTransaction",
    "Mutation",
    "Op",
    "Pending",
    "Range",
    "Reads",
    "Server",
    "VersionedMap",
    "apply_atomic",
    "pack_stamp",
]


# -- versions ----------------------------------------------------------------------------------------------------------


try:
    from sortedcontainers import SortedDict  # type: ignore[import-untyped]  # it has no stubs
except ModuleNotFoundError as error:
    message = "stores in memory need the extra [testing], or: pip install sortedcontainers"
    raise ModuleNotFoundError(message, name="sortedcontainers") from error


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


def apply_atomic(kind: str, old: bytes | None, operand: bytes) -> bytes | None:
    """What an atomic operation makes of ``old``, as FoundationDB's ADD with COMPARE_AND_CLEAR, and BYTE_MAX, do."""
    if kind == "byte_max":
        return operand if old is None else max(old, operand)
    width = len(operand)
    padded = (old or b"")[:width].ljust(width, b"\0")
    total = int.from_bytes(padded, "little") + int.from_bytes(operand, "little")
    total %= 1 << 8 * width
    return total.to_bytes(width, "little") if total else None


@dataclass(slots=True)
class Op:
    """What this transaction's writes so far make of one key."""

    #: True when the stored value no longer matters.
    independent: bool
    value: bytes | None = None
    #: Atomics to apply to the stored value, in order.
    atomics: list[tuple[str, bytes]] = field(default_factory=list)
    #: Holds a versionstamp that is not known yet.
    unreadable: bool = False

    def over(self, stored: bytes | None) -> bytes | None:
        value = self.value if self.independent else stored
        for kind, operand in self.atomics:
            value = apply_atomic(kind, value, operand)
        return value


class Pending:
    """A transaction's own writes: a view for its reads, and the log that the commit replays."""

    def __init__(self) -> None:
        self.log: list[Mutation] = []
        self._ops: dict[bytes, Op] = {}
        self._keys: list[bytes] = []
        self._cleared: list[Range] = []
        #: Where versionstamped keys may end up: can't be read before the commit.
        self.unreadable: list[Range] = []

    def record(self, mutation: Mutation) -> None:
        self.log.append(mutation)
        match mutation.kind:
            case "set":
                self._put(mutation.key, Op(True, mutation.value))
            case "clear":
                self._put(mutation.key, Op(True, None))
            case "clear_range":
                self._clear_range(mutation.key, mutation.value)
            case "stamp_value":
                self._put(mutation.key, Op(True, None, unreadable=True))
            case "stamp_key":
                first, last = (mutation.key + stamp + mutation.suffix for stamp in (bytes(10), b"\xff" * 10))
                self.unreadable.append((first, last + b"\0"))
            case _:
                self._atomic(mutation)

    def op(self, key: bytes) -> Op | None:
        op = self._ops.get(key)
        if op is None and any(begin <= key < end for begin, end in self._cleared):
            return Op(True, None)
        return op

    def keys(self, begin: bytes, end: bytes) -> list[bytes]:
        """Own keys in the range, including cleared ones, but not ranges that were cleared as a whole."""
        return self._keys[bisect_left(self._keys, begin) : bisect_left(self._keys, end)]

    def unknown_parts(self, begin: bytes, end: bytes) -> list[Range]:
        """The range without what this transaction itself has overwritten: only the rest can conflict."""
        holes = [(k, k + b"\0") for k in self.keys(begin, end) if self._ops[k].independent]
        holes += [(b, e) for b, e in self._cleared if b < end and begin < e]
        edges = [(begin, begin), *sorted(holes), (end, end)]
        parts = []
        reached = begin
        for (_, hole_end), (next_begin, _) in pairwise(edges):
            reached = max(reached, hole_end)
            if reached < min(next_begin, end):
                parts.append((reached, next_begin))
        return parts

    def _put(self, key: bytes, op: Op) -> None:
        if key not in self._ops:
            insort(self._keys, key)
        self._ops[key] = op

    def _clear_range(self, begin: bytes, end: bytes) -> None:
        low, high = bisect_left(self._keys, begin), bisect_left(self._keys, end)
        for key in self._keys[low:high]:
            del self._ops[key]
        del self._keys[low:high]
        self._cleared.append((begin, end))

    def _atomic(self, mutation: Mutation) -> None:
        op = self.op(mutation.key) or Op(False)
        if op.independent and not op.unreadable:
            op = Op(True, apply_atomic(mutation.kind, op.value, mutation.value))
        else:
            op.atomics.append((mutation.kind, mutation.value))
        self._put(mutation.key, op)


def pack_stamp(version: int, batch: int = 0) -> bytes:
    return struct.pack(">QH", version, batch)


# -- transactions ------------------------------------------------------------------------------------------------------


#: What FoundationDB counts for the structures around one mutation and one conflict range.
MUTATION_BYTES = 40
RANGE_BYTES = 24


@dataclass(slots=True)
class Reads:
    """What a transaction read serializably."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[Range] = field(default_factory=list)

    def has_key(self, key: bytes) -> bool:
        return key in self.keys

    def sorted_keys(self) -> list[bytes]:
        return sorted(self.keys)

    def __bool__(self) -> bool:
        return bool(self.keys or self.ranges)


class Server(Protocol):
    """What a transaction asks of its database. All of it needs ``lock`` held, except for time and chance."""

    clock: Clock
    faults: Faults
    lock: RLock
    map: VersionedMap
    version: int
    recovered: int
    before_commit: Callable[[], None] | None
    after_answer: Callable[[], None] | None

    @property
    def closed(self) -> bool: ...
    def take_read_version(self, transaction: MemoryTransaction) -> int: ...
    def commit(self, transaction: MemoryTransaction) -> list[OneShotWatch]: ...
    def release(self, transaction: MemoryTransaction) -> None: ...
    def arm(self, watch: OneShotWatch, read_version: int) -> bool: ...
    def disarm(self, watch: OneShotWatch) -> None: ...


class MemoryTransaction:
    """One transaction; ended by ``commit`` or ``cancel``."""

    def __init__(self, database: Server, timeout_s: float, read_only: bool) -> None:
        self._db = database
        self._deadline = database.clock.monotonic() + timeout_s
        self._born: float | None = None
        self._declared_read_only = read_only
        self._size = 0
        self._ended = False
        self._watches: list[OneShotWatch] = []
        #: Whose it is; a simulation's note.
        self.author: object = None
        self.read_version: int | None = None
        self.reads = Reads()
        self.pending = Pending()
        #: Fired although the committer never got its answer.
        self.lost_watches: list[OneShotWatch] = []

    @property
    def read_only(self) -> bool:
        return not self.pending.log

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
        return self._db.map.at(key, self.read_version)

    def _merged(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[KeyValue]:
        assert self.read_version is not None
        stored = self._db.map.scan(begin, end, self.read_version, reverse=reverse)
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
            return b"?"  # present; a transaction that reads as far as this is refused
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
            case Fault.INTERRUPTED:
                raise Interrupted
            case _:
                self._ensure_read_version()

    def _ensure_read_version(self) -> None:
        if self.read_version is None:
            self._born = self._db.clock.monotonic()
            self.read_version = self._db.take_read_version(self)
        self._check_age()

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        return [self.get_range(begin, end, limit=limit, snapshot=snapshot) for begin, end, limit in ranges]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        return self.get_many(keys, snapshot=snapshot), self.get_ranges(ranges, snapshot=snapshot)

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

    def watch(self, key: bytes) -> OneShotWatch:
        """Also reads the key serializably, as FoundationDB's watches do."""
        with self._db.lock:
            self._check_alive()
            self._ensure_read_version()
            op = self.pending.op(key)
            if op is None or not op.independent:
                self.reads.keys.add(key)
        watch = OneShotWatch(key, self._db.disarm)
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        db = self._db
        if not self.read_only and db.before_commit is not None:
            db.before_commit()
        with db.lock:
            self._check_alive()
            self._ended = True
            try:
                fired = [] if self.read_only else self._commit_writes()
                fired += self._arm_watches()
            finally:
                db.release(self)
        self._fire(fired)
        if not self.read_only and db.after_answer is not None:
            db.after_answer()

    def _commit_writes(self) -> list[OneShotWatch]:
        check_size(self._size + sum(2 * len(key) + RANGE_BYTES for key in self.reads.keys))
        self._check_age()
        try:
            return self._db.commit(self)
        except (CommitUnknown, Interrupted):
            self._fire(self.lost_watches)
            raise

    def _arm_watches(self) -> list[OneShotWatch]:
        """Compare with what was written since this transaction's read version, so that no change falls between."""
        version = self.read_version if self.read_only else self._db.version
        return [watch for watch in self._watches if not self._db.arm(watch, version or 0)]

    @staticmethod
    def _fire(watches: list[OneShotWatch]) -> None:
        for watch in watches:
            watch.fire()

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
        return self._born is not None and now_s - self._born > TRANSACTION_AGE_S

    def _check_age(self) -> None:
        if self.is_too_old(self._db.clock.monotonic()):
            raise TransactionTooOld
        if self.read_version is not None and self.read_version < self._db.recovered:
            raise TransactionTooOld
