"""A bell: how one thread tells another, or an event loop, that there is something to do.

It is a flag with a socket pair behind it, because three kinds of sleepers must be woken in the same way: a thread, a
``kombu.asynchronous.Hub`` that watches file descriptors, and a greenlet, whose locks must not be touched from the
native threads in which stores report changes.

Protocol of the sleeper: ``clear``, check for work, and only if there is none, ``wait``. Protocol of the ringers: make
the work visible, then ``ring``. A ring between ``clear`` and ``wait`` ends the wait at once, so nothing is lost; a
second ring before the next ``clear`` costs nothing.

A ringer first sets the flag, then sends a byte; ``clear`` first removes the bytes, then the flag. So a rung bell has
its byte, or gets it in a moment. The opposite can happen: a ring that is cleared before it has sent leaves a byte in a
bell that is not rung. The sleeper that it wakes removes that byte; otherwise each of its sleeps would end at once,
until the next ring.
"""

from __future__ import annotations

import contextlib
import select
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakMethod


class Bell:
    """One sleeper, any number of ringers. The socket is written to only while a sleeper waits for it."""

    __slots__ = ("__weakref__", "_listening", "_ringing", "_rung", "_sent", "_sleepers")

    def __init__(self) -> None:
        self._listening, self._ringing = socket.socketpair()
        self._listening.setblocking(False)
        self._ringing.setblocking(False)
        self._rung = False
        self._sent = False
        #: The current waits. An event loop that watches the descriptor counts as an endless wait.
        self._sleepers: set[object] = set()
        # Sockets that are collected with their bell would warn that they were not closed.
        weakref.finalize(self, _close, self._ringing, self._listening).atexit = False

    def fileno(self) -> int:
        """The descriptor, which from now on is readable while the bell is rung."""
        self._sleepers.add(None)
        if self._rung:
            self._ring()
        return self._listening.fileno()

    def ring(self) -> None:
        """Wake the sleeper, now or when it next waits. Never blocks; harmless after ``close``."""
        if self._rung:
            return
        try:
            self._ring()
        except BaseException:  # from a signal handler: with only the flag set, no sleeper would wake
            self._ring()
            raise

    def _ring(self) -> None:
        self._rung = True
        # In this order: a sleeper that arrives in between sees that it is rung.
        if self._sleepers:
            self._sent = True
            with contextlib.suppress(OSError):
                self._ringing.send(b"!")

    def clear(self) -> None:
        """Forget earlier rings."""
        watched = None in self._sleepers
        if not (self._rung or watched):
            return
        # In this order: a ring in between sends nothing, but the check that follows sees its work.
        try:
            if self._sent or watched:
                self._take_bytes()
                self._sent = False
            self._rung = False
        except BaseException:  # from a signal handler: no check follows
            self._ring()
            raise

    def _take_bytes(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.recv(16)

    def _take_stale_bytes(self) -> None:
        if not self._rung:
            try:
                self._take_bytes()
            finally:
                if self._rung:  # rung since: its byte may have been taken as well
                    self._ring()

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until rung, at most ``timeout_s`` seconds. False if it was not rung. Does not clear."""
        return self._rung or wait_for((self,), timeout_s)

    def close(self) -> None:
        """End every wait, from now on at once. Idempotent.

        The descriptor stays open until the bell is collected: a sleeper may be about to sleep on its number, which
        another file would otherwise get.
        """
        self._rung = True
        with contextlib.suppress(OSError):
            self._ringing.shutdown(socket.SHUT_WR)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def wait_for(bells: Sequence[Bell], timeout_s: float | None) -> bool:
    """Sleep until one of them is rung, at most ``timeout_s`` seconds. Clears none. False if none was rung."""
    sleeper = object()
    try:
        for bell in bells:
            bell._sleepers.add(sleeper)
        if any(bell._rung for bell in bells):
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        woken = readable(timeout_s, *(bell._listening.fileno() for bell in bells))
        rung = any(bell._rung for bell in bells)
        if woken and not rung:
            for bell in bells:
                bell._take_stale_bytes()
        return woken or rung
    finally:
        for bell in bells:
            bell._sleepers.discard(sleeper)


def readable(timeout_s: float | None, *descriptors: int) -> bool:
    """Whether any descriptor becomes readable within ``timeout_s`` seconds; False also if one is closed.

    Not a read with a timeout: a timeout belongs to the socket, which other threads use.
    """
    try:
        # Looked up at each call: gevent replaces it and has no ``epoll``, eventlet removes ``poll``.
        poll = getattr(select, "poll", None)
        if poll is None:  # also on Windows
            return bool(select.select(descriptors, [], [], timeout_s)[0])
        poller = poll()
        for each in descriptors:
            poller.register(each, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
    except (OSError, ValueError):  # closed by another thread
        return False


R = TypeVar("R")


def weakly(method: Callable[..., R], *args: Any, otherwise: R) -> Callable[[], R]:
    """A call of the bound ``method(*args)``, which returns ``otherwise`` once its object has been collected.

    For timers and watches, which outlive the connections they serve and must not keep them alive.
    """
    reference = WeakMethod(method)

    def call() -> R:
        alive = reference()
        return otherwise if alive is None else alive(*args)

    return call
