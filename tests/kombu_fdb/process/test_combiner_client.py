"""A consumer among others: when it waits, serves, evicts, and is alone again (``process/combiner_client.py``)."""

import struct
from itertools import cycle

import pytest
from kit.simulation.connection import Flag

from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.errors import Conflict, SessionLost, StoreUnavailable
from kombu_fdb.process import combiner_client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.combiner_client import LONELY, PATIENCE_S, CombinerClient, Contention
from kombu_fdb.settings.options import Options

QUEUES = ["q"]
LONGEST_S = 5.0
OPTIONS = Options(operation_timeout=5.0)


class Middle:
    """Chance that is none."""

    @staticmethod
    def uniform(a, b, /):
        return (a + b) / 2


class Longest(Middle):
    """Who is never lucky."""

    @staticmethod
    def uniform(a, b, /):
        return max(a, b)


class Consumer:
    """One process with one consumer."""

    def __init__(self, bench, want=1, longest_s=LONGEST_S, spread=Middle):
        self.engine = bench.another()
        self.client_session = ClientSession(self.engine, OPTIONS, self.engine.sessions.open({}), Flag(), bench.clock)
        self.contention = Contention()
        self.rung = False
        self.granted = []
        self.begin = lambda: CombinerClient(
            self._ring, bench.clock.monotonic, spread(), longest_s, self.contention, self.granted
        )
        self.combiner = self.begin()
        self.contention.contest(QUEUES)
        self._want = want
        self._clock = bench.clock

    def _ring(self):
        self.rung = True

    def turn(self, *, serve=True):
        """As its owner does: join, look, serve. What it got."""
        self.granted.clear()
        self.rung = False
        if not self.combiner.in_wait_queue:
            self.combiner.join(self.client_session, QUEUES, self._want, [])
        self.combiner.attend(self.engine)
        if serve and not self.granted and self.combiner.is_first:
            self.combiner.serve(QUEUES)
        return [each.payload for each in self.granted]

    def see_the_wait_queue(self):
        """As one does who has just become the first."""
        demand = self.combiner._demand
        assert demand is not None
        self.combiner._waiting = self.engine.messages.look(demand)[0].waiting

    def sleep(self):
        """Until it wants to look; how long that was."""
        pause_s = self.combiner.next_look_s()
        assert pause_s is not None
        self._clock.advance(pause_s)
        return pause_s


def test_a_lone_consumer_is_the_first(bench):
    one = Consumer(bench)
    assert one.turn() == []
    assert one.combiner.is_first
    bench.put(b"a")
    assert one.turn() == [b"a"]
    assert not one.combiner.in_wait_queue


def test_who_waits_is_rung_when_it_was_granted_something(bench):
    one, two = Consumer(bench), Consumer(bench)
    assert (one.turn(), two.turn()) == ([], [])
    one.combiner.leave()
    assert two.rung
    two.turn()
    assert two.combiner.is_first
    one.turn()
    bench.put(b"a", b"b")
    two.see_the_wait_queue()
    assert two.turn() == [b"a"]
    assert one.rung
    assert one.turn() == [b"b"]
    assert one.client_session.known


def test_who_waits_looks_less_and_less_often_while_there_is_nothing(bench):
    one, two, *others = (Consumer(bench) for _ in range(5))
    one.turn()
    two.turn()
    for each, longest_s in zip(others, (combiner_client.NEAR_S, combiner_client.NEAR_S, LONGEST_S), strict=True):
        pauses = []
        for _ in range(8):
            each.turn()
            pauses.append(each.sleep())
        assert pauses == sorted(pauses)
        assert pauses[0] == pytest.approx(combiner_client.UNHURRIED * PATIENCE_S * 1.125)
        assert pauses[-1] == pytest.approx(longest_s * 1.125)
        assert not each.combiner.is_first, "an idle first one stays"


def test_the_one_behind_the_first_looks_twice_a_second(bench):
    one, two = Consumer(bench), Consumer(bench)
    one.turn()
    for _ in range(8):
        two.turn()
        longest_s = two.sleep()
    assert longest_s == pytest.approx(combiner_client.NEXT_S * 1.125)


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


