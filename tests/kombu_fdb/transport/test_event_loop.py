"""Celery's asynchronous worker loop: ``kombu.asynchronous.Hub`` (research/interfaces.md A6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.asynchronous import Hub

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.transport import connection as connection_module


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def run(hub: Hub, condition: Any, turns: int = 200) -> None:
    for _ in range(turns):
        if condition():
            return
        hub.run_once()
    raise AssertionError("the loop turned in vain")


def publish(connection: Connection, *bodies: Any) -> None:
    for body in bodies:
        connection.Producer(auto_declare=False).publish(body, routing_key="q")


def test_delivers_what_was_there_and_what_comes(connection: Connection, connect: Any, hub: Hub) -> None:
    received: list[Any] = []
    publish(connection, 1, 2)
    connection.register_with_event_loop(hub)  # Celery registers before there are consumers
    with connection.Consumer(
        [Queue("q")], on_message=lambda message: (received.append(message.payload), message.ack())
    ):
        run(hub, lambda: len(received) == 2)
        publish(connect(), 3)
        run(hub, lambda: len(received) == 3)
    assert received == [1, 2, 3]


def test_leaves_the_turns_to_the_thread(connection: Connection, hub: Hub) -> None:
    """Also behind a drain, as that of Celery's worker when it looks for other workers."""
    received: list[Any] = []
    publish(connection, 1)
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        connection.drain_events(timeout=30)
        watch_set = connection.transport.receiver._watch_set
        rest_until = watch_set.rest_until
        connection.register_with_event_loop(hub)
        publish(connection, 2)
        run(hub, lambda: len(received) == 2)
        assert watch_set.rest_until == rest_until


def test_a_callback_that_works_for_long_keeps_no_ack_waiting(connection: Connection, hub: Hub, until: Any) -> None:
    """And what was claimed for a callback to come goes back."""
    left: list[int] = []

    def work(message: Any) -> None:
        if not left:
            message.ack()
            counts = connection.transport.store.engine.inspect.counts
            until(lambda: (counts("q").leased, counts("q").ready) == (0, 2))
            left.append(2)

    connection.transport_options["undrained_timeout"] = 0.5
    publish(connection, 1, 2, 3)
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        run(hub, lambda: left)


def test_credit_returns_by_an_ack_in_another_thread(connection: Connection, hub: Hub) -> None:
    publish(connection, *range(10))
    received: list[Any] = []

    def on_message(message: Any) -> None:
        received.append(message.payload)
        threading.Timer(0.01, message.ack).start()

    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=on_message, prefetch_count=2):
        run(hub, lambda: len(received) == 10)
    assert received == list(range(10))


def test_more_than_one_turn(connection: Connection, hub: Hub) -> None:
    publish(connection, *range(150))
    received: list[Any] = []
    connection.register_with_event_loop(hub)
    with connection.Consumer(
        [Queue("q")], on_message=lambda message: (received.append(message.payload), message.ack())
    ):
        run(hub, lambda: len(received) == 150)
    assert received == list(range(150))


def test_survives_a_reset(connection: Connection, hub: Hub) -> None:
    received: list[Any] = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append):
        hub.reset()
        publish(connection, 1)
        connection.register_with_event_loop(hub)
        run(hub, lambda: len(received) == 1)


def test_close_leaves_nothing_in_the_loop(connect: Any, hub: Hub) -> None:
    connection = connect()
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")]):
        assert hub.readers
    connection.close()
    assert not hub.readers
    assert not hub.on_tick


def test_close_leaves_a_reused_descriptor_alone(connect: Any, hub: Hub) -> None:
    connection = connect()
    connection.register_with_event_loop(hub)
    descriptor = connection.transport.receiver.fetcher.arrived.fileno()
    hub.reset()
    hub.readers[descriptor] = (print, ())
    connection.close()
    assert descriptor in hub.readers
    hub.readers.clear()


def test_drain_beside_the_loop(connection: Connection, hub: Hub) -> None:
    """Mingle drains the connection that the loop serves; neither takes the other's wake-up away."""
    received: list[Any] = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append):
        publish(connection, 1, 2, 3)
        connection.drain_events(timeout=60)
        run(hub, lambda: len(received) == 3)


def test_store_errors_reach_the_loop(connection: Connection, hub: Hub) -> None:
    connection.register_with_event_loop(hub)
    hub.propagate_errors = connection.connection_errors
    with connection.Consumer([Queue("q")]):
        connection.transport.receiver.fetcher.fail(StoreUnavailable())
        with pytest.raises(connection.connection_errors):
            run(hub, lambda: False)
        connection.transport.establish_connection()


def test_a_dead_connection_is_silent(connect: Any, hub: Hub) -> None:
    connection = connect()
    transport = connection.transport
    connection.register_with_event_loop(hub)
    connection.collect()
    transport._on_arrived()
    assert not hub.readers


def test_what_takes_long_has_a_turn_of_the_loop_for_itself(
    connection: Connection, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the solo pool a delivery is the task: between two of them the loop notes early acks, and a SIGTERM."""
    monkeypatch.setattr(connection_module, "LOOP_TURN_S", 0.0)
    turns, in_turn = [0], []

    def work(message: Any) -> None:
        in_turn.append(turns[0])
        message.ack()

    publish(connection, *range(4))
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        while len(in_turn) < 4:
            hub.run_once()
            turns[0] += 1
    assert len(set(in_turn)) == 4
