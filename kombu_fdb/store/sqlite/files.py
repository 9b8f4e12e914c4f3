"""The files of a SQLite store: the database, the files beside it, and who may use them.

A process that has a database open through SQLite must never open it, its ``-wal`` or its ``-shm`` in any other way:
closing *any* descriptor of a file cancels *all* POSIX locks that the process has on it
(https://www.sqlite.org/howtocorrupt.html, 2.2). Then other processes may remove the log that it still uses, with all
its later commits. So here files are accessed by their names (``stat``, ``chmod``, ``chown``), and the only file opened
is one that no process can have open, because it was just created.

Model of the files beside the database: all its users can use them, and no other user can misuse them. Owner, group and
mode of the database's file say who may use the store. The files beside it are adjusted whenever a user who may change
them opens the store. So a later ``chmod 660`` of the database opens all of them to the group, and files that root
creates belong to the owner of the database.

Other users who may write to the folder may plant something there: a link to a user's ``authorized_keys``, a pipe
without a reader, a folder of their own. So no link is followed, no call blocks, and before a byte is written or a mode
changed, the open descriptor must show the right kind of file, with a single name. In a folder that all users may write
to (``/tmp``) it must also belong to this user, to root or to the owner of the database; in any other folder, only users
whom its owner has admitted can create files. Files inside the store's own folder are reached through its descriptor, so
replacing that folder does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Self

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.store.sqlite.errors import explain_os

# -- the database's file -----------------------------------------------------------------------------------------------


#: The oldest supported version; upserts are older (https://www.sqlite.org/lang_upsert.html).
OLDEST_SQLITE = (3, 35, 0)
#: How many links to follow on the way to a file, as Linux does.
MOST_LINKS = 40


def check_sqlite_version() -> None:
    """Raises ``StoreUnavailable`` if Python's SQLite is too old."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreUnavailable(
            "the SQLite library of this Python is too old",
            version=sqlite3.sqlite_version,
            fix=f"Use a Python whose sqlite3.sqlite_version is at least {oldest}",
        )


def check_path(path: str) -> str:
    """The path as SQLite uses it, absolute and without symbolic links. Raises ``StoreUnavailable`` with the fix."""
    if path in ("", ":memory:"):
        raise StoreUnavailable("a database in memory can't be shared between processes", fix="Give the path of a file")
    given = os.path.abspath(os.path.expanduser(path))
    path = os.path.realpath(given)
    parent = os.path.dirname(path)
    if os.path.isdir(path):
        raise StoreUnavailable("this is a directory", path=path, fix="Give the path of a file inside it")
    if not os.path.isdir(parent):
        raise StoreUnavailable(
            "the directory does not exist", path=parent, fix=f"Create it: `mkdir -p {quote(parent)}`"
        )
    _refuse_planted(given)
    return path


def _refuse_planted(path: str) -> None:
    """Raises ``StoreUnavailable`` for another user's file on the way, in a folder that all may write to (``/tmp``)."""
    with contextlib.suppress(OSError):  # SQLite will report the problem
        for name in _looked_up(path):
            folder, status = os.stat(os.path.dirname(name)), os.lstat(name)
            if folder.st_mode & stat.S_IWOTH and status.st_uid not in {os.geteuid(), 0}:
                raise StoreUnavailable(
                    "this belongs to another user, in a folder that every user can write to",
                    path=name,
                    fix=f"Inspect it with `ls -ld {quote(name)}`, and keep the database in a folder of your own",
                )


