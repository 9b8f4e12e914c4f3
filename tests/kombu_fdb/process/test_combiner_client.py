"""A consumer among its competitors: how long it waits for what, and what comes between two steps of one of its calls.

Who waits, serves and is evicted is in ``kit/waiters.py``.
"""

import struct
import threading
from itertools import cycle
from unittest.mock import Mock

import pytest
from kit.interruption import interrupt, runs_handlers
from kit.waiters import OPTIONS, Consumer, Middle

from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.errors import Conflict, SessionLost, StoreUnavailable
from kombu_fdb.process import client_session, combiner_client
from kombu_fdb.process.client_session import CLAIM_TIMEOUTS
from kombu_fdb.process.combiner_client import LONELY, PATIENCE_S, Contention

QUEUES = ["q"]


class Longest(Middle):
    """Who is never lucky."""

    @staticmethod
    def uniform(a, b, /):
        return max(a, b)


def test_a_consumer_far_behind_seldom_asks_for_work(bench, monkeypatch):
    """However often it looks, as in a busy wait queue, which it leaves and joins again."""
    *others, last = (Consumer(bench) for _ in range(5))
    for each in others:
        each.turn()
    asked = []
    monkeypatch.setattr(last.engine.messages, "has_work", asked.append)
    began_s = bench.clock.monotonic()
    for _ in range(20):
        last.turn()
        last.sleep()
        last.turn()
        last.combiner.leave()
    assert 1 < len(asked) <= 1 + (bench.clock.monotonic() - began_s) / combiner_client.SELDOM_S


def test_who_is_woken_does_not_ask_for_work(bench, monkeypatch):
    """In a busy wait queue each service wakes three, who would all ask."""
    one, two, *others = (Consumer(bench) for _ in range(5))
    for each in (one, two, *others):
        each.turn()
    asked = []
    for each in others:
        monkeypatch.setattr(each.engine.messages, "has_work", asked.append)
    two.combiner.leave()
    assert all(each.rung for each in others)
    for each in others:
        each.turn()
    assert not asked
    others[0].sleep()
    others[0].turn()
    assert asked, "it looks by itself"


@pytest.mark.parametrize("is_another", [False, True])
@pytest.mark.parametrize("patience_s", [0.0, 4.0])
def test_a_first_one_that_does_nothing_is_deposed_by_one_that_never_stays(bench, patience_s, *, is_another):
    """BOUNDED: as a loop of takes with a timeout. Each of them has a standing of its own."""
    one, two = Consumer(bench), Consumer(bench)
    one.turn()
    bench.write(lambda tr: tr.set(bench.engine.keys.served(wait_queue.name(["q"])), served_row(patience_s)))
    bench.put(b"a")
    found, waited_s = two.turn(), 0.0
    while not found:
        bench.later(0.2)
        waited_s += 0.2
        two.combiner.leave()
        if is_another:
            two.begin()
        found = two.turn() or two.turn()
        assert waited_s <= patience_s + 1.0


@pytest.mark.parametrize("idle_s", [30.0, 36.0])
@pytest.mark.parametrize(("dead", "within_s"), [(1, 1.0), (2, 2.5), (3, 9.0), (4, 13.0)])
def test_of_an_idle_wait_queue_those_who_do_not_serve_are_replaced(bench, dead, within_s, idle_s):
    """BOUNDED: however long all had been idle before. Those that become the next one and the third are told so."""
    consumers = [Consumer(bench, spread=Longest) for _ in range(6)]
    for each in consumers:
        each.turn()
    stay_idle(bench, consumers, idle_s)
    one, *others = consumers
    one.combiner.leave()
    for each in others:
        if each.rung:
            each.turn()
    assert others[0].combiner.is_first
    stay_idle(bench, others, 0.001)
    bench.put(b"a")
    assert work_comes(bench, others[dead]) <= within_s


def stay_idle(bench, consumers, seconds):
    """Each looks when it wants to."""
    end_s = bench.clock.monotonic() + seconds
    while bench.clock.monotonic() < end_s:
        pause_s = min(each.combiner.next_look_s() or 0.0 for each in consumers)
        bench.clock.advance(min(pause_s, end_s - bench.clock.monotonic()))
        for each in consumers:
            if each.combiner.next_look_s() == 0.0:
                each.turn()


