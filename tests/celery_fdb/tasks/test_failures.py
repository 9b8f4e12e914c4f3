"""What is told of a failure, who keeps failures, and how they get into the store. With workers: tests/acceptance."""

import json

import pytest
from celery import Celery, Task
from celery._state import _task_stack
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject, Retry
from celery.utils.serialization import UnpickleableExceptionWrapper
from celery.worker.request import Request
from kit.duties import replay
from kit.faults import Fault, Faults, FaultyDatabase
from kombu import Connection

from celery_fdb.tasks import failures
from celery_fdb.tasks.task import Backoff
from kombu_fdb.errors import InvalidArgument, StoreUnavailable
from kombu_fdb.keyspace.codec import headers_of
from kombu_fdb.model import Death
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.testing.stores import MemoryStores
from kombu_fdb.transport.envelope import without_deaths


@pytest.fixture
def app(tmp_path):
    app = Celery("failures", broker=f"fdb+sqlite:///{tmp_path}/broker.db", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def channel(app):
    with app.connection() as connection:
        yield connection.default_channel


def work():
    pass


def publish(channel, **options):
    with channel.connection.client.Producer() as producer:
        producer.publish({"a": 1}, routing_key="q", headers={"task": "t", "id": "1"}, **options)


def dead(channel, queue="q.dead"):
    return channel.engine.inspect.peek(queue, 10)


# -- who keeps failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "option", "kept"),
    [
        (None, None, False),
        (True, None, True),
        (False, True, True),
        (True, False, False),
    ],
)
def test_the_tasks_option_comes_before_the_setting(app, setting, option, kept):
    failures.install(app)
    if setting is not None:
        app.conf.fdb_dead_letter_failures = setting
    options = {} if option is None else {"dead_letter": option}
    task = app.task(work, shared=False, name="t", **options)
    assert failures.keeps_failures(task) is kept


def test_install_is_idempotent(app):
    failures.install(app)
    failures.install(app)
    assert list(app.steps["consumer"]) == [failures.FailureStep]


class Consumer:
    """What a bootstep sees of a worker."""

    def __init__(self, app):
        self.app = app
        self.on_decode_error = self.on_unknown_task = self.on_unknown_message = self.on_invalid_task = None


def test_a_task_keeps_the_request_class_its_user_gave_it(app):
    class Mine(Request):
        pass

    mine = app.task(work, shared=False, name="mine", Request=Mine)
    plain = app.task(work, shared=False, name="plain")
    failures.FailureStep(Consumer(app))
    failures.FailureStep(Consumer(app))
    assert [each.__name__ for each in mine.Request.__mro__[:3]] == ["Request", "FailureRequest", "Mine"]
    assert plain.Request.__mro__[1:3] == (failures.FailureRequest, Request)


# -- what is told ------------------------------------------------------------------------------------------------------


def test_details_are_bounded_and_of_a_traceback_the_end_stays():
    told = failures.details_of(ValueError("x" * 10_000), "\n".join(["password = hunter2"] * 1_000 + ["end"]))
    assert (len(told["error"]), told["traceback"][-3:]) == (2_000, "end")
    assert 4_000 < len(told["traceback"]) <= 4_096
    assert "hunter2" not in masked_text(told["traceback"]), "no line is cut in its name"


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, RecursionError])
def test_an_exception_whose_text_would_end_the_worker(raised):
    class Hostile(Exception):
        def __str__(self):
            raise raised

    assert failures.details_of(Hostile())["error"] == "<unprintable>"
    assert failures._attempt(Hostile())["error"].endswith("Hostile: <unprintable>")


def test_details_of_strange_exceptions():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert failures.details_of(Mute())["error"] == "<unprintable>"
    told = failures.details_of(Reject(KeyError("reason")))
    assert (told["error_class"], told["error"]) == ("builtins.KeyError", "'reason'")
    assert failures.details_of(Reject("text"))["error_class"] == "celery.exceptions.Reject"
    bare = failures.details_of(Reject(requeue=False), "the traceback")
    assert bare == {"error_class": "celery.exceptions.Reject", "error": "None", "traceback": "the traceback"}
    wrapped = UnpickleableExceptionWrapper("my.module", "MyError", ("text",))
    assert failures.details_of(wrapped)["error_class"] == "my.module.MyError"


def test_attempts_are_bounded_and_foreign_ones_ignored():
    earlier = "not ours"
    for number in range(30):
        earlier = failures._attempts(earlier, ValueError(f"{number}" * 500))
    assert len(earlier) == failures.MOST_ATTEMPTS
    assert earlier[-1]["error"].startswith("builtins.ValueError: 29")
    assert len(json.dumps(earlier)) < 5_000


# -- into the store ----------------------------------------------------------------------------------------------------


def test_an_explained_rejection_and_acknowledgement(channel):
    for _ in range(2):
        publish(channel)
    rejected, done = channel.basic_get("q"), channel.basic_get("q")
    for message in (rejected, done):
        channel.qos.explain(message.delivery_tag, {"error": "why"}, reason="malformed")
    rejected.reject()
    done.ack()
    (letter,) = dead(channel)
    assert (letter.deaths[0].reason, letter.deaths[0].details) == ("malformed", {"error": "why"})
    assert channel.credit.held._explanations == {}
    channel.qos.explain(rejected.delivery_tag, {"error": "too late"})
    assert channel.credit.held._explanations == {}


