"""Whose turn it is to write: a queue of processes and of threads, where SQLite only knows who comes first.

Model. SQLite lets one connection write at a time and lets the others retry with growing pauses, so that a process which
publishes in a tight loop starves them. Here a writer first passes

1. its process's own queue: strictly first come, first served, one thread at a time goes on;
2. the *gate*, an flock: whoever holds it is next in line, and only that one waits for
3. *main*, an flock held while writing; with it in hand, the gate is opened for the next.

After its turn a writer finds the gate held by whoever waited meanwhile, so two writers in tight loops alternate.

A turn is short (some 50 us), so whoever is next in line tries again for about that long. All other waiting is done by a
helper thread in a blocking flock, because flock knows no deadline. (Trying again at the gate as well would be quicker,
and starve the sleepers: with four writers on two cores one of them got 1 %.) If the deadline passes first, the helper
stays behind: it hands the lock to the next thread that wants it, or gives it back.

What fails: a holder that dies, even by kill -9, loses its flocks (the kernel does that). A forked child must close its
copies of the descriptors, or it would hold its parent's lock after the parent's death. A stopped holder (SIGSTOP) makes
the others fail with ``StoreUnavailable`` at their deadline.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections import deque

from kombu_fdb.clock import Clock
from kombu_fdb.errors import StoreUnavailable

__all__ = ["FairLock", "WriterLock"]

#: Tries at *main*: about as long as one short write transaction takes.
SPINS = 60
LONGEST_POLL_S = 0.002


class FairLock:
    """A lock that is handed to its waiters in the order they came."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout_s: float) -> bool:
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            granted = turn.acquire(timeout=max(timeout_s, 0))
        except BaseException:  # a signal handler raised
            if not self._leave(turn):
                self.release()
            raise
        return granted or not self._leave(turn)

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def _leave(self, turn: threading.Lock) -> bool:
        """Leave the queue; False if the lock was handed over in that very moment."""
        with self._mutex:
            try:
                self._waiting.remove(turn)
            except ValueError:
                return False
            return True


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_for_a_turn(fd: int) -> bool:
    for _ in range(SPINS):
        if _try(fd):
            return True
        os.sched_yield()
    return False


def _threads_are_greenlets() -> bool:
    """Under gevent a blocking flock in a 'thread' would stop the whole process."""
    monkey = sys.modules.get("gevent.monkey")
    return bool(monkey and monkey.is_module_patched("threading"))


class WriterLock:
    """The right to write, within a process and between processes; see the module's text."""

    def __init__(self, gate: int, main: int, clock: Clock) -> None:
        self._gate = gate
        self._main = main
        self._clock = clock
        self._threads = FairLock()
        self._at_gate = False
        self._changed = threading.Condition()
        self._helper: threading.Thread | None = None
        self._helper_busy = False
        self._wanted = False
        self._granted = False
        self._error: OSError | None = None
        self._closed = False

    def acquire(self, timeout_s: float) -> None:
        """Raises ``StoreUnavailable`` when nobody let go within ``timeout_s``."""
        deadline = self._clock.monotonic() + timeout_s
        if not self._threads.acquire(timeout_s):
            raise self._too_late()
        try:
            if self._helper_busy or not self._take_at_once():
                self._wait(deadline)
        except BaseException:
            if not self._helper_busy:
                self._let_go()
            self._threads.release()
            raise

    def release(self) -> None:
        fcntl.flock(self._main, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Only when no thread holds the lock or waits for it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if not self._helper_busy:  # else it closes them when its flock returns
                self.close_files()

    def close_files(self) -> None:
        """All that a forked child may do: the descriptors are its own, the locks are its parent's."""
        os.close(self._gate)
        os.close(self._main)

    def _take_at_once(self) -> bool:
        self._at_gate = self._at_gate or _try(self._gate)
        if not self._at_gate:
            return False
        if not (_try(self._main) or _try_for_a_turn(self._main)):
            return False
        self._open_gate()
        return True

    def _open_gate(self) -> None:
        self._at_gate = False
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def _let_go(self) -> None:
        fcntl.flock(self._main, fcntl.LOCK_UN)
        if self._at_gate:
            self._open_gate()

    def _wait(self, deadline: float) -> None:
        if _threads_are_greenlets():
            self._poll(deadline)
            return
        with self._changed:
            self._wanted = True
            self._ask_helper()
            try:
                self._changed.wait_for(lambda: self._granted, timeout=deadline - self._clock.monotonic())
            finally:
                self._wanted = False
                granted, self._granted = self._granted, False
        if not granted:
            raise self._too_late()
        if self._error is not None:
            error, self._error = self._error, None
            raise StoreUnavailable("the lock file failed", reason=str(error)) from error

    def _poll(self, deadline: float) -> None:
        pause = 0.0001
        while not self._take_at_once():
            if self._clock.monotonic() > deadline:
                raise self._too_late()
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def _ask_helper(self) -> None:
        if self._helper_busy:
            return
        self._helper_busy = True
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="kombu-fdb-sqlite-lock", daemon=True)
            self._helper.start()
        self._changed.notify_all()

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._helper_busy or self._closed)
                if not self._helper_busy:
                    return
            error = self._take_blocking()
            with self._changed:
                if self._hand_over(error):
                    return

    def _take_blocking(self) -> OSError | None:
        try:
            if not self._at_gate:
                fcntl.flock(self._gate, fcntl.LOCK_EX)
            fcntl.flock(self._main, fcntl.LOCK_EX)
            self._open_gate()
        except OSError as error:
            return error
        return None

    def _hand_over(self, error: OSError | None) -> bool:
        """Give the lock to whoever wants it, or back. True when the helper's work is done for good."""
        self._helper_busy = False
        if self._wanted:
            self._granted, self._error = True, error
            self._changed.notify_all()
            return False
        if error is None:
            fcntl.flock(self._main, fcntl.LOCK_UN)
        if self._closed:
            self.close_files()
        return self._closed

    @staticmethod
    def _too_late() -> StoreUnavailable:
        return StoreUnavailable(
            "another process or thread held the write lock until the deadline",
            fix="Look for a stopped or hanging process with `fuser <database>-lock`",
        )
