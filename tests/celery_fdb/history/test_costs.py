"""What each verb costs, exactly. Round trips are FoundationDB's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from celery.states import FAILURE
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from celery_fdb.history.layout import SLOTS, pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import GROUPS_AT_ONCE, GROUPS_PER_PAGE, Wanted
from celery_fdb.history.store import TRIM_SEGMENTS, HistoryStore
from kombu_fdb.testing.clock import ManualClock

BOUNDS = History(runs=100, max_age=3600)  # two runs to a segment
LARGE = History(runs=100_000, max_age=366 * 86_400)


@dataclass
class Bench:
    store: HistoryStore
    counted: CountingDatabase
    clock: ManualClock

    def paid(self, verb):
        self.counted.reset()
        verb()
        return self.counted.total()

    def write(self, *runs, bounds=LARGE):
        (unwritten,) = pack_groups(runs)
        return self.paid(lambda: self.store.write(unwritten, bounds))


@pytest.fixture
def bench(clock):
    counted = CountingDatabase(FaultyDatabase())
    return Bench(HistoryStore(counted, "costs", clock=clock), counted, clock)


def numbers(cost):
    """Point reads, range reads, writes that set or add, writes that clear, round trips."""
    sets = cost.sets + cost.atomics + cost.stamps
    return cost.point_reads, cost.range_reads, sets, cost.clears + cost.clear_ranges, cost.round_trips


#: Of each task a total and its slots, and the slots of all tasks.
BY_TASK, COUNTERS = 1 + len(SLOTS), 1 + 2 * len(SLOTS)


@pytest.mark.parametrize("size", [1, 10, 250])
def test_a_flush_costs_a_row_by_id_for_each_run_and_a_few_for_all(bench, run, size):
    bench.write(run())
    cost = bench.write(*[run() for _ in range(size)])
    # The segment; the group, its task and its state, runs of the segment, counters; version, read, commit.
    assert numbers(cost) == (0, 1, size + 4 + COUNTERS, 0, 3)
    assert (cost.conflict_keys, cost.conflict_ranges) == (1, 0)  # with a trim of the segment, and nothing else


def test_what_else_a_run_may_cost(bench, run):
    assert numbers(bench.write(run()))[2] == 1 + 1 + 4 + COUNTERS  # opens a segment
    assert numbers(bench.write(run(root="r")))[2] == 2 + 4 + COUNTERS
    assert numbers(bench.write(run(root="r", group="g")))[2] == 3 + 4 + COUNTERS
    two = bench.write(run(task="a"), run(task="b", state=FAILURE))
    assert numbers(two)[2] == 2 + 2 + 4 + BY_TASK + COUNTERS


def test_flushes_do_not_conflict(bench, run):
    from celery_fdb.history import store

    bench.write(run())
    one, two = (bench.counted.begin(timeout_s=5.0) for _ in range(2))
    for tr in (one, two):
        (unwritten,) = pack_groups([run()])
        store.write(tr, bench.store.keys, unwritten, bounds=LARGE, now_ms=bench.clock.wall_ms())
    one.commit()
    two.commit()
    assert bench.store.kept() == 3


@pytest.mark.parametrize("rows", [1, 200])
def test_a_segment_is_cleared_at_one_price_however_many_rows_it_has(bench, run, rows):
    bench.write(*[run() for _ in range(rows)], bounds=LARGE)
    bench.clock.advance(2 * LARGE.max_age)
    cost = bench.paid(lambda: bench.store.trim(LARGE, parts=1, now_ms=bench.clock.wall_ms()))
    # All segments are read in one range; cleared are what is in this one, its two rows, and old slots.
    assert numbers(cost) == (0, 1, 0, 3 + 2 * len(SLOTS), 3)
    assert bench.store.kept() == 0


def test_a_trim_is_bounded_and_one_that_finds_nothing_reads_a_row(bench, run):
    for _ in range(20):
        bench.write(run(), run(), bounds=BOUNDS)
    bench.clock.advance(2 * BOUNDS.max_age)
    worst = bench.paid(lambda: bench.store.trim(BOUNDS, parts=10, now_ms=bench.clock.wall_ms()))
    assert len(bench.counted.transactions) == 20 // TRIM_SEGMENTS + 1
    assert bench.counted.worst().clear_ranges == TRIM_SEGMENTS + 2 * len(SLOTS)
    assert worst.rows == 2 * sum(range(20, 0, -TRIM_SEGMENTS))
    idle = bench.paid(lambda: bench.store.trim(BOUNDS, parts=10, now_ms=bench.clock.wall_ms()))
    assert numbers(idle) == (0, 1, 0, 2 * len(SLOTS), 3)


@pytest.mark.parametrize("groups", [1, 9])
def test_a_page_reads_ten_groups_at_once(bench, run, groups):
    for number in range(groups):
        bench.write(run(ago_s=100 - number))
    whole = bench.paid(lambda: bench.store.page(Wanted(), limit=50))
    assert numbers(whole) == (0, 2, 0, 0, 3)  # segments; groups
    by_task = bench.paid(lambda: bench.store.page(Wanted(task="shop.pay", state=FAILURE), limit=50))
    assert numbers(by_task) == (groups, 3, 0, 0, 5)  # where the index has it; entries; the groups that they name
    assert numbers(bench.paid(lambda: bench.store.page(Wanted(task="unknown"), limit=50))) == (0, 2, 0, 0, 3)


def test_segments_without_what_is_wanted_are_asked_at_once(bench, run):
    bench.write(run(task="rare"), bounds=BOUNDS)
    for _ in range(30):
        bench.write(run(), run(), bounds=BOUNDS)
    cost = bench.paid(lambda: bench.store.page(Wanted(task="rare"), limit=50))
    assert (cost.point_reads, cost.rows, cost.round_trips) == (1, 2 * 30 + 2, 5)


def test_a_page_that_finds_nothing_is_bounded(bench, run):
    assert GROUPS_PER_PAGE == 60, "as the docs say"
    for number in range(GROUPS_PER_PAGE + 30):
        bench.write(run(ago_s=1000 - number))
    cost = bench.paid(lambda: bench.store.page(Wanted(key="nobody"), limit=50))
    assert numbers(cost) == (0, 1 + GROUPS_PER_PAGE // GROUPS_AT_ONCE, 0, 0, 2 + GROUPS_PER_PAGE // GROUPS_AT_ONCE)
    assert cost.rows == 2 + GROUPS_PER_PAGE


@pytest.mark.parametrize("segments", [1, 30])
def test_a_task_is_looked_for_in_all_segments_at_once(bench, run, segments):
    for _ in range(segments):
        bench.write(run(), run(), bounds=BOUNDS)
    bench.write(run("t"), run(), bounds=BOUNDS)
    cost = bench.paid(lambda: bench.store.runs_of_task("t"))
    # The segments, a row of each, the entries in the one that has it; the group. One trip for each of the four.
    assert numbers(cost) == (1, 1 + (segments + 1) + 1, 0, 0, 5)
    assert bench.paid(lambda: bench.store.runs_of_task("unknown")).round_trips == 3


def test_activity(bench, run):
    begun = {1: run(), 2: run()}
    assert numbers(bench.paid(lambda: bench.store.activity(b"s", begun))) == (0, 0, 2, 0, 1)
    assert numbers(bench.paid(lambda: bench.store.activity(b"s", {}, [(b"s", 1)], dropped=1))) == (0, 0, 1, 1, 1)
    assert numbers(bench.paid(bench.store.active)) == (0, 1, 0, 0, 2)


def test_counters_are_one_read(bench, run):
    bench.write(*[run(task=f"t{number}") for number in range(50)])
    now_s = bench.clock.wall_ms() // 1000
    assert numbers(bench.paid(lambda: bench.store.slots(300, now_s - 3600, now_s + 1))) == (0, 1, 0, 0, 2)
    assert numbers(bench.paid(lambda: bench.store.series(300, now_s - 3600, now_s + 1))) == (0, 1, 0, 0, 2)
    assert numbers(bench.paid(bench.store.totals)) == (0, 1, 0, 0, 2)
