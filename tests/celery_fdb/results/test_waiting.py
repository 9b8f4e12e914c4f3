"""``get`` and ``join``: woken by watches, in time, in every way Celery asks."""

import threading
import time

import pytest
from celery import states
from celery.app.task import Context
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, EagerResult, GroupResult, ResultSet

from celery_fdb.results.waiting import MOST_WATCHES, Waiting


@pytest.fixture
def asleep(monkeypatch):
    """Set when a waiting thread has looked, found nothing and sleeps: from then on only a watch can wake it."""
    event, sleep = threading.Event(), Waiting.sleep

    def tell(self, deadline, longest_s=None):
        event.set()
        sleep(self, deadline, None)  # not even for on_interval

    monkeypatch.setattr(Waiting, "sleep", tell)
    return event


def test_get_is_woken_by_the_result(app, backend, asleep, threads):
    def store():
        asleep.wait(10)
        backend.mark_as_done("a", "x" * 200_000)

    threads.submit(store)
    assert app.AsyncResult("a").get(timeout=20) == "x" * 200_000
    assert backend.client.database.armed_watches == 0


def test_hundreds_of_results_are_waited_for_at_once(app, backend, asleep, threads):
    ids = [f"t{number}" for number in range(400)]

    def store():
        asleep.wait(10)
        for number, task_id in enumerate(ids):
            backend.mark_as_done(task_id, number)

    threads.submit(store)
    result = GroupResult("g", [app.AsyncResult(task_id) for task_id in ids], app=app)
    assert result.get(timeout=60) == list(range(400))
    assert backend.client.database.armed_watches == 0


def test_no_more_is_watched_than_a_client_may(app, backend, asleep, monkeypatch, threads):
    assert MOST_WATCHES < 10_000
    monkeypatch.setattr("celery_fdb.results.waiting.MOST_WATCHES", 10)
    most = []

    def store():
        asleep.wait(10)
        for number in range(50):
            most.append(backend.client.database.armed_watches)
            backend.mark_as_done(f"t{number}", number)

    threads.submit(store)
    result = GroupResult("g", [app.AsyncResult(f"t{number}") for number in range(50)], app=app)
    assert result.get(timeout=60) == list(range(50))
    assert max(most) <= 10


def test_several_threads_wait_for_the_same_result(app, backend, threads):
    found = [threads.submit(app.AsyncResult("a").get, timeout=20) for _ in range(8)]
    backend.mark_as_done("a", 1)
    assert [each.result() for each in found] == [1] * 8


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_get_gives_up_in_time(app, timeout):
    begun = time.monotonic()
    with pytest.raises(CeleryTimeoutError):
        app.AsyncResult("a").get(timeout=timeout)
    with pytest.raises(CeleryTimeoutError):
        GroupResult("g", [app.AsyncResult("a")], app=app).get(timeout=timeout)
    assert time.monotonic() - begun < 5


def test_what_is_ready_is_returned_even_without_time(app, backend):
    backend.mark_as_done("a", 1)
    assert app.AsyncResult("a").get(timeout=0) == 1


def test_on_message_is_told_of_every_state(app, backend, threads):
    told = []
    progressed = threading.Event()

    def on_message(meta):
        told.append(meta["status"])
        progressed.set()

    def store():
        backend.store_result("a", {"done": 1}, "PROGRESS")
        progressed.wait(10)
        backend.mark_as_done("a", 2)

    threads.submit(store)
    assert app.AsyncResult("a").get(timeout=20, on_message=on_message) == 2
    assert told == ["PROGRESS", states.SUCCESS]


def test_on_interval_is_called_meanwhile(app):
    called = []

    def on_interval():
        called.append(1)
        if len(called) == 2:
            raise LookupError

    result = GroupResult("g", [app.AsyncResult("a")], app=app)
    with pytest.raises(LookupError):
        result.get(timeout=60, interval=0.1, on_interval=on_interval)


def test_a_chain_fails_as_soon_as_its_parent_does(app, backend, threads):
    child = AsyncResult("child", app=app, parent=AsyncResult("parent", app=app))
    threads.submit(backend.mark_as_failure, "parent", ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        child.get(timeout=20, interval=0.05)


def test_results_come_in_the_order_they_are_ready(app, backend):
    backend.mark_as_done("b", 2)
    result = GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")], app=app)
    found = result.iter_native(timeout=20)
    assert next(found)[0] == "b"
    backend.mark_as_done("a", 1)
    assert next(found)[0] == "a"
    assert list(found) == []


def test_a_group_calls_back_when_all_of_its_results_were_found(app, backend):
    called = []
    inner = GroupResult("inner", [app.AsyncResult("c"), app.AsyncResult("d")], app=app)
    result = GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b"), inner], app=app)
    for each in (result[0], inner, result):
        each.then(lambda found: called.append(found.id))
    for task_id in ("a", "b", "c"):
        backend.mark_as_done(task_id, task_id)
    with pytest.raises(CeleryTimeoutError):
        app.AsyncResult("d").get(timeout=0)
    backend.mark_as_done("d", "d")
    assert called == []
    assert result.get(timeout=20) == ["a", "b", ["c", "d"]]
    assert sorted(called) == ["a", "g", "inner"]


def test_what_a_group_yields_has_its_children_as_results(app, backend):
    request = Context(id="a")
    request.children.append(AsyncResult("child", app=app))
    backend.mark_as_done("a", 1, request=request)
    result = GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("a")], app=app)
    [(_, meta)] = result.iter_native(timeout=20)
    assert meta["children"] == [AsyncResult("child", app=app)] == result[0].children == result[1].children


def test_a_group_does_not_look_up_what_its_results_have_already(app, backend):
    found, other = AsyncResult("found", app=app), AsyncResult("other", app=app)
    backend.mark_as_done("found", 1)
    assert found.get(timeout=20) == 1
    backend.store.forget("found")
    backend.mark_as_done("other", 3)
    result = ResultSet([found, EagerResult("eager", 2, states.SUCCESS), other], app=app)
    assert result.get(timeout=1) == [1, 2, 3]
