"""What the duties cost, and whom they delay, in transactions."""

import math
import threading
from itertools import pairwise

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import Publication
from kombu_fdb.process import duty_cycle
from kombu_fdb.process.duty_cycle import LIVING
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture
def bench(counted):
    return Bench(counted)


@pytest.mark.parametrize("fleet", [20, 500])
def test_a_sweep_reads_its_neighbours_only(bench, counted, fleet):
    for _ in range(fleet):
        bench.engine.sessions.open({})
    duties = bench.duties()
    counted.reset()
    duties.sweep()
    assert counted.total().rows <= 2 * LIVING + 1


def test_one_survivor_of_a_fleet_ends_all_others(bench):
    """BACK-SOON, with the bound that ``duty_cycle.py`` states."""
    dead = [bench.engine.sessions.open({}, ttl_s=30.0) for _ in range(200)]
    bench.engine.publisher.publish([Publication("", "q", b"a")] * len(dead))
    for session in dead:
        bench.take(1, session=session)
    duties, died_at = bench.duties(), bench.clock.monotonic()
    while bench.counts() != (200, 0, 0):
        bench.later(5)
        bench.engine.sessions.beat(bench.session)
        duties.sweep()
    assert bench.clock.monotonic() - died_at <= 30 + 5 * (math.log2(200 / LIVING) + 2)
    assert set(bench.beats()) == {bench.session}


def test_a_live_fleet_ends_no_session(bench):
    engines = [bench.another() for _ in range(30)]
    sessions = [engine.sessions.open({}) for engine in engines]
    duties = [bench.duties(session) for session in sessions]
    for _ in range(20):
        bench.later(5)
        assert all(engine.sessions.beat(session) for engine, session in zip(engines, sessions, strict=True))
        assert bench.engine.sessions.beat(bench.session)
        assert sum(each.sweep() for each in duties) == 0
        assert max(each.sweep_duty.window for each in duties) <= 4 * LIVING
    assert len(bench.beats()) == 31
    assert {each.sweep_duty.window for each in duties} == {LIVING}


def test_commit_tokens_are_cleared_together(bench, counted):
    keys = bench.engine.keys
    bench.write(lambda tr: [tr.set(keys.token(b"%d" % number, 1), b"old") for number in range(4_000)])
    duties = bench.duties()
    for _ in range(5):
        duties.clear_leftovers()
        bench.later(200)
    counted.reset()
    duties.clear_leftovers()
    assert len(counted.transactions) <= 15
    assert len(bench.engine.upkeep.rows(bench.engine.keys.all_tokens)) <= 2


def test_promotion_waits_for_one_turn_of_one_duty(bench, counted, monkeypatch):
    """However much of everything there is to do."""
    monkeypatch.setattr(duty_cycle, "TURN_TRANSACTIONS", 5)
    keys = bench.engine.keys
    bench.write(lambda tr: [tr.set(keys.dedup_end(1, "", "q", f"{number}"), b"") for number in range(10_000)])
    for queue in ("a.dead", "b.dead"):
        bench.engine.publisher.publish([Publication("", queue, b"a", ttl_ms=1)] * 2_000)
    bench.later(1)
    order = []
    promote = bench.engine.upkeep.due_queues
    monkeypatch.setattr(
        bench.engine.upkeep, "due_queues", lambda: order.append(str(len(counted.transactions))) or promote()
    )
    counted.reset()
    duties = bench.duties()
    while duties.run_once() == 0:
        pass
    looks = [0, *map(int, order)]
    assert max(later - earlier for earlier, later in pairwise(looks)) <= 2 * 5 + 10
    assert bench.engine.upkeep.rows(keys.dedup_ended(2)) == []


def test_a_store_that_is_away_for_one_duty_keeps_no_other_from_its_turn(bench, monkeypatch):
    def away():
        raise StoreUnavailable

    monkeypatch.setattr(bench.engine.upkeep, "due_queues", away)
    bench.engine.publisher.publish([Publication("", "a.dead", b"a", ttl_ms=1)])
    bench.later(1)
    duties = bench.duties()
    for _ in range(12):
        with pytest.raises(StoreUnavailable):
            duties.run_once()
    assert bench.counts("a.dead") == (0, 0, 0)


def test_publishers_to_a_full_queue_do_not_conflict(bench, counted):
    """Neither with each other nor with those who make room; what gives way is not more than it must be."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 50}))
    bench.engine.publisher.publish([Publication("", "q", b"a")] * 50)
    publishers = 24

    def publish(number):
        engine = bench.another()
        for _ in range(20):
            engine.publisher.publish([Publication("", "q", b"%d" % number)], timeout_s=60.0)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(publishers)]
    counted.reset()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storing = [each for each in counted.transactions if each.stamps]
    assert len(storing) == publishers * 20, "each in one transaction"
    assert sum(each.conflicts for each in storing) == 0
    assert 50 <= bench.counts()[0] <= 50 + publishers
    bench.engine.upkeep.trim_full_part("q")
    assert bench.counts() == (50, 0, 0)
    bench.check()


def test_publishes_to_a_full_queue_that_are_open_together_all_commit(bench, counted):
    """Each has read what it reads before the first one commits, and before the oldest give way."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 5}))
    bench.engine.publisher.publish([Publication("", "q", b"a")] * 9)
    open_together = [counted.begin(timeout_s=60.0) for _ in range(8)]
    for number, each in enumerate(open_together):
        bench.another().publisher.publish_in(each, [Publication("", "q", b"%d" % number)])
    bench.engine.upkeep.trim_full_part("q")
    for each in open_together:
        each.commit()
    assert counted.total().conflicts == 0
    assert bench.counts() == (5 + len(open_together), 0, 0)
    bench.check()


def test_a_process_without_the_role_reads_little(bench, counted):
    """Its neighbours at each sweep, and the role each second: a fleet of workers costs what they are."""
    holder = bench.duties()
    holder.run_once()
    other = bench.engine.sessions.open({})
    duties = bench.duties(other)
    duties.run_once()
    holder.run_once()
    bench.later(1)
    counted.reset()
    duties.run_once()
    assert (len(counted.transactions), counted.total().round_trips) == (1, 2)