def test_a_consumer_behind_others_looks_no_sooner_than_the_first_may_be_evicted(bench):
    """Where services take long, all who wait would look many times for each."""
    one, two, three = Consumer(bench), Consumer(bench), Consumer(bench)
    for each in (one, two, three):
        each.turn()
    patient_s = combiner_client.UNHURRIED * 3.0
    bench.write(lambda tr: tr.set(bench.engine.keys.served(wait_queue.name(["q"])), served_row(3.0)))
    for each, pause_s in ((two, combiner_client.NEXT_S), (three, patient_s)):
        each.sleep()
        each.turn()
        assert each.sleep() == pytest.approx(pause_s * 1.125)


def test_others_find_it_if_both_are_gone(bench):
    one, two, three = Consumer(bench), Consumer(bench), Consumer(bench)
    for each in (one, two, three):
        each.turn()
    bench.put(b"a")
    found, looks = three.turn(), 0
    while not found:
        three.sleep()
        found, looks = three.turn(), looks + 1
    assert looks <= 12


def test_a_first_one_that_does_nothing_is_deposed_within_a_second(bench):
    """BOUNDED: however long everybody had been idle before, two looks with work find it."""
    one, two = Consumer(bench), Consumer(bench)
    one.turn()
    two.turn()
    bench.put(b"a")
    found, waited_s = two.turn(), 0.0
    while not found:
        waited_s += two.sleep()
        found = two.turn()
    assert found == [b"a"]
    assert PATIENCE_S <= waited_s <= 1.0
    one.sleep()
    one.turn()
    assert not one.combiner.in_wait_queue, "it finds that it has ended"
    one.turn()
    assert one.combiner.is_first, "it was only slow, and has joined again"


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
            two.combiner = two.begin()
        found = two.turn() or two.turn()
        assert waited_s <= patience_s + 1.0


@pytest.mark.parametrize("idle_s", [30.0, 36.0])
@pytest.mark.parametrize(("dead", "within_s"), [(1, 1.0), (2, 2.5), (3, 9.0), (4, 13.0)])
def test_of_an_idle_wait_queue_those_who_do_not_serve_are_replaced(bench, dead, within_s, idle_s):
    """BOUNDED: however long all had been idle before. Those that become the next one and the third are told so."""
    consumers = [Consumer(bench, 1, LONGEST_S, Longest) for _ in range(6)]
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


def test_after_a_deposition_everybody_is_more_patient(bench):
    """BOUNDED: else all would evict each other for working, where each service takes longer than that."""
    one, two, three = Consumer(bench), Consumer(bench), Consumer(bench)
    for each in (one, two, three):
        each.turn()
    bench.put(b"a")
    while not two.turn():
        two.sleep()
    assert patience_s(bench) == 2 * PATIENCE_S * combiner_client.LEFT, "it is not known yet how long a service takes"


def served_row(patience_s):
    """Of a wait queue whose last service has left so much patience."""
    return bytes(16) + struct.pack(">I", round(1000 * patience_s))


def patience_s(bench):
    """What stands in the wait queue."""
    _, value = bench.engine.upkeep.rows(bench.engine.keys.all_served)[0]
    return float(struct.unpack(">I", value[16:])[0]) / 1000


def test_a_new_standing_knows_how_long_services_take(bench):
    """Each take that waits has its own (``api/consumer.py``), and serves once."""
    one = Consumer(bench)
    one.contention.served(wait_queue.name(QUEUES), alone=False, took_s=1.0)
    one.turn()
    bench.put(b"a")
    assert one.turn() == [b"a"]
    assert patience_s(bench) == 4.0


def test_patience_comes_to_an_end(bench):
    """BOUNDED: with the services that follow a slow one, whichever consumer takes them, even if it is its first."""
    one = Consumer(bench)
    one.turn()
    one.contention.served(wait_queue.name(QUEUES), alone=False, took_s=60.0)
    bench.put(b"a")
    assert one.turn() == [b"a"]
    assert patience_s(bench) == combiner_client.MOST_PATIENCE_S
    services = 0
    while patience_s(bench) > PATIENCE_S:
        bench.put(b"a")
        assert Consumer(bench).turn() == [b"a"]
        services += 1
    assert services == 14


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


