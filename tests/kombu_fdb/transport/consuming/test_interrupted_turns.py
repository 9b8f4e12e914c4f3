"""A turn that an exception ends at any line: what it had in hand is delivered once, or free again.

Signal handlers raise in the main thread, which carries cancels out; with gevent every thread is a greenlet of it.
"""

from collections.abc import Callable

import pytest
from kit.conformance.consumer import OPTIONS, Consumer
from kit.conformance.queue import Bench
from kit.faults import Fault, Faults, FaultyDatabase
from kit.interruption import interrupt, runs_handlers

from kombu_fdb.errors import CommitUnknown
from kombu_fdb.process import client_session, combiner_client
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.transport.consuming import dispatch, fetcher
from kombu_fdb.transport.consuming.receiver import deliver_next

TURNS = frozenset(str(each.__file__) for each in (dispatch, fetcher))
WAITING = frozenset(str(each.__file__) for each in (combiner_client, client_session))
MESSAGES = 6

#: A consumer, and what is to be interrupted.
Scene = tuple[Consumer, Callable[[], object]]


def put(bench):
    bench.put(*(b"%d" % number for number in range(MESSAGES)))


def joined(bench, consumer):
    """A competitor who stands first in the wait queue for which the consumer waits."""
    first = Consumer(bench, ["q"], contested=True)
    combiner = first.transport.fetcher._claiming.combiner
    combiner.join(first.transport.store.session(), ["q"], 4, [])
    consumer.turn()
    assert consumer.transport.fetcher._claiming.combiner.in_wait_queue
    return first


def alone(bench):
    consumer = Consumer(bench, ["q"])
    put(bench)
    return consumer, consumer.turn


def with_acks(bench):
    """Its claim takes the acks of the one before along."""
    consumer = Consumer(bench, ["q"], prefetch=3)
    put(bench)
    consumer.turn()
    consumer.settle()
    return consumer, consumer.turn


def first_of_a_wait_queue(bench):
    consumer = Consumer(bench, ["q"], contested=True)
    for _ in range(2):
        consumer.turn()
    put(bench)
    return consumer, consumer.turn


def granted(bench):
    consumer = Consumer(bench, ["q"], contested=True)
    first = joined(bench, consumer)
    put(bench)
    first.turn()
    assert first.settle()
    first.transport.store.flush_acks()
    return consumer, consumer.turn


def asleep_when_granted(bench):
    consumer, _ = granted(bench)
    fetcher = consumer.transport.fetcher
    fetcher.attend_loop(registered=False)
    bench.clock.advance(OPTIONS.undrained_timeout + 1)
    return consumer, consumer.turn


def left_lying(bench):
    consumer, _ = alone(bench)
    consumer.turn()
    bench.clock.advance(OPTIONS.undrained_timeout + 1)
    return consumer, consumer.turn


def cancelled(bench):
    consumer, _ = alone(bench)
    consumer.turn()
    transport = consumer.transport
    transport.fetcher.cancel(transport.subscriptions.pop(), leave=True)
    transport.consume("q", "another")
    return consumer, transport.fetcher.carry_out_cancels


def without_room(bench):
    consumer, _ = granted(bench)
    consumer.transport.credit.prefetch = 1
    return consumer, consumer.turn


def fenced(bench):
    """What waits for it belongs to others now; its next turn is another session's."""
    consumer, _ = alone(bench)
    consumer.turn()
    lost = consumer.transport.store.session()
    bench.engine.sessions.close(lost.session_id)
    lost.lose()
    return consumer, consumer.turn


def settled_in_the_end(bench, consumer):
    """Everything that is delivered once it is left alone, the late duties included."""
    queues = []
    consumer.transport.fetcher.attend_loop(registered=True)
    for _ in range(4 * MESSAGES):  # a slow consumer has one message at a time
        consumer.turn()
        consumer.transport.store.session().watch_claims()
        consumer.transport.store.keep_house()
        with consumer.transport.draining():  # which ends a stall
            hand = []
            consumer.transport.fetcher.next(hand)
            consumer.transport.fetcher.return_undelivered(hand)
        queues += consumer.settle()
        bench.clock.advance(OPTIONS.undrained_timeout / MESSAGES)
    return queues


SCENES = [
    alone,
    with_acks,
    first_of_a_wait_queue,
    granted,
    asleep_when_granted,
    left_lying,
    cancelled,
    without_room,
    fenced,
]


