"""How a job is taken in an event loop: as ``api/taking.py`` has it, with a sleeper who holds no thread.

What was claimed for a task that is cancelled goes back at once and uncounted, whether the claim is still under way, is
done, or its answer is on the way to the loop: until the task has it, the call's ``undo`` is its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from kombu_fdb.aio.calls import Calls
from kombu_fdb.api.arguments import Stop, never
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.job import Job
from kombu_fdb.api.taking import Look, Wait, check_take, leave_line, take_first, take_now
from kombu_fdb.store.protocol import Watch


class LoopBell:
    """A sleeper in the running event loop. Protocol: that of ``primitives/wakeup.py``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake him, from any thread, also out of a signal handler."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:  # the loop was closed while he slept: let go of him, that his wait may be collected
            self._rung = asyncio.Event()

    def clear(self) -> None:
        self._rung.clear()

    async def wait(self, timeout_s: float) -> None:
        """Sleep until rung, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()


async def take_many(
    calls: Calls,
    connection: Connection,
    queues: Sequence[str],
    limit: int,
    timeout: float | None,  # noqa: ASYNC109 - as the sync verb; asyncio.timeout() does as well
    *,
    in_order: bool = False,
    stopped: Stop = never,
) -> list[Job]:
    """As :func:`kombu_fdb.api.taking.take_many`. Cancel it at any moment."""
    timeout = check_take(queues, limit, timeout)
    look = Look(connection, queues, limit, connection.now_s() + timeout, in_order)

    async def run(take: Callable[[], list[Job]]) -> list[Job]:
        return await calls.run(take, undo=partial(_give_back, connection))

    if timeout == 0:
        return await run(partial(take_now, look))
    jobs = await run(partial(take_first, look))
    if not jobs:
        with Wait(look, LoopBell()) as wait:
            while not jobs and await _sleep(calls, wait, stopped):
                jobs = await run(partial(take_now, look, wait.combiner))
            jobs = jobs or await run(partial(leave_line, look, wait.combiner))
    return jobs


def _give_back(connection: Connection, jobs: Sequence[Job] | None) -> None:
    connection.let_go([each.lease for each in jobs or ()])


async def _sleep(calls: Calls, wait: Wait[LoopBell], stopped: Stop) -> bool:
    """Until there may be a job; False when the time is over, or when it was stopped."""
    if wait.is_over:
        return False
    wait.sleeper.clear()
    if stopped():
        return False
    watches = await calls.run(wait.arm, undo=partial(_end, wait))
    try:
        if watches is not None:
            await wait.sleeper.wait(wait.shortest_s())
    finally:
        wait.disarm(watches)
    return True


def _end(wait: Wait[LoopBell], watches: Iterable[Watch] | None) -> None:
    """It was armed in vain."""
    wait.disarm(watches)
    wait.end()
