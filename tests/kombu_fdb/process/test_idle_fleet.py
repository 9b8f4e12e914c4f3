"""What an idle session costs, exactly, and that it does not grow with the fleet."""

import math
import random
from unittest.mock import MagicMock

import pytest
from kit.conformance.queue import Bench
from kit.costs import Cost, CountingDatabase
from kit.faults import Fault, FaultyDatabase
from kit.simulation.connection import SimulatedClient, SimulatedTransport

from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.primitives.clock import STEPS, in_step
from kombu_fdb.process import duty_cycle
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.duty_cycle import LIVING, ROLE_INTERVAL_S, ROLE_TTL_S
from kombu_fdb.process.session_threads import ALARM_S
from kombu_fdb.settings.options import Options
from kombu_fdb.testing.clock import ManualClock

#: Of a session with the default time to live.
BEAT_S, BEATS = 5, 12
#: Each beat sets a commit token as well.
TOKEN = 1


class Member:
    """An idle process: its two threads' steps, each second, and a beat when it is due."""

    def __init__(self, bench, session):
        self.session = session
        self.duties = bench.duties(session)
        self._client_session = MagicMock(lost=False, session_id=session, queues=["q"])

    def beat(self):
        self.duties.beat(self._client_session, 30.0)

    def serve(self):
        return self.duties.serve(self._client_session, lambda: None, rang=False)


class Fleet:
    """Idle processes; the cost of each is counted."""

    def __init__(self, size):
        self.counted = CountingDatabase(FaultyDatabase())
        self.bench = Bench(self.counted)
        self.bench.engine.sessions.close(self.bench.session)
        opened = sorted(self.bench.engine.sessions.open({}) for _ in range(size))
        self.members = [Member(self.bench, session) for session in opened]
        self.paid = {}

    def pass_seconds(self, seconds):
        """In the order of the ring, so that each sees the beats of this round behind it."""
        self.paid = {member.session: [] for member in self.members}
        for second in range(seconds):
            self.bench.later(1)
            for member in self.members:
                self.counted.reset()
                if second % BEAT_S == 0:
                    member.beat()
                member.serve()
                self.paid[member.session] += self.counted.transactions

    @property
    def far(self):
        """Those that neither hold the role nor observe its holder, nor stand at the end of the ring."""
        ring = [member.session for member in self.members]
        promoter = next(number for number, member in enumerate(self.members) if member.duties.promotes)
        near = {(promoter - before) % len(ring) for before in range(LIVING + 1)}
        return [session for number, session in enumerate(ring[:-LIVING]) if number not in near]


@pytest.mark.parametrize("size", [20, 60])
def test_an_idle_session_makes_one_transaction_a_beat_whatever_the_fleet(size):
    """Heartbeat, sweep, the look at the promoter and that for kept messages were four."""
    fleet = Fleet(size)
    fleet.pass_seconds(6 * BEAT_S)
    fleet.pass_seconds(BEATS * BEAT_S)
    assert fleet.far
    for session in fleet.far:
        paid = fleet.paid[session]
        assert len(paid) == BEATS
        total = sum(paid, Cost())
        assert (total.point_reads, total.range_reads, total.rows) == (2 * BEATS, 2 * BEATS, (1 + LIVING) * BEATS)
        assert (total.commits, total.stamps, total.sets, total.watches) == (BEATS, BEATS, TOKEN * BEATS, 0)
        assert total.round_trips == 3 * BEATS


def test_an_idle_promoter_wakes_up_once_a_second_and_looks_once(monkeypatch):
    """Each duty woke it at a moment of its own, promotion looked twice behind each of them, and the role was read
    before each renewal: 86 rounds with 671 transactions, 62 of them writes.
    """
    fleet = Fleet(1)
    fleet.pass_seconds(6 * BEAT_S)
    (promoter,) = fleet.members
    clock, turn, rounds = fleet.bench.clock, promoter.duties._turn, 0

    def take_time(duty):
        assert duty.name == "promote" or duty.due_at <= clock.monotonic(), "none is early: several count their looks"
        clock.advance(0.001)
        return turn(duty)

    monkeypatch.setattr(promoter.duties, "_turn", take_time)
    fleet.counted.reset()
    end_s = clock.monotonic() + 60
    while clock.monotonic() < end_s:
        rounds += 1
        clock.advance(max(promoter.serve(), ALARM_S))
    writes = [each for each in fleet.counted.transactions if each.commits]
    assert (rounds, len(fleet.counted.transactions), len(writes)) == (64, 245, 34)


