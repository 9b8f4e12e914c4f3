"""The embedded store: one ordered table in a SQLite file, shared by the processes of one host.

Model of a transaction. A writing transaction *notes* its changes. Each key is noted in one of three places, depending
on its last change. A *row* is its new value, or None if it is cleared; a *sum* is added to the stored value; a *stamp*
is a value that the versionstamp completes. Keys that the versionstamp completes are not known yet, so they are in a
list. All of this is *written* at the commit, or before a read that might have to see it, by a few prepared statements.
So a row that changes twice is written once, and a write-only transaction needs the right to write only when it commits.

It begins with its first read, or when it writes what it has noted, and from then on it is the only writer
(:mod:`~kombu_fdb.store.sqlite.open_file`), so nothing can conflict with it. It ends with ``commit`` or ``cancel``. Its
*ticket* is made before anything is acquired (the lock, a connection, SQLite's transaction), and serves to release it
all. So ``cancel`` cleans up after an exception at any point, and may be called again if it was itself interrupted. An
interrupted write ends the transaction: half of what was noted is never committed. An interrupted commit has happened
completely, or not at all. After the commit, and after the next writer was let in, bells are rung
(:mod:`~kombu_fdb.store.sqlite.wakeups`), even if the commit was interrupted. A transaction that promised to be
read-only reads a snapshot on a connection of its own, beside the writer.

The version is a counter in a row of its own (``open_file.SCHEMA``), increased only by transactions that use a
versionstamp; it is written with the rest of the transaction, and rolled back with it. Its order is the order of
commits, because writers take turns.

Model of the open files: each file is open once. Its device and inode identify it, whatever the path. A
:class:`SqliteDatabase` is a handle to the file, with its client's options. The first handle that is *attached* opens
the file, the last one that is *detached* closes it, and a handle that is attached during that closing opens it again:
SQLite itself can have a file open twice. A fork waits until no thread attaches or detaches; the child begins without
open files.

What fails:

* a process is killed, even by -9: the next reader ignores its uncommitted transaction, and its lock is free;
* the machine loses power: with ``synchronous="full"`` no commit is lost, with ``"normal"`` the latest commits may be,
  in order and without damage;
* a signal handler raises, or a greenlet is killed: at whatever instruction that happens, the transaction's ``cancel``
  releases all that it has acquired (:mod:`~kombu_fdb.primitives.interruption`);
* the file is deleted or replaced: commits fail with an error that says so; none goes into a file without a name;
* the disk is full: transactions that need no more space still work (:mod:`~kombu_fdb.store.sqlite.space`);
* the process forks: an open SQLite database can't be used in a child (https://www.sqlite.org/howtocorrupt.html, 2.6),
  not even closed: the library remembers file locks that the child does not have. So all connections are closed *before*
  a fork, as soon as the running transactions end, and reopened when needed. The parent's objects raise ``ForkedError``
  in the child. If a transaction does not end in time, or the fork bypasses Python, the child can't use this file, and
  an error says so.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

from kombu_fdb.errors import ForkedError, OptionError, StoreError, StoreFull, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.interruption import FairLock, Ticket, surely
from kombu_fdb.store.protocol import (
    KEY_BYTES,
    TRANSACTION_BYTES,
    VALUE_BYTES,
    KeyValue,
    Transaction,
    Watch,
    check_key,
    check_size,
    check_value,
)
from kombu_fdb.store.sqlite import files, open_file
from kombu_fdb.store.sqlite.errors import damage, explain_os
from kombu_fdb.store.sqlite.space import FULL_S

# -- transactions ------------------------------------------------------------------------------------------------------


#: The most keys per statement. Up to the second number, each key gets its own subquery: for ``IN``, SQLite first makes
#: a table, which takes twice as long.
MOST_PARAMETERS, FEW = 500, 8
#: The statements fix the query plan: once ``ANALYZE`` has seen a nearly empty broker, as most are, SQLite would find
#: some keys by scanning the table. The index of the keys has this name in files of either schema.
KV = "kv INDEXED BY sqlite_autoindex_kv_1"
#: A flipped bit, or another program, may have turned a value into text, a number or NULL. As bytes, it is unreadable.
BYTES = "CAST(ifnull(v, '') AS BLOB)"
GET = f"SELECT {BYTES} FROM {KV} WHERE k=?"
RANGE = f"SELECT k, {BYTES} FROM {KV} WHERE k>=? AND k<? ORDER BY k LIMIT ?"
RANGE_REVERSE = f"SELECT k, {BYTES} FROM {KV} WHERE k>=? AND k<? ORDER BY k DESC LIMIT ?"
SET = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v"
CLEAR = f"DELETE FROM {KV} WHERE k=?"
CLEAR_RANGE = f"DELETE FROM {KV} WHERE k>=? AND k<?"
BYTE_MAX = "INSERT INTO kv VALUES (?,?) ON CONFLICT (k) DO UPDATE SET v=excluded.v WHERE excluded.v>v"

#: What FoundationDB counts for one mutation and its conflict range, in addition to their bytes.
MUTATION_BYTES = 64
STAMP_BYTES = 10
#: The key of the row that holds the version; see ``open_file.SCHEMA``.
VERSION = 0
MENDED = "Open the store with `python -m kombu_fdb.doctor URL`, which repairs it"
#: The type in which keys and values are passed to SQLite: for ``bytes``, Python first looks up an adapter
#: (https://docs.python.org/3/library/sqlite3.html#sqlite3-adapters), which takes as long as everything else.
blob = bytearray

_pack_stamp = struct.Struct(">QH").pack


@lru_cache
def _get_so_many(number: int) -> str:
    """The statement for this many keys. For a few keys it returns one row, with the value of each, or NULL."""
    if number <= FEW:
        return f"SELECT {','.join([f'({GET})'] * number)}"
    return f"SELECT k, {BYTES} FROM {KV} WHERE k IN ({','.join('?' * number)})"


def _sum(stored: bytes | None, delta: int, width: int) -> bytes | None:
    """The sum in ``width`` bytes, with wrap-around, as FoundationDB adds; None for a sum of 0."""
    total = (int.from_bytes((stored or b"")[:width], "little") + delta) % (1 << 8 * width)
    return total.to_bytes(width, "little") if total else None


class SqliteTransaction(Transaction):
    """A transaction that may write: the only writer from its first read, or from its commit, to its end."""

    # Class attributes for what most transactions don't set, as each message needs a transaction.
    _ticket: Ticket | None = None
    _cursor: sqlite3.Cursor | None = None
    #: Whether it only reads, on a connection of its own.
    _reads = False
    _connection: sqlite3.Connection | None = None
    _ended = False
    _sent = False
    _stamp = b""
    #: Whether something is cleared.
    _clears = False
    #: As in :meth:`~kombu_fdb.store.protocol.Transaction.fill`.
    _fills = False
    _moves = False
    #: The size of all noted changes, as FoundationDB counts it.
    _size = 0
    _most = TRANSACTION_BYTES

    def __init__(self, file: open_file.OpenFile, owner: SqliteDatabase | open_file.OpenFile, timeout_s: float) -> None:
        self._file = file
        self._owner = owner
        self._deadline = file.clock.monotonic() + timeout_s
        self._rows: dict[bytes, bytes | None] = {}
        self._sums: dict[bytes, tuple[int, int]] = {}
        self._stamps: dict[bytes, tuple[bytes, bytes]] = {}
        self._stamped: list[tuple[bytes, bytes, bytes]] = []
        self._bells: list[bytes] = []
        self._watches: list[Watch] = []

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        if key in self._rows and not self._ended:
            return self._rows[key]
        if key in self._sums or key in self._stamps:
            self._write()
        rows = self._run(GET, (blob(key),))
        return rows[0][0] if rows else None

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        self._write()
        found = self._stored(keys)
        return [found.get(key) for key in keys]

    def _stored(self, keys: Sequence[bytes | int]) -> dict[Any, Any]:
        """The stored values of these keys; None, or no entry, for absent ones."""
        found: dict[Any, Any] = {}
        for first in range(0, len(keys), MOST_PARAMETERS):
            some = [*keys[first : first + MOST_PARAMETERS]]
            # Few different statements, so that they stay prepared: the last key is repeated to reach a power of two.
            size = 1 << (len(some) - 1).bit_length()
            some += [some[-1]] * (size - len(some))
            rows = self._run(_get_so_many(size), [blob(key) if key else key for key in some])
            found.update(zip(some, rows[0], strict=True) if size <= FEW else rows)
        return found

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        self._write()
        # One more row shows whether the last one is in order. SQLite has no number above the largest limit.
        most = limit + 1 if 0 < limit < sys.maxsize else -1
        rows = self._run(RANGE_REVERSE if reverse else RANGE, (blob(begin), blob(end), most))
        try:
            in_order = rows == sorted(rows, reverse=reverse)
        except TypeError:  # a key is text
            in_order = False
        if not in_order:
            raise self._failed(damage())
        return rows[:limit] if limit else rows

    # Blind writes: noted

    @property
    def read_only(self) -> bool:
        return not self._size

    def set(self, key: bytes, value: bytes) -> None:
        self._size = size = self._size + 3 * len(key) + len(value) + MUTATION_BYTES
        if size > self._most or len(key) > KEY_BYTES or len(value) > VALUE_BYTES:
            self._refuse(key, value)
        self._rows[key] = value
        if self._sums or self._stamps:
            self._sums.pop(key, None)
            self._stamps.pop(key, None)

    def clear(self, key: bytes) -> None:
        self._size = size = self._size + 3 * len(key) + MUTATION_BYTES
        if size > self._most or len(key) > KEY_BYTES:
            self._refuse(key)
        self._clears = True
        self._rows[key] = None
        if self._sums or self._stamps:
            self._sums.pop(key, None)
            self._stamps.pop(key, None)

    def clear_run(self, keys: Sequence[bytes]) -> None:
        lengths = list(map(len, keys))
        self._size = size = self._size + 3 * sum(lengths) + MUTATION_BYTES * len(keys)
        if size > self._most or max(lengths) > KEY_BYTES:
            self._refuse(max(keys, key=len))
        self._clears = True
        self._rows.update(dict.fromkeys(keys))
        if self._sums or self._stamps:
            for key in keys:
                self._sums.pop(key, None)
                self._stamps.pop(key, None)

    def fill(self, *, moving: bool = False) -> None:
        if moving:
            self._moves = True
        else:
            self._fills = True

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        self._size = size = self._size + 3 * len(key) + width + MUTATION_BYTES
        if size > self._most or len(key) > KEY_BYTES:
            self._refuse(key)
        before = self._sums.get(key)
        if key in self._rows:
            self._rows[key] = _sum(self._rows[key], delta, width)
        elif key in self._stamps or (before is not None and before[1] != width):
            self._write()
            self._sums[key] = delta, width
        else:
            self._sums[key] = (delta if before is None else before[0] + delta), width

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        length = len(prefix) + STAMP_BYTES + len(suffix)
        self._size = size = self._size + 3 * length + len(value) + MUTATION_BYTES
        if size > self._most or length > KEY_BYTES or len(value) > VALUE_BYTES:
            self._refuse(bytes(length), value)
        self._stamped.append((prefix, suffix, value))

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        length = len(prefix) + STAMP_BYTES + len(suffix)
        self._size = size = self._size + 3 * len(key) + length + MUTATION_BYTES
        if size > self._most or len(key) > KEY_BYTES or length > VALUE_BYTES:
            self._refuse(key, bytes(length))
        self._rows.pop(key, None)
        self._sums.pop(key, None)
        self._stamps[key] = prefix, suffix
        self._bells.append(key)

    def _refuse(self, key: bytes, value: bytes = b"") -> None:
        """Raise because a key, a value or the whole transaction is too large."""
        check_key(key)
        check_value(value)
        check_size(self._size)

    # Writes that are more than noted

    def clear_range(self, begin: bytes, end: bytes) -> None:
        check_key(begin)
        check_key(end)
        self._size = size = self._size + 6 * (len(begin) + len(end)) + MUTATION_BYTES
        if size > self._most:
            self._refuse(begin)
        self._write()
        self._clears = True
        self._bound()
        self._run(CLEAR_RANGE, (begin, end))

    def byte_max(self, key: bytes, value: bytes) -> None:
        self._size = size = self._size + 3 * len(key) + len(value) + MUTATION_BYTES
        if size > self._most or len(key) > KEY_BYTES or len(value) > VALUE_BYTES:
            self._refuse(key, value)
        self._write()
        self._run(BYTE_MAX, (key, value))

    def _write(self) -> None:
        """Write the noted changes. Reads the stored values of the sums and the version in one statement."""
        if not (self._rows or self._stamped or self._sums or self._stamps):
            return
        cursor = self._cursor or self._start()
        self._ended = True  # until all of it is written
        rows, sums, stamped, stamps = self._rows, self._sums, self._stamped, self._stamps
        self._rows, self._sums, self._stamped, self._stamps = {}, {}, [], {}
        asked: list[bytes | int] = [*sums]
        is_first = not self._stamp and bool(stamped or stamps)
        if is_first:
            asked.append(VERSION)
        try:
            if asked[1:] == [VERSION]:  # most messages ask for one counter and the version
                row = cursor.execute(_get_so_many(2), (blob(asked[0]), VERSION)).fetchone()
                stored: dict[Any, Any] = dict(zip(asked, row, strict=True))
            else:
                stored = self._stored(asked)
            kept: list[tuple[bytearray | int, bytearray | int]] = []
            if is_first:
                digits = stored.get(VERSION) or b""
                if not digits.isdigit() or len(digits) > open_file.VERSION_DIGITS:
                    raise StoreUnavailable(
                        "the database has lost count of its commits", path=self._file.path, fix=MENDED
                    )
                version = int(digits) + 1
                kept.append((VERSION, version))
                self._stamp = _pack_stamp(version, 0)
            stamp = self._stamp
            for prefix, suffix, value in stamped:
                kept.append((blob(prefix + stamp + suffix), blob(value)))
            for key, (prefix, suffix) in stamps.items():
                kept.append((blob(key), blob(prefix + stamp + suffix)))
            for key, (delta, width) in sums.items():
                total = _sum(stored.get(key), delta, width)
                if total is not None:
                    kept.append((blob(key), blob(total)))
                elif stored.get(key) is not None:
                    rows[key] = None
            gone = []
            for key, new in rows.items():
                if new is None:
                    gone.append((blob(key),))
                else:
                    kept.append((blob(key), blob(new)))
            self._clears = self._clears or bool(gone)
            if not self._file.space.plenty:
                self._bound()
            if gone:
                cursor.executemany(CLEAR, gone)
            if kept:
                cursor.executemany(SET, kept)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._ended = False

    def _bound(self) -> None:
        """On a nearly full disk, limit how much space the transaction may use, depending on what it does."""
        try:
            if self._cursor is None:
                self._start()
            self._file.grant(fills=self._fills, moves=self._moves, clears=self._clears)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    # Conflicts: none, writers take turns

    def add_read_conflict_key(self, key: bytes) -> None:
        pass

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        pass

    # Watches and the end

    def watch(self, key: bytes) -> Watch:
        # Do now what can fail when a watch is armed; after the commit nothing may fail.
        try:
            self._file.listener.open()
        except OSError as error:
            raise explain_os(error, f"{self._file.path}-bells") from error
        watch = Watch(key, self._file.listener.disarm, seen=self.get(key))
        self._watches.append(watch)
        return watch

    def commit(self) -> None:
        if self._ended:
            raise StoreError("the transaction has ended")
        self._write()
        cursor, ticket = self._cursor, self._ticket
        if cursor is not None and ticket is not None:
            try:
                self._file.check_place()
            except StoreUnavailable:
                self.cancel()
                raise
            self._sent = True
            try:
                cursor.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed(error) from error
            self._file.return_writer(ticket)  # as _release does
            self._ticket = self._cursor = None
        self._ended = True
        if self._bells:
            self._file.ringer.ring(self._bells)
            self._bells = []
        if self._watches:
            self._arm()

    def cancel(self) -> None:
        self._ended = True
        if self._ticket is not None:
            self._release()
        if self._sent and self._bells:
            self._file.ringer.ring(self._bells)
            self._bells = []

    def _arm(self) -> None:
        """Register the watches, then compare with what this transaction saw: no change is missed. Never raises."""
        listener = self._file.listener
        try:
            for watch in self._watches:
                listener.arm(watch, self._owner)
        except StoreUnavailable:
            for watch in self._watches:
                watch.fire()
        listener.compare(self._watches)

    def _run(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        try:  # each row may be on another unreadable page
            return (self._cursor or self._start()).execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _start(self) -> sqlite3.Cursor:
        if self._ended or self._ticket is not None:  # has a ticket: its start was interrupted
            raise StoreError("the transaction has ended")
        if self._owner.closed:
            raise StoreUnavailable("the database was closed", path=self._file.path)
        file, deadline = self._file, self._deadline
        ticket = self._ticket = Ticket()
        try:
            if self._reads:
                connection = self._connection = file.take_reader(ticket, deadline)
            else:
                connection = file.take_writer(ticket, self._owner.synchronous, deadline)
            cursor = connection.cursor()
            begin = "BEGIN" if self._reads else "BEGIN IMMEDIATE"
            try:
                cursor.execute(begin)
            except sqlite3.Error:
                file.insist(partial(cursor.execute, begin), deadline)
        except BaseException:
            self.cancel()
            raise
        self._cursor = cursor
        return cursor

    def _failed(self, error: sqlite3.Error) -> StoreError:
        explained = self._file.explained(error)
        if isinstance(explained, StoreFull):
            self._file.space.forget()
            explained.fills, explained.moves = self._fills, self._moves
            # A transaction that moves something has used up its share, and the end of a reader does not restore it.
            explained.retryable, explained.retry_s = self._clears and not self._moves, FULL_S
        self.cancel()
        return explained

    def _release(self) -> None:
        """Release what was acquired. Idempotent: each resource is released before it is forgotten."""
        assert self._ticket is not None
        self._file.return_writer(self._ticket)
        self._ticket = self._cursor = None


class ReadingTransaction(SqliteTransaction):
    """A transaction that promised not to write: a snapshot beside the writer, on a connection of its own."""

    _reads = True
    _most = -1

    def commit(self) -> None:
        if self._ended:
            raise StoreError("the transaction has ended")
        if self._cursor is not None:
            self._run("COMMIT", ())
            self._release()
        self._ended = True
        if self._watches:
            self._arm()

    def _refuse(self, key: bytes, value: bytes = b"") -> None:
        raise StoreError("can't write in a transaction that was begun read-only")

    def _release(self) -> None:
        assert self._ticket is not None
        connection = self._connection
        sound = True
        try:
            if connection is not None and connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            sound = False
        # Forget it first: a connection that is returned twice would serve two threads.
        self._cursor = self._connection = None
        if connection is not None:
            self._file.return_reader(connection, sound=sound)
        self._file.leave(self._ticket)
        self._ticket = None


# -- open files --------------------------------------------------------------------------------------------------------


# The open files are the process's state, because POSIX locks are.
_open: set[open_file.OpenFile] = set()
_changing = FairLock()
#: By thread: several threads may fork, but only one at a time.
_forking: dict[int, Ticket] = {}


def attach(handle: Hashable, path: str, clock: Clock, timeout_s: float) -> open_file.OpenFile:
    """The process's only :class:`OpenFile` for ``path``, a real path; it stays open until ``handle`` is detached.

    Raises ``StoreUnavailable``, with the fix.
    """

    def work() -> open_file.OpenFile:
        identity = files.identify(path)
        file = next((file for file in _open if file.is_at(identity)), None)
        if file is None:
            file = open_file.OpenFile(path, identity, clock, read_values)
        file.handles.add(handle)
        _open.add(file)
        return file

    try:
        return _changing.run(work, timeout_s)
    except OSError as error:
        raise explain_os(error, path) from error


def detach(handle: Hashable, file: open_file.OpenFile) -> None:
    """End the use of the file by ``handle``. Idempotent; does nothing in a child of the process that attached it."""

    def work() -> bool:
        file.handles.discard(handle)
        if not file.handles:
            _open.discard(file)
        return not file.handles

    if os.getpid() == file.pid and _changing.run(work, open_file.CLOSE_S):
        file.close()


def read_values(file: open_file.OpenFile, keys: Sequence[bytes]) -> list[bytes | None]:
    """The stored values of these keys."""
    transaction = ReadingTransaction(file, file, timeout_s=open_file.CLOSE_S)
    return surely(lambda: transaction.get_many(keys), transaction.cancel)


def _before_fork() -> None:
    ticket = _forking[threading.get_ident()] = Ticket()
    _changing.acquire(ticket, open_file.WAIT_S)


def _after_in_parent() -> None:
    ticket = _forking.pop(threading.get_ident(), None)
    if ticket is not None:
        _changing.release(ticket)


def _after_in_child() -> None:
    global _changing  # noqa: PLW0603 - a thread of the parent may hold the old one
    _forking.clear()
    _changing = FairLock()
    _open.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# -- the database ------------------------------------------------------------------------------------------------------


class SqliteDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in a file; safe for many threads and many processes of one host."""

    #: A commit's outcome is known when it returns.
    commit_may_be_unknown = False
    writers_take_turns = True

    def __init__(self, path: str, synchronous: str, clock: Clock) -> None:
        self.path = path
        self.synchronous = synchronous
        self.clock = clock
        self.pid = os.getpid()
        self.closed = False
        self.file: open_file.OpenFile

    @classmethod
    def open(
        cls, path: str, *, synchronous: str = "normal", clock: Clock | None = None, timeout_s: float = 10.0
    ) -> SqliteDatabase:
        """Open the file within ``timeout_s`` seconds; it is created if absent, but its directory is not.

        ``synchronous``: ``"normal"`` survives every crash of a process, ``"full"`` also a power cut. It applies to this
        handle's transactions. Raises ``StoreUnavailable`` with the fix if the file can't be used.
        """
        if synchronous not in ("normal", "full"):
            raise OptionError("synchronous must be 'normal' or 'full'", given=synchronous)
        files.check_sqlite_version()
        database = cls(files.check_path(os.fspath(path)), synchronous, clock or Clock())
        open_file.refuse_tainted(database.path)
        deadline = database.clock.monotonic() + timeout_s
        database.file = attach(database, database.path, database.clock, timeout_s)
        try:
            database._probe(deadline)
        except BaseException:
            database.close()
            raise
        return database

    def begin(self, *, timeout_s: float, read_only: bool = False) -> SqliteTransaction:
        if os.getpid() != self.pid:
            raise ForkedError("this SQLite database was opened before the process forked", path=self.path)
        if self.closed:
            raise StoreUnavailable("the database was closed", path=self.path)
        return (ReadingTransaction if read_only else SqliteTransaction)(self.file, self, timeout_s)

    def close(self) -> None:
        """Close this handle, and with the last handle the file. Running transactions end. Armed watches never fire.

        Takes some seconds at most: what other threads still use is closed when their transactions end.
        """
        self.closed = True
        if os.getpid() == self.pid:
            self.file.listener.forget(self)
            detach(self, self.file)

    @property
    def armed_watches(self) -> int:
        """How many watches of this process are armed; for tests that look for leaks."""
        return self.file.listener.armed

    def _probe(self, deadline: float) -> None:
        """Create the tables if they are absent; fails if this user may not write."""
        ticket = Ticket()
        surely(
            lambda: self.file.take_writer(ticket, self.synchronous, deadline), lambda: self.file.return_writer(ticket)
        )
