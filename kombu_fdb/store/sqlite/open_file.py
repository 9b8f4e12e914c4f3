"""An open SQLite file: its connections and locks, once per process; the order of writers; and how it survives a fork.

Model of the file. Handles are attached and detached (:mod:`~kombu_fdb.store.sqlite.database`); their options reach the
file with each transaction. ``running`` are the transactions that hold a connection, ``lock`` is the right to write. A
*barrier*, while it is up, keeps new transactions out. Each transaction has one
:class:`~kombu_fdb.primitives.interruption.Ticket` for both, made before anything is taken; ``return_writer``,
``return_reader`` and ``leave`` release whatever was taken with it, even after an interruption: each step at the barrier
is one call into C, and may be repeated.

What fails: the file is deleted or replaced. Then a commit would go where no process finds it, so each commit first
checks the names of the file and of its log, and fails. Once the file is back, everything works again.

Model of the write lock. SQLite lets one connection write at a time and the others retry with growing pauses, so a
process that publishes in a tight loop starves them. Here a writer first passes

1. its process's own queue (:class:`~kombu_fdb.primitives.interruption.FairLock`): first come, first served. Apart
   from the helper, only its head touches the two files below;
2. the *gate*, an flock: its holder is next in line, and only the holder waits for
3. *main*, an flock held while writing; its holder opens the gate for the next writer.

After its turn a writer finds the gate held by a waiting writer, so two writers in tight loops alternate.

A turn is short (some 50 us), so the next in line spins for about that long. All other waiting is done by a helper
thread in a blocking flock, because flock has no timeout. (Spinning at the gate as well would be quicker, but would
starve sleeping writers: with four writers on two cores, one of them got 1 %.)

While *busy* is set, the flocks belong to the helper. Once it has *main*, it sets *taken*, clears *busy* and wakes the
head: an flock belongs to the descriptor, so what the helper took is the head's. If the deadline passes first, the head
leaves and the helper continues to wait, for the next head. If there is no writer in the end, it unlocks.

What fails: when a holder dies, even by kill -9, the kernel releases its flocks. A forked child must close its copies of
the descriptors, or it would hold its parent's lock after the parent's death. A stopped holder (SIGSTOP) makes the
others fail with ``StoreUnavailable`` at their deadline. After an exception between any two steps, ``release`` cleans
up, and may be called twice: it unlocks whatever the head of the queue may have locked, and an extra unlock is harmless.

Model of the fork. A guard keeps SQLite's connections out of forked children: closed before the fork, reopened when
needed. Before a fork each open file lets no new transaction start, waits until the running ones have ended (``WAIT_S``
at most) and closes its connections. So SQLite's library has no state for the file when the process is copied. The child
closes its copies of the lock files and pipes.

If the running transactions do not end in time, or C code forked without Python's hooks before it, the child inherits
the library's record of locks that only its parent has. Such a file is *tainted* in the child: opening it fails with the
fix. The inherited connections are never closed or freed there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from fcntl import flock
from functools import partial
from shlex import quote
from typing import TypeVar

from kombu_fdb.errors import StoreError, StoreFull, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.interruption import FairLock, Signal, Ticket, instead_of_threads, start, would_wait_for_itself
from kombu_fdb.store.sqlite.errors import explain
from kombu_fdb.store.sqlite.files import Access
from kombu_fdb.store.sqlite.space import Space
from kombu_fdb.store.sqlite.wakeups import BellDirectory, Listener, Ringer

# -- the write lock ----------------------------------------------------------------------------------------------------


#: Tries at *main*: about as long as one short write transaction takes.
SPINS = 60
LONGEST_POLL_S = 0.002
#: How long closing waits for the writer and the transactions of other threads.
CLOSE_S = 1.0

AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


def _try_for_a_turn(fd: int, is_late: Callable[[], bool]) -> bool:
    for _ in range(SPINS):
        os.sched_yield()
        if is_late():  # on a busy machine, a yield may last as long as all other processes' time slices
            return False
        try:
            flock(fd, AT_ONCE)
        except BlockingIOError:
            continue
        return True
    return False


class WriteLock:
    """The right to write, within a process and between processes."""

    def __init__(self, path: str, gate: int, main: int, clock: Clock) -> None:
        self._path = path
        self._gate = gate
        self._main = main
        self._files = [gate, main]
        self._clock = clock
        self._writers = FairLock(clock)
        #: Whether the head of the queue may hold the gate; set before it does.
        self._at_gate = False
        self._busy = False
        #: Whether the helper has locked *main* for the head of the queue.
        self._taken = False
        self._asker: Ticket | None = None
        self._work = Signal()
        self._helper: threading.Thread | None = None
        self._error: OSError | None = None
        self._closed = False

    def acquire(self, ticket: Ticket, deadline: float) -> None:
        """Take the lock. Raises ``StoreUnavailable`` if it is not free by the deadline; even then, release ``ticket``.

        Raises ``StoreError`` at once in a thread that has the lock already, or waits for it.
        """
        if not self._writers.acquire(ticket, deadline - self._clock.monotonic()):
            raise would_wait_for_itself() if self._writers.mine else self._too_late()
        if self._closed:
            raise StoreUnavailable("the database was closed")
        if self._busy or not (self._taken or self._take_at_once(deadline)):
            self._wait(ticket, deadline)

    def held_by(self, ticket: Ticket) -> bool:
        """Whether ``ticket`` has the right to write; only its owner may ask."""
        return self._writers.head is ticket

    def release(self, ticket: Ticket) -> None:
        """End ``ticket``, however far it has got. Idempotent."""
        if self._writers.head is ticket:
            ticket.over = True  # before the look at _busy, see _give_back
            if not (self._busy or self._closed):
                self._taken = False
                flock(self._main, fcntl.LOCK_UN)
                if self._at_gate:
                    self._open_gate()
        self._writers.release(ticket)

    def close(self) -> bool:
        """Let no more writers in. False if one still writes: call again when that writer has ended. Idempotent."""
        self._closed = True
        ticket = Ticket()
        if not self._writers.acquire(ticket, CLOSE_S):
            return False
        if self._helper is None:
            self.close_files()
        else:  # the helper closes them once its flock returns
            self._work.set()
            if not self._busy:
                self._helper.join(CLOSE_S)
        self._writers.release(ticket)
        return True

    def close_files(self) -> None:
        """Close the descriptors. A forked child may do nothing else: the locks are its parent's."""
        while self._files:
            os.close(self._files.pop())

    def _take_at_once(self, deadline: float) -> bool:
        if not self._files:
            raise StoreUnavailable("the database was closed")
        self._at_gate = True
        try:
            flock(self._gate, AT_ONCE)
        except BlockingIOError:
            self._at_gate = False
            return False
        try:
            flock(self._main, AT_ONCE)
        except BlockingIOError:
            if not _try_for_a_turn(self._main, lambda: self._clock.monotonic() > deadline):
                return False
        flock(self._gate, fcntl.LOCK_UN)
        self._at_gate = False
        return True

    def _open_gate(self) -> None:
        flock(self._gate, fcntl.LOCK_UN)
        self._at_gate = False

    def _wait(self, ticket: Ticket, deadline: float) -> None:
        if instead_of_threads():  # a blocking flock in a "thread" would stop the whole process
            self._poll(deadline)
            return
        signal = ticket.listen()
        self._asker, self._error = ticket, None
        while self._busy or not (self._taken or self._take_at_once(deadline)):
            self._ask_helper()
            if not signal.wait(deadline - self._clock.monotonic()):
                raise self._too_late()
            if self._error is not None:
                raise StoreUnavailable("the lock file failed", reason=str(self._error)) from self._error

    def _poll(self, deadline: float) -> None:
        pause = 0.0001
        while not self._take_at_once(deadline):
            if self._clock.monotonic() > deadline:
                raise self._too_late()
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def _too_late(self) -> StoreUnavailable:
        path = quote(self._path)
        return StoreUnavailable(
            "another process or thread held the write lock until the deadline",
            fix=f"Find a process that hangs, or another program, with `fuser {path} {path}-lock`",
        )

    # The helper

    def _ask_helper(self) -> None:
        """Ask the helper. If it has already taken *main*, it only wakes the head again."""
        self._busy = True
        if self._helper is None or not self._helper.is_alive():
            self._helper = threading.Thread(target=self._help, name="kombu-fdb-sqlite-lock", daemon=True)
            start(self._helper)
        self._work.set()

    def _help(self) -> None:
        while not self._closed:
            self._work.wait(None)
            if self._busy:
                if not self._taken:
                    self._take_blocking()
                self._busy = False
                # In this order: a new asker registers first, and then checks whether the helper is busy.
                if self._asker is not None:
                    self._asker.wake()
                self._give_back()
        self.close_files()

    def _take_blocking(self) -> None:
        try:
            flock(self._gate, fcntl.LOCK_EX)
            flock(self._main, fcntl.LOCK_EX)
            self._taken = True
            self._open_gate()
        except OSError as error:
            self._error = error.with_traceback(None)

    def _give_back(self) -> None:
        """Unlock if there is no writer. A head that has not begun to leave unlocks when it does."""
        while (head := self._writers.head) is None or head.over:
            ticket = Ticket()
            if self._writers.acquire(ticket, LONGEST_POLL_S):
                self._taken = False
                if not self._closed:
                    flock(self._main, fcntl.LOCK_UN)
                self._writers.release(ticket)
                return


