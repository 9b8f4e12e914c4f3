"""The retry loop over a store whose commits fail, or happen without an answer."""

import contextlib
import contextvars
import random
import struct
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.conformance.store import number, read
from kit.costs import CountingDatabase
from kit.faults import Fault, Faults, FaultyDatabase, Interrupted

from kombu_fdb.errors import CommitUnknown, Conflict, LimitExceeded, StoreUnavailable, TransactionTooOld
from kombu_fdb.process.duties import LEFT_TTL_S
from kombu_fdb.store.retry import LONGEST_DOUBT_S, Doubt, Patience, Retry
from kombu_fdb.testing.clock import ManualClock

N = b"n"
LOST = (Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED)
RETRYABLE = (Fault.CONFLICT, Fault.TOO_OLD, *LOST)


class Bench:
    def __init__(self, faults=None):
        self.faults = faults or Faults()
        self.clock = ManualClock()
        self.database = FaultyDatabase(clock=self.clock, faults=self.faults)
        self.counted = CountingDatabase(self.database)
        self.retry = Retry(self.counted, self.clock, random.Random(0), token_key=lambda number: b"token/%d" % number)
        self.runs = 0

    def add_one(self, tr):
        """Not idempotent, on purpose: its effect and its result are wrong if it happens twice."""
        self.runs += 1
        value = number(tr.get(N)) + 1
        tr.set(N, struct.pack("<q", value))
        return value

    def count(self):
        self.faults.stop()
        return number(read(self.database, N))


@given(st.lists(st.lists(st.sampled_from(RETRYABLE), max_size=5), max_size=6))
@settings(deadline=None)
def test_whatever_happens_each_call_has_its_effect_once(script):
    bench = Bench()
    for i, faults in enumerate(script):
        bench.faults.at_commits(*faults, None)
        assert bench.retry(bench.add_one, timeout_s=60) == i + 1
        bench.faults.stop()
    assert bench.count() == len(script)


def test_without_tokens_nothing_is_run_that_might_leave_a_doubt():
    """Stores of results, history and schedules have none."""
    bench = Bench()
    retry = Retry(bench.counted, bench.clock, random.Random(0))
    with pytest.raises(AssertionError):
        retry(bench.add_one, timeout_s=10)
    assert bench.runs == 0


@pytest.mark.parametrize("fault", RETRYABLE)
def test_what_may_happen_twice_runs_again_without_a_token(fault):
    bench = Bench()
    bench.faults.at_commits(fault, fault)

    def set_once(tr):
        if tr.get(N) is None:
            tr.set(N, struct.pack("<q", 1))
        return True

    assert bench.retry.repeat(set_once, timeout_s=60)
    assert bench.count() == 1
    assert [key for key, _ in bench.database.items()] == [N]


@pytest.mark.parametrize(
    ("commits", "reads", "runs"),
    [
        ([Fault.ANSWER_LOST_APPLIED], [], 1),
        ([Fault.ANSWER_LOST_NOT_APPLIED, Fault.CONFLICT, Fault.ANSWER_LOST_APPLIED], [], 3),
        ([Fault.ANSWER_LOST_APPLIED], [None, Fault.TOO_OLD], 1),
    ],
    ids=["at once", "after later failures", "though the check after it was cut off"],
)
def test_a_lost_answer_is_found_again_without_running_the_body(commits, reads, runs):
    bench = Bench()
    bench.faults.at_commits(*commits)
    bench.faults.at_reads(*reads)
    assert bench.retry(bench.add_one, timeout_s=60) == 1
    assert (bench.runs, bench.count()) == (runs, 1)


def test_a_commit_that_may_still_happen_goes_to_the_caller():
    bench = Bench()
    bench.faults.at_commits(Fault.COMMIT_LATE)
    with pytest.raises(CommitUnknown) as unknown:
        bench.retry(bench.add_one, timeout_s=60)
    assert unknown.value.in_flight
    assert bench.runs == 1
    # Its token may still be written late, so the next call must not use it.
    assert bench.retry(bench.add_one, timeout_s=60) in (1, 2)
    assert {key for key, _ in bench.database.items(b"token/", b"token0")} >= {b"token/2"}


def test_the_deadline_ends_it():
    """BOUNDED."""
    bench = Bench(Faults(rates={Fault.CONFLICT: 1.0}))
    with pytest.raises(StoreUnavailable) as ended:
        bench.retry(bench.add_one, timeout_s=10)
    assert isinstance(ended.value.__cause__, Conflict)
    assert ended.value.attempts > 5
    assert ended.value.reason == Conflict.text
    assert "raise operation_timeout" in str(ended.value)
    assert 9 <= bench.clock.monotonic() - 1000 <= 10


