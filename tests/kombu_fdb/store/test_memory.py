"""The store's conformance suite over the memory store, and what only that one can do."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit.conformance.store import TIMEOUT_S, StoreConformance, arm, commit, read
from kit.costs import CountingDatabase
from kit.faults import Fault, Faults, FaultyDatabase

from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.memory import MemoryDatabase


class TestMemory(StoreConformance):
    @pytest.fixture(params=[MemoryDatabase, FaultyDatabase])
    def database(self, request):
        return request.param(clock=ManualClock())

    def aged(self, database, key):
        assert isinstance(database, MemoryDatabase)
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.get(key)
        database.clock.sleep(5.1)
        return tr


class TestFaults:
    """Each one by name, and only where it belongs."""

    @pytest.fixture
    def faults(self):
        return Faults()

    @pytest.fixture
    def database(self, faults):
        return FaultyDatabase(clock=ManualClock(), faults=faults)

    @pytest.mark.parametrize(
        ("fault", "error", "applied"),
        [
            (Fault.CONFLICT, Conflict, False),
            (Fault.ANSWER_LOST_APPLIED, CommitUnknown, True),
            (Fault.ANSWER_LOST_NOT_APPLIED, CommitUnknown, False),
            (Fault.TOO_OLD, TransactionTooOld, False),
            (Fault.UNAVAILABLE, StoreUnavailable, False),
        ],
    )
    def test_at_a_commit(self, database, faults, fault, error, applied):
        faults.at_commits(None, fault)
        commit(database, lambda tr: tr.set(b"a", b"1"))
        with pytest.raises(error):
            commit(database, lambda tr: tr.set(b"b", b"1"))
        assert (read(database, b"b") == b"1") is applied
        assert faults.struck == {fault: 1}

    def test_a_script_strikes_the_thread_that_wrote_it(self, database, faults):
        faults.at_commits(Fault.UNAVAILABLE)
        faults.at_reads(Fault.UNAVAILABLE)
        with ThreadPoolExecutor(1) as other:
            other.submit(commit, database, lambda tr: tr.set(b"a", b"1")).result()
            assert other.submit(read, database, b"a").result() == b"1"
        with pytest.raises(StoreUnavailable):
            read(database, b"a")
        with pytest.raises(StoreUnavailable):
            commit(database, lambda tr: tr.set(b"b", b"1"))

    def test_a_late_commit_happens_up_to_five_seconds_later_or_never(self):
        outcomes = set()
        for seed in range(20):
            faults, clock = Faults(random.Random(seed)), ManualClock()
            database = FaultyDatabase(clock=clock, faults=faults)
            faults.at_commits(Fault.COMMIT_LATE)
            with pytest.raises(CommitUnknown) as unknown:
                commit(database, lambda tr: tr.set(b"a", b"1"))
            assert unknown.value.in_flight
            seen = []
            for _ in range(6):
                seen.append(read(database, b"a"))
                clock.advance(1)
            assert seen == sorted(seen, key=bool), "what has landed stays"
            outcomes.add(seen.count(None))
        assert 6 in outcomes, "some never happen"
        assert {2, 3, 4} & outcomes, "some happen after others looked"

    def test_others_begin_and_commit_before_a_late_commit_lands(self):
        faults, clock = Faults(), ManualClock()
        database = FaultyDatabase(clock=clock, faults=faults)
        faults.at_commits(Fault.COMMIT_LATE)
        faults.at_landings(2.0)
        with pytest.raises(CommitUnknown):
            commit(database, lambda tr: (tr.set(b"a", b"late"), tr.set(b"b", b"late")))
        clock.advance(1)
        commit(database, lambda tr: tr.set(b"a", b"%d" % (tr.get(b"b") is None)))
        assert read(database, b"a") == b"1"
        clock.advance(1)
        assert (read(database, b"a"), read(database, b"b")) == (b"late", b"late")

    def test_a_late_commit_lands_between_the_look_and_the_commit_of_another(self):
        faults, clock = Faults(), ManualClock()
        faults.landing = lambda: (4.0, True)
        database = FaultyDatabase(clock=clock, faults=faults)
        faults.at_commits(Fault.COMMIT_LATE)
        with pytest.raises(CommitUnknown):
            commit(database, lambda tr: tr.set(b"a", b"late"))
        commit(database, lambda tr: tr.set(b"b", b"blind"))
        assert read(database, b"a") is None
        with pytest.raises(Conflict):
            commit(database, lambda tr: tr.set(b"c", b"%d" % (tr.get(b"a") is None)))
        assert (read(database, b"a"), read(database, b"c")) == (b"late", None)

    @pytest.mark.parametrize("blind", [False, True])
    def test_a_late_commit_conflicts_with_what_came_after_it_was_sent(self, blind):
        faults, clock = Faults(), ManualClock()
        database = FaultyDatabase(clock=clock, faults=faults)
        commit(database, lambda tr: tr.set(b"a", b"before"))
        tr = database.begin(timeout_s=5)
        tr.add_read_conflict_key(b"a") if blind else tr.get(b"a")
        tr.set(b"b", b"late")
        faults.at_commits(Fault.COMMIT_LATE)
        faults.at_landings(2.0)
        with pytest.raises(CommitUnknown):
            tr.commit()
        for _ in range(200):  # the log of commits is kept for it
            commit(database, lambda other: other.set(b"c", b""))
        commit(database, lambda other: other.clear(b"a"))
        clock.advance(2)
        assert read(database, b"b") is None

    def test_a_late_commit_is_too_old_after_five_seconds_of_its_transaction(self):
        faults, clock = Faults(), ManualClock()
        database = FaultyDatabase(clock=clock, faults=faults)
        tr = database.begin(timeout_s=60)
        tr.get(b"a")
        clock.advance(3)
        tr.set(b"a", b"late")
        faults.at_commits(Fault.COMMIT_LATE)
        faults.at_landings(4.0)
        with pytest.raises(CommitUnknown):
            tr.commit()
        clock.advance(5)
        assert read(database, b"a") is None

    def test_a_lost_watch(self, database, faults):
        faults.at_watches(Fault.WATCH_LOST)
        _, lost = arm(database, b"bell")
        commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
        assert not lost.is_set()

    def test_a_watch_that_fires_for_nothing(self):
        database = FaultyDatabase(clock=ManualClock(), faults=Faults(rates={Fault.WATCH_FOR_NOTHING: 1.0}))
        _, fired = arm(database, b"bell")
        commit(database, lambda tr: tr.set(b"a", b"1"))
        assert fired.is_set()

    def test_blind_writers_never_conflict_by_chance(self):
        database = FaultyDatabase(clock=ManualClock(), faults=Faults(rates={Fault.CONFLICT: 1.0}))
        commit(database, lambda tr: tr.set(b"a", b"1"))
        with pytest.raises(Conflict):
            commit(database, lambda tr: (tr.get(b"a"), tr.set(b"a", b"2")))

    def test_the_same_seed_gives_the_same_life(self):
        def live():
            rates = dict.fromkeys(Fault, 0.1)
            database = FaultyDatabase(clock=ManualClock(), faults=Faults(random.Random(7), rates))
            for i in range(200):
                with contextlib.suppress(StoreError):
                    commit(database, lambda tr: (tr.get(b"a"), tr.set_versionstamped_key(b"q", b"", b"%d" % i)))  # noqa: B023
            return database.items()

        assert live() == live()
        assert 50 < len(live()) < 200


def test_old_versions_are_forgotten():
    database = FaultyDatabase(clock=ManualClock())
    for i in range(500):
        commit(database, lambda tr: (tr.set(b"a", b"%d" % i), tr.set(b"gone/%d" % i, b"")))  # noqa: B023
        commit(database, lambda tr: tr.clear(b"gone/%d" % i))  # noqa: B023
    assert len(database.map._chains) <= 2
    assert len(database.map._chains[b"a"]) <= 3
    assert len(database._log) <= 130


def test_a_reader_keeps_its_version_while_others_write():
    database = FaultyDatabase(clock=ManualClock())
    commit(database, lambda tr: (tr.set(b"a", b"old"), tr.set(b"b", b"old")))
    reader = database.begin(timeout_s=5)
    assert reader.get(b"a") == b"old"
    for i in range(200):
        commit(database, lambda tr: (tr.set(b"a", b"%d" % i), tr.clear(b"b")))  # noqa: B023
    assert reader.get_range(b"", b"\xff") == [(b"a", b"old"), (b"b", b"old")]
    reader.cancel()
    commit(database, lambda tr: tr.set(b"c", b""))
    assert database.items() == [(b"a", b"199"), (b"c", b"")]


def test_versions_follow_the_clock():
    clock = ManualClock()
    database = FaultyDatabase(clock=clock)

    def stamp():
        commit(database, lambda tr: tr.set_versionstamped_value(b"v"))
        return int.from_bytes((read(database, b"v") or b"")[:8], "big")

    first = stamp()
    clock.advance(2)
    assert stamp() - first == 2_000_000


def test_costs():
    counted = CountingDatabase(FaultyDatabase(clock=ManualClock()))

    def body(tr):
        tr.get(b"a")
        tr.get_many([b"b", b"c"], snapshot=True)
        tr.get_range(b"d", b"e")
        tr.get_range(b"q", b"r", snapshot=True)
        tr.set(b"a", b"1")
        tr.clear(b"b")
        tr.clear_range(b"x", b"y")
        tr.add(b"n", 1)
        tr.byte_max(b"m", b"1")
        tr.set_versionstamped_key(b"z", b"", b"")
        tr.set_versionstamped_value(b"v")
        tr.add_read_conflict_key(b"k")
        tr.add_read_conflict_range(b"k", b"l")

    commit(counted, lambda tr: [tr.set(b"d%d" % i, b"") for i in range(3)])
    assert counted.last.round_trips == 1  # a blind write: the commit
    counted.reset()
    commit(counted, body)
    cost = counted.last
    assert (cost.point_reads, cost.range_reads, cost.rows) == (3, 2, 3)
    assert (cost.sets, cost.clears, cost.clear_ranges, cost.atomics, cost.stamps, cost.writes) == (1, 1, 1, 2, 2, 7)
    assert (cost.conflict_keys, cost.conflict_ranges, cost.watches) == (2, 2, 0)
    assert (cost.round_trips, cost.commits) == (6, 1)
    assert counted.total() == cost