# -- connections -------------------------------------------------------------------------------------------------------


#: "cFDB" in the file's header: distinguishes a broker's database from an application's.
APPLICATION_ID = 0x63464442
WRITER_CACHE_KIB = 16_000
READER_CACHE_KIB = 2_000
#: The page size of a new file. Each commit writes whole pages, to the log and later to the file, so small pages mean
#: less to write.
PAGE_BYTES = 4096
WAL_KEEP_BYTES = 64 * 1024 * 1024
SQL_STATEMENTS = 64


#: The row with the key 0, a number, is the version. No range of keys includes it: for SQLite, a number is less than any
#: bytes. It is stored next to the bells and counters, so a commit writes one page less than with a separate table.
#:
#: Rows are in the order of their arrival, and only their keys are sorted, in an index: messages fill one page after the
#: other. If the rows were sorted (``WITHOUT ROWID``, as in older files), each queue would grow in the middle of the
#: tree, where every other publish moves rows to neighbouring pages. The same statements serve both.
SCHEMA = """
CREATE TABLE kv (k BLOB NOT NULL PRIMARY KEY, v BLOB NOT NULL);
INSERT INTO kv VALUES (0, 0);
"""

#: A damaged file may lack the version, as after ``.recover``, or have an impossibly high one. The number of
#: microseconds since 1970 exceeds any number of commits, so new messages come after all others.
VERSION_DIGITS = 18
MEND_VERSION = (
    "INSERT INTO kv SELECT 0, ? WHERE NOT EXISTS "
    f"(SELECT 1 FROM kv WHERE k=0 AND typeof(v)='integer' AND v BETWEEN 0 AND 1e{VERSION_DIGITS - 1}) "
    "ON CONFLICT (k) DO UPDATE SET v=excluded.v"
)


