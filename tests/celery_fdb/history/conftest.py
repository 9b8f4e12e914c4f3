"""The history over the memory store, SQLite and a real FoundationDB."""

import os
from itertools import count

import pytest
from celery.states import SUCCESS

from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.run import Run
from celery_fdb.history.store import HistoryStore
from kombu_fdb import Broker
from kombu_fdb.testing.clock import ManualClock

#: Small segments: of 10 runs, and 20 minutes.
BOUNDS = History(runs=500, max_age=60_000)
NOW_MS = 1_800_000_000_000


@pytest.fixture
def broker(any_store):
    with Broker.open(any_store) as broker:
        yield broker


@pytest.fixture
def clock():
    return ManualClock(wall_ms=NOW_MS)


@pytest.fixture
def store(broker, clock):
    return HistoryStore(broker.database, broker.location.namespace, clock=clock, timeout_s=30.0)


@pytest.fixture
def keep(store):
    """Writes runs as a worker does."""

    def keep(*runs, bounds=BOUNDS):
        for unwritten in pack_groups(runs):
            store.write(unwritten, bounds)

    return keep


_numbers = count(1)


def run(id_="", *, task="shop.pay", state=SUCCESS, ago_s=0.0, **fields):
    """A run that ended some seconds before the clock's beginning."""
    end_ms = NOW_MS - int(ago_s * 1000)
    told = {"queue": "celery", "worker": "w@h", "start_ms": end_ms - 500, "end_ms": end_ms, "runtime_s": 0.5, **fields}
    return Run(id_ or f"{next(_numbers):08d}-{os.urandom(4).hex()}", task, state=state, **told)


@pytest.fixture(name="run")
def _run():
    return run
