"""What people and programs give: URLs, options, queue arguments, limits, and everything that is in a message."""

# ruff: noqa: SIM905 - names, not lists of strings

import uuid
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal

import amqp
import pytest
from kit.duties import promote_all
from kombu import Connection, Consumer, Producer, Queue
from kombu.exceptions import KombuError

from celery_fdb.inspection.message import describe
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, KombuFDBError, QueueError
from kombu_fdb.model import KeyLimits, QueueControl
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import Options, parse_options
from kombu_fdb.testing.stores import MemoryStores

NUMBERS = [0, 1, -1, 5, 2**31, 2**53, 2**63, 2**64, 10**20, 10**400, 0.5, 1e-17, 1e13, 1e300]
NUMBERS += [float("inf"), -float("inf"), float("nan"), True, Decimal("1e30"), Decimal("NaN")]
TEXTS = ["", "q", "5", "inf", "nan", "1e999", "-1", "\ud800", "\x00", "\x1b[31m", "é" * 200, "x" * 70_000]
MOMENTS = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999-14:00", "2026-01-01", "T", "2026-13-01"]
OBJECTS = [
    None,
    [],
    {},
    [[]],
    {"a": {"b": [1]}},
    b"\xff",
    uuid.UUID(int=5),
    datetime.min.replace(tzinfo=UTC),
]
OBJECTS += [{"__type__": kind, "__value__": value} for kind in ("uuid", "bytes", "decimal", "x") for value in (5, "1")]
ANY = [*NUMBERS, *TEXTS, *MOMENTS, *OBJECTS]
#: What a publish or a declaration may raise, by class.
REFUSALS = (KombuFDBError, KombuError, amqp.exceptions.AMQPError, TypeError)


# -- where and how -----------------------------------------------------------------------------------------------------

PARTS = """
    fdb fdb+sqlite fdb+memory :// / // : @ [ ] ::1 d :SECRET@ host :4500 x .cluster ?a=b # % %00 %ff ~ , é :tls
    localhost :99999999
""".split()
PARTS += [" ", "\ud800"]


def test_urls(fuzz):
    def target(rng):
        url = rng.choice(("fdb://", "fdb+sqlite://", "fdb+sqlite:///", "")) + "".join(rng.choices(PARTS, k=6))
        try:
            parts = parse_url(url)
            location = locate(parts, Options(), {"HOME": "/home/x"})
            shown = f"{parts!r} {location!r} {location}"
        except InvalidArgument as error:
            shown = f"{error} {error!r}"
        assert ":SECRET@" not in shown, url

    for _ in range(20):
        fuzz(target)


def test_options(fuzz):
    names = [*Options.__dataclass_fields__, "visibility_timeout", "nonsense"]

    def target(rng):
        given = {name: rng.choice(ANY) for name in rng.choices(names, k=rng.randint(1, 3))}
        with suppress(InvalidArgument):
            parse_options(given)

    for _ in range(10):
        fuzz(target)


# -- a queue and its messages ------------------------------------------------------------------------------------------


@pytest.fixture
def connection():
    with MemoryStores(), Connection("fdb+memory://fuzz", transport_options={"delivery_limit": 3}) as connection:
        yield connection


@pytest.fixture
def broker(connection):
    with Broker.open("fdb+memory://fuzz", delivery_limit=3) as broker:
        yield broker


ARGUMENTS = """
    x-message-ttl x-expires x-max-length x-max-length-bytes x-overflow x-dead-letter-exchange x-max-priority
    x-dead-letter-routing-key x-delivery-limit x-single-active-consumer x-consumer-timeout x-fair-ageing x-odd
""".split()
LIMITS = [*KeyLimits.__dataclass_fields__]
CONTROLS = [*QueueControl.__dataclass_fields__]