def work_comes(bench, consumer):
    """After how long it is served by one of them, while no other process does anything."""
    found = []
    began_s = bench.clock.monotonic()
    while not found:
        consumer.sleep()
        found = consumer.turn()
    return bench.clock.monotonic() - began_s


def served_row(patience_s):
    """Of a wait queue whose last service has left so much patience."""
    return bytes(16) + struct.pack(">I", round(1000 * patience_s))


def patience_s(bench):
    """What stands in the wait queue."""
    _, value = bench.engine.upkeep.rows(bench.engine.keys.all_served)[0]
    return float(struct.unpack(">I", value[16:])[0]) / 1000


def test_patience_lasts_until_each_has_served_quickly_again(bench):
    """A consumer remembers how long its last service took, with its commit."""
    consumers = [Consumer(bench) for _ in range(20)]
    for each in consumers:
        each.contention.served(wait_queue.name(QUEUES), alone=False, took_s=2.0)
    services = 0
    while services < len(consumers) or patience_s(bench) > PATIENCE_S:
        bench.put(b"a")
        assert consumers[services % len(consumers)].turn() == [b"a"]
        services += 1
        if services == len(consumers):
            assert patience_s(bench) == combiner_client.MOST_PATIENCE_S
    assert services == len(consumers) + 14


def test_quick_services_in_between_evict_no_consumer_for_a_slow_one(bench, monkeypatch):
    """Else each slow service is in vain, and its consumer joins again at the end of the wait queue."""
    consumers = [Consumer(bench) for _ in range(4)]
    took_s, ends = cycle([0.05, 1.0]), []

    def serve_slowly(one):
        serve = one.engine.messages.serve

        def slowly(*given):
            for _ in range(round(next(took_s) / 0.05)):
                bench.later(0.05)
                for other in consumers:
                    if other is not one and not other.combiner.is_first:
                        other.turn(serve=False)
            ends.append((served := serve(*given)).ended)
            return served

        return slowly

    for each in consumers:
        monkeypatch.setattr(each.engine.messages, "serve", serve_slowly(each))
    while len(ends) < 50:
        bench.put(b"a", b"a")
        for each in consumers:
            each.turn()
    assert sum(ends) <= 3


@pytest.mark.parametrize(("took_s", "patience_s"), [(0.001, PATIENCE_S), (0.5, 2.0), (2.0, 5.0)])
def test_a_server_tells_how_long_its_service_takes(bench, monkeypatch, took_s, patience_s):
    """With its first one: where hundreds are served in turn, most have never served before."""
    one, two = Consumer(bench), Consumer(bench)
    serve = claim.serve

    def slowly(*given):
        """Within the transaction, whose first attempt loses a race."""
        served = serve(*given)
        if served.deliveries:
            bench.later(took_s / 2)
            lost.append(True)
        if len(lost) == 1:
            raise Conflict
        return served

    lost = []
    monkeypatch.setattr(claim, "serve", slowly)
    one.turn()
    bench.put(b"a")
    assert one.turn() == [b"a"]
    two.turn()
    assert two.combiner._patience_s == pytest.approx(patience_s, abs=0.1)  # between attempts there is a pause


def test_it_is_alone_again_after_long_without_competitors(bench):
    one = Consumer(bench)
    for _ in range(LONELY + 1):
        assert one.contention.is_contested(QUEUES)
        bench.put(b"a")
        assert one.turn() == [b"a"]
    assert not one.contention.is_contested(QUEUES)


def test_wait_queues_that_are_known_are_bounded():
    contention = Contention()
    for number in range(10 * combiner_client.MOST_WAIT_QUEUES):
        contention.contest([f"q{number}"])
        assert contention.is_contested([f"q{number}"])
    assert len(contention._contested) <= combiner_client.MOST_WAIT_QUEUES


