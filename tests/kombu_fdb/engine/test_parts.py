"""Parts: how much one transaction takes and what makes that less, runs of rows, and walks through ranges."""

from functools import partial

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.parts import AdaptiveBatch, Budget, rows_from, runs_of, take_run
from kombu_fdb.engine.transactions import IN_THE_WAY
from kombu_fdb.errors import (
    CapacityExceeded,
    CommitUnknown,
    Conflict,
    LimitExceeded,
    StoreUnavailable,
    TransactionTooOld,
)
from kombu_fdb.testing.clock import ManualClock

# -- how much ----------------------------------------------------------------------------------------------------------


def too_much_over(most, tried, error):
    def part(size):
        tried.append(size)
        if size > most:
            raise error
        return size

    return part


def test_what_is_too_large_is_tried_at_once_with_half_of_it():
    batch, tried = AdaptiveBatch(100), list[int]()
    assert batch.run(too_much_over(13, tried, LimitExceeded())) == 12
    assert tried == [100, 50, 25, 12]


@pytest.mark.parametrize(
    ("error", "tried", "size"),
    [
        (LimitExceeded(), [3, 1], 1),
        (CommitUnknown(), [3], 3),  # it may have happened, so its size is not to blame
    ],
)
def test_one_that_never_fits_is_given_up(error, tried, size):
    """By the errors that halve a step of the duties, of which all of ours are."""
    batch, found = AdaptiveBatch(3, IN_THE_WAY), list[int]()
    with pytest.raises(type(error)):
        batch.run(too_much_over(0, found, error))
    assert (found, batch.size) == (tried, size)


def test_what_fits_twice_as_much_is_tried_next_time_and_never_more_than_the_most():
    batch = AdaptiveBatch(100)
    batch.size = 30
    sizes = [batch.run(lambda size: size) for _ in range(4)]
    assert sizes == [30, 60, 100, 100]


def test_of_less_than_it_may_take_it_learns_nothing_that_makes_it_small():
    batch = AdaptiveBatch(100)
    assert batch.run(lambda size: size, wanted=3) == 3
    assert batch.size == 100


@pytest.mark.parametrize("error", [StoreUnavailable(), TransactionTooOld()])
def test_what_has_cost_its_caller_time_is_half_as_much_at_the_next_call(error):
    batch, tried = AdaptiveBatch(100), list[int]()
    for _ in range(2):
        with pytest.raises(type(error)):
            batch.run(too_much_over(30, tried, error))
    assert batch.run(too_much_over(30, tried, error)) == 25
    assert tried == [100, 50, 25]


def test_other_errors_halve_it_where_they_are_named():
    tried = []
    with pytest.raises(CapacityExceeded):
        AdaptiveBatch(8).run(too_much_over(3, tried, CapacityExceeded()))
    assert AdaptiveBatch(8, CapacityExceeded).run(too_much_over(3, tried, CapacityExceeded())) == 2
    assert tried == [8, 8, 4, 2]


def test_a_budget_ends_with_its_transactions_or_with_its_time():
    clock = ManualClock()
    budget = Budget(clock, seconds=1.0, transactions=2)
    assert [budget.spend(), budget.spend(), budget.is_spent] == [True, True, False]
    assert [budget.spend(), budget.is_spent] == [False, True]
    budget = Budget(clock, seconds=1.0, transactions=2)
    clock.advance(0.999)
    assert budget.spend()
    clock.advance(0.001)
    assert [budget.is_spent, budget.spend(), budget.is_spent] == [False, False, True]


# -- runs of rows, taken together: what they conflict with, and what they leave ----------------------------------------


ROWS = [b"b", b"c", b"d"]


def taken_while(written, run):
    """What is left of all rows. Raises ``Conflict``."""
    database = FaultyDatabase()
    before, taking, meanwhile, after = (database.begin(timeout_s=1) for _ in range(4))
    for key in (b"a", *ROWS, b"e"):
        before.set(key, b"")
    before.commit()
    taking.get_range(b"", b"z", snapshot=True)
    meanwhile.set(written, b"new")
    meanwhile.commit()
    take_run(taking, run)
    taking.commit()
    return [key for key, _ in after.get_range(b"", b"z")]


@pytest.mark.parametrize("written", [b"b", b"bb", b"c", b"d"])
def test_a_write_to_a_row_of_a_run_or_between_them_conflicts(written):
    with pytest.raises(Conflict):
        taken_while(written, ROWS)


@pytest.mark.parametrize("written", [b"a", b"aa", b"d\x00", b"e"])
def test_a_write_beside_a_run_does_not_conflict(written):
    assert taken_while(written, ROWS) == sorted({b"a", b"e", written})


def test_a_run_of_one_row_is_that_row(subtests):
    with pytest.raises(Conflict):
        taken_while(b"c", [b"c"])
    for written in (b"b", b"bb", b"c\x00", b"d"):
        with subtests.test(written=written):
            assert taken_while(written, [b"c"]) == sorted({b"a", b"b", b"d", b"e", written})


def test_runs_end_at_what_is_not_taken():
    rows = [b"1", b"2", b"3", b"4", b"5"]
    assert runs_of(rows, {b"1", b"2", b"4", b"elsewhere"}) == [[b"1", b"2"], [b"4"]]
    assert runs_of(rows, set()) == []


# -- walks through several ranges, in parts of any size ----------------------------------------------------------------


def store(key, value, tr):
    tr.set(key, value)


RANGES = [(b"~a", b"~b"), (b"~c", b"~d"), (b"~e", b"~f")]
WALKED = [(b"~%c%d" % (letter, number), b"%d" % number) for letter in b"ac" for number in range(4)]


@pytest.mark.parametrize("most", range(1, 10))
def test_each_row_comes_once_and_in_order(most):
    bench = Bench(FaultyDatabase())
    for key, value in [*WALKED, (b"~b", b"between"), (b"~f", b"behind")]:
        bench.write(partial(store, key, value))
    found = []
    parts, cursor = 0, b""
    while parts == 0 or cursor:
        rows, cursor = bench.engine.transactions.read(lambda work: rows_from(work.tr, RANGES, cursor, most))  # noqa: B023
        assert len(rows) == most if cursor else len(rows) < most
        found, parts = found + rows, parts + 1
    assert found == WALKED
    assert parts == len(WALKED) // most + 1
