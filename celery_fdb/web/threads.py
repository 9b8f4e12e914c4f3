"""Calls of the broker block, and the event loop must not: they run in a few threads, each answer within a time limit.

A call whose time is over goes on in its thread, at most until the broker's own timeouts end it; so a store that hangs
costs these threads and no more, and a visitor who asks meanwhile is told so in time. A call that has not begun by then
is dropped: it says nothing of the store, only that there are too many.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kombu_fdb.errors import KombuFDBError, StoreUnavailable

T = TypeVar("T")


class Busy(KombuFDBError):
    """The call has not begun."""

    text = "nothing was done, as all threads are busy: too many pages are asked for at once, or the store hangs. Reload"


class Threads:
    """The threads of one dashboard, in whatever event loops it answers."""

    def __init__(self, number: int, timeout_s: float) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def _pool(self) -> ThreadPoolExecutor:
        """Of this process: threads do not go along with a fork, while their pool believes they did."""
        found = self._pools.get(os.getpid())
        if found is None:
            made = ThreadPoolExecutor(self._number, thread_name_prefix="celery-fdb-web")
            found = self._pools.setdefault(os.getpid(), made)
        return found

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises; ``StoreUnavailable`` if the time is over, ``Busy`` if it never began."""
        begun = self._pool().submit(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            if begun.cancelled():
                raise Busy from None
            raise StoreUnavailable(
                "the store did not answer in time",
                timeout_s=self._timeout_s,
                fix="Look at the store and at its load; what was asked for may still be going on.",
            ) from error

    def close(self) -> None:
        """Calls that have not begun are dropped; the others end by themselves."""
        self._pool().shutdown(wait=False, cancel_futures=True)
