"""Every verb survives a commit whose answer was lost: it happens once, and its caller gets its result."""

from collections import Counter

import pytest
from kit.conformance.invariants import check_counts, check_whereabouts
from kit.conformance.queue import Bench
from kit.faults import Fault, FaultyDatabase
from kit.whole.stage import Sizes, Stage, store_of
from kit.whole.verbs import WRITES

from kombu_fdb.engine import copies, session
from kombu_fdb.engine.messages.publish import Burial
from kombu_fdb.errors import CommitUnknown, StoreUnavailable
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, Lease, Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.retry import LONGEST_DOUBT_S
from kombu_fdb.testing.clock import ManualClock

#: What each verb is put to; every order of faults is in ``store/test_retry.py``.
LOST = [(Fault.ANSWER_LOST_APPLIED,), (Fault.ANSWER_LOST_NOT_APPLIED, Fault.ANSWER_LOST_APPLIED)]


def lose(bench, faults):
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    database.faults.at_commits(*faults)


def declare_two_graves(bench, **arguments):
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for queue in ("one", "two"):
        bench.engine.queues.bind(queue, "dlx", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx", **arguments}))


@pytest.fixture(scope="module")
def store():
    return store_of(Sizes(messages=2, keys=2, bindings=2, consumers=2, queues=2))


def outline(result):
    """Without what differs from run to run: ids, numbers of leases, moments of commits, and the order of keys."""
    if isinstance(result, list):
        return sorted(map(outline, result), key=repr)
    if isinstance(result, tuple) and not isinstance(result, Lease):
        return [outline(each) for each in result]
    return result if isinstance(result, int | str) else type(result)


def done(store, verb, *faults):
    """What it returns, and how many rows of each kind there are then; how many commits of the script are left."""
    stage = Stage(store)
    stage.database.faults.at_commits(*faults)
    result = outline(verb(stage))
    left = len(stage.database.faults._commits)
    stage.database.faults.stop()
    check_counts(stage.observer)
    check_whereabouts(stage.observer)
    rows = stage.observer.upkeep.rows(range_of(stage.keys.prefix))
    return (result, Counter(stage.keys.unpack(key)[0] for key, _ in rows)), left


@pytest.mark.parametrize("name", WRITES)
def test_a_verb_happens_once_whichever_of_its_answers_is_lost(store, name):
    expected, _ = done(store, WRITES[name])
    for faults in LOST:
        left = before = 0
        while not left:
            found, left = done(store, WRITES[name], *[None] * before, *faults)
            assert found == expected, f"{faults} at commit {before}"
            before += 1


@pytest.mark.parametrize("faults", LOST, ids=["applied", "not applied, then applied"])
def test_a_burial_of_a_large_message(bench, faults):
    """Whichever of its transactions the answer of which is lost."""
    declare_two_graves(bench)
    lose(bench, faults * 2)
    bench.engine.publisher.bury_copy("q", Publication("", "q", b"x" * 6_000_000))
    assert [len(bench.take(9, queue)[0].payload) for queue in ("one", "two")] == [6_000_000] * 2
    bench.check()
    assert bench.engine.upkeep.rows(bench.engine.keys.all_copies) == []


def test_a_commit_that_may_still_happen_is_reported_not_repeated(bench):
    lose(bench, (Fault.COMMIT_LATE,))
    with pytest.raises(CommitUnknown) as caught:
        bench.put(b"a")
    assert caught.value.in_flight
    assert bench.counts()[0] in (0, 1)


@pytest.fixture
def clocked():
    """Commits land late by the bench's clock."""
    clock = ManualClock()
    bench = Bench(FaultyDatabase(clock=clock))
    bench.clock = clock
    bench.engine = bench.another()
    return bench


def lose_burial(bench, burial, lands_s, copied_in=0):
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
def test_a_burial_that_is_tried_again_happens_once(clocked, lands_s, size, copied_in):
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


def test_a_burial_in_doubt_for_too_long_is_repeated_as_another_message(clocked):
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


def lose_claim(bench, lands_s):
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
def test_what_a_claim_of_unknown_outcome_leased_is_recovered(lands_s):
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


def test_a_claim_that_lands_between_the_look_of_its_recovery_and_that_ones_commit(clocked, monkeypatch):
    database = clocked.database
    assert isinstance(database, FaultyDatabase)
    clocked.put(b"a", b"b")
    first = lose_claim(clocked, 3.0)
    look = session.leases_of_claim

    def landing(*given):
        found = look(*given)
        database.land_late_commits()
        return found

    monkeypatch.setattr(session, "leases_of_claim", landing)
    assert clocked.engine.sessions.recover(clocked.session, first) == 1
    assert clocked.payloads() == [b"a", b"b"]


def test_a_token_of_unknown_fate_is_not_used_again(bench):
    """The late commit would overwrite the token of the transaction that reused the key."""
    tokens = {key for key, _ in bench.engine.upkeep.rows(bench.engine.keys.all_tokens)}
    lose(bench, (Fault.COMMIT_LATE,))
    with pytest.raises(CommitUnknown):
        bench.put(b"a")
    bench.put(b"b")
    assert {key for key, _ in bench.engine.upkeep.rows(bench.engine.keys.all_tokens)} - tokens


def test_a_burial_that_copies_once_more_is_in_doubt_no_longer(bench, monkeypatch):
    """It has looked, and its first run has not happened: what fails after that has failed, and nothing is stored."""
    declare_two_graves(bench, **{"x-max-length": 0, "x-overflow": "reject-publish-dlx"})
    take, runs = copies.take, []

    def taken(work, record, targets, payload):
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
