"""Every verb survives a commit whose answer was lost: it happens once, and its caller gets its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.conformance.invariants import messages
from kit.conformance.queue import Bench
from kit.duties import promote_all, replay
from kit.faults import Fault, FaultyDatabase

from kombu_fdb.engine.messages.publish import Burial
from kombu_fdb.engine.stored import copies, session
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import CommitUnknown, StoreUnavailable
from kombu_fdb.keyspace.codec import INLINE_BYTES, Record
from kombu_fdb.model import ClaimTerms, Lease, Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.retry import LONGEST_DOUBT_S
from kombu_fdb.testing.clock import ManualClock

#: What each verb is put to; every order of faults is in ``store/test_retry.py``.
LOST = [
    pytest.param((Fault.ANSWER_LOST_APPLIED,), id="applied"),
    pytest.param((Fault.ANSWER_LOST_NOT_APPLIED, Fault.ANSWER_LOST_APPLIED), id="not-applied-then-applied"),
]


def lose(bench: Bench, faults: tuple[Fault, ...]) -> None:
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    database.faults.at_commits(*faults)


def declare_two_graves(bench: Bench, **arguments: object) -> None:
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for queue in ("one", "two"):
        bench.engine.queues.bind(queue, "dlx", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx", **arguments}))


@pytest.mark.parametrize("faults", LOST)
class TestOnce:
    def test_publish(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        lose(bench, faults)
        bench.engine.publisher.publish([Publication("", "q", b"a"), Publication("", "q", b"b", due_ms=2**41)])
        assert bench.counts() == (1, 1, 0)
        assert len(messages(bench.engine)) == 2

    def test_claim_returns_what_it_leased(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a", b"b", b"c")
        lose(bench, faults)
        taken = bench.take(2)
        assert [delivery.payload for delivery in taken] == [b"a", b"b"]
        assert bench.counts() == (1, 0, 2)
        assert bench.engine.messages.ack([delivery.lease for delivery in taken]) == [True, True]

    def test_ack(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        lose(bench, faults)
        assert bench.engine.messages.ack([delivery.lease]) == [True]
        assert bench.counts() == (0, 0, 0)

    def test_release(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        lose(bench, faults)
        assert bench.engine.messages.release([delivery.lease]) == [True]
        assert [delivery.redeliveries for delivery in bench.take()] == [1]

    def test_reject(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        lose(bench, faults)
        assert bench.engine.messages.reject([delivery.lease]) == [True]
        assert bench.counts("q.dead") == (1, 0, 0)

    def test_replay(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a", b"b")
        bench.engine.messages.reject([each.lease for each in bench.take()])
        lose(bench, faults)
        assert replay(bench.engine, "q", 10) == 2
        assert (bench.counts(), bench.counts("q.dead")) == ((2, 0, 0), (0, 0, 0))

    def test_discard(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a", b"b")
        bench.engine.messages.reject([each.lease for each in bench.take()])
        lose(bench, faults)
        assert bench.engine.dead_letters.discard_part(bench.engine.dead_letters.walk("q.dead"), b"", 1)[0] == 1
        assert bench.counts("q.dead") == (1, 0, 0)

    def test_bury_copy(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        lose(bench, faults)
        bench.engine.publisher.bury_copy("q", Publication("", "q", b"a"))
        assert bench.counts("q.dead") == (1, 0, 0)

    def test_bury_copy_of_a_large_message(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        """Whichever of its transactions the answer of which is lost."""
        declare_two_graves(bench)
        lose(bench, faults * 2)
        bench.engine.publisher.bury_copy("q", Publication("", "q", b"x" * 6_000_000))
        assert [len(bench.take(9, queue)[0].payload) for queue in ("one", "two")] == [6_000_000] * 2
        bench.check()
        assert bench.engine.upkeep.rows(bench.engine.keys.all_copies) == []

    def test_promote(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a", due_ms=bench.clock.wall_ms() + 1)
        bench.later(1)
        lose(bench, faults)
        assert promote_all(bench.engine) == (1, None)
        assert bench.counts() == (1, 0, 0)

    def test_sweep(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        session = bench.engine.sessions.open({})
        bench.put(b"a")
        bench.take(session=session)
        bench.engine.sessions.fence(session, bench.beats()[session])
        lose(bench, faults)
        assert bench.engine.sessions.release(session) == 1
        assert [delivery.redeliveries for delivery in bench.take()] == [1]

    def test_open_session(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        lose(bench, faults)
        assert bench.engine.sessions.beat(bench.engine.sessions.open({}))

    def test_purge_counts_each_message_once(self, bench: Bench, faults: tuple[Fault, ...]) -> None:
        bench.put(b"a", b"b")
        lose(bench, faults)
        assert bench.engine.queues.purge("q") == 2

    @pytest.mark.parametrize(
        "declare",
        [
            lambda bench: bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 5})),
            lambda bench: bench.engine.queues.declare_exchange(Exchange("x", "fanout")),
            lambda bench: bench.engine.queues.bind("q", "amq.fanout", ""),
            lambda bench: bench.engine.queues.add_consumer(bench.session, "q", "tag"),
        ],
        ids=["queue", "exchange", "binding", "consumer"],
    )
    def test_declarations(self, bench: Bench, faults: tuple[Fault, ...], declare: Callable[[Bench], None]) -> None:
        lose(bench, faults)
        declare(bench)
        declare(bench)


def test_a_commit_that_may_still_happen_is_reported_not_repeated(bench: Bench) -> None:
    lose(bench, (Fault.COMMIT_LATE,))
    with pytest.raises(CommitUnknown) as caught:
        bench.put(b"a")
    assert caught.value.in_flight
    assert bench.counts()[0] in (0, 1)


@pytest.fixture
def clocked() -> Bench:
    """Commits land late by the bench's clock."""
    clock = ManualClock()
    bench = Bench(FaultyDatabase(clock=clock))
    bench.clock = clock
    bench.engine = bench.another()
    return bench


