"""A consumer in a wait queue, step by step: what it leaves behind, what interrupts it, and whom it evicts."""

import random
import threading
from unittest.mock import Mock

import pytest
from kit.interruption import interrupt, runs_handlers
from kit.simulation.connection import Flag

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process import client_session
from kombu_fdb.process.client_session import CLAIM_TIMEOUTS, ClientSession
from kombu_fdb.process.combiner_client import CombinerClient, Contention
from kombu_fdb.settings.options import Options

#: Enough for the longest pause between two looks.
LONGEST_S = 1.0
LATER_S = LONGEST_S * 1.3


class Consumer:
    """Of q, in a process and a session of its own."""

    def __init__(self, bench, want=1):
        self.bench = bench
        self.want = want
        self.engine = bench.another()
        session = self.engine.sessions.open({"host": "test"})
        self.client_session = ClientSession(self.engine, Options(), session, Flag(), bench.clock)
        self.rung = 0
        self.contention = Contention()
        self.contention.contest(["q"])
        self.granted = []
        self.combiner = self.stand()
        self.join()

    def stand(self):
        return CombinerClient(
            self._ring, self.bench.clock.monotonic, random.Random(7), LONGEST_S, self.contention, self.granted
        )

    def _ring(self):
        self.rung += 1

    def join(self):
        self.combiner.join(self.client_session, ["q"], self.want, ())

    def attend(self):
        return self.combiner.attend(self.engine)

    def serve(self):
        self.combiner.serve(["q"])

    @property
    def payloads(self):
        return [each.payload for each in self.granted]


def demands(bench):
    """How they stand, in any order."""
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(*bench.engine.keys.all_demands))
    return sorted(value[:1] for _, value in rows)


def wait_and_look(bench, consumer):
    bench.later(LATER_S)
    consumer.attend()


# -- what is left ------------------------------------------------------------------------------------------------------


def test_owners_that_come_and_go_leave_no_more_than_one_demand(bench):
    """Each take that waits is an owner of its own (``api/consumer.py``), in a session that may last for months."""
    one = Consumer(bench)
    for _ in range(5):
        bench.put(b"a")
        one.attend()
        one.serve()
        one.combiner = one.stand()
        one.join()
        one.combiner.leave()
        one.combiner = one.stand()
        one.join()
        one.combiner.abandon()
        one.client_session.recover()
        one.combiner = one.stand()
        one.join()
    assert one.payloads == [b"a"] * 5
    assert demands(bench) == [b"W"]


# -- who ends while it does something ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_owner_that_ends_while_it_joins_waits_no_longer(bench, monkeypatch, when):
    """A task is cancelled while a thread joins for it."""
    one = Consumer(bench)
    one.combiner = one.stand()
    join = one.engine.messages.join

    def join_meanwhile_ended(*args, **given):
        if when == "after":
            join(*args, **given)  # type: ignore[arg-type]  # as they came
        one.combiner.abandon()
        one.client_session.recover()
        if when == "before":
            join(*args, **given)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(one.engine.messages, "join", join_meanwhile_ended)
    one.join()
    one.client_session.recover()
    assert not one.combiner.in_wait_queue
    assert demands(bench) == [b"W"], "the first one's, whose owner is not asked"


def test_a_join_that_commits_while_its_end_is_recovered_waits_no_longer(bench, monkeypatch):
    """The recovery of another thread has found no demand, and has not ended when the join notes that there is one."""
    one = Consumer(bench)
    one.combiner = one.stand()
    sessions, messages = one.engine.sessions, one.engine.messages
    recover, join = sessions.recover, messages.join
    recovered, joined = threading.Event(), threading.Event()
    other = threading.Thread(target=one.client_session.recover)

    def recover_slowly(*args):
        released = recover(*args)  # type: ignore[arg-type]  # as they came
        recovered.set()
        joined.wait(10)
        return released

    def join_late(*args, **given):
        one.combiner.abandon()
        other.start()
        recovered.wait(10)
        join(*args, **given)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(sessions, "recover", recover_slowly)
    monkeypatch.setattr(messages, "join", join_late)
    one.join()
    joined.set()
    other.join()
    one.client_session.recover()
    assert demands(bench) == [b"W"], "the first one's, whose owner is not asked"


def test_an_interrupted_join_waits_no_longer(bench, monkeypatch):
    one = Consumer(bench)
    one.combiner.leave()
    join = one.engine.messages.join

    def join_and_be_interrupted(*args, **given):
        join(*args, **given)  # type: ignore[arg-type]  # as they came
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.engine.messages, "join", join_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.join()
    assert not one.combiner.in_wait_queue
    one.client_session.recover()
    assert Consumer(bench).attend(), "no consumer stands before it"


def test_an_interrupted_recovery_leaves_no_lease_that_the_process_seems_to_hold(bench, monkeypatch):
    """Its client would not close as long as it holds one."""
    line, where = 0, "the first"
    while where:
        line += 1
        one = Consumer(bench)
        assert one.attend()
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


