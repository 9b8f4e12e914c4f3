"""A channel that stands in a line and consumes from another queue too: its room is promised once, and shared."""

from __future__ import annotations

from collections import Counter

import pytest
from kit.conformance.consumer import Consumer
from kit.conformance.queue import Bench

from kombu_fdb.model import Delivery
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.transport.consuming.dispatch import Plan


@pytest.fixture
def bench() -> Bench:
    return Bench(MemoryDatabase())


def contested(bench: Bench, prefetch: int) -> tuple[Consumer, Consumer]:
    """The first of a line for "q", and one that waits there and is the active consumer of "one"."""
    first = Consumer(bench, ["q"], contested=True)
    second = Consumer(bench, ["q", "one"], prefetch=prefetch, single=["one"], contested=True)
    for consumer in (first, second, first, second, second):
        consumer.turn()
    bench.clock.advance(1)  # it has looked at "one", and owes the line nothing
    standing = second.transport.reception._claiming.standing
    assert standing.in_line
    assert not standing.is_first
    return first, second


def test_room_that_is_promised_to_a_line_is_not_given_to_another_queue(bench: Bench) -> None:
    first, second = contested(bench, prefetch=3)
    bench.put(b"a", b"b", b"c", queue="one")
    second.turn()
    assert second.waiting == ["one"] * 3
    bench.put(*(b"%d" % number for number in range(12)))
    for _ in range(4):
        first.turn()
        second.turn()
        assert len(second.waiting) <= 3
        first.settle()


def test_what_the_line_has_granted_comes_before_another_queue(bench: Bench) -> None:
    bench.put(*(b"%d" % number for number in range(12)))
    second = Consumer(bench, ["q", "one"], prefetch=2, single=["one"], contested=True)
    first = Consumer(bench, ["q"], contested=True)
    standing = second.transport.reception._claiming.standing
    membership = second.transport.store.membership()
    first.transport.reception._claiming.standing.join(first.transport.store.membership(), ["q"], 4, [])
    standing.join(membership, ["q"], 2, [])
    first.turn()
    bench.put(b"a", b"b", queue="one")
    plan, hand = Plan(["one"], 2, consumers={"one": "tag-1"}), list[Delivery]()
    second.transport.reception._claiming.choose(plan, hand)
    assert [each.queue for each in hand] == ["q", "q"]
    assert not standing.in_line


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_neither_the_line_nor_the_other_queue_starves(bench: Bench, prefetch: int) -> None:
    first, second = contested(bench, prefetch)
    served: Counter[str] = Counter()
    for _ in range(60):
        bench.put(*(b"%d" % each for each in range(8)))
        bench.put(*(b"%d" % each for each in range(4)), queue="one")
        for consumer in (first, second):
            consumer.turn()
        served.update(second.settle())
        first.settle()
        bench.clock.advance(0.1)
    assert served["one"] >= served.total() / 5, served
    assert served["q"] >= served.total() / 5, served


def test_an_idle_line_keeps_nobody_waiting(bench: Bench) -> None:
    _first, second = contested(bench, prefetch=2)
    bench.put(*(b"%d" % number for number in range(20)), queue="one")
    for _ in range(10):
        second.turn()
        assert second.settle() == ["one", "one"]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_busy_queue_of_its_own_does_not_keep_the_first_from_the_line(bench: Bench, prefetch: int) -> None:
    first = Consumer(bench, ["q", "one"], prefetch=prefetch, single=["one"], contested=True)
    for _ in range(4):
        first.turn()
    bench.put(*[b""] * 50)
    settled: Counter[str] = Counter()
    for _ in range(40):
        bench.put(b"", queue="one")
        first.turn()
        settled.update(first.settle())
        bench.clock.advance(0.05)
    assert settled["one"] >= 10
    assert settled["q"] >= 10
