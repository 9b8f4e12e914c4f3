"""The files beside a SQLite store: for all who may use the database, and safe from others' tricks.

Model. The database's file says who may use the store: its owner, its group, its mode. What stands beside it follows, at
each opening by a user who may change it: so a file that is opened to a group later (``chmod 660``) opens all of them,
and what root makes belongs to the owner of the database.

Other users who may write to the folder may put something in the way: a link to a user's ``authorized_keys``, a pipe
that has no reader, a folder of their own. So nothing is followed, nothing blocks, and before a byte is written or a
mode changed the open descriptor must show the right kind of file, with one name. In a folder that everybody may write
to (``/tmp``) it must also belong to this user, to root or to the owner of the database; in any other folder only those
may make files whom its owner let in. What is inside a folder of ours is reached through its descriptor, so that another
folder put in its place changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import Self

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.store.sqlite.errors import explain_os

_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the database, and whom its folder keeps out."""

    #: Without those who may only read: a lock takes no more than that, and theirs would stop all writers.
    mode: int
    owner: int
    group: int
    #: Everybody may make files in the folder.
    exposed: bool = False

    @classmethod
    def of(cls, path: str) -> Self:
        """That of the database at ``path``. Raises ``OSError``."""
        status = os.stat(path)
        folder = os.stat(os.path.dirname(path))
        mode = status.st_mode & 0o600 | sum(0o6 << shift for shift in (3, 0) if status.st_mode >> shift & 0o2)
        return cls(mode, status.st_uid, status.st_gid, bool(folder.st_mode & stat.S_IWOTH))

    @property
    def directory_mode(self) -> int:
        """Who may read a file may search the directory; what a group makes in it belongs to the group."""
        return 0o700 | self.mode | (self.mode & 0o444) >> 2 | (stat.S_ISGID if self.mode & stat.S_IWGRP else 0)

    def check(self, status: os.stat_result, kind: int, path: str) -> None:
        """Raises ``StoreUnavailable`` unless it is of the kind (``stat.S_IFREG``...) and may be trusted."""
        if stat.S_IFMT(status.st_mode) != kind:
            raise _wrong_kind(path)
        if kind == stat.S_IFREG and status.st_nlink > 1:
            raise StoreUnavailable("a file with a second name (hard link) is in the way", path=path, fix=_remove(path))
        if self.exposed and status.st_uid not in {os.geteuid(), 0, self.owner}:
            raise StoreUnavailable(
                "a file of another user is in the way, in a folder that every user can write to",
                path=path,
                fix=f"{_remove(path)}, and keep the database in a folder of your own",
            )

    def share(self, descriptor: int, path: str) -> None:
        """Let in whom the database lets in, if this user may. Raises ``StoreUnavailable`` if everybody is let in."""
        status = os.fstat(descriptor)
        mode = self.directory_mode if stat.S_ISDIR(status.st_mode) else self.mode
        if os.geteuid() in {status.st_uid, 0}:
            if self._chown(descriptor, status) or stat.S_IMODE(status.st_mode) != mode:
                os.chmod(descriptor, mode)
        elif status.st_mode & stat.S_IWOTH and not self.mode & stat.S_IWOTH:
            raise StoreUnavailable(
                "every user can write to a file of the store", path=path, fix=f"`chmod o-w {path}`, or remove it"
            )

    def _chown(self, descriptor: int, status: os.stat_result) -> bool:
        owner = self.owner if os.geteuid() == 0 else status.st_uid
        group = self.group if self.mode & stat.S_IRWXG or owner != status.st_uid else status.st_gid
        if (owner, group) == (status.st_uid, status.st_gid):
            return False
        with contextlib.suppress(PermissionError):  # not a member of the group
            os.chown(descriptor, owner, group)
        return True


def open_sidecar(path: str, access: Access, *, directory: int | None = None) -> int:
    """Open a regular file beside the database, made if absent; a descriptor for reading and appending.

    ``directory``: a descriptor in which the last part of ``path`` is looked up. Raises ``StoreUnavailable``, which
    names ``path`` and the fix.
    """
    name = path if directory is None else os.path.basename(path)
    try:
        descriptor = _open_or_make(name, directory)
    except OSError as error:
        raise _explain(error, access, stat.S_IFREG, path) from error
    return _checked(descriptor, access, stat.S_IFREG, path)


def open_directory(path: str, access: Access) -> int:
    """Open a directory beside the database, made if absent; a descriptor. Raises as :func:`open_sidecar`."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
    except OSError as error:
        raise _explain(error, access, stat.S_IFDIR, path) from error
    return _checked(descriptor, access, stat.S_IFDIR, path)


def open_pipe(name: str, flags: int, *, directory: int) -> int:
    """Open a named pipe in a directory of ours. Raises ``OSError``: ``ENXIO`` says that it has no reader."""
    descriptor = os.open(name, flags | _SAFELY, dir_fd=directory)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a pipe", name)
    return descriptor


def share_database(path: str, access: Access) -> None:
    """The same for the database and SQLite's own files beside it, by their names.

    SQLite gives them the database's mode, but not its group. Raises ``StoreUnavailable`` for a stranger's file: what
    stands in a log or a journal, SQLite takes for the database's.
    """
    for name in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(name)
            access.check(status, stat.S_IFREG, name)
            if os.geteuid() in {status.st_uid, 0}:
                _share(name, status, access)


def _share(name: str, status: os.stat_result, access: Access) -> None:
    if status.st_gid != access.group and access.mode & stat.S_IRWXG:
        with contextlib.suppress(PermissionError):  # not a member of the group
            os.chown(name, -1, access.group, follow_symlinks=False)
    if stat.S_IMODE(status.st_mode) == access.mode:
        return
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, access.mode, follow_symlinks=False)
        return
    descriptor = os.open(name, os.O_PATH | _SAFELY)  # cancels no lock when it is closed, as it opens nothing
    try:
        access.check(os.fstat(descriptor), stat.S_IFREG, name)
        os.chmod(f"/proc/self/fd/{descriptor}", access.mode)
    finally:
        os.close(descriptor)


def _open_or_make(name: str, directory: int | None) -> int:
    flags = os.O_RDWR | os.O_APPEND | _SAFELY
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
        return os.open(name, flags, dir_fd=directory)


def _checked(descriptor: int, access: Access, kind: int, path: str) -> int:
    try:
        access.check(os.fstat(descriptor), kind, path)
        access.share(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _explain(error: OSError, access: Access, kind: int, path: str) -> StoreUnavailable:
    """Why it can't be opened: by what stands there, if that says it."""
    try:
        status = os.lstat(path)
        access.check(status, kind, path)
    except StoreUnavailable as reason:
        return reason
    except OSError:
        return explain_os(error, path)
    if error.errno == errno.EACCES and access.mode & stat.S_IWGRP and status.st_uid == access.owner:
        return StoreUnavailable(
            "the database is open to a group, but the files beside it are not yet",
            path=path,
            fix="Open it once as its owner, with `python -m kombu_fdb.doctor URL`: the files beside it follow",
        )
    return explain_os(error, path)


def _wrong_kind(path: str) -> StoreUnavailable:
    return StoreUnavailable("something else is in the way of a file of the store", path=path, fix=_remove(path))


def _remove(path: str) -> str:
    return f"Inspect it with `ls -ld {path}`, and remove it"
