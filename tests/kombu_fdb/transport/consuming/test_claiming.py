"""A channel that stands in a wait queue and consumes from another queue too: its room is promised once, and shared."""

from collections import Counter

import pytest
from kit.conformance.consumer import OPTIONS, Consumer
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.process import client
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.transport.consuming.dispatch import Plan
from kombu_fdb.transport.consuming.receiver import deliver_next


def contested(bench, prefetch):
    """The first of a wait queue for "q", and one that waits there and is the active consumer of "one"."""
    first = Consumer(bench, ["q"], contested=True)
    second = Consumer(bench, ["q", "one"], prefetch=prefetch, single=["one"], contested=True)
    for consumer in (first, second, first, second, second):
        consumer.turn()
    bench.clock.advance(1)  # it has looked at "one", and owes the wait queue nothing
    combiner = second.transport.fetcher._claiming.combiner
    assert combiner.in_wait_queue
    assert not combiner.is_first
    return first, second


def test_room_that_is_promised_to_a_wait_queue_is_not_given_to_another_queue(bench):
    first, second = contested(bench, prefetch=3)
    bench.put(b"a", b"b", b"c", queue="one")
    second.turn()
    assert second.waiting == ["one"] * 3
    bench.put(*(b"%d" % number for number in range(12)))
    for _ in range(4):
        first.turn()
        second.turn()
        assert len(second.waiting) <= 3
        first.settle()


def test_what_the_wait_queue_has_granted_comes_before_another_queue(bench):
    bench.put(*(b"%d" % number for number in range(12)))
    second = Consumer(bench, ["q", "one"], prefetch=2, single=["one"], contested=True)
    first = Consumer(bench, ["q"], contested=True)
    combiner = second.transport.fetcher._claiming.combiner
    client_session = second.transport.store.session()
    first.transport.fetcher._claiming.combiner.join(first.transport.store.session(), ["q"], 4, [])
    combiner.join(client_session, ["q"], 2, [])
    first.turn()
    bench.put(b"a", b"b", queue="one")
    fetcher = second.transport.fetcher
    fetcher._claiming.restrict(Plan(["one"], 2, consumers={"one": "tag-1"}))
    assert [each.queue for each in fetcher.dispatch.arriving] == ["q", "q"]
    assert not combiner.in_wait_queue


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_neither_the_wait_queue_nor_the_other_queue_starves(bench, prefetch):
    first, second = contested(bench, prefetch)
    served = Counter()
    for _ in range(60):
        bench.put(*(b"%d" % each for each in range(8)))
        bench.put(*(b"%d" % each for each in range(4)), queue="one")
        for consumer in (first, second):
            consumer.turn()
        served.update(second.settle())
        first.settle()
        bench.clock.advance(0.1)
    assert served["one"] >= served.total() / 5, served
    assert served["q"] >= served.total() / 5, served


def test_an_idle_line_keeps_no_consumer_waiting(bench):
    _first, second = contested(bench, prefetch=2)
    bench.put(*(b"%d" % number for number in range(20)), queue="one")
    for _ in range(10):
        second.turn()
        assert second.settle() == ["one", "one"]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_busy_queue_of_its_own_does_not_keep_the_first_from_the_wait_queue(bench, prefetch):
    first = Consumer(bench, ["q", "one"], prefetch=prefetch, single=["one"], contested=True)
    for _ in range(4):
        first.turn()
    bench.put(*[b""] * 50)
    settled = Counter()
    for _ in range(40):
        bench.put(b"", queue="one")
        first.turn()
        settled.update(first.settle())
        bench.clock.advance(0.05)
    assert settled["one"] >= 10
    assert settled["q"] >= 10


def test_a_grant_is_no_more_than_there_is_room_for_now(bench):
    """The prefetch was lowered while it waited."""
    consumer = Consumer(bench, ["q"], prefetch=4, contested=True)
    first = Consumer(bench, ["q"], contested=True)
    combiner = first.transport.fetcher._claiming.combiner
    combiner.join(first.transport.store.session(), ["q"], 4, [])
    consumer.turn()
    assert consumer.transport.fetcher._claiming.combiner.want == 4
    bench.put(*[b""] * 12)
    first.turn()
    consumer.transport.credit.prefetch = 1
    consumer.turn()
    assert consumer.waiting == ["q"]
    consumer.transport.store.keep_house()
    assert bench.counts("q")[2] == 1 + len(first.waiting)


def test_messages_without_acks_take_no_room_from_others(bench):
    consumer = Consumer(bench, ["q"], prefetch=2)
    transport = consumer.transport
    bench.engine.queues.declare(QueueDeclaration("events", auto_delete=True))
    transport.consume("events", "without", no_ack=True, transient=True)
    consumer.turn()
    bench.put(*[b""] * 4, queue="events")
    transport.fetcher._watch_set.hungry.discard("q")
    consumer.turn()
    assert consumer.waiting == ["events"]
    bench.put(b"", b"")
    transport.fetcher._watch_set.hungry.add("q")
    consumer.turn()
    assert consumer.waiting.count("q") == 2


@pytest.fixture
def without_wait_queues():
    """On a store whose writers take turns, where consumers stand in no wait queue."""
    database = FaultyDatabase()
    database.writers_take_turns = True
    bench = Bench(database)
    yield bench
    bench.check()


