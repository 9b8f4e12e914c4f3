"""The threads that maintain a session, and the deferred calls that they make.

Model of deferred calls. A call is *open* from :meth:`DeferredCalls.add` until it has succeeded. Until then it waits, or
one thread is making it; if it fails, it waits again. So if several threads make calls, only one at a time makes each
call, and no call is lost, neither to another thread nor to a signal handler's exception.

Finalizers add calls. They run in any thread at any time, even in one that holds a lock, so nothing here takes a lock
that another thread might have to wait for.

The threads:

* The heartbeat thread only beats, so that neither a long sweep, nor a task on Celery's event loop, nor a consumer that
  works for an hour makes a live process look dead.
* With gevent the heartbeat thread is a greenlet, which does not run while a task computes. So a native thread beats for
  it when it is late, and does nothing else. (Not so with eventlet: its locks are for one thread only.)
* The duties thread sweeps, promotes, expires (``duty_cycle.py``), and makes the client's deferred calls.

The heartbeat and the duties survive every store error: they log it once, try again, and log once that it is over. They
end on request, or when the session is lost. Neither keeps the process alive.
"""

from __future__ import annotations

import _thread
import importlib
import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import KombuFDBError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock, in_step
from kombu_fdb.primitives.interruption import Signal, instead_of_threads, start, start_native, surely
from kombu_fdb.primitives.processes import see
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.duties import STORE_FAILURES, is_of_one
from kombu_fdb.process.duty_cycle import DutyCycle
from kombu_fdb.settings.options import Options

# -- deferred calls ----------------------------------------------------------------------------------------------------


T = TypeVar("T")

#: With this many deferred calls, as when a full disk refuses rejections, nothing more is claimed.
MOST_DEFERRED = 500


class DeferredCalls:
    """The deferred calls of one client. Thread-safe; true while one is open."""

    def __init__(self) -> None:
        #: The open calls, in the order in which they were added.
        self.open: dict[partial[object], None] = {}
        #: The calls that are being made, each with a signal that is set on its return, and its thread.
        self._underway: dict[partial[object], tuple[Signal, int]] = {}

    def __len__(self) -> int:
        return len(self.open)

    def add(self, do: Callable[[], object]) -> None:
        """``do`` is repeated until it raises nothing, so it must be harmless to repeat."""
        self.open[partial(do)] = None  # equal only to itself, even if the same ``do`` is added again

    def run(self) -> None:
        """Make each call that no other thread is making, once. A call that fails for its own reason delays no other.

        Raises the first such error at the end; if the store does not answer, raises that error at once.
        """
        failure = failed = None
        try:
            for call in list(self.open):
                failed = self._make(call)
                failure = failure or failed
            if failure is not None:
                raise failure
        finally:
            del failure, failed  # their frames refer to these locals

    def wait(self, timeout_s: float) -> None:
        """Wait for the calls that other threads are making. Failed ones are open again.

        Raises ``StoreUnavailable`` if that takes longer than ``timeout_s`` seconds.
        """
        deadline = monotonic() + timeout_s
        for returned, thread in list(self._underway.values()):
            if thread == threading.get_ident():
                continue  # this is a signal handler that interrupts the call
            if not returned.wait(deadline - monotonic()):
                raise StoreUnavailable("a deferred call of another thread has not returned")
            returned.set()  # for other threads that wait for it

    def _make(self, call: partial[object]) -> Exception | None:
        mine = Signal(), threading.get_ident()

        def make() -> None:
            if self._underway.setdefault(call, mine) is mine and call in self.open:  # else another thread was faster
                call()
                self.open.pop(call, None)

        def end() -> None:
            if self._underway.get(call) is mine:
                self._underway.pop(call, None)
            mine[0].set()

        try:
            surely(make, end)
        except STORE_FAILURES as error:
            if not is_of_one(error):
                raise
            return error
        except Exception as error:  # noqa: BLE001 - raised after the others have run
            return error
        return None


class OnDemandThread:
    """Calls ``work`` in a thread that ends with it. If ``work`` raises, repeats it after a pause."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._called = False
        self._stopped = False
        #: Held from the request for a thread until that thread ends; only ``stop`` waits for it.
        self._there = threading.Lock()
        self._alarm = Signal()
        self._thread: threading.Thread | None = None

    def call(self) -> None:
        """Have the work done soon. For a finalizer, too."""
        self._called = True
        if self._stopped or not self._there.acquire(blocking=False):
            return  # the running thread checks again before it ends
        try:
            _thread.start_new_thread(self._begin, ())
        except BaseException as error:
            self._there.release()
            if not isinstance(error, RuntimeError):  # the interpreter is ending
                raise

    def stop(self, timeout_s: float) -> bool:
        """Let the thread finish its call and end. False if that takes longer than ``timeout_s`` seconds."""
        if self._thread is threading.current_thread():
            return True
        self._stopped = True
        self._alarm.set()
        # Not ``join``: a thread that a finalizer has requested may not have started yet.
        ended = self._there.acquire(timeout=timeout_s)
        if ended:
            self._there.release()
        self._stopped = False
        return ended

    def _begin(self) -> None:
        """Start the thread, from a raw thread: ``Thread.start`` takes locks that the finalizer's thread may hold."""
        thread = threading.Thread(target=self._run, name="kombu-fdb-deferred", daemon=True)
        try:
            start(thread)
        except RuntimeError:
            self._there.release()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        tell = logged("a deferred call")
        while self._called and not self._stopped:
            self._called = False
            try:
                self._work()
                tell(None)
            except Exception as error:  # noqa: BLE001 - the thread must not end before the work is done
                tell(error)
                self._called = True
                self._alarm.wait(RETRY_S)
        self._there.release()
        if self._called and not self._stopped:
            self.call()


