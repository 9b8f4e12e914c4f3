"""What has to be done later, and who does it where no session has a duties thread.

Model. A call is *open* from :meth:`DeferredCalls.add` until it has succeeded. Meanwhile it waits, or one thread has it
in hand; one that fails waits again. So of several threads that run calls, each call is run by one at a time, and none
is lost: neither to another thread nor to an exception out of a signal handler.

Finalizers add calls. They run in any thread at any moment, also in one that holds a lock, so nothing here takes a
lock that another thread might have to wait for.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kombu_fdb.primitives.locks import Signal
from kombu_fdb.primitives.threads import start
from kombu_fdb.process.session_threads import RETRY_S, Trouble
from kombu_fdb.process.upkeep.round_robin import TROUBLE

T = TypeVar("T")


def move(source: deque[T], hand: list[T], most: int | None = None) -> bool:
    """Move what is at the front, up to ``most``, into ``hand``; False if that holds nothing then.

    In one call into C: no thread comes in between, and no exception of a signal handler, so each is in one of both.
    """
    try:  # noqa: SIM105 - suppress is Python
        hand.extend(islice(iter(source.popleft, None), most))
    except IndexError:  # there are no more; those before are in the hand
        pass
    return bool(hand)


@dataclass(eq=False, frozen=True)
class _Call:
    do: Callable[[], object]


class DeferredCalls:
    """Of one client. Thread-safe; true while one is open."""

    def __init__(self) -> None:
        self._open: set[_Call] = set()
        self._waiting: deque[_Call] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, do: Callable[[], object]) -> None:
        """``do`` is repeated until it raises nothing, so it must be harmless to do it again."""
        call = _Call(do)
        self._open.add(call)
        self._waiting.append(call)

    def run(self) -> None:
        """Each once. One that fails for a reason of its own goes behind the others, and delays none of them.

        Raises the first such error at the end, and what says that the store does not answer at once.
        """
        failure: Exception | None = None
        for _ in range(len(self._waiting)):
            failed = self._run_next()
            failure = failure or failed
        if failure is not None:
            raise failure

    def _run_next(self) -> Exception | None:
        hand: list[_Call] = []
        try:
            if move(self._waiting, hand, 1):  # else another thread was faster
                hand[0].do()
                self._open.discard(hand[0])
        except TROUBLE:
            self._waiting.extendleft(hand)
            raise
        except Exception as error:  # noqa: BLE001 - raised when the others have had their turn
            self._waiting.extend(hand)
            return error
        except BaseException:
            self._waiting.extendleft(hand)
            raise
        return None


class Attendant:
    """Calls ``work`` in a thread that lives no longer than the work, and again after a pause as long as it raises."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._called = False
        self._stopped = False
        #: Held from the moment a thread is asked for until it goes; only the end waits for it.
        self._there = threading.Lock()
        self._alarm = Signal()
        self._thread: threading.Thread | None = None

    def call(self) -> None:
        """Have the work done soon. For a finalizer, too."""
        self._called = True
        if self._stopped or not self._there.acquire(blocking=False):
            return  # the thread that is there looks once more before it goes
        try:
            _thread.start_new_thread(self._begin, ())
        except BaseException as error:
            self._there.release()
            if not isinstance(error, RuntimeError):  # the interpreter ends
                raise

    def stop(self, timeout_s: float) -> bool:
        """Let it finish what it does and go. False if that takes longer than ``timeout_s`` seconds."""
        if self._thread is threading.current_thread():
            return True
        self._stopped = True
        self._alarm.set()
        # Not ``join``: the thread that a finalizer has asked for may not have started yet.
        ended = self._there.acquire(timeout=timeout_s)
        if ended:
            self._there.release()
        self._stopped = False
        return ended

    def _begin(self) -> None:
        """``Thread.start`` takes locks, which the thread that the finalizer runs in may hold. This one holds none."""
        thread = threading.Thread(target=self._run, name="kombu-fdb-deferred", daemon=True)
        try:
            start(thread)
        except RuntimeError:
            self._there.release()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        trouble = Trouble("what had to be done later")
        while self._called and not self._stopped:
            self._called = False
            try:
                self._work()
                trouble.ends()
            except Exception as error:  # noqa: BLE001 - it must end with its work, not before
                trouble.begins(error)
                self._called = True
                self._alarm.wait(RETRY_S)
        self._there.release()
        if self._called and not self._stopped:
            self.call()
