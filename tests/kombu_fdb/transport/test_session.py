"""The session behind the consumers: heartbeat, fencing, exit (client.py, client_session.py)."""

import threading
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
from kit.processes import run_python
from kombu import Consumer, Producer, Queue

from kombu_fdb.errors import CommitUnknown
from kombu_fdb.process import client as client_module


def hold(connection, number, until, **consumer):
    for each in range(number):
        connection.Producer(auto_declare=False).publish(each, routing_key="q")
    held = []
    connection.Consumer([Queue("q")], on_message=held.append, **consumer).consume()
    until(lambda: connection.drain_events(timeout=60) or len(held) == number)
    return held


def take_for_dead(connection):
    """What another process does to a session that is silent for too long."""
    client = connection.default_channel.client
    session_id = client.session().session_id
    client.engine.sessions.close(session_id)


def beats_of(engine):
    return {session_id: beat for session_id, beat, _ttl_s in engine.sessions.beats()}


def test_the_heartbeat_follows_consumers_that_come_and_go(connect, until):
    connection = connect(session_ttl=0.5, sweep_interval=0.1)
    hold(connection, 1, until)
    client = connection.default_channel.client
    shown, own = client.engine.inspect.consumers, [client.session().session_id]
    until(lambda: shown("q") == own)
    later = connection.Consumer([Queue("later")])
    later.consume()
    until(lambda: shown("later") == own)
    later.cancel()
    until(lambda: shown("later") == [])
    assert shown("q") == own


def test_heartbeat_goes_on_beside_a_busy_consumer(connect, until):
    connection = connect(session_ttl=0.5, sweep_interval=0.1)
    other = connect(session_ttl=0.5, sweep_interval=0.1, ack_delay_ms=2.5)
    held = hold(connection, 1, until)
    other.Consumer([Queue("somewhere")]).consume()
    engine = connection.default_channel.engine
    first = beats_of(engine)[connection.default_channel.client.session().session_id]
    waited = threading.Event()
    threading.Timer(2.0, waited.set).start()  # four TTLs in which this thread does nothing for kombu
    waited.wait()
    assert beats_of(engine)[connection.default_channel.client.session().session_id] != first
    held[0].ack()
    until(lambda: engine.inspect.counts("q").leased == 0)
    assert connection.default_channel.client.lost_acks == 0


@pytest.mark.usefixtures("apart")
def test_a_silent_process_loses_its_messages(connect, until, monkeypatch):
    """Its session is swept by another process, the late ack changes nothing, and it consumes again by itself."""
    options = {"session_ttl": 1.0, "sweep_interval": 0.1}
    silent, other = connect(**options), connect(**options, ack_delay_ms=2.5)  # another process, in all but the pid
    held = hold(silent, 1, until)
    client = silent.default_channel.client
    lost = client.session()
    beat = client.engine.sessions.beat
    monkeypatch.setattr(
        client.engine.sessions,
        "beat",
        lambda session, **told: ([], None, False) if session == lost.session_id else beat(session, **told),
    )
    again = []
    other.Consumer([Queue("q")], on_message=again.append).consume()
    until(lambda: other.drain_events(timeout=60) or again)
    assert again[0].delivery_info["redelivered"]
    held[0].ack()
    until(lambda: client.lost_acks == 1)
    again[0].ack()
    until(lambda: other.default_channel.engine.inspect.counts("q").leased == 0)
    assert other.default_channel.engine.inspect.counts("q").ready == 0


def test_fenced_and_going_on(connection, until, caplog):
    held = hold(connection, 3, until, prefetch_count=3)
    take_for_dead(connection)
    until(lambda: "declared dead" in caplog.text)
    held[0].ack()  # its room is free, its lease is lost
    until(lambda: connection.drain_events(timeout=60) or len(held) == 4)
    assert held[3].payload == held[0].payload
    assert connection.default_channel.client.lost_acks == 1
    assert "may run twice" in caplog.text


