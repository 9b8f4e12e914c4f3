"""Pages, filters, cursors, lookups, bounds and counters, on every store."""

import pytest
from celery.states import FAILURE, RETRY, STARTED, SUCCESS

from celery_fdb.history import layout, reading
from celery_fdb.history.layout import Counters, pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import Cursor, Wanted
from celery_fdb.history.run import LOST
from celery_fdb.history.store import TRIM_SEGMENTS
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.keyspace.layout import range_of


def all_of(store, wanted=Wanted(), limit=3):  # noqa: B008 - immutable
    """The ids on all pages."""
    found, after = [], None
    while True:
        runs, cursor = store.page(wanted, limit=limit, after=after)
        found += [each.id for each in runs]
        if cursor is None:
            return found
        after = Cursor.parse(str(cursor))


@pytest.mark.parametrize("limit", [1, 3, 7, 500])
def test_the_newest_come_first_on_pages_of_any_size(store, keep, run, limit):
    for first in range(40, 0, -8):  # groups of 8, in segments of 10
        keep(*[run(f"t{ago:02d}", ago_s=ago) for ago in range(first - 7, first + 1)])
    assert all_of(store, limit=limit) == [f"t{ago:02d}" for ago in range(1, 41)]


FILTERS = [
    Wanted(task="a"),
    Wanted(state=FAILURE),
    Wanted(task="b", state=FAILURE),
    Wanted(key="k1"),
    Wanted(queue="q1", worker="w1"),
]


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_a_filter_finds_those_that_match_and_no_others(store, keep, run, wanted):
    runs = [
        run(
            f"t{number:03d}",
            task="ab"[number % 2],
            state=FAILURE if number % 5 == 0 else SUCCESS,
            key=f"k{number % 3}",
            queue=f"q{number % 3}",
            worker=f"w{number % 4}",
            ago_s=100 - number,
        )
        for number in range(60)
    ]
    for start in range(0, 60, 7):
        keep(*runs[start : start + 7])
    expected = [each.id for each in reversed(runs) if wanted.matches(each)]
    assert expected
    assert all_of(store, wanted) == expected


def test_a_filter_that_matches_nothing_has_pages_with_an_end(store, keep, run, monkeypatch):
    monkeypatch.setattr(reading, "GROUPS_PER_PAGE", 2)
    for ago in range(5, 0, -1):
        keep(run(ago_s=ago))
    first, cursor = store.page(Wanted(key="nobody"), limit=10)
    second, cursor = store.page(Wanted(key="nobody"), limit=10, after=cursor)
    assert first == second == []
    assert store.page(Wanted(key="nobody"), limit=10, after=cursor) == ([], None)


@pytest.mark.parametrize("text", ["", "1", "1.2.3.4.5", "a.b.c.d", f"1.2.{'00' * 12}.-1", f"{2**70}.1.00.1", "\ud800"])
def test_what_is_no_cursor(text):
    with pytest.raises(InvalidArgument, match="cursor"):
        Cursor.parse(text)


def test_all_runs_of_a_task(store, keep, run):
    keep(run("other", ago_s=9), run("t", ago_s=8, state=RETRY), run("ta", ago_s=8))
    keep(*[run(ago_s=7) for _ in range(30)])
    keep(run("t", ago_s=1, retries=1, error="é" * 10))
    found = store.runs_of_task("t")
    assert [(each.state, each.attempt, each.error) for each in found] == [(RETRY, 1, ""), (SUCCESS, 2, "é" * 10)]
    assert store.runs_of_task("unknown") == []


def test_attempts_of_one_millisecond_stay_in_their_order(store, keep, run):
    keep(*[run("t", retries=number) for number in range(3)])
    assert [each.retries for each in store.runs_of_task("t")] == [0, 1, 2]


def test_the_newest_of_very_many_runs_of_a_task(store, keep, run):
    for attempt in range(30):
        keep(run("t", ago_s=100 - attempt, retries=attempt))
    assert [each.retries for each in store.runs_of_task("t", limit=3)][-1] == 29


def test_a_group_of_which_the_answer_was_lost_is_counted_once(store, run, keep):
    (unwritten,) = pack_groups([run("t", task="a")])
    keep(run("before"))
    for _ in range(3):
        store.write(unwritten, History())
    assert store.kept() == 2
    assert store.totals()["a"].runs == 1
    assert len(store.runs_of_task("t")) == 1


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_never_more_runs_than_the_bound(store, keep, run, clock):
    bounds = History(runs=100, max_age=60_000)
    most = 0
    for batch in range(40):
        keep(*[run(f"{batch}-{number}", ago_s=-batch) for number in range(5)], bounds=bounds)
        store.trim(bounds, parts=1, now_ms=clock.wall_ms())
        most = max(most, store.kept())
    assert 95 <= most <= 100
    newest = [f"{batch}-{number}" for batch in range(39, 21, -1) for number in range(4, -1, -1)]
    assert all_of(store, limit=20)[: len(newest)] == newest
    assert store.runs_of_task("0-0") == []
    assert all_of(store, Wanted(task="shop.pay"), limit=20) == all_of(store, limit=20)


