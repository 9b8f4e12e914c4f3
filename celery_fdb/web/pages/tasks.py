"""``/tasks``, ``/runs`` and ``/task``: numbers by task, what ran, and one task's whole life.

They need the history (``celery_fdb.install(app, history=True)``), and say so where there is none.
"""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.history.layout import ERROR
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import ACTIVE, STATES
from celery_fdb.history.views.runs import DAY_S, HOUR_S, HistoryOff, RunsPage, active_runs, look_at_tasks, page_of_runs
from celery_fdb.history.views.timeline import TaskUnknown, Timeline, timeline_of
from celery_fdb.inspection.filters import Filter
from celery_fdb.inspection.message import view_of
from celery_fdb.inspection.overview import look
from celery_fdb.operations.actions import offered
from celery_fdb.operations.workers import offered_on_task
from celery_fdb.web.visit import MOST_SHOWN, Visit, known
from kombu_fdb import Broker
from kombu_fdb.engine.messages.message import MOST_OF_TASK

PERIODS = {"hour": HOUR_S, "day": DAY_S}
FILTERS = ("task", "state", "key", "queue", "worker", "since", "until", "arguments")
#: Of a session's id, by which it is found.
SESSION_DIGITS = 12
#: Of a state or a filter; longer ones match nothing.
LONGEST = 200


def tasks(visit: Visit, broker: Broker) -> Response:
    """The busiest first."""
    period = visit.asked("period", "hour")
    try:
        seen = look_at_tasks(broker, period_s=PERIODS.get(period, HOUR_S), clock=visit.settings.clock)
    except HistoryOff:
        return visit.page("no_history", title="Tasks", here="tasks")
    shown = seen.tasks[:MOST_SHOWN]
    return visit.page("tasks", seen=seen, shown=shown, period=period, periods=list(PERIODS), error=ERROR)


def runs(visit: Visit, broker: Broker) -> Response:
    """Those that have ended, the newest first, or those that are active, the longest first."""
    given = {name: visit.asked(name)[:LONGEST] for name in FILTERS}
    ended = Filter.of({name: given[name] for name in ("since", "until")}, visit.zone)
    task, state, key, queue, worker = (given[name] for name in FILTERS[:5])
    arguments = visit.asked_arguments()[:LONGEST]
    wanted = Wanted(task, state, key, queue, worker, ended.since_ms or 0, ended.until_ms or 0, arguments)
    try:
        if wanted.state == ACTIVE:
            found = RunsPage(active_runs(broker, wanted), None)
        else:
            size, cursor = visit.settings.page_size, visit.asked("cursor") or None
            found = page_of_runs(broker, wanted, limit=size, cursor=cursor)
    except HistoryOff:
        return visit.page("no_history", title="Runs", here="tasks")
    kept = {name: value for name, value in given.items() if value}
    choices = {
        "task": visit.tasks(*(each.task for each in found.runs)),
        **{name: known(getattr(each, name) for each in found.runs) for name in ("key", "queue", "worker")},
    }
    return visit.page("runs", found=found, wanted=wanted, given=given, kept=kept, states=STATES, choices=choices)


def task(visit: Visit, broker: Broker) -> Response:
    """Where its messages are, its runs, and what became of it; without an id, the way to one.

    The id of a session leads to it, as does its beginning in which the command line shows it.
    """
    task_id = visit.asked("id").strip()
    life = _life(visit, broker, task_id) if task_id else None
    now_ms = visit.settings.clock.wall_ms()
    rows = [view_of(each, now_ms) for each in broker.spots(task_id)] if task_id else []
    if life is None and not rows and len(task_id) >= SESSION_DIGITS:
        for each in look(broker, queues=()).sessions:
            if each.id.startswith(task_id):
                return visit.redirect(f"{visit.url('sessions')}#{each.id}")
    return visit.page(
        "task",
        id=task_id,
        life=life,
        rows=rows,
        most=MOST_OF_TASK,
        offered=lambda row: visit.allowed(offered(row.message.queue, [row])),
        offered_on_task=offered_on_task,
    )


def _life(visit: Visit, broker: Broker, task_id: str) -> Timeline | None:
    try:
        return timeline_of(broker, task_id, visit.settings.app)
    except TaskUnknown:
        return None