def test_the_deadline_after_a_lost_answer_says_that_it_may_have_happened():
    bench = Bench(Faults(rates={Fault.ANSWER_LOST_NOT_APPLIED: 1.0}))
    with pytest.raises(CommitUnknown):
        bench.retry(bench.add_one, timeout_s=1)


def test_a_failure_for_good_after_a_lost_answer_says_that_it_may_have_happened():
    bench = Bench()
    bench.faults.at_commits(Fault.ANSWER_LOST_APPLIED, Fault.UNAVAILABLE)
    bench.faults.at_reads(None, Fault.UNAVAILABLE)
    with pytest.raises(CommitUnknown) as caught:
        bench.retry(bench.add_one, timeout_s=60)
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_what_is_not_retryable_is_not_retried():
    bench = Bench()
    bench.faults.at_commits(Fault.UNAVAILABLE)
    with pytest.raises(StoreUnavailable):
        bench.retry(bench.add_one, timeout_s=60)
    assert bench.runs == 1


def test_limits_are_not_retried():
    bench = Bench()
    with pytest.raises(LimitExceeded):
        bench.retry(lambda tr: tr.set(b"k", bytes(100_001)), timeout_s=60)
    assert len(bench.counted.transactions) == 1


def test_a_token_costs_one_blind_write_and_nothing_when_only_reading():
    bench = Bench()
    bench.retry(bench.add_one, timeout_s=60)
    cost = bench.counted.last
    assert (cost.point_reads, cost.conflict_keys, cost.sets, cost.round_trips) == (1, 2, 2, 3)
    bench.retry.read(lambda tr: tr.get(N), timeout_s=60)
    cost = bench.counted.last
    assert (cost.point_reads, cost.sets, cost.round_trips, cost.commits) == (1, 0, 2, 0)


def test_reads_that_fail_are_retried():
    bench = Bench()
    bench.faults.at_reads(Fault.TOO_OLD, Fault.TOO_OLD)
    assert bench.retry.read(lambda tr: tr.get(N), timeout_s=60) is None
    bench.faults.at_reads(Fault.UNAVAILABLE)
    with pytest.raises(StoreUnavailable):
        bench.retry.read(lambda tr: tr.get(N), timeout_s=60)


def test_a_transaction_is_always_ended():
    bench = Bench()

    def body(tr):
        tr.get(N)
        raise TransactionTooOld

    with pytest.raises(StoreUnavailable):
        bench.retry(body, timeout_s=1)
    assert not bench.database._readers


# -- doubts ------------------------------------------------------------------------------------------------------------


def doubtful(bench, lands_s):
    doubt = Doubt()
    bench.faults.at_commits(Fault.COMMIT_LATE)
    bench.faults.at_landings(lands_s)
    with pytest.raises(CommitUnknown):
        bench.retry(bench.add_one, timeout_s=60, doubt=doubt)
    assert doubt.is_open
    return doubt


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(("lands_s", "happened"), [(None, False), (0.0, True), (0.5, True), (3.0, False)])
def test_a_doubt_is_settled_for_good(used_before, lands_s, happened):
    bench = Bench()
    before = bench.retry(bench.add_one, timeout_s=60) if used_before else 0
    doubt = doubtful(bench, lands_s)
    bench.clock.advance(1)
    assert bench.retry.resolve(doubt, timeout_s=60) is happened
    assert doubt.result == (before + 1 if happened else None)
    bench.clock.advance(10)
    assert bench.count() == before + happened, "what has not happened never does"
    assert bench.retry.resolve(doubt, timeout_s=60) is happened


@pytest.mark.parametrize("fault", [*RETRYABLE, Fault.COMMIT_LATE])
def test_settling_a_doubt_may_be_repeated(fault):
    bench = Bench()
    doubt = doubtful(bench, 3.0)
    bench.faults.at_commits(fault)
    bench.faults.at_landings(1.0)
    with contextlib.suppress(CommitUnknown):
        bench.retry.resolve(doubt, timeout_s=60)
    bench.clock.advance(2)
    assert bench.retry.resolve(doubt, timeout_s=60) is False
    bench.clock.advance(10)
    assert bench.count() == 0


def test_an_exception_after_the_commit_leaves_a_doubt():
    bench, doubt = Bench(), Doubt[int]()
    bench.faults.at_commits(Fault.INTERRUPTED)
    with pytest.raises(Interrupted):
        bench.retry(bench.add_one, timeout_s=60, doubt=doubt)
    assert bench.retry.resolve(doubt, timeout_s=60) is True
    assert doubt.result == bench.count() == 1


