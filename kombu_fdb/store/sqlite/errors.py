"""The errors of SQLite, and of the system on its files, as advice for the person who must fix the cause."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from shlex import quote

from kombu_fdb.errors import LimitExceeded, StoreError, StoreFull, StoreUnavailable

#: A disk with less free space than this is full for SQLite, whatever its error says: the log's index grows by this.
NO_SPACE_BYTES = 64 * 1024

_MEANINGS: dict[int, tuple[str, str]] = {
    sqlite3.SQLITE_BUSY: ("another program locks the database", "Find it with `fuser {path}` and end it"),
    sqlite3.SQLITE_LOCKED: ("another connection locks the database", "Find it with `fuser {path}` and end it"),
    sqlite3.SQLITE_FULL: ("the disk is full", "Free space on the file system of {path}"),
    sqlite3.SQLITE_READONLY: (
        "the database is read-only",
        "Make {path} and its directory writable for this user (`chmod`, `chown`, or mount it read-write)",
    ),
    sqlite3.SQLITE_PERM: ("no permission for the database", "Make {path} readable and writable for this user"),
    sqlite3.SQLITE_CANTOPEN: (
        "the database can't be opened",
        "Make {path} and its directory readable and writable for this user",
    ),
    sqlite3.SQLITE_NOTADB: ("this file is not a SQLite database", "Give another path, or move {path} away"),
    sqlite3.SQLITE_CORRUPT: (  # SQLite also says so where the disk fails to read (EIO)
        "the database is damaged, or its disk failed",
        (
            "Check the system's log for errors of the disk first. Then stop all processes that use it, and restore a "
            "backup, or save what `.recover` of sqlite.org's sqlite3 finds"
        ),
    ),
    sqlite3.SQLITE_IOERR: ("the disk failed", "Check the system's log and the disk of {path}"),
    sqlite3.SQLITE_IOERR_SHORT_READ: (
        "the database was deleted, replaced or cut short while it was in use",
        "Restart every process that uses {path} (`fuser {path}-shm`), and then this one, or restore a backup",
    ),
    sqlite3.SQLITE_PROTOCOL: ("the database's lock protocol failed", "Put {path} on a local file system"),
}
#: The remaining cause is usually that another program has dropped or renamed the table, or added a trigger.
_OTHERWISE = (
    "`sqlite3 {path} .schema` should show the table kv alone: undo what another program changed, or restore a backup"
)


def explain(error: sqlite3.Error, path: str) -> StoreError:
    """SQLite's error as a ``StoreError``, in one line that names the fix."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF == sqlite3.SQLITE_TOOBIG:
        return LimitExceeded("over a limit of SQLite", reason=str(error))
    reason = getattr(error, "sqlite_errorname", None) or str(error)
    primary = (code or 0) & 0xFF
    try:
        disk = os.statvfs(os.path.dirname(path))
    except OSError:
        disk = None
    if primary == sqlite3.SQLITE_IOERR and disk and disk.f_bavail * disk.f_frsize < NO_SPACE_BYTES:
        primary = sqlite3.SQLITE_FULL
    # No inodes for the log or its index; some file systems count none.
    elif primary == sqlite3.SQLITE_CANTOPEN and disk and disk.f_files > 0 and disk.f_favail == 0:
        advice = f"Delete files on the file system of {path}: it has no inode left (`df -i`)"
        return StoreFull(path=path, reason=reason, fix=advice)
    elif code == sqlite3.SQLITE_IOERR_SHORT_READ:
        primary = code
    if primary not in _MEANINGS:
        reason = str(error)
    text, advice = _MEANINGS.get(primary, ("SQLite failed", _OTHERWISE))
    fix = None
    if primary in _REFUSED:
        path = _in_the_way(path) or path
        fix = to_be_let_in(path)
    kind = StoreFull if primary == sqlite3.SQLITE_FULL else StoreUnavailable
    return kind(text, path=path, reason=reason, fix=fix or advice.format(path=quote(path)))


def damage() -> sqlite3.DatabaseError:
    """The error for damage that SQLite does not notice: a flipped bit has put a key out of order in the index.

    A scan shows its row, but deleting it by its key does nothing: its message would be delivered forever. A scan that
    continues after it may loop forever. And rows stored next to it may not be found again.
    """
    error = sqlite3.DatabaseError()
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_CORRUPT_INDEX, "SQLITE_CORRUPT_INDEX"
    return error


_REFUSED = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})


#: SECURITY.md, "The embedded store".
_SHARING = (
    "It belongs to another user. To hand it over, root runs `chown USER {path}`; to share it, its owner gives the "
    "folder to a group (`chgrp`, `chmod 2770`), and opens the file to it (`chgrp`, `chmod 660 {path}`). Then root or "
    "its owner opens the store once: `python -m kombu_fdb.doctor URL` (see SECURITY.md)"
)
_BESIDE = re.compile("-(wal|shm|lock|gate|bells(/.*)?)$")


def to_be_let_in(path: str) -> str | None:
    """What the file's owner must do, if that is another user; None if this user is the owner, or there is no file."""
    try:
        is_ours = os.stat(path).st_uid == os.geteuid()
    except OSError:
        return None
    return None if is_ours else _SHARING.format(path=quote(_BESIDE.sub("", path)))


def _in_the_way(path: str) -> str | None:
    """The file, or folder, that this user may not use; None if all seem usable."""
    for each in (path, f"{path}-wal", f"{path}-shm"):
        if os.path.lexists(each) and not _usable(each, os.R_OK | os.W_OK):
            return each
    folder = os.path.dirname(path)
    return None if _usable(folder, os.W_OK | os.X_OK) else folder


def _usable(path: str, how: int) -> bool:
    return os.access(path, how, effective_ids=os.access in os.supports_effective_ids)


def explain_os(error: OSError, path: str) -> StoreUnavailable:
    """A failed system call on ``path``, or on the file that the error names."""
    if isinstance(error.filename, str) and os.path.isabs(error.filename):
        path = error.filename
    usable = to_be_let_in(path) or f"Make {path} and its directory readable and writable for this user"
    fixes = {
        errno.EACCES: usable,
        errno.EPERM: usable,
        errno.EROFS: f"Mount the file system of {path} read-write",
        errno.ENOENT: f"Check that its directory exists: `ls -ld {quote(os.path.dirname(path))}`",
        errno.ENOSPC: f"Free space on the file system of {path}",
        errno.EMFILE: "Raise the limit of open files (`ulimit -n`)",
    }
    reason = os.strerror(error.errno or 0)
    return StoreUnavailable(
        "a file of the store can't be used", path=path, reason=reason, fix=fixes.get(error.errno or 0)
    )
