"""What the result store promises, whatever store is below it."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from celery.states import FAILURE, RETRY, REVOKED, STARTED, SUCCESS
from kit.faults import Fault, Faults, FaultyDatabase

from celery_fdb.results import chords
from celery_fdb.results.chords import ChordOver, ChordPart
from celery_fdb.results.records import INLINE_BYTES
from celery_fdb.results.store import SWEEP_ROWS, ResultStore
from kombu_fdb.errors import CommitUnknown, FormatError, StoreUnavailable
from kombu_fdb.keyspace.layout import pack
from kombu_fdb.model import SessionFacts, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def running(database):
    """In real time, for threads that get in each other's way."""
    return ResultStore(database, os.urandom(6).hex(), clock=Clock(), timeout_s=20.0)


def done(payload=b"1", expires_ms=0, state=SUCCESS):
    return state, payload, expires_ms


def part(group_id, place, payload=b"1"):
    return ChordPart(group_id, place, f"t{place}", SUCCESS, payload)


# -- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 1_000_000, 8_000_000])
def test_a_result_of_any_size_comes_back(store, size):
    payload = random.Random(size).randbytes(size)
    store.store("a", *done(payload))
    record = store.load("a")
    assert (record.state, record.payload, record.size) == (SUCCESS, payload, size)


def test_a_smaller_result_leaves_nothing_of_the_larger_one(store, scan):
    store.store("a", *done(b"x" * 500_000, state=FAILURE))
    assert len(scan(store)) > 5
    store.store("a", *done(b"small"))
    assert scan(store) == [store.keys.task("a")]
    assert store.load("a").payload == b"small"


@pytest.mark.parametrize("late", [STARTED, RETRY, FAILURE, SUCCESS])
def test_a_success_is_not_overwritten(store, late):
    store.store("a", *done(b"first"))
    store.store("a", *done(b"late", state=late))
    assert store.load("a").payload == b"first"


@pytest.mark.parametrize("early", [STARTED, RETRY, FAILURE])
def test_every_other_state_is(store, early):
    store.store("a", *done(b"early", state=early))
    store.store("a", *done(b"late"))
    assert store.load("a").payload == b"late"


@pytest.mark.parametrize("end", [FAILURE, REVOKED])
def test_the_retry_of_an_attempt_before_does_not_replace_an_end(store, end):
    store.store("a", *done(b"end", state=end))
    store.store("a", *done(b"before", state=RETRY))
    assert store.load("a").payload == b"end"


def test_ids_that_begin_alike_do_not_touch_each_other(store):
    for task_id in ("a", "ab", "a\0b", "ä"):
        store.store(task_id, *done(b"x" * 200_000))
    store.forget("a")
    assert store.load("a") is None
    assert all(store.load(task_id).size == 200_000 for task_id in ("ab", "a\0b", "ä"))


# -- expiry ----------------------------------------------------------------------------------------------------------


def test_what_expires_is_deleted_and_nothing_else(store, clock, scan):
    now = clock.wall_ms()
    store.store("soon", *done(b"x" * 200_000, expires_ms=now + 1000))
    store.store("later", *done(expires_ms=now + 5000))
    store.store("never", *done())
    store.save_group("g", b"x", now + 1000)
    store.open_chord("c", b"body", now + 1000)
    store.add_part(part("c", 0, b"x" * 200_000))
    assert store.sweep() == 0
    clock.advance(1.0)
    assert store.sweep() == 3
    assert [store.exists(each) for each in ("soon", "later", "never")] == [False, True, True]
    clock.advance(5.0)
    assert store.sweep() == 1
    assert scan(store) == [store.keys.task("never")]


def test_a_result_that_is_stored_again_lives_on(store, clock, scan):
    now = clock.wall_ms()
    store.store("a", *done(expires_ms=now + 1000, state=STARTED))
    store.store("a", *done(expires_ms=now + 9000))
    clock.advance(2.0)
    assert store.sweep() == 0
    assert store.exists("a")
    clock.advance(8.0)
    assert store.sweep() == 1
    assert scan(store) == []


def test_the_sweep_goes_in_bounded_parts(store, clock):
    for number in range(SWEEP_ROWS + 10):
        store.store(str(number), *done(expires_ms=clock.wall_ms() + 1))
    clock.advance(1.0)
    assert store.sweep(parts=1) == SWEEP_ROWS
    assert store.sweep(parts=5) == 10


# -- watching --------------------------------------------------------------------------------------------------------


