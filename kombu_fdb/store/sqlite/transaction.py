"""One transaction of the SQLite store, operation by operation.

Model. It begins with its first read, or when it writes what it has noted so far
(:mod:`~kombu_fdb.store.sqlite.write_set`), and ends with ``commit`` or ``cancel``. Its *turn* is made before anything
is taken in its name (the lock, a connection, SQLite's transaction), and everything is undone by that turn: so
``cancel`` mends whatever an exception at any moment has left, and may be called again if it was cut short itself. A
write that an exception cut short ends the transaction: half of what was noted is never committed. A commit that one cut
short has happened, or has not; its bells are rung in both cases.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from kombu_fdb.errors import StoreError, StoreFull, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.locks import Turn
from kombu_fdb.store.limits import check_key
from kombu_fdb.store.protocol import KeyValue
from kombu_fdb.store.sqlite.errors import explain, explain_os
from kombu_fdb.store.sqlite.space import CLEARING, FILLING, FULL_S, MOVING
from kombu_fdb.store.sqlite.wakeups.listener import Listener
from kombu_fdb.store.sqlite.wakeups.notifier import Ringer
from kombu_fdb.store.sqlite.write_set import WriteSet, blob
from kombu_fdb.store.watch import OneShotWatch

__all__ = ["SqliteTransaction"]

#: Keys asked for in one statement.
MOST_PARAMETERS = 500
#: The plan is ours: after an ``ANALYZE`` of a broker that holds little, as it mostly does, SQLite would look for some
#: keys by scanning the table, for good. So the index of the keys is called in a file of each schema.
KV = "kv INDEXED BY sqlite_autoindex_kv_1"
GET = f"SELECT v FROM {KV} WHERE k=?"
RANGE = f"SELECT k, v FROM {KV} WHERE k>=? AND k<? ORDER BY k LIMIT ?"
RANGE_REVERSE = f"SELECT k, v FROM {KV} WHERE k>=? AND k<? ORDER BY k DESC LIMIT ?"
SET = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v"
CLEAR = f"DELETE FROM {KV} WHERE k=?"
CLEAR_RANGE = f"DELETE FROM {KV} WHERE k>=? AND k<?"
BYTE_MAX = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v WHERE excluded.v>v"


@lru_cache
def _get_so_many(number: int) -> str:
    return f"SELECT k, v FROM {KV} WHERE k IN ({','.join('?' * number)})"


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
    def grant(self, share: float) -> None: ...
    def look_again(self) -> None: ...
    def check_place(self) -> None: ...


class SqliteTransaction(WriteSet):
    """One that may write: alone from its first read, or from its commit, to its end."""

    __slots__ = ("_connection", "_cursor", "_deadline", "_ended", "_file", "_owner", "_sent", "_turn", "_watches")

    _begin = "BEGIN IMMEDIATE"

    def __init__(self, file: File, owner: Owner, timeout_s: float) -> None:
        super().__init__()
        self._file = file
        self._owner = owner
        self._deadline = file.clock.monotonic() + timeout_s
        self._turn: Turn | None = None
        self._cursor: sqlite3.Cursor | None = None
        self._connection: sqlite3.Connection | None = None
        self._ended = False
        self._sent = False
        self._watches: list[OneShotWatch] = []

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        if key in self._rows and not self._ended:
            return self._rows[key]
        if key in self._sums or key in self._stamps:
            self._write()
        row = self._run(GET, (blob(key),)).fetchone()
        return None if row is None else row[0]

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        self._write()
        found = self._stored([*map(blob, keys)])
        return [found.get(key) for key in keys]

    def _stored(self, keys: Sequence[bytearray | int]) -> dict[Any, Any]:
        """Of these rows those that are there."""
        found: dict[Any, Any] = {}
        for first in range(0, len(keys), MOST_PARAMETERS):
            found.update(self._get_some(keys[first : first + MOST_PARAMETERS]))
        return found

    def _get_some(self, keys: Sequence[bytearray | int]) -> list[Any]:
        # Few different statements, so that they stay prepared: the last key fills up to a power of two.
        size = 1 << (len(keys) - 1).bit_length()
        padded = [*keys, *[keys[-1]] * (size - len(keys))]
        return self._run(_get_so_many(size), padded).fetchall()

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        self._write()
        return self._run(RANGE_REVERSE if reverse else RANGE, (blob(begin), blob(end), limit or -1)).fetchall()

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        return [self.get_range(begin, end, limit=limit) for begin, end, limit in ranges]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        return self.get_many(keys), self.get_ranges(ranges)

    # Writes that are more than noted

    def clear_range(self, begin: bytes, end: bytes) -> None:
        check_key(begin)
        check_key(end)
        self._grow(0, 2 * (len(begin) + len(end)))
        self._write()
        self._clears = True
        self._bound()
        self._run(CLEAR_RANGE, (begin, end))

    def byte_max(self, key: bytes, value: bytes) -> None:
        self._grow(len(key), len(value))
        self._write()
        self._run(BYTE_MAX, (key, value))

    def _write(self) -> None:
        if not (self._rows or self._stamped or self._sums or self._stamps):
            return
        cursor = self._cursor or self._start()
        self._ended = True  # until all of it is written
        gone, kept = self._rows_with(self._stored(self._asked()))
        self._clears = self._clears or bool(gone)
        self._bound()
        try:
            if gone:
                cursor.executemany(CLEAR, gone)
            if kept:
                cursor.executemany(SET, kept)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._ended = False

    def _bound(self) -> None:
        """How much of a disk with little space the transaction may use depends on what it does."""
        try:
            if self._cursor is None:
                self._start()
            if self._fills or self._moves:
                self._file.grant(FILLING if self._fills else MOVING)
            elif self._clears:
                self._file.grant(CLEARING)
        except sqlite3.Error as error:
            raise self._failed(error) from error

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
        if self._ended:
            raise StoreError("the transaction has ended")
        self._write()
        if self._cursor is not None:
            self._send()
            self._release()
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
        if self._ended or self._turn is not None:  # or an exception cut its beginning short
            raise StoreError("the transaction has ended")
        if self._owner.closed:
            raise StoreUnavailable("the database was closed", path=self._file.path)
        self._turn = turn = Turn()
        try:
            self._connection = self._take(turn)
            cursor = self._connection.cursor()
            self._file.insist(partial(cursor.execute, self._begin), self._deadline)
        except BaseException:
            self.cancel()
            raise
        self._cursor = cursor
        return cursor

    def _failed(self, error: sqlite3.Error) -> StoreError:
        explained = explain(error, self._file.path)
        if isinstance(explained, StoreFull):
            self._file.look_again()
            explained.fills, explained.moves = self._fills, self._moves
            # Who moves something has used up a share, which no reader that ends gives back.
            explained.retryable, explained.retry_s = self._clears and not self._moves, FULL_S
        self.cancel()
        return explained

    def _take(self, turn: Turn) -> sqlite3.Connection:
        return self._file.take_writer(turn, self._owner.synchronous, self._deadline)

    def _release(self) -> None:
        """Idempotent, so nothing is forgotten before it is returned."""
        assert self._turn is not None
        self._file.return_writer(self._turn)
        self._turn = self._cursor = self._connection = None
