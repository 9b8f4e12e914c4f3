"""What a Celery worker can't handle rests between its attempts, and is logged once (transport/poison.py)."""

import contextlib
import json
import logging
import subprocess
import sys
import zlib

import pytest
from kombu import Connection, Consumer, Producer, Queue
from kombu.exceptions import ChannelError

from kombu_fdb.errors import FormatError, LimitExceeded, QueueError, StoreUnavailable
from kombu_fdb.model import Publication
from kombu_fdb.transport import poison
from kombu_fdb.transport.consuming.fetcher import Fetcher
from kombu_fdb.transport.envelope import body_fault, fault_of, payload_of

LIMITED = Queue("q", queue_arguments={"x-delivery-limit": 3})
GOOD = {"task": "t", "id": "an-id"}


def celerys(handler):
    """As the task consumer's of a worker: it is told by its module."""
    handler.__module__ = poison.TASKS
    return handler


@pytest.fixture
def attempts(channel):
    """A consumer to which each message is poison, and what came to it."""
    seen = []

    def fail(message):
        seen.append(message)
        raise TypeError("not what Celery expects")

    with Consumer(channel, [LIMITED], on_message=celerys(fail), accept=["json"]):
        yield seen


def publish(channel, body=None, headers=None):
    Producer(channel).publish(body, routing_key="q", headers=headers, content_type="application/json")


def test_it_rests_in_the_store_between_its_attempts(connection, channel, attempts, monkeypatch):
    monkeypatch.setattr(poison, "FIRST_PAUSE_MS", 3_600_000)
    monkeypatch.setattr(poison, "LONGEST_PAUSE_MS", 3_600_000)
    publish(channel, "5")
    before_ms = connection.transport.now_ms()
    connection.drain_events(timeout=60)
    (resting,) = channel.engine.inspect.delayed("q", 10)
    assert len(attempts) == 1
    assert resting.due_ms >= before_ms + poison.FIRST_PAUSE_MS
    assert resting.redeliveries == 1, "the attempt counts"


class Hostile(Exception):
    """Fails to tell its text."""

    def __str__(self):
        raise self.args[0]

    __repr__ = __str__


def unparsed():
    """Its traceback can't be printed."""
    return SyntaxError("wrong", ("here", 1, 1, 5))


@pytest.mark.parametrize(
    "error",
    [
        *(LimitExceeded("the key is too large"), FormatError(), QueueError(), ChannelError()),
        *(Hostile(RuntimeError), Hostile(SystemExit), unparsed()),
    ],
)
def test_it_is_an_attempt_whatever_the_error(connection, channel, caplog, error):
    """Of the channel, as of a result backend that can't store what the message asks for: Celery connects anew for no
    such error. Or one that can't be told: it came out of the drain and ended the worker, and then the next one.
    """

    def fail(_message):
        raise error

    with Consumer(channel, [LIMITED], on_message=celerys(fail), accept=["json"]):
        publish(channel, "5")
        connection.drain_events(timeout=60)
    (resting,) = channel.engine.inspect.delayed("q", 10)
    assert resting.redeliveries == 1, "the attempt counts"
    assert type(error).__qualname__ in caplog.messages[0]


def test_an_error_of_the_connection_is_celerys(connection, channel):
    def fail(_message):
        raise StoreUnavailable

    with Consumer(channel, [LIMITED], on_message=celerys(fail), accept=["json"]):
        publish(channel, "5")
        with pytest.raises(StoreUnavailable):
            connection.drain_events(timeout=60)


@pytest.mark.parametrize(
    ("redeliveries", "pause_ms"), [(0, 1_000), (1, 2_000), (5, 32_000), (6, 60_000), (10**9, 60_000)]
)
def test_each_pause_is_twice_the_one_before(redeliveries, pause_ms):
    assert poison._pause_ms(redeliveries) == pause_ms