def test_an_observer_of_the_promoter_looks_at_its_record_besides():
    fleet = Fleet(20)
    fleet.pass_seconds(6 * BEAT_S)
    ring = [member.session for member in fleet.members]
    promoter = next(number for number, member in enumerate(fleet.members) if member.duties.promotes)
    fleet.pass_seconds(BEATS * BEAT_S)
    total = sum(fleet.paid[ring[promoter - 1]], Cost())
    looks = total.point_reads - 2 * BEATS
    assert 0 < looks <= BEATS * BEAT_S / ROLE_INTERVAL_S
    assert total.commits == BEATS


@pytest.mark.parametrize("interval_s", [0.08, 5.0])
def test_what_processes_do_every_few_seconds_falls_on_steps_of_the_clock(interval_s):
    """Wherever it begins, and however long it took: else each has a commit of the cluster's to itself."""
    clock, rng = ManualClock(), random.Random(3)
    pauses, ends = [], []
    for _ in range(200):
        clock.advance(rng.uniform(0, interval_s))
        pauses.append(in_step(clock.wall_ms(), rng, interval_s))
        ends.append((clock.wall_ms() / 1000 + pauses[-1]) / (interval_s / STEPS))
    assert max(pauses) <= interval_s
    assert min(pauses) >= 0.8 * interval_s
    assert all(abs(end - round(end)) < 0.01 for end in ends)
    assert len({round(end) % STEPS for end in ends}) == STEPS


def test_a_dead_session_is_ended_in_time_although_the_duties_see_what_a_beat_brought_a_second_later():
    """Its time is counted from the beat that has seen it, not from the turn that was told."""
    fleet = Fleet(6)
    fleet.pass_seconds(6 * BEAT_S)
    *living, dead = fleet.members
    for member in living:  # a moment too early to see its last beat
        member.beat()
        member.serve()
    dead.beat()
    died_s = fleet.bench.clock.monotonic()
    half_seconds = 0
    while dead.session in fleet.bench.beats():
        half_seconds += 1
        fleet.bench.later(0.5)
        for member in living:
            if half_seconds % 2 == 1:
                member.serve()
            if half_seconds % 9 == 0:
                member.beat()
    assert fleet.bench.clock.monotonic() - died_s <= 30.0 + BEAT_S


def test_a_session_that_computes_is_spared_by_an_observer_whose_duties_were_held_up(monkeypatch):
    """Its silence was seen by beats meanwhile, but no look at its process came between half of its time and the end."""
    fleet = Fleet(4)
    fleet.pass_seconds(6 * BEAT_S)
    *living, computing = fleet.members
    monkeypatch.setattr(duty_cycle, "_busy_s", lambda _: fleet.bench.clock.monotonic())
    for _ in range(12):
        fleet.bench.later(BEAT_S)
        for member in living:
            member.beat()
    for member in living:
        member.serve()
    assert fleet.bench.engine.queues.add_consumer(computing.session, "q", "tag") is None


def test_an_observer_takes_the_role_in_time_whatever_its_beats_have_seen():
    """What a beat had seen took the place of a look that was due, and was up to a second older than that."""
    fleet = Fleet(2)
    fleet.pass_seconds(6 * BEAT_S)
    (promoter,) = (member for member in fleet.members if member.duties.promotes)
    (observer,) = (member for member in fleet.members if member is not promoter)
    turn_s = 1.05 * ROLE_INTERVAL_S
    promoter.serve()
    observer.serve()
    late_s = 0.0
    next_beat_s = 0.1
    while not observer.duties.promotes:
        if next_beat_s < late_s + turn_s:
            fleet.bench.later(next_beat_s - late_s)
            observer.beat()
            fleet.bench.later(late_s + turn_s - next_beat_s)
            next_beat_s += 2.0
        else:
            fleet.bench.later(turn_s)
        late_s += turn_s
        observer.serve()
    assert late_s <= ROLE_TTL_S + 2 * turn_s


