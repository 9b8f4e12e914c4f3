"""An open broker in an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from kombu_fdb.aio.administration import Inspection, Migration, Topology
from kombu_fdb.aio.calls import Calls, Face, verb
from kombu_fdb.aio.consumer import Consumer
from kombu_fdb.aio.dead_letters import DeadLetters
from kombu_fdb.aio.job import Job
from kombu_fdb.aio.queue import Queue
from kombu_fdb.aio.taking import take_many
from kombu_fdb.api import broker as sync
from kombu_fdb.api.arguments import Declaration, Named, names_of
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.settings.location import Location
from kombu_fdb.settings.options import Options

__all__ = ["THREADS", "Broker", "Opening"]

#: In which a broker's calls run, unless told otherwise. A call takes one for as long as the store needs.
THREADS = 8


class Broker(Face[sync.Broker]):
    """Open it with :meth:`open`, or make it of a sync broker, with which it shares what is held.

    Not for a forked child, which opens its own (``ForkedError``).
    """

    def __init__(self, broker: sync.Broker, *, threads: int = THREADS) -> None:
        if not isinstance(broker, sync.Broker):
            raise InvalidArgument("a broker is not made of this", given=type(broker).__name__, fix=sync.FIX_OPEN)
        super().__init__(broker, Calls(threads))

    @classmethod
    def open(cls, url: str, *, threads: int = THREADS, **options: Any) -> Opening:
        """``async with Broker.open(url) as broker:``, or ``broker = await Broker.open(url)``.

        ``url`` and ``options`` as of the sync broker; ``threads``: in which its calls run. Raises ``OptionError``, or
        within ``connect_timeout`` seconds ``StoreUnavailable`` or ``FormatError``.
        """
        return Opening(lambda: sync.Broker.open(url, **options), threads)

    async def close(self) -> None:
        """Hand back what was taken here and not settled, at once and uncounted; end every waiting ``take``.

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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

    queues = verb(sync.Broker.queues)
    find = verb(sync.Broker.find)
    spots = verb(sync.Broker.spots)
    cancel = verb(sync.Broker.cancel)

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
    def migration(self) -> Migration:
        """Everything out of this broker, and into it."""
        return Migration(self._sync.migration, self._calls)

    # -- taking ----------------------------------------------------------------------------------------------------

    async def take(
        self,
        queues: Iterable[Named | str],
        timeout: float | None = None,  # noqa: ASYNC109 - as the sync verb
        *,
        in_order: bool = False,
    ) -> Job | None:
        """The next job of several queues; None after ``timeout`` seconds (None: for ever, 0: don't wait)."""
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
        names = names_of(queues)
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
        """``async for job in broker.consume([...])``: as :meth:`.queue.Queue.consume`, of several queues."""
        return Consumer(self._sync.consume(queues, timeout=timeout, limit=limit, in_order=in_order), self._calls)


class Opening:
    """A broker that is about to be open: await it, or enter it."""

    def __init__(self, open_: Callable[[], sync.Broker], threads: int) -> None:
        self._open = open_
        self._threads = threads
        self._broker: Broker | None = None

    def __await__(self) -> Generator[Any, None, Broker]:
        return self._opened().__await__()

    async def _opened(self) -> Broker:
        """Cancelled, it leaves nothing open."""
        calls = Calls(1)
        try:
            broker = await calls.run(self._open, undo=_close)
        finally:
            calls.end()
        return Broker(broker, threads=self._threads)

    async def __aenter__(self) -> Broker:
        self._broker = await self._opened()
        return self._broker

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._broker is not None:
            await self._broker.close()


def _close(broker: sync.Broker | None) -> None:
    """It was opened in vain. May run in the event loop's thread, which must not wait for it."""
    if broker is not None:
        threading.Thread(target=broker.close, name="kombu-fdb-aio-close").start()
