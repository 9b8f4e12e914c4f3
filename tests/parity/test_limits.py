"""What a queue's arguments bound, through the public API."""

from __future__ import annotations

from time import monotonic

import pytest

from kombu_fdb import Broker
from kombu_fdb.errors import CapacityExceeded, InvalidArgument, LeaseLost

PATIENCE_S = 60.0


# -- size --------------------------------------------------------------------------------------------------------------


def test_max_length_bytes_refuses_with_the_item_and_the_sizes(broker):
    jobs = broker.declare("jobs", arguments={"x-max-length-bytes": 10, "x-overflow": "reject-publish"})
    jobs.put("12345678")
    with pytest.raises(CapacityExceeded, match="bytes") as refused:
        jobs.put("123")
    assert (refused.value.item, refused.value.current_size, refused.value.capacity) == ("123", 8, 10)
    assert jobs.stats().ready_bytes == 8
    jobs.take(0).ack()
    jobs.put("123")
    assert jobs.stats().ready_bytes == 3


# -- priority ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "k"])
def test_ageing_may_be_switched_on_and_off(broker, key):
    """A plain queue and a fair one: who has waited long is served before the more urgent, at the price of nothing."""
    jobs = broker.queue("jobs")
    jobs.put("low", key=key)
    waiting_since = monotonic()
    while monotonic() < waiting_since + 0.05:
        jobs.put("high", priority=9, key=key)
        jobs.take(0).ack()
    jobs.put("high", priority=9, key=key)
    assert jobs.peek()[0].payload == b"high"
    assert jobs.control(ageing=0.001).ageing == 0.001
    assert [peeked.payload for peeked in jobs.peek(2)] == [b"low", b"high"]
    assert jobs.take(0).payload == b"low"
    jobs.put("low", key=key)
    jobs.control(ageing=None)
    assert [job.payload for job in jobs.take_many(2, 0)] == [b"high", b"low"]


def test_ageing_by_argument(broker):
    jobs = broker.declare("jobs", arguments={"x-fair-ageing": 60_000})
    assert jobs.control().ageing == 60
    with pytest.raises(InvalidArgument):
        jobs.control(ageing=-1)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("x-fair-aging", "x-fair-ageing"),
        ("x-max-lenght", "x-max-length"),
        ("message-ttl", "x-message-ttl"),
        ("x-dead-letter-exchage", "x-dead-letter-exchange"),
    ],
)
def test_a_misspelt_argument_is_an_error(broker, misspelt, meant):
    with pytest.raises(InvalidArgument, match=f"Did you mean {meant}[?]"):
        broker.declare("jobs", arguments={misspelt: 60_000})


# -- time to run -------------------------------------------------------------------------------------------------------


def test_consumer_timeout(broker):
    """A consumer that does not settle in time has lost the job; it goes to the next one that takes it."""
    jobs = broker.declare("jobs", arguments={"x-consumer-timeout": 50})
    jobs.put("job")
    jobs.put("patient", ttr=1000)
    slow, patient = jobs.take_many(2, 0)
    assert (slow.ttr, patient.ttr) == (0.05, 0.05), "the shorter one counts"
    again = jobs.take(PATIENCE_S)
    assert again.attempts == 2
    with pytest.raises(LeaseLost):
        next(job for job in (slow, patient) if job.id == again.id).ack()


# -- one active consumer -----------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(broker):
    return broker.declare("jobs", arguments={"x-single-active-consumer": True})


def test_the_first_broker_is_served_and_the_other_takes_over_when_it_closes(jobs, another, threads, asleep):
    first, second = another(), another()
    jobs.put("a")
    jobs.put("b")
    held = first.queue("jobs").take(0)
    sleeping = asleep(second)
    waiting = threads.submit(second.queue("jobs").take, PATIENCE_S)
    assert sleeping.wait(PATIENCE_S)
    assert second.queue("jobs").take(0) is None
    assert not waiting.done()
    first.close()
    assert waiting.result().payload == b"a", "what the first one had not finished comes first"
    assert held.payload == b"a"
    assert second.queue("jobs").take(0).payload == b"b"


def test_a_dead_broker_is_replaced(jobs, another, threads, asleep, sweep):
    first, second = another(), another()
    jobs.put("a")
    first.queue("jobs").take(0)
    sleeping = asleep(second)
    waiting = threads.submit(second.queue("jobs").take, PATIENCE_S)
    assert sleeping.wait(PATIENCE_S)
    sweep(second, first)
    job = waiting.result()
    assert (job.payload, job.attempts) == (b"a", 2)


def test_two_brokers_of_one_session_are_two_consumers(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Broker.open(url) as one, Broker.open(url) as two:
        jobs = one.declare("jobs", arguments={"x-single-active-consumer": True})
        jobs.put_many("abc")
        job = jobs.take(0)
        assert job.payload == b"a"
        assert two.queue("jobs").take(0) is None
        one.close()
        assert two.queue("jobs").take(0).payload == b"a"


def test_a_broker_that_takes_from_several_queues_gets_those_that_are_free(jobs, another):
    first, second = another(), another()
    first.queue("jobs").take(0)
    jobs.put("a")
    second.queue("others").put("b")
    assert second.take(["jobs", "others"], 0).payload == b"b"
    assert second.take(["jobs", "others"], 0) is None