def test_a_look_arms_a_watch_that_the_next_state_fires(store):
    store.store("ready", *done())
    store.store("started", *done(state=STARTED))
    ready, started, nothing = store.look(["ready", "started", "nothing"], timeout_s=10.0)
    assert ready[1] is None
    assert ready[0] is not None
    assert started[0] is not None
    assert nothing[0] is None
    fired = {name: threading.Event() for name in ("started", "nothing")}
    for name, (_, watch) in (("started", started), ("nothing", nothing)):
        watch.on_fire(fired[name].set)
    store.store("nothing", *done(state=STARTED))
    assert fired["nothing"].wait(10)
    assert not fired["started"].is_set()
    store.store("started", *done(state=STARTED))  # the same once more is a change, too
    assert fired["started"].wait(10)


# -- chords: CHORD-ONCE, CHORD-SURE ----------------------------------------------------------------------------------


def begin(store, size, body=None):
    store.open_chord("c", body, 0)
    store.enlarge_chord("c", size=size)


def add(store, returned):
    store.add_part(returned)
    return store.claim_chord(returned)


def test_the_last_part_publishes(store):
    store.open_chord("c", b"body", 0)
    assert add(store, part("c", 1)) == "nothing"
    assert add(store, part("c", 0)) == "nothing", "the size is not known yet"
    store.enlarge_chord("c", size=3)
    assert store.claim_chord(part("c", 2)) == "add"
    assert add(store, part("c", 2, b"x" * 200_000)) == "publish"
    assert [(each.place, len(each.payload or b"")) for each in store.parts("c")] == [(0, 1), (1, 1), (2, 200_000)]
    assert store.chord_body("c") == b"body"


def test_parts_are_read_in_pages(store, monkeypatch):
    monkeypatch.setattr(chords, "PART_ROWS", 4)
    sizes = [1, 200_000, 1, 1, 250_000, 100_000, 1, 1]
    store.open_chord("c", None, 0)
    for place, size in enumerate(sizes):
        store.add_part(part("c", place, b"x" * size))
    assert [len(each.payload or b"") for each in store.parts("c")] == sizes


def test_a_part_counts_once_and_its_first_return_stays(store):
    begin(store, 2)
    assert add(store, part("c", 0, b"first")) == "nothing"
    assert add(store, part("c", 0, b"second")) == "nothing"
    assert [each.payload for each in store.parts("c")] == [b"first"]
    assert store.chord_body("c") is None


def test_a_frozen_signature_that_stands_twice_in_the_header_counts_twice(store):
    begin(store, 2)
    assert add(store, ChordPart("c", 0, "same", SUCCESS, b"1")) == "nothing"
    assert add(store, ChordPart("c", 1, "same", SUCCESS, b"1")) == "publish"


def test_only_the_part_that_claimed_it_goes_on_at_once(store):
    """Its worker was killed before it published the body; the redelivered task goes on, any other does not."""
    begin(store, 2)
    add(store, part("c", 0))
    assert add(store, part("c", 1)) == "publish"
    assert add(store, part("c", 0)) == "nothing"
    assert add(store, part("c", 1)) == "publish"


def test_a_redelivered_task_claims_a_chord_that_is_still_unclaimed(store):
    """The worker was killed between the last part and its look at the chord."""
    begin(store, 2)
    store.add_part(part("c", 0))
    store.add_part(part("c", 1))
    assert add(store, part("c", 1)) == "publish"


@pytest.mark.parametrize("claimed", [True, False])
def test_an_abandoned_chord_is_found(store, clock, claimed):
    begin(store, 1, b"body")
    store.add_part(part("c", 0))
    if claimed:
        store.claim_chord(part("c", 0))
    assert store.abandoned_chords() == []
    clock.advance(chords.CLAIM_MS / 1000)
    assert store.abandoned_chords() == ["c"]
    assert store.abandoned_chords() == [], "the claim is held by the call that found it"
    clock.advance(chords.CLAIM_MS / 1000)
    assert store.abandoned_chords() == ["c"]


def test_open_chords_are_looked_at_less_and_less_often(store, clock):
    store.open_chord("c", None, 0)
    looks = 0
    for _ in range(24 * 60):
        clock.advance(60.0)
        before = store._read(lambda tr: tr.get(store.keys.chord("c")))
        assert store.abandoned_chords() == []
        looks += before != store._read(lambda tr: tr.get(store.keys.chord("c")))
    assert 24 * 6 <= looks <= 24 * 6 + 10, "each ten minutes, after a day"
    store.enlarge_chord("c", size=1)
    store.add_part(part("c", 0))
    clock.advance(chords.LONGEST_LOOK_MS / 1000)
    assert store.abandoned_chords() == ["c"]