def test_a_first_one_that_works_is_not_deposed(bench):
    one, two = Consumer(bench), Consumer(bench)
    one.turn()
    for number in range(20):
        two.turn()
        bench.put(b"%d" % number)
        two.sleep()
        assert one.turn() == [b"%d" % number]
        two.turn()
        one.turn()
        one, two = two, one  # the next one is the first


def test_it_is_alone_again_after_long_without_competitors(bench):
    one = Consumer(bench)
    for _ in range(LONELY + 1):
        assert one.contention.is_contested(QUEUES)
        bench.put(b"a")
        assert one.turn() == [b"a"]
    assert not one.contention.is_contested(QUEUES)


def test_two_that_never_meet_in_the_wait_queue_know_of_each_other(bench):
    """Each is alone there when it serves, and claims would collide."""
    one, two = Consumer(bench), Consumer(bench)
    for _ in range(LONELY):
        bench.put(b"a", b"b")
        assert (one.turn(), two.turn()) == ([b"a"], [b"b"])
    assert one.contention.is_contested(QUEUES)
    assert two.contention.is_contested(QUEUES)


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


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_leaving_brings_what_was_granted(bench):
    one, two = Consumer(bench), Consumer(bench)
    two.turn()
    one.turn()
    bench.put(b"a", b"b")
    two.see_the_wait_queue()
    two.turn()
    one.combiner.leave()
    assert [each.payload for each in one.granted] == [b"b"]
    assert not one.combiner.in_wait_queue


@pytest.mark.parametrize("granted", [False, True])
def test_what_is_abandoned_ends_and_goes_back(bench, granted):
    """DURABLE: only the session has to remember it."""
    one, two = Consumer(bench), Consumer(bench)
    two.turn()
    one.turn()
    bench.put(b"a", b"b")
    if granted:
        two.see_the_wait_queue()
        two.turn()
    one.combiner.abandon()
    one.client_session.recover()
    if not granted:
        two.turn()
    assert bench.counts() == (1, 0, 1)
    assert not one.combiner.in_wait_queue


def test_a_demand_whose_owner_looks_no_more_is_given_up(bench):
    """Its thread is gone, by two exceptions at once."""
    one, two = Consumer(bench), Consumer(bench)
    one.turn()
    bench.later(2 * OPTIONS.operation_timeout)
    one.turn()
    one.client_session.watch_claims()
    two.turn()
    bench.later(4 * OPTIONS.operation_timeout)
    one.turn()
    one.client_session.watch_claims()
    two.client_session.watch_claims()
    bench.put(b"a")
    assert one.turn() == [b"a"]
    assert bench.counts() == (0, 0, 1)
    one.turn()
    assert one.combiner.is_first, "the other one does not stand behind it any more"


def test_what_comes_after_it_was_given_up_is_not_delivered(bench):
    one, two = Consumer(bench), Consumer(bench)
    two.turn()
    one.turn()
    bench.put(b"a", b"b")
    two.see_the_wait_queue()
    two.turn()
    one.client_session.give_up(one.combiner._demand.first)  # type: ignore[union-attr]  # it has one
    assert one.turn() == []
    one.client_session.recover()
    assert bench.counts() == (1, 0, 1)


@pytest.mark.parametrize("verb", ["join", "serve", "look"])
def test_an_error_of_the_store_leaves_it_where_it_was(bench, monkeypatch, verb):
    one = Consumer(bench)
    one.turn()
    bench.put(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(one.engine.messages, verb, _fails)
        if verb == "join":
            one.combiner.leave()
        else:
            one.sleep()
        with pytest.raises(StoreUnavailable):
            one.turn()
    assert one.turn() == [b"a"]
    assert not one.client_session._suspects
    assert len(bench.engine.upkeep.rows(bench.engine.keys.all_demands)) == 1, "a join clears those that are over"


def _fails(*_, **__):
    raise StoreUnavailable("the cluster is away")


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
    one.client_session = ClientSession(one.engine, OPTIONS, one.engine.sessions.open({}), Flag(), bench.clock)
    one.combiner.belong_to(one.client_session)
    bench.engine.sessions.release(next(iter(set(bench.beats()) - {bench.session, one.client_session.session_id})))
    assert one.turn() == [b"a"]
