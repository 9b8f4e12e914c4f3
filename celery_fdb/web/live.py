"""Live pages: the numbers of the overview, and the stream that sends them as they change.

The numbers are current: the broker is looked at every few seconds, once for all open pages, which get the result as
server-sent events. They cover the application's queues, not those that Celery makes for itself.

Model. The first client that subscribes starts the watch, which looks every ``interval_s`` seconds, or less often if a
look takes long, so that it keeps the store busy for a fifth of the time at most; the last one to go ends it. Each
client has room for one event: one that is too slow misses events and gets the newest. While the store is away, the
watch goes on; clients hear that it is away, and that it is back. There are ``most`` clients at a time: each holds a
place from before its answer begins, because many may connect before the first of them is sent anything.

A feed belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from celery_fdb import brokers
from celery_fdb.history.views.runs import history_of
from celery_fdb.inspection.overview import COUNTED, Overview, QueueView, look
from celery_fdb.web.authentication import Authentication
from celery_fdb.web.page import AWAY, ThreadPool
from celery_fdb.web.settings import DashboardSettings
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.primitives.masking import plain
from kombu_fdb.primitives.plural import plural

# -- numbers -----------------------------------------------------------------------------------------------------------


#: The most queues of one event; the others are on their pages.
MOST_QUEUES = 500
#: Rates are averages over so many milliseconds, so that they don't flicker.
WINDOW_MS = 10_000


#: How many runs have ended since the history began, and how many of them failed.
Runs = tuple[int, int]


class LiveStats:
    """Turns looks into events, with rates. Thread-safe: a look that came too late may overlap with the next one."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: The looks of the last :data:`WINDOW_MS`: each holds every queue.
        self._looks: list[tuple[Overview, Runs | None]] = []

    def look_at(self, broker: Broker) -> dict[str, Any]:
        """Look once, and tell. Raises ``KombuFDBError``."""
        history = history_of(broker)
        runs = None
        if history.settings() is not None:
            counted = history.totals().values()
            runs = sum(each.runs for each in counted), sum(each.failed for each in counted)
        return self.told(look(broker), runs)

    def told(self, look: Overview, runs: Runs | None = None) -> dict[str, Any]:
        """The event for all open pages, ready for JSON. ``runs``: None without a history."""
        with self._lock:
            recent = [each for each in self._looks if 0 <= look.taken_ms - each[0].taken_ms <= WINDOW_MS]
            self._looks = [*recent, (look, runs)]
            before, runs_before = self._looks[0]
        speeds = look.rates(before)
        live = look.own_queues
        summary = _summary(look, live, speeds)
        if runs is not None and runs_before is not None:
            ended, failed = (now - was for now, was in zip(runs, runs_before, strict=True))
            summary["failures"] = failed / ended if ended > 0 else None
        others = [each for each in look.queues if each.is_internal or each.dead_of is not None]
        told = [*live, *others][:MOST_QUEUES]
        queues = {each.name: {**counts_of(each), **_speeds(speeds, each.name)} for each in told}
        return {
            "at": look.taken_ms,
            "summary": summary,
            "queues": queues,
            "alerts": _alerts(look),
        }


def counts_of(view: QueueView) -> dict[str, Any]:
    facts = {"oldest": view.oldest_age_s, "paused": view.paused, "consumers": view.consumers}
    return {**{state: getattr(view, state) for state in COUNTED}, **facts}


def _speeds(speeds: dict[str, dict[str, float]], queue: str) -> dict[str, float | None]:
    found = speeds.get(queue)
    return {event: None if found is None else found.get(event, 0.0) for event in ("published", "acked")}


