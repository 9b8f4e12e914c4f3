"""The buffer: nothing waits for it, nothing is written twice, and what can't be kept is counted."""

import os
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kit.processes import in_child
from kombu import Connection

from celery_fdb.history import recorder as module
from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import Wanted
from celery_fdb.history.recorder import INTERVAL_S, Keeper, Recorder
from kombu_fdb.errors import CommitUnknown, StoreUnavailable
from kombu_fdb.model import SessionFacts, SessionId
from kombu_fdb.store.retry import ENDING_S
from kombu_fdb.testing.stores import MemoryStores


class Request:
    """What Celery counts as active."""

    def __init__(self, run):
        self.run = run
        self.active_key = None
        self.stored_under = None
        self.recorded = False

    def end(self, recorder, weight=0):
        self.recorded = True
        recorder.note(self.run, weight, self.active_key)


@pytest.fixture
def any_store():
    """What the store keeps is tested on each in ``test_store.py``."""
    with MemoryStores():
        yield f"fdb+memory://{os.urandom(6).hex()}"


@pytest.fixture
def running():
    return []


@pytest.fixture
def session():
    return [b"session"]


@pytest.fixture
def recorder(store, running, session, monkeypatch):
    """Open; its thread waits until it is woken. What is noted of a request is its run, or makes it."""
    monkeypatch.setattr(module, "FLUSH_S", 3600.0)
    monkeypatch.setattr(module, "active_requests", lambda: list(running))
    monkeypatch.setattr(module, "facts_of", lambda request, *_: request.run._replace(state="STARTED", end_ms=0))
    monkeypatch.setattr(module, "run_of", lambda facts, _: facts() if callable(facts) else facts)
    recorder = Recorder(History())
    recorder.open(store, lambda: session[0])
    yield recorder
    recorder.close()


def kept(store):
    return [run.id for run in store.page(Wanted(), limit=500)[0]]


def broken(*_, **__):
    raise StoreUnavailable("the store does not answer")


def test_what_ended_is_written_by_a_flush(recorder, store, run):
    Request(run("t")).end(recorder)
    assert (recorder.waiting, kept(store)) == (1, [])
    recorder.flush()
    assert (recorder.waiting, kept(store)) == (0, ["t"])


def test_a_signal_handler_that_ends_tasks_notes_them_in_the_middle_of_another_note(recorder, store, run):
    """Celery's cold shutdown is such a handler."""
    ended = threading.Event()

    class Interrupted(list[Any]):
        def append(self, facts):
            super().append(facts)
            recorder._waiting = [*self]
            Request(run("revoked")).end(recorder)
            ended.set()

    recorder._waiting = Interrupted()
    threading.Thread(target=Request(run("t")).end, args=[recorder], daemon=True).start()
    assert ended.wait(60)
    recorder.flush()
    assert sorted(kept(store)) == ["revoked", "t"]


def test_many_runs_wake_the_thread(recorder, store, run, monkeypatch):
    flushed = threading.Event()
    write = store.write
    monkeypatch.setattr(store, "write", lambda *given: (write(*given), flushed.set())[0])
    for _ in range(module.FLUSH_RUNS):
        Request(run()).end(recorder)
    assert flushed.wait(30)


def test_closing_flushes_the_rest(recorder, store, run):
    Request(run("t")).end(recorder)
    recorder.close()
    recorder.close()
    assert kept(store) == ["t"]
    Request(run("late")).end(recorder)
    assert recorder.waiting == 0


def test_closing_does_not_wait_for_a_call_that_lasts(recorder, store, run, monkeypatch, caplog):
    """The store's calls have deadlines of their own, which a user may have made long."""
    answer, answered = threading.Event(), threading.Event()

    def lasting(*_):
        answer.wait(30)
        answered.set()
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(store, "write", lasting)
    Request(run("t")).end(recorder)
    recorder.close(0.1)
    assert not answered.is_set()
    assert "the history of the last 1 runs is not kept" in caplog.text
    answer.set()
    assert answered.wait(30)


def test_a_worker_that_ends_is_patient_once_for_all_it_does(any_store, monkeypatch):
    """What its connections have waited in vain, the history does not wait again (``store/retry.py``)."""
    given = []
    with Connection(any_store) as connection:
        channel = connection.default_channel
        consumer = SimpleNamespace(
            app=Celery("x", set_as_current=False), task_consumer=SimpleNamespace(channel=channel)
        )
        keeper = type("Keeper", (Keeper,), {"recorder": Recorder(History())})(consumer)
        keeper.start(consumer)
        patience = channel.client.patience
        assert keeper.recorder._store.patience is patience
        close = keeper.recorder.close
        monkeypatch.setattr(keeper.recorder, "close", lambda timeout_s: (given.append(timeout_s), close(timeout_s)))
        with patience.ending():
            patience.wasted(ENDING_S - 1)
        keeper._on_shutdown()
    assert given == [1.0]


