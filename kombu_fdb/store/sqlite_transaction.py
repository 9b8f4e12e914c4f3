"""One transaction of the SQLite store, operation by operation."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kombu_fdb.errors import StoreError
from kombu_fdb.store.limits import KEY_BYTES, TRANSACTION_BYTES, VALUE_BYTES, check_key, check_size, check_value
from kombu_fdb.store.protocol import KeyValue
from kombu_fdb.store.sqlite_files import explain
from kombu_fdb.store.watch import OneShotWatch

if TYPE_CHECKING:
    from kombu_fdb.store.sqlite import SqliteDatabase

__all__ = ["ReadingTransaction", "SqliteTransaction"]

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


class SqliteTransaction:
    """One that may write: alone from its first operation to its end."""

    __slots__ = (
        "_bells",
        "_connection",
        "_cursor",
        "_db",
        "_deadline",
        "_ended",
        "_size",
        "_stamp",
        "_watches",
        "_wrote",
    )

    _begin = "BEGIN IMMEDIATE"

    def __init__(self, database: SqliteDatabase, timeout_s: float) -> None:
        self._db = database
        self._deadline = database.clock.monotonic() + timeout_s
        self._cursor: sqlite3.Cursor | None = None
        self._connection: sqlite3.Connection | None = None
        self._ended = False
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

    # Writes

    def set(self, key: bytes, value: bytes) -> None:
        self._write(SET, key, value)

    def clear(self, key: bytes) -> None:
        check_key(key)
        self._change(CLEAR, (key,), 3 * len(key))

    def clear_range(self, begin: bytes, end: bytes) -> None:
        check_key(begin)
        check_key(end)
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
        self._db.prepare_to_listen()
        watch = OneShotWatch(key, self._db.listener.disarm, seen=self.get(key))
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        if self._cursor is not None:
            self._run("COMMIT", ())
            self._release(sound=True)
        elif self._ended:
            raise StoreError("the transaction has ended")
        self._ended = True
        if self._bells:
            self._db.ring(self._bells)
        if self._watches:
            self._db.arm(self._watches)

    def cancel(self) -> None:
        self._ended = True
        if self._cursor is not None:
            self._give_up()

    def _run(self, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        try:
            return (self._cursor or self._start()).execute(sql, parameters)
        except sqlite3.Error as error:
            self.cancel()
            raise explain(error, self._db.path) from error

    def _start(self) -> sqlite3.Cursor:
        if self._ended:
            raise StoreError("the transaction has ended")
        connection = self._connection = self._take()
        cursor = connection.cursor()
        try:
            self._db.insist(lambda: cursor.execute(self._begin), self._deadline)
        except BaseException:
            self._release(sound=False)
            raise
        self._cursor = cursor
        return cursor

    def _give_up(self) -> None:
        assert self._cursor is not None
        sound = True
        if self._connection is not None and self._connection.in_transaction:
            try:
                self._cursor.execute("ROLLBACK")
            except sqlite3.Error:
                sound = False
        self._release(sound=sound)

    def _take(self) -> sqlite3.Connection:
        return self._db.take_writer(self._deadline)

    def _release(self, *, sound: bool) -> None:
        self._cursor = self._connection = None
        if not sound:
            self._db.discard_writer()
        self._db.return_writer()


class ReadingTransaction(SqliteTransaction):
    """One that promised not to write: a snapshot beside the writer."""

    __slots__ = ()

    _begin = "BEGIN"

    def _take(self) -> sqlite3.Connection:
        return self._db.take_reader(self._deadline)

    def _change(self, sql: str, parameters: tuple[bytes, ...], size: int) -> None:
        raise StoreError("write in a transaction that was begun read-only", key=parameters[0])

    def _next_stamp(self) -> bytes:
        raise StoreError("write in a transaction that was begun read-only")

    def _release(self, *, sound: bool) -> None:
        connection, self._cursor, self._connection = self._connection, None, None
        assert connection is not None
        self._db.return_reader(connection, sound=sound)
