"""A consumer of many queues, few of which have messages, costs no more than a consumer of those few."""

import pytest
from kit.conformance.consumer import Consumer
from kit.conformance.queue import Bench

MANY, FEW = 500, 3
BUSY = [f"q{number}" for number in (7, 77, 444)]


def busy_claim(counted, queues, *, contested):
    """What the claim costs that finds the messages, when the consumer has looked at all queues once."""
    bench = Bench(counted)
    consumer = Consumer(bench, queues, contested=contested)
    for _ in range(3):
        consumer.turn()
    assert not consumer.transport.watch_set.hungry
    for queue in BUSY:
        bench.put(b"a", queue=queue)
    assert consumer.transport.watch_set.hungry == set(BUSY)
    counted.reset()
    consumer.turn()
    (claim,) = [each for each in counted.transactions if each.sets > len(BUSY)]
    assert bench.counts("q7") == (0, 0, 1)
    return claim


@pytest.mark.parametrize("contested", [False, True], ids=["alone", "first of a wait queue"])
def test_a_claim_of_many_queues_reads_those_that_have_messages(counted, contested):
    few = busy_claim(counted, BUSY, contested=contested)
    many = busy_claim(counted, [f"q{number}" for number in range(MANY)], contested=contested)
    assert _reads(many) == _reads(few)


def _reads(cost):
    return cost.point_reads, cost.range_reads, cost.rows, cost.watches, cost.round_trips


def test_who_waits_in_a_wait_queue_does_not_look_at_the_queues(counted):
    bench = Bench(counted)
    first, second = Consumer(bench, ["q"], contested=True), Consumer(bench, ["q"], contested=True)
    for consumer in (first, second, first, second):
        consumer.turn()
    bench.put(b"a")
    assert first.transport.bell.rung
    assert not second.transport.bell.rung, "one message wakes one consumer"
    first.turn()
    assert second.transport.bell.rung, "and who is the first then"
    assert bench.counts() == (0, 0, 1)
