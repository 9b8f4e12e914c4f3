"""What a transaction of the SQLite store will change: noted as it comes, written when somebody has to see it.

Model. Each key stands in one of three places, by what was last done to it: a *row*, its new value, or None if it is
cleared; a *sum*, to be added to whatever is stored; a *stamp*, a value that the versionstamp completes. Keys that it
completes have no name yet, so they are a list. All of it is *written* at the commit, or before a read that might have
to see it, by few statements, each prepared once: :meth:`WriteSet._rows_with` makes rows of it, with what is stored of
the sums and of the version, read at once (:meth:`WriteSet._asked`).

So a row that changes twice is written once, and a transaction that only writes needs the right to write no sooner than
it commits. Writing is the transaction's part, and what goes wrong there: what was noted is written by it, or never.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kombu_fdb.store.limits import KEY_BYTES, TRANSACTION_BYTES, VALUE_BYTES, check_key, check_size, check_value

__all__ = ["Rows", "WriteSet", "blob"]

#: What FoundationDB counts for one mutation and its conflict range, apart from their bytes.
MUTATION_BYTES = 64
STAMP_BYTES = 10
#: The key of the row that holds the version; see ``files.SCHEMA``.
VERSION = 0
#: What keys and values are given to SQLite as: of ``bytes`` Python looks up first whether they are to be adapted to it
#: (https://docs.python.org/3/library/sqlite3.html#sqlite3-adapters), which takes as long as all the rest.
blob = bytearray

_pack_stamp = struct.Struct(">QH").pack


def _sum(stored: bytes | None, delta: int, width: int) -> bytes | None:
    """Of so many bytes, with wrap-around, as FoundationDB adds; None for a sum of 0."""
    total = (int.from_bytes((stored or b"")[:width], "little") + delta) % (1 << 8 * width)
    return total.to_bytes(width, "little") if total else None


class Rows(NamedTuple):
    """What is to be deleted, and what is to be stored."""

    gone: list[tuple[bytearray]]
    kept: list[tuple[bytearray | int, bytearray | int]]


class WriteSet:
    """Blind writes of one transaction."""

    __slots__ = ("_bells", "_clears", "_fills", "_moves", "_rows", "_size", "_stamp", "_stamped", "_stamps", "_sums")

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes | None] = {}
        self._sums: dict[bytes, tuple[int, int]] = {}
        self._stamps: dict[bytes, tuple[bytes, bytes]] = {}
        self._stamped: list[tuple[bytes, bytes, bytes]] = []
        self._stamp = b""
        self._bells: list[bytes] = []
        #: Something is cleared.
        self._clears = False
        #: As of :meth:`~kombu_fdb.store.protocol.Transaction.fill`.
        self._fills = False
        self._moves = False
        #: Of all that was noted, as FoundationDB counts it.
        self._size = 0

    @property
    def read_only(self) -> bool:
        return not self._size

    def set(self, key: bytes, value: bytes) -> None:
        self._grow(len(key), len(value))
        self._rows[key] = value
        if self._sums or self._stamps:
            self._forget(key)

    def clear(self, key: bytes) -> None:
        self._grow(len(key), 0)
        self._clears = True
        self._rows[key] = None
        if self._sums or self._stamps:
            self._forget(key)

    def clear_run(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.clear(key)

    def fill(self, *, moving: bool = False) -> None:
        if moving:
            self._moves = True
        else:
            self._fills = True

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        self._grow(len(key), width)
        before = self._sums.get(key, (0, width))
        if key in self._rows:
            self._rows[key] = _sum(self._rows[key], delta, width)
        elif key in self._stamps or before[1] != width:
            self._write()
            self._sums[key] = delta, width
        else:
            self._sums[key] = before[0] + delta, width

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        self._grow(len(prefix) + STAMP_BYTES + len(suffix), len(value))
        self._stamped.append((prefix, suffix, value))

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        self._grow(len(key), len(prefix) + STAMP_BYTES + len(suffix))
        self._rows.pop(key, None)
        self._sums.pop(key, None)
        self._stamps[key] = prefix, suffix
        self._bells.append(key)

    def _grow(self, key_bytes: int, value_bytes: int) -> None:
        """By one mutation."""
        if key_bytes > KEY_BYTES or value_bytes > VALUE_BYTES:
            check_key(bytes(key_bytes))
            check_value(bytes(value_bytes))
        self._size = size = self._size + 3 * key_bytes + value_bytes + MUTATION_BYTES
        if size > TRANSACTION_BYTES:
            check_size(size)

    def _forget(self, key: bytes) -> None:
        self._sums.pop(key, None)
        self._stamps.pop(key, None)

    def _write(self) -> None:
        """Write what was noted, so that it can be read."""
        raise NotImplementedError

    def _asked(self) -> list[bytearray | int]:
        """The keys of the rows on which it depends what is to be written."""
        keys: list[bytearray | int] = [*map(blob, self._sums)]
        if not self._stamp and (self._stamped or self._stamps):
            keys.append(VERSION)
        return keys

    def _rows_with(self, stored: Mapping[Any, Any]) -> Rows:
        """What was noted, which is noted no more. ``stored``: of the rows that were asked for, those that are there."""
        rows, sums, self._rows, self._sums = self._rows, self._sums, {}, {}
        kept, gone = self._completed(stored.get(VERSION)), []
        for key, (delta, width) in sums.items():
            total = _sum(stored.get(key), delta, width)
            if total is not None or key in stored:
                rows[key] = total
        for key, value in rows.items():
            if value is None:
                gone.append((blob(key),))
            else:
                kept.append((blob(key), blob(value)))
        return Rows(gone, kept)

    def _completed(self, version: int | None) -> list[tuple[bytearray | int, bytearray | int]]:
        """What needs the stamp, which is made of the stored version unless it was before."""
        stamped, stamps, self._stamped, self._stamps = self._stamped, self._stamps, [], {}
        kept: list[tuple[bytearray | int, bytearray | int]] = []
        if version is not None:
            kept.append((VERSION, version + 1))
            self._stamp = _pack_stamp(version + 1, 0)
        stamp = self._stamp
        for prefix, suffix, value in stamped:
            kept.append((blob(prefix + stamp + suffix), blob(value)))
        for key, (prefix, suffix) in stamps.items():
            kept.append((blob(key), blob(prefix + stamp + suffix)))
        return kept
