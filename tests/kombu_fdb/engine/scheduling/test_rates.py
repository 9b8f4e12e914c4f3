"""Rates of keys over many consumers, whose wall clocks are apart and jump."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.conformance.queue import Bench
from kit.duties import promote_all
from kit.faults import FaultyDatabase

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.scheduling import key_limits
from kombu_fdb.engine.work import Environment
from kombu_fdb.model import KeyLimits, Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.testing.clock import ManualClock

HOUR_S = 3600.0


class Fleet:
    """Consumers of one key with a rate, and the promoter, each with a wall clock of its own."""

    def __init__(self, limits, skews_s, promoter_s=0.0):
        self.bench = Bench(FaultyDatabase())
        self.clocks = [ManualClock() for _ in [*skews_s, promoter_s]]
        for clock, skew_s in zip(self.clocks, [*skews_s, promoter_s], strict=True):
            clock.jump_wall(skew_s)
        *self.consumers, self.promoter = [self._engine(clock) for clock in self.clocks]
        self.sessions = [engine.sessions.open({}) for engine in self.consumers]
        self.bench.engine.queues.limit("q", "a", limits)
        self.passed_s = 0.0
        #: When a message was served, in true seconds.
        self.served = []

    def _engine(self, clock):
        bench = self.bench
        return Engine(
            bench.database,
            bench.namespace,
            Environment(clock, random_id, random.Random(1), call_s=30.0),
        )

    def put(self, number):
        self.bench.engine.publisher.publish([Publication("", "q", b"", key="a")] * number)

    def later(self, seconds):
        """What a quiet fleet does in this time: the promoter looks when it has to, and who is woken claims."""
        self.passed_s += seconds
        for clock in self.clocks:
            clock.advance(seconds)
        promote_all(self.promoter)

    def claim(self, consumer, most=1000):
        taken = self.consumers[consumer].messages.claim(self.sessions[consumer], ["q"], most)
        self.served += [self.passed_s] * len(taken)
        return len(taken)

    def all_claim(self, first=0):
        """A bell wakes all; who comes first is chance."""
        for consumer in range(len(self.consumers)):
            self.claim((consumer + first) % len(self.consumers))

    def ring(self):
        """A claim has a reason to look at the key, whether it has tokens or not."""
        self.bench.write(lambda tr: tr.set(self.bench.engine.keys.freed("q", "a"), b""))


def most_in(served, window_s):
    """The most that were served in any window of this length."""
    begins, most = 0, 0
    for end, moment in enumerate(served):
        while moment - served[begins] > window_s:
            begins += 1
        most = max(most, end - begins + 1)
    return most


def test_skewed_clocks_count_once_not_with_each_claim():
    """Two consumers, 50 ms apart, that take turns: a thousand messages a second, for a second."""
    limits = KeyLimits(rate=1000, burst=50)
    fleet = Fleet(limits, [0.0, 0.050])
    fleet.put(1_500)
    for step in range(200):
        fleet.later(0.005)
        fleet.ring()
        fleet.claim(step % 2, most=10)
    assert 950 <= len(fleet.served) <= 50 + 1000 * (1 + 0.050) + 1


@pytest.mark.parametrize("consumers", [1, 2, 8])
def test_a_clock_that_was_set_back_stops_no_key(consumers):
    """One a second, in five minutes of the hour that the clocks went back by.

    A consumer that sees a bucket for the first time can't know how old it is, but the promoter knows.
    """
    fleet = Fleet(KeyLimits(rate=1, burst=2), [0.0] * consumers)
    fleet.put(400)
    fleet.all_claim()
    for clock in fleet.clocks:
        clock.jump_wall(-HOUR_S)
    del fleet.served[:]
    for step in range(4 * 300):
        fleet.later(0.25)
        fleet.all_claim(step)
    assert 300 * 0.75 <= len(fleet.served) <= 300 + 2  # looked at in steps of a quarter of a second


def test_a_clock_that_is_far_ahead_stops_no_key_and_gives_nothing_away():
    fleet = Fleet(KeyLimits(rate=1, burst=2), [0.0, 0.0, 600.0])
    fleet.put(400)
    fleet.claim(2)
    for step in range(4 * 300):
        fleet.later(0.25)
        fleet.all_claim(step)
    assert 300 / 2 <= len(fleet.served) <= 300 + 2 + 2


def test_a_promoter_whose_clock_is_behind_wakes_the_key_in_time():
    """By how long it has seen the entry, as its clock says nothing about the consumers'."""
    fleet = Fleet(KeyLimits(rate=1, burst=1), [0.0], promoter_s=-HOUR_S)
    fleet.put(100)
    for _ in range(4 * 60):
        fleet.all_claim()
        fleet.later(0.25)
    assert 60 / 2 <= len(fleet.served) <= 60 + 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "claim", "jump"]),
        st.integers(0, 30),
        st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]),
        st.integers(-100, 100),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(
    rate=st.sampled_from([0.1, 1, 10, 100]),
    burst=st.integers(1, 20),
    skews=st.lists(st.integers(-100, 100), min_size=1, max_size=5),
    percent_s=st.sampled_from([0.0001, 0.01, 0.5]),
    history=steps,
)
def test_no_history_of_clocks_gives_more_than_the_skew_once(rate, burst, skews, percent_s, history):
    """In any window: what the rate allows in it, the burst, and what it allows in the time the clocks were apart.

    Skews and jumps are percent of the furthest that a clock is wrong.
    """
    fleet = Fleet(KeyLimits(rate=rate, burst=burst), [skew * percent_s for skew in skews])
    fleet.put(600)
    errors, seen = skews[:], skews[:]
    for verb, who, pause_s, jump in history:
        fleet.later(pause_s)
        consumer = who % len(skews)
        if verb == "jump":
            aim = max(-100, min(100, errors[consumer] + jump))
            fleet.clocks[consumer].jump_wall((aim - errors[consumer]) * percent_s)
            errors[consumer] = aim
            seen.append(aim)
        else:
            fleet.ring()
            fleet.claim(consumer, most=1 + who)
    skew_s = (max(seen) - min(seen)) * percent_s
    for window_s in (0.0, 0.1, 1.0, 10.0, fleet.passed_s):
        allowed = burst + rate * (window_s + skew_s + 0.002)  # clocks tell whole milliseconds
        assert most_in(fleet.served, window_s) <= allowed, (window_s, skew_s)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0.5, 1, 5]), st.integers(1, 5), st.lists(st.floats(-HOUR_S, HOUR_S), min_size=1, max_size=3))