def test_the_order_of_the_queues_does_not_matter():
    contention = Contention()
    contention.contest(["a", "b"])
    assert contention.is_contested(("b", "a"))
    assert not contention.is_contested(["ab"])


@pytest.mark.parametrize("act", [Consumer.turn, lambda each: each.combiner.leave()])
def test_a_new_session_begins_anew(bench, act):
    one = Consumer(bench)
    one.turn()
    bench.engine.sessions.fence(one.client_session.session_id, bench.beats()[one.client_session.session_id])
    bench.put(b"a")
    try:
        act(one)
    except SessionLost:
        assert one.client_session.lost
    one.open()
    one.combiner.belong_to(one.client_session)
    bench.engine.sessions.release(next(iter(set(bench.beats()) - {bench.session, one.client_session.session_id})))
    assert one.turn() == [b"a"]


# -- what comes in between ---------------------------------------------------------------------------------------------


def waiting(bench, number):
    """So many consumers, each of which knows its place."""
    consumers = [Consumer(bench) for _ in range(number)]
    for each in consumers:
        each.join()
    for each in consumers:
        each.attend()
    return consumers


def demands(bench):
    """How they stand, in any order."""
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(*bench.engine.keys.all_demands))
    return sorted(value[:1] for _, value in rows)


def test_a_join_that_commits_while_its_end_is_recovered_waits_no_longer(bench, monkeypatch):
    """The recovery of another thread has found no demand, and has not ended when the join notes that there is one."""
    (one,) = waiting(bench, 1)
    one.begin()
    sessions, messages = one.engine.sessions, one.engine.messages
    recover, join = sessions.recover, messages.join
    recovered, joined = threading.Event(), threading.Event()
    other = threading.Thread(target=one.client_session.recover)

    def recover_slowly(*args):
        released = recover(*args)
        recovered.set()
        joined.wait(10)
        return released

    def join_late(*args, **given):
        one.combiner.abandon()
        other.start()
        recovered.wait(10)
        join(*args, **given)

    monkeypatch.setattr(sessions, "recover", recover_slowly)
    monkeypatch.setattr(messages, "join", join_late)
    one.join()
    joined.set()
    other.join()
    one.client_session.recover()
    assert demands(bench) == [b"W"], "the first one's, whose owner is not asked"


