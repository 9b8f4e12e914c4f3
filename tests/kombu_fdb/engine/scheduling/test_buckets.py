"""The token bucket of a key, in numbers; what a rate does to the consumers of a queue is in ``test_rates.py``."""

import math
from functools import partial

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.scheduling import key_limits
from kombu_fdb.engine.scheduling.key_limits import (
    FULL_FOR_MS,
    LAST_MS,
    LONGEST_WAIT_MS,
    MOST_AHEAD_MS,
    Bucket,
    known_for_ms,
)
from kombu_fdb.model import KeyLimits
from kombu_fdb.testing.clock import ManualClock

#: Ten messages at once, and one each four seconds.
SLOW = KeyLimits(rate=0.25, burst=10)


@pytest.mark.parametrize(
    ("tokens", "rate", "ms"),
    [(1.0, 1.0, 0), (7.5, 1.0, 0), (0.0, 0.25, 4_001), (0.75, 0.25, 1_001), (-1.0, 0.25, 8_001), (0.999, 1_000.0, 1)],
)
def test_how_long_until_there_is_a_token(tokens, rate, ms):
    assert key_limits.wait_ms(Bucket(tokens, 0), KeyLimits(rate=rate)) == ms


def test_no_key_waits_for_more_than_a_day():
    assert key_limits.wait_ms(Bucket(0.0, 0), KeyLimits(rate=1e-9)) == LONGEST_WAIT_MS


@pytest.mark.parametrize(
    ("filled_ms", "now_ms", "unchanged_ms", "tokens", "moment_ms"),
    [
        (1_000, 9_000, 0, 4.0, 9_000),
        (1_000, 9_000, 12_000, 5.0, 13_000),  # what was seen counts for more than the clocks say
        (9_000, 1_000, 0, 2.0, 9_001),  # a clock that was set back gives nothing
        (9_000, 1_000, 4_000, 3.0, 13_000),
        (1_000, 1_000, 0, 2.0, 1_001),  # another row, though nothing has come
        (1_000, 400_000, 0, 10.0, 400_000),
    ],
)
def test_what_has_come_since(filled_ms, now_ms, unchanged_ms, tokens, moment_ms):
    row = key_limits.encode(Bucket(2.0, filled_ms))
    assert key_limits.refilled(row, SLOW, now_ms, unchanged_ms) == Bucket(tokens, moment_ms)


def test_a_moment_of_no_clock_does_not_last():
    row = key_limits.encode(Bucket(2.0, LAST_MS))
    assert key_limits.refilled(row, SLOW, 5_000, 0) == Bucket(2.0, 5_000 + MOST_AHEAD_MS)


@pytest.mark.parametrize("row", [None, b"", b"x" * 15, b"x" * 17, key_limits.encode(Bucket(math.nan, 1))])
def test_a_bucket_that_is_not_there_or_cannot_be_read_is_full(row):
    assert key_limits.refilled(row, SLOW, 5_000, 0) == Bucket(10.0, 5_000)


def test_a_row_is_known_since_it_was_first_seen_as_it_is():
    clock = ManualClock()
    seen_for = partial(known_for_ms, {}, clock)
    assert seen_for(b"key", b"one") == 0
    clock.advance(2.5)
    assert seen_for(b"key", b"one") == 2_500
    assert seen_for(b"other", b"one") == 0
    clock.advance(1)
    assert [seen_for(b"key", value) for value in (b"two", b"one", b"one")] == [0, 0, 0]
    clock.advance(1)
    assert seen_for(b"key", b"one") == 1_000


def test_no_more_rows_are_remembered_than_so_many(monkeypatch):
    monkeypatch.setattr(key_limits, "MOST_SIGHTINGS", 2)
    clock = ManualClock()
    seen_for = partial(known_for_ms, {}, clock)
    for key in (b"a", b"b"):
        seen_for(key, b"row")
    clock.advance(1)
    assert seen_for(b"b", b"row") == 1_000
    assert seen_for(b"c", b"row") == 0
    assert seen_for(b"a", b"row") == 0, "forgotten, so too much is waited and never too little"


@pytest.mark.parametrize(("tokens", "early_ms"), [(10.0, 0), (2.0, 32_000), (12.0, 0)])
def test_a_bucket_goes_when_it_has_been_full_for_ten_minutes(tokens, early_ms):
    bench = Bench(FaultyDatabase())
    bench.engine.queues.limit("q", "k", SLOW)
    key, now_ms = bench.engine.keys.bucket("q", "k"), bench.clock.wall_ms()
    bench.write(lambda tr: tr.set(key, key_limits.encode(Bucket(tokens, now_ms))))
    bench.later((FULL_FOR_MS + early_ms - 1) / 1000)
    assert bench.engine.upkeep.clear_buckets_part(b"") == b""
    assert len(bench.engine.upkeep.rows(bench.engine.keys.all_buckets)) == 1
    bench.later(0.001)
    bench.engine.upkeep.clear_buckets_part(b"")
    assert bench.engine.upkeep.rows(bench.engine.keys.all_buckets) == []


@pytest.mark.parametrize(("value", "rate"), [(b"garbage", 0.25), (key_limits.encode(Bucket(0.0, 2**60)), None)])
def test_an_unusable_bucket_goes_at_once(value, rate):
    bench = Bench(FaultyDatabase())
    bench.engine.queues.limit("q", "k", KeyLimits(rate=rate, max_in_flight=5))
    bench.write(lambda tr: tr.set(bench.engine.keys.bucket("q", "k"), value))
    bench.engine.upkeep.clear_buckets_part(b"")
    assert bench.engine.upkeep.rows(bench.engine.keys.all_buckets) == []


def test_buckets_are_cleared_in_parts(monkeypatch):
    monkeypatch.setattr(key_limits, "BUCKETS_PER_PART", 2)
    bench = Bench(FaultyDatabase())
    for key in "abcde":
        bench.write(lambda tr, key=key: tr.set(bench.engine.keys.bucket("q", key), b"?"))
    begins, begin = [bench.engine.keys.all_buckets[0]], b"begin"
    while begin:
        begin = bench.engine.upkeep.clear_buckets_part(begins[-1])
        begins.append(begin)
    assert begins[1:] == [
        bench.engine.keys.bucket("q", "b") + b"\x00",
        bench.engine.keys.bucket("q", "d") + b"\x00",
        b"",
    ]
    assert bench.engine.upkeep.rows(bench.engine.keys.all_buckets) == []


def test_a_bucket_that_is_used_while_it_is_to_go_stays(monkeypatch):
    bench = Bench(FaultyDatabase())
    bench.engine.queues.limit("q", "k", SLOW)
    row = bench.engine.keys.bucket("q", "k")
    bench.write(lambda tr: tr.set(row, key_limits.encode(Bucket(10.0, 0))))
    used = key_limits.encode(Bucket(2.0, bench.clock.wall_ms()))
    uses = [used]
    real = key_limits._is_full

    def use(value, limits, now_ms):
        while uses:
            bench.write(lambda tr: tr.set(row, uses.pop()))
        return real(value, limits, now_ms)

    monkeypatch.setattr(key_limits, "_is_full", use)
    bench.engine.upkeep.clear_buckets_part()
    assert bench.engine.upkeep.rows(bench.engine.keys.all_buckets) == [(row, used)]
