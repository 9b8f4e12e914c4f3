"""Whose turn it is to write: a queue of processes and of threads, where SQLite only knows who comes first.

Model. SQLite lets one connection write at a time and lets the others retry with growing pauses, so that a process which
publishes in a tight loop starves them. Here a writer first passes

1. its process's own queue (:class:`~kombu_fdb.primitives.threads.FairLock`): first come, first served. Its head is the
   only one, but for the helper, that touches the two files which follow;
2. the *gate*, an flock: its holder is next in line, and only that one waits for
3. *main*, an flock held while writing; with it in hand, the gate is opened for the next.

After its turn a writer finds the gate held by one that waited meanwhile, so two writers in tight loops alternate.

A turn is short (some 50 us), so the next in line tries again for about that long. All other waiting is done by a
helper thread in a blocking flock, because flock knows no deadline. (Trying again at the gate as well would be quicker,
and starve the sleepers: with four writers on two cores one of them got 1 %.)

*Busy* says that the flocks are the helper's. Once it has *main*, it notes that it was *taken*, is busy no more and
wakes the head: an flock belongs to the descriptor, so what the helper took is the head's. If the deadline passes first,
the head leaves and the helper stays behind for the next one. If no writer is there in the end, it gives the lock back.

What fails: a holder that dies, even by kill -9, loses its flocks (the kernel does that). A forked child must close its
copies of the descriptors, or it would hold its parent's lock after the parent's death. A stopped holder (SIGSTOP) makes
the others fail with ``StoreUnavailable`` at their deadline. An exception between any two steps is mended by
``release``, which may be called twice: it unlocks whatever the head of the queue may have locked, and an flock may be
unlocked once too often.
"""

from __future__ import annotations

import fcntl
import os
import threading
from fcntl import flock

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.threads import FairLock, Signal, Turn, instead_of_threads, start, would_wait_for_itself

#: Tries at *main*: about as long as one short write transaction takes.
SPINS = 60
LONGEST_POLL_S = 0.002
#: How long ``close`` waits for the writer of another thread.
CLOSE_S = 1.0


AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


def _try_for_a_turn(fd: int) -> bool:
    for _ in range(SPINS):
        os.sched_yield()
        try:
            flock(fd, AT_ONCE)
        except BlockingIOError:
            continue
        return True
    return False


class WriteLock:
    """The right to write, within a process and between processes; see the module's text."""

    def __init__(self, gate: int, main: int, clock: Clock) -> None:
        self._gate = gate
        self._main = main
        self._files = [gate, main]
        self._clock = clock
        self._turns = FairLock(clock)
        #: The head of the queue may hold the gate. Set before it does.
        self._at_gate = False
        self._busy = False
        #: The helper has locked *main* for the head of the queue.
        self._taken = False
        self._asker: Turn | None = None
        self._work = Signal()
        self._helper: threading.Thread | None = None
        self._error: OSError | None = None
        self._closed = False

    def acquire(self, turn: Turn, deadline: float) -> None:
        """Raises ``StoreUnavailable`` if it is not free by the deadline. The caller releases ``turn``, also then.

        Raises ``StoreError`` at once in a thread that has it already, or waits for it.
        """
        if not self._turns.acquire(turn, deadline - self._clock.monotonic()):
            raise would_wait_for_itself() if self._turns.mine else self._too_late()
        if self._closed:
            raise StoreUnavailable("the database was closed")
        if self._busy or not (self._taken or self._take_at_once()):
            self._wait(turn, deadline)

    def held_by(self, turn: Turn) -> bool:
        """Whether ``turn`` is the one that may write; it is for its owner to ask."""
        return self._turns.head is turn

    def release(self, turn: Turn) -> None:
        """End ``turn``, however far it came. Idempotent."""
        if self._turns.head is turn:
            turn.over = True  # before the look at _busy, see _give_back
            if not (self._busy or self._closed):
                self._taken = False
                flock(self._main, fcntl.LOCK_UN)
                if self._at_gate:
                    self._open_gate()
        self._turns.release(turn)

    def close(self) -> bool:
        """No more writers. False if a thread still does: call it again when that has ended. Idempotent."""
        self._closed = True
        turn = Turn()
        if not self._turns.acquire(turn, CLOSE_S):
            return False
        if self._helper is None:
            self.close_files()
        else:  # it closes them, when its flock returns
            self._work.set()
            if not self._busy:
                self._helper.join(CLOSE_S)
        self._turns.release(turn)
        return True

    def close_files(self) -> None:
        """All that a forked child may do: the descriptors are its own, the locks are its parent's."""
        while self._files:
            os.close(self._files.pop())

    def _take_at_once(self) -> bool:
        if not self._files:
            raise StoreUnavailable("the database was closed")
        self._at_gate = True
        try:
            flock(self._gate, AT_ONCE)
        except BlockingIOError:
            self._at_gate = False
            return False
        try:
            flock(self._main, AT_ONCE)
        except BlockingIOError:
            if not _try_for_a_turn(self._main):
                return False
        flock(self._gate, fcntl.LOCK_UN)
        self._at_gate = False
        return True

    def _open_gate(self) -> None:
        flock(self._gate, fcntl.LOCK_UN)
        self._at_gate = False

    def _wait(self, turn: Turn, deadline: float) -> None:
        if instead_of_threads():  # a blocking flock in a "thread" would stop the whole process
            self._poll(deadline)
            return
        signal = turn.listen()
        self._asker, self._error = turn, None
        while self._busy or not (self._taken or self._take_at_once()):
            self._ask_helper()
            if not signal.wait(deadline - self._clock.monotonic()):
                raise self._too_late()
            if self._error is not None:
                raise StoreUnavailable("the lock file failed", reason=str(self._error)) from self._error

    def _poll(self, deadline: float) -> None:
        pause = 0.0001
        while not self._take_at_once():
            if self._clock.monotonic() > deadline:
                raise self._too_late()
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    @staticmethod
    def _too_late() -> StoreUnavailable:
        return StoreUnavailable(
            "another process or thread held the write lock until the deadline",
            fix="Look for a stopped or hanging process with `fuser <database>-lock`",
        )

    # The helper

    def _ask_helper(self) -> None:
        """Asked once too often, it finds *main* taken already, and wakes the head once more."""
        self._busy = True
        if self._helper is None or not self._helper.is_alive():
            self._helper = threading.Thread(target=self._help, name="kombu-fdb-sqlite-lock", daemon=True)
            start(self._helper)
        self._work.set()

    def _help(self) -> None:
        while not self._closed:
            self._work.wait(None)
            if self._busy:
                if not self._taken:
                    self._take_blocking()
                self._busy = False
                # In this order: a new asker registers first, and then looks whether the helper is busy.
                if self._asker is not None:
                    self._asker.wake()
                self._give_back()
        self.close_files()

    def _take_blocking(self) -> None:
        try:
            flock(self._gate, fcntl.LOCK_EX)
            flock(self._main, fcntl.LOCK_EX)
            self._taken = True
            self._open_gate()
        except OSError as error:
            self._error = error.with_traceback(None)

    def _give_back(self) -> None:
        """Unlock if no writer is there. A head that has not begun to leave will do it when it does."""
        while (head := self._turns.head) is None or head.over:
            turn = Turn()
            if self._turns.acquire(turn, LONGEST_POLL_S):
                self._taken = False
                if not self._closed:
                    flock(self._main, fcntl.LOCK_UN)
                self._turns.release(turn)
                return
