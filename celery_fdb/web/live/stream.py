"""``/events``: the feed as server-sent events, for users who may see the pages."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from celery.states import FAILURE
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from celery_fdb.brokers.holding import Holding
from celery_fdb.history.views.opening import history_of
from celery_fdb.inspection.overview import look
from celery_fdb.web.live.feed import Feed, event
from celery_fdb.web.live.vitals import Runs, Vitals
from celery_fdb.web.serving.reception import Reception
from celery_fdb.web.serving.threads import Busy, Threads
from celery_fdb.web.settings import Settings
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError

#: Of one stream, whether it is read or not; then the browser asks again, and is let in only if it still may.
LONGEST_S = 900.0
#: For its end, which one that is not read has no room for.
END_S = 1.0
#: Milliseconds after which a browser asks again.
AGAIN_MS = 3_000


class Stream:
    """One feed for each event loop; a server has one loop."""

    def __init__(self, settings: Settings, reception: Reception, holding: Holding, threads: Threads) -> None:
        self._settings = settings
        self._reception = reception
        self._holding = holding
        self._threads = threads
        self._feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Feed, Vitals]] = WeakKeyDictionary()

    async def __call__(self, request: Request) -> Response:
        _, refusal = await self._reception.visit(request)
        if refusal is not None:
            return PlainTextResponse("log in first\n", 401)
        if request.method == "HEAD":
            return PlainTextResponse("", media_type="text/event-stream")
        feed, vitals = self.feed()
        return _Live(feed, f"retry: {AGAIN_MS}\n" + event("welcome", {"points": vitals.points()}))

    def feed(self) -> tuple[Feed, Vitals]:
        """Of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._feeds.get(loop)
        if found is None:
            vitals = Vitals()
            made = Feed(partial(self._look, vitals), self._settings.interval_s, self._settings.most_streams)
            found = self._feeds[loop] = made, vitals
        return found

    async def _look(self, vitals: Vitals) -> dict[str, Any]:
        """Raises ``KombuFDBError``."""
        try:
            return await self._threads.run(lambda: _told(vitals, self._holding.broker()))
        except Busy:
            raise
        except KombuFDBError:
            self._holding.forget()
            raise


class _Live(StreamingResponse):
    """Of one client, if there is room when its answer begins; its place is free again when it has gone."""

    def __init__(self, feed: Feed, welcome: str) -> None:
        headers = {"x-accel-buffering": "no"}
        self._feed, self._events = feed, feed.events(welcome)
        super().__init__(self._events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.place() as is_free:
            if not is_free:
                await _full(scope, receive, send)
                return
            async with aclosing(self._events):
                try:
                    async with asyncio.timeout(LONGEST_S):
                        await super().__call__(scope, receive, send)
                except TimeoutError:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(END_S):
                            await send({"type": "http.response.body", "body": b"", "more_body": False})


_full = PlainTextResponse("too many pages are open\n", 503, {"retry-after": "60"})


class Poll:
    """The same for pages that ask again and again, where no answer can stream: one look for all of a process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._vitals = Vitals()
        self._told: dict[str, Any] = {}
        self._until: float | None = None

    def __call__(self, visit: Visit, broker: Broker) -> Response:
        clock, interval_s = visit.settings.clock, visit.settings.interval_s
        is_fresh = self._until is not None and clock.monotonic() < self._until
        # While one page looks, the others show what was seen last: a store that hangs holds one thread.
        if not is_fresh and self._lock.acquire(blocking=not self._told):
            try:
                self._told = _told(self._vitals, broker)
                self._until = clock.monotonic() + interval_s / 2
            finally:
                self._lock.release()
        return JSONResponse({"points": self._vitals.points(), "look": self._told})


def _told(vitals: Vitals, broker: Broker) -> dict[str, Any]:
    history = history_of(broker)
    runs = None
    if history.settings() is not None:
        counted = history.totals().values()
        runs = Runs(sum(each.runs for each in counted), sum(each.of(FAILURE) for each in counted))
    return vitals.told(look(broker), runs)
