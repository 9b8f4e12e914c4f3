"""Workers, what is asked of them, and the app's schedule."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from amqp.exceptions import ConsumerCancelled, NotFound, RecoverableConnectionError
from celery.app.control import Inspect
from celery.schedules import crontab, schedule
from kit.left import keep
from kombu.exceptions import ContentDisallowed, OperationalError

from celery_fdb.history.run import Run
from celery_fdb.inspection.schedules import EntryReport, schedule_of, text_of
from celery_fdb.operations.action import Request
from celery_fdb.operations.messages import unknown
from celery_fdb.web import User
from celery_fdb.web.pages.schedules import rows_of
from celery_fdb.web.pages.workers import FRESH_S, row_of, worker_of
from celery_fdb.web.request_context import NOTHING
from kombu_fdb import errors
from kombu_fdb.model import NO_SESSION, SessionFacts
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.clock import ManualClock

STATS = {
    "pool": {"implementation": "celery.concurrency.prefork:TaskPool", "max-concurrency": 4},
    "prefetch_count": 16,
    "uptime": 3_700,
    "pid": 77,
    "total": {"shop.pay": 5, "shop.mail": 2},
}


@pytest.fixture
def answers(monkeypatch):
    """What workers answer to stats and active."""
    answers = {"stats": {"w@h": STATS}, "active": {"w@h": []}, "queues": {"w@h": [{"name": "jobs"}]}}
    monkeypatch.setattr(Inspect, "stats", lambda _: answers["stats"])
    monkeypatch.setattr(Inspect, "active", lambda _: answers["active"])
    monkeypatch.setattr(Inspect, "active_queues", lambda _: answers["queues"])
    return answers


@pytest.fixture
def control(app, monkeypatch):
    """What was asked of the workers; the first of them answers."""
    asked = []

    def told(name):
        def call(*arguments, **named):
            asked.append((name, *arguments, *([named["destination"]] if "destination" in named else [])))
            return [{"w@h": {"ok": "done so"}}]

        return call

    for name in ("shutdown", "pool_grow", "pool_shrink", "rate_limit", "time_limit", "cancel_consumer"):
        monkeypatch.setattr(app.control, name, told(name))
    return asked


def test_a_worker_with_what_it_runs(operator, answers):
    answers["active"]["w@h"] = [{"id": "t1", "name": "shop.pay", "time_start": time.time() - 90, "args": ["secret"]}]
    page = operator.see("/workers")
    for text in ("w@h", "prefork", "takes from jobs", "tasks run: 7", "1 h 1 min", "shop.pay", "1 min"):
        assert text in page
    assert "secret" not in page


def test_the_active_tasks_of_a_worker_with_how_long_they_run(visit, app, answers):
    """The longest first; it grows from look to look."""
    clock = ManualClock()
    now_s = clock.wall_ms() / 1000
    answers["active"]["w@h"] = [
        {"id": "t2", "name": "shop.mail", "time_start": now_s - 4.5},
        {"id": "t1", "name": "shop.pay", "time_start": now_s - 90},
        {"id": "t3", "name": "shop.new", "time_start": None},
    ]
    person = visit(app=app, clock=clock)
    row = re.compile(r'<tr><th scope="row"><a href="/task\?id=t\d">([\w.]+)</a>.*?<td class="n">([^<]*)</td></tr>')
    for shown in (
        [("shop.pay", "1 min 30 s"), ("shop.mail", "4.5 s"), ("shop.new", NOTHING)],
        [("shop.pay", "1 h 1 min"), ("shop.mail", "1 h"), ("shop.new", NOTHING)],
    ):
        assert row.findall(person.see("/workers")) == shown
        clock.advance(3_600)


def test_the_workers_are_asked_once_for_all_who_open_the_page(visit, app, broker, monkeypatch):
    """And a visitor of another page does not wait for them."""
    clock, asked, goes_on = ManualClock(), [], threading.Event()

    def stats(_):
        asked.append(1)
        goes_on.wait(60)
        return {"w@h": STATS}

    monkeypatch.setattr(Inspect, "stats", stats)
    monkeypatch.setattr(Inspect, "active", lambda _: {})
    person = visit(app=app, clock=clock, threads=1, timeout_s=60)
    with ThreadPoolExecutor(20) as many:
        waiting = [many.submit(person.get, "/workers") for _ in range(20)]
        assert "No queues yet" in person.see("/")
        goes_on.set()
        assert {each.result().status_code for each in waiting} == {200}
    assert len(asked) == 1
    clock.advance(FRESH_S + 1)
    person.see("/workers")
    assert len(asked) == 2


def test_without_an_app_or_an_answer_the_page_says_so(visit, operator, answers):
    assert "celery -A proj fdb web" in visit().see("/workers")
    answers.update(stats=None, active=None, queues=None)
    assert "No worker answered" in operator.see("/workers")


def test_a_session_tells_the_name_of_its_worker():
    """A worker has a queue of its own for remote control; a process that only asks workers has one for replies."""
    queues = ["jobs", "celeryev.5", "north@shop.celery.pidbox"]
    session = SessionFacts(NO_SESSION, {}, b"", 30.0, open=True, consumed=queues)
    row = row_of(session, 1.0)
    assert (row["worker"], row["queues"]) == ("north@shop", ["jobs"])
    for others in ([], ["jobs"], ["5f3e.reply.celery.pidbox"]):
        assert row_of(replace(session, consumed=others), 1.0)["worker"] == ""


@pytest.mark.parametrize(
    "error",
    [
        *(OperationalError, RecoverableConnectionError, ConsumerCancelled, NotFound, ContentDisallowed),
        pytest.param(errors.SessionLost, id="SessionLost"),
    ],
)
def test_workers_that_cannot_be_asked_are_a_page(operator, app, monkeypatch, error):
    """Whatever ends the way of a question: seed 4006 of the box was fenced while it waited for the answers."""

    def fail(*_, **__):
        raise error("gone")

    for verb in ("stats", "registered"):
        monkeypatch.setattr(Inspect, verb, fail)
    monkeypatch.setattr(app.control, "pool_grow", fail)
    assert "could not be asked" in operator.see("/workers", 503)
    given = {"action": "worker_grow", "queue": "w@h", "by": "1", "confirmed": "yes"}
    assert "could not be asked" in operator.submit("/act", status=503, **given)
    assert unknown(Request("jobs", fields={"task": "shop.pay"}, app=app)) == ""


@pytest.mark.parametrize(
    "told", [None, [], "x", {"pool": 5, "total": []}, {"pool": {"max-concurrency": "x"}, "pid": []}]
)
def test_a_worker_may_answer_anything(told):
    assert worker_of("w", told, told, told, 0.0)["name"] == "w"
    assert worker_of("w", None, [told, {"time_start": "x"}, {}], [told, {}], 0.0)["ran"] == 0


@pytest.mark.parametrize(
    ("action", "fields", "asked"),
    [
        ("worker_shutdown", {}, ("shutdown", ["w@h"])),
        ("worker_grow", {"by": "2"}, ("pool_grow", 2, ["w@h"])),
        ("worker_shrink", {"by": "1"}, ("pool_shrink", 1, ["w@h"])),
        ("worker_quiet", {}, ("cancel_consumer", "jobs", ["w@h"])),
        ("worker_rate", {"task": "shop.pay", "rate": "10/m"}, ("rate_limit", "shop.pay", "10/m", ["w@h"])),
        (
            "worker_time_limit",
            {"task": "shop.pay", "soft": "90s", "hard": "2m"},
            ("time_limit", "shop.pay", 90, 120, ["w@h"]),
        ),
        ("worker_time_limit", {"task": "shop.pay", "soft": ""}, ("time_limit", "shop.pay", None, None, ["w@h"])),
    ],
)
def test_what_is_asked_of_a_worker(operator, control, answers, action, fields, asked):
    given = {"action": action, "queue": "w@h", "back": "/nowhere"}
    assert "w@h" in operator.submit("/act", **given)
    assert control == [], "asked first"
    operator.submit("/act", status=404, **given, **fields, confirmed="yes")  # the way back
    assert control == [asked]


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet", "thread", "solo"])
def test_a_pool_is_resized_and_limited_only_if_it_can(operator, answers, pool):
    answers["stats"]["w@h"] = {**STATS, "pool": {"implementation": f"celery.concurrency.{pool}:TaskPool"}}
    page = operator.see("/workers")
    assert ("Grow pool" in page) is (pool in {"prefork", "gevent", "eventlet"})
    assert ("Time limits" in page) is (pool == "prefork")


def test_a_pool_that_grew_is_shown_as_it_is(operator, answers):
    answers["stats"]["w@h"] = {**STATS, "pool": {**STATS["pool"], "processes": [*range(55)]}}
    assert " 55</span>" in operator.see("/workers")


def test_a_running_task_is_ended_from_its_page(operator, visit, app, broker, monkeypatch):
    asked = []
    answer = {"ok": "terminate: t1"}

    def revoke(task_id, **named):
        asked.append((task_id, named["terminate"]))
        return [{"w@h": answer}]

    monkeypatch.setattr(app.control, "revoke", revoke)
    app.send_task("shop.pay", queue="jobs", task_id="t1")
    page = operator.see("/task", id="t1")
    assert "Revoke" in page
    assert "Terminate" not in page, "it does not run"
    job = broker.queue("jobs").take(0)
    assert job is not None
    assert "Terminate" in operator.see("/task", id="t1")
    given = {"queue": "t1", "back": "/task?id=t1", "confirmed": "yes"}
    bob = visit(app=app, read_only=False, user=lambda _: User("bob", may_act_on_workers=False))
    assert "Revoke" not in bob.see("/task", id="t1")
    assert "You may not act on workers" in bob.submit("/act", status=403, action="task_terminate", **given)
    assert asked == []
    assert "Terminated t1 on w@h." in operator.submit("/act", action="task_terminate", **given)
    assert "Revoked t1: 1 worker" in operator.submit("/act", action="task_revoke", **given)
    assert asked == [("t1", True), ("t1", False)]
    answer["ok"] = "terminate: tasks unknown"
    assert "No worker that answered runs t1" in operator.submit("/act", action="task_terminate", **given)
    answer["error"] = "NotImplementedError()"
    assert "Only a pool of processes" in operator.submit("/act", action="task_terminate", **given)


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("worker_grow", {"by": "0"}),
        ("worker_rate", {"task": "t", "rate": "fast"}),
        ("worker_time_limit", {"task": "t", "hard": "0"}),
        ("worker_time_limit", {"hard": "2m"}),
    ],
)
def test_what_no_worker_can_do_is_told(operator, control, action, fields):
    operator.submit("/act", status=422, action=action, queue="w@h", confirmed="yes", **fields)
    assert control == []


@pytest.mark.parametrize("by", ["many", "9999", "+5", ""])
def test_how_many_processes_there_may_be_is_told(operator, control, by):
    page = operator.submit("/act", status=422, action="worker_grow", queue="w@h", confirmed="yes", by=by)
    assert "From 0 to 100." in page
    assert control == []


def test_a_worker_that_refuses_or_is_silent(operator, app, monkeypatch):
    given = {"action": "worker_grow", "queue": "w@h", "by": "1", "confirmed": "yes"}
    for replies, text in (
        ([{"w@h": {"error": "no pool"}}], "no pool"),
        ([], "did not answer"),
        (None, "did not answer"),
    ):
        monkeypatch.setattr(app.control, "pool_grow", lambda *_, replies=replies, **__: replies)
        assert text in operator.submit("/act", status=422, **given)


# -- the schedule ------------------------------------------------------------------------------------------------------

NOW = datetime(2031, 5, 5, 12, 30, tzinfo=UTC)


def test_entries_with_their_last_and_next_run(operator, app, broker):
    app.conf.beat_schedule = {
        "often": {"task": "shop.remind", "schedule": 300.0, "options": {"queue": "mails"}},
        "nightly": {"task": "shop.report", "schedule": crontab(hour=3, minute=15), "options": {"queue": None}},
        "broken": {"task": "shop.x", "schedule": "sometimes"},
        "empty": None,
    }
    began = int(NOW.timestamp() * 1000) - 60_000
    keep(broker, Run("t", "shop.remind", state="SUCCESS", start_ms=began, end_ms=began + 5))
    rows = {each["name"]: each for each in rows_of(app, broker, NOW)}
    assert rows["often"]["following"] == [NOW + timedelta(seconds=240 + 300 * number) for number in range(3)]
    assert rows["often"]["run"] is not None
    assert rows["often"]["last"] is None, "no beat has told of it"
    assert rows["often"]["queue"] == "mails"
    assert [(each.day, each.hour, each.minute) for each in rows["nightly"]["following"]] == [
        (day, 3, 15) for day in (6, 7, 8)
    ]
    assert (rows["nightly"]["run"], rows["nightly"]["queue"]) == (None, "")
    assert rows["broken"]["problem"]
    assert rows["empty"]["problem"]
    page = operator.see("/schedules")
    for text in ("often", "every 5 minutes", "crontab", "not in the history"):
        assert text in page


def test_without_an_app_what_beat_has_told_is_shown(viewer, broker):
    assert "No beat has reported its schedule" in viewer.see("/schedules")
    now_ms = Clock().wall_ms()
    schedule_of(broker).report(
        [
            EntryReport(
                "often", "shop.remind", "every 5 minutes", "mails", now_ms - 60_000, now_ms + 240_000, 7, now_ms, 60.0
            ),
            EntryReport("<b>old</b>", "shop.x", "every hour", "", None, now_ms, 0, now_ms - 86_400_000, 60.0),
        ]
    )
    page = viewer.see("/schedules")
    for text in (
        "often",
        "shop.remind",
        "every 5 minutes",
        "mails",
        "&lt;b&gt;old",
        "gone from beat",
        "fdb web</code>",
    ):
        assert text in page
    assert page.count("<time datetime") == 2, "the last of the one; when the other was last reported"
    assert f"{datetime.fromtimestamp(now_ms / 1000 + 240, UTC):%Y-%m-%d %H:%M:%S} UTC" in page


class OddError(Exception):
    """Of an application."""


class Odd(schedule):
    """As an application may write one."""

    def __init__(self, left):
        super().__init__(60.0)
        self.left = left

    def remaining_estimate(self, last_run_at):
        if isinstance(self.left, Exception):
            raise self.left
        return self.left


def test_a_schedule_that_does_not_look_at_its_last_run_has_one_next_run(app, broker):
    app.conf.beat_schedule = {"odd": {"task": "t", "schedule": Odd(timedelta(hours=1))}}
    (row,) = rows_of(app, broker, datetime.now(UTC))
    assert len(row["following"]) == 1


def test_the_next_runs_are_in_the_zone_of_the_schedule(visit, app, broker):
    """Across the night in which its clocks are set back; and of an entry of which beat tells, if it has that timing."""
    app.conf.timezone = "Europe/Berlin"
    nightly, first = crontab(hour=2, minute=30, app=app), datetime(2026, 10, 24, 0, 30, tzinfo=UTC)
    app.conf.beat_schedule = {name: {"task": "t", "schedule": nightly} for name in ("told", "untold", "other")}
    first_ms = int(first.timestamp() * 1000)
    now = first - timedelta(hours=1)
    told = EntryReport("told", "t", text_of(nightly), "", None, first_ms, 0, int(now.timestamp() * 1000), 60.0)
    schedule_of(broker).report([told, told._replace(name="other", timing="every hour")])
    rows = {each["name"]: each for each in rows_of(app, broker, now)}
    wanted = ["2026-10-24 02:30 CEST", "2026-10-25 02:30 CEST", "2026-10-26 02:30 CET"]
    for name in ("told", "untold"):
        assert [f"{each:%Y-%m-%d %H:%M %Z}" for each in rows[name]["following"]] == wanted
    assert rows["other"]["following"] == [first]
    page = visit(app=app, clock=ManualClock(wall_ms=int(now.timestamp() * 1000))).see("/schedules")
    assert "2026-10-26 02:30:00 CET" in page


@pytest.mark.parametrize(
    ("timing", "problem"),
    [
        (Odd(RuntimeError("never")), "RuntimeError"),
        (Odd(ValueError("no")), "ValueError"),
        (Odd(OddError("no")), "OddError"),
        (Odd(timedelta.max), "OverflowError"),
        (Odd(None), ""),
        (Odd(timedelta(0)), ""),
        (schedule(0.0), ""),
        (schedule(timedelta.max), ""),
    ],
    ids=["never", "raises", "raises its own", "too far", "does not say", "stands still", "always", "too long"],
)
def test_a_schedule_that_does_not_run_again_is_a_row(operator, app, timing, problem):
    app.conf.beat_schedule = {"odd": {"task": "t", "schedule": timing}, "even": {"task": "even.task", "schedule": 60.0}}
    page = operator.see("/schedules")
    assert "even.task" in page
    assert problem in page


@pytest.mark.parametrize("has_app", [True, False])
def test_who_is_gone_and_who_is_silent(app, broker, has_app):
    app.conf.beat_schedule = {"kept": {"task": "t", "schedule": 60.0}, "untold": {"task": "t", "schedule": 60.0}}
    at_ms = int(NOW.timestamp() * 1000)

    def states(age_s):
        told = [EntryReport(name, "t", "", "", None, None, 0, at_ms - age_s * 1000, 60.0) for name in ("kept", "old")]
        schedule_of(broker).report(told)
        return {each["name"]: each["state"] for each in rows_of(app if has_app else None, broker, NOW)}

    untold = {"untold": "configured"} if has_app else {}
    assert states(100) == {"kept": "beat", "old": "beat", **untold}
    assert states(200) == {"kept": "silent", "old": "gone" if has_app else "silent", **untold}
    schedule_of(broker).report([EntryReport("new", "t", "", "", None, None, 0, at_ms, 60.0)])
    found = {each["name"]: each["state"] for each in rows_of(app if has_app else None, broker, NOW)}
    assert found == {"kept": "gone", "old": "gone", "new": "beat", **untold}


def test_an_entry_is_paused_resumed_and_run_from_the_page(operator, visit, app, broker):
    app.conf.beat_schedule = {
        "mine": {"task": "shop.remind", "schedule": 300.0, "args": ("acme",), "options": {"queue": "mails"}},
        "broken": {"task": "shop.x", "schedule": "sometimes"},
    }
    now_ms = Clock().wall_ms()
    names = ("mine", "of a database")
    schedule_of(broker).report(
        [EntryReport(name, "t", "", "", None, now_ms + 9_000, 0, now_ms, 60.0) for name in names]
    )

    def offered(person):
        return re.findall(r'name="action" value="([^"]+)"', person.see("/schedules"))

    assert offered(visit(app=app)) == [], "read-only"
    assert offered(visit(read_only=False)) == ["schedule_pause"] * 2, "without an app"
    assert offered(operator) == ["schedule_pause", "schedule_run", "schedule_pause"]
    page = operator.submit("/act", action="schedule_pause", queue="mine", back="/schedules")
    assert "Paused mine" in page
    assert "not while it is paused" in page
    assert offered(operator) == ["schedule_resume", "schedule_run", "schedule_pause"]
    asked = {"action": "schedule_run", "queue": "mine", "back": "/schedules"}
    assert "Publish the task of mine now" in operator.submit("/act", **asked)
    assert broker.queue("mails").count() == 0, "asked first"
    for _ in range(2):
        assert "Published shop.remind" in operator.submit("/act", **asked, confirmed="yes")
    assert broker.queue("mails").count() == 2, "twice within a tick"
    assert "Resumed mine" in operator.submit("/act", action="schedule_resume", queue="mine", back="/schedules")
    assert schedule_of(broker).paused() == set()
    for name, reason in (("of a database", "does not configure"), ("broken", "could not be published")):
        assert reason in operator.submit("/act", action="schedule_run", queue=name, confirmed="yes", back="/schedules")