def lose_burial(bench: Bench, burial: Burial, lands_s: float | None, copied_in: int = 0) -> FaultyDatabase:
    """``copied_in``: transactions that copy its chunks beforehand."""
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    database.faults.at_commits(*[None] * copied_in, Fault.COMMIT_LATE)
    database.faults.at_landings(lands_s)
    with pytest.raises(CommitUnknown):
        bench.engine.publisher.bury_copy("q", burial)
    return database


@pytest.mark.parametrize(("size", "copied_in"), [(10, 0), (2_000_000, 2)], ids=["small", "large"])
@pytest.mark.parametrize("lands_s", [None, 0.0, 3.0])
def test_a_burial_that_is_tried_again_happens_once(
    clocked: Bench, lands_s: float | None, size: int, copied_in: int
) -> None:
    """Whether its commit lands, before the next try or after it, and also if that one's answer is lost."""
    declare_two_graves(clocked)
    burial = Burial(Publication("", "q", b"x" * size, task_id="t"))
    database = lose_burial(clocked, burial, lands_s, copied_in)
    lose(clocked, (Fault.ANSWER_LOST_APPLIED,))
    clocked.engine.publisher.bury_copy("q", burial)
    clocked.engine.publisher.bury_copy("q", burial)
    database.land_late_commits()
    assert [[len(each.payload) for each in clocked.take(9, queue)] for queue in ("one", "two")] == [[size]] * 2
    clocked.check()


def test_a_burial_in_doubt_for_too_long_is_repeated_as_another_message(clocked: Bench) -> None:
    """They share no chunks: one is still there when the other is gone."""
    burial = Burial(Publication("", "q", b"x" * INLINE_BYTES * 3))
    lose_burial(clocked, burial, 0.0).land_late_commits()
    clocked.later(LONGEST_DOUBT_S + 1)
    lose_burial(clocked, burial, None)
    clocked.engine.publisher.bury_copy("q", burial)
    one, other = clocked.take(9, "q.dead")
    clocked.engine.messages.ack([one.lease])
    clocked.engine.messages.release([other.lease])
    assert [len(each.payload) for each in clocked.take(9, "q.dead")] == [INLINE_BYTES * 3]


