"""One transaction of the SQLite store, operation by operation.

Model. It begins with its first operation and ends with ``commit`` or ``cancel``. Its *turn* is made before anything is
taken in its name (the lock, a connection, SQLite's transaction), and everything is undone by that turn: so ``cancel``
mends whatever an exception at any moment has left, and may be called again if it was cut short itself. A commit that an
exception cut short has happened, or has not; its bells are rung in both cases.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from kombu_fdb.errors import StoreError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.locks import Turn
from kombu_fdb.store.limits import KEY_BYTES, TRANSACTION_BYTES, VALUE_BYTES, check_key, check_size, check_value
from kombu_fdb.store.protocol import KeyValue
from kombu_fdb.store.sqlite.errors import explain, explain_os
from kombu_fdb.store.sqlite.space import FULL_S
from kombu_fdb.store.sqlite.wakeups.listener import Listener
from kombu_fdb.store.sqlite.wakeups.notifier import Ringer
from kombu_fdb.store.watch import OneShotWatch

__all__ = ["SqliteTransaction"]

#: Keys asked for in one statement.
MOST_PARAMETERS = 500
#: What FoundationDB counts for one mutation and its conflict range, apart from their bytes.
MUTATION_BYTES = 64

GET = "SELECT v FROM kv WHERE k=?"
RANGE = "SELECT k, v FROM kv WHERE k>=? AND k<? ORDER BY k LIMIT ?"
RANGE_REVERSE = "SELECT k, v FROM kv WHERE k>=? AND k<? ORDER BY k DESC LIMIT ?"
SET = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v"
CLEAR = "DELETE FROM kv WHERE k=?"
CLEAR_RANGE = "DELETE FROM kv WHERE k>=? AND k<?"
BYTE_MAX = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v WHERE excluded.v>v"
NEXT_VERSION = "UPDATE kv SET v=v+1 WHERE k=0 RETURNING v"

_pack_stamp = struct.Struct(">QH").pack


def _sum(stored: bytes | None, delta: int, width: int) -> int:
    """Of so many bytes, with wrap-around, as FoundationDB adds."""
    return (int.from_bytes((stored or b"")[:width], "little") + delta) % (1 << 8 * width)


class Owner(Hashable, Protocol):
    """Whose transaction it is: a handle of the file."""

    @property
    def closed(self) -> bool: ...
    @property
    def synchronous(self) -> str: ...


class File(Protocol):
    """What a transaction asks of its file, which this process holds open: see ``open_file.py``."""

    path: str
    clock: Clock
    listener: Listener
    ringer: Ringer

    def insist(self, step: Callable[[], sqlite3.Cursor], deadline: float) -> sqlite3.Cursor: ...
    def take_writer(self, turn: Turn, synchronous: str, deadline: float) -> sqlite3.Connection: ...
    def return_writer(self, turn: Turn) -> None: ...
    def take_reader(self, turn: Turn, deadline: float) -> sqlite3.Connection: ...
    def return_reader(self, connection: sqlite3.Connection, *, sound: bool) -> None: ...
    def leave(self, turn: Turn) -> None: ...
    def open_reserve(self) -> None: ...
    def look_again(self) -> None: ...
    def check_place(self) -> None: ...


class SqliteTransaction:
    """One that may write: alone from its first operation to its end."""

    __slots__ = (
        "_bells",
        "_clears",
        "_connection",
        "_cursor",
        "_deadline",
        "_ended",
        "_file",
        "_owner",
        "_sent",
        "_size",
        "_stamp",
        "_turn",
        "_watches",
        "_wrote",
    )

    _begin = "BEGIN IMMEDIATE"

    def __init__(self, file: File, owner: Owner, timeout_s: float) -> None:
        self._file = file
        self._owner = owner
        self._deadline = file.clock.monotonic() + timeout_s
        self._turn: Turn | None = None
        self._cursor: sqlite3.Cursor | None = None
        self._connection: sqlite3.Connection | None = None
        self._ended = False
        self._clears = False
        self._sent = False
        self._wrote = False
        self._size = 0
        self._stamp = b""
        self._bells: list[bytes] = []
        self._watches: list[OneShotWatch] = []

    @property
    def read_only(self) -> bool:
        return not self._wrote

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        row = self._run(GET, (key,)).fetchone()
        return None if row is None else row[0]

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        found: dict[bytes, bytes] = {}
        for first in range(0, len(keys), MOST_PARAMETERS):
            found.update(self._get_some(keys[first : first + MOST_PARAMETERS]))
        return [found.get(key) for key in keys]

    def _get_some(self, keys: Sequence[bytes]) -> list[KeyValue]:
        # Few different statements, so that they stay prepared: the last key fills up to a power of two.
        size = 1 << (len(keys) - 1).bit_length()
        marks = ",".join("?" * size)
        padded = [*keys, *[keys[-1]] * (size - len(keys))]
        return self._run(f"SELECT k, v FROM kv WHERE k IN ({marks})", padded).fetchall()

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        return self._run(RANGE_REVERSE if reverse else RANGE, (begin, end, limit or -1)).fetchall()

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        return [self.get_range(begin, end, limit=limit) for begin, end, limit in ranges]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        return self.get_many(keys), self.get_ranges(ranges)

    # Writes

    def set(self, key: bytes, value: bytes) -> None:
        self._write(SET, key, value)

    def clear(self, key: bytes) -> None:
        check_key(key)
        self._open_reserve()
        self._change(CLEAR, (key,), 3 * len(key))

    def clear_range(self, begin: bytes, end: bytes) -> None:
        check_key(begin)
        check_key(end)
        self._open_reserve()
        self._change(CLEAR_RANGE, (begin, end), 2 * (len(begin) + len(end)))

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        # Two plain statements are quicker than one that calls back into Python.
        total = _sum(self.get(key), delta, width)
        if total:
            self._write(SET, key, total.to_bytes(width, "little"))
        else:
            self.clear(key)

    def byte_max(self, key: bytes, value: bytes) -> None:
        self._write(BYTE_MAX, key, value)

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        self._write(SET, prefix + (self._stamp or self._next_stamp()) + suffix, value)

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        self._write(SET, key, prefix + (self._stamp or self._next_stamp()) + suffix)
        self._bells.append(key)

    def _write(self, sql: str, key: bytes, value: bytes) -> None:
        if len(key) > KEY_BYTES or len(value) > VALUE_BYTES:
            check_key(key)
            check_value(value)
        self._change(sql, (key, value), 3 * len(key) + len(value))

    def _change(self, sql: str, parameters: tuple[bytes, ...], size: int) -> None:
        self._wrote = True
        self._size += size + MUTATION_BYTES
        if self._size > TRANSACTION_BYTES:
            check_size(self._size)
        self._run(sql, parameters)

    def _open_reserve(self) -> None:
        """A transaction that clears may use the file's last pages."""
        if self._clears:
            return
        self._clears = True
        try:
            if self._cursor is None:
                self._start()
            self._file.open_reserve()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _next_stamp(self) -> bytes:
        (version,) = self._run(NEXT_VERSION, ()).fetchone()
        self._stamp = _pack_stamp(version, 0)
        return self._stamp

    # Conflicts: none, writers take turns

    def add_read_conflict_key(self, key: bytes) -> None:
        pass

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        pass

    # Watches and the end

    def watch(self, key: bytes) -> OneShotWatch:
        # What can fail of arming one; after the commit nothing may.
        try:
            self._file.listener.open()
        except OSError as error:
            raise explain_os(error, f"{self._file.path}-bells") from error
        watch = OneShotWatch(key, self._file.listener.disarm, seen=self.get(key))
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        if self._cursor is not None:
            self._send()
            self._release()
        elif self._ended:
            raise StoreError("the transaction has ended")
        self._ended = True
        if self._bells:
            self._ring()
        if self._watches:
            self._arm()

    def cancel(self) -> None:
        self._ended = True
        if self._turn is not None:
            self._release()
        if self._sent and self._bells:
            self._ring()

    def _send(self) -> None:
        try:
            self._file.check_place()
        except StoreUnavailable:
            self.cancel()
            raise
        self._sent = True
        self._run("COMMIT", ())

    def _ring(self) -> None:
        self._file.ringer.ring(self._bells)
        self._bells = []

    def _arm(self) -> None:
        """Register, then compare with what this transaction saw: nothing can fall between. Never raises."""
        listener = self._file.listener
        try:
            for watch in self._watches:
                listener.arm(watch, self._owner)
        except StoreUnavailable:
            for watch in self._watches:
                watch.fire()
        listener.compare(self._watches)

    def _run(self, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        try:
            return (self._cursor or self._start()).execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _start(self) -> sqlite3.Cursor:
        if self._ended:
            raise StoreError("the transaction has ended")
        if self._owner.closed:
            raise StoreUnavailable("the database was closed", path=self._file.path)
        self._turn = turn = Turn()
        try:
            self._connection = self._take(turn)
            cursor = self._connection.cursor()
            self._file.insist(lambda: cursor.execute(self._begin), self._deadline)
        except BaseException:
            self.cancel()
            raise
        self._cursor = cursor
        return cursor

    def _failed(self, error: sqlite3.Error) -> StoreError:
        explained = explain(error, self._file.path)
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            self._file.look_again()
            explained.retryable, explained.retry_s = self._clears, FULL_S
        self.cancel()
        return explained

    def _take(self, turn: Turn) -> sqlite3.Connection:
        return self._file.take_writer(turn, self._owner.synchronous, self._deadline)

    def _release(self) -> None:
        """Idempotent, so nothing is forgotten before it is returned."""
        assert self._turn is not None
        self._file.return_writer(self._turn)
        self._turn = self._cursor = self._connection = None
