"""Several beats, one message per tick."""

from datetime import UTC, datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

import pytest
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedule
from kit.celery_versions import CELERY

from celery_fdb.beat import Scheduler, tick_of


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture
def unscheduled(monkeypatch):
    """Beats have no schedule of their own, and no file for one."""
    monkeypatch.setattr(Scheduler, "should_sync", lambda self: False)
    monkeypatch.setattr(Scheduler, "schedule", {}, raising=False)


def entry(app, timing, now, last_run_at=None):
    timing.nowfun, timing._app = (lambda: now), app
    return ScheduleEntry(name="e", task="t", schedule=timing, app=app, last_run_at=last_run_at or now)


@pytest.mark.parametrize(
    ("timing", "one", "other", "equal"),
    [
        (crontab(), "2026-03-01 10:05:00.02", "2026-03-01 10:05:58", True),
        (crontab(), "2026-03-01 10:05:00", "2026-03-01 10:06:00", False),
        (crontab(minute="*/15"), "2026-03-01 10:15:00", "2026-03-01 10:29:59", True),
        (crontab(minute=0, hour=3), "2026-03-01 03:00:01", "2026-03-01 09:00:00", True),
        (crontab(minute=0, hour=3), "2026-03-01 03:00:01", "2026-03-02 03:00:00", False),
        (crontab(minute=0, hour=0, day_of_month=29, month_of_year=2), "2024-02-29 00:00:00", "2026-03-01 10:00", True),
        (schedule(30), "2026-03-01 10:05:01", "2026-03-01 10:05:29", True),
        (schedule(30), "2026-03-01 10:05:29", "2026-03-01 10:05:30", False),
    ],
)
def test_a_tick_is_the_same_in_every_beat(app, timing, one, other, equal):
    ticks = [tick_of(entry(app, timing, at(now)))[0] for now in (one, other)]
    assert (ticks[0] == ticks[1]) is equal


def test_a_lone_beat_with_an_interval_loses_no_tick(app):
    """Its ticks come a little late, so an interval may have none, but never two."""
    ticks, now = [], at("2026-03-01 10:00:29.999")
    for _ in range(1000):
        ticks.append(tick_of(entry(app, schedule(30), now))[0])
        now += timedelta(seconds=30, microseconds=1700)
    assert len(set(ticks)) == 1000


def test_a_lone_beat_loses_no_tick_to_a_store_that_was_slow_before(app, sent, unscheduled, monkeypatch):
    """The first tick waits for the store, and only so comes into an interval; the second one comes into the same."""
    scheduler, nows, timing = beat(app), [at("2026-03-01 10:00:29.995")], schedule(30)
    timing.nowfun, timing._app = (lambda: nows[-1]), app
    own = ScheduleEntry(name="e", task="t", schedule=timing, app=app)

    def skips(entry):
        nows.append(nows[-1] + timedelta(seconds=waits.pop()))
        return False

    waits = [0.001, 0.009]
    monkeypatch.setattr(scheduler._synced(), "skips", skips)
    for _ in range(2):
        due = scheduler.reserve(own)
        scheduler.apply_entry(own)
        own = due
        nows.append(own.last_run_at + timedelta(seconds=30))
    assert len(sent()) == 2


class AtSunset(BaseSchedule):
    """As Celery's ``solar``, whose estimate is what is left from now on."""

    def remaining_estimate(self, last_run_at):
        return at("2026-03-01 18:00:35") - self.now()


def test_a_tick_of_the_sun_is_the_same_in_a_beat_whose_store_is_slow(app, sent, unscheduled):
    for wait_s in (0, 10):
        scheduler, nows, timing = beat(app), [at("2026-03-01 18:00:36")], AtSunset(app=app)
        timing.nowfun = partial(nows.__getitem__, -1)
        own = ScheduleEntry(name="e", task="t", schedule=timing, app=app)
        scheduler.reserve(own)
        nows.append(nows[0] + timedelta(seconds=wait_s))
        scheduler.apply_async(own, advance=False)
    assert len(sent()) == 1


