"""A loop over jobs: ``async for job in queue.consume()``. Model: ``api/consumer.py``."""

from __future__ import annotations

from kombu_fdb.aio.calls import Calls, Face
from kombu_fdb.aio.job import Job
from kombu_fdb.aio.taking import take_many
from kombu_fdb.api import consumer, job
from kombu_fdb.errors import StoreUnavailable

__all__ = ["Consumer"]


class Consumer(Face[consumer.Consumer]):
    """Get it from :meth:`.queue.Queue.consume` or :meth:`.broker.Broker.consume`. One task iterates."""

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._sync.stop()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Job:
        """Raises as ``take``."""
        takings = self._sync._takings
        if takings.ended:
            raise StopAsyncIteration
        try:
            jobs = await _take(self._calls, takings)
        except StoreUnavailable:
            if takings.connection.closed:
                raise StopAsyncIteration from None
            raise
        takings.took(jobs)
        if not jobs:
            raise StopAsyncIteration
        return Job(jobs[0], self._calls)


async def _take(calls: Calls, of: consumer.Takings) -> list[job.Job]:
    return await take_many(calls, of.connection, of.queues, 1, of.timeout, in_order=of.in_order, stopped=of.stopped)