def test_one_traceback_and_then_a_line_for_each_attempt(connection, channel, attempts, until, monkeypatch, caplog):
    monkeypatch.setattr(poison, "FIRST_PAUSE_MS", 1)
    publish(channel, "5")
    (stored,) = channel.engine.inspect.peek("q", 1)
    with caplog.at_level(logging.ERROR, "kombu_fdb.transport.poison"):
        for _ in range(4):
            connection.drain_events(timeout=60)
    (letter,) = until(lambda: channel.engine.inspect.peek("q.dead", 2))
    assert letter.deaths[0].reason == "delivery_limit"
    assert "not what Celery expects" in letter.deaths[0].details["traceback"]
    told = [record for record in caplog.records if record.name == "kombu_fdb.transport.poison"]
    assert [bool(record.exc_info) for record in told] == [True, False, False, False]
    assert [record.args[0] for record in told] == [1, 2, 3, 4]
    for record in told:
        line = record.getMessage()
        assert "queue q " in line
        assert stored.message_id.hex() in line
        assert "not what Celery expects" in line
        assert "\n" not in line


@pytest.mark.parametrize("body", [[1, 2, 3], [[], {}, "text"], [[], {}, [1]], [[], {}], 5, {"kwargs": {}}, "text"])
def test_a_body_that_fails_in_the_pool_is_dead_lettered_before(connection, channel, attempts, until, body):
    """Errors of greenlets and threads would not be heard of, and the message would stay leased."""
    publish(channel, json.dumps(body), GOOD)
    publish(channel, json.dumps([[], {}, {}]), GOOD)
    connection.drain_events(timeout=60)
    assert [message.payload for message in attempts] == [[[], {}, {}]]
    (letter,) = until(lambda: channel.engine.inspect.peek("q.dead", 2))
    assert letter.deaths[0].reason == "malformed"
    assert "body" in letter.deaths[0].details["error"]


@pytest.mark.parametrize("body", [[1, 2, 3], 5])
def test_for_a_consumer_that_is_not_celerys_it_is_a_message_like_any_other(connection, channel, body):
    publish(channel, json.dumps(body), GOOD)
    seen = []
    with Consumer(channel, [LIMITED], on_message=lambda message: (seen.append(message.payload), message.ack())):
        connection.drain_events(timeout=60)
    assert seen == [body]


@pytest.mark.parametrize("is_workers", [False, True])
def test_another_consumers_message_is_its_own_also_on_the_workers_connection(connection, channel, is_workers):
    """As of a ConsumerStep: a header ``task`` means what its publisher means, and no error ends the worker."""
    publish(channel, json.dumps("resize"), {"task": "no task of Celery's"})
    seen = []

    def fail(message):
        seen.append(message.payload)
        raise ValueError("mine")

    consumers = [Consumer(channel, [LIMITED], on_message=fail)]
    if is_workers:
        consumers.append(Consumer(channel, [Queue("celery")], on_message=celerys(lambda _: None)))
    with contextlib.ExitStack() as stack:
        for each in consumers:
            stack.enter_context(each)
        with contextlib.nullcontext() if is_workers else pytest.raises(ValueError, match="mine"):
            connection.drain_events(timeout=60)
    assert seen == ["resize"]


def test_what_a_task_drains_raises_to_the_task(connection, connect):
    """Another connection of a worker's process, whatever stands on the stack."""

    def nested(_message):
        with connect() as other:
            publish(other.default_channel, "5")

            def fail(_message):
                raise ValueError("the task's own")

            with Consumer(other.default_channel, [LIMITED], on_message=fail), pytest.raises(ValueError, match="own"):
                other.drain_events(timeout=60)
        done.append(True)
        _message.ack()

    done = []
    channel = connection.default_channel
    Producer(channel).publish("5", routing_key="celery", content_type="application/json", declare=[Queue("celery")])
    with Consumer(channel, [Queue("celery")], on_message=celerys(nested)):
        connection.drain_events(timeout=60)
    assert done == [True]


