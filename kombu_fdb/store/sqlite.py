"""The embedded store: one ordered table in a SQLite file, shared by the processes of one host.

Model. A writing transaction takes its turn (:mod:`~kombu_fdb.store.sqlite_lock`) at its first operation, begins
immediately, applies each operation as it comes and commits; so it sees its own writes, and nothing can conflict with
it. One that promised to be read-only reads a snapshot on a connection of its own, beside the writer. After the commit,
and after the next writer was let in, bells are rung (:mod:`~kombu_fdb.store.sqlite_bell`).

The version is a counter in a row of its own (``sqlite_files.SCHEMA``), moved only by transactions that use a
versionstamp; it rolls back with them. Its order is the order of commits, because writers take turns.

What fails:

* a process is killed, even by -9: its uncommitted transaction is ignored by the next reader, its lock is free;
* the machine loses power: with ``synchronous="full"`` nothing that was committed is lost, with ``"normal"`` the last
  moments may be, in commit order and without damage;
* the process forks: SQLite can't be carried into a child (https://www.sqlite.org/howtocorrupt.html, 2.6), not even
  closed there: its library remembers locks of files, and those the child does not have. So all connections are closed
  *before* a fork, as soon as the running transactions end, and opened again when needed. Objects of the parent raise
  ``ForkedError`` in the child. If a transaction does not end in time, or the fork bypassed Python, the child can't
  use this file any more and says so.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

from kombu_fdb.clock import Clock, SystemClock
from kombu_fdb.errors import ForkedError, OptionError, StoreUnavailable
from kombu_fdb.store import sqlite_fork
from kombu_fdb.store.sqlite_bell import Listener, Ringer
from kombu_fdb.store.sqlite_files import check_path, connect, create, explain, explain_os, open_sidecar
from kombu_fdb.store.sqlite_lock import WriterLock
from kombu_fdb.store.sqlite_transaction import ReadingTransaction, SqliteTransaction
from kombu_fdb.store.watch import OneShotWatch

__all__ = ["SqliteDatabase"]

T = TypeVar("T")

IDLE_READERS = 8
#: SQLite's own locks are held for microseconds (recovery after a crash, another program).
BUSY_PAUSE_S = 0.001


class SqliteDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in a file; safe for many threads and many processes of one host."""

    #: A commit here has happened, or has not, by the time it returns.
    commit_may_be_unknown = False

    def __init__(self, path: str, synchronous: str, clock: Clock) -> None:
        self.path = path
        self.synchronous = synchronous
        self.clock = clock
        self.pid = os.getpid()
        self._closed = False
        self._readers: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self.users = sqlite_fork.Users()

    @classmethod
    def open(
        cls, path: str, *, synchronous: str = "normal", clock: Clock | None = None, timeout_s: float = 10.0
    ) -> SqliteDatabase:
        """Open the file, made if absent (its directory is not).

        ``synchronous``: ``"normal"`` survives every crash of a process, ``"full"`` also a power cut. Raises
        ``StoreUnavailable`` with the fix if the file can't be used.
        """
        if synchronous not in ("normal", "full"):
            raise OptionError("synchronous is 'normal' or 'full'", given=synchronous)
        database = cls(check_path(os.fspath(path)), synchronous, clock or SystemClock())
        sqlite_fork.refuse_tainted(database.path)
        try:
            database._open_files(timeout_s)
        except OSError as error:
            raise explain_os(error, database.path) from error
        sqlite_fork.guard(database)
        return database

    def begin(self, *, timeout_s: float, read_only: bool = False) -> SqliteTransaction:
        if os.getpid() != self.pid:
            raise ForkedError("this SQLite database was opened before the process forked", path=self.path)
        if self._closed:
            raise StoreUnavailable("the database was closed", path=self.path)
        return (ReadingTransaction if read_only else SqliteTransaction)(self, timeout_s)

    def close(self) -> None:
        """Close once the running transactions have ended. Armed watches never fire."""
        if self._closed or os.getpid() != self.pid:
            return
        self._closed = True
        sqlite_fork.unguard(self)
        self.listener.close()
        if self.users.stop(timeout_s=1.0):
            self.close_connections()
            self.lock.close()
            self._ringer.close_files()

    @property
    def armed_watches(self) -> int:
        """How many watches of this process wait; for tests that look for leaks."""
        return self.listener.armed

    # Opening

    def _open_files(self, timeout_s: float) -> None:
        deadline = self.clock.monotonic() + timeout_s
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        # Whoever opens the file to others (chmod, before or after) opens what stands beside it.
        mode = os.stat(self.path).st_mode & 0o666
        gate, main = open_sidecar(f"{self.path}-gate", mode), open_sidecar(f"{self.path}-lock", mode)
        self.lock = WriterLock(gate, main, self.clock)
        bells = f"{self.path}-bells"
        self.listener = Listener(bells, mode, self.read_values)
        try:
            self._ringer = Ringer(bells, mode, self.listener)
            self.lock.acquire(timeout_s)
            try:
                self._writer = self._open_writer(deadline)
            finally:
                self.lock.release()
        except BaseException:
            self.lock.close()
            raise

    def _open_writer(self, deadline: float) -> sqlite3.Connection:
        connection = self.insist(lambda: connect(self.path, writer=True, synchronous=self.synchronous), deadline)
        try:
            self.insist(lambda: create(connection), deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def insist(self, step: Callable[[], T], deadline: float) -> T:
        """Do ``step``, again while SQLite is busy, until the deadline; its errors become ours."""
        while True:
            try:
                return step()
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code != sqlite3.SQLITE_BUSY or self.clock.monotonic() > deadline:
                    raise explain(error, self.path) from error
            self.clock.sleep(BUSY_PAUSE_S)

    # Connections, for the transactions

    def take_writer(self, deadline: float) -> sqlite3.Connection:
        """The right to write, and the connection to do it with."""
        self.lock.acquire(deadline - self.clock.monotonic())
        try:
            self.users.enter(deadline - self.clock.monotonic())
        except BaseException:
            self.lock.release()
            raise
        if self._writer is None:
            try:
                self._writer = self._open_writer(deadline)
            except BaseException:
                self.return_writer()
                raise
        return self._writer

    def return_writer(self) -> None:
        self.users.leave()
        self.lock.release()

    def discard_writer(self) -> None:
        """It failed in a way that leaves its state in doubt."""
        connection, self._writer = self._writer, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def take_reader(self, deadline: float) -> sqlite3.Connection:
        self.users.enter(deadline - self.clock.monotonic())
        try:
            return self._readers.pop()
        except IndexError:
            pass
        try:
            return self.insist(lambda: connect(self.path, writer=False, synchronous=self.synchronous), deadline)
        except BaseException:
            self.users.leave()
            raise

    def return_reader(self, connection: sqlite3.Connection, *, sound: bool) -> None:
        if sound and len(self._readers) < IDLE_READERS:
            self._readers.append(connection)
        else:
            connection.close()
        self.users.leave()

    def close_connections(self) -> None:
        """Only while no transaction runs; they are opened again when needed."""
        self.discard_writer()
        while self._readers:
            self._readers.pop().close()

    def connections(self) -> list[sqlite3.Connection]:
        return [*self._readers, *([self._writer] if self._writer is not None else [])]

    def close_files(self) -> None:
        """In a forked child: give up the copies of the parent's descriptors."""
        self.lock.close_files()
        self.listener.close_files()
        self._ringer.close_files()

    # Watches

    def ring(self, keys: Sequence[bytes]) -> None:
        self._ringer.ring(keys)

    def prepare_to_listen(self) -> None:
        """What can fail of arming a watch; before the commit, for after it nothing may."""
        try:
            self.listener.open()
        except OSError as error:
            raise explain_os(error, self.path) from error

    def arm(self, watches: Sequence[OneShotWatch]) -> None:
        """Register, then compare with what the arming transaction saw: nothing can fall between. Never raises."""
        for watch in watches:
            self.listener.arm(watch)
        self.listener.compare(watches)

    def read_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        transaction = self.begin(timeout_s=1.0, read_only=True)
        try:
            return transaction.get_many(keys)
        finally:
            transaction.cancel()
