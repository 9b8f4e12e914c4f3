"""Keys, tenants and tasks that come once leave nothing: the store is as large as what is in it."""

from collections import Counter

import pytest
from kit.conformance.queue import Bench
from kit.duties import promote_all
from kit.faults import FaultyDatabase

from kombu_fdb.engine.metrics.samples import SERIES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, Publication, QueueControl

HOUR, DAY, WEEK = SERIES["hour"], SERIES["day"], SERIES["week"]

ONCE = 2_000
#: Bounded otherwise: what stands there for the store, the queue, a session, a process.
STANDING = {
    "format": 1,
    "session": 1,
    "beat": 1,
    "role": 1,
    "bell": 1,
    "alarm": 1,
    "fair": 1,
    "control": 1,
    "round": 10,  # one for each priority
    "total": 20,
    "key_total": 1_000,  # ``totals.py``: 200 keys and the others, of a few events
    "sample": HOUR.slots + DAY.slots + WEEK.slots,
    "token": 100,
}


@pytest.fixture
def bench():
    """Without ids of tasks, which have rows of their own."""
    return Bench(FaultyDatabase())


def rows(bench):
    """How many rows there are of each kind."""
    keys = bench.engine.keys
    found = bench.engine.transactions.read(lambda work: work.tr.get_range(*range_of(keys.prefix), snapshot=True))
    return Counter(str(keys.unpack(key)[0]) for key, _ in found)


def run_through(bench, end, **properties):
    """Two thousand keys, and as many tasks, with one message each."""
    for start in range(0, ONCE, 500):
        batch = [
            Publication("", "q", b"", key=_key(number), task_id=f"t{number}", priority=number % 10, **properties)
            for number in range(start, start + 500)
        ]
        bench.engine.publisher.publish(batch)
        drain(bench, end)


def _key(number):
    """Keys, tenants with one user, users of one tenant."""
    return (f"k{number}", f"tenant{number}/user", f"big/user{number}")[number % 3]


def drain(bench, end):
    """Until no claim has to look any more."""
    while True:
        if found := bench.take(100):
            end([each.lease for each in found])
        elif bench.engine.messages.arm(["q"]) is not None:
            if not bench.engine.inspect.counts("q").ready:
                return
            bench.later(1)
            promote_all(bench.engine)


def tidy(bench):
    """The duties, for an hour."""
    duties = bench.duties()
    for _ in range(20):
        bench.later(200)
        bench.engine.sessions.beat(bench.session)
        duties.run_once()


def assert_nothing_left(bench):
    found = rows(bench)
    surplus = {tag: number for tag, number in found.items() if number > STANDING.get(tag, 0)}
    assert not surplus


LIMITS = {
    "no limits": KeyLimits(),
    "in flight": KeyLimits(max_in_flight=1),
    "rate": KeyLimits(rate=10, burst=3),
    "rate and in flight": KeyLimits(rate=10, burst=3, max_in_flight=2),
    "weight": KeyLimits(weight=3),
    "capacity": KeyLimits(capacity=5),
    "priority": KeyLimits(priority=7),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_of_keys_that_come_once(bench, limits):
    bench.engine.queues.set_control("q", QueueControl(every_key=LIMITS[limits]))
    run_through(bench, bench.engine.messages.ack)
    tidy(bench)
    assert_nothing_left(bench)


def test_of_keys_that_used_up_their_rate(bench):
    """Each has waited for its bucket to be filled."""
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(rate=10, burst=1)))
    batch = [Publication("", "q", b"", key=f"k{number}") for number in range(500)]
    bench.engine.publisher.publish(batch + batch)
    drain(bench, bench.engine.messages.ack)
    assert rows(bench)["bucket"] == 500
    tidy(bench)
    assert_nothing_left(bench)


def test_of_messages_with_a_window_and_a_time_to_live(bench):
    run_through(bench, bench.engine.messages.ack, ttl_ms=10**6)
    batch = [Publication("", "q", b"", dedup_id=f"d{n}", dedup_window_ms=1000, key=f"k{n}") for n in range(ONCE)]
    bench.engine.publisher.publish(batch)
    drain(bench, bench.engine.messages.ack)
    tidy(bench)
    assert_nothing_left(bench)


def test_of_messages_that_expired(bench):
    batch = [Publication("", "q", b"", key=_key(n), task_id=f"t{n}", ttl_ms=1) for n in range(ONCE)]
    bench.engine.publisher.publish(batch)
    bench.later(1)
    drain(bench, bench.engine.messages.ack)
    tidy(bench)
    assert_nothing_left(bench)


def test_of_a_queue_that_was_purged(bench):
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(rate=10)))
    bench.engine.publisher.publish([Publication("", "q", b"", key=_key(n), task_id=f"t{n}") for n in range(ONCE)])
    bench.take(10)
    bench.engine.queues.purge("q")
    drain(bench, bench.engine.messages.ack)
    bench.engine.sessions.close(bench.session)
    bench.session = bench.engine.sessions.open({})
    drain(bench, bench.engine.messages.ack)
    tidy(bench)
    assert_nothing_left(bench)


def test_of_tasks_that_were_cancelled_or_moved(bench):
    bench.engine.publisher.publish([Publication("", "q", b"", key=_key(n), task_id=f"t{n}") for n in range(600)])
    bench.take(10)
    for number in range(300):
        bench.engine.messages.cancel(f"t{number}")
    bench.engine.messages.move("q", "r")
    while found := bench.take(100, "r"):
        bench.engine.messages.ack([each.lease for each in found])
    bench.engine.sessions.close(bench.session)
    bench.session = bench.engine.sessions.open({})
    drain(bench, bench.engine.messages.ack)
    tidy(bench)
    found_ = rows(bench)
    surplus = {tag: number for tag, number in found_.items() if number > 2 * STANDING.get(tag, 0)}
    assert not surplus