@pytest.mark.parametrize("step", ["look", "serve", "leave"])
def test_what_is_granted_to_an_owner_that_has_ended_goes_back(bench, monkeypatch, step):
    one, two = Consumer(bench), Consumer(bench)
    mine = one if step == "serve" else two
    assert one.attend()
    two.attend()
    bench.put(b"a", b"b")
    if mine is two:
        one.serve()
    verb = getattr(mine.engine.messages, step)

    def do_meanwhile_ended(*args, **given):
        done = verb(*args, **given)
        mine.combiner.abandon()
        return done

    monkeypatch.setattr(mine.engine.messages, step, do_meanwhile_ended)
    _take_step(mine, step)
    mine.client_session.recover()
    assert mine.granted == []
    assert not mine.client_session.known
    assert bench.counts() == (1, 0, 1)


def _take_step(consumer, step):
    if step == "look":
        consumer.attend()
    elif step == "serve":
        consumer.serve()
    else:
        consumer.combiner.leave()


def test_a_demand_that_was_given_up_is_not_seen_alive_again(bench, monkeypatch):
    """Frozen for longer than a claim may last, and both threads wake up at once: its messages are another's."""
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    two.attend()
    bench.put(b"a", b"b")
    one.serve()
    bench.later(CLAIM_TIMEOUTS * Options().operation_timeout + 1)
    monotonic = bench.clock.monotonic

    def look_meanwhile_given_up():
        monkeypatch.setattr(bench.clock, "monotonic", monotonic)
        two.client_session.watch_claims()
        return monotonic()

    two.combiner._rung = True
    monkeypatch.setattr(bench.clock, "monotonic", look_meanwhile_given_up)
    two.client_session.look(two.combiner._demand)  # type: ignore[arg-type]  # it has one
    assert two.granted == []
    assert bench.counts() == (1, 0, 1)


def test_a_look_that_fails_is_repeated_at_once(bench, monkeypatch):
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    two.attend()
    bench.put(b"a", b"b")
    one.serve()
    assert two.rung
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(two.engine.messages, "look", Mock(side_effect=StoreUnavailable))
        two.attend()
    assert two.combiner.next_look_s() == 0.0
    two.attend()
    assert two.payloads == [b"b"]


# -- who does not serve ------------------------------------------------------------------------------------------------


def test_work_that_has_just_come_is_the_first_ones(bench):
    """It was the first for long, but had nothing to do."""
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    two.attend()
    for _ in range(5):
        wait_and_look(bench, two)
    bench.put(b"a")
    wait_and_look(bench, two)
    assert not two.combiner.is_first
    one.serve()
    assert one.payloads == [b"a"]


def test_who_was_deposed_by_the_time_it_serves_finds_out(bench):
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    two.attend()
    assert one.combiner._demand is not None
    sight = one.engine.messages.look(one.combiner._demand)[0]
    two.engine.messages.evict(two.combiner._demand, sight.first)  # type: ignore[arg-type]  # it has one
    one.serve()
    one.attend()
    assert not one.combiner.in_wait_queue
    one.client_session.watch_claims()
    assert not one.client_session._claims
    assert not one.client_session._suspects


# -- alone, or not -----------------------------------------------------------------------------------------------------


def test_a_new_first_one_has_the_same_patience(bench):
    one, two, three = Consumer(bench), Consumer(bench), Consumer(bench)
    assert one.attend()
    three.attend()
    bench.put(b"a")
    for _ in range(2):
        wait_and_look(bench, three)
    one.combiner.leave()
    wait_and_look(bench, three)
    assert two.attend(), "it is the first by now, and was not evicted"


def test_what_is_found_after_nothing_was_is_its_own(bench):
    """One message, more often than not: that shall be quick."""
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    one.serve()
    bench.put(b"a", b"b")
    one.serve()
    assert one.payloads == [b"a"]
    assert two.attend(), "it is the first by now"


def test_who_joins_later_is_served_as_well(bench):
    one = Consumer(bench)
    assert one.attend()
    one.serve()
    two = Consumer(bench)
    bench.later(LATER_S)
    one.attend()
    bench.put(b"a", b"b")
    one.serve()
    two.attend()
    assert (one.payloads, two.payloads) == ([b"a"], [b"b"])


def test_an_owner_that_ends_while_it_looks_watches_nothing(bench, monkeypatch):
    one, two = Consumer(bench), Consumer(bench)
    assert one.attend()
    look = two.engine.messages.look
    seen = []

    def look_meanwhile_ended(*args, **given):
        found = look(*args, **given)
        seen.append(found[0])
        two.combiner.abandon()
        return found

    monkeypatch.setattr(two.engine.messages, "look", look_meanwhile_ended)
    two.attend()
    cancelled = []
    assert len(seen[0].watches) == 2
    for watch in seen[0].watches:
        watch.on_fire(lambda: cancelled.append(1))
    one.combiner.leave()
    two.client_session.recover()
    assert not cancelled