def test_a_queue_that_has_given_its_only_message_does_not_bound_the_claims_of_a_busy_one(without_wait_queues):
    """An event comes to a worker: there is room for one, and a claim of both queues takes no more than that."""
    bench, taken = without_wait_queues, list[str]()
    consumer = Consumer(bench, ["q"])
    bench.engine.queues.declare(QueueDeclaration("events", auto_delete=True))
    consumer.transport.consume("events", "without", no_ack=True, transient=True)
    consumer.turn()
    bench.put(*[b""] * 40)
    bench.put(b"", queue="events")
    while "events" not in taken:
        consumer.turn()
        taken += consumer.settle(each_s=1)
    for _ in range(3):
        consumer.turn()
        taken = consumer.settle(each_s=1)
    assert taken == ["q"] * 4


def handed_one_out(bench):
    """Of its four messages; more wait in the queue."""
    consumer = Consumer(bench, ["q"])
    bench.put(*[b""] * 12)
    consumer.turn()
    with consumer.transport.draining():
        assert deliver_next(consumer.transport.fetcher)
    return consumer


def test_no_turn_follows_a_claim_that_uses_all_the_room(without_wait_queues):
    consumer = Consumer(without_wait_queues, ["q"])
    consumer.turn()
    without_wait_queues.put(*[b""] * 8)
    consumer.turn()
    assert len(consumer.waiting) == 4
    assert not consumer.transport.is_awake


def test_a_turn_follows_a_claim_that_could_not_take_all_acks_along(without_wait_queues, monkeypatch):
    monkeypatch.setattr(client, "MOST_LEASES", 3)
    bench, consumer = without_wait_queues, Consumer(without_wait_queues, ["q"])
    consumer.turn()
    bench.put(*[b""] * 12)
    consumer.turn()
    consumer.settle()
    consumer.turn()
    assert len(consumer.waiting) == 4
    assert len(consumer.transport.store.acks) == 1
    while consumer.transport.is_awake:
        consumer.transport.turn()
    bench.clock.advance(1.1 * OPTIONS.ack_delay_ms / 1000)
    assert consumer.transport.is_awake
    consumer.transport.turn()
    assert not consumer.transport.store.acks


def test_acks_wait_for_a_claim_that_takes_them_along(without_wait_queues):
    bench, consumer, delay_s = without_wait_queues, handed_one_out(without_wait_queues), OPTIONS.ack_delay_ms / 1000
    consumer.transport.qos.ack(*consumer.transport.given)
    bench.clock.advance(0.6 * delay_s)
    consumer.turn()  # sees a free place, which waits for more of them
    bench.clock.advance(0.6 * delay_s)
    assert consumer.transport.store.acks
    consumer.turn()
    assert not consumer.transport.store.acks
    assert len(consumer.waiting) == 4


def test_acks_wait_no_longer_for_a_claim_when_the_program_does_not_drain(without_wait_queues):
    bench, consumer, delay_s = without_wait_queues, handed_one_out(without_wait_queues), OPTIONS.ack_delay_ms / 1000
    consumer.transport.fetcher.attend_loop(registered=False)
    bench.clock.advance(OPTIONS.undrained_timeout - 0.5 * delay_s)
    consumer.transport.qos.ack(*consumer.transport.given)
    consumer.turn()  # sees a free place, which waits for more of them
    bench.clock.advance(1.1 * delay_s)
    consumer.turn()
    assert consumer.transport.fetcher.asleep
    assert not consumer.transport.store.acks


def test_messages_without_acks_are_not_held_up_by_others(bench):
    """By those for which there is no room any more, as the prefetch was lowered."""
    consumer = Consumer(bench, ["q"], prefetch=2)
    bench.put(b"", b"")
    consumer.turn()
    consumer.transport.credit.can_consume = lambda: False
    bench.engine.queues.declare(QueueDeclaration("events", auto_delete=True))
    consumer.transport.consume("events", "without", no_ack=True, transient=True)
    bench.put(b"", queue="events")
    consumer.turn()
    assert consumer.waiting == ["q", "q", "events"]
    arrival = consumer.transport.fetcher.next([])
    assert arrival is not None
    assert arrival.delivery.queue == "events"


def test_a_temporary_queue_with_and_without_acks(bench):
    """One of its consumers wants leases, so all messages have them, and a consumer without acks keeps none."""
    consumer = Consumer(bench, [])
    bench.engine.queues.declare(QueueDeclaration("events", auto_delete=True))
    consumer.transport.consume("events", "with", transient=True)
    consumer.transport.consume("events", "without", no_ack=True, transient=True)
    bench.put(*[b""] * 8, queue="events")
    for _ in range(8):
        consumer.turn()
        with consumer.transport.draining():
            while deliver_next(consumer.transport.fetcher):
                pass
        for tag in [tag for tag in consumer.transport.given if consumer.transport.qos.holds(tag)]:
            consumer.transport.qos.ack(tag)
    consumer.transport.store.flush_acks()
    assert len(consumer.transport.given) == 8
    assert bench.counts("events") == (0, 0, 0)


@pytest.mark.parametrize("competitors", [1, 3])
def test_who_has_a_busy_queue_of_his_own_deposes_a_first_that_hangs(bench, competitors):
    first = Consumer(bench, ["q"])
    combiner = first.transport.fetcher._claiming.combiner
    combiner.join(first.transport.store.session(), ["q"], 4, [])
    own = [f"own-{number}" for number in range(competitors)]
    consumers = [Consumer(bench, ["q", each], prefetch=1, single=[each], contested=True) for each in own]
    bench.put(*[b""] * 4)
    served = Counter()
    began_s = bench.clock.monotonic()
    while not served["q"]:
        for consumer, queue in zip(consumers, own, strict=True):
            bench.put(b"", queue=queue)
            if consumer.transport.is_awake:
                consumer.transport.turn()
            served.update(consumer.settle())
        bench.clock.advance(0.02)
        assert bench.clock.monotonic() - began_s < 10, "it is swept only with its session"