VERBS = {
    "get": lambda channel: channel.basic_get("q", no_ack=True),
    "consume": lambda channel: channel.basic_consume("q", no_ack=True, callback=print),
    "declare": lambda channel: channel.queue_declare("own", exclusive=True),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_meets_the_fence_is_done_in_the_next_session(connection, verb):
    """A worker that connects again was ended by it: its heartbeat had not heard of the fence."""
    connection.Producer().publish(1, routing_key="q")
    channel = connection.default_channel
    lost = channel.client.session()
    take_for_dead(connection)
    assert verb(channel)
    assert channel.client.session() is not lost


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_meets_a_second_fence_is_done_in_the_session_after_that(connection, monkeypatch, verb):
    connection.Producer().publish(1, routing_key="q")
    channel = connection.default_channel
    client, lost = channel.client, list[Any]()
    session = client.session

    def ended_twice():
        found = session()
        if len(lost) < 2 and found not in lost:
            lost.append(found)
            client.engine.sessions.close(found.session_id)
        return found

    monkeypatch.setattr(client, "session", ended_twice)
    assert verb(channel)
    assert len(lost) == 2


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_meets_a_fence_again_and_again_ends_at_its_deadline(connection, monkeypatch, verb):
    """With an error for which Celery connects again."""
    connection.Producer().publish(1, routing_key="q")
    client = connection.default_channel.client
    session, times_s = client.session, count(0.0, client.options.operation_timeout / 3)

    def ended():
        found = session()
        client.engine.sessions.close(found.session_id)
        return found

    monkeypatch.setattr(client, "session", ended)
    monkeypatch.setattr(client_module, "monotonic", lambda: next(times_s))
    with pytest.raises(connection.connection_errors, match="end each session"):
        verb(connection.default_channel)


def test_consumers_of_a_connection_that_was_dropped_meanwhile_have_left(connect, until, monkeypatch):
    """A turn was registering them under a new session."""
    dropped, other = connect(), connect()
    dropped.Consumer([Queue("p"), Queue("q")]).consume()
    engine, transport = other.default_channel.engine, dropped.transport
    add_consumer = engine.queues.add_consumer

    def add(*args, **given):
        drop = threading.Thread(target=lambda: transport._collect(None))
        drop.start()
        drop.join()
        add_consumer(*args, **given)

    monkeypatch.setattr(engine.queues, "add_consumer", add)
    take_for_dead(other)
    with pytest.raises(dropped.connection_errors):
        until(lambda: dropped.drain_events(timeout=60))
    until(lambda: not any(map(engine.inspect.consumer_count, "pq")))


def test_the_exclusive_queue_of_a_connection_that_was_dropped_is_gone(connect, until):
    dropped, other = connect(), connect()
    dropped.default_channel.queue_declare("own", exclusive=True)
    dropped.collect()
    until(lambda: other.default_channel.engine.inspect.queue("own") is None)


def test_consumers_of_a_connection_whose_drop_was_interrupted_leave_with_its_close(connect, until, monkeypatch):
    dropped, other = connect(), connect()
    dropped.Consumer([Queue("q")]).consume()
    engine = other.default_channel.engine
    with monkeypatch.context() as patch:
        patch.setattr(dropped.transport, "_give_up_consumers", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            dropped.collect()
    dropped.close()
    until(lambda: engine.inspect.consumer_count("q") == 0)


def test_fenced_with_a_temporary_queue(connection, until):
    """The queue is gone with the session, so the consumer must declare it again: it gets a connection error."""
    connection.Consumer([Queue("q", auto_delete=True)]).consume()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    take_for_dead(connection)
    with pytest.raises(connection.connection_errors, match="its temporary queues with it"):
        connection.drain_events(timeout=60)


def test_claims_of_unknown_outcome_are_recovered(connection, until, monkeypatch):
    channel = connection.default_channel
    for number in range(3):
        connection.Producer(auto_declare=False).publish(number, routing_key="q")
    held = channel.basic_get("q")
    engine = channel.engine
    claim = engine.messages.claim

    def claim_and_forget(*arguments, **options):
        claim(*arguments, **options)
        raise CommitUnknown(in_flight=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine.messages, "claim", claim_and_forget)
        with pytest.raises(connection.connection_errors):
            channel.basic_get("q")
    until(lambda: engine.inspect.counts("q").leased == 1)  # without another claim: a consumer that is full makes none
    assert channel.basic_get("q").payload == 1, "it was put back to its place"
    held.ack()
    assert engine.inspect.counts("q").leased == 1


def test_exit_hands_back(url, connect):
    """A program that ends without closing anything."""
    code = """
import sys, kombu_fdb.transport
from kombu import Connection
connection = Connection(sys.argv[1])
connection.Producer().publish("x", routing_key="q")
message = connection.default_channel.basic_get("q")
"""
    run_python("-c", code, url)
    engine = connect().default_channel.engine
    assert (engine.inspect.counts("q").ready, engine.inspect.counts("q").leased) == (1, 0)
    assert engine.sessions.beats() == []


def test_exit_of_a_multiprocessing_child(url, connect):
    code = """
import sys, multiprocessing, kombu_fdb.transport
from kombu import Connection
def child():
    connection = Connection(sys.argv[1])
    connection.Producer().publish("x", routing_key="q")
    connection.default_channel.basic_get("q")
    globals()["kept"] = connection
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
"""
    run_python("-c", code, url)
    assert connect().default_channel.engine.inspect.counts("q").ready == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CommitUnknown()])
def test_an_ack_whose_answer_was_lost_is_not_late(connection, channel, monkeypatch, caplog, error):
    """It was stored, and its repetition finds nothing to settle."""
    queue, taken = Queue("q"), []
    queue(channel).declare()
    Producer(channel).publish(1, routing_key="q")
    with Consumer(channel, [queue], on_message=taken.append):
        connection.drain_events(timeout=30)
    client, messages = channel.client, channel.engine.messages
    ack = messages.ack

    def interrupted(leases):
        assert ack(leases) == [True]
        raise error

    client.acks.append(channel.credit.held.leases[taken[0].delivery_tag])
    monkeypatch.setattr(messages, "ack", interrupted)
    with pytest.raises(type(error)):
        client.flush_acks()
    monkeypatch.setattr(messages, "ack", ack)
    client.flush_acks()
    assert client.lost_acks == 0
    assert "too late" not in caplog.text
