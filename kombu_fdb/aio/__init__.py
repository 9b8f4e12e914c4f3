"""The broker for asyncio: the same verbs as :mod:`kombu_fdb`'s, to be awaited.

::

    async with aio.Broker.open("fdb+sqlite:////var/lib/app/broker.db") as broker:
        jobs = broker.queue("jobs")
        await jobs.put("build 42", key="alice")
        async for job in jobs.consume(timeout=10):
            async with job:  # acked, or released if an exception comes out
                await build(job.payload)

Model. An async object is the *face* of one of ``kombu_fdb/api``, which says what a verb does, and holds nothing of its
own. A call runs in one of the broker's few threads, and only for as long as the store needs; a ``take`` that waits
sleeps in the event loop and is woken by the store's watches, so a thousand tasks may wait. Functions given to a verb
(``where``, ``progress``, ``stop``) are called in those threads.

A call is *queued* until a thread is free, then it *runs*, and *ends* with a result. The result has an owner: the task
that awaits it or, if that task was cancelled at any moment before it had the result, the call's ``undo``. A queued call
of a cancelled task never runs.

Cancelling, at any ``await``:

* a ``take``: what it has claimed, or is about to, goes back at once, and no attempt counts;
* a settlement (``ack``, ``release``, ``bury``, the end of ``async with``, ``close``): it is done all the same;
* another verb: it is not begun if no thread was free yet, else it runs to its end; a ``replay`` or ``discard`` ends
  between two transactions.

Nothing here belongs to an event loop: a broker may be used from one after the other. A loop that was closed leaves only
its jobs behind, which are released when they are no longer referenced. In a forked child every call raises
``ForkedError``.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from kombu_fdb.api.arguments import Declaration, Named, Stop, never, queue_names
from kombu_fdb.api.broker import FIX_OPEN
from kombu_fdb.api.broker import Broker as SyncBroker
from kombu_fdb.api.broker import Inspection as SyncInspection
from kombu_fdb.api.broker import Topology as SyncTopology
from kombu_fdb.api.broker import Transfer as SyncTransfer
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.consumer import Consumer as SyncConsumer
from kombu_fdb.api.consumer import Take, disarm
from kombu_fdb.api.dead_letters import DeadLetters as SyncDeadLetters
from kombu_fdb.api.job import Job as SyncJob
from kombu_fdb.api.queue import Queue as SyncQueue
from kombu_fdb.errors import ForkedError, InvalidArgument, StoreUnavailable
from kombu_fdb.model import Death, Peeked, Spot
from kombu_fdb.primitives.ranges import Kind
from kombu_fdb.settings.location import Location
from kombu_fdb.settings.options import Options
from kombu_fdb.store.protocol import Watch

__all__ = ["Broker", "Consumer", "DeadLetters", "Job", "Queue"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

# -- the threads in which calls run ------------------------------------------------------------------------------------


#: How many items of a walk are fetched from its thread at once.
PART = 100


class Calls:
    """A fixed number of threads, which start when they are needed. Thread-safe."""

    def __init__(self, threads: int) -> None:
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kombu-fdb-aio")
        self.ended = False

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: the threads are its parent's."""
        return os.getpid() != self._pid

    def end(self) -> None:
        """Take no more calls; those that were taken run to their ends. Never waits."""
        self.ended = True
        self._threads.shutdown(wait=False)

    async def run(self, function: Callable[[], R], *, undo: Callable[[R | None], object] | None = None) -> R:
        """What ``function`` returns. Raises what it raises.

        ``undo`` is called with its result, None if it raised, when no task waits for it any more; in any thread.
        """
        future = self.submit(function)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:  # also a coroutine's that is thrown away
            if undo is not None:
                future.add_done_callback(partial(_undo, undo))
            raise
        finally:
            del future  # it keeps an error, whose frames keep this one

    async def finish(self, function: Callable[[], R]) -> R:
        """Like :meth:`run`, but it is done even if no task waits for it any more."""
        done = asyncio.wrap_future(self.submit(function))
        done.add_done_callback(_look_at)
        try:
            return await asyncio.shield(done)
        finally:
            del done  # as above

    def submit(self, function: Callable[[], R]) -> Future[R]:
        """Raises ``ForkedError``, ``StoreUnavailable``."""
        if self.forked:
            raise ForkedError("this broker belongs to the parent process", parent=self._pid)
        if self.ended:
            raise StoreUnavailable("the broker is closed")
        return self._threads.submit(function)


