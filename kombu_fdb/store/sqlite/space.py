"""How large the log and the file may grow: in proportion to the disk, so that a full one can still be emptied.

Model. A commit goes into the log (``-wal``); a *checkpoint* copies the log's pages into the file, and only after a
whole one is the log used again from its beginning (https://www.sqlite.org/wal.html#ckpt). A checkpoint that finds no
space ends early, the log grows on, and so on: on a small disk nothing would ever be written again, not even a deletion.
So

* the log is copied when it has reached 16 MB, or a sixteenth of the free space where that is less;
* on a disk with little space the file's pages are limited (``PRAGMA max_page_count``) such that all that was committed
  can be copied, and a log of its usual size stands beside it. A transaction that needs more pages is refused with
  ``SQLITE_FULL`` before it has written anything; one that deletes, or fills free pages, is not. The last pages are for
  transactions that also clear something: a claim moves a message from one row to another, and may need a page for it;
* on a disk with hardly any, which others may have filled, the log is copied before each transaction: so it begins anew,
  in space that it has already;
* a reader that is halfway through keeps the log from being copied whole. Then nothing more is written as soon as the
  log would grow into the space that copying the rest of it needs: otherwise it could never be copied again. Such a
  transaction, and a deletion that finds the disk full, is tried again for a moment: readers are soon through.

Whoever writes looks at the disk first: every ``LOOK_S`` seconds where there is plenty of space, else each time. So
freed space is found without a restart.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import NamedTuple

from kombu_fdb.errors import StoreUnavailable

__all__ = ["FULL_S", "Space"]

#: What a checkpoint copies at most while writers wait: 16 MB in pages of 8 KiB.
CHECKPOINT_PAGES = 2_000
#: Less would mean a checkpoint for each larger transaction.
FEWEST_PAGES = 32
RESERVE_PAGES = 16
#: The log gets this part of the free space.
LOG_SHARE = 16
#: With this much left, nothing is limited.
PLENTY_BYTES = 256 * 1024 * 1024
#: SQLite's own limit (https://www.sqlite.org/limits.html).
MOST_PAGES = 4_294_967_294
LOOK_S = 0.1
#: For how long a transaction that a reader is in the way of is tried again, in seconds.
FULL_S = 1.0


class Limits(NamedTuple):
    """In pages."""

    log: int
    #: Of the file, for any transaction, and for one that also clears.
    most: int
    reserve: int
    #: Hardly any space is left.
    short: bool = False


PLENTY = Limits(CHECKPOINT_PAGES, MOST_PAGES, MOST_PAGES)


class Space:
    """What one writing connection may use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._look_at = 0.0
        self._limits: Limits | None = None

    def forget(self) -> None:
        """Another connection, or a disk that was full: look before the next transaction."""
        self._look_at, self._limits = 0.0, None

    def due(self, now: float) -> bool:
        """Whether it is time to look."""
        return now >= self._look_at

    def bound(self, connection: sqlite3.Connection, now: float) -> None:
        """Outside of a transaction. Raises ``sqlite3.Error``, and ``StoreUnavailable`` if a reader is in the way."""
        try:
            limits = self._look(connection)
        except OSError:  # the folder is gone: whoever commits will hear of it
            return
        if limits != self._limits:
            connection.execute(f"PRAGMA wal_autocheckpoint={limits.log}").fetchall()
            connection.execute(f"PRAGMA max_page_count={limits.most}").fetchall()
        if limits.short:
            self._copy_log(connection, limits)
        # On a small disk before each transaction: space that was freed a moment ago is used.
        self._look_at, self._limits = now + (LOOK_S if limits is PLENTY else 0), limits

    def open_reserve(self, connection: sqlite3.Connection) -> None:
        """The transaction under way clears something: what it takes from the reserve it is about to give back."""
        if self._limits is not PLENTY and self._limits is not None:
            connection.execute(f"PRAGMA max_page_count={self._limits.reserve}").fetchall()
            self._limits = None

    def _copy_log(self, connection: sqlite3.Connection, limits: Limits) -> None:
        """As far as it goes."""
        frames = copied = 0
        with contextlib.suppress(sqlite3.Error):  # no space for all of it; then it goes on in the space that it has
            _, frames, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if copied < frames and self._left(connection) < limits.log:
            error = StoreUnavailable(
                "the disk is full",
                path=self._path,
                reason="a reader keeps the log from being emptied",
                fix=f"Free space on the file system of {self._path}, or stop the program that reads from it",
            )
            error.retryable, error.retry_s = True, FULL_S
            raise error

    def _left(self, connection: sqlite3.Connection) -> int:
        """Pages of the disk that are left if the whole log is copied."""
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        disk = os.statvfs(os.path.dirname(self._path))
        grows = max(pages * page - _size(self._path), 0)
        return int((disk.f_bavail * disk.f_frsize - grows) // page)

    def _look(self, connection: sqlite3.Connection) -> Limits:
        disk = os.statvfs(os.path.dirname(self._path))
        free = disk.f_bavail * disk.f_frsize
        if free > PLENTY_BYTES:
            return PLENTY
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        log = _size(f"{self._path}-wal")
        checkpoint = min(max((free + log) // LOG_SHARE // page, FEWEST_PAGES), CHECKPOINT_PAGES)
        # What a checkpoint would add to the file, and a log of twice the size at which it is copied.
        promised = max(pages * page - _size(self._path), 0) + max(2 * checkpoint * page - log, 0)
        left = max(free - promised, 0) // 2 // page
        most = pages + max(left - RESERVE_PAGES, 0)
        return Limits(checkpoint, most, most + min(left, RESERVE_PAGES), free < promised + checkpoint * page)


def _size(path: str) -> int:
    """In bytes, without the holes: before a checkpoint SQLite makes the file longer by one."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * 512)
