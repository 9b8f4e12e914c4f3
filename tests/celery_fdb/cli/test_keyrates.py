"""Counters of the busiest keys and of the others: they never shrink, and grow together as much as the queue's."""

import random
from collections import Counter

from celery_fdb.inspection.metrics import Rates
from kombu_fdb.engine.metrics.totals import OTHERS


def counts(**numbers):
    return {key.removeprefix("others") or OTHERS: {"acked": number} for key, number in numbers.items()}


def seen(rates, **numbers):
    rates.look(counts(**numbers))
    return {key: events["acked"] for key, events in rates.named.items()}, rates.others["acked"]


def test_the_others_do_not_shrink_when_a_key_gets_a_name():
    rates = Rates(1)
    seen(rates, a=10, b=9)
    assert seen(rates, a=10, b=19) == ({"b": 19}, 9), "b's growth is its own, what it did before is the others'"
    assert seen(rates, a=13, b=20) == ({"b": 20}, 9 + 3)


def test_a_key_that_was_busy_long_ago_gives_way():
    rates = Rates(1)
    seen(rates, old=1000, new=1)
    for number in range(2, 100):
        named, _ = seen(rates, old=1000, new=10 * number)
    assert set(named) == {"new"}


def test_a_key_that_is_folded_in_the_store_is_no_rate():
    rates = Rates(1)
    seen(rates, a=100, b=5, others=50)
    assert seen(rates, a=101, others=55) == ({"a": 101}, 55)
    assert seen(rates, a=102, b=2, others=55) == ({"a": 102}, 57)
    seen(rates, b=3, others=157)
    assert rates.others["acked"] == 57, "a is among the others now, and grew by nothing"


def test_a_queue_that_begins_anew_makes_the_others_no_fewer():
    rates = Rates(1)
    seen(rates, a=10, b=9, others=5)
    assert seen(rates, a=1, others=1)[1] == 14


def test_named_and_others_grow_as_much_as_all_keys():
    rng = random.Random(7)
    rates, totals, grown = Rates(3), Counter(dict.fromkeys("abcdefgh", 1)), 0
    rates.look({key: {"acked": number} for key, number in totals.items()})
    others = rates.others["acked"]
    for _ in range(200):
        before, shown = totals.copy(), rates.others["acked"]
        totals.update(rng.choices("abcdefgh", k=10))
        rates.look({key: {"acked": number} for key, number in totals.items()})
        assert rates.others["acked"] >= shown
        grown += sum(events["acked"] - before[key] for key, events in rates.named.items())
    assert grown + rates.others["acked"] - others == 200 * 10
