"""The history that real workers keep: every way in which a run may end, in every pool; stops and kills."""

from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from celery import chain, chord

from celery_fdb.history.reading import Wanted
from celery_fdb.history.store import HistoryStore
from celery_fdb.history.views.runs import active_runs
from celery_fdb.history.views.timeline import TaskUnknown, timeline_of
from celery_fdb.history.views.workflows import workflow_of
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setenv("ACCEPTANCE_HISTORY", "1")


@pytest.fixture
def tasks(_on, app, fresh):
    return fresh("history_tasks")


@pytest.fixture(name="start")
def _start(start):
    return partial(start, "-c", "2", app="history_tasks")


@pytest.fixture
def opened(broker):
    with Broker.open(broker.url) as opened:
        yield opened


@pytest.fixture
def history(opened):
    return HistoryStore(opened.database, opened.location.namespace, clock=Clock())


@pytest.fixture
def ended(history, until):
    """Waits for so many runs, and returns all there are, the first one first."""

    def ended(number):
        until(lambda: len(history.page(Wanted(), limit=100)[0]) >= number)
        return history.page(Wanted(), limit=100)[0][::-1]

    return ended


@pytest.mark.parametrize("pool", POOLS, indirect=True)
def test_how_runs_end(tasks, start, ended, history, pool):
    start(pool=pool)
    ids = {
        tasks.add.apply_async((1, 2), {"card": 1}, headers={"fair_key": "k"}).id: ["SUCCESS"],
        tasks.fail.delay(token="abc").id: ["FAILURE"],
        tasks.again.delay().id: ["RETRY", "SUCCESS"],
        tasks.refuse.delay().id: ["REJECTED"],
        tasks.ignore.delay().id: ["IGNORED"],
        tasks.add.apply_async((1, 2), expires=-5).id: ["REVOKED"],
    }
    runs = ended(7)
    assert {id_: [run.state for run in history.runs_of_task(id_)] for id_ in ids} == ids
    by_state = {run.state: run for run in runs}
    for run in runs:
        assert (run.worker, run.queue) == ("w0@test", "celery")
        if run.state != "REVOKED":
            assert run.runtime_s is not None
            assert 0 < run.start_ms <= run.end_ms
    first = next(run for run in runs if "card" in run.kwargs)
    assert (first.key, first.args, first.kwargs) == ("k", "(1, 2)", "{'card': 1}")
    failure = by_state["FAILURE"]
    assert failure.error_class == "builtins.ValueError"
    assert "abc" not in failure.kwargs + failure.error + failure.traceback.splitlines()[-1]
    assert "raise ValueError" in failure.traceback
    assert (by_state["RETRY"].error_class, by_state["REVOKED"].error) == ("builtins.KeyError", "expired")
    assert {run.attempt for run in runs if run.task.endswith("again")} == {1, 2}


def test_a_whole_life_is_told_when_it_is_over(tasks, start, ended, opened):
    """Its messages are gone: the runs tell when it was published and due."""
    start()
    again = tasks.again.delay()
    later = tasks.add.apply_async((1, 2), countdown=1)
    ended(3)
    assert [event.what for event in timeline_of(opened, later.id).events] == [
        "published",
        "due",
        "started",
        "succeeded",
    ]
    events = timeline_of(opened, again.id).events
    assert [event.what for event in events][:2] == ["published", "started"]
    assert Counter(event.what for event in events if event.what != "due") == {
        "published": 2,
        "started": 2,
        "retried": 1,
        "succeeded": 1,
    }


def shape(nodes):
    """Tasks with their states, each with what is below it."""
    return [
        (each.task.rpartition(".")[2] or each.kind, each.state, *([shape(each.children)] if each.children else []))
        for each in nodes
    ]


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_a_chain_with_a_chord_is_a_tree_with_the_state_of_each(broker, monkeypatch, request, until, opened):
    monkeypatch.setenv("ACCEPTANCE_RESULTS", broker.url)
    tasks, app = request.getfixturevalue("tasks"), request.getfixturevalue("app")
    request.getfixturevalue("start")()
    header = [tasks.add.si(1, 2), tasks.add.si(3, 4), app.hold.si("it")]
    workflow = chain(tasks.add.si(0, 0), chord(header, tasks.total.s()), tasks.add.s(5))
    workflow.tasks[0].set(task_id="root")
    last = workflow.delay()

    def tree():
        with suppress(TaskUnknown):
            return shape(workflow_of(opened, "root").roots)

    def expected(header, held, then):
        members = [("add", "SUCCESS"), ("add", "SUCCESS"), ("hold", held)]
        whole = "SUCCESS" if then == "SUCCESS" else "STARTED"
        return [("chain", whole, [("add", "SUCCESS"), ("group", header, members), ("total", then), ("add", then)])]

    until(lambda: tree() == expected("STARTED", "STARTED", "PENDING"), say=tree)
    broker.allow("it")
    until(lambda: tree() == expected("SUCCESS", "SUCCESS", "SUCCESS"), say=tree)
    assert last.get(timeout=60) == 15


def test_a_lost_child_and_a_hard_time_limit(tasks, start, ended):
    start()
    tasks.die.delay("it")
    tasks.too_slow.delay()
    runs = {run.task.rpartition(".")[2]: run for run in ended(2)}
    assert (runs["die"].state, runs["die"].error_class) == ("FAILURE", "billiard.exceptions.WorkerLostError")
    assert (runs["too_slow"].state, runs["too_slow"].error_class) == (
        "FAILURE",
        "billiard.exceptions.TimeLimitExceeded",
    )


def test_a_warm_shutdown_keeps_what_ends_in_it(tasks, app, broker, start, until, ended, opened):
    worker = start()
    app.hold.delay("it")
    until(lambda: [run.alive for run in active_runs(opened)] == [True])
    worker.process.terminate()
    until(lambda: worker.said("Warm shutdown"))
    broker.allow("it")
    assert worker.wait_end() == 0
    (run,) = ended(1)
    assert (run.state, run.task) == ("SUCCESS", "acceptance_app.hold")
    assert active_runs(opened) == []


def test_what_a_killed_worker_ran_is_lost(tasks, app, broker, start, until, ended, opened):
    first = start()
    app.hold.delay("it")
    until(lambda: active_runs(opened))
    first.kill()
    start()  # finds it, and runs it again
    (lost,) = ended(1)
    assert (lost.state, lost.worker) == ("LOST", "w0@test")
    broker.allow("it")
    again = ended(2)[1]
    assert (again.id, again.state, again.redeliveries) == (lost.id, "SUCCESS", 1)
