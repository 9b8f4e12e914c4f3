"""The files of a SQLite store, a connection to it, and what SQLite's errors mean to the one who must mend them."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys

from kombu_fdb.errors import LimitExceeded, StoreError, StoreUnavailable

__all__ = ["check_path", "connect", "create", "explain", "explain_os", "make_directory", "open_sidecar"]

#: "cFDB" in the file's header: tells our databases from an application's own.
APPLICATION_ID = 0x63464442
WRITER_CACHE_KIB = 16_000
READER_CACHE_KIB = 2_000
MMAP_BYTES = 256 * 1024 * 1024
#: Of a new file. A row of up to about a quarter of a page stands among others, a larger one has a page of its own (in
#: a ``WITHOUT ROWID`` table, https://www.sqlite.org/fileformat2.html#b_tree_pages). Celery's messages are about 1 kB.
PAGE_BYTES = 8192
#: What a checkpoint copies at most while writers wait: 16 MB.
CHECKPOINT_PAGES = 2_000
WAL_KEEP_BYTES = 64 * 1024 * 1024
SQL_STATEMENTS = 64

#: The row of the key 0, a number, is the version. No range of keys meets it: to SQLite a number is less than any bytes.
#: It stands beside the bells and counters, so a commit writes one page less than with a table of its own.
SCHEMA = """
CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID;
INSERT INTO kv VALUES (0, 0);
"""


def check_path(path: str) -> str:
    """The absolute path, or an error that says what to do."""
    if path in ("", ":memory:"):
        raise StoreUnavailable("a database in memory can't be shared between processes", fix="Give it a path of a file")
    path = os.path.abspath(os.path.expanduser(path))
    parent = os.path.dirname(path)
    if os.path.isdir(path):
        raise StoreUnavailable("this is a directory", path=path, fix="Give the path of a file inside it")
    if not os.path.isdir(parent):
        raise StoreUnavailable("the directory does not exist", path=parent, fix=f"Create it: `mkdir -p {parent}`")
    return path


def open_sidecar(path: str, mode: int) -> int:
    """Open a file beside the database, for whoever may use the database."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(fd, mode)
            return fd
        return os.open(path, os.O_RDWR)


def make_directory(path: str, mode: int) -> None:
    """Make a directory that whoever may use the database may use."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700 | mode | (mode & 0o444) >> 2)


def connect(path: str, *, writer: bool, synchronous: str) -> sqlite3.Connection:
    """A connection with our settings. It may meet a lock: the caller tries again until its deadline."""
    connection = sqlite3.connect(
        path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=SQL_STATEMENTS
    )
    cache_kib = WRITER_CACHE_KIB if writer else READER_CACHE_KIB
    try:
        for pragma in (
            f"cache_size=-{cache_kib}",
            f"mmap_size={MMAP_BYTES}",
            f"synchronous={synchronous}",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
            f"journal_size_limit={WAL_KEEP_BYTES}",
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        if sys.platform == "darwin" and synchronous == "full":
            connection.execute("PRAGMA fullfsync=1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def create(connection: sqlite3.Connection) -> None:
    """Make the tables if the file is empty; refuse a database that is somebody else's. Probes for write access."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id or tables:
            raise StoreUnavailable(
                "this SQLite database belongs to another program", fix="Give the broker a file of its own"
            )
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # the first: a file that is not empty keeps its size
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA application_id={APPLICATION_ID};COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")


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
    sqlite3.SQLITE_CORRUPT: (
        "the database is damaged",
        "Stop all its users, then restore it, or save what is left with `sqlite3 {path} .recover`",
    ),
    sqlite3.SQLITE_IOERR: ("the disk failed", "Look into the system's log, and check the disk of {path}"),
    sqlite3.SQLITE_PROTOCOL: ("the database's lock protocol failed", "Put {path} on a local file system"),
}


def explain(error: sqlite3.Error, path: str) -> StoreError:
    """SQLite's error as ours, in one line that names the fix."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF == sqlite3.SQLITE_TOOBIG:
        return LimitExceeded("over a limit of SQLite", reason=str(error))
    text, fix = _MEANINGS.get((code or 0) & 0xFF, ("SQLite failed", ""))
    name = getattr(error, "sqlite_errorname", None)
    return StoreUnavailable(text, path=path, reason=name or str(error), fix=fix.format(path=path) or None)


def explain_os(error: OSError, path: str) -> StoreUnavailable:
    """A failed system call on the database's files."""
    fixes = {
        errno.EACCES: f"Make {path} and its directory readable and writable for this user",
        errno.EPERM: f"Make {path} and its directory readable and writable for this user",
        errno.EROFS: f"Mount the file system of {path} read-write",
        errno.ENOSPC: f"Free space on the file system of {path}",
        errno.EMFILE: "Raise the limit of open files (`ulimit -n`)",
    }
    reason = os.strerror(error.errno or 0)
    return StoreUnavailable(
        "the database's files can't be used", path=path, reason=reason, fix=fixes.get(error.errno or 0)
    )
