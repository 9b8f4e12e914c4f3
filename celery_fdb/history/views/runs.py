"""Runs as people see them: pages of runs with filters, and the numbers of each task.

Numbers of a task are of the last hour or days: rate, failures, runtimes. Read from counters, never from the runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from celery_fdb.history.layout import SLOTS, Counters
from celery_fdb.history.reading import Cursor, Wanted
from celery_fdb.history.run import ACTIVE, ENDED, STATES, Run
from celery_fdb.history.store import HistoryStore
from celery_fdb.inspection.message import error_line
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import masked_text

# -- runs --------------------------------------------------------------------------------------------------------------


class HistoryOff(KombuFDBError):
    """No worker of this broker has ever kept a history."""

    text = "no worker has kept a history yet"
    fix = "Call celery_fdb.install(app, history=True) where the app is made, and restart the workers."


def history_of(broker: Broker) -> HistoryStore:
    """The history of a broker, whether or not one is kept."""
    timeout_s = broker.options.operation_timeout
    return HistoryStore(broker.database, broker.location.namespace, clock=Clock(), timeout_s=timeout_s)


def kept_by(broker: Broker) -> HistoryStore:
    """The history of a broker. Raises :class:`HistoryOff`."""
    store = history_of(broker)
    if store.settings() is None:
        raise HistoryOff(fix=HistoryOff.fix)
    return store


#: The most runs of one page.
MOST_RUNS = 500


@dataclass(frozen=True, slots=True)
class RunView:
    """One run. Moments in seconds since 1970 by the worker's clock, None for never. "" is none, as in the store.

    ``alive``: whether the worker of an active run still has a session. A run without one is lost, and soon stored so.
    """

    id: str
    task: str
    state: str
    queue: str
    worker: str
    key: str
    published: float | None
    due: float | None
    started: float | None
    ended: float | None
    runtime_s: float | None
    attempt: int
    redeliveries: int
    args: str
    kwargs: str
    error_class: str
    error: str
    traceback: str
    root: str
    parent: str
    group: str
    alive: bool | None = None

    @classmethod
    def of(cls, run: Run) -> RunView:
        """The view of a stored run, with secrets masked."""
        return cls(
            id=run.id,
            task=run.task,
            state=run.state,
            queue=run.queue,
            worker=run.worker,
            key=run.key,
            published=run.published_ms / 1000 or None,
            due=run.due_ms / 1000 or None,
            started=run.start_ms / 1000 or None,
            ended=run.end_ms / 1000 or None,
            runtime_s=run.runtime_s,
            attempt=run.attempt,
            redeliveries=run.redeliveries,
            args=masked_text(run.args),
            kwargs=masked_text(run.kwargs),
            error_class=run.error_class,
            error=masked_text(run.error),
            traceback=masked_text(run.traceback),
            root=run.root or run.id,
            parent=run.parent,
            group=run.group,
        )

    @property
    def said(self) -> str:
        """The error's class and text, in one line that fits into a table; "" for none."""
        return error_line({"error_class": self.error_class, "error": self.error})


@dataclass(frozen=True, slots=True)
class RunsPage:
    """``cursor``: for the next page, None at the end. A page may have few runs, or none, and a cursor all the same."""

    runs: list[RunView]
    cursor: str | None


def page_of_runs(
    broker: Broker, wanted: Wanted | None = None, *, limit: int = 50, cursor: str | None = None
) -> RunsPage:
    """Runs that have ended, the newest first (``reading.py``); at a bounded cost, whatever the filter.

    With the state STARTED: :func:`active_runs`, all on one page. Their rows are ordered by session, so a first page of
    ``limit`` rows could miss the longest. Raises ``InvalidArgument`` for an unknown state or an invalid cursor, and
    ``HistoryOff``.
    """
    wanted = wanted or Wanted()
    if wanted.state and wanted.state not in STATES:
        raise InvalidArgument("not a state of a run", given=wanted.state[:80], fix=f"It is one of {', '.join(STATES)}.")
    after = Cursor.parse(cursor) if cursor else None
    if wanted.state == ACTIVE:
        return RunsPage(active_runs(broker, wanted), None)
    runs, following = kept_by(broker).page(wanted, limit=min(max(limit, 1), MOST_RUNS), after=after)
    return RunsPage([RunView.of(run) for run in runs], None if following is None else str(following))


