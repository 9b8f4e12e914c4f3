"""A loop over jobs: ``async for job in queue.consume()``. Model: ``api/consumer.py``."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.aio.calls import Calls
from kombu_fdb.aio.job import Job
from kombu_fdb.aio.taking import take_many
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.consumer import Takings
from kombu_fdb.api.taking import check_take
from kombu_fdb.errors import StoreUnavailable

__all__ = ["Consumer"]


class Consumer:
    """Get it from :meth:`.queue.Queue.consume` or :meth:`.broker.Broker.consume`. One task iterates."""

    def __init__(
        self,
        calls: Calls,
        connection: Connection,
        queues: Sequence[str],
        *,
        timeout: float | None = None,
        limit: int | None = None,
        in_order: bool = False,
    ) -> None:
        """Raises ``InvalidArgument``."""
        check_take(queues, 1, timeout)
        self._calls = calls
        self._queues = queues
        self._timeout = timeout
        self._in_order = in_order
        self._takings = Takings(connection, limit)

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._takings.stop()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Job:
        """Raises as ``take``."""
        takings = self._takings
        if takings.ended:
            raise StopAsyncIteration
        try:
            jobs = await take_many(
                self._calls,
                takings.connection,
                self._queues,
                1,
                self._timeout,
                in_order=self._in_order,
                stopped=takings.stopped,
            )
        except StoreUnavailable:
            if takings.connection.closed:
                raise StopAsyncIteration from None
            raise
        takings.took(jobs)
        if not jobs:
            raise StopAsyncIteration
        return Job(jobs[0], self._calls)
