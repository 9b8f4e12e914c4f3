"""Failed tasks among the dead letters, as real workers bury them."""

import time
from datetime import datetime
from functools import partial

import pytest

from kombu_fdb.api.dead_letters import DeadLetters

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture
def failing(app, fresh):
    return fresh("failing_tasks")


@pytest.fixture(name="start")
def _start(start):
    return partial(start, "-c", "1", app="failing_tasks")


@pytest.fixture
def letters(engine):
    class Holder:
        pass

    holder = Holder()
    holder.engine = engine
    return DeadLetters(holder, "celery.dead")


@pytest.fixture
def only(letters, until, engine):
    """The one dead letter there is in the end, and nothing else."""

    def only(dead_queue="celery.dead"):
        letters.dead_queue = dead_queue
        until(lambda: letters.count()[dead_queue])
        until(lambda: engine.inspect.counts("celery").leased == 0)
        (letter,) = letters.list()
        return letter

    return only


@pytest.mark.parametrize("pool", POOLS, indirect=True)
def test_a_failed_task_is_a_dead_letter(failing, start, until, letters, pool):
    """With and without acks_late, in every pool."""
    start(pool=pool)
    sent = {
        f"failing_tasks.{each.__name__}": each.apply_async(("it",), priority=6).id
        for each in (failing.fail, failing.fail_early)
    }
    until(lambda: letters.count()["celery.dead"] == 2)
    for letter in letters.list():
        death = letter.deaths[0]
        told = death.details
        assert letter.task_id == told["task_id"] == sent.pop(told["task"])
        assert (death.queue, death.reason, letter.priority) == ("celery", "rejected", 6)
        assert (told["error_class"], told["error"]) == ("failing_tasks.Broken", "cannot it")
        assert told["worker"] == "w0@test"
        assert told["traceback"].rstrip().endswith("failing_tasks.Broken: cannot it")
        assert "raise Broken" in told["traceback"]
        (attempt,) = told["attempts"]
        assert attempt["error"] == "failing_tasks.Broken: cannot it"
        assert abs(datetime.fromisoformat(attempt["time"]).timestamp() - time.time()) < 30


def test_a_task_keeps_its_failures_only_if_asked_to(failing, broker, start, until, engine, letters):
    start()
    failing.fail_quietly.delay("quiet")
    failing.succeed.delay("well")
    until(lambda: broker.marks("run", "well"))
    until(lambda: engine.inspect.counts("celery").leased == 0)
    assert letters.count() == {"celery.dead": 0}


def test_the_last_of_all_retries_tells_of_each_attempt(failing, broker, start, only):
    """The retries wait in the store by a named schedule."""
    start()
    failing.stubborn.delay("it")
    told = only().deaths[0].details
    assert [each["error"] for each in told["attempts"]] == [f"failing_tasks.Broken: attempt {n}" for n in range(3)]
    ended = [datetime.fromisoformat(each["time"]) for each in told["attempts"]]
    assert ended == sorted(ended)
    assert told["error"] == "attempt 2"
    # A pause is counted from before the end of its attempt is noted, so it is measured between two beginnings.
    first, second, third = (each.time for each in broker.marks("run", "it"))
    assert (second - first >= 0.1, third - second >= 0.3) == (True, True)


def test_a_replayed_task_begins_anew_and_keeps_its_history(failing, broker, start, only, letters, until):
    start()
    failing.stubborn.apply_async(("it",), expires=30)
    only()
    assert letters.replay() == 1
    until(lambda: len(broker.marks("run", "it")) == 6, say=lambda: broker.count("run"))
    (death,) = only().deaths
    assert len(death.details["attempts"]) == 3, "its second life's"


def test_what_else_ends_a_task(failing, start, letters, until, engine):
    """``Reject`` without requeue, a killed child, the hard time limit."""
    start()
    for task in (failing.refuse, failing.die, failing.too_slow):
        task.delay("it")
    until(lambda: letters.count()["celery.dead"] == 3, say=letters.list)
    told = {letter.deaths[0].details["task"]: letter.deaths[0].details for letter in letters.list()}
    assert told["failing_tasks.refuse"]["error_class"] == "failing_tasks.Broken"
    assert told["failing_tasks.refuse"]["error"] == "never again"
    assert told["failing_tasks.die"]["error_class"].endswith(".WorkerLostError")
    assert told["failing_tasks.too_slow"]["error_class"].endswith(".TimeLimitExceeded")
    until(lambda: engine.inspect.counts("celery").leased == 0)


def test_a_task_that_kills_its_workers_past_the_delivery_limit(failing, broker, start, only):
    start()
    failing.poison.apply_async(("it",), queue="poison")
    death = only("poison.dead").deaths[0]
    assert death.reason == "delivery_limit"
    assert death.details["error_class"].endswith(".WorkerLostError")
    assert len(broker.marks("run", "it")) == 3


def test_an_unregistered_task_and_messages_celery_can_not_decode(app, start, letters, until):
    start()
    app.app.send_task("nobody.knows")
    with app.app.connection_for_write() as connection:
        producer = connection.Producer()
        task = {"task": "acceptance_app.note", "id": "1"}
        broken = {"routing_key": "celery", "content_type": "application/json", "content_encoding": "utf-8"}
        producer.publish(b"{", headers=task, **broken)
        producer.publish(b"{", **broken)
        producer.publish("hello", routing_key="celery")
        producer.publish(["hello"], routing_key="celery", serializer="json")
    until(lambda: letters.count()["celery.dead"] == 5, say=letters.list)
    told = [(letter.deaths[0].reason, letter.deaths[0].details["error_class"]) for letter in letters.list()]
    assert sorted(told) == [
        ("malformed", "kombu.exceptions.ContentDisallowed"),
        ("malformed", "kombu.exceptions.DecodeError"),
        ("malformed", "kombu.exceptions.DecodeError"),
        ("rejected", "builtins.ValueError"),
        ("rejected", "celery.exceptions.NotRegistered"),
    ]
    assert letters.list(error="NotRegistered")[0].deaths[0].details["task"] == "nobody.knows"


def test_headers_tell_the_consumer_of_a_dead_letter_exchange(app, failing, start, engine, until):
    start()
    failing.fail.apply_async(("it",), queue="watched")
    until(lambda: engine.inspect.counts("graveyard").ready)
    with app.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("graveyard")
        entry = message.headers["x-death"][0]
        assert (entry["error"], entry["task"]) == ("cannot it", "failing_tasks.fail")
        message.ack()
