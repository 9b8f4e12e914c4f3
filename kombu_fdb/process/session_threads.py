"""The threads that keep a session.

* The heartbeat thread beats, and does nothing else, so that neither a long sweep, nor a task on Celery's event loop,
  nor a consumer that works for an hour makes a live process look dead.
* With gevent that is a greenlet, which does not run while a task computes. So a native thread beats in its stead when
  it is late. It does nothing else, and nothing as long as greenlets run. (Eventlet's locks are for one thread only.)
* The duties thread sweeps, promotes, expires (``duty_cycle.py``), and does the client's deferred calls.

Both outlive every store error: they say so once, try again, and say once that it is over. They end when they are told
to, or when the session is lost. Neither keeps the process alive.
"""

from __future__ import annotations

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

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.primitives.processes import see
from kombu_fdb.primitives.threads import instead_of_threads, start, start_native
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.membership import Membership
from kombu_fdb.process.upkeep.duty_cycle import Duties, Turns
from kombu_fdb.settings.options import Options

logger = logging.getLogger(__name__)

#: Beats per TTL. An observer needs only one in a TTL; the others are for the unlucky.
BEATS = 6
#: A heartbeat thread that has not run for so many of its beats is late.
LATE = 2
#: Longest pause after an error, in seconds.
RETRY_S = 1.0
#: Shortest pause between two looks, however often the alarm rings, in seconds.
ALARM_S = 0.005


class Trouble:
    """Logs the first failure of a series and its end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def begins(self, error: Exception) -> None:
        if not self._failing:
            unexpected = not isinstance(error, KombuFDBError)
            logger.warning("%s failed, will be retried: %s", self._what, error, exc_info=unexpected)
        self._failing = True

    def ends(self) -> None:
        if self._failing:
            logger.warning("%s succeeded again", self._what)
        self._failing = False


class SessionThreads:
    """Those of one session."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self.stopped = threading.Event()
        self._engine = engine
        self._options = options
        self._bell = Bell()
        self._clock = SystemClock()
        self._threads: list[threading.Thread] = []
        #: When the heartbeat thread ran last.
        self._ran_s = self._clock.monotonic()

    def start(self, turns: Turns) -> None:
        self._threads = [
            threading.Thread(target=target, args=(turns,), name=f"kombu-fdb-{name}", daemon=True)
            for name, target in (("heartbeat", self._beat), ("duties", self._serve))
        ]
        for thread in self._threads:
            start(thread)
        if instead_of_threads() == "gevent":
            start_native(partial(self._stand_in, turns))

    def ring(self) -> None:
        self._bell.ring()

    def end(self) -> None:
        self.stopped.set()
        self._bell.ring()

    def join(self) -> None:
        began = self._clock.monotonic()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            left_s = began + self._options.operation_timeout - self._clock.monotonic()
            thread.join(timeout=self._engine.transactions.patience.allow(max(left_s, 0.0)))
        if any(thread.is_alive() for thread in others):
            self._engine.transactions.patience.wasted(self._clock.monotonic() - began)

    def _beat(self, turns: Turns) -> None:
        trouble = Trouble("the heartbeat to the store")
        interval_s = self._options.session_ttl / BEATS
        while not self.stopped.wait(interval_s):
            self._ran_s = self._clock.monotonic()
            try:
                if not turns.beat():
                    break
                trouble.ends()
            except Exception as error:  # noqa: BLE001 - a thread that dies is a worker that looks dead
                trouble.begins(error)
            self._ran_s = self._clock.monotonic()

    def _stand_in(self, turns: Turns) -> None:
        """In a native thread."""
        interval_s = self._options.session_ttl / BEATS
        pause = importlib.import_module("gevent.monkey").get_original("time", "sleep")
        while not self.stopped.is_set():
            pause(interval_s)
            if self._clock.monotonic() - self._ran_s > LATE * interval_s and not self.stopped.is_set():
                with suppress(Exception):  # the heartbeat itself tells of it, when it can
                    turns.beat()
        importlib.import_module("gevent").get_hub().destroy(destroy_loop=True)

    def _serve(self, turns: Turns) -> None:
        trouble = Trouble("the duties")
        pause_s = 0.0
        while not self.stopped.is_set():
            rang = self._bell.wait(pause_s)
            self._bell.clear()
            try:
                pause_s = max(turns.serve(rang=rang), ALARM_S)
                trouble.ends()
            except Exception as error:  # noqa: BLE001
                if not turns.lost:
                    trouble.begins(error)
                pause_s = RETRY_S
        turns.leave()
        self._bell.close()


def open_session(engine: Engine, options: Options, deferred: Callable[[], None]) -> Membership:
    """``deferred`` is called from the duties thread, about once a second and after ``threads.ring``."""
    session_id = engine.sessions.open(_describe(), ttl_s=options.session_ttl)
    threads = SessionThreads(engine, options)
    membership = Membership(engine, options, session_id, threads, SystemClock())
    duties = Duties(engine, SystemClock(), random.Random(), session_id, sweep_interval_s=options.sweep_interval)
    threads.start(Turns(engine, membership, duties, deferred, ttl_s=options.session_ttl))
    return membership


def _describe() -> dict[str, str | int]:
    pid = os.getpid()
    seen = see(pid)
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "program": Path(sys.argv[0] or "python").name,
        "process": seen.fingerprint if seen else "",
    }