def test_whatever_the_clocks_say_the_key_goes_on(rate, burst, errors_s):
    """After every clock has jumped, each 1 / rate seconds a message is served, as long as consumers claim."""
    fleet = Fleet(KeyLimits(rate=rate, burst=burst), [0.0] * len(errors_s))
    fleet.put(200)
    fleet.all_claim()
    for clock, error_s in zip(fleet.clocks, errors_s, strict=False):
        clock.jump_wall(error_s)
    for _ in range(10):
        before = len(fleet.served)
        for _ in range(3):
            fleet.all_claim()
            fleet.later(1 / rate + 0.002)
        assert len(fleet.served) > before


def test_tokens_are_used_up_inside_of_one_claim_and_over_all():
    fleet = Fleet(KeyLimits(rate=1, burst=5), [0.0, 0.0])
    fleet.put(100)
    assert fleet.claim(0) == 5
    assert fleet.claim(1) == 0
    fleet.later(2.002)
    assert fleet.claim(1) == 2
    assert fleet.claim(0) == 0


def test_a_rate_and_a_limit_in_flight_both_count():
    fleet = Fleet(KeyLimits(rate=1, burst=5, max_in_flight=2), [0.0])
    fleet.put(100)
    assert fleet.claim(0) == 2
    fleet.later(10)
    assert fleet.claim(0) == 0
    assert fleet.bench.engine.inspect.keys_of("q")["a"].leased == 2


def test_a_bucket_filled_at_the_last_moment_is_credited():
    """Its moment is the last one a row can hold."""
    now_ms, last_ms = 1_000, 2**64 - 1
    database = FaultyDatabase()
    bench = Bench(database)
    row = bench.engine.keys.bucket("q", "a"), key_limits.encode(key_limits.Bucket(0.0, last_ms))
    bench.engine.queues.limit("q", "a", KeyLimits(rate=1, burst=1))
    bench.write(lambda tr: tr.set(*row))
    bench.work(lambda work: key_limits.credit(work, [(row, now_ms)]))
    assert dict(bench.engine.upkeep.rows(bench.engine.keys.all_buckets))[row[0]] == key_limits.encode(
        key_limits.Bucket(1.0, last_ms)
    )
