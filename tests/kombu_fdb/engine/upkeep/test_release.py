"""The sweep's parts: how many at once, whose, and what it reports of an unreadable lease."""

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.engine.upkeep import release
from kombu_fdb.model import ClaimTerms
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture
def bench(counted):
    return Bench(counted)


def fence(bench):
    assert bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])


def test_a_session_that_is_not_fenced_keeps_its_messages(bench):
    bench.put(b"a")
    bench.take()
    assert bench.engine.sessions.release(bench.session) == 0
    assert bench.counts() == (0, 0, 1)


def test_a_transaction_brings_so_many_back_and_conflicts_on_their_leases_only(bench, counted, monkeypatch):
    monkeypatch.setattr(release, "MESSAGES_PER_TRANSACTION", 3)
    bench.put(*(b"%d" % number for number in range(7)))
    bench.take()
    fence(bench)
    counted.reset()
    assert bench.engine.sessions.release(bench.session) == 7
    moving = [cost for cost in counted.transactions if cost.rows]
    assert [cost.rows for cost in moving] == [3, 3, 1]
    assert all(cost.conflict_ranges == 0 for cost in moving)


def test_an_unreadable_lease_says_why_it_is_a_dead_letter(bench):
    bench.write(lambda tr: tr.set(bench.engine.keys.lease(bench.session, 5), b"\xff"))
    fence(bench)
    assert bench.engine.sessions.release(bench.session) == 1
    (letter,) = bench.engine.inspect.peek("unreadable.dead", 1)
    (death,) = letter.deaths
    assert (death.queue, death.reason) == ("unreadable", "malformed")
    assert death.details["error"]
    assert death.details["error"] != "None"


def test_a_lease_that_stops_the_sweep_is_skipped_at_the_cost_of_a_look(bench, counted):
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


def test_the_next_part_begins_behind_this_one(bench):
    bench.put(b"a", b"b")
    leases = [bench.engine.keys.lease(*each.lease) for each in bench.take()]
    fence(bench)
    assert bench.engine.sessions.release_part(bench.session) == (2, leases[-1] + b"\x00")


def test_an_active_consumer_is_replaced_when_none_of_its_messages_is_left(bench):
    """ONE-ACTIVE: the next one begins with those it had, and so not while one is skipped."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
    bench.put(b"a", b"b")
    other = bench.engine.sessions.open({})

    def claim(session):
        terms = ClaimTerms(consumers={"q": "tag"})
        return [each.payload for each in bench.engine.messages.claim(session, ["q"], 1, terms=terms)]

    assert claim(bench.session) == [b"a"]
    fence(bench)
    behind = bench.engine.sessions.skip_lease(bench.session, b"")
    assert bench.engine.sessions.release_part(bench.session, behind) == (0, b"")
    assert claim(other) == []
    bench.engine.sessions.release(bench.session)
    assert claim(other) == [b"a"]
