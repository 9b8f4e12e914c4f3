"""Celery's interface, without a worker: what one would do is done by hand, so that it can go wrong on purpose."""

import os
import pickle
import threading
import time
import uuid
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, states
from celery.app.task import Context
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult
from kit.celery_versions import since_celery
from kit.processes import in_child
from kombu.exceptions import ContentDisallowed, EncodeError, OperationalError

from celery_fdb.results import FdbBackend, ResultTooLarge
from kombu_fdb.errors import CommitUnknown, OptionError, StoreFull, StoreUnavailable
from kombu_fdb.store.retry import ENDING_S

# -- URL, options, the open store ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("fdb+sqlite:////var/lib/app/b.db", "fdb+sqlite:////var/lib/app/b.db"),
        ("fdb://", "fdb://"),
        ("fdb:////etc/app.cluster", "fdb:////etc/app.cluster"),
        ("fdb://shop:s3cret@10.0.0.1:4500/shop", "fdb://shop:**@10.0.0.1:4500/shop"),
    ],
)
def test_the_url_is_found_and_shown_without_its_secret(url, shown):
    app = Celery("a", backend=url, set_as_current=False)
    assert type(app.backend) is FdbBackend
    assert app.backend.as_uri() == shown
    assert app.backend.as_uri(include_password=True) == url
    assert "s3cret" not in repr(app.backend.location)


@pytest.mark.parametrize("name", ["namespaze", "max_mesage_size"])
def test_an_unknown_option_names_the_nearest(name):
    app = Celery("a", backend="fdb://", set_as_current=False)
    app.conf.result_backend_transport_options = {name: 1}
    with pytest.raises(OptionError, match="Did you mean"):
        _ = app.backend


def test_options_of_other_backends_and_the_retry_policy_pass():
    app = Celery("a", backend="fdb://", set_as_current=False)
    app.conf.result_backend_transport_options = {
        "retry_policy": {"max_retries": 3},
        "global_keyprefix": "x",
        "result_chord_ordered": True,
        "namespace": "shop",
    }
    assert app.backend.retry_policy["max_retries"] == 3
    assert app.backend.location.namespace == "shop"


@pytest.mark.parametrize("own", [{}, {"max_message_size": 5000}, {"retry_policy": {"max_retries": 1}}])
def test_broker_and_results_share_one_open_store(make_app, own):
    app = make_app(broker_transport_options={"session_ttl": 7.0}, result_backend_transport_options=own)
    assert app.backend.options.session_ttl == 7.0
    assert app.backend.options.max_message_size == own.get("max_message_size", 8 * 1024 * 1024)
    with app.connection_for_write() as connection:
        assert connection.default_channel.transport.store is app.backend.client


def test_results_in_another_namespace_are_apart(make_app):
    app = make_app(result_backend_transport_options={"namespace": None, "session_ttl": 9.0})
    broker = make_app()
    app.backend.store_result("a", 1, states.SUCCESS)
    assert broker.AsyncResult("a").get(timeout=5) == 1
    if app.backend.url.startswith("fdb+sqlite"):
        apart = make_app(result_backend_transport_options={"namespace": "apart"})
        assert apart.AsyncResult("a").state == states.PENDING


def test_one_backend_for_all_threads(app, threads):
    found = []
    threads.submit(lambda: found.append(app.backend)).result()
    assert found == [app.backend]


def test_application_and_backend_can_be_pickled(app):
    copy = pickle.loads(pickle.dumps(app.backend))
    assert (copy.url, copy.expires, type(copy)) == (app.backend.url, app.backend.expires, FdbBackend)
    result = app.AsyncResult("a")
    assert pickle.loads(pickle.dumps(result)).backend.url == app.backend.url
    assert pickle.loads(pickle.dumps(app)).backend.url == app.backend.url


def test_a_forked_child_opens_a_store_of_its_own(app, backend):
    backend.store_result("parent", 1, states.SUCCESS)

    def child():
        assert app.AsyncResult("parent").get(timeout=10) == 1
        backend.store_result("child", 2, states.SUCCESS)

    in_child(child)
    assert app.AsyncResult("child").get(timeout=10) == 2


# -- states ----------------------------------------------------------------------------------------------------------


def test_states_and_results(app, backend):
    result = app.AsyncResult("a")
    assert (result.state, result.result) == (states.PENDING, None)
    backend.mark_as_started("a", pid=7)
    assert (result.state, result.info) == (states.STARTED, {"pid": 7})
    backend.mark_as_done("a", {"x": [1, "ä", None]})
    assert result.get(timeout=5) == {"x": [1, "ä", None]}
    assert result.successful()


