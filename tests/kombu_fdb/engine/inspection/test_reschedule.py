"""Rescheduling, and replaying with another payload, at their seams: rivals, lost answers, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from kit.conformance.invariants import messages
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase, cost
from kit.duties import promote_all
from kit.faults import Fault, FaultyDatabase

from kombu_fdb.keyspace.codec import CHUNK_BYTES
from kombu_fdb.model import Publication, Spot, View

SOON_MS = 2**40
LOST = [
    pytest.param((Fault.ANSWER_LOST_APPLIED,), id="applied"),
    pytest.param((Fault.ANSWER_LOST_NOT_APPLIED,), id="not-applied"),
    pytest.param((Fault.CONFLICT, Fault.ANSWER_LOST_APPLIED), id="conflict-then-applied"),
]
LARGE = b"large" * CHUNK_BYTES


def spot(bench: Bench, state: str = "ready", queue: str = "q") -> Spot:
    """Of the first one."""
    return bench.engine.inspect.page(queue, View(state), 1).messages[0].spot


def die(bench: Bench) -> None:
    bench.engine.messages.reject([each.lease for each in bench.take()])


def change(bench: Bench, seen: Spot, payload: bytes) -> Callable[[], object]:
    letters = bench.another().dead_letters
    return partial(letters.replay_at, "q.dead", seen.position, seen.message_id, payload=payload)


@pytest.mark.parametrize("key", ["", "alice"])
@pytest.mark.parametrize("payload", [None, b"y", LARGE])
def test_a_message_that_is_claimed_meanwhile_is_the_workers(bench: Bench, key: str, payload: bytes | None) -> None:
    bench.put(b"x", key=key)
    verb = partial(bench.another().messages.reschedule, "q", spot(bench), SOON_MS, payload=payload)
    assert not bench.during(verb, bench.take)
    assert bench.counts() == (0, 0, 1)
    assert len(messages(bench.engine)) == 1


def test_a_message_that_is_promoted_meanwhile_has_moved(bench: Bench) -> None:
    bench.put(b"x", due_ms=bench.clock.wall_ms() + 1_000)
    seen = spot(bench, "delayed")
    bench.later(1)
    verb = partial(bench.another().messages.reschedule, "q", seen, SOON_MS * 2, payload=b"y")
    assert not bench.during(verb, lambda: promote_all(bench.engine))
    assert bench.payloads() == [b"x"]


def test_of_two_who_reschedule_at_once_one_does(bench: Bench) -> None:
    bench.put(b"x", due_ms=SOON_MS * 2)
    seen = spot(bench, "delayed")
    ours, theirs = (
        partial(bench.another().messages.reschedule, "q", seen, 0, payload=payload) for payload in (LARGE, b"theirs")
    )
    assert not bench.during(ours, theirs)
    assert bench.payloads() == [b"theirs"]


def test_of_two_who_change_a_dead_letter_one_does(bench: Bench) -> None:
    bench.put(LARGE)
    die(bench)
    seen = spot(bench, queue="q.dead")
    assert bench.during(change(bench, seen, LARGE + b"!"), change(bench, seen, b"theirs")) is None
    assert bench.payloads() == [b"theirs"]


def test_a_dead_letter_that_is_discarded_meanwhile_does_not_come_back(bench: Bench) -> None:
    bench.put(LARGE)
    die(bench)
    seen, letters = spot(bench, queue="q.dead"), bench.engine.dead_letters
    discard = partial(letters.discard_part, letters.walk("q.dead"), b"", 10)
    assert bench.during(change(bench, seen, b"y"), discard) is None
    assert messages(bench.engine) == {}


@pytest.mark.parametrize("faults", LOST)
@pytest.mark.parametrize("payload", [None, b"y", LARGE])
def test_a_rescheduling_whose_answer_is_lost_happens_once(
    bench: Bench, faults: tuple[Fault, ...], payload: bytes | None
) -> None:
    bench.put(b"x", key="alice")
    seen = spot(bench)
    bench.database.faults.at_commits(*faults)
    assert bench.engine.messages.reschedule("q", seen, 0, payload=payload)
    assert bench.payloads() == [payload or b"x"]


@pytest.mark.parametrize("faults", LOST)
def test_a_changed_replay_whose_answer_is_lost_happens_once(bench: Bench, faults: tuple[Fault, ...]) -> None:
    bench.put(LARGE, key="alice")
    die(bench)
    seen = spot(bench, queue="q.dead")
    bench.database.faults.at_commits(*faults)
    position, message_id = seen.position, seen.message_id
    assert bench.engine.dead_letters.replay_at("q.dead", position, message_id, payload=b"y") == "q"
    assert bench.payloads() == [b"y"]


@pytest.mark.parametrize("others", [0, 1_000])
def test_what_it_costs_does_not_grow_with_the_queue(others: int) -> None:
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.put(*[b"x"] * (others + 1))
    seen = spot(bench)
    paid = cost(counted, lambda: bench.engine.messages.reschedule("q", seen, SOON_MS * 2, payload=b"y"))
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (1, 0, 0, 3)
    assert (paid.clears, paid.clear_ranges, paid.stamps) == (
        1,
        0,
        2,
    )  # its row; the new one, and the bell of the duties
    assert (paid.conflict_keys, paid.conflict_ranges) == (3, 0)  # its row, read and taken; the token


@pytest.mark.parametrize("number", [600, 6_000])
def test_a_part_of_a_purge_costs_the_same_in_a_queue_of_any_length(number: int) -> None:
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    for _ in range(number // 600):
        bench.engine.publisher.publish([Publication("", "q", b"x")] * 600)
    _purged, mark = bench.engine.queues.purge_some("q")
    paid = cost(counted, lambda: bench.engine.queues.purge_some("q", mark))
    assert (paid.rows, paid.range_reads, paid.commits) == (500 if number > 600 else 100, 1, 1)


@pytest.mark.parametrize("number", [30, 3_000])
@pytest.mark.parametrize("prefix", ["", "b"])
def test_a_page_of_keys_costs_what_it_shows(number: int, prefix: str) -> None:
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.engine.publisher.publish(
        [Publication("", "q", b"x", key=f"{letter}{each}") for letter in "abc" for each in range(number // 3)]
    )
    paid = cost(counted, lambda: bench.engine.inspect.key_page("q", limit=5, prefix=prefix))
    assert (paid.rows, paid.range_reads, paid.round_trips, paid.commits) == (5, 3, 2, 0)
