"""Celery's asynchronous worker loop: ``kombu.asynchronous.Hub`` (research/interfaces.md A6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
from kit.interruption import interrupt, runs_handlers
from kombu import Connection, Queue
from kombu.asynchronous import Hub

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.threads import Ticket
from kombu_fdb.transport.consuming import loop, watch_set
from kombu_fdb.transport.consuming import receiver as receiver_module
from kombu_fdb.transport.consuming.dispatch import Dispatch
from kombu_fdb.transport.consuming.fetcher import Fetcher


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


def turns_of(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads of the turns that follow."""
    threads: list[threading.Thread] = []
    turn = Fetcher.turn

    def noted(self: Fetcher) -> float | None:
        threads.append(threading.current_thread())
        return turn(self)

    monkeypatch.setattr(Fetcher, "turn", noted)
    return threads


def test_takes_the_turns(connection: Connection, hub: Hub, monkeypatch: pytest.MonkeyPatch, until: Any) -> None:
    """No message passes from one thread to another."""
    received: list[Any] = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        receiver = connection.transport.receiver
        if not receiver.may_be_driven:
            pytest.skip("the turns are the thread's")
        monkeypatch.setattr(watch_set, "BUSY", 1e6)  # however busy the machine is, no turn of the loop's is overdue,
        monkeypatch.setattr(receiver_module, "SLOW_S", 60.0)  # and none is slow
        threads = turns_of(monkeypatch)
        run(hub, lambda: threading.current_thread() in threads and receiver.fetcher.idle)
        until(lambda: receiver._watch_set._rests)
        threads.clear()
        for number in range(5):
            publish(connection, number)
            run(hub, lambda number=number: len(received) == number + 1)
        assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("blocked", ["in a turn", "too late"])
def test_leaves_the_turns_to_the_thread(
    connection: Connection, hub: Hub, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """While another thread has one, or another process the store. The loop does not spin meanwhile."""
    received: list[Any] = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        receiver = connection.transport.receiver
        if not receiver.may_be_driven:
            pytest.skip("the turns are the thread's")
        threads = turns_of(monkeypatch)
        run(hub, lambda: threading.current_thread() in threads and receiver.fetcher.idle)
        turns, others = receiver._watch_set.turns, Ticket()
        if blocked == "in a turn":
            taker = threading.Thread(target=lambda: turns.acquire(others, 60))
            taker.start()
            taker.join()
        else:
            monkeypatch.setattr(receiver_module, "SPARED_S", 0.01)
            fail_once(monkeypatch, StoreUnavailable("the write lock is another's"))
        receiver.bell.ring()
        run(hub, lambda: receiver.bell.fileno() not in hub.readers)
        assert receiver.fetcher.error is None
        turns.release(others)
        publish(connection, 1)
        run(hub, lambda: len(received) == 1 and receiver.bell.fileno() in hub.readers)


def fail_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """In a turn of this thread's."""
    errors, thread = [error], threading.current_thread()
    plan = Dispatch.plan

    def failing(self: Dispatch, *args: Any) -> Any:
        if errors and threading.current_thread() is thread:
            raise errors.pop()
        return plan(self, *args)

    monkeypatch.setattr(Dispatch, "plan", failing)


def test_a_callback_that_works_for_long_keeps_no_ack_waiting(connection: Connection, hub: Hub, until: Any) -> None:
    """The thread takes the turn that is overdue, and gives back what was claimed for a callback to come."""
    left: list[int] = []

    def work(message: Any) -> None:
        if not left:
            message.ack()
            counts = connection.transport.store.engine.inspect.counts
            until(lambda: (counts("q").leased, counts("q").ready) == (0, 2))
            left.append(2)

    connection.transport_options["undrained_timeout"] = 0.5
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        run(hub, lambda: connection.transport.receiver.fetcher.idle)
        publish(connection, 1, 2, 3)
        run(hub, lambda: left)


def test_after_a_reset_the_thread_takes_the_turns(connection: Connection, hub: Hub, until: Any) -> None:
    connection.transport_options["poll_interval"] = 0.1
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=print):
        run(hub, lambda: connection.transport.receiver.fetcher.idle)
        hub.reset()
        publish(connection, 1)
        until(lambda: connection.transport.receiver.fetcher.arrived.wait(0))


FILES = frozenset(str(each.__file__) for each in (loop, receiver_module, watch_set))


def test_an_exception_at_any_line_of_a_turn_loses_nothing(connection: Connection, hub: Hub) -> None:
    """As a signal handler raises it, out of the loop, which then goes on."""
    received: list[Any] = []
    connection.transport_options["poll_interval"] = 0.1
    connection.register_with_event_loop(hub)
    with connection.Consumer(
        [Queue("q")], on_message=lambda message: (received.append(message.payload), message.ack())
    ):
        if not connection.transport.receiver.may_be_driven:
            pytest.skip("the turns are the thread's")
        for moment in count(1):
            publish(connection, moment)
            receive = partial(run, hub, partial(received.__contains__, moment))
            if not interrupt(receive, moment, FILES, strikes=runs_handlers):
                break
            receive()
        assert moment > 30
        assert sorted(received) == [*range(1, moment + 1)]


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
    connection.register_with_event_loop(hub)
    registration = connection.transport._registration
    connection.collect()
    for late in (registration.on_arrived, registration.on_bell, registration._come_back):
        late()
    assert not hub.readers


def test_what_takes_long_has_a_turn_of_the_loop_for_itself(
    connection: Connection, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the solo pool a delivery is the task: between two of them the loop notes early acks, and a SIGTERM."""
    monkeypatch.setattr(loop, "DELIVERING_S", 0.0)
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
