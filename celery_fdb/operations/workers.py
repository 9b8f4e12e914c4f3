"""Limits of keys, and what a person asks of running workers by Celery's remote control.

A worker is asked alone, or all of them about one task. The request's ``queue`` is the worker's name, as
``worker1@host``, or the task's id. A worker that does not answer in time is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import states
from kombu.exceptions import OperationalError

from celery_fdb.history.run import ACTIVE, LOST
from celery_fdb.inspection.time_formats import limit as written
from celery_fdb.inspection.time_formats import rate_of, seconds_of
from celery_fdb.operations.action import Action, Field, Outcome, Request
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError, StoreUnavailable
from kombu_fdb.model import KeyLimits
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

# -- limits ------------------------------------------------------------------------------------------------------------


FIELDS = (
    Field("weight", "Weight", "number", "Messages per turn."),
    Field("max_in_flight", "In flight", "number", "How many may be leased at a time; empty for no limit."),
    Field("rate", "Rate", "text", "Messages a second across all consumers: 10, 100/m, 1000/h; empty for no limit."),
    Field("burst", "Burst", "number", "How many may be delivered at once within the rate."),
    Field("capacity", "Capacity", "number", "Ready messages before publishing is refused; empty for no limit."),
    Field("priority", "Priority", "number", "0 to 9, for the whole key; empty to use each message's own."),
)
NO_LIMITS = KeyLimits()


def pause(broker: Broker, request: Request) -> Outcome:
    """A queue, or one key of it."""
    broker.queue(request.queue).pause(request.key)
    return Outcome(f"Paused {request}.")


def resume(broker: Broker, request: Request) -> Outcome:
    """The same, delivered again."""
    broker.queue(request.queue).resume(request.key)
    return Outcome(f"Resumed {request}.")


def limits(broker: Broker, request: Request) -> Mapping[str, str]:
    """Those that hold now."""
    found = broker.queue(request.queue).limits(request.key)
    return {each.name: _shown(each.name, getattr(found, each.name)) for each in FIELDS}


def _shown(name: str, value: Any) -> str:
    """What a form shows is what it sets again: a rate as it was written, if that is exact."""
    if name == "rate" and value is not None and rate_of(text := written(value)) == value:
        return text
    return "" if value is None else str(value).removesuffix(".0")


def limit(broker: Broker, request: Request) -> Outcome:
    """All at once, as the form has them: an empty field limits nothing."""
    queue = broker.queue(request.queue)
    changes: Any = {each.name: _read(each.name, request.fields.get(each.name, "").strip()) for each in FIELDS}
    if request.key is None:
        queue.limit_every_key(**changes)
    else:
        queue.limit(request.key, **changes)
    told = ", ".join(f"{name} {_shown(name, value)}" for name, value in changes.items() if value is not None)
    return Outcome(f"Set the limits of {_whose(request)}: {told}.")


def unlimit(broker: Broker, request: Request) -> Outcome:
    """The key has the limits of every key again; every key has none."""
    queue = broker.queue(request.queue)
    if request.key is None:
        nothing: Any = {each.name: getattr(NO_LIMITS, each.name) for each in FIELDS}
        queue.limit_every_key(**nothing)
    else:
        if queue.limits(request.key).paused:  # which stands among them
            raise QueueError("the key is paused", key=request.key, fix="Resume it first, then remove its limits.")
        queue.unlimit(request.key)
    return Outcome(f"Removed the limits of {_whose(request)}.")


def _whose(request: Request) -> str:
    return f"every key of {request.queue}" if request.key is None else str(request)


def _read(name: str, text: str) -> float | int | None:
    if not text:
        default: float | int | None = getattr(NO_LIMITS, name)
        return default
    if name == "rate":
        return read_rate(text)
    if not text.isdecimal() or len(text) > 16:
        raise InvalidArgument(f"{name} must be a whole number", given=shown(text), fix="Write digits only, or nothing.")
    return int(text)


def read_rate(text: str) -> float:
    """Messages a second. Raises ``InvalidArgument``."""
    rate = rate_of(text)
    if rate is None:
        raise InvalidArgument(f"{text[:80]!r} is not a rate", fix="Write one such as 10, 100/m or 1000/h.")
    return rate


# -- workers -----------------------------------------------------------------------------------------------------------


#: Seconds that it has to answer.
TIMEOUT_S = 2.0
MOST_PROCESSES = 100


def _shutdown(_: Broker, request: Request) -> Outcome:
    _told(request, lambda control, where: control.shutdown(destination=where))
    return Outcome(f"Told {request.queue} to end when it is done with what it runs.")


def _grow(_: Broker, request: Request) -> Outcome:
    return _resize(request, "pool_grow")


def _shrink(_: Broker, request: Request) -> Outcome:
    return _resize(request, "pool_shrink")


def _resize(request: Request, verb: str) -> Outcome:
    text = request.fields.get("by", "").strip()
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= MOST_PROCESSES:
        raise InvalidArgument("not a number of processes", given=text[:20], fix=f"Write 1 to {MOST_PROCESSES}.")
    return _answered(
        request, lambda control, where: getattr(control, verb)(int(text), where, reply=True, timeout=TIMEOUT_S)
    )


def _limit(_: Broker, request: Request) -> Outcome:
    task, rate = _task(request), request.fields.get("rate", "").strip() or "0"
    if rate != "0":
        read_rate(rate)
    return _answered(
        request, lambda control, where: control.rate_limit(task, rate, where, reply=True, timeout=TIMEOUT_S)
    )


def _time_limit(_: Broker, request: Request) -> Outcome:
    task, texts = _task(request), [request.fields.get(name, "").strip() for name in ("soft", "hard")]
    soft, hard = (seconds_of(each) if each else None for each in texts)
    if any(each and not seconds for each, seconds in zip(texts, (soft, hard), strict=True)):
        raise InvalidArgument("not a time limit", given=shown(" ".join(texts)), fix="Write a time such as 90s or 10m.")
    return _answered(
        request, lambda control, where: control.time_limit(task, soft, hard, where, reply=True, timeout=TIMEOUT_S)
    )


def _task(request: Request) -> str:
    name = request.fields.get("task", "").strip()
    if not name:
        raise InvalidArgument("a task has a name", fix="Write the name that it has in the workers.")
    return name


def _quiet(_: Broker, request: Request) -> Outcome:
    answers = _told(request, lambda control, where: control.inspect(where, TIMEOUT_S).active_queues()) or {}
    if request.queue not in answers:
        raise QueueError("the worker did not answer", worker=request.queue, fix="Check that it is running.")
    names = [str(each["name"]) for each in answers[request.queue]]
    for name in names:
        _answered(
            request,
            lambda control, where, name=name: control.cancel_consumer(name, where, reply=True, timeout=TIMEOUT_S),  # type: ignore[misc]  # bound in the loop
        )
    told = ", ".join(names) or "nothing, as before"
    return Outcome(f"{request.queue} takes no more tasks; it was taking them from {told}.")


def _revoke(_: Broker, request: Request) -> Outcome:
    answers = _about_task(request, terminate=False)
    return Outcome(f"Revoked {request.queue}: {plural(len(answers), 'worker')} will not begin it.")


def _terminate(_: Broker, request: Request) -> Outcome:
    answers = _about_task(request, terminate=True)
    ended = [name for name, answer in answers.items() if answer.get("ok") == f"terminate: {request.queue}"]
    if not ended:
        return Outcome(f"No worker that answered runs {request.queue} now. None will begin it any more.")
    return Outcome(f"Terminated {request.queue} on {', '.join(sorted(ended))}.")


def _about_task(request: Request, *, terminate: bool) -> dict[str, Mapping[str, Any]]:
    """What each worker answers. Raises ``QueueError`` if one refuses, as a pool of threads does."""
    if not request.queue:
        raise InvalidArgument("a task has an id", fix="Open the task's page, and begin from there.")
    replies = _told(
        request,
        lambda control, _: control.revoke(request.queue, terminate=terminate, reply=True, timeout=TIMEOUT_S),
    )
    found = {str(name): each for reply in replies or [] for name, each in reply.items() if isinstance(each, Mapping)}
    for name, answer in found.items():
        if "error" in answer:
            fix = "Only a pool of processes or greenlets can end a task."
            raise QueueError("the worker refused", worker=name, reason=str(answer["error"])[:500], fix=fix)
    return found


def _answered(request: Request, call: Callable[[Any, list[str]], Any]) -> Outcome:
    """What the worker answers. Raises ``QueueError`` if that is an error, or nothing."""
    replies = _told(request, call)
    for each in replies or []:
        answer = each.get(request.queue) if isinstance(each, Mapping) else None
        if isinstance(answer, Mapping) and "ok" in answer:
            return Outcome(f"{request.queue}: {answer['ok']}.")
        if isinstance(answer, Mapping):
            raise QueueError("the worker refused", worker=request.queue, reason=str(answer.get("error", answer))[:500])
    raise QueueError("the worker did not answer", worker=request.queue, fix="Check that it is running.")


def _told(request: Request, call: Callable[[Any, list[str]], Any]) -> Any:
    if request.app is None:
        raise QueueError("no Celery app is known here", fix=request.fix_app or None)
    try:
        return call(request.app.control, [request.queue])
    except OperationalError as error:
        raise StoreUnavailable("the worker could not be told", reason=str(error)) from error


#: Pools whose size can be changed while they run, and those that hold tasks to both time limits.
RESIZABLE = frozenset({"prefork", "gevent", "eventlet"})
LIMITING = frozenset({"prefork"})


def offered_on_worker(pool: str) -> list[Action]:
    """``pool``: which it has, as Celery's option ``-P``."""
    resizing = ["worker_grow", "worker_shrink"] if pool in RESIZABLE else []
    limiting = ["worker_time_limit"] if pool in LIMITING else []
    names = (*resizing, *limiting, "worker_rate", "worker_quiet", "worker_shutdown")
    return [WORKER_ACTIONS[name] for name in names]


