"""One queue: put, take, look, limit, remove."""

from __future__ import annotations

from kombu_fdb.aio.calls import Face, stream, verb
from kombu_fdb.aio.consumer import Consumer
from kombu_fdb.aio.dead_letters import DeadLetters
from kombu_fdb.aio.job import Job
from kombu_fdb.aio.taking import take_many
from kombu_fdb.api import queue as sync

__all__ = ["Queue"]


class Queue(Face[sync.Queue]):
    """Get it from :meth:`.broker.Broker.queue`. See ``api/queue.py`` for what each verb does."""

    @property
    def name(self) -> str:
        return self._sync.name

    @property
    def dead_letters(self) -> DeadLetters:
        """What died here and is kept in ``<queue>.dead``: count, list, replay, discard."""
        return DeadLetters(self._sync.dead_letters, self._calls)

    # -- in and out ------------------------------------------------------------------------------------------------

    put = verb(sync.Queue.put)
    put_many = verb(sync.Queue.put_many)

    async def take(self, timeout: float | None = None) -> Job | None:  # noqa: ASYNC109 - as the sync verb
        """The next job; None after ``timeout`` seconds (None: wait for ever, 0: don't wait)."""
        jobs = await self.take_many(1, timeout)
        return jobs[0] if jobs else None

    async def take_many(self, limit: int, timeout: float | None = None) -> list[Job]:  # noqa: ASYNC109
        """Up to ``limit`` jobs in one transaction: those there are, and at least one unless the time is over."""
        taken = await take_many(self._calls, self._sync.connection, [self.name], limit, timeout)
        return [Job(each, self._calls) for each in taken]

    def consume(self, *, timeout: float | None = None, limit: int | None = None) -> Consumer:
        """``async for job in queue.consume()``: one job after the other, never more than one held.

        The loop ends after ``limit`` jobs, when none has come for ``timeout`` seconds (None: it waits for ever), by
        :meth:`.Consumer.stop`, and when the broker is closed.
        """
        return Consumer(self._sync.consume(timeout=timeout, limit=limit), self._calls)

    # -- looking ---------------------------------------------------------------------------------------------------

    stats = verb(sync.Queue.stats)
    count = verb(sync.Queue.count)
    keys = verb(sync.Queue.keys)
    peek = verb(sync.Queue.peek)
    page = verb(sync.Queue.page)
    each = stream(sync.Queue.each)
    at = verb(sync.Queue.at)
    find = verb(sync.Queue.find)
    consumers = verb(sync.Queue.consumers)
    snapshot = verb(sync.Queue.snapshot)
    declaration = verb(sync.Queue.declaration)

    # -- order and limits ------------------------------------------------------------------------------------------

    pause = verb(sync.Queue.pause)
    resume = verb(sync.Queue.resume)
    limit = verb(sync.Queue.limit)
    limits = verb(sync.Queue.limits)
    unlimit = verb(sync.Queue.unlimit)
    limit_every_key = verb(sync.Queue.limit_every_key)
    control = verb(sync.Queue.control)
    reset_control = verb(sync.Queue.reset_control)

    # -- moving and removing ---------------------------------------------------------------------------------------

    move = verb(sync.Queue.move)
    move_part = verb(sync.Queue.move_part)
    delete = verb(sync.Queue.delete)
    reschedule = verb(sync.Queue.reschedule)
    purge = verb(sync.Queue.purge)
    mark = verb(sync.Queue.mark)
    purge_part = verb(sync.Queue.purge_part)
    drop = verb(sync.Queue.drop)
