"""The backend of ``django.tasks``, with a real worker, where this Django has it."""

import importlib
import pickle
import sys
import types
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.exceptions import NotRegistered, Reject

pytest.importorskip("django.tasks", reason="django.tasks is part of Django 6.0 and later")

from django.tasks import TaskResultStatus, default_task_backend
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.utils import timezone

import celery_fdb.contrib.django.backend as backend_module
import celery_fdb.contrib.django.tasks  # as Celery's autodiscover_tasks does
from celery_fdb.contrib.django.conf import RUN
from celery_fdb.inspection.message import describe
from kombu_fdb import Broker
from kombu_fdb.model import View
from kombu_fdb.transport.envelope import open_peeked

assert celery_fdb.contrib.django.tasks

BACKEND = {"BACKEND": "celery_fdb.contrib.django.backend.CeleryBackend", "QUEUES": ["default", "mail"]}
SOURCE = """
from django.tasks import task

@task()
def add(one, other=0):
    return one + other

@task()
async def shout(text):
    return text.upper()

@task(takes_context=True)
def attempt(context):
    return [context.attempt, context.task_result.id]

@task(queue_name="mail", priority=100)
def mail(to):
    return {"to": to}

@task()
def fail():
    raise LookupError("no such order")

def plain():
    raise AssertionError("not a task")
"""


@pytest.fixture
def app(url, new_app, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    app = new_app(url, backend=f"file://{tmp_path}/results")
    app.conf.update(result_extended=True, task_track_started=True)
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: app)
    return app


@pytest.fixture
def broker(app, url, configure):
    from celery_fdb.contrib.django.conf import lazy_broker

    configure(TASKS={"default": {**BACKEND, "OPTIONS": {"fair_key": "django"}}})
    Broker.open(url).close()  # pages make no file
    return lazy_broker.broker()


