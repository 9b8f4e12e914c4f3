"""What each page reads of a store with 1,000,000 messages and 100,000 keys: exactly as much as of one with 12,000.

The rows are written past the engine, as so many publications would have left them; that they are what the engine writes
is shown by the pages, which find them. The smaller store is larger than each bound of a search, a count or a look;
those of a workflow and of their list, which reads the index of one segment of the history, are lowered to less than it
has.
"""

from __future__ import annotations

import html
import json
import re
import sqlite3
import time
from contextlib import closing
from typing import NamedTuple

import pytest
from kit.costs import CountingDatabase
from kit.dashboard import Person
from kit.left import keep
from kit.records import record_of

from celery_fdb import brokers
from celery_fdb.history import reading
from celery_fdb.history.run import Run
from celery_fdb.history.views import workflows
from celery_fdb.inspection.schedules import EntryReport, schedule_of
from celery_fdb.web import dashboard
from kombu_fdb import Broker
from kombu_fdb.keyspace.codec import PAYLOAD_HEAD, PAYLOAD_VERSION
from kombu_fdb.keyspace.layout import STAMP_CODE, pack_stamp
from kombu_fdb.model import Death

#: The larger store, which has the mark, takes seconds to write; minutes on a machine that is very busy.
pytestmark = pytest.mark.timeout(600)

LATER_MS = 2**41


class Size(NamedTuple):
    """How many messages are in each state, how many fairness keys have one, and how many runs are kept."""

    ready: int
    delayed: int
    dead: int
    keys: int
    runs: int


SMALL, LARGE = Size(12_000, 12_000, 12_000, 12_000, 510), Size(700_000, 100_000, 100_000, 100_000, 600)


class Reads(NamedTuple):
    """Of one page."""

    rows: int
    gets: int
    transactions: int


#: A search looks at 2,050 messages for a page, a count of causes at 10,000 letters, the longest keys are of 10,000.
PAGES = {
    "/": Reads(209, 7, 11),
    "/?span=week": Reads(209, 7, 13),
    "/queues": Reads(208, 6, 9),
    "/queues?q=fair": Reads(208, 6, 9),
    "/queue?queue=q": Reads(7, 3, 11),
    "/queue?queue=fair": Reads(10206, 3, 20),
    "/keys?queue=fair": Reads(51, 1, 2),
    "/keys?queue=fair&prefix=customer-00": Reads(51, 1, 2),
    "/keys?queue=fair&prefix=nobody": Reads(0, 1, 2),
    "/keys?queue=fair&after=customer-009": Reads(51, 1, 2),
    "/messages?queue=q": Reads(53, 0, 3),
    "/messages?queue=q&order=newest": Reads(53, 0, 3),
    "/messages?queue=q&state=delayed": Reads(53, 0, 3),
    "/messages?queue=q&state=leased": Reads(2, 0, 3),
    "/messages?queue=q&task=shop.pay": Reads(53, 0, 3),
    "/messages?queue=q&task=nobody": Reads(2063, 0, 13),
    "/messages?queue=q&text=nobody&order=newest": Reads(2063, 0, 13),
    "/messages?queue=q&state=delayed&since=2031-01-01T00:00": Reads(2063, 0, 13),
    "/messages?queue=fair&key=customer-000777": Reads(53, 0, 4),
    "/messages?queue=fair&key=nobody": Reads(2112, 0, 14),
    "/messages?queue=q.dead&error=Declined": Reads(52, 0, 3),
    "/messages?queue=q.dead&error=KeyError": Reads(2062, 0, 13),
    "/dead": Reads(208, 6, 5),
    "/dead?queue=q.dead": Reads(10021, 0, 21),
    "/causes": Reads(10229, 6, 26),
    "/causes?task=nobody": Reads(10229, 6, 26),
    "/tasks": Reads(1, 1, 2),
    "/tasks?period=day": Reads(1, 1, 2),
    "/runs": Reads(52, 1, 2),
    "/runs?task=shop.pay": Reads(53, 51, 2),
    "/runs?task=nobody": Reads(2, 1, 2),
    "/runs?key=nobody": Reads(62, 1, 2),
    "/runs?state=FAILURE": Reads(2, 1, 2),
    "/runs?state=STARTED": Reads(0, 1, 2),
    "/task?id=t": Reads(2, 2, 6),
    "/task?id=r7": Reads(4, 2, 5),
    "/task?id=nobody": Reads(2, 2, 6),
    "/workflows": Reads(1409, 504, 10),
    "/workflow?id=r7": Reads(913, 504, 10),
    "/schedules": Reads(14, 11, 4),
    "/sessions": Reads(6, 0, 4),
}


def envelope(task):
    meta = json.dumps(["application/json", "utf-8", {"task": task, "id": "t"}, {}, "", "q"]).encode()
    return PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(meta)) + meta + b"[[], {}, {}]"