def lose_claim(bench: Bench, lands_s: float | None) -> int:
    """A claim whose commit lands so late, if at all. Returns the number of its first lease."""
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    lose(bench, (Fault.COMMIT_LATE,))
    database.faults.at_landings(lands_s)
    first = bench.engine.messages.reserve()
    with pytest.raises(CommitUnknown):
        bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(first=first))
    return first


@pytest.mark.parametrize("lands_s", [None, 0.0, 1.0, 3.0])
def test_what_a_claim_of_unknown_outcome_leased_is_recovered(lands_s: float | None) -> None:
    """Also if it would land after the recovery has looked."""
    clock = ManualClock()
    bench = Bench(FaultyDatabase(clock=clock))
    bench.clock = clock
    bench.put(b"a", b"b", b"c")
    (known,) = bench.take(1)
    first = lose_claim(bench, lands_s)
    clock.advance(1.0)
    bench.engine.sessions.recover(bench.session, first)
    clock.advance(5.0)
    assert [each.payload for each in bench.engine.messages.claim(bench.session, ["q"], 5)] == [b"b", b"c"]
    assert bench.counts() == (0, 0, 3)
    assert bench.engine.messages.holds([known.lease]) == [True]


def test_a_claim_that_lands_between_the_look_of_its_recovery_and_that_ones_commit(
    clocked: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = clocked.database
    assert isinstance(database, FaultyDatabase)
    clocked.put(b"a", b"b")
    first = lose_claim(clocked, 3.0)
    look = session.leases_of_claim

    def landing(*given: Any) -> list[Lease]:
        found = look(*given)
        database.land_late_commits()
        return found

    monkeypatch.setattr(session, "leases_of_claim", landing)
    assert clocked.engine.sessions.recover(clocked.session, first) == 1
    assert clocked.payloads() == [b"a", b"b"]


def test_a_token_of_unknown_fate_is_not_used_again(bench: Bench) -> None:
    """The late commit would overwrite the token of the transaction that reused the key."""
    tokens = {key for key, _ in bench.engine.upkeep.rows(bench.engine.keys.all_tokens)}
    lose(bench, (Fault.COMMIT_LATE,))
    with pytest.raises(CommitUnknown):
        bench.put(b"a")
    bench.put(b"b")
    assert {key for key, _ in bench.engine.upkeep.rows(bench.engine.keys.all_tokens)} - tokens


def test_a_burial_that_copies_once_more_is_in_doubt_no_longer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked, and its first run has not happened: what fails after that has failed, and nothing is stored."""
    declare_two_graves(bench, **{"x-max-length": 0, "x-overflow": "reject-publish-dlx"})
    take, runs = copies.take, []

    def taken(work: Work, record: Record, targets: list[str], payload: bytes) -> list[bytes]:
        found = take(work, record, targets, payload)
        runs.append(record.message_id)
        if len(runs) == 1:
            lose(bench, (Fault.ANSWER_LOST_NOT_APPLIED,))
        if len(runs) == 2:
            raise copies.CopiesMissing(record.message_id, targets, payload)
        if len(runs) == 3:
            raise StoreUnavailable
        return found

    monkeypatch.setattr(copies, "take", taken)
    with pytest.raises(StoreUnavailable):
        bench.engine.publisher.publish([Publication("", "q", b"x" * 2_000_000)])
    assert len(runs) == 3
    assert not bench.engine.publisher.doubts
    bench.engine.publisher.publish([Publication("", "q", b"x" * 2_000_000)])
    assert [bench.counts(queue) for queue in ("one", "two")] == [(1, 0, 0)] * 2