def _undo(undo: Callable[[R | None], object], future: Future[R]) -> None:
    if not future.cancelled():
        undo(None if future.exception() is not None else future.result())


def _look_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the error, as asyncio would otherwise report that no task has."""
    if not done.cancelled():
        done.exception()


# -- faces -------------------------------------------------------------------------------------------------------------


class Face(Generic[S]):
    """An async object: a sync one, and the threads in which its verbs run."""

    def __init__(self, sync: S, calls: Calls) -> None:
        self._sync = sync
        self._calls = calls

    def __repr__(self) -> str:
        return f"<aio {repr(self._sync)[1:]}"


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The same, awaitable."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._calls.run(partial(method, self._sync, *args, **kwargs))

    return call


def settlement(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The same for a verb that is done even if no task waits for it any more."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._calls.finish(partial(method, self._sync, *args, **kwargs))

    return call


def stoppable(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The same for a verb with ``stop``: a cancellation stops it, too."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        left = threading.Event()
        given: Any = kwargs.get("stop", never)
        kwargs["stop"] = lambda: left.is_set() or given()
        try:
            return await self._calls.run(partial(method, self._sync, *args, **kwargs))
        finally:
            left.set()

    return call


def stream(method: Callable[Concatenate[S, P], Iterator[R]]) -> Callable[Concatenate[Any, P], AsyncIterator[R]]:
    """The same for a verb that walks, for ``async for``."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        walk = method(self._sync, *args, **kwargs)
        while part := await self._calls.run(lambda: list(islice(walk, PART))):
            for each in part:
                yield each

    return call


# -- how a job is taken ------------------------------------------------------------------------------------------------


class LoopBell:
    """A sleeper in the running event loop. Protocol: that of ``primitives/wakeup.py``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the sleeper, from any thread, also out of a signal handler."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:  # the loop was closed while it slept: let go of it, so that its take may be collected
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
) -> list[SyncJob]:
    """As :func:`kombu_fdb.api.consumer.take_many`, with a sleeper that holds no thread. Cancel it at any moment.

    What was claimed for a task that is cancelled goes back at once and uncounted, whether the claim is still under way,
    is done, or its answer is on the way to the loop: until the task has it, the call's ``undo`` is its owner.
    """
    take = Take(connection, queues, limit, timeout, in_order=in_order)

    async def run(look: Callable[[], list[SyncJob]]) -> list[SyncJob]:
        return await calls.run(look, undo=partial(_give_back, connection))

    jobs = await run(take.first)
    if not jobs and take.waits:
        bell = LoopBell()
        try:
            while not jobs and await _sleep(calls, take, bell, stopped):
                jobs = await run(take.now)
            jobs = jobs or await run(take.leave)
        finally:
            take.end()
    return jobs


def _give_back(connection: Connection, jobs: Sequence[SyncJob] | None) -> None:
    connection.let_go([each.lease for each in jobs or ()])


async def _sleep(calls: Calls, take: Take, bell: LoopBell, stopped: Stop) -> bool:
    """Until there may be a job; False when the time is over, or when it was stopped."""
    if take.left_s <= 0:
        return False
    bell.clear()
    if stopped():
        return False
    watches = await calls.run(partial(take.arm, bell.ring), undo=partial(_end, take))
    try:
        if watches is not None and not stopped():  # as in the sync API
            await bell.wait(take.shortest_s())
    finally:
        disarm(watches)
    return True


def _end(take: Take, watches: Iterable[Watch] | None) -> None:
    """It was armed in vain."""
    disarm(watches)
    take.end()


# -- a job -------------------------------------------------------------------------------------------------------------


class Job(Face[SyncJob]):
    """Get it from ``take``. Settle it once: ``async with job:``, or one of its verbs (``api/job.py``).

    A settlement that was requested is done, even if the task is cancelled while it waits for it.
    """

    @property
    def id(self) -> bytes:
        """16 bytes, as ``put`` returned them; the same in every attempt."""
        return self._sync.id

    @property
    def queue(self) -> str:
        return self._sync.queue

    @property
    def payload(self) -> bytes:
        return self._sync.payload

    @property
    def key(self) -> str:
        """Whose job it is, for fair scheduling; "" for none."""
        return self._sync.key

    @property
    def attempts(self) -> int:
        """Which attempt this is, from 1. Being released unstarted does not count."""
        return self._sync.attempts

    @property
    def deaths(self) -> tuple[Death, ...]:
        """Its history as a dead letter, the newest first."""
        return self._sync.deaths

    @property
    def ttr(self) -> float | None:
        """Seconds it may take; None for any time."""
        return self._sync.ttr

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As ``with`` of a sync job."""
        await self._calls.finish(partial(self._sync.__exit__, kind, error, traceback))

    ack = settlement(SyncJob.ack)
    release = settlement(SyncJob.release)
    bury = settlement(SyncJob.bury)
    extend = settlement(SyncJob.extend)


