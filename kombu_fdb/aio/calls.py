"""The threads in which a broker's calls run, and how a sync verb becomes one to be awaited.

Model. A call is *queued* until a thread is free, then it *runs*, and *ends* with a result, which has an
owner: the task that awaits it, or, if that was cancelled at any moment before it had it, the call's ``undo``. A queued
call of a cancelled task never runs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kombu_fdb.api.arguments import never
from kombu_fdb.errors import ForkedError, StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

#: Of a walk, brought from its thread at once.
PART = 100


class Calls:
    """So many threads, which begin when they are needed. Thread-safe."""

    def __init__(self, threads: int) -> None:
        """Raises ``ValueError`` unless there is one at least."""
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kombu-fdb-aio")
        self.ended = False

    @property
    def forked(self) -> bool:
        """This is a child of the process whose threads they are."""
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
        """As :meth:`run`, but it is done also if no task waits for it any more."""
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
    """Or asyncio would complain of an error that no task has retrieved."""
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
    """The same of one that is done also if no task waits for it any more."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._calls.finish(partial(method, self._sync, *args, **kwargs))

    return call


def stoppable(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The same of a verb with ``stop``, which a cancellation stops, too."""

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
    """The same of a verb that walks: for ``async for``."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        walk = method(self._sync, *args, **kwargs)
        while part := await self._calls.run(lambda: list(islice(walk, PART))):
            for each in part:
                yield each

    return call
