"""Which dead letters a condition means: moments at their edges, and messages that have not died at all."""

import pytest

from kombu_fdb.engine import dead_letters
from kombu_fdb.engine.dead_letters import error_of
from kombu_fdb.keyspace.codec import ATTEMPTS
from kombu_fdb.model import Publication
from kombu_fdb.transport.envelope import payload_of


def reject(bench, payload, **details):
    """Dead-letter a new message; when that was."""
    bench.put(payload)
    (delivery,) = bench.take()
    assert delivery.lease is not None
    bench.engine.messages.reject([delivery.lease], **details)
    bench.later(10)
    return bench.clock.wall_ms() - 10_000


def found(bench, **conditions):
    walk = bench.engine.dead_letters.walk("q.dead", **conditions)
    letters, cursor = bench.engine.dead_letters.look(walk, b"", 10)
    assert cursor == b""
    return sorted(letter.payload for letter in letters)


def test_from_a_moment_on_and_until_before_one(bench):
    first, second, third = (reject(bench, payload) for payload in (b"1", b"2", b"3"))
    assert first < second < third
    assert found(bench, died_after_ms=second) == [b"2", b"3"]
    assert found(bench, died_after_ms=second + 1) == [b"3"]
    assert found(bench, died_before_ms=second) == [b"1"]
    assert found(bench, died_before_ms=second + 1) == [b"1", b"2"]
    assert found(bench, died_after_ms=first, died_before_ms=third) == [b"1", b"2"]


def test_by_reason_queue_and_error(bench):
    reject(bench, b"1", error_class="shop.errors.Declined")
    reject(bench, b"2", reason="failed", error_class="Declined")
    assert found(bench, reason="failed") == [b"2"]
    assert found(bench, queue="q") == [b"1", b"2"]
    assert found(bench, queue="another") == []
    assert found(bench, error="Declined") == [b"1", b"2"]
    assert found(bench, error="shop.errors.Declined") == [b"1"]
    assert found(bench, error="clined") == []


def test_an_unknown_condition_is_refused_without_the_store(bench, monkeypatch):
    """While the store did not answer, that was the error, not the wrong name."""
    monkeypatch.setattr(bench.engine.transactions, "read", None)
    with pytest.raises(TypeError, match="reson"):
        bench.engine.dead_letters.walk("q.dead", reson="rejected")


def test_what_never_died_meets_no_condition_about_a_death(bench):
    """It was published straight to the dead-letter queue."""
    reject(bench, b"dead")
    bench.engine.publisher.publish([Publication("", "q.dead", b"fresh")])
    assert found(bench) == [b"dead", b"fresh"]
    assert found(bench, queue="q") == [b"dead"]
    assert found(bench, died_before_ms=bench.clock.wall_ms() + 1) == [b"dead"]


@pytest.mark.parametrize(
    ("attempts", "error"),
    [
        ([{"error": "ValueError: 1: 2"}, {"error": "shop.Declined: no: never"}], "shop.Declined"),
        ([{"error": "KeyError"}], "KeyError"),
        ([{"error": ""}], ""),
        ([{"error": 5}], ""),
        ([{"other": "KeyError: 1"}], ""),
        (["KeyError: 1"], ""),
        ([], ""),
        ({"error": "KeyError: 1"}, ""),
        (None, ""),
    ],
)
def test_the_error_of_what_waits_to_be_retried_is_that_of_its_last_attempt(bench, attempts, error):
    bench.put(payload_of({"body": "", "headers": {ATTEMPTS: attempts}, "properties": {}}, "", "q"))
    (message,) = bench.engine.inspect.peek("q", 1)
    assert error_of(message) == error


@pytest.mark.parametrize(
    ("conditions", "most_bytes", "parts"),
    [({}, 1, [1, 1, 1]), ({}, 10**6, [3]), ({"task": ""}, 10**6, [3]), ({"where": bool}, 10_000, [1, 1, 1])],
)
def test_a_part_reads_so_many_bytes(bench, monkeypatch, conditions, most_bytes, parts):
    """Payloads that stand elsewhere count where they are read."""
    monkeypatch.setattr(dead_letters, "BYTES_PER_TRANSACTION", most_bytes)
    for _ in range(3):
        reject(bench, b"x" * 150_000)
    walk = bench.engine.dead_letters.walk("q.dead", **conditions)
    found, cursor = [], b""
    while not found or cursor:
        letters, cursor = bench.engine.dead_letters.look(walk, cursor, 10)
        found.append(len(letters))
    assert [each for each in found if each] == parts
