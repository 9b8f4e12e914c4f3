"""The file of a SQLite store: its place, its tables, and a connection to it.

A process that has it open through SQLite must never open it, its ``-wal`` or its ``-shm`` by any other way: to close
*any* descriptor of a file cancels *all* POSIX locks that the process has on it
(https://www.sqlite.org/howtocorrupt.html, 2.2). Then other processes take the log away under it, with all that was
committed since. So here files are looked at by their names (``stat``, ``chmod``, ``chown``), and only a file that
no process can have open is made: it was not there before.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import sys
from collections.abc import Iterator

from kombu_fdb.errors import StoreUnavailable

#: What was supported from the beginning; upserts are older (https://www.sqlite.org/lang_upsert.html).
OLDEST_SQLITE = (3, 35, 0)

#: "cFDB" in the file's header: tells our databases from an application's own.
APPLICATION_ID = 0x63464442
WRITER_CACHE_KIB = 16_000
READER_CACHE_KIB = 2_000
MMAP_BYTES = 256 * 1024 * 1024
#: Of a new file. Each commit writes its pages whole, to the log and later to the file: smaller ones are less to write.
PAGE_BYTES = 4096
WAL_KEEP_BYTES = 64 * 1024 * 1024
SQL_STATEMENTS = 64
#: On the way to a file, as Linux does.
MOST_LINKS = 40

#: The row of the key 0, a number, is the version. No range of keys meets it: to SQLite a number is less than any bytes.
#: It stands beside the bells and counters, so a commit writes one page less than with a table of its own.
#:
#: Rows stand in the order in which they came, and only their keys are sorted, in an index: messages fill one page after
#: the other. If rows were sorted themselves (``WITHOUT ROWID``, as in files of before), each queue would grow in
#: the middle of the tree, where every second publish moves rows to the pages beside it. The statements are the same.
SCHEMA = """
CREATE TABLE kv (k BLOB NOT NULL PRIMARY KEY, v BLOB NOT NULL);
INSERT INTO kv VALUES (0, 0);
"""

#: What ``.recover`` saves of a damaged file can lack the version, and without one all new messages would get the same
#: key. The microseconds since 1970 are more than any number of commits, so they come after all that is there.
MEND_VERSION = "INSERT INTO kv SELECT 0, ? WHERE NOT EXISTS (SELECT 1 FROM kv WHERE k=0)"


def check_library() -> None:
    """Raises ``StoreUnavailable`` if Python came with a SQLite that is too old."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreUnavailable(
            "the SQLite library of this Python is too old",
            version=sqlite3.sqlite_version,
            fix=f"Use a Python whose sqlite3.sqlite_version is at least {oldest}",
        )


def check_path(path: str) -> str:
    """The path as SQLite uses it, absolute and without symbolic links, or an error that says what to do."""
    if path in ("", ":memory:"):
        raise StoreUnavailable("a database in memory can't be shared between processes", fix="Give the path of a file")
    given = os.path.abspath(os.path.expanduser(path))
    path = os.path.realpath(given)
    parent = os.path.dirname(path)
    if os.path.isdir(path):
        raise StoreUnavailable("this is a directory", path=path, fix="Give the path of a file inside it")
    if not os.path.isdir(parent):
        raise StoreUnavailable("the directory does not exist", path=parent, fix=f"Create it: `mkdir -p {parent}`")
    _refuse_planted(given)
    return path


def _refuse_planted(path: str) -> None:
    """What another user has put in its way, in a folder that every user can write to, such as ``/tmp``."""
    with contextlib.suppress(OSError):  # what is wrong with it, SQLite tells
        for name in _looked_up(path):
            folder, status = os.stat(os.path.dirname(name)), os.lstat(name)
            if folder.st_mode & stat.S_IWOTH and status.st_uid not in {os.geteuid(), 0}:
                raise StoreUnavailable(
                    "this belongs to another user, in a folder that every user can write to",
                    path=name,
                    fix=f"Inspect it with `ls -ld {name}`, and keep the database in a folder of your own",
                )


def _looked_up(path: str) -> Iterator[str]:
    """Every name on the way to a file, from the root on, and where links lead. Raises ``OSError``."""
    at, left, links = "/", path.split("/")[::-1], 0
    while left:
        name = os.path.normpath(os.path.join(at, left.pop()))
        yield name
        if os.path.islink(name) and links < MOST_LINKS:
            links += 1
            target = os.readlink(name)
            left += target.split("/")[::-1]
            at = "/" if target.startswith("/") else at
        else:
            at = name


def identify(path: str) -> tuple[int, int]:
    """Device and inode of the file, which is made if absent. Raises ``OSError``, ``StoreUnavailable``."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # not open anywhere
    _refuse_planted(path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise StoreUnavailable("this is not a regular file", path=path, fix="Give the path of a file")
    if status.st_nlink > 1:  # https://www.sqlite.org/howtocorrupt.html, 2.5: each name has a log of its own
        raise StoreUnavailable(
            "the database has more than one name (hard link)",
            path=path,
            fix=f"Keep only one: `find / -xdev -inum {status.st_ino}` lists them; to copy it, use `sqlite3 .backup`",
        )
    return status.st_dev, status.st_ino


def connect(path: str, *, writer: bool) -> sqlite3.Connection:
    """A connection with our settings. It may meet a lock: the caller tries again until its deadline."""
    # Not ``sqlite3.connect``: tracers wrap that, and would make a span of every statement, of an idle worker, too.
    connection = sqlite3.Connection(
        path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=SQL_STATEMENTS
    )
    cache_kib = WRITER_CACHE_KIB if writer else READER_CACHE_KIB
    try:
        for pragma in (
            f"cache_size=-{cache_kib}",
            f"mmap_size={MMAP_BYTES}",
            f"journal_size_limit={WAL_KEEP_BYTES}",
            "temp_store=MEMORY",
            # Some systems build SQLite such that a deleted page is written once more, with zeros: a purge would need as
            # much room in the log as there is to delete, on a full disk, too. FAST does so where it costs no page.
            "secure_delete=FAST",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def set_synchronous(connection: sqlite3.Connection, synchronous: str) -> None:
    """For the transactions from now on: ``"full"`` also makes durable what was committed before with ``"normal"``."""
    connection.execute(f"PRAGMA synchronous={synchronous}").fetchall()
    if sys.platform == "darwin":
        connection.execute(f"PRAGMA fullfsync={int(synchronous == 'full')}").fetchall()


def create(connection: sqlite3.Connection, wall_ms: int) -> None:
    """Make the tables if the file is empty; refuse another program's database. Probes for write access."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id or tables:
            raise StoreUnavailable(
                "this SQLite database belongs to another program", fix="Give the broker its own file"
            )
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # the first: a file that is not empty keeps its size
        _set_wal(connection)
        connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA application_id={APPLICATION_ID};COMMIT")
    else:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != "wal":  # a copy by VACUUM INTO, or one that was changed
            _set_wal(connection)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(MEND_VERSION, (wall_ms * 1000,))
    connection.execute("COMMIT")


def _set_wal(connection: sqlite3.Connection) -> None:
    """Readers beside a writer need it. The file keeps it."""
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
