"""Runs as people see them: from a broker to its history, a page with filters, and what is active now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from celery_fdb.history.reading import Cursor, Wanted
from celery_fdb.history.run import STATES, Run
from celery_fdb.history.store import HistoryStore
from kombu_fdb import Broker, KombuFDBError
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.clock import SystemClock

FIX = "Call celery_fdb.install(app, history=True) where the app is made, and restart the workers."


class HistoryOff(KombuFDBError):
    """No worker of this broker has ever kept a history."""

    text = "history is off"


def history_of(broker: Broker) -> HistoryStore:
    """Whether or not there is one."""
    timeout_s = broker.options.operation_timeout
    return HistoryStore(broker.database, broker.location.namespace, clock=SystemClock(), timeout_s=timeout_s)


def kept_by(broker: Broker) -> HistoryStore:
    """Raises :class:`HistoryOff`."""
    store = history_of(broker)
    if store.settings() is None:
        raise HistoryOff(fix=FIX)
    return store


#: Of one page.
MOST_RUNS = 500


@dataclass(frozen=True, slots=True)
class RunView:
    """One run. Moments in seconds since 1970 by the worker's clock, None for never. "" is none, as in the store.

    ``alive``: of an active run, whether its worker still has a session; a run without one is lost, and soon shown so.
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


@dataclass(frozen=True, slots=True)
class RunsPage:
    """``cursor``: for the next page, None at the end. A page may have few runs, or none, and a cursor all the same."""

    runs: list[RunView]
    cursor: str | None


def view(run: Run) -> RunView:
    """What is stored, and nothing else."""
    return RunView(
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
        args=run.args,
        kwargs=run.kwargs,
        error_class=run.error_class,
        error=run.error,
        traceback=run.traceback,
        root=run.root or run.id,
        parent=run.parent,
        group=run.group,
    )


def page_of_runs(
    broker: Broker, wanted: Wanted | None = None, *, limit: int = 50, cursor: str | None = None
) -> RunsPage:
    """Runs that have ended, the newest first (``reading.py``); at a bounded cost, whatever is wanted.

    Raises ``InvalidArgument`` for a state or cursor that is none, and ``HistoryOff``.
    """
    wanted = wanted or Wanted()
    if wanted.state and wanted.state not in STATES:
        raise InvalidArgument("not a state of a run", given=wanted.state[:80], fix=f"It is one of {', '.join(STATES)}.")
    after = Cursor.parse(cursor) if cursor else None
    found = kept_by(broker).page(wanted, limit=min(max(limit, 1), MOST_RUNS), after=after)
    return RunsPage([view(run) for run in found.runs], None if found.cursor is None else str(found.cursor))


def active_runs(broker: Broker, wanted: Wanted | None = None, *, limit: int = 500) -> list[RunView]:
    """Runs that have begun and not ended, the longest first: those that a flush, about once a second, has seen.

    A task that takes less than a second may not be among them. Raises ``HistoryOff``.
    """
    rows = kept_by(broker).active(limit=limit)
    open_ = {bytes(each.session_id) for each in broker.inspect.sessions() if each.open} if rows else set()
    wanted = (wanted or Wanted())._replace(state="", since_ms=0, until_ms=0)
    found = [replace(view(run), alive=session in open_) for session, run in rows if wanted.matches(run)]
    return sorted(found, key=lambda each: each.started or 0)
