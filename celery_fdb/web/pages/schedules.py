"""``/schedules``: the entries of beat's schedule in the app, with when each ran last and runs next.

Beat keeps the times of its last runs in a file of its own. So the last run is that of the entry's task in the history,
whoever has published it, and the next one follows from it as beat would compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from celery import Celery
from celery.beat import ScheduleEntry
from celery.exceptions import ImproperlyConfigured
from celery.schedules import crontab, schedule
from starlette.responses import Response

from celery_fdb.history.reading import Wanted
from celery_fdb.history.views.opening import HistoryOff
from celery_fdb.history.views.runs import RunView, page_of_runs
from celery_fdb.inspection.moments import moment
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

__all__ = ["schedules"]

#: Entries that are shown, and tasks whose last run is looked up.
MOST_ENTRIES, MOST_TASKS = 500, 50


class Row(NamedTuple):
    """``timing``: as Celery writes it. ``problem``: why there is no more to say of the entry."""

    name: str
    task: str = ""
    timing: str = ""
    queue: str = ""
    last: RunView | None = None
    following: datetime | None = None
    problem: str = ""


def schedules(visit: Visit, broker: Broker) -> Response:
    """By name."""
    app = visit.settings.app
    rows = None if app is None else rows_of(app, broker, moment(visit.settings.clock.wall_ms()))
    scheduler = "" if app is None else str(app.conf.beat_scheduler)
    return visit.page("schedules", rows=rows, scheduler=scheduler)


def rows_of(app: Celery, broker: Broker, now: datetime) -> list[Row]:
    """Each entry. ``now``: with a time zone."""
    configured = app.conf.beat_schedule or {}
    last: dict[str, RunView | None] = {}
    return [_row(app, broker, str(name), configured[name], last, now) for name in list(configured)[:MOST_ENTRIES]]


def _row(app: Celery, broker: Broker, name: str, told: Any, last: dict[str, RunView | None], now: datetime) -> Row:
    try:
        entry = ScheduleEntry(**{**told, "name": name, "app": app}) if isinstance(told, Mapping) else told
        task, timing = str(entry.task), entry.schedule
        if task not in last:
            last[task] = _last_run(broker, task) if len(last) < MOST_TASKS else None
        queue = str((entry.options or {}).get("queue", ""))
        return Row(name, task, _text(timing), queue, last[task], _following(timing, last[task], now))
    except (ImproperlyConfigured, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        return Row(name, problem=f"{type(error).__name__}: {error}")


def _last_run(broker: Broker, task: str) -> RunView | None:
    try:
        found = page_of_runs(broker, Wanted(task=task), limit=1).runs
    except HistoryOff:
        return None
    return found[0] if found else None


def _following(timing: Any, last: RunView | None, now: datetime) -> datetime | None:
    """An interval runs next one interval after its last run; if that is not known, neither is this."""
    if type(timing) is schedule:
        if last is None or last.started is None:
            return None
        interval: timedelta = timing.run_every
        return max(moment(last.started * 1000) + interval, now)
    if isinstance(timing, crontab):
        start, distance, _ = timing.remaining_delta(timing.maybe_make_aware(now))
        following: datetime = start + distance
        return following
    found: Any = timing.remaining_estimate(timing.maybe_make_aware(now))
    return now + found if isinstance(found, timedelta) else None


def _text(timing: Any) -> str:
    text = str(getattr(timing, "human_seconds", "") or timing)
    return f"every {text}" if type(timing) is schedule else text.removeprefix("<").removesuffix(">")