def test_nothing_older_than_the_bound(store, keep, run, clock):
    bounds = History(runs=1_000, max_age=100)
    keep(run("old"), bounds=bounds)
    clock.advance(60)
    keep(run("newer", ago_s=-60), bounds=bounds)
    assert store.trim(bounds, parts=1, now_ms=clock.wall_ms()) == 0
    clock.advance(41)
    assert store.trim(bounds, parts=1, now_ms=clock.wall_ms()) == 1
    assert all_of(store) == ["newer"]
    clock.advance(60)
    assert store.trim(bounds, parts=1, now_ms=clock.wall_ms()) == 1
    assert all_of(store) == []


def test_a_worker_with_a_clock_ahead_keeps_nothing_alive(store, keep, run, clock):
    bounds = History(runs=1_000, max_age=100)
    clock.jump_wall(86_400)
    keep(run("ahead", ago_s=-86_400), bounds=bounds)
    clock.jump_wall(-86_400)
    keep(*[run() for _ in range(bounds.segment_runs)], bounds=bounds)
    keep(run("newer"), bounds=bounds)
    clock.advance(101)
    store.trim(bounds, parts=5, now_ms=clock.wall_ms())
    assert all_of(store) == []


def test_what_is_trimmed_leaves_nothing_behind(store, keep, run, clock):
    bounds = History(runs=1_000, max_age=100)
    keep(run("t", root="r", group="g", key="k"), run(state=FAILURE), bounds=bounds)
    clock.advance(100 * 86_400)
    store.trim(bounds, parts=1, now_ms=clock.wall_ms())
    left = store._read(lambda tr: tr.get_range(*range_of(store.keys.prefix)))
    assert {store.keys.split_total(key) for key, _ in left} == {"shop.pay"}  # counters of all time


def test_a_trim_has_a_budget(store, keep, run, clock):
    bounds = History(runs=100, max_age=60)
    for batch in range(12):
        keep(run(ago_s=-2 * batch), bounds=bounds)
        clock.advance(2)
    clock.advance(100)
    assert store.trim(bounds, parts=1, now_ms=clock.wall_ms()) == TRIM_SEGMENTS
    assert store.trim(bounds, parts=1, now_ms=clock.wall_ms()) == TRIM_SEGMENTS
    assert store.trim(bounds, parts=5, now_ms=clock.wall_ms()) == 12 - 2 * TRIM_SEGMENTS


# -- active runs -------------------------------------------------------------------------------------------------------


def test_the_runs_of_a_session_that_ended_are_lost(store, run, clock):
    lost = run("lost", state=STARTED, end_ms=0, runtime_s=None, start_ms=clock.wall_ms() - 9_000)
    store.activity(b"dead", {1: lost})
    store.activity(b"alive", {1: run("alive", state=STARTED, end_ms=0, runtime_s=None)})
    assert store.lose(b"dead", History()) == 1
    assert store.lose(b"dead", History()) == 0
    assert [each.id for _, each in store.active()] == ["alive"]
    ((found,), _) = store.page(Wanted(), limit=10)
    assert found == lost._replace(state=LOST, end_ms=clock.wall_ms())
    assert store.totals()["shop.pay"].of(LOST) == 1


# -- counters ----------------------------------------------------------------------------------------------------------


def test_counters_by_task(store, keep, run, clock):
    keep(run(task="a", runtime_s=0.2), run(task="a", state=FAILURE, runtime_s=2.0), run(task="b", state=RETRY))
    keep(run(task="a", runtime_s=0.2))
    now_s = clock.wall_ms() // 1000
    slots = {task: counted for _, task, counted in store.slots(300, now_s - 600, now_s + 1)}
    assert {task: each._replace(sketch=Counters().sketch) for task, each in slots.items()} == store.totals()
    counted = slots["a"]
    assert (counted.runs, counted.of(SUCCESS), counted.of(FAILURE), counted.runtime_us) == (3, 2, 1, 2_400_000)
    assert slots["b"].of(RETRY) == 1
    assert slots["b"].quantile_s(0.5) is None  # a retry says nothing of how long the task takes


def test_slots_of_the_version_before_are_added_to(store, keep, run, clock):
    """They have no sketch; what comes into them has one."""
    keep(run(task="a", runtime_s=0.2))
    now_s = clock.wall_ms() // 1000
    key = store.keys.slot(300, now_s - now_s % 300, "a")
    store._write(lambda tr: tr.set(key, tr.get(key)[: layout.TOTAL_WIDTH]))
    before = [each for *_, each in store.slots(300, now_s - 300, now_s + 1)]
    assert [(each.runs, each.quantile_s(0.5)) for each in before] == [(1, None)]
    keep(run(task="a", runtime_s=20.0))
    (now,) = (each for *_, each in store.slots(300, now_s - 300, now_s + 1))
    assert (now.runs, now.runtime_us) == (2, 20_200_000)
    assert now.quantile_s(0.5) == pytest.approx(20.0, rel=layout.ERROR)


def test_slots_of_all_tasks_go_when_they_are_old(store, keep, run, clock):
    keep(run(task="a", ago_s=1), run(task="b", ago_s=1))
    now_s = clock.wall_ms() // 1000
    for length_s, kept_s in layout.SLOTS.items():
        assert [each.runs for each in store.series(length_s, 0, now_s + 1).values()] == [2]
        store.trim(History(), parts=1, now_ms=(now_s + kept_s + length_s) * 1000)
        assert store.series(length_s, 0, now_s + 1) == {}


def test_what_was_dropped_is_counted(store):
    assert store.dropped() == 0
    store.activity(b"s", {}, dropped=3)
    store.activity(b"s", {}, dropped=4)
    assert store.dropped() == 7
