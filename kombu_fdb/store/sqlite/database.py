"""The embedded store: one ordered table in a SQLite file, shared by the processes of one host.

Model of the open files: each one once. A file is its device and inode, whatever path led to it. The first handle that
is *attached* opens it, the last one that is *detached* closes it, and a handle that comes while the last one closes
opens it anew: SQLite itself knows how to have a file open twice. A fork waits until no thread attaches or detaches; the
child begins with nothing.

Model of the store. A writing transaction notes what it changes, and takes its turn
(:mod:`~kombu_fdb.store.sqlite.write_lock`) at its first read, or to commit. From then on it is alone, so nothing can
conflict with it; a read finds written what was noted before. One that promised to be read-only reads a snapshot on a
connection of its own, beside the writer. After the commit, and after the next writer was let in, bells are rung
(:mod:`~kombu_fdb.store.sqlite.wakeups`).

The version is a counter in a row of its own (``files.SCHEMA``), moved only by transactions that use a versionstamp;
it is written with all the rest, and rolls back with them. Its order is the order of commits, because writers take
turns.

A :class:`SqliteDatabase` is a handle of an open file, with the options of its client.

What fails:

* a process is killed, even by -9: its uncommitted transaction is ignored by the next reader, its lock is free;
* the machine loses power: with ``synchronous="full"`` nothing that was committed is lost, with ``"normal"`` the last
  moments may be, in commit order and without damage;
* a signal handler raises, a greenlet is killed: at whatever instruction that happens, ``cancel`` of the transaction
  returns all that it had taken (:mod:`~kombu_fdb.primitives.locks`);
* the file is deleted or replaced: commits fail and say so, none goes into a file without a name;
* the disk is full: what needs no more space goes on (:mod:`~kombu_fdb.store.sqlite.space`);
* the process forks: SQLite can't be carried into a child (https://www.sqlite.org/howtocorrupt.html, 2.6), not even
  closed there: its library remembers locks of files, and those the child does not have. So all connections are closed
  *before* a fork, as soon as the running transactions end, and opened again when needed. Objects of the parent raise
  ``ForkedError`` in the child. If a transaction does not end in time, or the fork bypassed Python, the child can't
  use this file any more and says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence

from kombu_fdb.errors import ForkedError, OptionError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock, SystemClock
from kombu_fdb.primitives.locks import FairLock, Turn, surely
from kombu_fdb.store.sqlite import open_file
from kombu_fdb.store.sqlite.errors import explain_os
from kombu_fdb.store.sqlite.files import check_library, check_path, identify
from kombu_fdb.store.sqlite.open_file import CLOSE_S, OpenFile
from kombu_fdb.store.sqlite.transaction import ReadingTransaction, SqliteTransaction

# -- open files --------------------------------------------------------------------------------------------------------


# The process's state, because POSIX locks are: what it has open.
_open: set[OpenFile] = set()
_changing = FairLock()
#: By thread: several may fork, but only one at a time.
_forking: dict[int, Turn] = {}


def attach(handle: Hashable, path: str, clock: Clock, timeout_s: float) -> OpenFile:
    """The process's one :class:`OpenFile` for ``path``, a real path; it stays open until ``handle`` is detached.

    Raises ``StoreUnavailable``, with the fix.
    """

    def work() -> OpenFile:
        identity = identify(path)
        file = next((file for file in _open if file.is_at(identity)), None)
        if file is None:
            file = OpenFile(path, identity, clock, read_values)
        file.handles.add(handle)
        _open.add(file)
        return file

    try:
        return _changing.run(work, timeout_s)
    except OSError as error:
        raise explain_os(error, path) from error


def detach(handle: Hashable, file: OpenFile) -> None:
    """``handle`` needs it no more. Idempotent; in a child of the process that attached it does nothing."""

    def work() -> bool:
        file.handles.discard(handle)
        if not file.handles:
            _open.discard(file)
        return not file.handles

    if os.getpid() == file.pid and _changing.run(work, CLOSE_S):
        file.close()


def read_values(file: OpenFile, keys: Sequence[bytes]) -> list[bytes | None]:
    """What is stored of these keys."""
    transaction = ReadingTransaction(file, file, timeout_s=CLOSE_S)
    return surely(lambda: transaction.get_many(keys), transaction.cancel)


def _before_fork() -> None:
    turn = _forking[threading.get_ident()] = Turn()
    _changing.acquire(turn, open_file.WAIT_S)


def _after_in_parent() -> None:
    turn = _forking.pop(threading.get_ident(), None)
    if turn is not None:
        _changing.release(turn)


def _after_in_child() -> None:
    global _changing  # noqa: PLW0603 - a thread that is not here any more may have it
    _forking.clear()
    _changing = FairLock()
    _open.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# -- the database ------------------------------------------------------------------------------------------------------


class SqliteDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` in a file; safe for many threads and many processes of one host."""

    #: A commit here has happened, or has not, by the time it returns.
    commit_may_be_unknown = False
    writers_take_turns = True

    def __init__(self, path: str, synchronous: str, clock: Clock) -> None:
        self.path = path
        self.synchronous = synchronous
        self.clock = clock
        self.pid = os.getpid()
        self.closed = False
        self.file: OpenFile

    @classmethod
    def open(
        cls, path: str, *, synchronous: str = "normal", clock: Clock | None = None, timeout_s: float = 10.0
    ) -> SqliteDatabase:
        """Open the file, made if absent (its directory is not), within ``timeout_s`` seconds.

        ``synchronous``: ``"normal"`` survives every crash of a process, ``"full"`` also a power cut; it holds for the
        transactions of this handle. Raises ``StoreUnavailable`` with the fix if the file can't be used.
        """
        if synchronous not in ("normal", "full"):
            raise OptionError("synchronous is 'normal' or 'full'", given=synchronous)
        check_library()
        database = cls(check_path(os.fspath(path)), synchronous, clock or SystemClock())
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
        """Close it for this handle, the file with the last one. Running transactions end. Armed watches never fire.

        Takes some seconds at most: what other threads still use is closed when they have ended.
        """
        self.closed = True
        if os.getpid() == self.pid:
            self.file.listener.forget(self)
            detach(self, self.file)

    @property
    def armed_watches(self) -> int:
        """How many watches of this process wait; for tests that look for leaks."""
        return self.file.listener.armed

    def _probe(self, deadline: float) -> None:
        """Make the tables if they are not there; fails where this user may not write."""
        turn = Turn()
        surely(lambda: self.file.take_writer(turn, self.synchronous, deadline), lambda: self.file.return_writer(turn))
