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
    """How many jobs a consumer may still take, and whether it has ended. Its verbs never wait."""

    def __init__(self, connection: Connection, limit: int | None) -> None:
        check_take("x", 1 if limit is None else limit)
        self.connection = connection
        self._left = limit
        self._stopped = False

    def stop(self) -> None:
        """End it. From any thread, also out of a signal handler; idempotent."""
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

    def __init__(
        self,
        connection: Connection,
        queues: Sequence[str],
        *,
        timeout: float | None = None,
        limit: int | None = None,
        in_order: bool = False,
    ) -> None:
        """Raises ``InvalidArgument``."""
        check_take(queues, 1, timeout)
        self._queues = queues
        self._timeout = timeout
        self._in_order = in_order
        self._takings = Takings(connection, limit)

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._takings.stop()

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Job:
        """Raises as ``take``."""
        if self._takings.ended:
            raise StopIteration
        try:
            jobs = self._take()
        except StoreUnavailable:
            if self._takings.connection.closed:
                raise StopIteration from None
            raise
        self._takings.took(jobs)
        if not jobs:
            raise StopIteration
        return jobs[0]

    def _take(self) -> list[Job]:
        return take_many(
            self._takings.connection,
            self._queues,
            1,
            self._timeout,
            in_order=self._in_order,
            stopped=self._takings.stopped,
        )
