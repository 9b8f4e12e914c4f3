"""Task ids and dedup ids, as Celery and plain Kombu write them."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from celery.app.trace import build_tracer
from kombu import Producer, Queue

from kombu_fdb.transport import batched
from kombu_fdb.transport.envelope import dedup_of, task_id_of


def test_a_celery_task_is_found_and_cancelled_by_its_id(app, broker):
    now, later = app.tasks["send"].delay(1), app.tasks["send"].apply_async((2,), countdown=3600)
    assert [(each.queue, each.state) for each in broker.find(now.id) + broker.find(later.id)] == [
        ("q", "ready"),
        ("q", "delayed"),
    ]
    assert len(broker.cancel(later.id)) == 1
    assert len(broker.cancel(now.id)) == 1
    counts = broker.queue("q").stats()
    assert (counts.ready, counts.delayed, counts.leased) == (0, 0, 0)


def test_a_message_of_plain_kombu_is_found_by_its_message_id(connection, broker):
    Producer(connection).publish("hello", routing_key="q", message_id="m-1")
    assert len(broker.cancel("m-1")) == 1


def test_a_retried_web_request_publishes_once(app, broker):
    for _ in range(2):
        app.tasks["send"].apply_async((1,), headers={"dedup_id": "order-7"})
    assert broker.queue("q").count() == 1


def test_a_batch_with_a_duplicate(connection, broker):
    producer = Producer(connection)
    with batched(producer):
        for _ in range(3):
            producer.publish("hello", routing_key="q", MessageDeduplicationId="m")
    assert broker.queue("q").count() == 1


def test_a_mandatory_duplicate_is_not_returned(connection):
    returned = []
    queue = Queue("q", channel=connection)
    queue.declare()
    producer = Producer(connection, on_return=lambda *args: returned.append(args))
    for _ in range(2):
        producer.publish("hello", routing_key="q", headers={"dedup_id": "d"}, mandatory=True)
    assert returned == []


@pytest.mark.parametrize(
    ("headers", "properties", "expected"),
    [
        ({"dedup_id": "a", "dedup_window": 2}, {}, ("a", 2_000)),
        ({"dedup_id": "a", "dedup_window": "1.5"}, {}, ("a", 1_500)),
        ({"x-deduplication-id": "a"}, {}, ("a", 300_000)),
        ({}, {"MessageDeduplicationId": "a"}, ("a", 300_000)),
        ({"dedup_id": ""}, {}, ("", 0)),
        ({"dedup_id": "a", "retries": 1}, {}, ("", 0)),
        ({}, {}, ("", 0)),
    ],
)
def test_reading_the_dedup_id(headers, properties, expected):
    assert dedup_of(headers, properties, 300.0) == expected


def test_reading_the_task_id():
    assert task_id_of({"id": "t", "task": "send"}, {"message_id": "m"}) == "t"
    assert task_id_of({"id": "t"}, {"message_id": "m"}) == "m"
    assert task_id_of({}, {}) == ""
    assert task_id_of({"id": "é" * 200, "task": "send"}, {}) == "", "published, and not to be found"


def test_a_task_that_goes_on_is_no_duplicate_of_itself(app, broker):
    """By a retry, or by ``self.replace``, after which it is its own parent. A task behind it may be a duplicate."""
    send = app.tasks["send"]
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="a")
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="a", retries=1)
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="a", parent_id="a", replaced_task_nesting=1)
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="b", parent_id="a", replaced_task_nesting=1)
    send.apply_async(
        (1,), headers={"dedup_id": "order-7"}, task_id="c", parent_id="a", retries=1, replaced_task_nesting=1
    )
    send.apply_async((1,), headers={"dedup_id": "order-7"})
    assert broker.queue("q").count() == 4


def test_a_replaced_task_of_protocol_1_is_no_duplicate(app, broker):
    app.conf.task_protocol = 1

    @app.task(name="replaced", bind=True, shared=False)
    def replaced(self):
        raise self.replace(app.tasks["send"].si(1).set(headers={"dedup_id": "order-7"}))

    replaced.apply_async(headers={"dedup_id": "order-7"}, task_id="a")
    build_tracer("replaced", app.tasks["replaced"], app=app)("a", (), {}, {"id": "a", "is_eager": False})
    app.tasks["send"].apply_async((1,), headers={"dedup_id": "order-7"}, task_id="b")
    assert broker.queue("q").count() == 2


def test_a_task_that_is_published_under_the_id_of_its_publisher_is_a_duplicate(app, broker):
    """The guide says to give duplicates one task id; a task may publish its own next run."""
    send = app.tasks["send"]
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="a")
    send.apply_async((1,), headers={"dedup_id": "order-7"}, task_id="a", parent_id="a")
    assert broker.queue("q").count() == 1


def test_an_eta_that_was_served_is_not_ahead_of_a_worker_whose_clock_is_behind(app, connection, broker):
    """Celery's worker would keep the message until then: leased, in its window, and with its time to run passing."""
    app.tasks["send"].apply_async((1,), countdown=3_600)
    (waiting,) = broker.queue("q").page(1, state="delayed").messages
    assert broker.queue("q").reschedule(waiting.spot)
    before = datetime.now(UTC)
    message = connection.channel().basic_get("q", no_ack=True)
    eta = datetime.fromisoformat(message.headers["eta"])
    assert before <= eta <= datetime.now(UTC) + timedelta(milliseconds=1)


@pytest.mark.parametrize("headers", [{"x-delay": 1}, {"DelaySeconds": 0.001}])
def test_a_delay_that_was_served_delays_no_retry(app, connection, broker, headers):
    """RabbitMQ's plugin delivers it negative, too."""
    app.tasks["send"].apply_async((1,), headers={**headers, "other": 5})
    (job,) = broker.queue("q").take_many(1, 60)
    job.release()
    channel = connection.channel()
    deadline = time.monotonic() + 60
    while (message := channel.basic_get("q", no_ack=True)) is None:
        assert time.monotonic() < deadline
    ((name, delay),) = headers.items()
    assert (message.headers[name], message.headers["other"]) == (-delay, 5)
    Producer(connection).publish("again", routing_key="q", headers={**message.headers, name: -3_600_000})
    counts = broker.queue("q").stats()
    assert (counts.ready, counts.delayed) == (1, 0)