def test_a_state_need_not_be_text(app, backend):
    for state in (None, 7):
        backend.store_result("a", {"done": 1}, state)
        result = app.AsyncResult("a")
        assert (result.state, result.info, result.ready()) == (state, {"done": 1}, False)


def test_a_failure_is_raised_where_it_is_asked_for(app, backend):
    backend.mark_as_failure("a", KeyError("missing"), traceback="File ...")
    result = app.AsyncResult("a")
    with pytest.raises(KeyError, match="missing"):
        result.get(timeout=5)
    assert result.traceback == "File ..."
    assert isinstance(result.get(timeout=5, propagate=False), KeyError)


def test_ids_of_every_sort(app, backend):
    task_id = uuid.uuid4()
    backend.mark_as_done(task_id, 1)
    assert app.AsyncResult(str(task_id)).get(timeout=5) == app.AsyncResult(task_id).get(timeout=5) == 1
    assert backend.get_state(str(task_id).encode()) == states.SUCCESS
    with pytest.raises(ValueError, match="empty"):
        backend.mark_as_done("", 1)


def test_extended_results(make_app):
    app = make_app(result_extended=True)
    request = Context(id="a", task="add", args=[1, 2], kwargs={}, retries=2, hostname="w@h", children=[])
    request.delivery_info = {"routing_key": "celery"}
    app.backend.mark_as_done("a", 3, request=request)
    result = app.AsyncResult("a")
    assert (result.name, result.args, result.retries, result.worker, result.queue) == (
        "add",
        [1, 2],
        2,
        "w@h",
        "celery",
    )


@pytest.mark.parametrize(("version", "told"), [((5, 6, 3), True), ((5, 7, 0), False)])
def test_an_older_celery_does_not_compress_and_says_so(make_app, monkeypatch, caplog, version, told):
    monkeypatch.setattr("celery.VERSION", version)
    assert make_app(result_compression="gzip").backend
    assert ("result_compression needs Celery 5.7, and this is" in caplog.text) == told


@since_celery(5, 7)
def test_a_result_exists_once_it_has_a_state(app, backend):
    assert not app.AsyncResult("a").exists()
    backend.mark_as_started("a")
    assert app.AsyncResult("a").exists()


@pytest.mark.parametrize("compression", [None, pytest.param("gzip", marks=since_celery(5, 7))])
def test_a_result_of_a_megabyte(make_app, compression, scan):
    app = make_app(result_compression=compression)
    app.backend.store_result("a", "x" * 1_000_000, states.SUCCESS)
    assert app.AsyncResult("a").get(timeout=5) == "x" * 1_000_000
    assert len(scan(app.backend.store)) == (2 if compression else 2 + 12)  # record and expiry; chunks


def test_a_result_over_the_maximum_is_refused_with_the_fix(make_app, scan):
    app = make_app(result_backend_transport_options={"max_message_size": 5000})
    with pytest.raises(ResultTooLarge, match=r"size: .*, max message size: 5000.*reference"):
        app.backend.store_result("a", "x" * 5000, states.SUCCESS)
    assert scan(app.backend.store) == []


@pytest.fixture
def small(make_app):
    """With extended results of so many bytes at most."""

    def small(size, serializer):
        conf = {"result_extended": True, "result_serializer": serializer, "result_accept_content": [serializer]}
        return make_app(result_backend_transport_options={"max_message_size": size}, **conf)

    return small


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("stamps", [{}, {"tenant": "z" * 8000}])
def test_an_error_is_stored_however_small_the_maximum_is(small, serializer, stamps):
    app = small(1024, serializer)
    request = Context(id="a", task="add", args=[], kwargs={}, stamped_headers=[*stamps], stamps=stamps)
    app.backend.mark_as_failure("a", ValueError("\N{GRINNING FACE}" * 8000), "Traceback", request=request)
    meta = app.backend.get_task_meta("a")
    assert (meta["status"], meta["name"]) == (states.FAILURE, "add")
    assert isinstance(meta["result"], ResultTooLarge)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("size", [10, 8000])
def test_an_error_over_the_maximum_is_a_failure_that_shows_its_beginning(small, serializer, size):
    """``size``: of the task's arguments, which an extended result has."""
    app = small(8000, serializer)
    request = Context(id="a", task="add", args=["z" * size], kwargs={})
    app.backend.mark_as_failure("a", ValueError("y" * 8000), "Traceback of " + "y" * 8000, request=request)
    meta = app.backend.get_task_meta("a")
    assert (meta["status"], meta["name"]) == (states.FAILURE, "add")
    assert isinstance(meta["result"], ResultTooLarge)
    assert "It was" in str(meta["result"])
    assert "ValueError" in str(meta["result"])
    assert (meta["args"] is None) is (size == 8000)