class Crowd:
    """Idle consumers of one queue, each of a process of its own; their receivers turn when they are awake."""

    def __init__(self, size):
        self.database = FaultyDatabase()
        self.counted = CountingDatabase(self.database)
        self.bench = Bench(self.counted)
        self.bench.put(b"the queue is there")
        self.bench.engine.queues.purge("q")
        self.consumers = [self._consumer(number) for number in range(size)]
        self.paid = {}
        self.pass_seconds(60)

    def _consumer(self, number):
        engine, clock, options = self.bench.another(), self.bench.clock, Options()

        def join():
            return ClientSession(engine, options, engine.sessions.open({}), MagicMock(), clock)

        client = SimulatedClient(engine, options, join)
        rng = random.Random(number)
        transport = SimulatedTransport(client, clock.monotonic, rng, 2, clock.wall_ms)
        transport.consume("q", f"tag-{number}")
        transport.fetcher.attend_loop(registered=True)
        return transport

    def pass_seconds(self, seconds):
        self.paid = {each: [] for each in self.consumers}
        for _ in range(seconds * 20):
            self.bench.later(0.05)
            for each in self.consumers:
                while each.is_awake:
                    self.counted.reset()
                    each.turn()
                    self.paid[each] += self.counted.transactions

    def in_wait_queue(self):
        rows = {row[0]: each for each in self.consumers for row in self._rows(each)}
        return [rows[key] for key in sorted(rows)]

    def _rows(self, each):
        demand, keys = each.fetcher._claiming.combiner.demand, self.bench.engine.keys
        assert demand is not None
        rows = self.bench.engine.transactions.read(
            lambda work: work.tr.get_range(*range_of(keys.wait_queue(demand.wait_queue)))
        )
        return [row for row in rows if row[1][:16] == demand.session]


@pytest.mark.parametrize("size", [8, 24])
def test_an_idle_consumer_reads_four_keys_each_poll_interval_whatever_the_fleet(size):
    """It asked whether its queue is there, how its wait queue stands, and for work, and armed its watches again."""
    crowd = Crowd(size)
    far = crowd.in_wait_queue()[4:]
    crowd.pass_seconds(60)
    for each in far:
        paid = crowd.paid[each]
        assert len(paid) + 1 >= 60 / 5
        assert len(paid) <= 60 / (0.8 * 5)
        # Its session, its entry at the queue, how it stands in the wait queue, the queue's bell.
        assert {(one.point_reads, one.range_reads, one.watches, one.commits) for one in paid} == {(4, 0, 0, 0)}
        assert {one.round_trips for one in paid} == {2}


def test_work_is_found_although_all_that_look_for_it_in_a_wait_queue_are_dead():
    """The first one, and the three behind it. No sweep ends their sessions here."""
    crowd = Crowd(8)
    waiters = crowd.in_wait_queue()
    crowd.consumers = waiters[4:]
    for each in waiters[4:]:
        combiner = each.fetcher._claiming.combiner
        assert combiner.demand is not None
        combiner.contention.first_of(combiner.demand.wait_queue).ask_at = math.inf  # as if it had asked a moment ago
    crowd.bench.put(b"work")
    crowd.pass_seconds(20)
    assert crowd.bench.counts() == (0, 0, 1)
    assert sum(each.fetcher.next([]) is not None for each in waiters[4:]) == 1


def test_a_consumer_whose_session_was_ended_looks_at_its_queue_at_once(monkeypatch):
    """The look that found the session gone was the one of its poll interval: a lost watch cost another."""
    monkeypatch.setattr(FaultyDatabase, "writers_take_turns", True)  # each consumer watches by itself
    crowd = Crowd(1)
    (consumer,) = crowd.consumers
    crowd.bench.put(b"work")
    crowd.pass_seconds(1)
    assert consumer.fetcher.next([]) is not None
    crowd.database.faults.at_watches(Fault.WATCH_LOST)
    crowd.bench.engine.sessions.close(consumer.fetcher.session_id)  # which brings its message back
    crowd.pass_seconds(5)
    assert consumer.fetcher.next([]) is not None
