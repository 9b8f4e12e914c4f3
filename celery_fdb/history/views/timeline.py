"""One task's whole life: published, delayed, leased, run, retried, done.

The sources are the task's messages that are in the broker now, its runs in the history and, with an application, the
state in its result backend. Once a message is gone, its runs still say when it was published and due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from kombu.serialization import prepare_accept_content

from celery_fdb.history.run import ACTIVE, LOST, PUBLISHED, bounded
from celery_fdb.history.store import HistoryStore
from celery_fdb.history.views.runs import HistoryOff, RunView, history_of
from celery_fdb.inspection import formats
from celery_fdb.inspection.message import describe, reason_of
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.keyspace.codec import headers_of
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.primitives.ranges import LATEST_MS, is_whole

#: Newest runs of one task that are shown.
MOST_RUNS = 100
#: Characters of a result that are shown.
MOST_OF_VALUE = 10_000
ENDS = {
    states.SUCCESS: "succeeded",
    states.FAILURE: "failed",
    states.RETRY: "retried",
    states.REVOKED: "revoked",
    states.REJECTED: "rejected",
    states.IGNORED: "ignored",
    LOST: "ended with its worker",
}


class TaskUnknown(KombuFDBError):
    """Neither the broker nor the history nor the result backend knows the task."""

    text = "nothing is known of this task"

    @classmethod
    def of(cls, task_id: str, history: HistoryStore) -> TaskUnknown:
        """The error for this task id, with what to do about it."""
        missing = "" if history.settings() is not None else f" {HistoryOff.text.capitalize()}. {HistoryOff.fix}"
        return cls(task_id=task_id, fix=f"Check the id.{missing}")


@dataclass(frozen=True, slots=True)
class Event:
    """``moment``: seconds since 1970. ``what``: published, due, leased, died, started, succeeded, retried, ..."""

    moment: float
    what: str
    about: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """``state``: the newest known one. ``messages``: as ``describe`` returns them.

    ``result``: the state of the result; ``value``: the result's ``repr``, with secrets masked.
    """

    task_id: str
    task: str
    state: str
    events: list[Event]
    runs: list[RunView]
    messages: list[dict[str, Any]] = field(default_factory=list)
    result: str | None = None
    value: str = ""
    history: bool = True


def timeline_of(broker: Broker, task_id: str, app: Any = None) -> Timeline:
    """The life of a task. ``app``: for the state of its result. Raises :class:`TaskUnknown`."""
    history = history_of(broker)
    found = [each.message for each in broker.spots(task_id)]
    messages = [describe(each) for each in found]
    runs = [RunView.of(run) for run in history.runs_of_task(task_id, limit=MOST_RUNS)]
    runs += [RunView.of(run) for _, run in history.active() if run.id == task_id]
    kept = history.settings() is not None
    result, value = (None, "") if app is None else _result(app, task_id)
    if not (messages or runs or result):
        raise TaskUnknown.of(task_id, history)
    events = [event for each, seen in zip(found, messages, strict=True) for event in _of_message(each, seen)]
    events += [event for each in runs for event in _of_run(each)]
    events = sorted(dict.fromkeys(events), key=lambda event: event.moment)
    names = [each.task for each in runs] + [str(each["task"]) for each in messages if each["task"]]
    state = _state(messages, runs, result)
    return Timeline(task_id, names[-1] if names else "", state, events, runs, messages, result, value, kept)


def _of_message(peeked: Peeked, message: dict[str, Any]) -> Iterator[Event]:
    key = f", key {message['key']}" if message["key"] else ""
    where = f"in {message['queue']}{key}"
    deaths = message["deaths"]  # deaths are newest first; a dead letter was published to the queue of its first death
    told_ms: Any = headers_of(peeked.payload).get(PUBLISHED)
    published = told_ms / 1000 if is_whole(told_ms, 1, LATEST_MS) else message["published"]
    yield Event(published, "published", f"in {deaths[-1]['queue']}{key}" if deaths else where)
    if message["due"]:
        yield Event(message["due"], "due", where)
    for death in message["deaths"]:
        yield Event(death["time"], "died", f"in {death['queue']}: {reason_of(death['reason'], death['details'])}")


def _of_run(run: RunView) -> Iterator[Event]:
    where = f"in {run.queue}{f', key {run.key}' if run.key else ''}"
    if run.published is not None:
        yield Event(run.published, "published", where)
    if run.due is not None:
        yield Event(run.due, "due", where)
    attempt = f"attempt {run.attempt}" + (f", delivered {run.redeliveries + 1} times" if run.redeliveries else "")
    if run.started is not None:
        yield Event(run.started, "started", f"{attempt}, by {run.worker} from {run.queue}")
    if run.ended is not None:
        error = f"{run.error_class}: {run.error}" if run.error_class else run.error
        after = "" if run.runtime_s is None else f"after {formats.took(run.runtime_s)}"
        yield Event(run.ended, ENDS[run.state], " ".join(filter(None, (after, error))))


def _state(messages: list[dict[str, Any]], runs: list[RunView], result: str | None) -> str:
    """The task's state: that of an active run, else of a message in the broker, else of the last run or result."""
    active = [each for each in runs if each.state == ACTIVE]
    if active:
        return ACTIVE
    if messages:
        last: dict[str, Any] = messages[-1]
        return "dead" if last["deaths"] and last["queue"].endswith(DEAD_SUFFIX) else str(last["state"])
    return runs[-1].state if runs else str(result)


def _without_pickle(backend: Any) -> Any:
    """Like the application's, but it never unpickles: a look runs no code that a result holds."""
    accept = getattr(backend, "accept", None)
    if not accept:
        return backend
    careful = object.__new__(type(backend))  # copy() would make a backend of whatever application is current
    careful.__dict__.update(backend.__dict__)
    careful.accept = frozenset(accept) - prepare_accept_content(["pickle"])
    careful._cache = {}  # the copied one may hold results that were unpickled
    return careful


def _result(app: Any, task_id: str) -> tuple[str | None, str]:
    """The result's state, None if unknown, or the error of the backend; and its value, if it has one."""
    if isinstance(app.backend, DisabledBackend):
        return None, ""
    try:
        found = app.AsyncResult(task_id, backend=_without_pickle(app.backend))
        state = str(found.state)
        value = bounded(masked_text(repr(found.result)), MOST_OF_VALUE) if state in states.READY_STATES else ""
    except Exception as error:  # noqa: BLE001 - each result backend has classes of its own
        return f"unknown: {type(error).__name__}", ""
    return (None, "") if state == states.PENDING else (state, value)
