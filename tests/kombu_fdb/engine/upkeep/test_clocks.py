"""What wall clocks decide, and by how much a wrong one is felt: docs/guarantees.md, "What clocks decide"."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.conformance.queue import Bench
from kit.duties import promote_all, replay
from kit.faults import FaultyDatabase

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.publish import KEPT_MS
from kombu_fdb.engine.work import Environment
from kombu_fdb.errors import QueueError
from kombu_fdb.model import Publication, Spot, View
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process.duty_cycle import DutyCycle
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.testing.clock import ManualClock

WINDOW_MS = 300_000


class Host:
    """A process on a machine whose wall clock is wrong by ``error_s``."""

    def __init__(self, bench, error_s, **options):
        self.clock = ManualClock()
        self.clock.jump_wall(error_s)
        self.engine = Engine(
            bench.database,
            bench.namespace,
            Environment(self.clock, random_id, random.Random(1), call_s=30.0, **options),
        )
        self.session = self.engine.sessions.open({})

    def once(self):
        self.engine.publisher.publish([Publication("", "q", b"", dedup_id="d", dedup_window_ms=WINDOW_MS)])

    def duties(self):
        return DutyCycle(self.engine, self.clock, self.session, sweep_interval_s=5.0)


def pass_time(hosts, seconds):
    for host in hosts:
        host.clock.advance(seconds)


@pytest.mark.parametrize("ahead_s", [-86_400, -600, 600, KEPT_MS / 1000 - 1])
def test_a_consumers_clock_ends_no_dedup_window(ahead_s):
    """Its duties clear what is over; up to a quarter of an hour ahead they clear nothing too early."""
    bench = Bench(FaultyDatabase())
    publisher, consumer = hosts = [Host(bench, 0), Host(bench, ahead_s)]
    duties = consumer.duties()
    publisher.once()
    for _ in range(int(WINDOW_MS / 1000 // 10) - 1):
        pass_time(hosts, 10)
        consumer.engine.sessions.beat(consumer.session)
        duties.run_once()
        consumer.engine.upkeep.clear_dedup_part()
        publisher.once()
    assert bench.counts() == (1, 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(-900, 900), st.integers(-900, 900), st.integers(0, 1500))
def test_a_dedup_window_is_wrong_by_how_far_its_publishers_are_apart_at_most(first_s, second_s, later_s):
    bench = Bench(FaultyDatabase())
    one, two = hosts = [Host(bench, first_s), Host(bench, second_s)]
    one.once()
    pass_time(hosts, later_s)
    one.engine.upkeep.clear_dedup_part()
    two.engine.upkeep.clear_dedup_part()
    two.once()
    stored, apart_s = bench.counts()[0], abs(first_s - second_s)
    if later_s < WINDOW_MS / 1000 - apart_s:
        assert stored == 1
    if later_s > WINDOW_MS / 1000 + apart_s:
        assert stored == 2


@settings(max_examples=200, deadline=None)
@given(st.integers(-900, 900), st.lists(st.integers(-900, 900), min_size=1, max_size=4), st.integers(0, 1500))
def test_a_message_expires_early_or_late_by_how_far_the_clocks_are_apart_at_most(publisher_s, consumers_s, later_s):
    """Of several consumers the first that sees it decides."""
    bench = Bench(FaultyDatabase())
    publisher, *consumers = hosts = [Host(bench, publisher_s), *(Host(bench, each) for each in consumers_s)]
    publisher.engine.publisher.publish([Publication("", "q", b"", ttl_ms=WINDOW_MS)])
    pass_time(hosts, later_s)
    found = [delivery for each in consumers for delivery in each.engine.messages.claim(each.session, ["q"], 1)]
    ahead_s = max(0, consumers_s[0] - publisher_s)
    behind_s = max(0, *(publisher_s - each for each in consumers_s))
    if later_s < WINDOW_MS / 1000 - ahead_s:
        assert len(found) == 1
    if later_s > WINDOW_MS / 1000 + behind_s:
        assert not found


@pytest.mark.parametrize("behind_s", [0, 1, 86_400])
def test_a_lifetime_of_no_length_is_over_by_every_clock(behind_s):
    """A claim may have read its clock before the publish that it waited for."""
    bench = Bench(FaultyDatabase())
    publisher, consumer = Host(bench, 0), Host(bench, -behind_s)
    publisher.engine.publisher.publish([Publication("", "q", b"", ttl_ms=0)])
    assert not consumer.engine.messages.claim(consumer.session, ["q"], 1)


def test_a_message_that_has_expired_by_every_clock_is_not_rescheduled():
    bench = Bench(FaultyDatabase())
    publisher, operator = Host(bench, 600), Host(bench, 0)
    publisher.engine.publisher.publish([Publication("", "q", b"", ttl_ms=0)])
    (listed,) = operator.engine.inspect.page("q", View("ready"), 10).messages
    with pytest.raises(QueueError, match="expires before it is due"):
        operator.engine.messages.reschedule("q", Spot("ready", listed.position, listed.message.message_id), 0)


def test_a_life_does_not_depend_on_the_clock_of_a_consumer_that_delayed_the_message():
    bench = Bench(FaultyDatabase())
    publisher, ahead, consumer = Host(bench, 0), Host(bench, 59), Host(bench, 0)
    publisher.engine.publisher.publish([Publication("", "q", b"", ttl_ms=60_000)])
    (delivery,) = ahead.engine.messages.claim(ahead.session, ["q"], 1)
    ahead.engine.messages.release([delivery.lease], due_ms=ahead.clock.wall_ms() + 2_000)
    pass_time([publisher, ahead, consumer], 2)
    promote_all(ahead.engine)
    assert len(consumer.engine.messages.claim(consumer.session, ["q"], 1)) == 1


@pytest.mark.parametrize("ttl_ms", [0, 60_000])
@pytest.mark.parametrize("queue", ["q", "q.dead"], ids=["after a replay", "of a dead letter"])
def test_the_life_of_what_died_does_not_depend_on_its_publishers_clock(ttl_ms, queue):
    options = {"dead_ttl_ms": ttl_ms} if queue == "q.dead" else {}
    bench = Bench(FaultyDatabase(), **options)
    publisher, consumer, behind = Host(bench, 600), Host(bench, 0, **options), Host(bench, -10)
    publisher.engine.publisher.publish([Publication("", "q", b"")])
    (delivery,) = consumer.engine.messages.claim(consumer.session, ["q"], 1)
    consumer.engine.messages.reject([delivery.lease])
    if queue == "q":
        consumer.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": ttl_ms}))
        assert replay(consumer.engine, "q", 1) == 1
    assert len(behind.engine.messages.claim(behind.session, [queue], 1)) == bool(ttl_ms)


@settings(max_examples=200, deadline=None)
@given(st.integers(-900, 900), st.integers(-900, 900), st.integers(0, 1500))
def test_a_delay_is_wrong_by_how_far_publisher_and_promoter_are_apart_at_most(publisher_s, promoter_s, later_s):
    bench = Bench(FaultyDatabase())
    publisher, promoter = hosts = [Host(bench, publisher_s), Host(bench, promoter_s)]
    publisher.engine.publisher.publish([Publication("", "q", b"", due_ms=publisher.clock.wall_ms() + WINDOW_MS)])
    pass_time(hosts, later_s)
    promote_all(promoter.engine)
    ready, apart_s = bench.counts()[0], abs(publisher_s - promoter_s)
    if later_s < WINDOW_MS / 1000 - apart_s:
        assert not ready
    if later_s > WINDOW_MS / 1000 + apart_s:
        assert ready
