"""One look at the broker for all pages that are open.

Model. The first client that subscribes starts the watch, which looks every ``interval_s`` seconds, or less often if a
look takes long, so that it keeps the store busy for a fifth of the time at most; the last one to go ends it. Each
client has room for one event: one that is too slow misses events and gets the newest. If the store is away, clients are
told so, the watch goes on, and they are told when it is back. There are ``most`` clients at a time: each holds a place
from before its answer begins, as many may come before the first of them is sent anything.

A feed belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu_fdb.errors import KombuFDBError

logger = logging.getLogger(__name__)

#: Seconds without an event after which a comment shows that the stream lives.
QUIET_S = 15.0
#: A look is followed by a pause of at least so many times its own length.
IDLE_SHARE = 4


class Feed:
    """See the module."""

    def __init__(
        self,
        look: Callable[[], Awaitable[dict[str, Any]]],
        interval_s: float,
        most: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._look = look
        self._interval_s = interval_s
        self._most = most
        self._pause = pause
        self._places = 0
        self._inboxes: set[asyncio.Queue[str]] = set()
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def place(self) -> Iterator[bool]:
        """Whether there is room for one more client, which holds its place until it goes."""
        if self._places >= self._most:
            yield False
            return
        self._places += 1
        try:
            yield True
        finally:
            self._places -= 1

    @property
    def is_watching(self) -> bool:
        return self._watch is not None

    async def events(self, welcome: str = "") -> AsyncGenerator[str]:
        """What a client is sent, until it goes. ``welcome``: before anything else."""
        inbox: asyncio.Queue[str] = asyncio.Queue(1)
        self._inboxes.add(inbox)
        if self._watch is None:
            self._watch = asyncio.create_task(self._run())
        try:
            yield welcome or ": welcome\n\n"
            while True:
                yield await _next(inbox)
        finally:
            self._inboxes.discard(inbox)
            self._rest()

    def _rest(self) -> None:
        if not self._inboxes and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            text = await self._told()
            for inbox in self._inboxes:
                if inbox.full():
                    inbox.get_nowait()
                inbox.put_nowait(text)
            await self._pause(max(self._interval_s, IDLE_SHARE * (clock() - began)))

    async def _told(self) -> str:
        try:
            return event("look", await self._look())
        except KombuFDBError as error:
            return event("away", {"text": str(error)})
        except Exception as error:  # whatever the store holds, the watch goes on
            logger.exception("the broker can't be looked at")
            return event("away", {"text": f"what is stored can't be read: {type(error).__name__}"})


async def _next(inbox: asyncio.Queue[str]) -> str:
    try:
        return await asyncio.wait_for(inbox.get(), QUIET_S)
    except TimeoutError:
        return ": quiet\n\n"


def event(name: str, document: Any) -> str:
    """As a browser's ``EventSource`` reads it. JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(document)}\n\n"
