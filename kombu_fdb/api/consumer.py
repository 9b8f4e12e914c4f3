"""A loop over jobs: ``for job in queue.consume()``.

::

    jobs = broker.queue("jobs").consume()
    signal.signal(signal.SIGTERM, lambda *_: jobs.stop())
    for job in jobs:
        with job:
            work(job.payload)

Model. A consumer takes one job when it is asked for one, and holds none itself: what the loop has is all that is held,
and a loop that is left holds nothing. It waits as ``take`` does, and *ends* when ``limit`` jobs were taken, when none
has come for ``timeout`` seconds, when :meth:`Consumer.stop` was called, or with its broker. Any other error is raised
from the loop, and the same consumer may be asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.api.connection import Connection
from kombu_fdb.api.job import Job
from kombu_fdb.api.taking import check_take, take_many
from kombu_fdb.errors import StoreUnavailable

__all__ = ["Consumer", "Takings"]


class Takings:
    """What a loop takes, how much of it is left, and whether it has ended. Its verbs never wait."""

    def __init__(
        self,
        connection: Connection,
        queues: Sequence[str],
        *,
        timeout: float | None,
        limit: int | None,
        in_order: bool = False,
    ) -> None:
        """Raises ``InvalidArgument``."""
        check_take(queues, 1 if limit is None else limit, timeout)
        self.connection = connection
        self.queues = queues
        self.timeout = timeout
        self.in_order = in_order
        self._left = limit
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self.connection.wake()

    def stopped(self) -> bool:
        return self._stopped

    @property
    def ended(self) -> bool:
        return self._stopped or self._left == 0 or self.connection.closed

    def took(self, jobs: Sequence[Job]) -> None:
        """None: its time is over."""
        if not jobs:
            self._stopped = True
        elif self._left is not None:
            self._left -= len(jobs)


class Consumer:
    """Get it from :meth:`.queue.Queue.consume` or :meth:`.broker.Broker.consume`. One thread iterates."""

    def __init__(self, takings: Takings) -> None:
        self._takings = takings

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._takings.stop()

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Job:
        """Raises as ``take``."""
        takings = self._takings
        if takings.ended:
            raise StopIteration
        try:
            jobs = _take(takings)
        except StoreUnavailable:
            if takings.connection.closed:
                raise StopIteration from None
            raise
        takings.took(jobs)
        if not jobs:
            raise StopIteration
        return jobs[0]


def _take(of: Takings) -> list[Job]:
    return take_many(of.connection, of.queues, 1, of.timeout, in_order=of.in_order, stopped=of.stopped)
