"""Entries of schedules that no beat tells of any more."""

import pytest
from kit.faults import FaultyDatabase

from celery_fdb.inspection import schedules as schedule_store
from celery_fdb.inspection.schedules import KEPT_S, EntryReport, ScheduleStore
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock(wall_ms=1_800_000_000_000)


@pytest.fixture
def store(clock):
    return ScheduleStore(FaultyDatabase(clock=clock), "n", clock=clock, timeout_s=30.0)


def told(name, clock):
    return EntryReport(name, "shop.pay", "every second", "q", None, None, 0, clock.wall_ms(), 65.0)


def test_old_entries_behind_many_new_ones_are_forgotten(store, clock, monkeypatch):
    monkeypatch.setattr(schedule_store, "MOST_ENTRIES", 2)
    store.report([told("z1", clock), told("z2", clock)])
    clock.advance(KEPT_S + 1)
    store.report([told(f"a{number}", clock) for number in range(3)])
    store.pause("z1")
    store.pause("a1")
    assert store.forget_old(clock.wall_ms()) == ["z1", "z2"]
    assert store.paused() == {"a1"}, "the pause goes with its entry"
    assert store.forget_old(clock.wall_ms()) == []


def test_an_entry_that_one_beat_drops_stays_paused_for_another(store, clock):
    store.report([told("a", clock), told("b", clock)])
    store.pause("a")
    store.report([], gone=["a", "b"])
    assert [each.name for each in store.reports()] == ["a"]
    store.report([told("a", clock)])
    assert store.paused() == {"a"}
    clock.advance(KEPT_S + 1)
    assert store.forget_old(clock.wall_ms()) == ["a"]
    assert store.paused() == set()


def test_an_entry_that_is_told_of_meanwhile_stays(store, clock, monkeypatch):
    store.report([told("a", clock), told("b", clock)])
    clock.advance(KEPT_S + 1)
    page = store._page

    def read_just_before_another_beat(*given):
        found = page(*given)
        store.report([told("a", clock)])
        return found

    monkeypatch.setattr(store, "_page", read_just_before_another_beat)
    assert store.forget_old(clock.wall_ms()) == ["b"]
    monkeypatch.undo()
    assert [each.name for each in store.reports()] == ["a"]


def test_a_key_that_can_not_be_read_costs_no_other_entry_its_place(store, clock):
    """Of a pause as of an entry."""
    store.report([told("a", clock)])
    store.pause("a")
    for prefix in (store._prefix, store._paused):
        store._retry.repeat(lambda tr, key=prefix + b"\x01\x01\x02": tr.set(key, b""), timeout_s=30.0)
    assert [each.name for each in store.reports()] == ["a"]
    assert store.paused() == {"a"}
