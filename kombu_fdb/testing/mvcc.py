"""The two halves of an MVCC store: committed versions of every key, and one transaction's own unsaved writes."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kombu_fdb.store.protocol import KeyValue

try:
    from sortedcontainers import SortedDict  # type: ignore[import-untyped]  # it has no stubs
except ModuleNotFoundError as error:
    message = "stores in memory need the extra [testing], or: pip install sortedcontainers"
    raise ModuleNotFoundError(message, name="sortedcontainers") from error

__all__ = ["Mutation", "Op", "Pending", "Range", "VersionedMap", "apply_atomic", "pack_stamp"]

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
    """What the own writes so far make of one key."""

    #: True when the stored value does not matter any more.
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
        """Own keys in the range, cleared ones included, ranges cleared as a whole not."""
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
