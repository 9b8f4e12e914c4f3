"""Timers of times to run, without a store (the rest: tests/kombu_fdb/transport/test_limits.py, tests/seeds)."""

import threading
from queue import Queue

import pytest

from kombu_fdb.errors import ForkedError, StoreUnavailable
from kombu_fdb.model import Lease
from kombu_fdb.process import time_to_run
from kombu_fdb.process.time_to_run import MOST_STOPPED, TimesToRun

LONG_S = 3600.0
PATIENCE_S = 60.0


class Store:
    """Takes messages back, or does not."""

    def __init__(self):
        self.taken = Queue()
        self.errors = []

    def release(self, leases, counted):
        self.taken.put((leases, counted))
        if self.errors:
            raise self.errors.pop()
        return len(leases)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def timers(store):
    return TimesToRun(store.release)


def lease(number):
    return Lease(b"session", number)


def watch(timers, number, ttr_s, *, started=True):
    gone = threading.Event()
    timers.watch(lease(number), ttr_s, started=lambda: started, gone=gone.set)
    return gone


def test_what_had_begun_counts_and_what_had_not_does_not(store, timers):
    gone = [watch(timers, 1, 0.01), watch(timers, 2, 0.01, started=False)]
    assert all(each.wait(PATIENCE_S) for each in gone)
    assert sorted(store.taken.get(timeout=PATIENCE_S) for _ in range(2)) == [([lease(1)], True), ([lease(2)], False)]


def test_settled_ones_are_left_alone(store, timers):
    forgotten = watch(timers, 1, 0.02)
    timers.forget([lease(1)])
    assert watch(timers, 2, 0.03).wait(PATIENCE_S)
    assert not forgotten.is_set()
    assert store.taken.get()[0] == [lease(2)]


def test_a_later_moment_replaces_an_earlier_one(store, timers):
    watch(timers, 1, 1.0)
    watch(timers, 1, LONG_S)
    assert watch(timers, 2, 1.1).wait(PATIENCE_S)
    assert store.taken.get()[0] == [lease(2)]
    timers.clear()


def test_a_store_that_does_not_answer_is_asked_again(store, timers, monkeypatch):
    """What was withdrawn from its consumer before stays uncounted."""
    monkeypatch.setattr(time_to_run, "RETRY_S", 0.01)
    store.errors = [StoreUnavailable()]
    asked = []
    gone = threading.Event()
    timers.watch(lease(1), 0.01, started=lambda: bool(asked) or asked.append(True) is not None, gone=gone.set)
    assert gone.wait(PATIENCE_S)
    assert [store.taken.get() for _ in range(2)] == [([lease(1)], False)] * 2


def test_what_is_not_ours_is_left_alone(store, timers):
    store.errors = [ForkedError()]
    gone = watch(timers, 1, 0.01)
    assert store.taken.get(timeout=PATIENCE_S)[0] == [lease(1)]
    assert watch(timers, 2, 0.01).wait(PATIENCE_S)
    assert not gone.is_set()
    assert not timers.timers


def test_timers_of_settled_messages_take_no_memory(timers):
    for number in range(5 * MOST_STOPPED):
        watch(timers, number, LONG_S)
        timers.forget([lease(number)])
    assert len(timers._order) <= MOST_STOPPED + 2
    timers.clear()


def test_the_thread_ends_with_the_last_timer_and_starts_with_the_next(store, timers):
    watch(timers, 1, LONG_S)
    first = timers._thread
    assert first is not None
    timers.clear()
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert watch(timers, 2, 0.01).wait(PATIENCE_S)
    assert timers._thread is not first


def test_a_time_to_run_of_centuries_ends_no_thread(store, timers):
    """Stored by an older celery-fdb; a thread can't wait for more than 292 years."""
    lease, soon = Lease(b"s", 1), Lease(b"s", 2)
    timers.watch(lease, 2**53 / 1000, started=lambda: True, gone=lambda: None)
    timers.watch(lease, 1e300, started=lambda: True, gone=lambda: None)
    timers.watch(soon, 0.0, started=lambda: True, gone=lambda: None)
    thread = timers._thread
    assert store.taken.get(timeout=PATIENCE_S) == ([soon], True)
    timers.watch(soon, 0.0, started=lambda: True, gone=lambda: None)
    assert store.taken.get(timeout=PATIENCE_S) == ([soon], True)
    assert timers._thread is thread
    timers.clear()