def record(key="", *deaths):
    made = record_of(b"i" * 16, envelope("shop.pay"), published_ms=1, expires_ms=0, key=key, deaths=deaths, task_id="t")
    return made.encode()


def rows(keys, size):
    """Queue "q" and its dead letters without keys; queue "fair" with keys at which no consumer has looked yet."""
    death = Death("q", "rejected", 1, 5, details={"error_class": "shop.Declined"})
    places = {
        ("q", "ready"): (keys.items("q", "", keys.rank(0)) + STAMP_CODE, size.ready, record()),
        ("q", "delayed"): (keys.delayed_prefix("q", LATER_MS, keys.rank(0)), size.delayed, record()),
        ("q.dead", "ready"): (keys.items("q.dead", "", keys.rank(0)) + STAMP_CODE, size.dead, record("", death)),
    }
    for (queue, state), (prefix, number, value) in places.items():
        for each in range(number):
            yield prefix + each.to_bytes(10, "big") + b"\0\0", value
        yield keys.count(queue, state), number.to_bytes(8, "little")
        yield keys.waiting(queue), b""
    yield from keyed(keys, size.keys)


def keyed(keys, number):
    rank = keys.rank(0)
    for each in range(number):
        key = f"customer-{each:06}"
        yield keys.items("fair", key, rank) + pack_stamp(each.to_bytes(10, "big") + bytes(2)), record(key)
        yield keys.arrival("fair", key, rank), b""
        yield keys.backlog("fair", key), (1).to_bytes(8, "little")
    yield keys.fair("fair"), b""
    yield keys.count("fair", "ready"), number.to_bytes(8, "little")


def keep_runs(broker, number):
    """Each in a group of its own, as of workers with little to do."""
    now_ms = time.time_ns() // 1_000_000
    for each in range(number):
        run = Run(f"r{each}", "shop.pay", queue="q", state="SUCCESS", start_ms=now_ms - 9, end_ms=now_ms)
        keep(broker, run._replace(root="r0" if each else ""))


@pytest.fixture(params=[pytest.param(SMALL, id="12,000"), pytest.param(LARGE, id="1,000,000", marks=pytest.mark.scale)])
def shop(request, tmp_path):
    path, size = tmp_path / "broker.db", request.param
    with Broker.open(f"fdb+sqlite:///{path}") as broker:
        broker.declare("q")
        broker.declare("fair")
        keep_runs(broker, size.runs)
        schedule_of(broker).report([EntryReport("often", "shop.pay", "", "", None, None, 0, 1, 60.0)])
        keys = broker._engine.keys
    with closing(sqlite3.connect(path)) as connection:
        for each in ("journal_mode = OFF", "synchronous = OFF"):
            connection.execute(f"PRAGMA {each}")
        connection.executemany("INSERT OR REPLACE INTO kv VALUES (?, ?)", rows(keys, size))
        connection.commit()
        connection.execute("PRAGMA journal_mode = WAL")
    with Broker.open(f"fdb+sqlite:///{path}") as broker:
        yield broker, size
    path.unlink()


@pytest.fixture
def counted(shop, monkeypatch):
    """Counts what the dashboard reads: it uses the test's own broker."""
    monkeypatch.setattr(reading, "MOST_OF_SEGMENT", 500)
    monkeypatch.setattr(workflows, "MOST_RUNS", 500)
    broker, _ = shop
    monkeypatch.setattr(brokers, "open_existing", lambda *_, **__: broker)
    counting = CountingDatabase(broker._engine.transactions.retry.database)
    broker._engine.transactions.retry.database = counting
    monkeypatch.setattr(type(broker), "database", property(lambda _: counting))
    return counting


def test_each_page_reads_as_much_of_a_million_as_of_a_few(shop, counted, subtests):
    broker, size = shop
    with Person(
        dashboard("fdb+sqlite:////nowhere", anonymous=True, hosts=["testserver"]), raise_server_exceptions=True
    ) as person:
        letter = re.search(r'href="(/message\?[^"]+)"', person.see("/messages?queue=q.dead"))
        for address, expected in {**PAGES, html.unescape(letter[1]): Reads(0, 1, 1)}.items():
            with subtests.test(address.partition("&spot")[0]):
                tries = (reads(counted, person, address) for _ in range(3))  # a read that was repeated counts twice
                found = next((each for each in tries if each == expected), None) or reads(counted, person, address)
                assert found == expected
        assert "looked at 2\u202f050" in person.see("/messages?queue=q&task=nobody")
        assert "counted among the first 10\u202f000" in person.see("/causes")
        assert "the first 10,000 by name" in person.see("/queue?queue=fair")
    counts = broker.queues()
    assert (counts["q"].ready, counts["q"].delayed, counts["q.dead"].ready) == (size.ready, size.delayed, size.dead)
    assert counts["fair"].ready == size.keys


def reads(counted, person, address):
    counted.reset()
    person.see(address)
    paid = counted.total()
    return Reads(paid.rows, paid.point_reads, len(counted.transactions))
