"""What a beat tells the store of its schedule, and what is read of it."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from celery_fdb.beat import Scheduler
from celery_fdb.brokers import LazyBroker
from celery_fdb.inspection.schedules import (
    ALL_S,
    KEPT_S,
    LEAST_S,
    PAUSE_S,
    ScheduleSync,
    pack,
    report_of,
    schedule_of,
    text_of,
    unpack,
)
from kombu_fdb import Broker
from kombu_fdb.errors import FormatError, OptionError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def app(tmp_path, new_app):
    app = new_app(f"fdb+sqlite:///{tmp_path}/broker.db")
    app.conf.task_ignore_result = True
    return app


@pytest.fixture
def broker(app):
    with Broker.open(app.conf.broker_url) as broker:
        yield broker


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def sync(app, clock):
    with closing(ScheduleSync(app, 300.0, clock)) as sync:
        yield sync


def away(*_, **__):
    raise StoreUnavailable


def entry(app, name="often", runs=0, **fields):
    made = {"task": "shop.remind", "schedule": 300.0, "last_run_at": datetime(2031, 5, 5, tzinfo=UTC), **fields}
    return ScheduleEntry(name=name, app=app, total_run_count=runs, **made)


def told(broker):
    return {each.name: each for each in schedule_of(broker).reports()}


def test_a_beat_that_ticks_tells_what_it_has_and_what_it_did(app, broker, tmp_path):
    app.conf.beat_schedule = {
        "often": {"task": "shop.remind", "schedule": 0.001, "options": {"queue": "mails"}},
        "nightly": {"task": "shop.report", "schedule": crontab(hour=3, minute=15)},
    }
    scheduler = Scheduler(app=app, schedule_filename=str(tmp_path / "beat"))
    assert told(broker) == {}, "it only shows its schedule"
    before = datetime.now(UTC)
    while "often" not in told(broker) or not told(broker)["often"].runs:
        scheduler.tick()
    found = told(broker)
    scheduler.close()
    assert (found["often"].task, found["often"].queue) == ("shop.remind", "mails")
    assert found["often"].last_ms is not None
    assert before.timestamp() * 1000 - 1 <= found["often"].last_ms <= found["often"].reported_ms
    assert (found["nightly"].runs, found["nightly"].last_ms, "crontab" in found["nightly"].timing) == (0, None, True)
    assert found["nightly"].next_ms is not None
    following = datetime.fromtimestamp(found["nightly"].next_ms / 1000 + 1, UTC)
    assert (following.hour, following.minute) == (3, 15)
    assert broker.queue("mails").count() > 0


def test_changes_are_told_at_most_once_a_second_and_all_once_a_minute(app, broker, sync, clock):
    schedule = {"often": entry(app), "rare": entry(app, "rare")}
    assert sync.look(schedule) is None
    begun = clock.wall_ms()
    schedule["often"] = entry(app, runs=1, last_run_at=datetime(2031, 5, 6, tzinfo=UTC))
    assert sync.look(schedule) == pytest.approx(LEAST_S)
    assert told(broker)["often"].runs == 0
    clock.advance(LEAST_S)
    assert sync.look(schedule) is None
    assert (told(broker)["often"].runs, told(broker)["rare"].reported_ms) == (1, begun)
    clock.advance(ALL_S)
    sync.look(schedule)
    assert {each.reported_ms for each in told(broker).values()} == {clock.wall_ms()}
    assert {each.again_s for each in told(broker).values()} == {ALL_S + 300}


def test_entries_that_beat_dropped_are_cleared_and_unreported_ones_later(app, broker, sync, clock):
    schedule_of(broker).report([report_of("of a config before", entry(app), clock.wall_ms(), 60.0)])
    sync.look({"often": entry(app), "rare": entry(app, "rare")})
    clock.advance(LEAST_S)
    sync.look({"often": entry(app)})
    assert told(broker).keys() == {"often", "of a config before"}
    clock.advance(KEPT_S)
    sync.look({"often": entry(app)})
    assert told(broker).keys() == {"often"}


def test_a_beat_whose_clock_is_ahead_of_the_workers_forgets_nothing(app, broker, sync, clock):
    clock.jump_wall((Clock().wall_ms() - clock.wall_ms()) / 1000)
    schedule_of(broker).report([report_of("of another beat", entry(app), clock.wall_ms(), 60.0)])
    assert broker.queue("mails").take(0) is None  # as a worker does, in a session
    clock.jump_wall(2 * KEPT_S)
    sync.look({"often": entry(app)})
    assert told(broker).keys() == {"often", "of another beat"}


def test_a_store_that_is_away_does_not_stop_beat(app, broker, monkeypatch, caplog, sync, clock):

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "celery_fdb"):
        patch.setattr("celery_fdb.inspection.schedules.schedule_of", away)
        for _ in range(3):
            sync.look({"often": entry(app)})
    assert sum("was not reported" in each for each in caplog.messages) == 1, "it does not try at every tick"
    clock.advance(PAUSE_S)
    sync.look({"often": entry(app)})
    assert told(broker).keys() == {"often"}


def test_another_kind_of_broker_is_told_nothing(app):
    # Of its own: the fixture closes the pool.
    app.conf.broker_url = app.conf.broker_write_url = app.conf.broker_read_url = "memory://told"
    assert ScheduleSync(app, 300.0, ManualClock()).look({"often": entry(app)}) is None
    assert not ScheduleSync(app, 300.0, ManualClock()).skips(entry(app))


def test_a_paused_entry_is_not_published_until_it_is_resumed(app, broker, tmp_path):
    """By no beat. Its ticks pass by, and its last run stays that of its last publication."""
    app.conf.beat_schedule = {"often": {"task": "shop.remind", "schedule": 0.001, "options": {"queue": "mails"}}}
    beats = [Scheduler(app=app, schedule_filename=str(tmp_path / f"beat{number}")) for number in range(2)]
    mails, store = broker.queue("mails"), schedule_of(broker)

    def tick_until(wanted):
        while not wanted():
            for beat in beats:
                beat.tick()

    tick_until(lambda: mails.count() and "often" in told(broker) and told(broker)["often"].last_ms)
    store.pause("often")
    paused_ms = Clock().wall_ms()
    runs, published = [each.schedule["often"].total_run_count for each in beats], mails.count()
    tick_until(lambda: all(each.schedule["often"].total_run_count > n + 3 for each, n in zip(beats, runs, strict=True)))
    for beat in beats:
        beat._synced()._next_s = beat._synced()._all_s = 0.0
        beat._synced().look(beat.schedule)
    assert mails.count() == published
    last_ms = told(broker)["often"].last_ms
    assert last_ms is not None
    assert last_ms <= paused_ms
    store.resume("often")
    tick_until(lambda: mails.count() > published)
    for beat in beats:
        beat.close()


def test_what_beat_heard_of_a_pause_holds_while_the_store_is_away(app, broker, monkeypatch, sync):
    schedule_of(broker).pause("paused")
    heard = {name: sync.skips(entry(app, name)) for name in ("paused", "often")}
    assert heard == {"paused": True, "often": False}

    monkeypatch.setattr("celery_fdb.inspection.schedules.schedule_of", away)
    assert {name: sync.skips(entry(app, name)) for name in heard} == heard


def test_nothing_is_skipped_once_the_broker_is_of_another_kind(app, broker, monkeypatch, sync):
    def of_another_kind(*_, **__):
        raise OptionError("not ours")

    schedule_of(broker).pause("paused")
    assert sync.skips(entry(app, "paused"))
    monkeypatch.setattr("celery_fdb.inspection.schedules.schedule_of", of_another_kind)
    assert not sync.skips(entry(app, "paused"))


class Broken:
    """As of a custom scheduler."""

    @property
    def total_run_count(self):
        raise ValueError("no schedule \ud800")


def test_entries_of_any_kind_are_told_of(app, broker, sync):
    odd = {"none": None, "broken": Broken(), "x" * 9_000: entry(app), "\ud800\x00": entry(app), "": entry(app)}
    naive = entry(app, runs=3, schedule=schedule(timedelta(seconds=9)))
    naive.last_run_at = datetime(2031, 5, 5)  # noqa: DTZ001 - as some schedulers have it
    assert sync.look({**odd, "naive": naive}) is None
    found = told(broker)
    assert len(found) == len(odd) + 1
    assert (found["naive"].runs, found["naive"].last_ms, found[""].task) == (3, None, "shop.remind")
    assert found["broken"].timing.startswith("ValueError")


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b"\xff", b'["t", "w", 5, null, null, 1, 1, 1]', b"[" * 9_000])
def test_malformed_rows_are_left_out(broker, app, value):
    with pytest.raises(FormatError):
        unpack("x", value)
    store = schedule_of(broker)
    good = report_of("good", entry(app), 5, 60.0)
    store.report([good])
    store._retry.repeat(lambda tr: tr.set(store._key("bad"), value), timeout_s=5.0)
    assert store.reports() == [good]
    assert unpack("good", pack(good)) == good


def test_a_timing_is_in_words_with_its_zone(app):
    app.conf.timezone = "Europe/Berlin"
    assert text_of(schedule(3600.0)) == "every 1 hour"
    assert text_of(schedule(90.0)) == "every 1.50 minutes"
    assert text_of(crontab(hour=3, minute=30, app=app)) == "crontab: 30 3 * * * Europe/Berlin"


def test_the_next_run_of_a_crontab_is_on_its_minute(app):
    """Whatever part of a second has passed while it was computed."""
    timing = crontab(hour=3, minute=30, app=app, nowfun=lambda: datetime(2031, 5, 5, 1, 0, 0, 400_000, tzinfo=UTC))
    made = entry(app, schedule=timing, last_run_at=datetime(2031, 5, 4, 3, 30, tzinfo=UTC))
    now_ms = int(datetime(2031, 5, 5, 1, 0, 0, 390_000, tzinfo=UTC).timestamp() * 1000)
    following_ms = report_of("nightly", made, now_ms, 60.0).next_ms
    assert following_ms is not None
    assert following_ms % 60_000 == 0


def test_a_signal_handler_closes_it_while_its_own_thread_opens_the_broker(app, monkeypatch):
    """As SIGTERM does to a beat whose cluster does not answer: seed 4001 of the box waited for itself."""
    sync, ended = ScheduleSync(app, 300.0), threading.Event()

    def interrupted(*_, **__):
        sync.close()
        raise SystemExit

    def tick():
        with pytest.raises(SystemExit):
            sync.skips(entry(app))
        ended.set()

    monkeypatch.setattr(Broker, "open", interrupted)
    threading.Thread(target=tick, daemon=True).start()
    assert ended.wait(60)


def test_threads_that_open_it_at_the_same_time_share_one(broker):
    """None waits for another's attempt; what is opened too much is closed."""
    opened, together = list[Broker](), threading.Barrier(2)

    def open_():
        together.wait(60)
        opened.append(each := Broker.open(str(broker.location)))
        together.wait(60)
        return each

    lazy_broker = LazyBroker(open_)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: lazy_broker.broker(), range(2))
    assert first is second is lazy_broker.broker()
    assert [each.connection.closed for each in opened if each is not first] == [True]
    assert not first.connection.closed
    lazy_broker.close()
    assert first.connection.closed


def test_what_is_opened_while_it_is_closed_is_not_kept(broker):
    """As in Django, whose settings change while a page opens the broker that they named before."""
    made = list[Broker]()

    def open_():
        made.append(Broker.open(str(broker.location)))
        if len(made) == 1:
            lazy_broker.close()
        return made[-1]

    lazy_broker = LazyBroker(open_)
    assert lazy_broker.broker() is made[0]
    assert lazy_broker.broker() is made[1]
    assert lazy_broker.broker() is made[1]
    for each in made:
        each.close()
