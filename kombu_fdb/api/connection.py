"""What a broker, its queues and its jobs share: the process's client, and which jobs are held through it.

Model. A connection is *open* from its creation until :meth:`Connection.close`, and then *closed*. Each reference keeps
it open: the broker, its queues, its jobs. Without any it is collected, and what it held is released, uncounted, as with
closing.

``held`` are the leases of jobs that were taken through it and not settled. A lease leaves it by being settled, dropped
(its job was collected), lost to its time to run, or with the connection. ``sleepers`` ring those who wait for
a job; closing calls them, and each finds the connection closed.

Failures: if the store does not answer at the end, the client keeps what is to be released; if the client ends first,
the end of its session releases it. In a forked child nothing here has any effect, and :attr:`Connection.engine` raises
``ForkedError``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import StoreError, StoreUnavailable
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.primitives.interruption import Lock
from kombu_fdb.primitives.wakeup import weakly
from kombu_fdb.process.client import Client
from kombu_fdb.process.combiner_client import Contention
from kombu_fdb.settings.options import Options

#: The error in the history of a job that was dropped too often.
DROPPED = {"error": "its consumer had dropped it without settling it"}

_connections = count(1)


class Connection:
    """Thread-safe; not for a forked child."""

    # For a connection whose constructor raised: it is collected as well.
    closed = ended = True
    taken = False

    def __init__(self, client: Client, *, timeout_s: float | None) -> None:
        """Raises ``StoreUnavailable`` or ``FormatError`` within ``timeout_s`` seconds.

        None: another owner keeps the client open, and nothing is asked.
        """
        self.client = client
        self.held: set[Lease] = set()
        #: What each claim that is under way brings, or has just brought.
        self.arriving: dict[int, list[Delivery]] = {}
        #: Its tag as a consumer, where only one may be active (``engine/scheduling/single.py``).
        self.tag = f"broker-{next(_connections)}"
        #: Whether it has ever claimed: then it may be the active consumer of a queue.
        self.taken = False
        #: What its consumers know of others who take from the same queues (``process/combiner_client.py``).
        self.contention = Contention()
        self._turns: dict[str, int] = {}
        self._services = count(1)
        self._lock = Lock()
        #: :meth:`wake` calls each of them. Each change is one call into C, so it takes no lock.
        self.sleepers: set[Callable[[], None]] = set()
        self.closed = self.ended = True  # until it has opened
        if timeout_s is not None:
            client.attach(self, timeout_s=timeout_s)
        #: Whether it has released what it held. Until then, its finalizer does that, or a second :meth:`close`.
        self.ended = False
        self.closed = False

    def close(self) -> None:
        """Release what is held, at once and uncounted; end every wait. Idempotent."""
        if os.getpid() != self.client.pid:
            return  # the parent's
        with self._lock:
            self.closed = True
        self.wake()
        if self.ended:
            return
        with self.client.patience.ending():
            try:
                if self.taken:
                    self._end()
            except BaseException as error:  # or the place stays taken for as long as this process lives
                self.client.later(self._end)
                if not isinstance(error, StoreError):  # a signal handler's
                    raise
            finally:
                self.client.detach(self)
        self.ended = True

    def _end(self) -> None:
        self.client.leave([self.tag], self._gather)
        self.held.clear()  # only now: if the release is interrupted, the next one knows them

    def __del__(self) -> None:
        """Collected without having been closed. Runs in any thread at any moment: takes no lock and never waits."""
        if self.ended or sys.is_finalizing() or os.getpid() != self.client.pid:
            return
        if self.taken:
            self.client.later(partial(self.client.leave, [self.tag], self.held.copy))
        self.client.abandon(self)

    @property
    def engine(self) -> Engine:
        """Raises ``StoreUnavailable`` when closed, ``ForkedError`` in a child."""
        if self.closed:
            raise StoreUnavailable("the broker is closed", location=str(self.client.location))
        return self.client.engine

    @property
    def options(self) -> Options:
        return self.client.options

    def now_s(self) -> float:
        """Seconds since any moment, by the clock of deadlines."""
        return self.client.patience.clock.monotonic()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _gather(self) -> set[Lease]:
        """The leases of all jobs that are held, or that a claim has just brought."""
        with self._lock:
            held = self.held.copy()
        return held.union(each.lease for found in list(self.arriving.values()) for each in list(found))

    def hold(self, found: Sequence[Delivery]) -> bool:
        """False if it was closed while these were claimed."""
        with self._lock:
            self.held.update([each.lease for each in found])
            self._turns.update({each.queue: next(self._services) for each in found})
            return not self.closed

    def let_go(self, leases: Collection[Lease]) -> None:
        """Have the duties thread release them, uncounted: the program has not seen them. Never blocks."""
        self.held.difference_update(leases)
        self.client.release_later(leases)

    def settled(self, lease: Lease) -> None:
        """A job is no longer held."""
        self.client.settled([lease])
        self.held.discard(lease)  # last: if this is interrupted before, the drop of the job notifies the client again

    def watch(self, delivery: Delivery) -> None:
        """Begin a job's time to run, if it has one."""
        self.client.watch(delivery, gone=weakly(self.settled, delivery.lease, otherwise=None))

    def dropped(self, lease: Lease) -> None:
        """A job was collected before it was settled. For a finalizer: takes no lock and never waits."""
        if os.getpid() == self.client.pid and not sys.is_finalizing() and lease in self.held:
            self.client.later(partial(self.client.requeue, [lease], DROPPED))
            self.held.discard(lease)

    def in_turn(self, queues: Sequence[str]) -> list[str]:
        """First the queue that was served longest ago."""
        return sorted(queues, key=lambda name: self._turns.get(name, 0))

    # -- those who wait --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have all waiting takes look again. Takes no lock, for signal handlers and finalizers."""
        for ring in list(self.sleepers):
            ring()
