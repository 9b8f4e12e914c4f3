"""Actions on running workers, by Celery's remote control, and on the entries of beat's schedule, by the store.

An action asks one worker, or asks all workers about one task. The request's ``queue`` is the worker's name, such as
``worker1@host``, or the task's id. A worker that does not answer in time is reported.

An entry of beat's schedule is paused and resumed for all beats, or published now. The request's ``queue`` is the
entry's name. Beats that run ``celery_fdb.beat.Scheduler`` obey a pause. The app's configuration says what an entry
publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.beat import Scheduler

from celery_fdb.control import ask_workers
from celery_fdb.inspection import formats
from celery_fdb.inspection.schedules import BROKEN, configured, entry_of, schedule_of
from celery_fdb.operations import messages, queues
from celery_fdb.operations.action import Action, Field, Outcome, Request
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import Kind, shown
from kombu_fdb.transport.envelope import whole_of

# -- workers -----------------------------------------------------------------------------------------------------------


#: Seconds that a worker has to answer.
TIMEOUT_S = 2.0
MOST_PROCESSES = 100
PROCESSES = Kind.whole(f"1 to {MOST_PROCESSES} processes", 1, MOST_PROCESSES)


def _shutdown(_: Broker, request: Request) -> Outcome:
    _asked(request, lambda control, where: control.shutdown(destination=where))
    return Outcome(f"Told {request.queue} to end when it is done with what it runs.")


def _resize(verb: str, _: Broker, request: Request) -> Outcome:
    """``verb``: ``pool_grow`` or ``pool_shrink``."""
    number = whole_of("the number", request.fields.get("by", "").strip(), MOST_PROCESSES)
    PROCESSES.check("the number", number)
    return _answered(request, verb, number)


def _limit(_: Broker, request: Request) -> Outcome:
    task, rate = messages.task_of(request), request.fields.get("rate", "").strip() or "0"
    if rate != "0":
        queues.read_rate(rate)
    return _answered(request, "rate_limit", task, rate)


def _time_limit(_: Broker, request: Request) -> Outcome:
    task, texts = messages.task_of(request), [request.fields.get(name, "").strip() for name in ("soft", "hard")]
    soft, hard = (formats.seconds_of(each) if each else None for each in texts)
    if any(each and not seconds for each, seconds in zip(texts, (soft, hard), strict=True)):
        raise InvalidArgument("not a time limit", given=shown(" ".join(texts)), fix="Write a time such as 90s or 10m.")
    return _answered(request, "time_limit", task, soft, hard)


def _quiet(_: Broker, request: Request) -> Outcome:
    answers = _asked(request, lambda control, where: control.inspect(where, TIMEOUT_S).active_queues()) or {}
    if request.queue not in answers:
        raise QueueError("the worker did not answer", worker=request.queue, fix="Check that it is running.")
    names = [str(each["name"]) for each in answers[request.queue]]
    for name in names:
        _answered(request, "cancel_consumer", name)
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
    """Ask all workers about a task. Returns their answers.

    Raises ``QueueError`` if one refuses, as a worker with a pool of threads does.
    """
    if not request.queue:
        raise InvalidArgument("a task has an id", fix="Open the task's page, and begin from there.")
    replies = _asked(
        request,
        lambda control, _: control.revoke(request.queue, terminate=terminate, reply=True, timeout=TIMEOUT_S),
    )
    found = {str(name): each for reply in replies or [] for name, each in reply.items() if isinstance(each, Mapping)}
    for name, answer in found.items():
        if "error" in answer:
            fix = "Only a pool of processes or greenlets can end a task."
            raise QueueError("the worker refused", worker=name, reason=str(answer["error"])[:500], fix=fix)
    return found


def _answered(request: Request, verb: str, *arguments: Any) -> Outcome:
    """Ask one worker by a verb of ``app.control``. Raises ``QueueError`` for an error, or if there is no answer."""
    replies = _asked(
        request, lambda control, where: getattr(control, verb)(*arguments, where, reply=True, timeout=TIMEOUT_S)
    )
    for each in replies or []:
        answer = each.get(request.queue) if isinstance(each, Mapping) else None
        if isinstance(answer, Mapping) and "ok" in answer:
            return Outcome(f"{request.queue}: {answer['ok']}.")
        if isinstance(answer, Mapping):
            raise QueueError("the worker refused", worker=request.queue, reason=str(answer.get("error", answer))[:500])
    raise QueueError("the worker did not answer", worker=request.queue, fix="Check that it is running.")


def _asked(request: Request, call: Callable[[Any, list[str]], Any]) -> Any:
    return ask_workers(_app(request), lambda control: call(control, [request.queue]))


def _app(request: Request) -> Celery:
    if request.app is None:
        raise QueueError("no Celery app is known here", fix=request.fix_app or None)
    return request.app


_BY = (Field("by", "Processes", "number", "How many more or fewer.", "1", required=True),)
ON_WORKERS = (
    Action(
        "worker_grow",
        "Grow pool",
        "Give {target} more processes or greenlets?",
        partial(_resize, "pool_grow"),
        fields=_BY,
        on_workers=True,
    ),
    Action(
        "worker_shrink",
        "Shrink pool",
        "Give {target} fewer processes or greenlets?",
        partial(_resize, "pool_shrink"),
        fields=_BY,
        on_workers=True,
    ),
    Action(
        "worker_rate",
        "Rate limit",
        "Limit how often {target} runs a task? It holds until the worker ends.",
        _limit,
        fields=(
            messages.TASK,
            Field("rate", "Rate", help="10/s, 100/m or 1000/h; 0 for no limit.", value="0", required=True),
        ),
        on_workers=True,
    ),
    Action(
        "worker_time_limit",
        "Time limits",
        "Limit how long {target} lets a task run? It holds from its next run on, until the worker ends.",
        _time_limit,
        fields=(
            messages.TASK,
            Field("soft", "Soft limit", help="Raises SoftTimeLimitExceeded: 90s, 10m, 2h; empty for the worker's own."),
            Field("hard", "Hard limit", help="Ends the process that runs it; empty for the worker's own."),
        ),
        on_workers=True,
    ),
    Action(
        "worker_quiet",
        "Take no more",
        "Stop {target} from taking tasks? It finishes those that it has, and takes none until it is started anew.",
        _quiet,
        on_workers=True,
    ),
    Action(
        "worker_shutdown",
        "Shut down",
        "End {target}? It finishes what it runs; nothing is lost, and it does not start again unless a service "
        "manager does.",
        _shutdown,
        destroys=True,
        on_workers=True,
    ),
    Action(
        "task_revoke",
        "Revoke",
        "Tell all workers not to begin {target}? One that runs it goes on. With celery_fdb.install, what waits of "
        "it is deleted, too.",
        _revoke,
        destroys=True,
        on_workers=True,
    ),
    Action(
        "task_terminate",
        "Terminate",
        "End {target} where it runs, with a signal to its process? What it has done so far stays done.",
        _terminate,
        destroys=True,
        on_workers=True,
    ),
)


# -- beat --------------------------------------------------------------------------------------------------------------


def pause_entry(broker: Broker, request: Request) -> Outcome:
    """Pause an entry: beats do not publish it until it is resumed."""
    schedule_of(broker).pause(request.queue)
    return Outcome(f"Paused {request.queue}: beats that run celery_fdb.beat.Scheduler leave out its ticks.")


def resume_entry(broker: Broker, request: Request) -> Outcome:
    """Resume an entry, from its next tick on."""
    schedule_of(broker).resume(request.queue)
    return Outcome(f"Resumed {request.queue}, from its next tick on.")


def run_entry(_: Broker, request: Request) -> Outcome:
    """Publish the entry's task now, besides its ticks and whether or not it is paused."""
    app = _app(request)
    written = configured(app).get(request.queue)
    if written is None:
        fix = "Only entries of beat_schedule can be published from here."
        raise QueueError("the app does not configure this entry", entry=request.queue, fix=fix)
    try:
        entry = entry_of(app, request.queue, written)
        result = Scheduler(app, lazy=True).apply_async(entry, advance=False)
    except BROKEN as error:
        raise QueueError("the entry could not be published", entry=request.queue, reason=str(error)[:500]) from error
    return Outcome(f"Published {entry.task} {result.id} of {request.queue}.")