# -- the threads -------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: Beats per TTL. An observer needs to see only one per TTL; the others are spare.
BEATS = 6
#: A heartbeat thread is late when it has not run for this many beats.
LATE = 2
#: Longest pause after an error, in seconds.
RETRY_S = 1.0
#: Shortest pause between two looks, however often the alarm rings, in seconds.
ALARM_S = 0.005


def logged(what: str) -> Callable[[Exception | None], None]:
    """Returns a function to call with each attempt's error, or None: it logs the first of a series, and its end."""
    failing = False

    def tell(error: Exception | None) -> None:
        nonlocal failing
        if error is not None and not failing:
            unexpected = not isinstance(error, KombuFDBError)
            logger.warning("%s failed, will be retried: %s", what, error, exc_info=unexpected)
        elif error is None and failing:
            logger.warning("%s succeeded again", what)
        failing = error is not None

    return tell


def open_session(engine: Engine, options: Options, deferred: Callable[[], None]) -> ClientSession:
    """``deferred`` is called by the duties thread, about once a second and after each ring of the session's bell."""
    session_id = engine.sessions.open(_describe(), ttl_s=options.session_ttl)
    session = ClientSession(engine, options, session_id, Bell(), Clock())
    duties = DutyCycle(engine, Clock(), session_id, sweep_interval_s=options.sweep_interval)
    try:
        start_threads(session, duties, deferred, options)
        return session
    except BaseException:  # a signal handler's, or no thread can be started; the caller has no session yet
        session.stop()
        raise


def start_threads(session: ClientSession, duties: DutyCycle, deferred: Callable[[], None], options: Options) -> None:
    """Start the threads that maintain the session."""
    ttl_s, duties.beat_s = options.session_ttl, monotonic()
    for name, target in (
        ("heartbeat", partial(_beat, session, duties, ttl_s)),
        ("duties", partial(_serve, session, duties, deferred)),
    ):
        thread = threading.Thread(target=target, name=f"kombu-fdb-{name}", daemon=True)
        start(thread)
        session.threads.append(thread)
    if instead_of_threads() == "gevent":
        start_native(partial(_stand_in, session, duties, ttl_s))


def _beat(session: ClientSession, duties: DutyCycle, ttl_s: float) -> None:
    tell, clock, rng = logged("the heartbeat to the store"), Clock(), random.Random()
    while not session.ended.wait(in_step(clock.wall_ms(), rng, ttl_s / BEATS)):
        duties.beat_s = monotonic()
        try:
            if not duties.beat(session, ttl_s):
                break
            tell(None)
        except Exception as error:  # noqa: BLE001 - a thread that dies is a worker that looks dead
            tell(error)
        duties.beat_s = monotonic()


def _stand_in(session: ClientSession, duties: DutyCycle, ttl_s: float) -> None:
    """Beat in a native thread."""
    interval_s = ttl_s / BEATS
    pause = importlib.import_module("gevent.monkey").get_original("time", "sleep")
    while not session.ended.is_set():
        pause(interval_s)
        if monotonic() - duties.beat_s > LATE * interval_s and not session.ended.is_set():
            with suppress(Exception):  # the heartbeat thread logs it once it runs
                duties.beat(session, ttl_s)
    importlib.import_module("gevent").get_hub().destroy(destroy_loop=True)


def _serve(session: ClientSession, duties: DutyCycle, deferred: Callable[[], None]) -> None:
    tell = logged("the duties")
    pause_s = 0.0
    while not session.ended.is_set():
        rang = session.bell.wait(pause_s)
        session.bell.clear()
        try:
            pause_s = max(duties.serve(session, deferred, rang=rang), ALARM_S)
            tell(None)
        except Exception as error:  # noqa: BLE001
            if not session.lost:
                tell(error)
            pause_s = RETRY_S
    duties.leave(session)
    session.bell.close()


def _program(path: Path) -> str:
    """The program's name: ``celery``, even if it was started as ``python -m celery``."""
    return path.parent.name if path.name == "__main__.py" else path.name


def _describe() -> dict[str, str | int]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "program": _program(Path(sys.argv[0] or "python")),
        "process": see(pid)[0],
    }