def test_an_interrupted_join_waits_no_longer(bench, monkeypatch):
    (one,) = waiting(bench, 1)
    one.combiner.leave()
    join = one.engine.messages.join

    def join_and_be_interrupted(*args, **given):
        join(*args, **given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.engine.messages, "join", join_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.join()
    assert not one.combiner.in_wait_queue
    one.client_session.recover()
    assert waiting(bench, 1)[0].combiner.is_first, "no consumer stands before it"


def test_an_interrupted_recovery_leaves_no_lease_that_the_process_seems_to_hold(bench, monkeypatch):
    """Its client would not close as long as it holds one."""
    line, where = 0, "the first"
    while where:
        line += 1
        (one,) = waiting(bench, 1)
        bench.put(b"a")
        serve = one.engine.messages.serve

        def serve_and_end(*args, serve=serve, one=one):
            served = serve(*args)
            one.combiner.abandon()
            one.client_session.recover()
            return served

        with monkeypatch.context() as patch:
            patch.setattr(one.engine.messages, "serve", serve_and_end)
            one.serve()
        assert one.client_session.known
        where = interrupt(one.client_session.recover, line, {client_session.__file__}, strikes=runs_handlers)
        one.client_session.recover()
        assert not one.client_session.known, where
    assert line > 5


def test_what_is_granted_to_an_owner_that_has_ended_goes_back(bench, monkeypatch):
    """While it looks, which commits nothing that could be struck."""
    one, two = waiting(bench, 2)
    bench.put(b"a", b"b")
    one.serve()
    look = two.engine.messages.look

    def look_meanwhile_ended(*args, **given):
        done = look(*args, **given)
        two.combiner.abandon()
        return done

    monkeypatch.setattr(two.engine.messages, "look", look_meanwhile_ended)
    two.attend()
    two.client_session.recover()
    assert two.granted == []
    assert not two.client_session.known
    assert bench.counts() == (1, 0, 1)


def test_a_demand_that_was_given_up_is_not_seen_alive_again(bench, monkeypatch):
    """Frozen for longer than a claim may last, and both threads wake up at once: its messages are another's."""
    one, two = waiting(bench, 2)
    bench.put(b"a", b"b")
    one.serve()
    bench.later(CLAIM_TIMEOUTS * OPTIONS.operation_timeout + 1)
    monotonic = bench.clock.monotonic

    def look_meanwhile_given_up():
        monkeypatch.setattr(bench.clock, "monotonic", monotonic)
        two.client_session.watch_claims()
        return monotonic()

    two.combiner._rung = True
    monkeypatch.setattr(bench.clock, "monotonic", look_meanwhile_given_up)
    two.client_session.look(two.combiner._demand)
    assert two.granted == []
    assert bench.counts() == (1, 0, 1)


def test_a_look_that_fails_is_repeated_at_once(bench, monkeypatch):
    one, two = waiting(bench, 2)
    bench.put(b"a", b"b")
    one.serve()
    assert two.rung
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(two.engine.messages, "look", Mock(side_effect=StoreUnavailable))
        two.attend()
    assert two.combiner.next_look_s() == 0.0
    two.attend()
    assert two.payloads == [b"b"]


def test_a_new_first_one_has_the_same_patience(bench):
    one, two, three = waiting(bench, 3)
    bench.put(b"a")
    for _ in range(2):
        three.sleep()
        three.attend()
    one.combiner.leave()
    three.sleep()
    three.attend()
    assert two.attend(), "it is the first by now, and was not evicted"


def test_a_demand_whose_owner_looks_no_more_is_given_up(bench):
    """Its thread is gone, by two exceptions at once; the other's owner looks."""
    one, two = waiting(bench, 2)
    for _ in range(3):
        bench.later(2 * OPTIONS.operation_timeout)
        one.combiner.look_again()
        one.attend()
        one.client_session.watch_claims()
    two.client_session.watch_claims()
    bench.put(b"a", b"b")
    one.serve()
    assert one.payloads == [b"a"]
    assert bench.counts() == (1, 0, 1)


def test_who_was_deposed_by_the_time_it_serves_finds_out(bench):
    one, two = waiting(bench, 2)
    two.engine.messages.evict(two.demand, one.engine.messages.look(one.demand)[0].first)
    one.serve()
    assert one.combiner.next_look_s() == 0.0
    one.attend()
    assert not one.combiner.in_wait_queue
    one.client_session.watch_claims()
    assert not one.client_session._claims
    assert not one.client_session._suspects


def test_what_is_found_after_nothing_was_is_its_own(bench):
    """One message, more often than not: that shall be quick."""
    one, two = waiting(bench, 2)
    one.serve()
    bench.put(b"a", b"b")
    one.serve()
    assert one.payloads == [b"a"]
    assert two.attend(), "it is the first by now"


def test_who_joins_later_is_served_as_well(bench):
    """After a service that has found nothing, the first one serves itself until it looks again."""
    (one,) = waiting(bench, 1)
    one.serve()
    two = Consumer(bench)
    two.join()
    one.sleep()
    one.attend()
    bench.put(b"a", b"b")
    one.serve()
    two.attend()
    assert (one.payloads, two.payloads) == ([b"a"], [b"b"])


def test_an_owner_that_ends_while_it_looks_watches_nothing(bench, monkeypatch):
    one, two = waiting(bench, 2)
    look = two.engine.messages.look
    seen = []

    def look_meanwhile_ended(*args, **given):
        found = look(*args, **given)
        seen.append(found[0])
        two.combiner.abandon()
        return found

    monkeypatch.setattr(two.engine.messages, "look", look_meanwhile_ended)
    two.combiner.look_again()
    two.attend()
    cancelled = []
    assert len(seen[0].watches) == 2
    for watch in seen[0].watches:
        watch.on_fire(lambda: cancelled.append(1))
    one.combiner.leave()
    two.client_session.recover()
    assert not cancelled
