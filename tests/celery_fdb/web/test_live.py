"""The live stream: one look for all, which ends with the last of them."""

import asyncio
import gc
import json
from contextlib import aclosing
from functools import wraps
from typing import Any

import pytest
from celery.states import FAILURE, SUCCESS
from kit.left import keep

from celery_fdb.history.run import Run
from celery_fdb.inspection.overview import Overview, QueueView
from celery_fdb.web import dashboard, live
from celery_fdb.web.live import Feed, LiveStats
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import NO_SESSION, SessionFacts

DEADLINE_S = 60.0


def in_a_loop(test):
    """The test, run in an event loop of its own."""

    @wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


class Looks:
    """Counts how often the broker was looked at."""

    def __init__(self):
        self.number = 0
        self.away = False

    async def __call__(self):
        self.number += 1
        if self.away:
            raise StoreUnavailable
        return {"number": self.number}


async def data(events, name):
    """The next event of this name."""
    async with asyncio.timeout(DEADLINE_S):
        async for each in events:
            if each.startswith(f"event: {name}\n"):
                return json.loads(each.partition("data: ")[2])
    raise AssertionError(name)


@in_a_loop
async def test_all_clients_share_one_look_and_it_ends_with_them():
    looks = Looks()
    feed = Feed(looks, 0.001, 10)
    async with aclosing(feed.events()) as one, aclosing(feed.events()) as other:
        await anext(one)
        await anext(other)
        first = await data(one, "look")
        assert (await data(other, "look"))["number"] - first["number"] <= 1
        assert feed._watch is not None
    assert feed._watch is None
    seen = looks.number
    await asyncio.sleep(0.05)
    assert looks.number == seen


@in_a_loop
async def test_a_slow_client_gets_the_newest():
    looks = Looks()
    feed = Feed(looks, 0.001, 10)
    async with aclosing(feed.events()) as slow, aclosing(feed.events()) as quick:
        await anext(slow)
        await anext(quick)
        while (await data(quick, "look"))["number"] < 20:
            pass
        assert (await data(slow, "look"))["number"] >= 20


@in_a_loop
async def test_a_look_that_takes_long_is_not_followed_by_the_next_at_once():
    took = []
    pauses = []

    async def look():
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(0.05)
        took.append(clock() - began)
        return {}

    async def pause(seconds):
        pauses.append(seconds)
        await asyncio.sleep(0)

    feed = Feed(look, 0.001, 10, pause)
    async with aclosing(feed.events()) as events:
        await data(events, "look")
        await data(events, "look")
    assert pauses[0] >= 4 * took[0]


@in_a_loop
async def test_while_the_store_is_away_clients_are_told_and_it_comes_back():
    looks = Looks()
    feed = Feed(looks, 0.001, 10)
    looks.away = True
    async with aclosing(feed.events()) as events:
        assert "not available" in (await data(events, "away"))["text"]
        looks.away = False
        assert await data(events, "look")


@in_a_loop
async def test_whatever_the_store_holds_the_watch_goes_on():
    outcomes = iter([KeyError("row"), RecursionError("deep")])

    async def look():
        for each in outcomes:
            raise each
        return {}

    feed = Feed(look, 0.001, 10)
    async with aclosing(feed.events()) as events:
        assert "KeyError" in (await data(events, "away"))["text"]
        assert await data(events, "look") == {}


# -- over ASGI ---------------------------------------------------------------------------------------------------------


class Client:
    """One request, as a server makes it, that stays until it is told to go."""

    def __init__(self, application, sent=None, path="/events"):
        self.sent = sent or asyncio.Queue()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self.task = asyncio.create_task(application(scope, self._receive, self.sent.put))
        self._asked = False

    async def _receive(self):
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def begin(self):
        return int((await self._next())["status"])

    async def event(self, name):
        while True:
            text = (await self._next())["body"].decode()
            if f"event: {name}\n" in text:
                return dict(json.loads(text.partition("data: ")[2]))

    async def _next(self):
        async with asyncio.timeout(DEADLINE_S):
            return await self.sent.get()

    async def go(self):
        self._gone.set()
        async with asyncio.timeout(DEADLINE_S):
            await self.task


@in_a_loop
async def test_a_page_hears_of_what_happens_and_too_many_are_refused(url, broker):
    application = dashboard(url, anonymous=True, interval_s=0.2, most_streams=2)
    one, other = Client(application), Client(application)
    assert (await one.begin(), await other.begin()) == (200, 200)
    assert (await one.event("look"))["summary"]["ready"] == 0
    broker.queue("jobs").put("a")
    while (await one.event("look"))["queues"].get("jobs", {}).get("ready") != 1:
        pass
    third = Client(application)
    assert await third.begin() == 503
    await third.go()
    await one.go()
    again = Client(application)
    assert await again.begin() == 200
    assert (await again.event("look"))["queues"]["jobs"]["ready"] == 1
    await again.go()
    await other.go()


@in_a_loop
async def test_many_who_come_at_once_are_refused_too(url, broker):
    application = dashboard(url, anonymous=True, most_streams=2)
    clients = [Client(application) for _ in range(20)]
    answers = [await each.begin() for each in clients]
    assert sorted(answers) == [200] * 2 + [503] * 18
    for each in clients:
        await each.go()
    again = Client(application)
    assert await again.begin() == 200, "their places are free"
    await again.go()