def connect(path: str, *, writer: bool) -> sqlite3.Connection:
    """A connection with the store's settings. It may find the file locked: the caller retries until its deadline."""
    # Not ``sqlite3.connect``, which tracers wrap: they would record a span for every statement, even of an idle worker.
    connection = sqlite3.Connection(
        path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=SQL_STATEMENTS
    )
    cache_kib = WRITER_CACHE_KIB if writer else READER_CACHE_KIB
    try:
        for pragma in (
            f"cache_size=-{cache_kib}",
            # Some systems map the file: then reading a page that the disk has lost ends the process by SIGBUS, and
            # SQLite searches the log for pages that are in its cache.
            "mmap_size=0",
            f"journal_size_limit={WAL_KEEP_BYTES}",
            "temp_store=MEMORY",
            # Some systems build SQLite to overwrite deleted pages with zeros: a purge would need as much room in the
            # log as it deletes, even on a full disk. FAST does so only where it costs no extra page.
            "secure_delete=FAST",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def set_synchronous(connection: sqlite3.Connection, synchronous: str) -> None:
    """Set it for later transactions. ``"full"`` also makes earlier ``"normal"`` commits durable."""
    connection.execute(f"PRAGMA synchronous={synchronous}").fetchall()
    if sys.platform == "darwin":
        connection.execute(f"PRAGMA fullfsync={int(synchronous == 'full')}").fetchall()


def create(connection: sqlite3.Connection, wall_ms: int) -> None:
    """Create the tables if the file is empty; refuse another program's database. Also checks that it can write."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id or tables:
            raise StoreUnavailable(
                "this SQLite database belongs to another program", fix="Give the broker its own file"
            )
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # before all else; an existing file keeps its page size
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != "wal":  # a new file, a copy by VACUUM INTO, or a changed one
        connection.execute("PRAGMA journal_mode=WAL").fetchall()  # readers beside a writer need it
    if application_id != APPLICATION_ID:
        connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA application_id={APPLICATION_ID};COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(MEND_VERSION, (wall_ms * 1000,))
    connection.execute("COMMIT")


# -- fork --------------------------------------------------------------------------------------------------------------


WAIT_S = 2.0
#: Only a fork or a close waits for transactions, and only then do transactions wait.
PAUSE_S = 0.0005


# Global, because forking concerns the process: which files are open, and which ones a child can't use.
_guarded: weakref.WeakSet[OpenFile] = weakref.WeakSet()
_stopping: list[OpenFile] = []
_stopped: list[OpenFile] = []
_tainted: set[tuple[int, int]] = set()


def refuse_tainted(path: str) -> None:
    """Raise ``StoreUnavailable`` if this process inherited open connections to the file."""
    for file in [file for file in _guarded if file.pid != os.getpid()]:
        _taint(file)  # C code forked, and the hooks did not run
        _guarded.discard(file)
    if _tainted and _identity(path) in _tainted:
        raise StoreUnavailable(
            "this process was forked while its parent had the database open",
            path=path,
            fix="Open the broker after the fork (uWSGI: `lazy-apps = true`), or close it in the parent before",
        )


def _before() -> None:
    for file in list(_guarded):
        _stopping.append(file)  # first: even after an exception from here on, the barrier must come down
        if file.stop(WAIT_S):
            file.close_connections()
            _stopped.append(file)


def _after_in_parent() -> None:
    _stopped.clear()
    while _stopping:
        _stopping.pop().stopped = False


def _after_in_child() -> None:
    clean = {id(file) for file in _stopped}
    _stopped.clear()
    _stopping.clear()
    for file in list(_guarded):
        if id(file) not in clean:
            _taint(file)
        file.close_files()
        _guarded.discard(file)


def _taint(file: OpenFile) -> None:
    _tainted.add(file.identity)
    for connection in file.connections():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# -- the open file -----------------------------------------------------------------------------------------------------


T = TypeVar("T")

IDLE_READERS = 8
#: SQLite's own locks are held for microseconds (recovery after a crash, another program).
BUSY_PAUSE_S = 0.001


class OpenFile:
    """Connections, locks and bells of one file. Thread-safe. Get it from ``database.attach``."""

    #: For the file's own transactions, which only read.
    synchronous = "normal"

    def __init__(
        self,
        path: str,
        identity: tuple[int, int],
        clock: Clock,
        read_values: Callable[[OpenFile, Sequence[bytes]], list[bytes | None]],
    ) -> None:
        """Open the files beside the database; connections are opened when needed. Raises ``StoreUnavailable``."""
        self.path = path
        self.identity = identity
        self.clock = clock
        self.pid = os.getpid()
        self.closed = False
        self.handles: set[Hashable] = set()
        self.running: set[Ticket] = set()
        #: Whether the barrier is up.
        self.stopped = False
        self._readers: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._synchronous = ""
        self._log: tuple[int, int] | None = None
        self._log_path = f"{path}-wal"
        self.access = Access.of(path)
        self.space = Space(path, self.access)
        bells = BellDirectory(f"{path}-bells", self.access)
        self.listener = Listener(bells, partial(read_values, self), clock)
        self.ringer = Ringer(bells, self.listener)
        try:
            gate = self.access.open_sidecar(f"{path}-gate")
            try:
                main = self.access.open_sidecar(f"{path}-lock")
            except BaseException:
                os.close(gate)
                raise
        except BaseException:
            bells.close()
            raise
        self.lock = WriteLock(path, gate, main, clock)
        _guarded.add(self)

    def close(self) -> None:
        """Close what is unused, within some seconds; the last transaction closes the rest. Idempotent."""
        self.closed = True
        self.listener.close()
        if self.lock.close() and self.stop(CLOSE_S):
            self.close_connections()
            self.ringer.close()
            _guarded.discard(self)

    def insist(self, step: Callable[[], T], deadline: float) -> T:
        """Do ``step``, repeating it while SQLite is busy, until the deadline. Translates SQLite's errors."""
        while True:
            try:
                return step()
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code != sqlite3.SQLITE_BUSY or self.clock.monotonic() > deadline:
                    raise self.explained(error) from error
            self.clock.sleep(BUSY_PAUSE_S)

    def explained(self, error: sqlite3.Error) -> StoreError:
        """SQLite's error as a ``StoreError``; if the file has lost its name, the error that says so."""
        try:
            _check(self.path, self.identity)
        except StoreUnavailable as replaced:
            return replaced
        return explain(error, self.path)

    # The writer

    def take_writer(self, ticket: Ticket, synchronous: str, deadline: float) -> sqlite3.Connection:
        """Take the right to write, and the writing connection. Raises ``StoreUnavailable`` at the deadline."""
        self.lock.acquire(ticket, deadline)
        self.running.add(ticket)
        if self.stopped:  # checked after entering: either ``stop`` sees this, or this sees ``stop``
            self._wait(ticket, deadline)
        writer = self._writer
        if writer is None:
            try:
                writer = self._open_writer(deadline)
            except StoreFull:  # no space for the log, or for its index
                if not self.space.let_go():
                    raise
                writer = self._open_writer(deadline)
            self._writer = writer
        if self._synchronous != synchronous:
            self._synchronous = ""
            self.insist(lambda: set_synchronous(writer, synchronous), deadline)
            self._synchronous = synchronous
        now = self.clock.monotonic()
        if now >= self.space.look_at:
            self.insist(lambda: self.space.bound(writer, now), deadline)
        return writer

    def return_writer(self, ticket: Ticket) -> None:
        """Roll back what was not committed, and let the next writer in. Idempotent."""
        writer = self._writer
        # Checked first, as there is rarely anything to do. ``writer`` may serve another transaction by now.
        if (self.closed or (writer is not None and writer.in_transaction)) and self.lock.held_by(ticket):
            try:
                if writer is not None and writer.in_transaction:
                    writer.execute("ROLLBACK")
            except sqlite3.Error:
                self.discard_writer()
            if self.closed:
                self.discard_writer()
        self.lock.release(ticket)
        self.running.discard(ticket)
        if self.closed:
            self.leave(ticket)

    def grant(self, *, fills: bool, moves: bool, clears: bool) -> None:
        """Give the writer its transaction's share of the reserve. Raises ``sqlite3.Error``."""
        if self._writer is not None:
            self.space.grant(self._writer, fills=fills, moves=moves, clears=clears)

    def discard_writer(self) -> None:
        """Close the writing connection: it is no longer needed, or its state is in doubt."""
        connection, self._writer = self._writer, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _open_writer(self, deadline: float) -> sqlite3.Connection:
        _check(self.path, self.identity)
        self.access.share_database(self.path)  # refuses a stranger's file
        connection = self.insist(lambda: connect(self.path, writer=True), deadline)
        try:
            self.insist(lambda: create(connection, self.clock.wall_ms()), deadline)
            self.access.share_database(self.path)
            self._log = _identity(self._log_path)
            # An overlay file system may give a file another inode when it is first changed or opened for writing.
            self.identity = _identity(self.path) or self.identity
        except BaseException:
            connection.close()
            raise
        self._synchronous = ""
        self.space.forget()
        return connection

    def is_at(self, identity: tuple[int, int]) -> bool:
        """Whether it is this file. Without a connection, a deleted file's inode may be another file's by now."""
        if self.identity != identity or self._writer is not None or self._readers:
            return self.identity == identity
        try:
            return _identity(self.path) == identity
        except OSError:  # this user lost access to the folder
            return True

    def check_place(self) -> None:
        """Check before a commit. Raises ``StoreUnavailable`` if the file that it would go into has lost its name."""
        try:  # check both at once, which nearly always succeeds; otherwise each one
            file, log = os.stat(self.path), os.stat(self._log_path)
            if (file.st_dev, file.st_ino) == self.identity and (log.st_dev, log.st_ino) == self._log:
                return
        except OSError:
            pass
        _check(self.path, self.identity)
        if self._log is not None:
            _check(self._log_path, self._log)

    # Readers

    def take_reader(self, ticket: Ticket, deadline: float) -> sqlite3.Connection:
        self.running.add(ticket)
        if self.stopped:  # as in ``take_writer``
            self._wait(ticket, deadline)
        _check(self.path, self.identity)
        try:
            return self._readers.pop()
        except IndexError:
            return self.insist(lambda: connect(self.path, writer=False), deadline)

    def return_reader(self, connection: sqlite3.Connection, *, sound: bool) -> None:
        """Return a connection, once, after its transaction; ``sound``: whether it can be used again."""
        if sound and not self.closed and len(self._readers) < IDLE_READERS:
            self._readers.append(connection)
        else:
            connection.close()

    def leave(self, ticket: Ticket) -> None:
        """Note that the transaction has ended. Idempotent."""
        self.running.discard(ticket)
        if self.closed and not self.running:
            self.close()

    # The barrier, and forks

    def stop(self, timeout_s: float) -> bool:
        """Keep new transactions out, and wait for the running ones; False if some did not end in time."""
        self.stopped = True
        deadline = self.clock.monotonic() + timeout_s
        while self.running:
            if self.clock.monotonic() > deadline:
                return False
            self.clock.sleep(PAUSE_S)
        return True

    def _wait(self, ticket: Ticket, deadline: float) -> None:
        """Wait until the barrier is down. Raises ``StoreUnavailable`` if it is still up at the deadline."""
        while self.stopped:
            self.running.discard(ticket)
            if self.clock.monotonic() > deadline:
                raise StoreUnavailable("the database is closing, or the process was forking until the deadline")
            self.clock.sleep(PAUSE_S)
            self.running.add(ticket)

    def close_connections(self) -> None:
        """Close all connections, only while no transaction runs; they are reopened when needed."""
        self.discard_writer()
        with contextlib.suppress(IndexError):
            while True:
                self._readers.pop().close()

    def connections(self) -> list[sqlite3.Connection]:
        return [*self._readers, *([self._writer] if self._writer is not None else [])]

    def close_files(self) -> None:
        """In a forked child: give up the copies of the parent's descriptors."""
        self.lock.close_files()
        self.listener.close_files()
        self.ringer.close_files()


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file. Raises ``OSError`` if that is unknown."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _check(path: str, identity: tuple[int, int]) -> None:
    try:
        if _identity(path) == identity:
            return
    except OSError:  # this user lost access to the folder, but the file is open
        return
    raise StoreUnavailable(
        "the database was deleted or replaced while it was in use",
        path=path,
        fix="Put it back, or restart every process that uses it",
    )
