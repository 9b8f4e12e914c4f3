"""Keeps SQLite's connections out of forked children: closed before the fork, opened again when needed.

Model. Every open database is *guarded*. Before a fork each one lets no new transaction start, waits until the running
ones have ended (``WAIT_S`` at most) and closes its connections, so that SQLite's library knows nothing of the file when
the process is copied. After it the parent goes on. The child closes its copies of the lock files and pipes.

If the running transactions do not end in time, or C code forked without Python's hooks before it, the child inherits
the library's knowledge of locks that only its parent has. Such a file is *tainted* in the child: opening it fails with
the fix. The inherited connections are never closed there, and never freed.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
import weakref
from typing import Protocol

from kombu_fdb.errors import StoreUnavailable

__all__ = ["Users", "guard", "refuse_tainted", "unguard"]

WAIT_S = 2.0


class Users:
    """How many transactions hold a connection, and a barrier that keeps new ones out."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._stopped = False

    def enter(self, timeout_s: float) -> None:
        with self._changed:
            if self._stopped and not self._changed.wait_for(lambda: not self._stopped, timeout=timeout_s):
                raise StoreUnavailable("the database is closing, or the process was forking until the deadline")
            self._count += 1

    def leave(self) -> None:
        with self._changed:
            self._count -= 1
            if self._stopped:
                self._changed.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """Keep new ones out, and wait for the others; False if some did not end in time."""
        with self._changed:
            self._stopped = True
            return self._changed.wait_for(lambda: self._count == 0, timeout=timeout_s)

    def go_on(self) -> None:
        with self._changed:
            self._stopped = False
            self._changed.notify_all()


class Guarded(Protocol):
    path: str
    pid: int
    users: Users

    def close_connections(self) -> None: ...
    def connections(self) -> list[sqlite3.Connection]: ...
    def close_files(self) -> None: ...


# The process's state, because forking is: what is open, and what a child can't use.
_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()
_stopping: list[tuple[Guarded, bool]] = []
_tainted: set[tuple[int, int]] = set()


def guard(database: Guarded) -> None:
    _guarded.add(database)


def unguard(database: Guarded) -> None:
    _guarded.discard(database)


def refuse_tainted(path: str) -> None:
    """Raise if this process inherited open connections to the file."""
    for database in [database for database in _guarded if database.pid != os.getpid()]:
        _taint(database)  # C code forked, and the hooks did not run
        _guarded.discard(database)
    if not _tainted:
        return
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    if (status.st_dev, status.st_ino) in _tainted:
        raise StoreUnavailable(
            "this process was forked while its parent had the database open",
            path=path,
            fix="Open the broker after the fork (uWSGI: `lazy-apps = true`), or close it in the parent before",
        )


def _before() -> None:
    for database in list(_guarded):
        stopped = database.users.stop(WAIT_S)
        if stopped:
            database.close_connections()
        _stopping.append((database, stopped))


def _after_in_parent() -> None:
    while _stopping:
        _stopping.pop()[0].users.go_on()


def _after_in_child() -> None:
    clean = {id(database) for database, stopped in _stopping if stopped}
    _stopping.clear()
    for database in list(_guarded):
        if id(database) not in clean:
            _taint(database)
        database.close_files()
        _guarded.discard(database)


def _taint(database: Guarded) -> None:
    status = os.stat(database.path)
    _tainted.add((status.st_dev, status.st_ino))
    for connection in database.connections():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
