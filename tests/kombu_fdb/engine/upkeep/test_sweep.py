"""The sweep's parts: how many at once, whose, and what it reports of an unreadable lease."""

from __future__ import annotations

import math

import pytest
from kit.conformance.newer import make_newer
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase

from kombu_fdb.engine.stored.work import Effects
from kombu_fdb.engine.upkeep import sweep
from kombu_fdb.model import ClaimTerms, SessionId
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture
def bench(counted: CountingDatabase) -> Bench:
    return Bench(counted)


def fence(bench: Bench) -> None:
    assert bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])


def test_a_session_that_is_not_fenced_keeps_its_messages(bench: Bench) -> None:
    bench.put(b"a")
    bench.take()
    assert bench.engine.sessions.release(bench.session) == 0
    assert bench.counts() == (0, 0, 1)


def test_a_transaction_brings_so_many_back_and_conflicts_on_their_leases_only(
    bench: Bench, counted: CountingDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LEASES_PER_TRANSACTION", 3)
    bench.put(*(b"%d" % number for number in range(7)))
    bench.take()
    fence(bench)
    counted.reset()
    assert bench.engine.sessions.release(bench.session) == 7
    moving = [cost for cost in counted.transactions if cost.rows]
    assert [cost.rows for cost in moving] == [3, 3, 1]
    assert all(cost.conflict_ranges == 0 for cost in moving)


def test_an_unreadable_lease_says_why_it_is_a_dead_letter(bench: Bench) -> None:
    bench.write(lambda tr: tr.set(bench.engine.keys.lease(bench.session, 5), b"\xff"))
    fence(bench)
    assert bench.engine.sessions.release(bench.session) == 1
    (letter,) = bench.engine.inspect.peek("unreadable.dead", 1)
    (death,) = letter.deaths
    assert (death.queue, death.reason) == ("unreadable", "malformed")
    assert death.details["error"]
    assert death.details["error"] != "None"


def test_what_a_dead_session_has_lost_is_counted_for_its_queue_and_key_also_if_only_a_newer_version_can_read_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(b"a", key="k")
    bench.take()
    make_newer(bench, leases=True)
    fence(bench)
    noted: list[tuple[str, ...]] = []
    monkeypatch.setattr(Effects, "note", lambda _, *given: noted.append(given))
    assert bench.engine.sessions.release(bench.session) == 1
    assert noted == [("q", "lost", "k")]


def observer(*looks_s: float, ttl_s: float = 8.0) -> sweep.FailureDetector[str]:
    """One that has looked at an unchanged value at these times."""
    observer = sweep.FailureDetector[str]()
    for now in looks_s:
        observer.look([("a", b"same", ttl_s)], now)
    return observer


def test_half_silent_is_half_of_the_time_to_live_and_no_less() -> None:
    assert not observer(0, 1.5, 3).half_silent()
    assert observer(0, 2, 4).half_silent() == [("a", 8.0)]


def test_of_an_outage_a_quarter_of_the_time_to_live_counts() -> None:
    assert observer(0, 100).next_silent_s() == 6


def test_when_the_next_one_is_silent() -> None:
    assert observer().next_silent_s() == math.inf
    assert observer(0, 2, 4).next_silent_s() == 4
    silent = observer(0, 2, 4, 6, 8)
    assert silent.silent() == [("a", b"same")]
    assert silent.next_silent_s() == math.inf, "it is silent already"


def test_a_lease_that_stops_the_sweep_is_skipped_at_the_cost_of_a_look(bench: Bench, counted: CountingDatabase) -> None:
    keys = bench.engine.keys
    bench.put(b"a", b"b")
    leases = [keys.lease(*each.lease) for each in bench.take() if each.lease]
    counted.reset()
    behind = bench.engine.sessions.skip_lease(bench.session, b"")
    assert behind == leases[0] + b"\x00"
    assert bench.engine.sessions.skip_lease(bench.session, behind) == leases[1] + b"\x00"
    assert bench.engine.sessions.skip_lease(bench.session, leases[1] + b"\x00") == b""
    assert all(cost.conflict_ranges == 0 for cost in counted.transactions)
    assert [cost.rows for cost in counted.transactions] == [1, 1, 0]


def test_who_was_seen_to_change_is_alive_for_a_quarter_of_its_time() -> None:
    observer: sweep.FailureDetector[str] = sweep.FailureDetector()
    observer.look([("a", b"1", 20.0)], 100.0)
    assert not observer.is_alive("a"), "seen once: it may have died long ago"
    observer.look([("a", b"1", 20.0)], 100.5)
    assert not observer.is_alive("a"), "seen twice, and the same"
    observer.look([("a", b"2", 20.0)], 101.0)
    observer.look([("a", b"2", 20.0)], 105.5)
    assert observer.is_alive("a")
    observer.look([("a", b"2", 20.0)], 106.0)
    assert not observer.is_alive("a")


def test_the_next_part_begins_behind_this_one(bench: Bench) -> None:
    bench.put(b"a", b"b")
    leases = [bench.engine.keys.lease(*each.lease) for each in bench.take()]
    fence(bench)
    assert bench.engine.sessions.release_part(bench.session) == (2, leases[-1] + b"\x00")


def test_an_active_consumer_is_replaced_when_none_of_its_messages_is_left(bench: Bench) -> None:
    """ONE-ACTIVE: the next one begins with those it had, and so not while one is skipped."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
    bench.put(b"a", b"b")
    other = bench.engine.sessions.open({})

    def claim(session: SessionId) -> list[bytes]:
        terms = ClaimTerms(consumers={"q": "tag"})
        return [each.payload for each in bench.engine.messages.claim(session, ["q"], 1, terms=terms)]

    assert claim(bench.session) == [b"a"]
    fence(bench)
    behind = bench.engine.sessions.skip_lease(bench.session, b"")
    assert bench.engine.sessions.release_part(bench.session, behind) == (0, b"")
    assert claim(other) == []
    bench.engine.sessions.release(bench.session)
    assert claim(other) == [b"a"]