def test_a_failure_is_stored_where_the_tasks_that_it_has_published_are_too_many(make_app):
    app = make_app(result_backend_transport_options={"max_message_size": 8000})
    request = Context(id="a", task="add")
    request.children.extend(app.AsyncResult(f"{number:036}") for number in range(200))
    app.backend.mark_as_failure("a", ValueError("wrong"), request=request)
    meta = app.backend.get_task_meta("a")
    assert (meta["status"], meta["children"]) == (states.FAILURE, None)
    assert "ValueError" in str(meta["result"])


def test_no_pickle_by_default(make_app):
    writer = make_app(result_serializer="pickle", result_accept_content=["pickle"])
    writer.backend.store_result("a", {1, 2}, states.SUCCESS)
    reader = make_app()
    with pytest.raises(ContentDisallowed):
        reader.AsyncResult("a", backend=_with_serializer(reader, "pickle")).get(timeout=5)
    with pytest.raises(EncodeError):
        reader.backend.store_result("b", object(), states.SUCCESS)


def _with_serializer(app, serializer):
    return FdbBackend(app, url=app.backend.url, serializer=serializer)


# -- expiry and forgetting -------------------------------------------------------------------------------------------


def test_forget_leaves_no_key(app, backend, scan):
    backend.store_result("a", "x" * 300_000, states.SUCCESS)
    result = GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")], app=app)
    result.save()
    assert GroupResult.restore("g", app=app) == result
    result.forget()
    result.delete()
    assert scan(backend.store) == []
    assert GroupResult.restore("g", app=app) is None


def test_expired_results_are_deleted(app, backend, clock_of_backend, scan):
    backend.expires, backend.failure_expires = 60, 600
    backend.mark_as_done("a", "x" * 300_000)
    backend.mark_as_failure("b", ValueError(1))
    GroupResult("g", [app.AsyncResult("a")], app=app).save()
    clock_of_backend.advance(59)
    app.tasks["celery.backend_cleanup"]()
    assert app.AsyncResult("a").state == states.SUCCESS
    clock_of_backend.advance(2)
    backend.cleanup()
    assert [app.AsyncResult(each).state for each in "ab"] == [states.PENDING, states.FAILURE]
    clock_of_backend.advance(600)
    backend.tend()
    assert scan(backend.store) == []


@pytest.mark.parametrize("never", [None, 0])
def test_results_that_never_expire(make_app, never, scan):
    app = make_app(result_expires=never)
    app.backend.mark_as_done("a", 1)
    assert scan(app.backend.store) == [app.backend.store.keys.task("a")]


def test_expires_as_celery_takes_it(make_app):
    app = make_app(result_expires=timedelta(hours=1), result_failure_expires=5, result_chord_expires=timedelta(hours=2))
    assert (app.backend.expires, app.backend.failure_expires, app.backend.chord_expires) == (3600, 5, 7200)


def test_a_child_sweeps_after_a_task_now_and_then(backend, clock_of_backend, scan, monkeypatch):
    backend.mark_as_done("a", 1)
    clock_of_backend.advance(10 * 86_400)
    backend.process_cleanup()
    assert scan(backend.store)
    monkeypatch.setattr(backend, "_next_s", 0.0)
    backend.process_cleanup()
    assert scan(backend.store) == []


# -- a store that does not answer ------------------------------------------------------------------------------------


@pytest.fixture
def down(backend, monkeypatch):
    """While set, every transaction of the store fails at once."""
    down = threading.Event()
    begin = backend.client.database.begin

    def fail(**kwargs):
        if down.is_set():
            raise StoreUnavailable("down")
        return begin(**kwargs)

    class Database:
        commit_may_be_unknown = True
        writers_take_turns = False
        begin = staticmethod(fail)

    monkeypatch.setattr(backend.store, "_retry", _retry_on(backend, Database()))
    return down


def _retry_on(backend, database):
    from kombu_fdb.store.retry import Retry

    old = backend.store._retry
    return Retry(database, old.clock, old.pauses)


def test_get_waits_for_the_store(app, backend, down, caplog):
    down.set()
    with pytest.raises(CeleryTimeoutError) as unanswered:
        app.AsyncResult("a").get(timeout=0.3)
    assert isinstance(pickle.loads(pickle.dumps(unanswered.value)), OperationalError)
    assert "can't be read" in caplog.text
    with pytest.raises(StoreUnavailable):
        _ = app.AsyncResult("a").state
    timer = threading.Timer(0.2, down.clear)
    timer.start()
    backend.mark_as_done("a", 1, request=Context())  # as a worker does
    assert app.AsyncResult("a").get(timeout=20) == 1
    timer.join()
    with pytest.raises(CeleryTimeoutError) as answered:  # the store says that there is no result
        app.AsyncResult("b").get(timeout=0.3)
    assert not isinstance(answered.value, OperationalError)


