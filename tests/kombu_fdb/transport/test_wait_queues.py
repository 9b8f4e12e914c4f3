"""A connection whose consumers have competitors: when it joins their wait queue, and when it leaves it."""

import math
import random

import pytest
from kit.conformance.wait_queues import Competitor
from kit.simulation.connection import Flag, SimulatedClient, SimulatedTransport

from kombu_fdb.errors import Outrun
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.settings.options import Options
from kombu_fdb.transport.consuming.fetcher import LONGEST_REST_S
from kombu_fdb.transport.consuming.receiver import deliver_next

OPTIONS = Options()


class Connection(SimulatedTransport):
    """Of a process of its own; its thread is the test's."""

    def __init__(self, bench, *queues, prefetch=4, contested=True):
        self.bench = bench
        engine = bench.another()
        session = engine.sessions.open({})
        self.client_session = ClientSession(engine, OPTIONS, session, Flag(), bench.clock)
        client = SimulatedClient(engine, OPTIONS, lambda: self.client_session)
        super().__init__(client, bench.clock.monotonic, random.Random(7), prefetch, bench.clock.wall_ms)
        for number, queue in enumerate(queues or ("q",)):
            self.consume(queue, f"tag{number}")
        if contested:
            self.combiner.contention.contest(queues or ("q",))

    @property
    def combiner(self):
        return self.fetcher._claiming.combiner

    def turns(self):
        """Until there is nothing to be done."""
        with self.draining():
            for _ in range(20):
                rest_s = 0.0 if self.is_awake else (self.due or math.inf) - self.clock()
                if rest_s > LONGEST_REST_S:
                    return
                self.bench.later(rest_s)
                self.turn()
        raise AssertionError("it does not come to rest")

    def sleep(self):
        """It is not drained for long."""
        self.bench.later(OPTIONS.undrained_timeout + 1)
        self.bell.ring()
        self.turn()

    def work_off(self):
        """What the application has received and acknowledged."""
        while deliver_next(self.fetcher):
            pass
        worked = [delivery.payload for delivery in self.given.values()]
        for tag in list(self.given):
            self.qos.ack(tag)
            del self.given[tag]
        return worked

    @property
    def waiting(self):
        """What waits for the application."""
        return [delivery.payload for _, delivery in self.credit.inbox]


def rows(bench):
    keys = bench.engine.keys
    return len(bench.engine.transactions.read(lambda work: work.tr.get_range(*keys.all_wait_queues)))


def test_an_idle_one_stands_in_the_wait_queue_and_is_served_there(bench):
    first, connection = Competitor(bench), Connection(bench)
    connection.turns()
    assert connection.combiner.in_wait_queue
    assert not connection.watch_set._armed, "it leaves the queues to the first one"
    bench.put(b"a", b"b")
    first.serve()
    connection.turns()
    assert connection.waiting == [b"b"]


def test_who_becomes_the_first_looks_at_the_queues(bench):
    first, connection = Competitor(bench), Connection(bench)
    connection.turns()
    first.engine.messages.leave(first.demand)
    bench.put(b"a")
    connection.turns()
    assert connection.waiting == [b"a"]


def test_the_first_one_is_woken_by_a_message(bench):
    connection = Connection(bench)
    connection.turns()
    assert connection.combiner.is_first
    bench.put(b"a")
    assert connection.is_awake
    connection.turns()
    assert connection.waiting == [b"a"]


@pytest.mark.parametrize("contested", [False, True])
def test_queues_have_their_turns_in_a_wait_queue_as_without_one(bench, contested):
    """The first one looks twice what to claim, and used to begin with the same of two queues each time."""
    connection = Connection(bench, "one", "other", contested=contested)
    for queue in ("one", "other"):
        bench.put(*[queue.encode()] * 20, queue=queue)
    windows = []
    for _ in range(6):
        connection.turns()
        windows.append({*connection.work_off()})
    first, second, *_ = windows
    assert first != second
    assert windows == [first, second] * 3
    assert {len(each) for each in windows} == {1}


def test_other_queues_are_another_wait_queue(bench):
    connection = Connection(bench)
    connection.turns()
    connection.consume("r", "another")
    connection.combiner.contention.contest(["q", "r"])
    connection.turns()
    assert connection.combiner.queues == ("q", "r")
    assert rows(bench) == 1


def test_what_was_granted_before_it_left_is_handed_over(bench):
    first, connection = Competitor(bench), Connection(bench)
    connection.turns()
    bench.put(b"a", b"b")
    connection.consume("r", "another")
    connection.combiner.contention.contest(["q", "r"])
    first.serve()
    connection.combiner._rung = False
    connection.turns()
    assert connection.waiting == [b"b"]
    assert connection.combiner.queues == ("q", "r")


def test_without_room_it_stands_in_no_wait_queue(bench):
    connection = Connection(bench, prefetch=1)
    connection.turns()
    bench.put(b"a", b"b")
    connection.turns()
    assert connection.waiting == [b"a"]
    assert rows(bench) == 0


def test_a_connection_that_is_not_drained_leaves_the_wait_queue(bench):
    first, connection = Competitor(bench), Connection(bench)
    connection.turns()
    connection.sleep()
    assert rows(bench) == 1
    assert first.look().is_first


def test_queues_without_competitors_are_claimed_from_by_themselves(bench):
    """Without leases, and with consumers that are told apart: a wait queue's transaction does neither."""
    connection = Connection(bench, "q")
    connection.consume("mine", "another")
    connection.subscriptions[-1].transient = True
    bench.put(b"a")
    bench.put(b"b", queue="mine")
    connection.turns()
    assert sorted(connection.waiting) == [b"a", b"b"]


def test_a_service_brings_nothing_of_queues_without_competitors(bench):
    connection = Connection(bench, "q", prefetch=2)
    connection.consume("mine", "another")
    connection.subscriptions[-1].transient = True
    connection.turns()
    competitor = Competitor(bench, 4)
    bench.later(OPTIONS.poll_interval * 2)
    connection.turns()
    assert connection.combiner.is_first
    bench.put(*[b"mine"] * 4, queue="mine")
    bench.put(b"a", b"b")
    connection.turns()
    assert not {each.queue for each in competitor.collect()} - {"q"}


def test_who_is_outrun_joins_the_wait_queue(bench, monkeypatch):
    connection = Connection(bench, contested=False)
    bench.put(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(connection.client_session, "claim", _outrun)
        connection.turns()
    assert connection.combiner.contention.is_contested(["q"])
    assert connection.waiting == [b"a"]


def test_only_what_others_may_have_gives_way(bench, monkeypatch):
    connection = Connection(bench, contested=False)
    connection.subscriptions[0].transient = True
    bench.put(b"a")
    given = []
    claim = connection.client_session.claim

    def note(*args, **terms):
        given.append(terms["gives_way"])
        return claim(*args, **terms)

    monkeypatch.setattr(connection.client_session, "claim", note)
    connection.turns()
    assert given == [False]


def _outrun(*_args, **_terms):
    raise Outrun
