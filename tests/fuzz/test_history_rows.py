"""One row of the history is damaged, in its key or its value: everything else is shown, written and trimmed as ever.

The oracle. Nothing that is shown raises anything, whatever is asked for; a flush, a trim and the end of a lost run do
what they do; and what a worker writes afterwards is found by every way.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial

from celery.states import FAILURE, STARTED, SUCCESS
from prometheus_client import CollectorRegistry, generate_latest
from store_rows import mutated, replace, telling, write_all

from celery_fdb.cli.doctor import check_history
from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import Run
from celery_fdb.history.views.metrics import TaskCollector
from celery_fdb.history.views.runs import (
    DAY_S,
    HOUR_S,
    HistoryOff,
    active_runs,
    history_of,
    look_at_series,
    look_at_tasks,
    page_of_runs,
)
from celery_fdb.history.views.timeline import TaskUnknown, timeline_of
from celery_fdb.history.views.workflows import workflow_of
from kombu_fdb import Broker
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.stores import MemoryStores

BOUNDS = History(runs=100, max_age=86_400)
URL = "fdb+memory://fuzz"


def test_a_damaged_row_of_the_history_stops_nothing_else(fuzz):
    def target(rng):
        with MemoryStores(), Broker.open(URL) as broker:
            store = history_of(broker)
            store._write(lambda tr: write_all(tr, rows()))
            row = rng.choice(rows())
            damaged = mutated(rng, row, store.keys.prefix)
            store._write(partial(replace, row=row, damaged=damaged, beside=rng.random() < 0.3))
            with telling(row, damaged):
                look_around(broker)
                go_on(broker, store, is_counted=b"segment" not in row[0])
                look_around(broker)

    fuzz(target)


@cache
def rows():
    """A history with a row of every kind."""
    with MemoryStores(), Broker.open(URL) as broker:
        store = history_of(broker)
        store.set_settings(BOUNDS)
        for number in range(6):
            keep(store, run(f"t{number}"), run(f"t{number}", state=FAILURE, root="t0", group="g", parent="t1"))
        keep(store, run("first", followers=(("second", "b"),)))
        store.activity(b"s" * 16, {1: run("active", state=STARTED, end_ms=0)}, dropped=2)
        return store._read(lambda tr: tr.get_range(*range_of(store.keys.prefix)))


def run(id_, **fields):
    now_ms = Clock().wall_ms()
    told = {"state": SUCCESS, "start_ms": now_ms - 10, "end_ms": now_ms, "runtime_s": 0.01, **fields}
    return Run(id_, "shop.pay", "q", "w@h", **told)


def keep(store, *runs):
    for unwritten in pack_groups(runs):
        store.write(unwritten, BOUNDS)


def look_around(broker):
    """Every way to look at it."""
    for wanted in (Wanted(), Wanted(task="shop.pay"), Wanted(state=FAILURE), Wanted(key="k", since_ms=1, until_ms=2)):
        with suppress(HistoryOff):  # the row that says so was it
            cursor = None
            for _ in range(5):
                page = page_of_runs(broker, wanted, limit=3, cursor=cursor)
                json.dumps(asdict(page)).encode()
                cursor = page.cursor
            active_runs(broker)
            for period_s in (HOUR_S, DAY_S):
                json.dumps(asdict(look_at_tasks(broker, period_s=period_s)))
                look_at_series(broker, period_s=period_s)
    for task_id in ("t0", "first", "active", "g"):
        for ask in (timeline_of, workflow_of):
            with suppress(TaskUnknown):
                json.dumps(asdict(ask(broker, task_id))).encode()
    check_history(broker)
    registry = CollectorRegistry()
    registry.register(TaskCollector(lambda: broker))
    generate_latest(registry)


def go_on(broker, store, *, is_counted):
    """A worker starts, writes, trims and ends. ``is_counted``: else a trim may take more than it has to."""
    store.set_settings(BOUNDS)
    keep(store, run("new", root="r"))
    assert [each.id for each in store.runs_of_task("new")] == ["new"]
    assert [each.id for each in store.runs_of_workflow("r")] == ["new"]
    assert "new" in [each.id for each in page_of_runs(broker, limit=100).runs]
    store.activity(b"z" * 16, {7: run("begun", state=STARTED, end_ms=0)})
    assert "begun" in [each.id for _, each in store.active()]
    assert store.lose(b"z" * 16, BOUNDS) == 1
    store.lose(b"s" * 16, BOUNDS)
    store.trim(BOUNDS, parts=5, now_ms=time.time_ns() // 1_000_000)
    assert [each.id for each in store.runs_of_task("new")] == ["new"] or not is_counted
    counted = look_at_tasks(broker).tasks
    assert sum(each.runs for each in counted if each.task == "shop.pay") >= 2