def active_runs(broker: Broker, wanted: Wanted | None = None, *, limit: int = MOST_RUNS) -> list[RunView]:
    """Runs that have begun and not ended, the longest first.

    Workers store them about once a second, so a task that takes less may be missing. Raises ``HistoryOff``.
    """
    rows = kept_by(broker).active(limit=limit)
    open_ = {bytes(each.session_id) for each in broker.inspect.sessions() if each.open} if rows else set()
    wanted = (wanted or Wanted())._replace(state="", since_ms=0, until_ms=0)
    found = [replace(RunView.of(run), alive=session in open_) for session, run in rows if wanted.matches(run)]
    return sorted(found, key=lambda each: each.started or 0)


# -- by task -----------------------------------------------------------------------------------------------------------


HOUR_S, DAY_S = 3_600, 86_400


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task. ``states``: runs by how they ended. Quantiles are at most 5 % off; None without runs."""

    task: str
    runs: int
    per_second: float
    failures: int
    failure_share: float
    states: dict[str, int]
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class TasksView:
    """``seconds``: the length of the period, which begins with a whole slot and ends now."""

    seconds: float
    tasks: list[TaskView]


#: When a slot begins, when it ends or how far it is, and the counters of all tasks in it; None if no run ended.
Slot = tuple[float, float, Counters | None]


def look_at_tasks(
    broker: Broker, *, period_s: int = HOUR_S, task: str | None = None, clock: Clock | None = None
) -> TasksView:
    """The numbers of every task, the busiest first, or of one. Slots of five minutes for an hour, of an hour for more.

    Raises ``HistoryOff``.
    """
    length_s, begin_s, now_s = _period(period_s, clock)
    by_task: dict[str, Counters] = defaultdict(Counters)
    for _, name, counted in kept_by(broker).slots(length_s, begin_s, int(now_s) + 1):
        if task is None or name == task:
            by_task[name] = by_task[name].plus(counted)
    seconds = max(now_s - begin_s, 1.0)
    tasks = [_task(name, counted, seconds) for name, counted in by_task.items()]
    return TasksView(seconds, sorted(tasks, key=lambda each: (-each.runs, each.task)))


def look_at_series(broker: Broker, *, period_s: int = HOUR_S, clock: Clock | None = None) -> list[Slot]:
    """The counters of all tasks together, slot by slot, the oldest first. Raises ``HistoryOff``."""
    length_s, begin_s, now_s = _period(period_s, clock)
    found = kept_by(broker).series(length_s, begin_s, int(now_s) + 1)
    begins = range(begin_s, int(now_s) + 1, length_s)
    return [(each, min(each + length_s, now_s), found.get(each)) for each in begins]


def _period(period_s: int, clock: Clock | None) -> tuple[int, int, float]:
    """The length of a period's slots, when the period begins, and now."""
    now_s = (clock or Clock()).wall_ms() / 1000
    length_s = min(each for each, kept_s in SLOTS.items() if period_s < kept_s or each == max(SLOTS))
    return length_s, int(now_s - period_s) // length_s * length_s, now_s


def _task(name: str, counted: Counters, seconds: float) -> TaskView:
    failures, timed = counted.failed, sum(counted.buckets)
    return TaskView(
        task=name,
        runs=counted.runs,
        per_second=counted.runs / seconds,
        failures=failures,
        failure_share=failures / counted.runs if counted.runs else 0.0,
        states={state: counted.of(state) for state in ENDED if counted.of(state)},
        mean_s=counted.runtime_us / 1e6 / timed if timed else None,
        p50_s=counted.quantile_s(0.5),
        p95_s=counted.quantile_s(0.95),
    )
