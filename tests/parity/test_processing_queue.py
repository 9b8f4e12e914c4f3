"""FoundationDB's processing queue: what of its features the conformance suites do not ask for."""

from __future__ import annotations

import pytest

from kombu_fdb.api.job import Job
from kombu_fdb.api.job import backoff_s as seconds
from kombu_fdb.errors import AlreadySettled, InvalidArgument, LeaseLost
from kombu_fdb.primitives.clock import SystemClock

PATIENCE_S = 60.0


@pytest.fixture
def jobs(broker):
    return broker.queue("jobs")


# -- leases ------------------------------------------------------------------------------------------------------------


def test_extend_checks_ownership(another, sweep):
    owner, other = another(), another()
    owner.queue("jobs").put("1")
    job = owner.queue("jobs").take(0)
    job.extend()
    sweep(other, owner)
    with pytest.raises(LeaseLost):
        job.extend()


def test_extend_sees_a_fence_before_the_sweep_has_come_by(another):
    owner, other = another(), another()
    owner.queue("jobs").put("1")
    job = owner.queue("jobs").take(0)
    session_id = owner._client.membership().session_id
    assert other._engine.sessions.fence(
        session_id, {each: beat for each, beat, _ in other._engine.sessions.beats()}[session_id]
    )
    with pytest.raises(LeaseLost):
        job.extend()
    assert other._engine.sessions.release(session_id) == 1


def test_lease_stolen(another, sweep):
    """Swept, and taken by another one: the late owner changes nothing, and can find out who has it."""
    late, other = another(), another()
    late.queue("jobs").put("1")
    job = late.queue("jobs").take(0)
    sweep(other, late)
    stolen = other.queue("jobs").take(PATIENCE_S)
    for verb in (job.ack, job.release, job.bury):
        with pytest.raises(LeaseLost):
            verb()
    found = late.queue("jobs").find(job.id)
    assert (found.state, found.owner) == ("leased", other._client.membership().session_id)
    assert stolen.attempts == 2
    stolen.ack()
    late.queue("jobs").put("2")
    assert late.queue("jobs").take(PATIENCE_S).payload == b"2", "with a new session"


@pytest.mark.parametrize("how", ["ack", "release", "bury"])
def test_settling_twice(jobs, how):
    jobs.put("1")
    job = jobs.take(0)
    getattr(job, how)()
    for again in (job.ack, job.release, job.bury, job.extend):
        with pytest.raises(AlreadySettled) as caught:
            again()
        assert caught.value.how.startswith(how[:3])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "minutes"), [(1, 1), (2, 5), (3, 25), (4, 25)])
def test_backoff_1_5_25_min(broker, jobs, attempt, minutes):
    assert seconds("1/5/25min", attempt) == minutes * 60
    jobs.put("1")
    (delivery,) = broker._client.membership().claim(["jobs"], 1)
    Job(broker.connection, delivery._replace(redeliveries=attempt - 1)).release(backoff="1/5/25min")
    assert jobs.take(0) is None
    _, due_ms = broker._engine.upkeep.promote()
    early_ms = minutes * 60_000 - (due_ms - SystemClock().wall_ms())
    assert -1 <= early_ms < 30_000, "rounded up to the next millisecond"


@pytest.mark.parametrize(("name", "expected"), [("1/5/25min", 300), ("10s", 10), ("0.5/1h", 3600)])
def test_backoff_names(name, expected):
    assert seconds(name, 2) == expected


@pytest.mark.parametrize("name", ["", "fast", "1/5", "1//5min", "-1s", "1/5/25minutes"])
def test_backoff_of_another_name(jobs, name):
    with pytest.raises(InvalidArgument):
        seconds(name, 1)
    jobs.put("1")
    job = jobs.take(0)
    with pytest.raises(InvalidArgument):
        job.release(backoff=name)
    job.ack()


def test_a_delay_and_a_backoff(jobs):
    jobs.put("1")
    job = jobs.take(0)
    with pytest.raises(InvalidArgument):
        job.release(3, backoff="1s")
    job.ack()


def test_dead_letters_with_the_last_error(broker):
    """The seed's ``MaxAttempts = 3``."""
    jobs = broker.declare("jobs", arguments={"x-delivery-limit": 2})
    jobs.put("1", key="alice")
    for attempt in (1, 2, 3):
        jobs.take(0).release(error=ValueError(f"attempt {attempt}"))
    assert jobs.take(0) is None
    (dead,) = jobs.dead_letters.list(10)
    assert (dead.payload, dead.key) == (b"1", "alice")
    (death,) = dead.deaths
    assert (death.queue, death.reason) == ("jobs", "delivery_limit")
    assert death.details == {"error": "attempt 3", "error_class": "builtins.ValueError"}


@pytest.mark.parametrize("size", [10, 300_000])
def test_replay(broker, size):
    """Id, payload, key and history stay, attempts count anew; dying again is noted beside the first time."""
    jobs = broker.declare("jobs", arguments={"x-delivery-limit": 1})
    job_id = jobs.put(b"x" * size, key="alice")
    for _ in range(2):
        jobs.take(0).release(error="first life")
    assert jobs.dead_letters.replay(10) == 1
    assert jobs.dead_letters.count().total() == 0
    job = jobs.take(0)
    assert (job.id, job.payload, job.key, job.attempts) == (job_id, b"x" * size, "alice", 1)
    assert [death.details["error"] for death in job.deaths] == ["first life"]
    job.bury(error="second life")
    (dead,) = jobs.dead_letters.list(10)
    assert [(death.reason, death.details["error"]) for death in dead.deaths] == [
        ("rejected", "second life"),
        ("delivery_limit", "first life"),
    ]


# -- clocks ------------------------------------------------------------------------------------------------------------