def test_get_of_the_end_of_a_chain_waits_for_the_store(app, down):
    end = app.AsyncResult("end")
    end.parent = app.AsyncResult("begin")
    with pytest.raises(CeleryTimeoutError):  # not the error of a look at the parent
        end.get(timeout=1, interval=0.05, on_interval=lambda _: down.set())


def test_a_write_gives_up_as_the_retry_policy_says(make_app, monkeypatch, caplog):
    policy = {"retry_policy": {"max_retries": 2, "interval_start": 0, "interval_step": 0}}
    app = make_app(result_backend_transport_options=policy)
    tried = []

    def fail(*_, **__):
        tried.append(1)
        raise CommitUnknown

    monkeypatch.setattr(app.backend.store, "store", fail)
    with pytest.raises(CommitUnknown):
        app.backend.mark_as_done("a", 1, request=Context())
    assert len(tried) == 3
    assert "attempt 3 follows" in caplog.text
    assert app.backend.exception_safe_to_retry(CommitUnknown())
    assert not app.backend.exception_safe_to_retry(ValueError())


@pytest.fixture
def full(backend, monkeypatch):
    """The pauses of a worker whose disk is full."""
    slept = []
    monkeypatch.setattr("celery_fdb.results.backend.monotonic", lambda: sum(slept))
    monkeypatch.setattr("kombu.utils.functional.time", lambda: 1e9 * sum(slept))  # a clock that is set forward
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
    monkeypatch.setattr(backend.store, "store", Mock(side_effect=StoreFull))
    return slept


def test_a_write_that_is_refused_at_once_is_repeated_for_two_minutes(backend, full):
    request = Context()
    with pytest.raises(StoreFull):
        backend.mark_as_done("a", 1, request=request)
    with pytest.raises(StoreFull):  # Celery stores the error as the task's failure
        backend.mark_as_failure("a", StoreFull(), request=request)
    assert 120 <= sum(full) <= 130


@pytest.mark.parametrize("stop", ["should_stop", "should_terminate"])
def test_a_worker_that_was_told_to_stop_repeats_a_write_for_seconds(backend, full, monkeypatch, stop):
    monkeypatch.setattr(f"celery.worker.state.{stop}", True)
    with pytest.raises(StoreFull):
        backend.mark_as_done("a", 1, request=Context())
    assert ENDING_S <= sum(full) <= ENDING_S + 1


@pytest.mark.foundationdb
def test_get_gives_up_in_time_if_there_is_no_cluster():
    app = Celery("a", backend="fdb://nobody:here@127.0.0.1:1/x", set_as_current=False)
    app.conf.broker_connection_timeout = 30.0
    begun = time.monotonic()
    with pytest.raises(CeleryTimeoutError) as unanswered:
        app.AsyncResult("a").get(timeout=1.0)
    assert isinstance(unanswered.value, OperationalError)
    assert time.monotonic() - begun < 10


def test_a_store_that_can_not_be_reached_is_a_clear_error():
    app = Celery("a", backend="fdb+sqlite:////nowhere/results.db", set_as_current=False)
    app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    with pytest.raises(StoreUnavailable, match="/nowhere"):
        _ = app.AsyncResult("a").state


# -- workers ----------------------------------------------------------------------------------------------------------


def test_the_worker_starts_its_sweeper_and_stops_it(app, backend):
    from celery.signals import worker_ready, worker_shutting_down

    class Consumer:
        pass

    consumer = Consumer()
    consumer.app = app
    worker_ready.send(sender=consumer)
    named = [thread for thread in threading.enumerate() if thread.name == "celery-fdb-sweeper"]
    worker_ready.send(sender=consumer)
    assert len(named) == 1
    worker_shutting_down.send(sender="w@h", sig="TERM", how="Warm", exitcode=0)
    named[0].join(10)
    assert not named[0].is_alive()
    assert os.getpid() == backend._sweeper_pid


def test_a_result_that_leaves_the_cache_during_the_look_is_read(backend):
    """From Python 3.12 on, ``get`` of Celery's cache is two steps: between them, another thread had made room."""

    class Leaving(dict[str, Any]):
        def get(self, key, default=None):
            return self[key]

        def __getitem__(self, key):
            raise KeyError(key)

    backend.store_result("t", 1, states.SUCCESS)
    backend._cache = Leaving()
    assert [task_id for task_id, _ in backend.get_many(["t"], timeout=10)] == ["t"]