# -- queues ------------------------------------------------------------------------------------------------------------


class Consumer(Face[SyncConsumer]):
    """Get it from :meth:`.Queue.consume` or :meth:`.Broker.consume`. One task iterates."""

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._sync.stop()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Job:
        """The next job. Raises what ``take`` raises."""
        sync = self._sync
        if sync._ended:
            raise StopAsyncIteration
        try:
            jobs = await take_many(
                self._calls,
                sync._connection,
                sync._queues,
                1,
                sync._timeout,
                in_order=sync._in_order,
                stopped=sync._is_stopped,
            )
        except StoreUnavailable:
            if sync._connection.closed:
                raise StopAsyncIteration from None
            raise
        sync._took(jobs)
        if not jobs:
            raise StopAsyncIteration
        return Job(jobs[0], self._calls)


class DeadLetters(Face[SyncDeadLetters]):
    """Get it from :attr:`.Queue.dead_letters` or :meth:`.Broker.dead_letters`.

    See ``api/dead_letters.py``.
    """

    @property
    def dead_queue(self) -> str:
        """Where they are."""
        return self._sync.dead_queue

    count = verb(SyncDeadLetters.count)
    list = verb(SyncDeadLetters.list)
    get = verb(SyncDeadLetters.get)
    each = stream(SyncDeadLetters.each)
    replay = stoppable(SyncDeadLetters.replay)
    replay_changed = verb(SyncDeadLetters.replay_changed)
    replay_part = verb(SyncDeadLetters.replay_part)
    discard = stoppable(SyncDeadLetters.discard)
    discard_part = verb(SyncDeadLetters.discard_part)


class Queue(Face[SyncQueue]):
    """Get it from :meth:`.Broker.queue`. See ``api/queue.py`` for what each verb does."""

    @property
    def name(self) -> str:
        return self._sync.name

    @property
    def dead_letters(self) -> DeadLetters:
        """What died here and is kept in ``<queue>.dead``: count, list, replay, discard."""
        return DeadLetters(self._sync.dead_letters, self._calls)

    # -- in and out ------------------------------------------------------------------------------------------------

    put = verb(SyncQueue.put)
    put_many = verb(SyncQueue.put_many)

    async def take(self, timeout: float | None = None) -> Job | None:  # noqa: ASYNC109 - as the sync verb
        """The next job; None after ``timeout`` seconds (None: no limit, 0: don't wait)."""
        jobs = await self.take_many(1, timeout)
        return jobs[0] if jobs else None

    async def take_many(self, limit: int, timeout: float | None = None) -> list[Job]:  # noqa: ASYNC109
        """Up to ``limit`` jobs in one transaction: those there are, and at least one unless the time is over."""
        taken = await take_many(self._calls, self._sync.connection, [self.name], limit, timeout)
        return [Job(each, self._calls) for each in taken]

    def consume(self, *, timeout: float | None = None, limit: int | None = None) -> Consumer:
        """``async for job in queue.consume()``: one job after the other, never more than one held.

        The loop ends after ``limit`` jobs, when none has come for ``timeout`` seconds (None: no limit), by
        :meth:`.Consumer.stop`, and when the broker is closed.
        """
        return Consumer(self._sync.consume(timeout=timeout, limit=limit), self._calls)

    # -- looking ---------------------------------------------------------------------------------------------------

    stats = verb(SyncQueue.stats)
    count = verb(SyncQueue.count)
    keys = verb(SyncQueue.keys)
    peek = verb(SyncQueue.peek)
    page = verb(SyncQueue.page)
    each = stream(SyncQueue.each)
    at = verb(SyncQueue.at)
    find = verb(SyncQueue.find)
    consumers = verb(SyncQueue.consumers)
    snapshot = verb(SyncQueue.snapshot)
    declaration = verb(SyncQueue.declaration)

    # -- order and limits ------------------------------------------------------------------------------------------

    pause = verb(SyncQueue.pause)
    resume = verb(SyncQueue.resume)
    limit = verb(SyncQueue.limit)
    limits = verb(SyncQueue.limits)
    unlimit = verb(SyncQueue.unlimit)
    limit_every_key = verb(SyncQueue.limit_every_key)
    control = verb(SyncQueue.control)
    reset_control = verb(SyncQueue.reset_control)

    # -- moving and removing ---------------------------------------------------------------------------------------

    move = verb(SyncQueue.move)
    move_part = verb(SyncQueue.move_part)

    async def delete(self, job: Peeked | Job | Spot | bytes) -> bool:
        """Delete a job in any state, as the sync queue does. False if it is not there."""
        return await self._calls.run(partial(self._sync.delete, job._sync if isinstance(job, Job) else job))

    reschedule = verb(SyncQueue.reschedule)
    purge = verb(SyncQueue.purge)
    mark = verb(SyncQueue.mark)
    purge_part = verb(SyncQueue.purge_part)
    drop = verb(SyncQueue.drop)


