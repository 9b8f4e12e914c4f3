"""One row of what beats told of their schedules is damaged, in its key or its value: the other entries are shown.

The oracle. Neither the page nor a beat that tells of its own and forgets the old ones raises anything; what the row is
not of is shown as it was, and what it is of is when a beat has told of it again.
"""

from functools import cache

import pytest
from store_rows import mutated, telling

pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")

from starlette.testclient import TestClient

from celery_fdb.inspection.schedules import EntryReport, schedule_of
from celery_fdb.web import dashboard
from kombu_fdb import Broker
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.stores import MemoryStores

URL = "fdb+memory://fuzz"


@pytest.fixture
def person():
    with (
        MemoryStores(),
        TestClient(dashboard(URL, anonymous=True, hosts=["testserver"]), raise_server_exceptions=True) as person,
    ):
        person.get("/login")
        yield person


def test_a_damaged_entry_of_a_schedule_stops_no_other(fuzz, person):
    def target(rng):
        with Broker.open(URL) as broker:
            store = schedule_of(broker)
            (row,) = (each for each in rows() if b"bad" in each[0])
            damaged = mutated(rng, row, store._prefix)
            load(store, [each for each in rows() if each != row or rng.random() < 0.3], damaged)
            with telling(row, damaged):
                look(store, person, "safe")
                store.report([told("bad")])
                store.forget_old(Clock().wall_ms())
                look(store, person, "safe", "bad")

    fuzz(target)


def told(name):
    return EntryReport(name, "shop.pay", f"every {name} second", "q", 5, 10_000, 3, Clock().wall_ms(), 65.0)


@cache
def rows():
    with MemoryStores(), Broker.open(URL) as broker:
        store = schedule_of(broker)
        store.report([told("safe"), told("bad")])
        return store._retry.read(lambda tr: tr.get_range(*range_of(store._prefix)), timeout_s=5)


def load(store, found, damaged):
    def body(tr):
        tr.clear_range(*range_of(store._prefix))
        for key, value in (*found, damaged):
            tr.set(key, value)

    store._retry.repeat(body, timeout_s=5)


def look(store, person, *names):
    shown = person.get("/schedules")
    assert shown.status_code == 200
    for name in names:
        assert (name, f"every {name} second") in [(each.name, each.timing) for each in store.reports()]
        assert f"every {name} second" in shown.text
