"""What a person asks of running workers by Celery's remote control: of one, or of all about one task.

The request's ``queue`` is the worker's name, as ``worker1@host``, or the task's id. A worker that does not answer in
time is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import states
from kombu.exceptions import OperationalError

from celery_fdb.history.run import ACTIVE, LOST
from celery_fdb.operations.action import Action, Field, Outcome, Request
from celery_fdb.operations.limiting import read_rate
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError, StoreUnavailable
from kombu_fdb.primitives.plural import plural

#: Seconds that it has to answer.
TIMEOUT_S = 2.0
MOST_PROCESSES = 100


def _shutdown(broker: Broker, request: Request) -> Outcome:
    del broker
    _told(request, lambda control, where: control.shutdown(destination=where))
    return Outcome(f"Told {request.queue} to end when it is done with what it runs.")


def _grow(broker: Broker, request: Request) -> Outcome:
    del broker
    by = _number(request)
    return _answered(request, lambda control, where: control.pool_grow(by, where, reply=True, timeout=TIMEOUT_S))


def _shrink(broker: Broker, request: Request) -> Outcome:
    del broker
    by = _number(request)
    return _answered(request, lambda control, where: control.pool_shrink(by, where, reply=True, timeout=TIMEOUT_S))


def _limit(broker: Broker, request: Request) -> Outcome:
    del broker
    task, rate = request.fields.get("task", "").strip(), request.fields.get("rate", "").strip() or "0"
    if not task:
        raise InvalidArgument("a task has a name", fix="Write the name that it has in the workers.")
    if rate != "0":
        read_rate(rate)
    return _answered(
        request, lambda control, where: control.rate_limit(task, rate, where, reply=True, timeout=TIMEOUT_S)
    )


def _quiet(broker: Broker, request: Request) -> Outcome:
    del broker
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


def _revoke(broker: Broker, request: Request) -> Outcome:
    del broker
    answers = _about_task(request, terminate=False)
    return Outcome(f"Revoked {request.queue}: {plural(len(answers), 'worker')} will not begin it.")


def _terminate(broker: Broker, request: Request) -> Outcome:
    del broker
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


def _number(request: Request) -> int:
    text = request.fields.get("by", "").strip()
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= MOST_PROCESSES:
        raise InvalidArgument("not a number of processes", given=text[:20], fix=f"Write 1 to {MOST_PROCESSES}.")
    return int(text)


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


#: Pools whose size can be changed while they run.
RESIZABLE = frozenset({"prefork", "gevent", "eventlet"})


def offered_on_worker(pool: str) -> list[Action]:
    """``pool``: which it has, as Celery's option ``-P``."""
    resizing = ["worker_grow", "worker_shrink"] if pool in RESIZABLE else []
    return [WORKER_ACTIONS[name] for name in (*resizing, "worker_rate", "worker_quiet", "worker_shutdown")]


def offered_on_task(state: str) -> list[Action]:
    """``state``: of its newest run or message; nothing is offered for one that has ended."""
    if state in {*states.READY_STATES, LOST, "dead", states.IGNORED, states.REJECTED}:
        return []
    running = ["task_terminate"] if state in {ACTIVE, "leased"} else []
    return [WORKER_ACTIONS[name] for name in ("task_revoke", *running)]


_BY = (Field("by", "Processes", "number", "How many more or fewer.", "1", required=True),)
WORKER_ACTIONS = {
    each.name: each
    for each in (
        Action("worker_grow", "Grow pool", "Give {target} more processes or threads?", _grow, fields=_BY),
        Action("worker_shrink", "Shrink pool", "Give {target} fewer processes or threads?", _shrink, fields=_BY),
        Action(
            "worker_rate",
            "Rate limit",
            "Limit how often {target} runs a task? It holds until the worker ends.",
            _limit,
            fields=(
                Field("task", "Task", help="Its name, as shop.tasks.charge.", required=True),
                Field("rate", "Rate", help="10/s, 100/m or 1000/h; 0 for no limit.", value="0", required=True),
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