def offered_on_task(state: str) -> list[Action]:
    """``state``: of its newest run or message; nothing is offered for one that has ended."""
    if state in {*states.READY_STATES, LOST, "dead", states.IGNORED, states.REJECTED}:
        return []
    running = ["task_terminate"] if state in {ACTIVE, "leased"} else []
    return [WORKER_ACTIONS[name] for name in ("task_revoke", *running)]


_TASK = Field("task", "Task", "task", "Its name, as shop.tasks.charge.", required=True)
_BY = (Field("by", "Processes", "number", "How many more or fewer.", "1", required=True),)
WORKER_ACTIONS = {
    each.name: each
    for each in (
        Action("worker_grow", "Grow pool", "Give {target} more processes or greenlets?", _grow, fields=_BY),
        Action("worker_shrink", "Shrink pool", "Give {target} fewer processes or greenlets?", _shrink, fields=_BY),
        Action(
            "worker_rate",
            "Rate limit",
            "Limit how often {target} runs a task? It holds until the worker ends.",
            _limit,
            fields=(
                _TASK,
                Field("rate", "Rate", help="10/s, 100/m or 1000/h; 0 for no limit.", value="0", required=True),
            ),
        ),
        Action(
            "worker_time_limit",
            "Time limits",
            "Limit how long {target} lets a task run? It holds from its next run on, until the worker ends.",
            _time_limit,
            fields=(
                _TASK,
                Field(
                    "soft", "Soft limit", help="Raises SoftTimeLimitExceeded: 90s, 10m, 2h; empty for the worker's own."
                ),
                Field("hard", "Hard limit", help="Ends the process that runs it; empty for the worker's own."),
            ),
        ),
        Action(
            "worker_quiet",
            "Take no more",
            "Stop {target} from taking tasks? It finishes those that it has, and takes none until it is started anew.",
            _quiet,
        ),
        Action(
            "worker_shutdown",
            "Shut down",
            "End {target}? It finishes what it runs; nothing is lost, and it does not start again unless a service "
            "manager does.",
            _shutdown,
            destroys=True,
        ),
        Action(
            "task_revoke",
            "Revoke",
            "Tell all workers not to begin {target}? One that runs it goes on. With celery_fdb.install, what waits of "
            "it is deleted, too.",
            _revoke,
            destroys=True,
        ),
        Action(
            "task_terminate",
            "Terminate",
            "End {target} where it runs, with a signal to its process? What it has done so far stays done.",
            _terminate,
            destroys=True,
        ),
    )
}