def _looked_up(path: str) -> Iterator[str]:
    """Every name that is looked up on the way to a file, from the root, links included. Raises ``OSError``."""
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
    """Device and inode of the file, which is created if absent. Raises ``OSError``, ``StoreUnavailable``."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # not open anywhere
    _refuse_planted(path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise StoreUnavailable("this is not a regular file", path=path, fix="Give the path of a file")
    if status.st_nlink > 1:  # https://www.sqlite.org/howtocorrupt.html, 2.5: each name has its own log
        raise StoreUnavailable(
            "the database has more than one name (hard link)",
            path=path,
            fix=f"Keep only one: `find / -xdev -inum {status.st_ino}` lists them; to copy it, use `sqlite3 .backup`",
        )
    return status.st_dev, status.st_ino


# -- beside it ---------------------------------------------------------------------------------------------------------


_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Access:
    """Which users may use the database, and which its folder keeps out."""

    #: Excludes users who may only read: reading is enough to take a lock, which would stop all writers.
    mode: int
    owner: int
    group: int
    #: Whether all users may make files in the folder.
    exposed: bool = False

    @classmethod
    def of(cls, path: str) -> Self:
        """The access to the database at ``path``. Raises ``OSError``."""
        status = os.stat(path)
        folder = os.stat(os.path.dirname(path))
        mode = status.st_mode & 0o600 | sum(0o6 << shift for shift in (3, 0) if status.st_mode >> shift & 0o2)
        return cls(mode, status.st_uid, status.st_gid, bool(folder.st_mode & stat.S_IWOTH))

    @property
    def directory_mode(self) -> int:
        """Users who may read a file may search the directory; files created in it belong to its group."""
        return 0o700 | self.mode | (self.mode & 0o444) >> 2 | (stat.S_ISGID if self.mode & stat.S_IWGRP else 0)

    def check(self, status: os.stat_result, kind: int, path: str) -> None:
        """Raises ``StoreUnavailable`` unless it has this kind (``stat.S_IFREG``...) and is trustworthy."""
        if stat.S_IFMT(status.st_mode) != kind:
            raise StoreUnavailable("something else is in the way of a file of the store", path=path, fix=_remove(path))
        if kind == stat.S_IFREG and status.st_nlink > 1:
            raise StoreUnavailable("a file with a second name (hard link) is in the way", path=path, fix=_remove(path))
        if self.exposed and status.st_uid not in {os.geteuid(), 0, self.owner}:
            raise StoreUnavailable(
                "a file of another user is in the way, in a folder that every user can write to",
                path=path,
                fix=f"{_remove(path)}, and keep the database in a folder of your own",
            )

    def share(self, descriptor: int, path: str) -> None:
        """Give the database's users access, if this user may. Raises ``StoreUnavailable`` if all users may write."""
        status = os.fstat(descriptor)
        mode = self.directory_mode if stat.S_ISDIR(status.st_mode) else self.mode
        if os.geteuid() in {status.st_uid, 0}:
            if self._chown(descriptor, status) or stat.S_IMODE(status.st_mode) != mode:
                os.chmod(descriptor, mode)
        elif status.st_mode & stat.S_IWOTH and not self.mode & stat.S_IWOTH:
            raise StoreUnavailable(
                "every user can write to a file of the store", path=path, fix=f"`chmod o-w {quote(path)}`, or remove it"
            )

    def _chown(self, descriptor: int, status: os.stat_result) -> bool:
        owner = self.owner if os.geteuid() == 0 else status.st_uid
        group = self.group if self.mode & stat.S_IRWXG or owner != status.st_uid else status.st_gid
        if (owner, group) == (status.st_uid, status.st_gid):
            return False
        with contextlib.suppress(PermissionError):  # not a member of the group
            os.chown(descriptor, owner, group)
        return True

    # The files beside the database

    def open_sidecar(self, path: str, *, directory: int | None = None) -> int:
        """Open a regular file beside the database, created if absent. Returns a descriptor to read and append.

        ``directory``: the descriptor of the directory in which to look up the last part of ``path``. Raises
        ``StoreUnavailable``, which names ``path`` and the fix.
        """
        name = path if directory is None else os.path.basename(path)
        try:
            descriptor = _open_or_make(name, directory)
        except OSError as error:
            raise self._explain(error, stat.S_IFREG, path) from error
        return self._checked(descriptor, stat.S_IFREG, path)

    def open_directory(self, path: str) -> int:
        """Open a directory beside the database, created if absent. Otherwise as :meth:`open_sidecar`."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        except OSError as error:
            raise self._explain(error, stat.S_IFDIR, path) from error
        return self._checked(descriptor, stat.S_IFDIR, path)

    @staticmethod
    def open_pipe(name: str, flags: int, *, directory: int) -> int:
        """Open a named pipe in the store's directory. Raises ``OSError``: ``ENXIO`` means that it has no reader."""
        descriptor = os.open(name, flags | _SAFELY, dir_fd=directory)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a pipe", name)
        return descriptor

    def share_database(self, path: str) -> None:
        """:meth:`share` for the database and SQLite's own files beside it, by their names.

        SQLite gives these files the database's mode, but not its group. Raises ``StoreUnavailable`` for a stranger's
        file: SQLite applies whatever is in a log or a journal to the database.
        """
        for name in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(name)
                self.check(status, stat.S_IFREG, name)
                if os.geteuid() in {status.st_uid, 0}:
                    self._share_by_name(name, status)

    def _share_by_name(self, name: str, status: os.stat_result) -> None:
        if status.st_gid != self.group and self.mode & stat.S_IRWXG:
            with contextlib.suppress(PermissionError):  # not a member of the group
                os.chown(name, -1, self.group, follow_symlinks=False)
        if stat.S_IMODE(status.st_mode) == self.mode:
            return
        if os.chmod in os.supports_follow_symlinks:
            os.chmod(name, self.mode, follow_symlinks=False)
            return
        descriptor = os.open(name, os.O_PATH | _SAFELY)  # opens nothing, so closing it cancels no lock
        try:
            self.check(os.fstat(descriptor), stat.S_IFREG, name)
            os.chmod(f"/proc/self/fd/{descriptor}", self.mode)
        finally:
            os.close(descriptor)

    def _checked(self, descriptor: int, kind: int, path: str) -> int:
        try:
            self.check(os.fstat(descriptor), kind, path)
            self.share(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _explain(self, error: OSError, kind: int, path: str) -> StoreUnavailable:
        """Why it can't be opened: because of the file that is there, if that explains it."""
        try:
            status = os.lstat(path)
            self.check(status, kind, path)
        except StoreUnavailable as reason:
            return reason
        except OSError:
            return explain_os(error, path)
        if error.errno == errno.EACCES and self.mode & stat.S_IWGRP and status.st_uid == self.owner:
            return StoreUnavailable(
                "the database is open to a group, but the files beside it are not yet",
                path=path,
                fix="Open it once as its owner, with `python -m kombu_fdb.doctor URL`: the files beside it follow",
            )
        return explain_os(error, path)


def _open_or_make(name: str, directory: int | None) -> int:
    flags = os.O_RDWR | os.O_APPEND | _SAFELY
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
        return os.open(name, flags, dir_fd=directory)


def _remove(path: str) -> str:
    return f"Inspect it with `ls -ld {quote(path)}`, and remove it"