def test_a_copy_of_an_acknowledged_message_is_what_was_published(channel):
    """Priority, body, headers and history; twice, as when a replayed task fails again."""
    publish(channel, priority=5)
    for life in (1, 2):
        message = channel.basic_get("q", no_ack=True)
        assert message.payload == {"a": 1}
        failures.bury_copy(channel, message, {"error": f"life {life}"})
        (letter,) = dead(channel)
        assert (letter.priority, letter.task_id) == (5, "1")
        assert [(death.count, death.details) for death in letter.deaths] == [(life, {"error": f"life {life}"})]
        replay(channel.engine, "q", 1)
    assert "x-death" in channel.basic_get("q").headers


def test_a_copy_waits_for_a_store_that_does_not_answer(channel, monkeypatch):
    publish(channel)
    message = channel.basic_get("q", no_ack=True)
    bury_copy, calls = channel.engine.publisher.bury_copy, []

    def fails(*_, **__):
        raise StoreUnavailable

    monkeypatch.setattr(channel.engine.publisher, "bury_copy", fails)
    monkeypatch.setattr(channel.client, "later", calls.append)
    failures.bury_copy(channel, message, {"error": "x"})
    monkeypatch.setattr(channel.engine.publisher, "bury_copy", bury_copy)
    assert dead(channel) == []
    (call,) = calls
    call()
    assert len(dead(channel)) == 1


@pytest.mark.parametrize("invented", ["x", [1], [{"queue": "q"}], {"a": 1}])
def test_an_invented_history_is_none(invented):
    assert without_deaths({"x-death": invented, "x-first-death-queue": "q", "mine": 1}) == ({"mine": 1}, ())


def test_a_history_in_headers_is_read_back():
    entry = {"queue": "q", "reason": "rejected", "count": 2, "time": 3, "exchange": "e", "routing-keys": ["k"], "z": 1}
    assert without_deaths({"x-death": [entry]}) == ({}, (Death("q", "rejected", 2, 3000, "e", ("k",), {"z": 1}),))


def test_a_retry_is_not_taken_for_the_message_that_was_replayed(app, channel):
    """Celery 5.5 publishes it with all headers that came with the message."""
    failures.install(app)

    @app.task(bind=True, shared=False)
    def retry(self):
        raise self.retry(countdown=0, headers={"x-death": [], "x-first-death-queue": "q", "mine": "stays"})

    _task_stack.push(retry)
    retry.push_request(id="1", called_directly=False, args=(), kwargs={}, delivery_info={"routing_key": "q"})
    try:
        with pytest.raises(Retry):
            retry.run()
    finally:
        retry.pop_request()
        _task_stack.pop()
    (waiting,) = channel.engine.inspect.find_task("1")
    assert [name for name in headers_of(waiting.payload) if name.startswith("x-") or name == "mine"] == ["mine"]


def test_an_unknown_schedule_is_an_error_when_the_task_is_made(app):
    class ScheduledTask(Backoff, Task):
        pass

    with pytest.raises(InvalidArgument, match="processing-queue"):
        app.task(work, shared=False, base=ScheduledTask, backoff="whenever", lazy=False, name="t")


# -- another broker ----------------------------------------------------------------------------------------------------


def test_with_another_broker_celery_does_as_ever():
    """The last error reaches the result, and a message that can't be decoded is no trouble."""
    app = Celery("elsewhere", broker="memory://", backend="cache+memory://", set_as_current=False)
    failures.install(app)

    @app.task(
        bind=True, shared=False, max_retries=1, autoretry_for=(ValueError,), default_retry_delay=0, dead_letter=True
    )
    def fail(self):
        raise ValueError(f"attempt {self.request.retries}")

    with start_worker(app, perform_ping_check=False, pool="solo", shutdown_timeout=20):
        with app.connection_for_write() as connection, connection.Producer() as producer:
            producer.publish(b"{", routing_key="celery", content_type="application/json", content_encoding="utf-8")
        for late in (True, False):
            app.tasks[fail.name].acks_late = late
            with pytest.raises(ValueError, match="attempt 1"):
                fail.delay().get(timeout=20)
    app.close()


@pytest.mark.parametrize("lands_s", [None, 0.0, 3.0])
def test_a_copy_whose_answer_was_lost_is_stored_once(monkeypatch, lands_s):
    faults = Faults()
    with (
        MemoryStores(lambda: FaultyDatabase(faults=faults)) as stores,
        Connection("fdb+memory://failures") as connection,
    ):
        channel = connection.default_channel
        publish(channel)
        message, calls = channel.basic_get("q", no_ack=True), []
        monkeypatch.setattr(channel.client, "later", calls.append)
        channel.client.session().stop()  # so that the next commit is this thread's
        faults.at_commits(Fault.COMMIT_LATE)
        faults.at_landings(lands_s)
        failures.bury_copy(channel, message, {"error": "x"})
        (call,) = calls
        call()
        stores.store("failures").land_late_commits()
        assert len(dead(channel)) == 1
