"""Jobs and brokers of the Python API that are no longer referenced."""

import gc
import threading
import weakref
from contextlib import suppress

import pytest
from kit.processes import until

from kombu_fdb import Broker
from kombu_fdb.api import consumer
from kombu_fdb.errors import StoreError, StoreFull, StoreUnavailable
from kombu_fdb.process.client_session import ClientSession

DEADLINE_S = 60.0


class Full(StoreFull):
    """A disk that has no room for what a dead letter adds, and takes whatever adds nothing."""

    fills = True


def refuse(*_, **__):
    raise Full


@pytest.fixture
def broker(url):
    """This one drops it, so it is neither face's."""
    with Broker.open(url) as broker:
        yield broker


def placed(broker):
    stats = broker.queue("jobs").stats()
    return stats.ready, stats.leased


def test_a_dropped_job_goes_back_and_the_attempt_counts(broker):
    jobs = broker.queue("jobs")
    jobs.put_many([b"first", b"second"])
    job = jobs.take(timeout=DEADLINE_S)
    assert job is not None
    del job
    until(lambda: placed(broker) == (2, 0))
    again = jobs.take(timeout=DEADLINE_S)
    assert again is not None
    assert (again.payload, again.attempts) == (b"first", 2)
    again.ack()


@pytest.mark.parametrize("settle", ["ack", "release", "bury", "extend"])
def test_a_job_that_is_dropped_after_an_error_goes_back(broker, monkeypatch, settle):
    """At once, and not when Python looks for garbage."""
    jobs = broker.queue("jobs")
    jobs.put(b"x")
    database = broker.connection.engine.transactions.retry.database
    begin = type(database).begin

    def begin_in_vain(*arguments, **keywords):
        tr = begin(database, *arguments, **keywords)
        tr.cancel()
        return tr

    with monkeypatch.context() as away:
        gc.collect()
        gc.disable()
        try:
            job = jobs.take(timeout=DEADLINE_S)
            away.setattr(database, "begin", begin_in_vain)
            with suppress(StoreError):
                getattr(job, settle)()
            gone = weakref.ref(job)
            del job
            assert gone() is None
        finally:
            gc.enable()
    until(lambda: placed(broker) == (1, 0))


def test_a_job_that_is_dropped_again_and_again_is_a_dead_letter(url):
    with Broker.open(url, delivery_limit=2) as broker:
        jobs = broker.queue("jobs")
        jobs.put(b"poison")
        for _ in range(3):
            jobs.take(timeout=DEADLINE_S)
        until(lambda: jobs.dead_letters.count().total() == 1)
        assert (
            jobs.dead_letters.list()[0].deaths[0].details["error"] == "its consumer had dropped it without settling it"
        )


def test_a_disk_without_room_for_dead_letters_bounds_how_many_wait(broker, monkeypatch):
    """BOUNDED: a loop took each job of the queue, and the process held them all."""
    jobs = broker.declare("jobs", arguments={"x-delivery-limit": 0})
    jobs.put_many([b"x"] * 5)
    monkeypatch.setattr(consumer, "MOST_DEFERRED", 3)

    def work():
        for job in jobs.consume(timeout=DEADLINE_S, limit=5):
            with suppress(ZeroDivisionError), job:
                raise ZeroDivisionError

    with monkeypatch.context() as full:
        full.setattr(broker.connection.engine.messages, "release", refuse)
        for _ in range(2):
            with pytest.raises(Full):
                work()
        assert placed(broker) == (2, 3)
    for job in jobs.consume(timeout=DEADLINE_S, limit=2):
        job.ack()
    until(lambda: jobs.dead_letters.count().total() == 3)


@pytest.mark.parametrize("settle", ["ack", "release", "bury"])
def test_a_settled_job_is_left_alone(broker, settle):
    jobs = broker.queue("jobs")
    jobs.put(b"x")
    job = jobs.take(timeout=DEADLINE_S)
    getattr(job, settle)()
    calls = broker._client.deferred_calls
    del job
    assert not calls


