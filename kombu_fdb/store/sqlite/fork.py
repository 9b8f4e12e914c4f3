"""Keeps SQLite's connections out of forked children: closed before the fork, opened again when needed.

Model. Every open file is *guarded*. Before a fork each one lets no new transaction start, waits until the running
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
import weakref
from typing import Protocol

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.locks import Turn

WAIT_S = 2.0
#: Only who forks or closes waits for transactions, and only in that moment do they wait.
PAUSE_S = 0.0005


class Users:
    """The transactions that hold a connection, and a barrier that keeps new ones out.

    Each step is one call into C and may be repeated, so an exception between any two leaves nothing behind that
    :meth:`leave` does not mend.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.inside: set[Turn] = set()
        self.stopped = False

    def __len__(self) -> int:
        return len(self.inside)

    def enter(self, user: Turn, deadline: float) -> None:
        """Raises ``StoreUnavailable`` if the barrier stood until the deadline."""
        self.inside.add(user)
        if self.stopped:  # looked at after the entry: either ``stop`` sees us, or we see it
            self.wait(user, deadline)

    def leave(self, user: Turn) -> None:
        """Also if it never entered."""
        self.inside.discard(user)

    def stop(self, timeout_s: float) -> bool:
        """Keep new ones out, and wait for the others; False if some did not end in time."""
        self.stopped = True
        deadline = self._clock.monotonic() + timeout_s
        while self.inside:
            if self._clock.monotonic() > deadline:
                return False
            self._clock.sleep(PAUSE_S)
        return True

    def go_on(self) -> None:
        self.stopped = False

    def wait(self, user: Turn, deadline: float) -> None:
        """Until the barrier is gone. Raises as :meth:`enter`."""
        while self.stopped:
            self.inside.discard(user)
            if self._clock.monotonic() > deadline:
                raise StoreUnavailable("the database is closing, or the process was forking until the deadline")
            self._clock.sleep(PAUSE_S)
            self.inside.add(user)


class Guarded(Protocol):
    pid: int
    users: Users
    #: Device and inode.
    identity: tuple[int, int]

    def close_connections(self) -> None: ...
    def connections(self) -> list[sqlite3.Connection]: ...
    def close_files(self) -> None: ...


# The process's state, because forking is: what is open, and what a child can't use.
_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()
_stopping: list[Guarded] = []
_stopped: list[Guarded] = []
_tainted: set[tuple[int, int]] = set()


def guard(file: Guarded) -> None:
    _guarded.add(file)


def unguard(file: Guarded) -> None:
    _guarded.discard(file)


def refuse_tainted(path: str) -> None:
    """Raise if this process inherited open connections to the file."""
    for file in [file for file in _guarded if file.pid != os.getpid()]:
        _taint(file)  # C code forked, and the hooks did not run
        _guarded.discard(file)
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
    for file in list(_guarded):
        _stopping.append(file)  # first: what raises from here on must not leave the barrier up
        if file.users.stop(WAIT_S):
            file.close_connections()
            _stopped.append(file)


def _after_in_parent() -> None:
    _stopped.clear()
    while _stopping:
        _stopping.pop().users.go_on()


def _after_in_child() -> None:
    clean = {id(file) for file in _stopped}
    _stopped.clear()
    _stopping.clear()
    for file in list(_guarded):
        if id(file) not in clean:
            _taint(file)
        file.close_files()
        _guarded.discard(file)


def _taint(file: Guarded) -> None:
    _tainted.add(file.identity)
    for connection in file.connections():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
