"""Calls of the broker block, and the event loop must not: they run in a few threads, each answer within a time limit.

A call whose time is over goes on in its thread, at most until the broker's own timeouts end it; so a store that hangs
costs these threads and no more, and whoever asks meanwhile is told so in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kombu_fdb.errors import StoreUnavailable

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """The threads of one dashboard, in whatever event loops it answers."""

    def __init__(self, number: int, timeout_s: float) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix="celery-fdb-web")
        self._timeout_s = timeout_s

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises; ``StoreUnavailable`` if the time is over."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(self._pool.submit(call))
        except TimeoutError as error:
            raise StoreUnavailable(
                "the store did not answer in time",
                timeout_s=self._timeout_s,
                fix="Look at the store and at its load; what was asked for may still be going on.",
            ) from error

    def close(self) -> None:
        """Calls that have not begun are dropped; the others end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