# -- for its operator --------------------------------------------------------------------------------------------------


class Inspection(Face[SyncInspection]):
    """Get it from :attr:`.Broker.inspect`."""

    facts = verb(SyncInspection.facts)
    sessions = verb(SyncInspection.sessions)
    totals = verb(SyncInspection.totals)
    key_totals = verb(SyncInspection.key_totals)
    samples = verb(SyncInspection.samples)
    set_aside = verb(SyncInspection.set_aside)


class Topology(Face[SyncTopology]):
    """Get it from :attr:`.Broker.topology`."""

    exchanges = verb(SyncTopology.exchanges)
    bindings = verb(SyncTopology.bindings)
    route = verb(SyncTopology.route)
    declare_exchange = verb(SyncTopology.declare_exchange)
    delete_exchange = verb(SyncTopology.delete_exchange)
    bind = verb(SyncTopology.bind)
    unbind = verb(SyncTopology.unbind)


class Transfer(Face[SyncTransfer]):
    """Get it from :attr:`.Broker.transfer`."""

    dump = stream(SyncTransfer.dump)
    dedups = stream(SyncTransfer.dedups)
    restore = verb(SyncTransfer.restore)
    restore_dedups = verb(SyncTransfer.restore_dedups)
    restore_queue = verb(SyncTransfer.restore_queue)
    restore_control = verb(SyncTransfer.restore_control)
    restore_limits = verb(SyncTransfer.restore_limits)
    restore_binding = verb(SyncTransfer.restore_binding)
    finished = verb(SyncTransfer.finished)
    finish = verb(SyncTransfer.finish)


# -- the broker --------------------------------------------------------------------------------------------------------


#: How many threads run a broker's calls by default. A call occupies one for as long as the store needs.
THREADS = 8


def _checked(threads: int) -> int:
    Kind.whole("a whole number of at least 1", 1).check("threads", threads)
    return threads


