"""How much one transaction takes, and what makes that less."""

import pytest

from kombu_fdb.engine.stored.parts import AdaptiveBatch, Budget
from kombu_fdb.engine.transactions import IN_THE_WAY
from kombu_fdb.errors import CapacityExceeded, CommitUnknown, LimitExceeded, StoreUnavailable, TransactionTooOld
from kombu_fdb.testing.clock import ManualClock


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
