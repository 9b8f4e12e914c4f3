"""What each verb costs, exactly; the numbers of docs/results.md. Round trips are FoundationDB's."""

from functools import partial

import pytest
from celery.states import STARTED, SUCCESS
from kit.costs import CountingDatabase, cost
from kit.faults import FaultyDatabase

from celery_fdb.results import chords
from celery_fdb.results.chords import ChordPart
from celery_fdb.results.store import ResultStore
from kombu_fdb.testing.clock import ManualClock

LATER = 2_000_000_000_000


@pytest.fixture
def counted():
    return CountingDatabase(FaultyDatabase())


@pytest.fixture
def store(counted):
    return ResultStore(counted, "costs", clock=ManualClock(), timeout_s=5.0)


@pytest.fixture
def paid(counted):
    return partial(cost, counted)


def returned(place):
    return ChordPart("c", place, f"t{place}", SUCCESS, b"1")


def reads_and_writes(cost):
    return cost.point_reads + cost.range_reads, cost.writes, cost.round_trips


def test_store(store, paid):
    first = paid(lambda: store.store("a", STARTED, b"1", LATER))
    assert reads_and_writes(first) == (1, 2, 3)  # what stands there; record and its expiry
    second = paid(lambda: store.store("a", SUCCESS, b"1", LATER + 1))
    assert reads_and_writes(second) == (1, 3, 3)  # and the old expiry
    late = paid(lambda: store.store("a", STARTED, b"1", LATER))
    assert reads_and_writes(late) == (1, 0, 2)
    assert reads_and_writes(paid(lambda: store.store("b", SUCCESS, b"1", 0))) == (1, 1, 3)


def test_a_large_result_pays_for_its_chunks(store, paid):
    large = SUCCESS, b"x" * 1_000_000, 0
    assert reads_and_writes(paid(lambda: store.store("a", *large))) == (1, 1 + 12, 3)
    assert reads_and_writes(paid(lambda: store.load("a"))) == (2, 0, 3)


def test_read_and_forget(store, paid):
    store.store("a", SUCCESS, b"1", LATER)
    assert reads_and_writes(paid(lambda: store.load("a"))) == (1, 0, 2)
    assert reads_and_writes(paid(lambda: store.forget("a"))) == (1, 3, 3)  # record, what may stand behind it, expiry


def test_a_look_at_many_is_one_round_trip(store, paid):
    cost = paid(lambda: store.look([str(number) for number in range(200)], timeout_s=5.0))
    assert (cost.point_reads, cost.round_trips, cost.watches) == (200, 2, 200)


@pytest.mark.parametrize("size", [3, 500])
def test_a_chord_of_any_size(store, paid, size):
    assert reads_and_writes(paid(lambda: store.open_chord("c", b"body", LATER))) == (1, 5, 3)
    assert reads_and_writes(paid(lambda: store.enlarge_chord("c", size=size))) == (1, 1, 3)
    for place in range(size - 1):
        store.store(f"t{place}", SUCCESS, b"1", LATER, returned(place))
    place = size - 1
    with_part = paid(lambda: store.store(f"t{place}", SUCCESS, b"1", LATER, returned(place)))
    assert reads_and_writes(with_part) == (3, 4, 4)  # as without, and: chord and part; part and number of parts
    assert reads_and_writes(paid(lambda: store.claim_chord(returned(0)._replace(task_id="other")))) == (4, 0, 2)
    assert reads_and_writes(paid(lambda: store.claim_chord(returned(place)))) == (4, 3, 3)
    assert reads_and_writes(paid(lambda: store.load_group("c"))) == (1, 0, 2)  # is there a group in the header?
    pages = 1 + size // chords.PART_ROWS
    assert reads_and_writes(paid(lambda: store.parts("c"))) == (2 * pages, 0, 3 * pages)
    finished = paid(lambda: store._write(store.finishing("c")))
    assert reads_and_writes(finished) == (2, 4, 3)  # chord, and the group in its header


def test_parts_do_not_conflict(store, counted):
    store.open_chord("c", None, 0)
    store.enlarge_chord("c", size=2)
    one, two = (counted.begin(timeout_s=5.0) for _ in range(2))
    chords.add(one, store.keys, returned(0), 0)
    chords.add(two, store.keys, returned(1), 0)
    one.commit()
    two.commit()
    assert len(store.parts("c")) == 2


def test_a_sweep_that_finds_nothing_writes_nothing(store, paid):
    store.store("a", SUCCESS, b"1", LATER)
    store.open_chord("c", b"body", 0)
    assert reads_and_writes(paid(store.sweep)) == (1, 0, 2)
    assert reads_and_writes(paid(store.abandoned_chords)) == (1, 0, 2)