def test_a_store_that_is_down_costs_memory_up_to_a_bound_and_is_told_later(recorder, store, run, monkeypatch, caplog):
    monkeypatch.setattr(module, "MOST_BYTES", 10 * module.RUN_WEIGHT)
    with monkeypatch.context() as down:
        down.setattr(store, "write", broken)
        for number in range(15):
            Request(run(f"t{number:02d}", ago_s=100 - number)).end(recorder)
        for _ in range(3):
            recorder._flush_safely()
        for number in range(15, 30):
            Request(run(f"t{number:02d}", ago_s=100 - number)).end(recorder)
        assert (recorder.waiting, recorder._untold) == (20, 10)
    assert caplog.text.count("the history can't be written now") == 1
    recorder.flush()
    assert kept(store)[::-1] == [f"t{number:02d}" for number in (*range(10), *range(15, 25))]
    assert (recorder.waiting, store.dropped()) == (0, 10)
    recorder.flush()
    assert store.dropped() == 10


def test_a_heavy_run_takes_more_room(recorder, run):
    Request(run()).end(recorder, weight=module.MOST_BYTES)
    assert (recorder.waiting, recorder._untold) == (0, 1)


@pytest.mark.parametrize("happened", [True, False])
def test_an_answer_that_was_lost(recorder, store, run, monkeypatch, happened):
    """The group is stored once, whether the commit has happened or not."""
    write = store.write

    def lost(unwritten, bounds):
        if happened:
            write(unwritten, bounds)
        raise CommitUnknown("no answer")

    Request(run("t")).end(recorder)
    with monkeypatch.context() as silent:
        silent.setattr(store, "write", lost)
        with pytest.raises(CommitUnknown):
            recorder.flush()
    recorder.flush()
    assert (kept(store), store.kept(), store.totals()["shop.pay"].runs) == (["t"], 1, 1)


def test_a_run_that_can_not_be_made_keeps_no_other_out(recorder, store, run, caplog):
    def impossible():
        raise RecursionError

    for _ in range(3):
        recorder.note(impossible, 0, None)
    Request(run("t")).end(recorder)
    recorder.flush()
    assert (kept(store), store.dropped()) == (["t"], 3)
    assert caplog.text.count("is not kept") == 1


def test_a_child_never_writes_what_its_parent_has_buffered(recorder, store, run, monkeypatch):
    Request(run("t")).end(recorder)

    def child():
        assert not recorder.is_open
        recorder.flush()
        recorder.close()

    with monkeypatch.context() as ending:
        ending.setattr(store, "write", lambda *_: os._exit(9))
        in_child(child)
    recorder.flush()
    assert kept(store) == ["t"]


# -- active runs -------------------------------------------------------------------------------------------------------


def test_a_run_is_active_from_one_flush_to_another(recorder, store, run, running):
    request = Request(run("t"))
    running.append(request)
    for _ in range(2):
        recorder.flush()
        assert [(session, each.id, each.state) for session, each in store.active()] == [(b"session", "t", "STARTED")]
    running.remove(request)
    request.end(recorder)
    recorder.flush()
    assert (store.active(), kept(store)) == ([], ["t"])


def test_one_that_ended_before_the_flush_has_no_row(recorder, store, run, running):
    request = Request(run("t"))
    running.append(request)  # Celery still counts it
    request.end(recorder)
    recorder.flush()
    assert (store.active(), request.active_key) == ([], None)


def test_one_that_ends_while_its_row_is_written(recorder, store, run, running, monkeypatch):
    request = Request(run("t"))
    running.append(request)
    activity = store.activity

    def ends_meanwhile(*given, **named):
        request.end(recorder)
        activity(*given, **named)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(store, "activity", ends_meanwhile)
        recorder.flush()
    recorder.flush()
    assert (store.active(), kept(store)) == ([], ["t"])


@pytest.mark.parametrize("happened", [True, False])
def test_a_row_whose_answer_was_lost_is_not_left_behind(recorder, store, run, running, monkeypatch, happened):
    request = Request(run("t"))
    running.append(request)
    activity = store.activity

    def lost(*given, **named):
        if happened:
            activity(*given, **named)
        raise CommitUnknown("no answer")

    with monkeypatch.context() as silent:
        silent.setattr(store, "activity", lost)
        with pytest.raises(CommitUnknown):
            recorder.flush()
    recorder.flush()
    assert len(store.active()) == 1
    request.end(recorder)
    recorder.flush()
    assert store.active() == []