@pytest.mark.parametrize("scene", SCENES)
def test_what_an_interrupted_turn_had_is_not_lost(scene):
    where, line = "begin", 0
    while where:
        line += 1
        bench = Bench(FaultyDatabase())
        consumer, call = scene(bench)
        left = sum(bench.counts("q")) - len(consumer.transport.store.acks)
        where = interrupt(call, line, TURNS, strikes=runs_handlers)
        assert len(settled_in_the_end(bench, consumer)) == left, where
        assert bench.counts("q") == (0, 0, 0), where
        assert not consumer.transport.store.session().known, where
    assert line > 10


def test_what_was_taken_out_of_the_store_is_not_lost_either():
    """For consumers without acks of a queue that vanishes with them."""
    where, line = "begin", 0
    while where:
        line += 1
        bench = Bench(FaultyDatabase())
        consumer = Consumer(bench, [])
        bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
        consumer.transport.consume("q", "tag", no_ack=True, transient=True)
        put(bench)
        where = interrupt(consumer.turn, line, TURNS, strikes=runs_handlers)
        assert len(settled_in_the_end(bench, consumer)) == MESSAGES, where
    assert line > 10


@pytest.mark.parametrize("scene", [first_of_a_wait_queue, granted, asleep_when_granted, without_room])
def test_what_was_handed_out_after_an_interrupted_turn_stays_leased(scene):
    """Even if the turn did not get as far as noting that its wait in the wait queue is over."""
    where, line = "begin", 0
    while where:
        line += 1
        bench = Bench(FaultyDatabase())
        consumer, call = scene(bench)
        where = interrupt(call, line, WAITING, strikes=runs_handlers)
        transport = consumer.transport
        transport.fetcher.attend_loop(registered=True)
        for _ in range(MESSAGES):
            consumer.turn()
            with transport.draining():
                while consumer.waiting and deliver_next(transport.fetcher):
                    pass
            transport.store.session().watch_claims()
            bench.clock.advance(OPTIONS.undrained_timeout / MESSAGES)
        transport.fetcher.abandon()
        transport.store.session().watch_claims()
        held = list(transport.credit.held.leases.values())
        assert held, where
        assert all(bench.engine.messages.holds(held)), where
    assert line > 10


def test_a_consumer_that_a_new_session_registered_without_an_answer_leaves(monkeypatch):
    bench = Bench(FaultyDatabase())
    consumer, turn = fenced(bench)
    transport = consumer.transport
    queues = transport.store.engine.queues
    add_consumer = queues.add_consumer

    def unanswered(*args, **given):
        add_consumer(*args, **given)
        raise CommitUnknown(in_flight=False)

    with monkeypatch.context() as patch:
        patch.setattr(queues, "add_consumer", unanswered)
        with pytest.raises(CommitUnknown):
            turn()
    assert bench.engine.inspect.consumer_count("q") == 1
    transport.fetcher.cancel(transport.subscriptions.pop(), leave=True)
    transport.fetcher.carry_out_cancels()
    transport.store.keep_house()
    assert bench.engine.inspect.consumer_count("q") == 0


def test_a_registration_that_lands_after_its_consumer_has_left_is_void():
    clock, faults = ManualClock(), Faults()
    bench = Bench(FaultyDatabase(clock=clock, faults=faults))
    bench.clock = clock
    transport = Consumer(bench, []).transport
    transport.store.session()
    faults.at_commits(Fault.COMMIT_LATE)
    faults.at_landings(1.0)
    with pytest.raises(CommitUnknown):
        transport.consume("q", "tag")
    transport.fetcher.carry_out_cancels()
    bench.later(2.0)
    put(bench)
    assert bench.engine.inspect.consumer_count("q") == 0


def test_consumers_that_leave_while_a_new_session_registers_them_have_left(monkeypatch):
    """As when their channel closes, and has not waited for the turn that is under way."""
    bench = Bench(FaultyDatabase())
    consumer, turn = fenced(bench)
    transport = consumer.transport
    transport.consume("q", "another")
    queues = transport.store.engine.queues
    add_consumer = queues.add_consumer

    def add(*args, **given):
        while transport.subscriptions:
            transport.fetcher.leave(transport.subscriptions.pop())
        add_consumer(*args, **given)

    monkeypatch.setattr(queues, "add_consumer", add)
    turn()
    transport.store.keep_house()
    assert bench.engine.inspect.consumer_count("q") == 0