def test_queue_arguments_and_limits(fuzz, connection, broker):
    """A paused queue stays so, whatever else is asked of it; and works when all is taken back."""

    def target(rng):
        name = f"q{rng.random()}"
        queue, engine = broker.queue(name), broker._engine
        arguments = {each: rng.choice(ANY) for each in rng.choices(ARGUMENTS, k=2)}
        with suppress(*REFUSALS):
            connection.default_channel.queue_declare(name, arguments=arguments)
        queue.pause()
        for change in (
            lambda: queue.limit("k", **{rng.choice(LIMITS): rng.choice(ANY)}),
            lambda: queue.limit_every_key(**{rng.choice(LIMITS): rng.choice(ANY)}),
            lambda: queue.control(**{rng.choice([each for each in CONTROLS if each != "paused"]): rng.choice(ANY)}),
        ):
            with suppress(InvalidArgument, QueueError):
                change()
        assert engine.inspect.control(name).paused
        engine.inspect.limits(name, "k")
        with suppress(QueueError, InvalidArgument):
            queue.put(b"1", key="k")
        promote_all(engine)
        queue.drop()
        queue.put(b"2", key="k")
        job = queue.take(5)
        assert job.payload == b"2"
        job.ack()

    fuzz(target)


PUT = ["key", "priority", "delay", "ttl", "ttr", "task_id", "dedup_id", "dedup_window"]


def test_jobs(fuzz, broker):
    def target(rng):
        queue = broker.queue(f"q{rng.random()}")
        given = {name: rng.choice(ANY) for name in rng.choices(PUT, k=2)}
        payload = rng.choice([b"1", "1", *ANY])
        try:
            queue.put(payload, **given)
        except (InvalidArgument, QueueError):
            assert queue.count() == 0
        else:
            stats = queue.stats()
            assert stats.ready + stats.delayed == 1, given
        queue.put(b"good")
        promote_all(broker._engine)
        jobs = queue.take_many(5, timeout=5)
        assert b"good" in [job.payload for job in jobs]
        for job in jobs:
            with suppress(InvalidArgument):
                job.release(rng.choice(ANY))
        queue.purge()

    fuzz(target)


HEADERS = """
    id task eta expires retries timelimit root_id x-delay DelaySeconds x-ttr dedup_id x-deduplication-id
    dedup_window once_id once_window fair_key MessageGroupId MessageDeduplicationId x-death x-delivery-count
    compression a
""".split()
PROPERTIES = """
    priority expiration DelaySeconds message_id MessageGroupId MessageDeduplicationId reply_to correlation_id
    delivery_tag delivery_info body_encoding app_id type user_id cluster_id timestamp delivery_mode
""".split()


def test_messages(fuzz, connection, broker):
    """Refused with nothing stored; or delivered, delayed or dead, and shown; the next message is delivered anyway."""
    received = []
    producer = Producer(connection, auto_declare=False)
    queue = Queue("m", channel=connection)
    queue.declare()
    consumer = Consumer(connection, [queue], on_message=received.append, accept=["json", "text/plain"])
    consumer.on_decode_error = lambda message, _error: received.append(message)
    consumer.consume()

    def target(rng):
        received.clear()
        with suppress(*REFUSALS):
            publish(rng, connection.default_channel)
        for peeked in [
            *broker.queue("m").peek(5),
            *broker._engine.inspect.delayed("m", 5),
            *broker.queue("m.dead").peek(5),
        ]:
            describe(peeked, body=True)
        producer.publish("good", routing_key="m")
        while not any(message.body == b"good" for message in received):
            connection.drain_events(timeout=60)
        for message in received:
            with suppress(Exception):  # what a consumer of its own does with it
                message.decode()
            message.ack()
        promote_all(broker._engine)
        broker.queue("m.dead").purge()
        broker.queue("m").purge()

    fuzz(target)
    consumer.cancel()


def publish(rng, channel):
    """As kombu's ``Producer`` does, which itself raises many things for odd arguments."""
    message = channel.prepare_message(
        rng.choice(ANY),
        content_type=rng.choice(["application/json", "text/plain", rng.choice(ANY)]),
        content_encoding=rng.choice(["utf-8", "binary", rng.choice(ANY)]),
        headers={name: rng.choice(ANY) for name in rng.choices(HEADERS, k=rng.randint(0, 4))},
        properties={name: rng.choice(ANY) for name in rng.choices(PROPERTIES, k=rng.randint(0, 3))},
    )
    channel.basic_publish(message, "", "m")
