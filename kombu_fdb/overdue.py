"""Times to run (``ttr``): jobs whose consumer did not settle them in time go back to their queue.

Model. A lease lasts as long as its session, and the store measures no time for it. So the consumer's process keeps a
timer: from the claim on, by its monotonic clock, a job with a time to run is either *settled* by its consumer, which
stops the timer, or *overdue*. An overdue job is handed back in the consumer's stead, and the attempt counts: whoever of
the two comes first in the store has it, and the other one finds the lease gone (ONE-OWNER).

What happens at each failure: the process dies or freezes, and its session's TTL brings the jobs back. The store does
not answer: tried again each second. The consumer hangs: that is what this is for; it has a thread of its own.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic

from kombu_fdb.client import Client
from kombu_fdb.errors import KombuFDBError, StoreError
from kombu_fdb.model import Lease

__all__ = ["Overdue"]

logger = logging.getLogger(__name__)

#: Pause after a store error, in seconds.
RETRY_S = 1.0


class Overdue:
    """The timers of one broker, in one daemon thread that starts with the first. Thread-safe."""

    def __init__(self, client: Client, settled: Callable[[Lease], None]) -> None:
        """``settled`` is told of each job that was handed back."""
        self._client = client
        self._settled = settled
        self._changed = threading.Condition()
        self._due: dict[Lease, float] = {}
        self._order: list[tuple[float, int, Lease]] = []
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, lease: Lease, ttr_s: float) -> None:
        """Hand the message back in ``ttr_s`` seconds; replaces an earlier moment."""
        with self._changed:
            self._due[lease] = due = monotonic() + ttr_s
            heapq.heappush(self._order, (due, next(self._numbers), lease))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kombu-fdb-overdue", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, lease: Lease) -> None:
        """It was settled."""
        with self._changed:
            self._due.pop(lease, None)

    def close(self) -> None:
        """Idempotent. No job is handed back any more."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (overdue := self._next()) is not None:
            self._hand_back(overdue)

    def _next(self) -> list[Lease] | None:
        """Wait until jobs are overdue; None when closed."""
        with self._changed:
            while not self._closed:
                overdue = self._pop(monotonic())
                if overdue:
                    return overdue
                self._changed.wait(self._order[0][0] - monotonic() if self._order else None)
        return None

    def _pop(self, now: float) -> list[Lease]:
        overdue = []
        while self._order and self._order[0][0] <= now:
            due, _number, lease = heapq.heappop(self._order)
            if self._due.get(lease) == due:  # else settled, or given more time
                del self._due[lease]
                overdue.append(lease)
        return overdue

    def _hand_back(self, leases: list[Lease]) -> None:
        try:
            released = self._client.engine.release(leases, details={"error": "its time to run (ttr) has passed"})
        except StoreError as error:
            logger.warning("%d overdue job(s) can't be handed back yet: %s", len(leases), error)
            for lease in leases:
                self.watch(lease, RETRY_S)
        except KombuFDBError as error:  # e.g. forked: they are not ours
            logger.debug("overdue jobs were left alone: %s", error)
        else:
            for lease in leases:
                self._settled(lease)
            logger.warning("%d job(s) were not settled within their time to run and went back", sum(released))
