"""Both faces of the API as one: ``kombu_fdb``'s as it is, and ``kombu_fdb.aio``'s driven from outside of its loop.

A driven object looks like its sync sibling: its verbs return what the awaited ones do, ``with`` is ``async with``,
``for`` is ``async for``.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Self

from kombu_fdb import aio
from kombu_fdb.aio import Face

#: After this time a call is stuck.
DEADLINE_S = 60.0


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="face", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


class Driven:
    """An async object as a sync one."""

    def __init__(self, inner: Any, loop: Loop) -> None:
        self._inner = inner
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return self._drive(found)
        return lambda *args, **kwargs: self._drive(found(*map(_inner, args), **kwargs))

    def _drive(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            return self._drive(self._loop.run(value))
        if inspect.isasyncgen(value):
            return self._walk(value)
        if isinstance(value, list):
            return [self._drive(each) for each in value]
        return Driven(value, self._loop) if isinstance(value, (Face, aio.Consumer)) else value

    def _walk(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._loop.run(_next(items))
            except StopAsyncIteration:
                return

    def __enter__(self) -> Self:
        self._loop.run(self._inner.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._inner.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._drive(_next(self._inner))
        except StopAsyncIteration:
            raise StopIteration from None


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items)


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(each) for each in value]
    return value._inner if isinstance(value, Driven) else value