@pytest.mark.parametrize(
    ("zone", "every", "begin", "ticks"),
    [
        ("UTC", timedelta(minutes=90), "2026-03-01 10:00:05", 24),
        ("UTC", timedelta(seconds=90), "2026-03-01 10:00:05", 120),
        ("UTC", timedelta(seconds=30), "2026-03-01 10:00:00.9", 120),
        ("UTC", timedelta(days=3), "2026-03-01 10:00:00.9", 40),
        ("Europe/London", timedelta(days=1), "2026-03-26 10:00:00", 7),
        ("Europe/London", timedelta(hours=1), "2026-10-24 22:10:00", 12),
        ("Asia/Kolkata", timedelta(hours=2, minutes=30), "2026-03-01 10:00:00", 30),
    ],
)
def test_a_lone_beat_with_a_relative_interval_loses_no_tick(app, zone, every, begin, ticks):
    """Celery rounds down when it is due, so two ticks may be closer than the interval."""
    app.conf.timezone = zone
    now = at(begin).astimezone(ZoneInfo(zone))
    timing = schedule(every, relative=True, nowfun=lambda: now, app=app)
    seen = []
    last = now
    while len(seen) < ticks:
        due, pause_s = timing.is_due(last)
        if due:
            seen.append(tick_of(ScheduleEntry(name="e", task="t", schedule=timing, app=app, last_run_at=last))[0])
            last = now
            pause_s = 0.02
        now = (now.astimezone(UTC) + timedelta(seconds=max(pause_s, 0.001))).astimezone(ZoneInfo(zone))
    assert len(set(seen)) == ticks


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("begin", ["2026-03-28 22:10:00", "2026-10-24 22:10:00"])
def test_a_lone_beat_loses_no_tick_when_the_local_clock_is_set(app, begin, relative):
    """Celery before 5.7 counts an interval by the local clock, so in spring one is an hour shorter."""
    app.conf.timezone = "Europe/Berlin"
    now = at(begin).astimezone(ZoneInfo("Europe/Berlin"))
    timing = schedule(timedelta(hours=2), relative=relative, nowfun=lambda: now, app=app)
    ticks, last = [], now
    for _ in range(12 * 60):
        if timing.is_due(last)[0]:
            ticks.append(tick_of(ScheduleEntry(name="e", task="t", schedule=timing, app=app, last_run_at=last))[0])
            last = now
        now = (now.astimezone(UTC) + timedelta(minutes=1)).astimezone(ZoneInfo("Europe/Berlin"))
    assert len(set(ticks)) == len(ticks) >= 5


def beat(app):
    scheduler = Scheduler(app=app, lazy=True)
    scheduler.data = {}
    return scheduler


def test_two_beats_publish_one_message_per_tick(app, broker, unscheduled):
    one, other = beat(app), beat(app)
    for now in ("2026-03-01 10:05:00", "2026-03-01 10:06:00"):
        for scheduler in (one, other):
            scheduler.apply_async(entry(app, crontab(), at(now)))
    assert broker.queue("q").count() == 2


def test_the_entrys_own_options_stay(app, sent, unscheduled):
    own = entry(app, crontab(), at("2026-03-01 10:05:00"))
    own.options = {"headers": {"dedup_id": "mine"}}
    for _ in range(2):
        beat(app).apply_async(own)
    ((*_, headers),) = sent()
    assert headers["dedup_id"] == "mine"
    assert headers.get("celery_beat_task", CELERY < (5, 7)) is True
    assert own.options == {"headers": {"dedup_id": "mine"}}


class RowEntry(ScheduleEntry):
    """An entry that is made of a row, as django-celery-beat's is."""

    def __init__(self, row, app=None):
        super().__init__(**row, app=app)


def test_an_entry_of_another_schedulers_class_is_published(app, sent, unscheduled):
    own = RowEntry({"name": "e", "task": "t", "schedule": schedule(60.0, app=app), "options": {"priority": 3}}, app)
    beat(app).apply_async(own, advance=False)
    ((*_, headers),) = sent()
    assert headers["once_id"].startswith("beat:e:")
    assert own.options == {"priority": 3}


@pytest.mark.parametrize(("options", "dedup_id"), [({}, "t:shop"), ({"dedup_id": "mine"}, "mine")])
def test_a_dedup_id_counts_beside_the_tick(app, sent, unscheduled, options, dedup_id):
    """That of the task, or of the entry's options: of two ticks within its window, one is published."""

    @app.task(name="t", dedup_id=lambda args, kwargs: "shop", dedup_window=60)
    def task(): ...

    for now in ("2026-03-01 10:05:00", "2026-03-01 10:06:00"):
        tick = entry(app, crontab(), at(now))
        tick.options = {**options}
        beat(app).apply_async(tick)
    ((*_, headers),) = sent()
    assert headers["dedup_id"] == dedup_id
