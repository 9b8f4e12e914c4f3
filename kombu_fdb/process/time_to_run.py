"""Times to run: messages that their consumers do not settle in time return to their queues.

A time to run comes from the message (``ttr``, header ``x-ttr``) or its queue (``x-consumer-timeout``); the shorter one
counts (``claim.py``).

Model. A lease lasts as long as its session; the store measures no time. So the consumer's process has a timer, which
starts with the claim and runs by its monotonic clock. A message with a time to run is either *settled* by its consumer,
which stops the timer, or *overdue*. An overdue message is released on the consumer's behalf, and the attempt counts if
the consumer was given the message. If release and ack race, the first to commit wins, and the other finds the lease
gone (ONE-OWNER).

What happens at each failure: if the process dies or freezes, its messages are released when its session's TTL is over.
If the store does not answer, the release is retried each second. If the consumer hangs, the timer still runs: it has a
thread of its own.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic
from typing import NamedTuple

from kombu_fdb.errors import KombuFDBError, StoreError
from kombu_fdb.model import Lease
from kombu_fdb.primitives.interruption import Signal, start
from kombu_fdb.primitives.plural import plural

logger = logging.getLogger(__name__)

#: Pause after a store error, in seconds.
RETRY_S = 1.0
#: How many stopped timers may be in the heap before it is rebuilt without them.
MOST_STOPPED = 1000


class _Timer(NamedTuple):
    due: float
    #: Returns whether the consumer was given the message. If not, it never gets it, and the attempt does not count.
    started: Callable[[], bool]
    #: Called after the message has been released.
    gone: Callable[[], object]


class TimesToRun:
    """The timers of one client, in one daemon thread that lives as long as there are any. Thread-safe.

    Consumers also take the lock, in threads where signal handlers may raise. So it is a lock whose ``with`` is a single
    step, unlike a ``Condition``'s, and the thread sleeps on a signal of its own.
    """

    def __init__(self, release: Callable[[list[Lease], bool], int]) -> None:
        """``release`` releases messages, counted or not, and returns how many were still held."""
        self._release = release
        self._lock = threading.RLock()
        self._changed = Signal()
        #: The running timers.
        self.timers: dict[Lease, _Timer] = {}
        self._order: list[tuple[float, int, Lease]] = []
        self._numbers = count()
        self._thread: threading.Thread | None = None

    def watch(self, lease: Lease, ttr_s: float, *, started: Callable[[], bool], gone: Callable[[], object]) -> None:
        """Release the message in ``ttr_s`` seconds; replaces an earlier timer."""
        with self._lock:
            due = monotonic() + ttr_s
            self.timers[lease] = _Timer(due, started, gone)
            heapq.heappush(self._order, (due, next(self._numbers), lease))
            # Otherwise short jobs with long times to run would fill the memory.
            if len(self._order) > 2 * len(self.timers) + MOST_STOPPED:
                self._order = [each for each in self._order if self._is_running(each)]
                heapq.heapify(self._order)
            if self._thread is None or not self._thread.is_alive():  # or it was interrupted before its start
                self._thread = threading.Thread(target=self._run, name="kombu-fdb-overdue", daemon=True)
                start(self._thread)
            if self._order[0][0] == due:
                self._changed.set()

    def _is_running(self, entry: tuple[float, int, Lease]) -> bool:
        due, _number, lease = entry
        timer = self.timers.get(lease)
        return timer is not None and timer.due == due

    def forget(self, leases: Iterable[Lease]) -> None:
        """Stop the timers of settled messages."""
        with self._lock:
            for lease in leases:
                self.timers.pop(lease, None)

    def clear(self) -> None:
        """Stop all timers."""
        with self._lock:
            self.timers.clear()
            self._order.clear()
            self._changed.set()

    def _run(self) -> None:
        while overdue := self._next():
            started = {lease for lease, timer in overdue.items() if timer.started()}
            for counted in (True, False):
                part = {lease: timer for lease, timer in overdue.items() if (lease in started) is counted}
                self._release_part(part, counted)

    def _next(self) -> dict[Lease, _Timer]:
        """Wait until messages are overdue, and return them; none if no timer is left, so that the thread ends."""
        while True:
            with self._lock:
                overdue = self._pop(monotonic())
                if overdue or not self._order:
                    self._thread = self._thread if overdue else None
                    return overdue
                due = self._order[0][0]
            self._changed.wait(min(max(0.0, due - monotonic()), threading.TIMEOUT_MAX))

    def _pop(self, now: float) -> dict[Lease, _Timer]:
        overdue = {}
        while self._order and self._order[0][0] <= now:
            entry = heapq.heappop(self._order)
            if self._is_running(entry):  # else it was settled, or given more time
                overdue[entry[2]] = self.timers[entry[2]]
        return overdue

    def _release_part(self, timers: dict[Lease, _Timer], counted: bool) -> None:
        if not timers:
            return
        try:
            released = self._release(list(timers), counted)
        except StoreError as error:
            logger.warning("%s can't be released yet: %s", plural(len(timers), "overdue message"), error)
            with self._lock:  # restart the timers of messages not settled since
                for lease, timer in timers.items():
                    if lease in self.timers:
                        self.watch(lease, RETRY_S, started=lambda: counted, gone=timer.gone)
        except KombuFDBError as error:  # such as ForkedError: the messages are the parent's
            logger.debug("overdue messages were not released: %s", error)
            self.forget(timers)
        else:
            self.forget(timers)
            for timer in timers.values():
                timer.gone()
            if released:
                logger.warning("not settled within the time to run, and released: %s", plural(released, "message"))
