"""How a Celery worker and the transport share a message: the worker's options, its requests, how it joins, and its end.

Celery makes attributes of celery-fdb's options on tasks that don't have them, and nothing reads those. A task has the
options of its class, which ``celery_fdb.install(app)`` sees to. Without it nothing of ``celery_fdb`` is loaded. So the
transport checks when a worker has started, and the doctor does when it is given an app.

Errors in a task while no callback of its consumer is on the stack (guarantee POISON-ENDS). Celery makes a *request* of
a task's message, and goes on with it later: when its ETA has come, when a place in the pool is free, when a child tells
how it ended. An exception there has no message to it any more. From the pool's semaphore it ends the worker. From a
timer or a callback of the pool it is logged, and the message stays leased and takes one of the worker's places for as
long as the worker lives; a few of them, and it consumes nothing. The causes are a result backend that can't store under
such an id, or an object too deep to be pickled for the child.

So what Celery calls there is wrapped, once for each class of requests (Celery makes one for each task): the message
goes back as an attempt, as in ``poison.py``. Errors of the connection pass, and so do errors after the message was
settled. A task that is over is not run again because of an error after its end, raised by its own ``on_failure`` or by
Celery, which raises a task's ``MemoryError`` again: its message is settled as that of a failed task. A task is over
once its result is stored, or if none is to be.

In a pool of threads or greenlets an exception from the task's tracer is lost: it raises when it can store neither the
result nor the failure. There the request is told that it has failed, as prefork's parent tells it. After an error of
the connection another attempt may do better, and the message goes back.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from traceback import clear_frames
from typing import Any

from celery.backends.base import DisabledBackend
from celery.states import READY_STATES
from celery.utils.log import get_logger
from kombu.utils import functional

from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.primitives.failure import class_of, text_of
from kombu_fdb.transport.errors import CONNECTION_ERRORS
from kombu_fdb.transport.poison import give_back, mend

# -- the worker's options ----------------------------------------------------------------------------------------------


OPTIONS = ("fair_key", "max_in_flight", "rate_limit_key", "dedup_id", "dedup_window", "dead_letter", "backoff")
PACKAGE = "celery_fdb."
#: The setting; ``celery_fdb.tasks.failures.install`` adds the worker's step that sees to it.
SETTING = "fdb_dead_letter_failures"
SEES_TO_FAILURES = "celery_fdb.tasks.failures"


def without_effect(app: Any, *, load: bool = False) -> list[str]:
    """The tasks of a Celery app whose options have no effect, and its setting if that has none.

    ``load``: for all tasks that a worker would load. Raises what their modules raise.
    """
    if load:
        app.loader.import_default_modules()
    keeps_failures = any(getattr(step, "__module__", "") == SEES_TO_FAILURES for step in app.steps["consumer"])
    heeded = {"dead_letter"} if keeps_failures else set()
    found = [
        f"{name} ({', '.join(options)})"
        for name, task in sorted(app.tasks.items())
        if (options := [each for each in _given(type(task)) if each not in heeded])
    ]
    if app.conf.get(SETTING) and not keeps_failures:
        found.append(f"the setting {SETTING}")
    return found


def _given(task: type) -> Iterator[str]:
    """Options that a task's class has, and none of its bases reads."""
    ours = [base for base in task.__mro__ if base.__module__.startswith(PACKAGE)]
    for name in OPTIONS:
        value = inspect.getattr_static(task, name, None)
        # An application may have a ``backoff`` of its own, which is no name of a schedule.
        if value is None or (name == "backoff" and not isinstance(value, str)):
            continue
        if not any(name in vars(base) for base in ours):
            yield name


def warn(app: Any) -> None:
    """Log it when a worker starts."""
    found = without_effect(app)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        logger.warning(
            "Options of celery-fdb without effect: %s%s. Call celery_fdb.install(app) right after Celery(...).",
            ", ".join(found[:5]),
            more,
        )


# -- requests ----------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

GUARDED = "fdb_guarded"
Method = Callable[..., Any]


def receive(request: Any = None, **_: Any) -> None:
    """For Celery's signal ``task_received``: it comes before anything is done with the request."""
    mend(request)
    made = type(request)
    if GUARDED not in made.__dict__:
        setattr(made, GUARDED, True)
        made.execute_using_pool = _executed(made.execute_using_pool)
        made.on_accepted = _begun(made.on_accepted)
        for name in ("on_success", "on_failure", "on_timeout"):
            setattr(made, name, _ended(getattr(made, name)))


