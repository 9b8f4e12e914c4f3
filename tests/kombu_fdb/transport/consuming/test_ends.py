"""The one active consumer of a queue whose connection ends while a claim is made for it (``single.py``)."""

import threading

import pytest
from kit.conformance.consumer import Consumer
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.interruption import interrupt
from kombu import Connection

from kombu_fdb import Broker
from kombu_fdb.engine.facade.messages import Messages
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.transport.consuming import receiver
from kombu_fdb.transport.consuming.fetcher import Fetcher

DEADLINE_S = 60.0
ENDS = ["collect", "close"]


@pytest.fixture
def broker(any_store):
    """Of the same process, and so of the same session."""
    with Broker.open(any_store) as broker:
        jobs = broker.declare("q", arguments={"x-single-active-consumer": True})
        jobs.put_many([b"0", b"1", b"2"])
        assert broker.queue("another").take(timeout=0) is None
        yield broker


@pytest.fixture
def connection(any_store, broker):
    connection = Connection(any_store)
    connection.default_channel.basic_qos(0, 1)
    connection.default_channel.basic_consume("q", no_ack=False, callback=print)
    return connection


def end(connection, how):
    """As another thread does; and have the duties done."""
    client = connection.transport.store
    getattr(connection, how)()
    client._run_deferred()


def drain(connection):
    with pytest.raises((OSError, *connection.connection_errors)):
        connection.drain_events(timeout=DEADLINE_S)


def take(broker, number=1):
    taken = []
    for _ in range(number):
        job = broker.queue("q").take(timeout=DEADLINE_S)
        taken.append(job.payload)
        job.ack()
    return taken


@pytest.mark.parametrize("how", ENDS)
def test_a_claim_that_begins_behind_the_end_gets_nothing(broker, connection, monkeypatch, how):
    claim, claimed = ClientSession.claim, threading.Event()

    def end_and_claim(*arguments, **named):
        monkeypatch.undo()
        try:
            end(connection, how)
            return claim(*arguments, **named)
        finally:
            claimed.set()

    monkeypatch.setattr(ClientSession, "claim", end_and_claim)
    drain(connection)
    assert claimed.wait(DEADLINE_S)
    assert take(broker, 3) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("how", ENDS)
def test_what_a_claim_has_leased_goes_back_before_another_begins(broker, connection, monkeypatch, how):
    claim, lease, claimed = ClientSession.claim, Messages.claim, threading.Event()
    client, taken = connection.transport.store, list[bytes]()

    def lease_and_end(*arguments, **named):
        found = lease(*arguments, **named)
        monkeypatch.setattr(Messages, "claim", lease)
        with monkeypatch.context() as patch:
            patch.setattr(client, "_run_deferred", list)  # they come later
            getattr(connection, how)()
        return found

    def claim_and_look(*arguments, **named):
        monkeypatch.setattr(ClientSession, "claim", claim)
        try:
            return claim(*arguments, **named)
        finally:
            client._run_deferred()
            taken.extend(take(broker))
            claimed.set()

    monkeypatch.setattr(ClientSession, "claim", claim_and_look)
    monkeypatch.setattr(Messages, "claim", lease_and_end)
    drain(connection)
    assert claimed.wait(DEADLINE_S)
    assert taken + take(broker, 2) == [b"0", b"1", b"2"]


def test_what_a_claim_brings_while_its_last_consumer_leaves_goes_back_before_another_begins(
    broker, connection, monkeypatch
):
    """The store is slow, so the channel does not wait for the turn. It has removed its consumer once by then."""
    claim, lease, remove = ClientSession.claim, Messages.claim, Client.remove_consumer
    leaves, concluded, left = threading.Event(), threading.Event(), threading.Event()
    channel, taken = connection.default_channel, list[bytes]()
    closing = threading.Thread(target=channel.close)

    def lease_and_close(*arguments, **named):
        monkeypatch.setattr(Messages, "claim", lease)
        found = lease(*arguments, **named)
        closing.start()
        assert leaves.wait(DEADLINE_S)
        return found

    def claim_and_look(*arguments, **named):
        monkeypatch.setattr(ClientSession, "claim", claim)
        try:
            return claim(*arguments, **named)
        finally:
            concluded.set()
            assert left.wait(DEADLINE_S)
            taken.extend(take(broker))

    def remove_then(*arguments):
        leaves.set()
        assert concluded.wait(DEADLINE_S)
        remove(*arguments)
        left.set()

    monkeypatch.setattr(receiver, "CANCEL_S", 0.0)
    monkeypatch.setattr(ClientSession, "claim", claim_and_look)
    monkeypatch.setattr(Messages, "claim", lease_and_close)
    monkeypatch.setattr(Client, "remove_consumer", remove_then)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    assert left.wait(DEADLINE_S)
    closing.join(DEADLINE_S)
    assert taken + take(broker, 2) == [b"0", b"1", b"2"]


def test_a_claim_whose_consumers_end_at_any_moment_fails_no_turn():
    """Another thread, which waits for nothing, takes away what the claim has found."""
    moment = left = 0
    while left <= 0:
        moment += 1
        database, left = FaultyDatabase(), moment
        database.writers_take_turns = True
        bench = Bench(database)
        bench.put(*[b""] * 2, queue="p")
        bench.put(*[b""] * 2)
        consumer = Consumer(bench, ["p", "q"], single=["p", "q"])

        def end(frame, consumer=consumer):
            nonlocal left
            if frame.f_code is Fetcher._claim.__code__:
                left -= 1
                for each in consumer.transport.subscriptions if left == 0 else ():
                    consumer.transport.fetcher.dispatch.remove(each)
            return False

        interrupt(consumer.turn, 1, {Fetcher._claim.__code__.co_filename}, per="opcode", strikes=end)
        assert len(consumer.waiting) == (4 if left > 0 else 0)
    assert moment > 10