@pytest.mark.parametrize("lands_s", [None, 0.0, 0.5])
def test_a_call_that_goes_on_with_a_doubt_has_its_effect_once(lands_s):
    """As a publish does that first copies what it pushes out of a full queue."""
    bench = Bench()
    doubt = doubtful(bench, lands_s)
    if lands_s == 0.0:
        bench.clock.advance(1)
    assert bench.retry(bench.add_one, timeout_s=60, doubt=doubt) == 1
    bench.clock.advance(10)
    assert bench.count() == 1
    assert not doubt.is_open
    bench.retry(bench.add_one, timeout_s=60)
    assert len(bench.database.items(b"token/", b"token0")) == 1, "its token is used again"


def test_a_settled_doubt_is_not_used_again():
    bench, doubt = Bench(), Doubt[int]()
    bench.retry(bench.add_one, timeout_s=60, doubt=doubt)
    with pytest.raises(AssertionError):
        bench.retry(bench.add_one, timeout_s=60, doubt=doubt)


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.UNAVAILABLE])
def test_what_was_refused_leaves_none(fault):
    bench, doubt = Bench(), Doubt[int]()
    bench.faults.at_commits(fault)
    with pytest.raises(StoreUnavailable):
        bench.retry(bench.add_one, timeout_s=0.001, doubt=doubt)
    assert not doubt.may_have_happened


def test_a_doubt_that_is_resolved_too_late_stays_open():
    """A machine that slept: others may have cleared its tokens."""
    bench = Bench()
    doubt = doubtful(bench, None)
    bench.clock.advance(LONGEST_DOUBT_S + 1)
    assert bench.retry.resolve(doubt, timeout_s=60) is None
    assert doubt.is_open
    assert LEFT_TTL_S >= 2 * LONGEST_DOUBT_S


@pytest.mark.parametrize("clocks_stop", [False, True])
def test_a_token_that_was_cleared_proves_nothing(clocks_stop):
    """In the pause after a lost answer the machine sleeps, and others clear its tokens, as those of a dead process."""

    class Sleeper(ManualClock):
        def sleep(self, seconds):
            super().sleep(seconds if clocks_stop else 1_000)
            for key, _ in bench.database.items(b"token/", b"token0"):
                tr = bench.database.begin(timeout_s=5)
                tr.clear(key)
                tr.commit()

    bench = Bench()
    assert bench.retry(bench.add_one, timeout_s=60) == 1
    bench.retry.clock = Sleeper()
    bench.faults.at_commits(Fault.ANSWER_LOST_APPLIED)
    with pytest.raises(CommitUnknown):
        bench.retry(bench.add_one, timeout_s=60_000)
    assert bench.count() == 2


def test_a_token_unused_for_long_is_left_to_the_sweepers():
    bench = Bench()
    for pause_s in (1, LONGEST_DOUBT_S + 1, 1):
        bench.retry(bench.add_one, timeout_s=60)
        bench.clock.advance(pause_s)
    assert [key for key, _ in bench.database.items(b"token/", b"token0")] == [b"token/1", b"token/2"]


def test_threads_that_begin_at_once_have_a_token_each():
    """Also where a thread loses its turn between two lines, as under a debugger."""
    bench, tokens, many = Bench(), list[bytes](), 4
    line = threading.Barrier(many, timeout=60)

    def in_step(frame, event, _):
        if event == "line" and frame.f_code.co_name == "_free_token":
            line.wait()
        return in_step

    def run():
        sys.settrace(in_step)
        tokens.append(bench.retry._free_token().key)

    threads = [threading.Thread(target=run) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tokens) == [b"token/%d" % number for number in range(1, many + 1)]


# -- one deadline for several ------------------------------------------------------------------------------------------


def test_what_one_call_does_shares_its_deadline():
    clock = ManualClock()
    patience = Patience(clock)

    def call():
        first = patience.allow(5)
        clock.advance(3)
        return [first, patience.allow(5), patience.within(9, lambda: patience.allow(8)), patience.allow(1)]

    assert patience.within(5, call) == [5, 2, 2, 1]
    assert patience.allow(5) == 5
    clock.advance(60)
    assert patience.within(5, lambda: (clock.advance(60), patience.allow(5))[1]) == 0


def test_no_exception_leaves_a_deadline_behind():
    clock = ManualClock()
    patience = Patience(clock)

    def call():
        raise Interrupted

    with contextlib.suppress(Interrupted):
        patience.within(1, call)
    clock.advance(60)
    assert patience.allow(5) == 5


def test_a_thread_that_a_call_starts_has_a_deadline_of_its_own():
    """Though it has a copy of the caller's context, as greenlets do, and threads of some Pythons."""
    patience, allowed = Patience(ManualClock()), []

    def call():
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(lambda: allowed.append(patience.allow(5)),))
        thread.start()
        thread.join()

    patience.within(1, call)
    assert allowed == [5]
