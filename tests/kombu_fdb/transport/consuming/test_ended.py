"""Consumers end with their queue, as in RabbitMQ, in whatever process it was deleted."""

from typing import Any

import pytest
from amqp.exceptions import ConsumerCancelled
from kombu import Exchange, Queue
from kombu.mixins import ConsumerMixin

#: Makes a client, and so a session, of its own in this process.
ANOTHER_PROCESS = {"ack_delay_ms": 2.5}


@pytest.fixture
def channel(connection):
    Queue("q")(connection.default_channel).declare()
    return connection.default_channel


def delete(connect, queue="q"):
    connect(**ANOTHER_PROCESS).default_channel.queue_delete(queue)


def test_who_wants_to_know_is_told_once(connection, channel, connect):
    cancelled = []
    Queue("other")(channel).declare()
    Queue("q", channel=channel).consume("one", print, on_cancel=cancelled.append)
    Queue("q", channel=channel).consume("two", print, on_cancel=cancelled.append)
    Queue("other", channel=channel).consume("three", print, on_cancel=cancelled.append)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    delete(connect)
    for _ in range(2):
        connection.drain_events(timeout=60)
    assert sorted(cancelled) == ["one", "two"]
    assert channel.engine.inspect.consumer_count("other") == 1
    Queue("q")(channel).declare()
    Queue("q", channel=channel).consume("one", cancelled.append)  # its tag is free
    connection.Producer(auto_declare=False).publish("x", routing_key="q")
    connection.drain_events(timeout=60)
    assert cancelled[2].payload == "x"


def test_others_get_the_error_that_rabbitmq_s_client_raises(connection, channel, connect):
    Queue("q", channel=channel).consume("one", print)
    delete(connect)
    with pytest.raises(ConsumerCancelled, match="the queue 'q' of consumer 'one' was deleted") as caught:
        connection.drain_events(timeout=60)
    assert isinstance(caught.value, connection.recoverable_connection_errors)


def test_what_it_has_not_settled_stays_with_it(connection, channel, connect):
    held = []
    Queue("q", channel=channel).consume("one", held.append, on_cancel=held.append)
    connection.Producer(auto_declare=False).publish("x", routing_key="q")
    connection.drain_events(timeout=60)
    delete(connect)
    connection.drain_events(timeout=60)
    assert held[1] == "one"
    held[0].ack()
    channel.close()
    assert channel.engine.inspect.counts("q").ready == 0


def test_a_program_that_connects_again_gets_what_its_bindings_bring(connection, connect):
    """They had gone with the queue."""
    queue = Queue("q", Exchange("shop", "topic"), "parcel.#")
    bodies = []

    class Listener(ConsumerMixin):
        def __init__(self):
            self.connection = connection

        def get_consumers(self, consumer, _channel):
            return [consumer([queue], on_message=self.on_message)]

        def on_consume_ready(self, *_, **__):
            if not bodies:
                bodies.append("ready")
                delete(connect)
            else:
                connect(**ANOTHER_PROCESS).Producer(auto_declare=False).publish("x", "parcel.sent", exchange="shop")

        def on_message(self, message):
            bodies.append(message.payload)
            message.ack()
            self.should_stop = True

    Listener().run()
    assert bodies == ["ready", "x"]


def test_one_that_was_cancelled_meanwhile_is_not_told(connection, channel, connect, until):
    cancelled = []
    Queue("q", channel=channel).consume("one", print, on_cancel=cancelled.append)
    fetcher = connection.transport.receiver.fetcher
    fetcher.attend_loop(registered=True)
    delete(connect)
    until(lambda: fetcher.ended)
    channel.basic_cancel("one")
    connection.drain_events(timeout=60)
    assert cancelled == []
    assert not fetcher.ended


def test_a_session_that_was_lost_ends_no_consumer(connection, channel, until):
    """Its rows are gone too; but the process consumes on in another one's name."""
    cancelled, held = list[str](), list[Any]()
    Queue("q", channel=channel).consume("one", held.append, on_cancel=cancelled.append)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    fetcher = connection.transport.receiver.fetcher
    lost = fetcher.session_id
    channel.engine.sessions.close(lost)
    fetcher._next_look = 0.0
    connection.Producer(auto_declare=False).publish("x", routing_key="q")
    connection.drain_events(timeout=60)
    assert (held[0].payload, cancelled) == ("x", [])
    assert fetcher.session_id != lost


def test_a_session_that_was_lost_ends_consumers_whose_queue_was_deleted_meanwhile(connection, channel, connect):
    """Not those of a queue that a message had made: that can be consumed although it is not declared."""
    cancelled = []
    connection.Producer(auto_declare=False).publish("x", routing_key="made")
    held = []
    for queue, tag in (("q", "one"), ("made", "two")):
        channel.basic_consume(queue, False, held.append, tag, on_cancel=cancelled.append)
    connection.drain_events(timeout=60)
    held[0].ack()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.1)
    channel.engine.sessions.close(connection.transport.receiver.fetcher.session_id)
    delete(connect)
    delete(connect, "made")
    connection.transport.receiver.fetcher._next_look = 0.0
    connection.transport.receiver.fetcher.on_room()
    connection.drain_events(timeout=60)
    assert cancelled == ["one"]
    connection.Producer(auto_declare=False).publish("y", routing_key="made")
    connection.drain_events(timeout=60)
    assert (len(held), cancelled) == (2, ["one"])
    assert channel.engine.inspect.consumer_count("q") == 0
