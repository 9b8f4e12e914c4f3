"""What a person asks of a running worker by Celery's remote control: to shut down, resize its pool, or limit a rate.

The request's ``queue`` is the worker's name, as ``worker1@host``. A worker that does not answer in time is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kombu.exceptions import OperationalError

from celery_fdb.operations.action import Action, Field, Outcome, Request
from celery_fdb.operations.limiting import read_rate
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError, StoreUnavailable

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
            "worker_shutdown",
            "Shut down",
            "End {target}? It finishes what it runs; nothing is lost, and nobody starts it again unless a service "
            "manager does.",
            _shutdown,
            destroys=True,
        ),
    )
}