def test_a_long_outage_costs_no_memory_for_runs_that_last(recorder, store, run, running, monkeypatch):
    requests = [Request(run(f"t{number}")) for number in range(3)]
    running += requests
    with monkeypatch.context() as down:
        down.setattr(store, "activity", broken)
        for _ in range(5):
            recorder._flush_safely()
    assert (recorder._ended, len({each.active_key for each in requests})) == ([], 3)
    requests[0].end(recorder)
    recorder.flush()
    assert sorted(each.id for _, each in store.active()) == ["t1", "t2"]
    assert recorder._ended == []


def test_active_runs_move_to_the_next_session(recorder, store, run, running, session):
    running.append(Request(run("t")))
    recorder.flush()
    session[0] = b"next"
    recorder.flush()
    recorder.flush()
    assert [each for each, _ in store.active()] == [b"next"]


# -- tidying up --------------------------------------------------------------------------------------------------------


def session_facts(session_id, beat_ms):
    return SessionFacts(SessionId(session_id), {}, b"", 30.0, open=True, consumed=[], beat_ms=beat_ms)


@pytest.mark.parametrize("wrong_s", [30 * 86_400, -30 * 86_400], ids=["ahead", "behind"])
def test_one_clock_that_is_wrong_trims_nothing_of_the_others(store, run, clock, wrong_s):
    """Nor does it keep anything longer, where two others are right."""
    bounds, right_ms = History(), clock.wall_ms()
    for runs in (["old"], ["new"]):
        for each in pack_groups([run(id_) for id_ in runs]):
            store.write(each, bounds)
        clock.advance(bounds.segment_ms / 1000)
    clock.jump_wall(wrong_s)
    right = [right_ms, right_ms] if wrong_s < 0 else [right_ms]
    sessions = [session_facts(str(at).encode(), at_ms) for at, at_ms in enumerate([*right, clock.wall_ms()])]
    Recorder(bounds, clock).tidy(store, lambda: sessions, opened=True)
    assert set(kept(store)) == {"old", "new"}
    assert sum(counters.runs for *_, counters in store.slots(3600, 0, 2**40)) == 2
    late = [session_facts(each.session_id, each.beat_ms + int(bounds.max_age * 1000)) for each in sessions]
    Recorder(bounds, clock).tidy(store, lambda: late, opened=True)
    assert kept(store) == ["new"]


def test_upkeep_now_and_then_and_when_a_segment_was_opened(store, run, clock, monkeypatch):
    open_ = [session_facts(b"alive", clock.wall_ms())]
    trims = []
    trim = store.trim
    monkeypatch.setattr(store, "trim", lambda *given, **named: (trims.append(1), trim(*given, **named))[1])
    tidy = partial(Recorder(History(), clock).tidy, store, lambda: open_)
    for session in (b"alive", b"dead"):
        store.activity(session, {1: run(session.decode(), state="STARTED", end_ms=0)})
    tidy(opened=False)
    assert [each.id for _, each in store.active()] == ["alive"]
    assert kept(store) == ["dead"]
    open_.clear()
    tidy(opened=False)  # not yet
    assert (len(store.active()), len(trims)) == (1, 1)
    tidy(opened=True)
    assert (len(store.active()), len(trims)) == (1, 2)
    clock.advance(2 * INTERVAL_S)
    tidy(opened=False)
    assert (len(store.active()), len(trims)) == (0, 3)
    assert set(kept(store)) == {"alive", "dead"}


def test_after_a_reconnection_lost_runs_are_looked_for_at_once_and_from_the_first_on(store, recorder, run, monkeypatch):
    """The recorder waited, and went on behind a row of the store before, which may be another broker's."""
    monkeypatch.setattr(module, "MOST_ACTIVE", 1)
    for session in (b"b", b"a"):
        store.activity(session, {1: run(session.decode(), state="STARTED", end_ms=0)})
        recorder.open(store, lambda: b"session", list)
        recorder.tidy(store, list, opened=False)
    assert store.active() == []


def test_lost_runs_are_found_behind_any_number_of_others(store, run, clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_ACTIVE", 2)
    find_lost = partial(Recorder(History()).find_lost, store, lambda: [session_facts(b"alive", clock.wall_ms())])
    for session, runs in ((b"alive", 5), (b"dead", 1)):
        store.activity(session, {number: run(state="STARTED", end_ms=0) for number in range(runs)})
    assert [find_lost() for _ in range(6)] == [0, 0, 1, 0, 0, 0]
    store.activity(b"dead", {1: run(state="STARTED", end_ms=0)})
    assert sum(find_lost() for _ in range(4)) == 1
    assert {session for session, _ in store.active()} == {b"alive"}
