"""Keys that have used up their rate, and when the duty looks at them again."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.upkeep import promotion


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(promotion, "MESSAGES_PER_TRANSACTION", 2)
    return Bench(FaultyDatabase())


def park(bench, key, after_ms, wait_ms=None):
    entry = bench.engine.keys.unpark(bench.clock.wall_ms() + after_ms, "q", key)
    bench.write(lambda tr: tr.set(entry, (after_ms if wait_ms is None else wait_ms).to_bytes(8, "big")))


def parked(bench):
    rows = bench.engine.upkeep.rows(bench.engine.keys.all_unparks)
    return [str(bench.engine.keys.split(row, int, str, str)[2]) for row, _ in rows]


def test_of_many_the_first_and_the_last_are_looked_at(bench):
    """Wrong clocks' are last: those who wait for less than their moment says."""
    for number, key in enumerate("abcd"):
        park(bench, key, 10_000 + number)
    park(bench, "ahead", 10**9, wait_ms=3_000)
    assert bench.engine.upkeep.unpark() == bench.clock.wall_ms() + 3_000
    bench.later(3)
    assert bench.engine.upkeep.unpark() == bench.clock.wall_ms(), "some may be left"
    assert parked(bench) == ["a", "b", "c", "d"]
    assert bench.engine.upkeep.unpark() == bench.clock.wall_ms() + 7_000


def test_as_many_as_are_looked_at_are_all_that_may_be_left(bench):
    for key in "ab":
        park(bench, key, 1_000)
    assert bench.engine.upkeep.unpark() == bench.clock.wall_ms() + 1_000
    bench.later(1)
    assert bench.engine.upkeep.unpark() == bench.clock.wall_ms(), "it is not known yet that there is no third one"
    assert parked(bench) == []
    assert bench.engine.upkeep.unpark() is None


def test_a_malformed_row_is_cleared(bench):
    begin, _ = bench.engine.keys.all_unparks
    bench.write(lambda tr: tr.set(begin + b"\x00nonsense", b""))
    assert bench.engine.upkeep.unpark() is None
    assert bench.engine.upkeep.rows(bench.engine.keys.all_unparks) == []
