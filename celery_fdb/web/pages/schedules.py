"""``/schedules``: the entries of beat's schedule, with when each ran last and runs next.

Entries have two sources: the reports of a beat that runs ``celery_fdb.beat.Scheduler`` and, with an app, the app's
configuration. The last run of an entry that no beat has reported is the last run of its task in the history, whether or
not beat published it; the next run is computed from it as beat would. Later runs are computed from the app's
configuration, if beat reports the same timing.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule
from starlette.responses import Response

from celery_fdb.history.reading import Wanted
from celery_fdb.history.views.runs import HistoryOff, RunView, page_of_runs
from celery_fdb.inspection import formats
from celery_fdb.inspection.schedules import BROKEN, EntryReport, configured, entry_of, queue_of, schedule_of, text_of
from celery_fdb.operations.action import Action
from celery_fdb.operations.catalogue import named
from celery_fdb.web.request_context import RequestContext
from kombu_fdb import Broker

#: Entries that are shown, and tasks whose last run is looked up.
MOST_ENTRIES, MOST_TASKS = 500, 50
#: A beat whose report is late by this factor is silent.
LATE = 3
#: Next runs that are shown, in whole seconds.
MOST_FOLLOWING, SECOND = 3, timedelta(seconds=1)

#: The last run of a task in the history.
LastRun = Callable[[str], RunView | None]


def schedules(context: RequestContext, broker: Broker) -> Response:
    """The page of schedules, by name."""
    app = context.settings.app
    rows = rows_of(app, broker, formats.moment(context.settings.clock.wall_ms()))
    return context.page("schedules", rows=rows, has_app=app is not None, most=MOST_ENTRIES)


def rows_of(app: Celery | None, broker: Broker, now: datetime) -> list[dict[str, Any]]:
    """The entries as the page shows them. ``now``: with a time zone.

    ``timing``: as Celery writes it. ``problem``: why nothing else is known of the entry. ``last``: when beat published
    it last; ``run``: the last run of its task in the history. ``heard``: when a beat reported it last. ``following``:
    its next runs, in the zone of its schedule. ``state``: *beat* has it, beat is *silent*, it is *gone* from beat's
    schedule, or it is *configured* and no beat has reported it.
    """
    written = {} if app is None else configured(app)
    store = schedule_of(broker)
    reports, paused = {each.name: each for each in store.reports()}, store.paused()
    last_run = _last_runs(broker)
    heard = any(_is_heard(each, now) for each in reports.values())
    names = sorted({*written, *reports})[:MOST_ENTRIES]
    rows = []
    for name in names:
        if name in reports:
            timing = _timing(app, reports[name], written.get(name))
            gone = heard or (app is not None and name not in written)
            row = _reported(reports[name], timing, last_run, now, gone=gone)
        else:
            row = _configured(app, name, written[name], last_run, now)
        if name in paused:
            row["following"] = []
        actions = _offered(row, paused=name in paused, configured=name in written)
        rows.append({**row, "name": name, "paused": name in paused, "actions": actions})
    return rows


def _offered(row: dict[str, Any], *, paused: bool, configured: bool) -> list[Action]:
    """The actions on a row. To pause it, a beat must have reported it; to run it, the app must configure it."""
    pausing = ["schedule_resume"] if paused else ["schedule_pause"] if row["state"] in {"beat", "silent"} else []
    return named(*pausing, *(["schedule_run"] if configured and not row["problem"] else []))


def _last_runs(broker: Broker) -> LastRun:
    """A function that finds the last run of a task. It reads each task once, and no more than :data:`MOST_TASKS`."""
    known: dict[str, RunView | None] = {}

    def last(task: str) -> RunView | None:
        if task not in known and len(known) < MOST_TASKS:
            try:
                found = page_of_runs(broker, Wanted(task=task), limit=1).runs
            except HistoryOff:
                found = []
            known[task] = found[0] if found else None
        return known.get(task)

    return last


# -- what beat has reported --------------------------------------------------------------------------------------------


def _timing(app: Celery | None, report: EntryReport, written: Any) -> Any:
    """The timing in the app's configuration, if beat reports the same; else None."""
    try:
        timing = None if written is None else entry_of(app, report.name, written).schedule
        return timing if timing is not None and text_of(timing) == report.timing else None
    except BROKEN:
        return None


def _reported(report: EntryReport, timing: Any, last_run: LastRun, now: datetime, *, gone: bool) -> dict[str, Any]:
    """The row of a reported entry. ``gone``: whether an entry without a recent report is gone; else beat is silent."""
    state = "beat" if _is_heard(report, now) else "gone" if gone else "silent"
    last, first = (None if each is None else formats.moment(each) for each in (report.last_ms, report.next_ms))
    return {
        "task": report.task,
        "timing": report.timing,
        "queue": report.queue,
        "last": last,
        "run": last_run(report.task),
        "following": _from(timing, first) if state == "beat" else [],
        "state": state,
        "heard": formats.moment(report.reported_ms),
        "problem": "",
    }


def _is_heard(report: EntryReport, now: datetime) -> bool:
    return (now - formats.moment(report.reported_ms)).total_seconds() <= LATE * report.again_s


# -- what is configured ------------------------------------------------------------------------------------------------


def _configured(app: Celery | None, name: str, written: Any, last_run: LastRun, now: datetime) -> dict[str, Any]:
    row = {"state": "configured", "heard": None, "last": None, "problem": ""}
    try:
        entry = entry_of(app, name, written)
        task, timing = str(entry.task), entry.schedule
        run = last_run(task)
        return {
            **row,
            "task": task,
            "timing": text_of(timing),
            "queue": queue_of(entry),
            "run": run,
            "following": _from(timing, _first(timing, run, now)),
        }
    except BROKEN as error:
        return {**row, "problem": f"{type(error).__name__}: {error}"}


# -- next runs ---------------------------------------------------------------------------------------------------------


def _first(timing: Any, last: RunView | None, now: datetime) -> datetime | None:
    """When an entry runs next: an interval, one interval after its last run; None if that is unknown."""
    if type(timing) is not schedule:
        return _after(timing, now)
    if last is None or last.started is None:
        return None
    return max(_after(timing, formats.moment(last.started * 1000)) or now, now)


def _after(timing: Any, last: datetime) -> datetime | None:
    """When the entry runs next after a run at that moment."""
    if type(timing) is schedule:
        interval: timedelta = timing.run_every
        return last + interval
    if isinstance(timing, crontab):
        start, distance, _ = timing.remaining_delta(last.astimezone(timing.tz))  # before 5.7, Celery takes any zone's
        following: datetime = start + distance
        return following
    left: Any = timing.remaining_estimate(timing.maybe_make_aware(last))
    return timing.maybe_make_aware(timing.now()) + left if isinstance(left, timedelta) else None


def _from(timing: Any, first: datetime | None) -> list[datetime]:
    """The first run and later ones, in the schedule's zone; only the first, in UTC, if the timing is unknown."""
    found = [] if first is None else [first.astimezone(UTC)]
    try:
        while timing is not None and found and len(found) < MOST_FOLLOWING:
            later = _after(timing, found[-1])
            if later is None or later.astimezone(UTC) - found[-1] < SECOND:
                break  # a schedule that does not look at its last run has no further moments
            found.append(later.astimezone(UTC))
        return [each.astimezone(timing.tz) for each in found] if timing is not None else found
    except BROKEN:
        return found
