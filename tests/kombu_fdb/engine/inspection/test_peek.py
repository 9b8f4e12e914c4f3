"""Looking at a queue's messages: which, in which order, how many; nothing is changed and nothing conflicts."""

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.model import KeyLimits, QueueControl


@pytest.fixture
def bench(counted):
    bench = Bench(counted)
    yield bench
    bench.check()


def peeked(bench, limit=100, *, key=None, reverse=False):
    return [each.payload for each in bench.engine.inspect.peek("q", limit, key=key, reverse=reverse)]


def test_a_plain_queue_from_both_ends(bench):
    bench.put(b"a", b"b", b"c")
    assert peeked(bench) == [b"a", b"b", b"c"]
    assert peeked(bench, reverse=True) == [b"c", b"b", b"a"]
    assert peeked(bench, 2) == [b"a", b"b"]
    assert peeked(bench, 2, reverse=True) == [b"c", b"b"]


def test_of_one_key_only_its_own(bench):
    bench.put(b"x1", b"x2", b"x3", key="x")
    bench.put(b"y1", key="y")
    bench.put(b"plain")
    assert peeked(bench, key="x") == [b"x1", b"x2", b"x3"]
    assert peeked(bench, 2, key="x") == [b"x1", b"x2"]
    assert peeked(bench, 2, key="x", reverse=True) == [b"x3", b"x2"]
    assert peeked(bench, key="") == [b"plain"]
    assert peeked(bench, key="nobody") == []


def test_keys_come_in_the_order_of_the_claims(bench):
    bench.put(b"x1", b"x2", b"x3", key="x")
    bench.put(b"y1", b"y2", key="y")
    expected = peeked(bench)
    assert sorted(expected) == [b"x1", b"x2", b"x3", b"y1", b"y2"]
    assert peeked(bench, 3) == expected[:3]
    assert bench.payloads() == expected


def test_what_stands_behind_a_blocked_key_comes_once(bench):
    """A claim looks again behind such keys, and there finds no turn that it has served."""
    bench.put(b"a1", b"a2", key="a")
    for key in ("b", "c", "d"):
        bench.put(key.encode() + b"1", key=key)
    assert bench.payloads(1) == [b"a1"]
    bench.engine.queues.limit("q", "c", KeyLimits(paused=True))
    expected = peeked(bench, 2)
    assert expected == [b"b1", b"d1"]
    assert bench.payloads(2) == expected


def test_a_large_message_stops_no_look(bench):
    bench.put(*(bytes([number]) * 90_000 for number in range(100)), key="x")
    assert len(peeked(bench)) == 100, "and no window of a claim holds as much"


def test_the_rest_of_a_round_is_one_message_of_each_key_that_waits_in_it(bench):
    for key in "abc":
        bench.put(f"{key}1".encode(), f"{key}2".encode(), key=key)
    assert bench.payloads(1) == [b"a1"]
    assert [each.payload for each in bench.engine.inspect.snapshot("q", 50).round] == [b"b1", b"c1"]


def test_what_a_limit_withholds_is_not_shown_as_next(bench):
    bench.put(b"x1", b"x2", key="x")
    bench.engine.queues.limit("q", "x", KeyLimits(max_in_flight=1))
    assert peeked(bench) == [b"x1"]
    assert peeked(bench, key="x") == [b"x1", b"x2"]


def test_a_look_writes_nothing_and_never_conflicts(bench, counted):
    bench.put(b"x1", key="x")
    bench.put(b"plain")
    before = bench.counts()
    counted.reset()
    peeked(bench)
    peeked(bench, key="x")
    assert all((cost.sets, cost.clears, cost.atomics, cost.commits) == (0, 0, 0, 0) for cost in counted.transactions)
    assert all((cost.conflict_keys, cost.conflict_ranges) == (0, 0) for cost in counted.transactions)
    assert bench.counts() == before
    assert bench.engine.inspect.control("q") == QueueControl()