@in_a_loop
async def test_who_reads_nothing_gives_the_place_back(url, broker, monkeypatch):
    """As the last of many sockets whose client does not read, and whose login may be over."""
    monkeypatch.setattr(live, "LONGEST_S", 0.05)
    monkeypatch.setattr(live, "END_S", 0.05)

    class Deaf(asyncio.Queue[dict[str, Any]]):
        async def put(self, item):
            if item["type"] == "http.response.body":
                await asyncio.Event().wait()
            await super().put(item)

    application = dashboard(url, anonymous=True, most_streams=1)
    deaf = Client(application, Deaf())
    assert await deaf.begin() == 200
    async with asyncio.timeout(DEADLINE_S):
        await deaf.task
    monkeypatch.setattr(live, "LONGEST_S", 900.0)
    other = Client(application)
    assert await other.begin() == 200
    await other.go()


@in_a_loop
async def test_a_stream_that_is_read_ends_as_an_answer_does(url, broker, monkeypatch):
    """So that servers don't take it for a mistake."""
    monkeypatch.setattr(live, "LONGEST_S", 0.05)
    client = Client(dashboard(url, anonymous=True))
    await client.begin()
    async with asyncio.timeout(DEADLINE_S):
        await client.task
    while not client.sent.empty():
        last = client.sent.get_nowait()
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}


def test_who_only_asks_for_the_head_gets_it(viewer):
    assert viewer.head("/events").headers["content-type"].startswith("text/event-stream")


# -- numbers -----------------------------------------------------------------------------------------------------------


def seen(at_ms, ready=0, **totals):
    internal = QueueView("w.celery.pidbox", ready=1_000, totals={"acked": 9_999})
    return Overview(at_ms, "x", [QueueView("q", ready=ready, totals=totals, oldest_age_s=4.0), internal], [])


def test_rates_and_what_follows_from_them():
    stats = LiveStats()
    first = stats.told(seen(0, 60))["summary"]
    assert (first["acked"], first["wait"], first["failures"], first["oldest"]) == (None, None, None, 4.0)
    event = stats.told(seen(2_000, 60, published=40, claimed=20, acked=15, dead=5))
    assert event["summary"]["published"] == 20
    assert event["summary"]["acked"] == 7.5
    assert event["summary"]["wait"] == 6, "60 messages at 10 a second"
    assert event["summary"]["failures"] == pytest.approx(0.25)
    assert event["summary"]["ready"] == 60, "without Celery's own"
    assert event["queues"]["q"]["dead"] == 0, "how many there are, not how fast they die"


def test_what_needs_attention_is_told_with_each_look():
    """And nothing of it turns a line around."""
    name = "jobs\u202e"
    told = LiveStats().told(
        Overview(0, "x", [QueueView(name, ready=3, dead=1), QueueView("w.celery.pidbox", dead=1)], [])
    )
    assert told["alerts"] == [
        {"text": "no worker consumes any queue", "queue": None},
        {"text": "1 dead letter of jobs\\u202e", "queue": name},
        {"text": "jobs\\u202e has no consumers, and 3 wait there", "queue": name},
    ]
    told = LiveStats().told(Overview(0, "x", [QueueView("jobs"), QueueView("mails", consumers=1)], []))
    assert told["alerts"] == []
    silent = SessionFacts(NO_SESSION, {"host": "host", "pid": 7}, b"", 10.0, open=True, consumed=[], beat_ms=1)
    told = LiveStats().told(Overview(20_000, "x", [], [silent]))
    assert told["alerts"] == [{"text": "1 session without a heartbeat: host 7", "queue": None}]


def test_with_a_history_failures_are_those_of_runs():
    stats = LiveStats()
    assert stats.told(seen(0), (100, 50))["summary"]["failures"] is None
    assert stats.told(seen(2_000, acked=40), (140, 60))["summary"]["failures"] == pytest.approx(0.25)
    assert stats.told(seen(4_000, acked=40, dead=40))["summary"]["failures"] == pytest.approx(0.5), "without one"


@in_a_loop
async def test_the_stream_counts_the_runs_of_the_history(url, broker):
    keep(broker)
    client = Client(dashboard(url, anonymous=True, interval_s=0.2))
    assert await client.begin() == 200
    await client.event("look")
    keep(broker, Run("a", "t", state=FAILURE), Run("b", "t", state=SUCCESS))
    while (await client.event("look"))["summary"]["failures"] != 0.5:
        pass
    await client.go()


def test_rates_are_of_the_last_seconds_only():
    stats = LiveStats()
    for second in range(30):
        event = stats.told(seen(second * 1_000, acked=0 if second < 15 else 100))
    assert event["summary"]["acked"] == 0


def test_looks_are_forgotten_with_their_queues():
    """Those of five minutes would be gigabytes where there are ten thousand queues."""
    stats = LiveStats()
    looks = [seen(second * 2_000) for second in range(30)]
    for each in looks:
        stats.told(each)
    held = [each for each in looks if any(isinstance(other, tuple) for other in gc.get_referrers(each))]
    assert held == looks[-6:]


def test_a_clock_that_was_set_back_costs_one_look():
    stats = LiveStats()
    stats.told(seen(3_600_000))
    stats.told(seen(0))
    assert stats.told(seen(2_000, acked=20))["summary"]["acked"] == 10
