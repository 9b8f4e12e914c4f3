"""How large the log and the file may grow, depending on the disk's space, so that a full disk can still be emptied.

Model. A commit goes into the log (``-wal``); a *checkpoint* copies the log's pages into the file, and only after a
complete one does the log start again at its beginning (https://www.sqlite.org/wal.html#ckpt). A checkpoint that finds
no space ends early, and the log grows further: on a small disk no write would ever succeed again, not even a deletion.
Therefore:

* the log is copied when it has reached 16 MB, or a sixteenth of the free space if that is less;
* on a nearly full disk the file's pages are limited (``PRAGMA max_page_count``) such that all commits can be copied,
  and a log of its usual size fits beside the file. A transaction that needs more pages is refused with ``SQLITE_FULL``
  before it writes anything; one that deletes, or fills free pages, is not. The last pages are a *reserve*. Each kind of
  transaction may use a share of it, and leaves the rest to the following kinds. A publish fills the file, and may use
  none of it. A transaction that moves something and adds to it may use a quarter: a dead letter takes its death record
  along, and there may be thousands. All others may use half: a starting consumer needs a session and its declarations.
  Transactions that clear something may use all of it: a claim moves a message from one row to another, and may need a
  page for that. Free pages count like those by which the file may grow: otherwise claims that take a page, and
  acknowledgements that free one, would pass the reserve to publishers page by page;
* on a disk with hardly any space left, which other programs may have filled, the log is copied before each transaction,
  so that it restarts in the space that it already has;
* copying a page that lies beyond the file's end takes space, which another program may have used up by then. So the
  file of the write lock, whose contents mean nothing, *holds* that much, and a bit more for the next transaction. The
  space is released when SQLite finds none to copy the log, or to begin one;
* a reader in the middle of its transaction prevents the log from being copied completely. Then nothing more is written
  once the log would grow into the space that is needed to copy its rest: otherwise it could never be copied again. Such
  a transaction, and a deletion that finds the disk full, is retried briefly, as readers soon end.

What the engine does with a refusal: ``facade/messages.py`` repeats a claim without burials, and for other transactions
the reclaim of dead sessions makes room (``process/duty_cycle.py``).

A writer first checks the disk: every ``LOOK_S`` seconds if there is plenty of space, otherwise each time. So freed
space is noticed without a restart.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import NamedTuple

from kombu_fdb.errors import StoreFull, StoreUnavailable
from kombu_fdb.store.sqlite.files import Access

#: How much a checkpoint copies while writers wait.
CHECKPOINT_BYTES = 16_000_000
#: The smallest log that a checkpoint copies; with less, each larger transaction would need one.
FEWEST_BYTES = 256 * 1024
RESERVE_BYTES = 256 * 1024
#: Space that is held for the next transaction.
HELD_BYTES = 256 * 1024
#: Shares of the reserve, by the kind of transaction.
FILLING, MOVING, WRITING, CLEARING = 0.0, 0.25, 0.5, 1.0
#: The log gets this part of the free space.
LOG_SHARE = 16
#: With this much space, nothing is limited.
PLENTY_BYTES = 256 * 1024 * 1024
#: SQLite's own limit (https://www.sqlite.org/limits.html).
MOST_PAGES = 4_294_967_294
LOOK_S = 0.1
#: How long a transaction that a reader holds up is retried, in seconds.
FULL_S = 1.0


class PageLimits(NamedTuple):
    """How far the log and the file may grow, in pages."""

    log: int
    #: The size of the file, and by how many pages it may grow; the last of these are the reserve.
    pages: int = MOST_PAGES
    left: int = 0
    reserve: int = 0
    #: Whether hardly any space is left.
    short: bool = False

    @property
    def plenty(self) -> bool:
        """Whether nothing but the log is limited."""
        return self.pages == MOST_PAGES

    def kept(self, share: float) -> int:
        """How many pages of the reserve a transaction with this share of it must leave to others."""
        return int((1 - share) * self.reserve)

    def most(self, share: float) -> int:
        """How large the file may be for a transaction with this share of the reserve."""
        return self.pages + max(self.left - self.kept(share), 0)


class Space:
    """The space of one writing connection."""

    def __init__(self, path: str, access: Access) -> None:
        self._path = path
        self._access = access
        #: The file that holds space. Only the writer changes its size.
        self._holder = f"{path}-lock"
        #: When to check the disk next, before a transaction; by the monotonic clock.
        self.look_at = 0.0
        #: Whether nothing but the log is limited, or that is still unknown.
        self.plenty = True
        self._limits: PageLimits | None = None
        #: Whether the current limit is one transaction's share.
        self._granted = False

    def forget(self) -> None:
        """Forget the limits, for a new connection or after a full disk: check again before the next transaction."""
        self.look_at, self._limits, self.plenty = 0.0, None, True

    def bound(self, connection: sqlite3.Connection, now: float) -> None:
        """Set the limits, outside of a transaction. Raises ``sqlite3.Error``; ``StoreFull`` if a reader blocks."""
        try:
            limits = self._look(connection)
        except OSError:  # the folder is gone: the commit will report it
            return
        if limits != self._limits or self._granted:
            connection.execute(f"PRAGMA wal_autocheckpoint={limits.log}").fetchall()
            connection.execute(f"PRAGMA max_page_count={limits.most(WRITING)}").fetchall()
            self._granted = False
        if limits.short:
            self._copy_log(connection, limits)
        # With little space, before each transaction, to use space as soon as it is freed.
        self.look_at, self._limits, self.plenty = now + (LOOK_S if limits.plenty else 0), limits, limits.plenty

    def grant(self, connection: sqlite3.Connection, *, fills: bool, moves: bool, clears: bool) -> None:
        """Give the running transaction its share of the reserve, by its kind. Raises ``sqlite3.Error``."""
        limits = self._limits
        if limits is None or self.plenty or not (fills or moves or clears):  # other kinds already have their share
            return
        share = FILLING if fills else MOVING if moves else CLEARING
        self._granted = True
        connection.execute(f"PRAGMA max_page_count={limits.most(share)}").fetchall()
        if share < WRITING:
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            if limits.left + free < limits.kept(share):
                raise _full()

    def let_go(self) -> bool:
        """Release the space that is held. False if there was none."""
        held = _size(self._holder)
        if held:
            self._hold(0)
        return _size(self._holder) < held

    def _hold(self, size: int) -> None:
        """Have the file hold this much, if the system can: not every file system does, and macOS has no call for it."""
        with contextlib.suppress(OSError, AttributeError, StoreUnavailable):
            # Opened briefly: a closing database may close the lock's own descriptor before its writer has ended.
            descriptor = self._access.open_sidecar(self._holder)
            try:
                if size < os.fstat(descriptor).st_size:
                    os.ftruncate(descriptor, size)
                else:
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)

    def _copy_log(self, connection: sqlite3.Connection, limits: PageLimits) -> None:
        """Copy as much of the log into the file as there is space for."""
        try:
            _, frames, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error:  # no space for all of it
            if self.let_go():
                self._copy_log(connection, limits)
            return  # the log continues in its own space
        if copied < frames and self._left(connection) < limits.log:
            error = StoreFull(
                path=self._path,
                reason="a reader keeps the log from being emptied",
                fix=f"Free space on the file system of {self._path}, or stop the program that reads from it",
            )
            error.retryable, error.retry_s = True, FULL_S
            raise error

    def _left(self, connection: sqlite3.Connection) -> int:
        """How many pages the disk will have left once the whole log is copied."""
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        disk = os.statvfs(os.path.dirname(self._path))
        grows = max(pages * page - _size(self._path) - _size(self._holder), 0)
        return int((disk.f_bavail * disk.f_frsize - grows) // page)

    def _look(self, connection: sqlite3.Connection) -> PageLimits:
        disk = os.statvfs(os.path.dirname(self._path))
        held = _size(self._holder)
        free = disk.f_bavail * disk.f_frsize + held
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        log = _size(f"{self._path}-wal")
        # What a checkpoint would add to the file, now and after the next transaction: no more than the log has, even if
        # the disk compresses the file. A log's smallest size takes precedence.
        grows = min(max(pages * page - _size(self._path), 0), log) + HELD_BYTES
        hold = max(min(grows, free - max(FEWEST_BYTES - log, 0)), 0)
        if held != hold:
            self._hold(hold)
        if free > PLENTY_BYTES:
            return PageLimits(CHECKPOINT_BYTES // page)
        checkpoint = min(max((free + log) // LOG_SHARE, FEWEST_BYTES), CHECKPOINT_BYTES) // page
        # That, and a log of twice the size at which it is copied.
        promised = grows + max(2 * checkpoint * page - log, 0)
        left = max(free - promised, 0) // 2 // page
        return PageLimits(checkpoint, pages, left, RESERVE_BYTES // page, free < promised + checkpoint * page)


def _full() -> sqlite3.OperationalError:
    """The error as SQLite raises it."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def _size(path: str) -> int:
    """The size in bytes, without holes: before a checkpoint, SQLite extends the file with a hole."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * 512)