def test_a_dropped_broker_closes(url, broker):
    jobs = broker.queue("jobs")
    jobs.put_many([str(number) for number in range(4)])

    def forget():
        other = Broker.open(url, ack_delay_ms=2.5)  # a session of its own
        held = other.queue("jobs").take_many(3, timeout=DEADLINE_S)
        held.append(other)  # a cycle, which only the collector ends
        held.append(held)
        held[0].again = held
        return weakref.ref(other)

    def is_collected():
        gc.collect()  # a further time if another thread, as that which settles for a finalizer, had a part of the cycle
        return reference() is None

    reference = forget()
    until(is_collected)
    until(lambda: placed(broker) == (4, 0))
    assert [broker.queue("jobs").take(timeout=DEADLINE_S).payload for _ in range(1)] == [b"0"]
    until(lambda: len(broker._engine.sessions.beats()) == 1)  # its session has ended


def test_one_active_consumer_that_is_dropped_makes_way(url, broker):
    jobs = broker.declare("jobs", arguments={"x-single-active-consumer": True})
    jobs.put_many([b"first", b"second"])

    def forget():
        other = Broker.open(url)
        job = other.queue("jobs").take(timeout=DEADLINE_S)
        assert job is not None
        job.ack()

    forget()
    gc.collect()
    job = jobs.take(timeout=DEADLINE_S)
    assert job is not None
    assert job.payload == b"second"


@pytest.mark.parametrize("error", [StoreUnavailable, KeyboardInterrupt])
def test_one_active_consumer_that_closes_in_vain_makes_way(url, broker, monkeypatch, error):
    """Within its process, whose session goes on."""
    jobs = broker.declare("jobs", arguments={"x-single-active-consumer": True})
    jobs.put_many([b"first", b"second"])
    other = Broker.open(url)
    job = other.queue("jobs").take(timeout=DEADLINE_S)
    assert job is not None

    leave, closing = type(other._engine.queues).leave, threading.current_thread()

    def refuse(*arguments):
        if error is KeyboardInterrupt and threading.current_thread() is not closing:
            return leave(*arguments)  # a signal comes to the main thread only
        raise error

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(type(other._engine.queues), "leave", refuse)
        other.close()
    job = jobs.take(timeout=DEADLINE_S)
    assert job is not None
    assert job.payload == b"first"


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("when", ["before", "behind"])
def test_one_active_consumer_that_another_thread_closes_makes_way(url, broker, monkeypatch, when, *, is_active):
    """Before or behind a claim that is made for it. What that has leased goes back before the next one begins."""
    jobs = broker.declare("jobs", arguments={"x-single-active-consumer": True})
    jobs.put_many([b"0", b"1", b"2"])
    assert broker.queue("another").take(timeout=0) is None  # so their session goes on
    other, claim, taken = Broker.open(url), ClientSession.claim, list[bytes]()
    if is_active:
        other.queue("jobs").take(timeout=DEADLINE_S).ack()

    def take():
        job = jobs.take(timeout=DEADLINE_S)
        taken.append(job.payload)
        job.ack()

    def close_and_claim(*arguments, **named):
        monkeypatch.undo()
        found = claim(*arguments, **named) if when == "behind" else None
        other.close()
        if found is None:
            return claim(*arguments, **named)
        take()
        return found

    monkeypatch.setattr(ClientSession, "claim", close_and_claim)
    assert other.queue("jobs").take(timeout=0) is None
    while len(taken) < 3 - is_active:
        take()
    assert taken == [b"0", b"1", b"2"][is_active:]


def test_one_that_only_put_closes_the_store(url):
    def forget():
        other = Broker.open(url, ack_delay_ms=3.5)
        other.queue("jobs").put(b"x")
        cycle = [other]
        cycle.append(cycle)  # only the collector ends it
        return other._client

    client = forget()
    assert client.engine_if_open is not None
    gc.collect()
    until(lambda: client.engine_if_open is None)
    with Broker.open(url, ack_delay_ms=3.5) as again:
        assert again._client is client
        assert placed(again) == (1, 0)