def test_a_chord_is_finished_once_and_leaves_no_key(store, clock, scan):
    store.open_chord("c", b"x" * 200_000, clock.wall_ms() + 1000)
    store.enlarge_chord("c", size=1)
    assert add(store, part("c", 0, b"x" * 200_000)) == "publish"
    store._write(store.finishing("c"))
    assert scan(store) == []
    with pytest.raises(ChordOver):
        store._write(store.finishing("c"))
    with pytest.raises(ChordOver):
        store.parts("c")
    assert add(store, part("c", 0)) == "late"
    assert scan(store) == [], "a late part leaves nothing behind"


def test_a_chord_takes_the_structure_of_its_header_along(store, scan):
    """In its own transaction: the worker may die after it, and a group that never expires would stay."""
    for expires_ms in (0, 10**15):
        store.open_chord("c", b"body", expires_ms)
        store.save_group("c", b"x" * 200_000, expires_ms)
        store.enlarge_chord("c", size=1)
        assert add(store, part("c", 0)) == "publish"
        store._write(store.finishing("c"))
        assert scan(store) == []


def test_an_expired_chord_leaves_no_key(store, clock, scan):
    store.open_chord("c", b"body", clock.wall_ms() + 1000)
    store.enlarge_chord("c", size=1)
    add(store, part("c", 0))
    clock.advance(chords.CLAIM_MS / 1000)
    store.sweep()
    assert store.abandoned_chords() == []
    assert scan(store) == []


def test_more_tasks_join_than_one_row_holds(store, scan):
    """600 long ids of tasks are over 100,000 bytes."""
    store.open_chord("c", None, 0)
    for number in range(600):
        store.enlarge_chord("c", joined=f"{number:0180d}")
    store.enlarge_chord("c", joined=f"{599:0180d}")
    store.enlarge_chord("c", size=1)
    assert [add(store, part("c", place)) for place in range(601)] == ["nothing"] * 600 + ["publish"]
    store._write(store.finishing("c"))
    assert scan(store) == []


def test_a_frozen_chord_that_is_applied_again_begins_anew(store, scan):
    for _ in range(2):
        store.open_chord("c", b"body", 0)
        assert add(store, part("c", 0)) == "nothing"
        store.enlarge_chord("c", size=2)
        assert add(store, part("c", 1)) == "publish"
    store._write(store.finishing("c"))
    assert scan(store) == []


def test_of_parts_that_return_at_the_same_time_one_publishes(running):
    number = 48
    running.open_chord("c", None, 0)
    running.enlarge_chord("c", size=number)
    with ThreadPoolExecutor(16) as pool:
        turns = list(pool.map(lambda place: add(running, part("c", place)), range(number)))
    assert turns.count("publish") == 1
    assert len(running.parts("c")) == number


def test_of_two_that_finish_at_the_same_time_one_does(running):
    def finish(_):
        try:
            running._write(running.finishing("c"))
        except ChordOver:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            running.open_chord("c", None, 0)
            assert sorted(pool.map(finish, range(4))) == [False, False, False, True]


# -- a store that fails ----------------------------------------------------------------------------------------------


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def faulty(faults, clock):
    return ResultStore(FaultyDatabase(clock=clock, faults=faults), "faulty", clock=clock, timeout_s=30.0)


@pytest.mark.parametrize(
    "fault", [Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED, Fault.CONFLICT, Fault.TOO_OLD]
)
def test_every_verb_survives_a_lost_answer(faulty, faults, fault, scan):
    def strike():
        faults.at_commits(fault)

    strike()
    faulty.open_chord("c", b"body", 5)
    strike()
    faulty.enlarge_chord("c", size=1)
    strike()
    faulty.enlarge_chord("c", joined="t1")
    strike()
    faulty.store("t0", *done(b"meta"), part("c", 0))
    strike()
    faulty.add_part(part("c", 1))
    strike()
    assert faulty.claim_chord(part("c", 1)) == "publish"
    assert len(faulty.parts("c")) == 2
    strike()
    faulty.save_group("g", b"x", 5)
    strike()
    faulty.delete_group("g")
    strike()
    faulty.forget("t0")
    strike()
    faulty.sweep()
    assert [key for key in scan(faulty) if key.startswith(faulty.keys.chord("c"))] == []
    assert faults.struck[fault] == 10


def test_a_commit_that_may_still_come_is_reported(faulty, faults):
    faults.at_commits(Fault.COMMIT_LATE)
    with pytest.raises(CommitUnknown):
        faulty.store("a", *done())
    faulty.store("a", *done())


def test_a_dead_store_is_reported_by_the_deadline():
    database = FaultyDatabase()
    store = ResultStore(database, os.urandom(4).hex(), clock=ManualClock(), timeout_s=1.0)
    database.close()
    with pytest.raises(StoreUnavailable):
        store.load("a")