def _executed(method: Method) -> Method:
    """Wrap it so that an exception frees the request's place in the pool, and ends no thread."""

    @wraps(method)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(request, *args, **kwargs)
        except Exception as error:
            revoked: type[Exception] = sys.modules["celery.exceptions"].TaskRevokedError
            if isinstance(error, (*CONNECTION_ERRORS, revoked)) or not _is_ours(request):
                raise
            _give_back(request, error)
            raise revoked(request.id) from error

    return guarded


def _begun(method: Method) -> Method:
    """With late acks, note the attempt: before it runs a message, Celery looks whether it is ``redelivered``."""

    @wraps(method)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(request):
            request.message.channel.qos.note_attempt(request.message.delivery_tag)
        return method(request, *args, **kwargs)

    return guarded


def _ended(method: Method) -> Method:
    """Wrap what the pool calls at the end of a request."""

    @wraps(method)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(request, *args, **kwargs)
        except Exception as error:
            if isinstance(error, CONNECTION_ERRORS) or not _is_ours(request) or not _is_held(request):
                raise
            if _is_over(request, error):
                logger.exception("task %r has ended, and raised afterwards", request.id)
                _settle(request, timed_out=method.__name__ == "on_timeout")
            else:
                _give_back(request, error)

    return guarded


def _is_over(request: Any, error: Exception) -> bool:
    if isinstance(error, MemoryError) or request.ignore_result or isinstance(request.task.backend, DisabledBackend):
        return True
    try:
        return request.task.backend.get_task_meta(request.id, cache=False)["status"] in READY_STATES
    except Exception:  # noqa: BLE001 - it can't be known: what could not be stored can't be read either
        return False


def _settle(request: Any, *, timed_out: bool) -> None:
    """Settle as Celery settles a failed task with late acks. Since 5.7 it has an option for each way to fail."""
    option = "acks_on_timeout" if timed_out else "acks_on_failure"
    if getattr(request.task, option, request.task.acks_on_failure_or_timeout):
        request.acknowledge()
    else:
        request.reject(requeue=timed_out)


def guard_pool(pool: Any) -> None:
    """Guard a pool of threads or greenlets: prefork always hears its child. For Celery's signal ``worker_ready``."""
    if pool is not None and not hasattr(getattr(pool, "_pool", None), "_result_handler"):
        pool.on_apply = _heard(pool.on_apply)