def _summary(look: Overview, live: list[QueueView], speeds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The totals of the overview. ``wait``: seconds that a message published now would wait (Little's law).

    ``failures``: the share of ended messages that became dead letters; with a history, the share of failed runs.
    """
    names = {each.name for each in live}
    totals: dict[str, float | None] = {
        event: sum(found.get(event, 0.0) for name, found in speeds.items() if name in names) if speeds else None
        for event in ("published", "claimed", "acked", "dead")
    }
    claimed, dead, acked = totals["claimed"], totals["dead"], totals["acked"]
    ready = look.total("ready")
    ended = None if dead is None or acked is None else dead + acked
    return {
        **{state: look.total(state) for state in COUNTED},
        **{f"{event}_rate" if event == "dead" else event: value for event, value in totals.items()},
        "oldest": max((each.oldest_age_s for each in live if each.oldest_age_s is not None), default=None),
        "wait": None if not claimed else ready / claimed,
        "failures": None if not ended or dead is None else dead / ended,
        "sessions": sum(each.open for each in look.sessions),
    }


# -- attention ---------------------------------------------------------------------------------------------------------


#: How many alerts are shown, the worst first.
MOST_ALERTS = 12
#: Seconds after which the oldest message of a queue with consumers is an alert.
LATE_S = 300.0


def _alerts(seen: Overview) -> list[dict[str, Any]]:
    """What a person on call would want to know, the worst first. ``queue``: where to act; None for sessions."""
    found: list[tuple[str, str | None]] = [(text, None) for text in _of_sessions(seen)]
    for each in seen.own_queues:
        found += [(text, each.name) for text in _of_queue(each)]
    return [{"text": plain(text), "queue": queue} for text, queue in found[:MOST_ALERTS]]


def _of_sessions(seen: Overview) -> Iterator[str]:
    if seen.own_queues and not any(each.consumers for each in seen.live_queues):
        yield "no worker consumes any queue"
    quiet = [each for each in seen.sessions if each.state(seen.heard_s(each)) == "silent"]
    if quiet:
        yield f"{plural(len(quiet), 'session')} without a heartbeat: {quiet[0].host} {quiet[0].pid}"
    if seen.asides:
        yield f"background work keeps failing in {plural(len(seen.asides), 'place')}: run fdb doctor"


def _of_queue(each: QueueView) -> Iterator[str]:
    if each.dead:
        yield f"{plural(each.dead, 'dead letter')} of {each.name}"
    if each.paused and each.ready:
        yield f"{each.name} is paused with {plural(each.ready, 'message')}"
    elif each.ready and not each.consumers:
        yield f"{each.name} has no consumers, and {each.ready:,} wait there"
    elif each.oldest_age_s is not None and each.oldest_age_s > LATE_S:
        yield f"the oldest message of {each.name} waits for {each.oldest_age_s / 60:,.0f} min"


# -- the feed ----------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: Seconds without an event after which a comment shows that the stream lives.
QUIET_S = 15.0
#: A pause after a look is this many times as long as the look, or longer.
IDLE_SHARE = 4


class Feed:
    """One look for all clients of one event loop; see the module."""

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
        """Take a place for one more client while the block runs. Gives False if there is none."""
        if self._places >= self._most:
            yield False
            return
        self._places += 1
        try:
            yield True
        finally:
            self._places -= 1

    async def events(self, welcome: str = "") -> AsyncGenerator[str]:
        """The events for one client, until it disconnects. ``welcome``: sent before anything else."""
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
    """An event as a browser's ``EventSource`` reads it. JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(document)}\n\n"


# -- the stream --------------------------------------------------------------------------------------------------------


#: The longest stream, read or not, in seconds. Then the browser asks again, and its login is checked again.
LONGEST_S = 900.0
#: Seconds to send a stream's end, for which the buffer of an unread stream has no room.
END_S = 1.0
#: Milliseconds after which a browser asks again.
AGAIN_MS = 3_000


def streaming(
    settings: DashboardSettings, authentication: Authentication, lazy_broker: brokers.LazyBroker, threads: ThreadPool
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of the stream, with one feed for each event loop; a server has one loop."""
    feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = WeakKeyDictionary()

    async def look_once(stats: LiveStats) -> dict[str, Any]:
        """Raises ``KombuFDBError``."""
        try:
            return await threads.run(lambda: stats.look_at(lazy_broker.broker()))
        except AWAY:
            lazy_broker.forget()
            raise

    async def stream(request: Request) -> ASGIApp:
        _, refusal = await authentication.context(request)
        if refusal is not None:
            return PlainTextResponse("log in first\n", 401)
        if request.method == "HEAD":
            return PlainTextResponse("", media_type="text/event-stream")
        loop = asyncio.get_running_loop()
        if loop not in feeds:
            feeds[loop] = Feed(partial(look_once, LiveStats()), settings.interval_s, settings.most_streams)
        return _live(feeds[loop])

    return stream


def _live(feed: Feed) -> ASGIApp:
    """The stream for one client, which holds a place until it disconnects; 503 if all places are taken."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with feed.place() as is_free:
            if not is_free:
                await _full(scope, receive, send)
                return
            async with aclosing(feed.events(f"retry: {AGAIN_MS}\n\n")) as events:
                headers = {"x-accel-buffering": "no"}
                stream = StreamingResponse(events, media_type="text/event-stream", headers=headers)
                try:
                    async with asyncio.timeout(LONGEST_S):
                        await stream(scope, receive, send)
                except TimeoutError:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(END_S):
                            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


_full = PlainTextResponse("too many pages are open\n", 503, {"retry-after": "60"})