class Broker(Face[SyncBroker]):
    """Open it with :meth:`open`, or make it of a sync broker, with which it shares what is held.

    Not for a forked child, which opens its own (``ForkedError``).
    """

    def __init__(self, broker: SyncBroker, *, threads: int = THREADS) -> None:
        if not isinstance(broker, SyncBroker):
            raise InvalidArgument("a broker is not made of this", given=type(broker).__name__, fix=FIX_OPEN)
        super().__init__(broker, Calls(_checked(threads)))

    @classmethod
    def open(cls, url: str, *, threads: int = THREADS, **options: Any) -> Opening:
        """``async with Broker.open(url) as broker:``, or ``broker = await Broker.open(url)``.

        ``url`` and ``options`` as of the sync broker; ``threads``: in which its calls run. Raises ``OptionError``, or
        within ``connect_timeout`` seconds ``StoreUnavailable`` or ``FormatError``; ``InvalidArgument`` for ``threads``.
        """
        return Opening(lambda: SyncBroker.open(url, **options), _checked(threads))

    async def close(self) -> None:
        """Release what was taken here and not settled, at once and uncounted; end every waiting ``take``.

        Idempotent.
        """
        if self._calls.ended or self._calls.forked:
            return
        try:
            await self._calls.finish(self._sync.close)
        finally:
            self._calls.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def location(self) -> Location:
        """Where it is; as a text, without its secrets."""
        return self._sync.location

    @property
    def options(self) -> Options:
        return self._sync.options

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """A queue by name. Asks the store for nothing; a queue needs no declaration to be used."""
        return Queue(self._sync.queue(name), self._calls)

    async def declare(self, name: str, **declaration: Unpack[Declaration]) -> Queue:
        """Create a queue, or change its ``arguments``. As of the sync broker."""
        return Queue(await self._calls.run(partial(self._sync.declare, name, **declaration)), self._calls)

    def dead_letters(self, dead_queue: str) -> DeadLetters:
        """Those in a queue that a dead-letter exchange leads to, or in any ``<queue>.dead``."""
        return DeadLetters(self._sync.dead_letters(dead_queue), self._calls)

    queues = verb(SyncBroker.queues)
    find = verb(SyncBroker.find)
    spots = verb(SyncBroker.spots)
    cancel = verb(SyncBroker.cancel)

    # -- for its operator --------------------------------------------------------------------------------

    @property
    def inspect(self) -> Inspection:
        """Facts, counters and sessions: what dashboards and metrics show."""
        return Inspection(self._sync.inspect, self._calls)

    @property
    def topology(self) -> Topology:
        """Exchanges and bindings."""
        return Topology(self._sync.topology, self._calls)

    @property
    def transfer(self) -> Transfer:
        """Everything out of this broker, and into it."""
        return Transfer(self._sync.transfer, self._calls)

    @property
    def migration(self) -> Transfer:
        """The name that :attr:`transfer` had in 0.2.0; it goes with 0.4."""
        warnings.warn("Broker.migration is called Broker.transfer", DeprecationWarning, stacklevel=2)
        return self.transfer

    # -- taking ----------------------------------------------------------------------------------------------------

    async def take(
        self,
        queues: Iterable[Named | str],
        timeout: float | None = None,  # noqa: ASYNC109 - as the sync verb
        *,
        in_order: bool = False,
    ) -> Job | None:
        """The next job of several queues; None after ``timeout`` seconds (None: no limit, 0: don't wait)."""
        jobs = await self.take_many(queues, 1, timeout, in_order=in_order)
        return jobs[0] if jobs else None

    async def take_many(
        self,
        queues: Iterable[Named | str],
        limit: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as the sync verb
        *,
        in_order: bool = False,
    ) -> list[Job]:
        """Up to ``limit`` jobs in one transaction, at least one unless ``timeout`` seconds have passed."""
        names = queue_names(queues)
        taken = await take_many(self._calls, self._sync.connection, names, limit, timeout, in_order=in_order)
        return [Job(each, self._calls) for each in taken]

    def consume(
        self,
        queues: Iterable[Named | str],
        *,
        timeout: float | None = None,
        limit: int | None = None,
        in_order: bool = False,
    ) -> Consumer:
        """``async for job in broker.consume([...])``: as :meth:`.Queue.consume`, of several queues."""
        return Consumer(self._sync.consume(queues, timeout=timeout, limit=limit, in_order=in_order), self._calls)


class Opening:
    """A broker that is about to be open: await it, or enter it."""

    def __init__(self, open_: Callable[[], SyncBroker], threads: int) -> None:
        self._open = open_
        self._threads = threads
        self._broker: Broker | None = None

    def __await__(self) -> Generator[Any, None, Broker]:
        return self._opened().__await__()

    async def _opened(self) -> Broker:
        """Open the broker; if this is cancelled, nothing stays open."""
        calls = Calls(1)
        try:
            broker = await calls.run(self._open, undo=_close)
        finally:
            calls.end()
        return Broker(broker, threads=self._threads)

    async def __aenter__(self) -> Broker:
        self._broker = await self._opened()
        return self._broker

    async def __aexit__(self, *_: object) -> None:
        if self._broker is not None:
            await self._broker.close()


def _close(broker: SyncBroker | None) -> None:
    """It was opened in vain. May run in the event loop's thread, which must not wait for it."""
    if broker is not None:
        threading.Thread(target=broker.close, name="kombu-fdb-aio-close").start()