@pytest.fixture
def tasks(broker, tmp_path, monkeypatch):
    """A module of tasks, as an app has one."""
    (tmp_path / "shop_tasks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("shop_tasks")
    del sys.modules["shop_tasks"]


@pytest.fixture
def worker(app):
    app.amqp.queues.select_add("default")
    app.amqp.queues.select_add("mail")
    return lambda: start_worker(app, perform_ping_check=False, shutdown_timeout=20)


def finish(app, result):
    """Wait for the worker, then ask Django."""
    app.AsyncResult(result.id).get(timeout=20, propagate=False, interval=0.02)
    return default_task_backend.get_result(result.id)


def test_a_task_waits_in_the_broker_and_a_worker_runs_it(app, broker, tasks, worker):
    sent = tasks.add.enqueue(2, other=3)
    assert sent.status is TaskResultStatus.READY
    assert broker.queue("default").keys()["django"].ready == 1
    (message,) = broker.find(sent.id)
    assert describe(message)["task"] == tasks.add.module_path, "by which pages and commands call it"
    waiting = tasks.add.get_result(sent.id)
    assert (waiting.status, waiting.args, waiting.kwargs) == (TaskResultStatus.READY, [2], {"other": 3})
    with worker():
        done = finish(app, sent)
    assert (done.status, done.return_value, done.task) == (TaskResultStatus.SUCCESSFUL, 5, tasks.add)
    assert (done.enqueued_at, done.attempts) == (sent.enqueued_at, 1)
    assert sent.enqueued_at <= done.started_at <= done.finished_at <= timezone.now()
    sent.refresh()
    assert sent.return_value == 5


def test_a_failed_task_tells_its_error(app, tasks, worker):
    sent = tasks.fail.enqueue()
    with worker():
        done = finish(app, sent)
    assert done.status is TaskResultStatus.FAILED
    (error,) = done.errors
    assert error.exception_class is LookupError
    assert "no such order" in error.traceback
    with pytest.raises(ValueError, match="failed"):
        _ = done.return_value


def test_context_coroutines_and_signals(app, tasks, worker):
    from django.tasks.signals import task_enqueued, task_finished, task_started

    seen = []

    def note(name):
        def receive(*, task_result, **_):
            seen.append((name, task_result.id, task_result.status))

        return receive

    receivers = [
        (signal, note(name))
        for name, signal in (("enqueued", task_enqueued), ("started", task_started), ("finished", task_finished))
    ]
    for signal, receiver in receivers:
        signal.connect(receiver)
    try:
        sent = tasks.attempt.enqueue()
        with worker():
            assert finish(app, sent).return_value == [1, sent.id]
            assert finish(app, tasks.shout.enqueue("hey")).return_value == "HEY"
    finally:
        for signal, receiver in receivers:
            signal.disconnect(receiver)
    assert seen[:3] == [
        ("enqueued", sent.id, "READY"),
        ("started", sent.id, "RUNNING"),
        ("finished", sent.id, "SUCCESSFUL"),
    ]


def test_run_after_waits_in_the_store_and_priority_goes_first(broker, tasks):
    later = tasks.add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
    assert broker.queue("default").stats().delayed == 1
    assert tasks.add.get_result(later.id).status is TaskResultStatus.READY
    ids = [tasks.mail.using(priority=priority).enqueue("a").id for priority in (0, -100, 100, 50, -50)]
    listed = broker._engine.inspect.page("mail", View("ready"), 10).messages
    order = [(each.message.task_id, each.priority) for each in listed]
    assert order == [(ids[2], 9), (ids[3], 6), (ids[0], 4), (ids[4], 2), (ids[1], 0)]


def test_a_time_to_run_without_a_zone_is_djangos(broker, tasks, configure):
    configure(USE_TZ=False, TIME_ZONE="Asia/Tokyo")
    tasks.add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
    (waiting,) = broker.queue("default").each("delayed")
    assert abs(
        datetime.fromisoformat(open_peeked(waiting)["headers"]["eta"]) - datetime.now(UTC) - timedelta(hours=1)
    ) < timedelta(minutes=1)


def test_the_most_urgent_goes_first_where_that_is_zero(app, broker, tasks):
    app.conf.broker_transport_options = {"priority_order": "redis"}
    ids = [tasks.mail.using(priority=priority).enqueue("a").id for priority in (-100, 100)]
    listed = broker._engine.inspect.page("mail", View("ready"), 10).messages
    assert [each.message.task_id for each in listed] == ids[::-1]


def test_a_task_in_work_is_running(broker, tasks):
    sent = tasks.add.enqueue(1)
    broker.queue("default").take(timeout=10)
    assert tasks.add.get_result(sent.id).status is TaskResultStatus.RUNNING


NOT_TASKS = [
    *("shop_tasks.plain", "os.getcwd", "os.system", "os.path.join", "shop_tasks:add", "shop_tasks.add.func", "a.b:c"),
    *("shop_tasks.__class__", "shop_tasks.add.__class__", "shop_tasks.__builtins__.exec", "builtins.exec", "alias.add"),
    *("", ".", "add", ".add", "shop_tasks.", "\ud800.add", 5, None, ["shop_tasks.add"], {"a": 1}, "x" * 9_000),
]


@pytest.fixture
def alias(tasks):
    """A task under another module's name."""
    sys.modules["alias"] = types.ModuleType("alias")
    sys.modules["alias"].add = tasks.add
    yield
    del sys.modules["alias"]


@pytest.mark.parametrize("path", NOT_TASKS)
def test_only_tasks_that_are_registered_have_a_path(alias, path):
    from celery_fdb.contrib.django.backend import registered

    assert registered(path) is None


@pytest.mark.parametrize("path", ["sprung", "sprung.task", "sprung.inner.task", "shop_tasks.sprung.task"])
def test_no_path_is_imported(tasks, tmp_path, path):
    from celery_fdb.contrib.django.backend import registered

    (tmp_path / "sprung.py").write_text("raise AssertionError('imported')")
    assert registered(path) is None
    with pytest.raises(AssertionError, match="imported"):  # it can be
        importlib.import_module("sprung")


def test_modules_of_tasks_are_loaded_by_the_settings(app, configure, tmp_path, monkeypatch):
    (tmp_path / "other_jobs.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    from celery_fdb.contrib.django.backend import _task

    configure(TASKS={"default": {**BACKEND, "OPTIONS": {"modules": ["other_jobs"]}}})
    assert _task("other_jobs.add", "default").call(1, 2) == 3
    del sys.modules["other_jobs"]


@pytest.mark.parametrize(
    ("path", "alias"), [("os.getcwd", "default"), ("shop_tasks.add", "nobody's"), ("shop_tasks.add", ["default"])]
)
def test_a_message_that_names_no_task_fails_and_is_a_dead_letter(app, broker, tasks, worker, path, alias):
    sent = app.send_task(RUN, (path, [1], {}, alias, timezone.now().isoformat()), queue="default")
    with worker():
        with pytest.raises((ValueError, Reject), match=r"ValueError\(.* is not a "):
            sent.get(timeout=20, interval=0.02)
        assert broker.queue("default.dead").take(timeout=20) is not None
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result(sent.id)


def test_an_error_of_a_module_of_tasks_is_raised_as_it_is(app, broker, configure, tmp_path, monkeypatch):
    """It looked as if the task did not exist."""
    (tmp_path / "broken_jobs.py").write_text("from celery import current_app\ncurrent_app.tasks['shop.send']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    configure(TASKS={"default": {**BACKEND, "OPTIONS": {"modules": ["broken_jobs"]}}})
    sent = app.send_task(RUN, ("broken_jobs.add", [], {}, "default", timezone.now().isoformat()), queue="default")
    with pytest.raises(NotRegistered, match=r"shop\.send"):
        default_task_backend.get_result(sent.id)


@pytest.mark.parametrize("arguments", [("os.getcwd", [], {}, "default", "now"), (), ("a",), (5, 5, 5, 5, 5)])
def test_a_waiting_message_that_enqueue_did_not_publish_has_no_result(app, broker, arguments):
    sent = app.send_task(RUN, arguments, queue="default")
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result(sent.id)


def test_a_waiting_message_is_never_unpickled(app, broker, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("unpickled"))
    sent = app.send_task(RUN, ("shop_tasks.add", [], {}, "default", "now"), queue="default", serializer="pickle")
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result(sent.id)


def test_what_is_refused_is_not_sent(broker, tasks):
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name="elsewhere")
    with pytest.raises(TypeError):
        tasks.add.enqueue(object())
    assert broker.queues() == {}


def test_what_a_publisher_says_of_retries_fills_no_memory(app, tasks):
    sent = tasks.add.enqueue(2, other=3)
    arguments = [tasks.add.module_path, [2], {"other": 3}, "default", sent.enqueued_at.isoformat()]
    meta = {"args": arguments, "status": "FAILURE", "result": None, "worker": "w", "retries": 10**10}
    assert len(backend_module._finished(sent.id, meta).worker_ids) == backend_module.MOST_ATTEMPTS


@pytest.mark.parametrize(
    "change", [{"result": None}, {"result": {}}, {"date_done": "x"}, {"retries": "x"}, {"retries": float("inf")}]
)
def test_a_stored_result_of_another_shape_is_none(app, tasks, change):
    sent = tasks.add.enqueue(2, other=3)
    arguments = [tasks.add.module_path, [2], {"other": 3}, "default", sent.enqueued_at.isoformat()]
    result = {"started_at": sent.enqueued_at.isoformat(), "return_value": 5}
    meta = {"args": arguments, "status": "SUCCESS", "result": result, "worker": "w", "date_done": None, **change}
    with pytest.raises(TaskResultDoesNotExist):
        backend_module._finished(sent.id, meta)


def test_an_unknown_result(broker, tasks):
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result("nobody's")


def test_without_a_result_backend_tasks_are_sent_and_results_refused(app, broker, tasks):
    app.conf.result_extended = False
    (warning,) = default_task_backend.check()
    assert warning.id == "celery_fdb.W013"
    assert not default_task_backend.supports_get_result
    sent = tasks.add.enqueue(1)
    assert broker.queue("default").count() == 1
    with pytest.raises(NotImplementedError, match="CELERY_RESULT_EXTENDED"):
        default_task_backend.get_result(sent.id)


def test_an_unusable_result_backend_is_left_to_its_own_check(app, tasks, monkeypatch):
    monkeypatch.setattr(backend_module.CeleryBackend, "app", Celery(backend="fdb:///a/b", set_as_current=False))
    assert default_task_backend.check() == []