def _heard(on_apply: Method) -> Method:
    def heard(target: Method, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return on_apply(_told(target, options.get("error_callback")), args, kwargs, **options)

    return heard


def _told(target: Method, on_failure: Any) -> Method:
    """``on_failure``: a method of the request's."""

    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return _without_exit(target, *args, **kwargs)
        except Exception as error:
            request = getattr(on_failure, "__self__", None)
            if request is not None and _is_ours(request):
                _end(request, error)
            raise

    return told


def _without_exit(target: Method, *args: Any, **kwargs: Any) -> Any:
    """Call it; a task that exits has lost its worker, as with prefork. Celery (5.7) would take that for a success."""
    exceptions = sys.modules["celery.exceptions"]
    try:
        return target(*args, **kwargs)
    except (exceptions.WorkerShutdown, exceptions.WorkerTerminate):
        raise
    except SystemExit as error:
        lost = exceptions.WorkerLostError(f"{class_of(error)}: {text_of(error)}")
    raise lost  # without a context: what can't be printed there would end the worker


def _end(request: Any, error: Exception) -> None:
    if not isinstance(error, CONNECTION_ERRORS):
        request.on_failure(sys.modules["billiard.einfo"].ExceptionInfo())
    elif _is_held(request):
        _give_back(request, error)


def _is_ours(request: Any) -> bool:
    """Whether it is from this transport: the worker may also consume from another broker's connection."""
    return hasattr(request.message.channel.qos, "holds")


def _is_held(request: Any) -> bool:
    return bool(request.message.channel.qos.holds(request.message.delivery_tag))


def _give_back(request: Any, error: Exception) -> None:
    """Unless Celery settles it, or is about to: that may wait for the worker's loop."""
    if request.acknowledged:
        logger.error(
            "task %.80r was settled, and raised afterwards: %s: %.200s", request.id, class_of(error), text_of(error)
        )
    else:
        message, info = request.message, request.message.delivery_info
        redeliveries = message.headers["x-delivery-count"] if info["redelivered"] else 0
        give_back(message, error, f"task {request.id!r:.80} of queue {info['queue']}", redeliveries)
        request.acknowledged = True
    sys.modules["celery.worker.state"].task_ready(request)


# -- joining the worker ------------------------------------------------------------------------------------------------


def join_workers(driver_type: str) -> None:
    """Let Celery's mingle and gossip know that fanout and events work here; and see to what it does not check.

    They ask for the driver type before they look at their set, and construct a transport for it: this one.
    """
    vars(functional)["sleep"] = SystemClock().sleep  # bound before gevent replaces it, kombu's would stop all greenlets
    for module, step in (("mingle", "Mingle"), ("gossip", "Gossip")):
        loaded = sys.modules.get(f"celery.worker.consumer.{module}")
        if loaded is not None:
            getattr(loaded, step).compatible_transports |= {driver_type}
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.task_received.connect(receive, weak=False, dispatch_uid="kombu_fdb.transport.worker")
        signals.worker_ready.connect(see_to_the_worker, weak=False, dispatch_uid="kombu_fdb.transport.worker")


def see_to_the_worker(sender: Any, **_: Any) -> None:
    """For the signal that the worker is about to consume."""
    guard_pool(sender.pool)
    free_what_celery_cancels(sender)
    keep_what_children_have(sender.pool)
    warn(sender.app)


def free_what_celery_cancels(consumer: Any) -> None:
    """Have the messages go back of tasks that wait in Celery's timer when a worker loses its connection.

    Celery (5.7, ``Consumer.on_close``) cancels the timer's entries, "since the broker may redeliver". It still refers
    to an entry until its time, and until the next lost connection. The entry's arguments refer to the message, which
    its channel therefore takes for one of a task that is under way (``unacked.py``, *orphaned*). So the entry is
    emptied, and Celery finds none to cancel. Eventlet's is a greenlet: once killed, it holds the frames from which it
    was killed, and the error that was handled there, until Python looks for cycles. Celery kills its heartbeat's, too,
    and the error, or one before it, may have come out of a delivery.
    """
    on_close, state = consumer.on_close, sys.modules["celery.worker.state"]

    def free_and_close() -> None:
        for request in [*getattr(state, "scheduled_requests", ())]:
            entry, request._eta_timer_entry = request._eta_timer_entry, None
            entry = getattr(entry, "entry", entry)
            entry.fun, entry.args = lambda: None, ()
        error, cleared = sys.exc_info()[1], list[BaseException]()
        while error is not None and error not in cleared:
            clear_frames(error.__traceback__)
            cleared.append(error)
            error = error.__cause__ or error.__context__
        on_close()

    consumer.on_close = free_and_close


def keep_what_children_have(pool: Any) -> None:
    """Let a prefork pool hear the end of each task that a child was given (guarantee NOT-TWICE).

    When a worker loses its connection, Celery (5.7, ``AsynPool.flush``) forgets the tasks whose start it has not read
    yet, "since they will be redelivered by the broker"; before 5.7 it forgets all of them. But a child runs what is
    written to it. Nothing could ack that task any more, so it would run a second time. When a worker stops, Celery 5.7
    forgets them as well. The child would then wait 30 seconds for its result to be read
    (``billiard.pool.Worker._ensure_messages_consumed``), and the parent for the child: as long as Kubernetes waits
    before it kills.

    So ``flush`` is replaced: only tasks that no child was given are forgotten. And before a child gets the order to
    end, it gets the rest of its task: it would wait for that, take the order for it, and wait for more.
    """
    processes: Any = getattr(pool, "_pool", None)
    if not hasattr(processes, "outbound_buffer"):  # threads and greenlets have no such pipe
        return

    def forget_the_unwritten() -> None:
        if sys.modules["celery.worker.state"].should_terminate is None:  # else the children are about to be killed
            _write_to_the_end(processes)
        # Behind: it reads what children said that have ended. Tasks that they had not begun become unwritten again.
        processes.maintain_pool()
        processes._join_exited_workers()  # as a stop begins, the pool is not maintained any more
        unwritten = processes.outbound_buffer
        while unwritten:
            unwritten.popleft().discard()

    def order_to_end(*args: Any) -> None:
        _write_to_the_end(processes)  # Celery's cold shutdown begins with this
        processes._join_exited_workers()  # a pipe of one that reads nothing any more may be full
        order(*args)

    pool.flush = forget_the_unwritten
    order, processes._stop_task_handler = processes._stop_task_handler, order_to_end


def _write_to_the_end(processes: Any) -> None:
    """Write the rest of each task that a child has a part of: the event loop does not go on with it."""
    for task in list(processes._cache.values()):
        writer = task._writer() if hasattr(task, "_writer") else None  # a weak reference
        if writer in processes._active_writers:
            processes._flush_writer(task._write_to, writer)