@pytest.mark.parametrize("seed", range(20))
def test_chords_of_a_faulty_store_complete_exactly_once(seed):
    """Parts return in any order, some twice, commits fail in every way; each chord is finished by one."""
    rng, clock = random.Random(seed), ManualClock()
    retryable = (Fault.CONFLICT, Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED, Fault.TOO_OLD)
    faults = Faults(rng, dict.fromkeys(retryable, 0.15))
    store = ResultStore(FaultyDatabase(clock=clock, faults=faults, rng=rng), "s", clock=clock, timeout_s=600.0)
    published = []
    store.open_chord("c", b"body", 0)
    store.enlarge_chord("c", size=12)
    runs = [place for place in range(12) for _ in range(rng.choice((1, 1, 2)))]
    rng.shuffle(runs)
    for place in runs:
        store.add_part(part("c", place))
        if rng.random() < 0.1:
            continue  # killed before it could look
        if store.claim_chord(part("c", place)) == "publish" and rng.random() < 0.5:
            _publish(store, published)  # else killed before it could publish
    for _ in range(20):  # a look whose answer is lost finds the chord again, later
        clock.advance(chords.CLAIM_MS / 1000)
        for _ in store.abandoned_chords():
            _publish(store, published)
    assert published == [12]


def _publish(store, published):
    parts = len(store.parts("c"))
    with suppress(ChordOver):  # an earlier run of this commit, whose answer was lost, has done it
        store._write(store.finishing("c"))
    published.append(parts)


@pytest.mark.parametrize("tag", ["expiry", "look", "chord", "task"])
@pytest.mark.parametrize("value", [b"", b"\xff" * 30, b"{}", b'{"claimed_by":5,"joined":5}'])
def test_a_damaged_row_stops_neither_the_sweep_nor_the_others(faulty, tag, value):
    """A call for just the damaged one is told so, and a new result takes its place."""
    store = faulty  # no store reads the rows
    store.store("bad", *done())
    store.open_chord("g", b"body", 5)
    rows = {"task": store.keys.task("bad"), "chord": store.keys.chord("g")}
    rows |= {name: store.keys.prefix + pack(name, 1) + value for name in ("expiry", "look")}
    store._write(lambda tr: tr.set(rows[tag], value))
    store.store("good", *done(b"good"))
    store.abandoned_chords()
    store.sweep(parts=20)
    with suppress(FormatError):
        store.load("bad")
    store.store("bad", *done(b"anew"))
    assert (store.load("good") or done()).payload == b"good"
    store.open_chord("g", b"body", 0)
    store.enlarge_chord("g", size=1)
    store.add_part(part("g", 0))
    assert store.claim_chord(part("g", 0)) == "publish"
    store._write(store.finishing("g"))


def test_what_a_chord_has_left_whose_own_row_was_lost_does_not_count_for_the_next_one(store, clock, scan):
    """Neither if it is begun anew nor when it has expired."""
    for _ in range(2):
        store.open_chord("c", b"body", clock.wall_ms() + 1_000)
        store.enlarge_chord("c", size=2)
        assert add(store, part("c", 0)) == "nothing"
        store._write(lambda tr: tr.clear(store.keys.chord("c")))
    clock.advance(1.0)
    store.sweep()
    clock.advance(chords.CLAIM_MS / 1000)
    assert store.abandoned_chords() == []
    assert scan(store) == []


def test_a_look_that_the_chord_knows_nothing_of_is_done_once(store, clock):
    begin(store, 1, b"body")
    assert add(store, part("c", 0)) == "publish"
    store._write(lambda tr: tr.set(store.keys.look(1, "c"), b""))
    assert store.abandoned_chords() == ["c"]
    assert store.abandoned_chords() == [], "the claim is held by the call that found it"


def test_one_worker_whose_clock_is_ahead_deletes_no_results(database):
    clock, names = ManualClock(), os.urandom(6).hex()
    ahead = ManualClock(wall_ms=clock.wall_ms() + 86_400_000)

    def sessions():
        """With the last heartbeats of three workers."""
        beats = {"description": {}, "beat": b"", "ttl_s": 30.0, "open": True, "consumed": []}
        return [SessionFacts(SessionId(each), **beats, beat_ms=clock.wall_ms()) for each in (b"a", b"b", b"c")]

    ResultStore(database, names, clock=clock).store("t", *done(expires_ms=clock.wall_ms() + 50_000))
    sweeping = ResultStore(database, names, clock=ahead, sessions=sessions)
    for seconds, expired in ((0, 0), (49, 0), (2, 1)):
        clock.advance(seconds)
        ahead.advance(seconds)
        assert sweeping.sweep() == expired