@pytest.mark.parametrize(
    ("body", "content_type", "compression", "error"),
    [
        (b"[1, 2, 3]", "application/x-yaml", None, "can't be decoded"),
        (b"[[], {}, {}", "application/json", None, "can't be decoded"),
        (b"\xff[[], {}, {}]", "application/json", None, "can't be decoded"),
        (b"[" * 100_000, "application/json", None, "can't be decoded"),
        (b"not packed at all", "application/json", "application/x-gzip", "can't be unpacked"),
    ],
)
def test_what_cant_or_must_not_be_decoded_is_kept_as_a_dead_letter(
    connection, channel, attempts, body, content_type, compression, error
):
    """Celery acknowledges what it can't decode."""
    store(channel, body, content_type, compression)
    publish(channel, "5")
    connection.drain_events(timeout=60)
    assert len(attempts) == 1
    (letter,) = channel.engine.inspect.peek("q.dead", 2)
    assert error in letter.deaths[0].details["error"]


@pytest.mark.parametrize("body", [[[], {}, None], ((), {}, {}), [[], {}, {"chain": None}], {"args": []}, [5, 5, {}]])
def test_bodies_that_celery_knows_what_to_do_with(body):
    assert body_fault(body) is None


@pytest.mark.parametrize("names", [[{}], ["a", 5], [["a"]]])
def test_stamps_are_looked_up_by_their_names(names):
    """Celery looks for a revoked one when a process becomes free: an unhashable name would end the worker."""
    assert "stamped_headers" in (fault_of({**GOOD, "stamped_headers": names}) or "")
    assert fault_of({**GOOD, "stamped_headers": ["a"]}) is None


def test_numbers_that_can_not_be_printed_are_faults_all_the_same():
    assert body_fault(10**5000)


def store(channel, body, content_type, compression):
    """As another program has stored it, which may say that it is compressed."""
    headers = GOOD if compression is None else {**GOOD, "compression": compression}
    message = channel.prepare_message(body, None, content_type, "utf-8", headers, {})
    channel.engine.publisher.publish([Publication("", "q", payload_of(message, "", "q"))])


def publish_packed(channel, body):
    store(channel, body, "application/json", "application/x-gzip")


def test_the_room_of_what_was_refused_is_known_at_once(connection, channel, attempts, monkeypatch):
    """No ack will ever say that it is free, and the next one would wait for the safety look."""
    told = []
    tell = Fetcher.on_room
    monkeypatch.setattr(Fetcher, "on_room", lambda self: (told.append(self), tell(self)))
    channel.basic_qos(0, 1, False)
    before = len(told)
    for _ in range(2):
        publish_packed(channel, b"not packed at all")
    publish(channel, "5")
    connection.drain_events(timeout=60)
    assert len(attempts) == 1
    assert len(told) - before == 3, "two refusals, and the release of what the callback could not handle"


#: A worker's loop in a small address space. (Where the kernel kills it instead, its messages are a dead worker's.)
TAKER = """
import resource, sys
from kombu import Connection, Consumer, Queue

def handle(message):
    print(message.payload)
    message.ack()

handle.__module__ = "celery.worker.consumer.consumer"
with Connection(sys.argv[1]) as connection, connection.channel() as channel:
    with Consumer(channel, [Queue("q")], on_message=handle):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, -1))
        connection.drain_events(timeout=60)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/self/statm")
def test_a_body_that_needs_more_memory_than_there_is(tmp_path, until):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Connection(url) as connection:
        channel = connection.default_channel
        publish_packed(channel, zlib.compress(bytes(2**28), 1))
        publish(channel, '"good"')
        program = [sys.executable, "-c", TAKER, url]
        taken = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert taken.stdout == "good\n", taken.stderr
        (letter,) = until(lambda: channel.engine.inspect.peek("q.dead", 2))
        assert "MemoryError" in letter.deaths[0].details["error"]
