"""The transport inside a Celery worker: the options of tasks, the worker's requests, its start and its end.

A task has celery-fdb's options if its class has them, and ``celery_fdb.install(app)`` gives it that class. On any other
task, Celery turns such an option into an attribute that no code reads. As ``celery_fdb`` is not loaded without
``install``, the transport checks for such options at a worker's start, and the doctor when it is given an app.

Errors outside the consumer's callback (guarantee POISON-ENDS). Celery makes a *request* from a task's message, and
handles it later: at its ETA, when a place in the pool is free, when a child reports the result. An exception there is
no longer connected to the message. If it is raised under the pool's semaphore, it ends the worker. If it is raised in a
timer or a callback of the pool, it is logged, and the message stays leased and occupies one of the worker's places as
long as the worker lives. After a few of them the worker consumes nothing. Causes are a result backend that can't store
a result under such an id, or an object nested too deeply to be pickled for the child.

So the methods that Celery calls there are wrapped, once for each class of requests (Celery makes one for each task):
after an exception the message is released as an attempt, as in ``poison.py``. Connection errors pass through, and so do
errors after the message was settled. A task that has ended does not run again because of a later error: its message is
settled like that of a failed task. Such an error may come from the task's own ``on_failure``, or from Celery, which
re-raises a task's ``MemoryError``. A task is over once its result is stored, or if it stores none.

A pool of threads or greenlets loses exceptions from Celery's task tracer, which raises when it can store neither the
result nor the failure. There the request's ``on_failure`` is called, as prefork's parent process calls it. After a
connection error another attempt may succeed, so the message is released.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from traceback import clear_frames
from typing import Any

from celery._state import get_current_task
from celery.backends.base import DisabledBackend
from celery.states import READY_STATES
from celery.utils.log import get_logger
from kombu.utils import functional

from kombu_fdb.primitives import failure
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.client import close_clients
from kombu_fdb.transport.envelope import is_timelimit
from kombu_fdb.transport.errors import CONNECTION_ERRORS
from kombu_fdb.transport.poison import give_back

# -- the worker's options ----------------------------------------------------------------------------------------------


OPTIONS = ("fair_key", "max_in_flight", "rate_limit_key", "dedup_id", "dedup_window", "dead_letter", "backoff")
PACKAGE = "celery_fdb."
#: The setting; ``celery_fdb.tasks.failures.install`` adds the worker's step that implements it.
SETTING = "fdb_dead_letter_failures"
FAILURES_MODULE = "celery_fdb.tasks.failures"


def without_effect(app: Any, *, load: bool = False) -> list[str]:
    """The tasks of a Celery app whose options have no effect, and the setting if that has none.

    ``load``: for all tasks that a worker would load. Raises what their modules raise.
    """
    if load:
        app.loader.import_default_modules()
    keeps_failures = any(getattr(step, "__module__", "") == FAILURES_MODULE for step in app.steps["consumer"])
    effective = {"dead_letter"} if keeps_failures else set()
    found = [
        f"{name} ({', '.join(options)})"
        for name, task in sorted(app.tasks.items())
        if (options := [each for each in _given(type(task)) if each not in effective])
    ]
    if app.conf.get(SETTING) and not keeps_failures:
        found.append(f"the setting {SETTING}")
    return found


def _given(task: type) -> Iterator[str]:
    """The options that a task's class sets, but no celery-fdb class among its bases reads."""
    ours = [base for base in task.__mro__ if base.__module__.startswith(PACKAGE)]
    for name in OPTIONS:
        value = inspect.getattr_static(task, name, None)
        # An application may have its own ``backoff``, which does not name a schedule.
        if value is None or (name == "backoff" and not isinstance(value, str)):
            continue
        if not any(name in vars(base) for base in ours):
            yield name


def warn(app: Any) -> None:
    """When a worker starts, log which options have no effect."""
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
    """For Celery's signal ``task_received``, which is sent before Celery does anything with the request."""
    drop_unusable_limits(request)
    made = type(request)
    if GUARDED not in made.__dict__:
        setattr(made, GUARDED, True)
        made.execute_using_pool = _executed(made.execute_using_pool)
        made.on_accepted = _begun(made.on_accepted)
        for name in ("on_success", "on_failure", "on_timeout"):
            setattr(made, name, _ended(getattr(made, name)))


def drop_unusable_limits(request: Any) -> None:
    """Ignore unusable time limits of protocol 1, which are in the body and have not been checked."""
    if not is_timelimit(request.time_limits):
        logger.error("task %s has unusable time limits: %.80r", request.id, request.time_limits)
        request.time_limits = (None, None)


def tell_retry(body: Any = None, headers: Any = None, **_: Any) -> None:
    """For Celery's signal ``before_task_publish``: mark in the headers that a message of protocol 1 continues a task.

    In protocol 1 the number of retries is in the body, and only the running task's id shows that a message replaces it.
    The dedup id of the first attempt would make a duplicate of it.
    """
    if not isinstance(body, dict) or not isinstance(headers, dict):
        return
    if body.get("retries"):
        headers["retries"] = body["retries"]
    elif (task := get_current_task()) is not None and task.request.id == body.get("id"):
        headers["replaced_task_nesting"] = 1


def _executed(method: Method) -> Method:
    """Wrap a request's method: an exception frees the request's place in the pool, and ends no thread."""

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
    """Wrap a request's method to note the attempt: with late acks, Celery checks ``redelivered`` before a run."""

    @wraps(method)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(request):
            request.message.channel.qos.note_attempt(request.message.delivery_tag)
        return method(request, *args, **kwargs)

    return guarded


def _ended(method: Method) -> Method:
    """Wrap the method that the pool calls at the end of a request."""

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
    except Exception:  # noqa: BLE001 - unknown: a backend that can't store can't be read either
        return False


def _settle(request: Any, *, timed_out: bool) -> None:
    """Settle as Celery settles a failed task with late acks. Since 5.7 it has an option for each way to fail."""
    option = "acks_on_timeout" if timed_out else "acks_on_failure"
    if getattr(request.task, option, request.task.acks_on_failure_or_timeout):
        request.acknowledge()
    else:
        request.reject(requeue=timed_out)


def guard_pool(pool: Any) -> None:
    """Have a pool of threads or greenlets report a task's failure to its request, as prefork does."""
    if pool is not None and not hasattr(getattr(pool, "_pool", None), "_result_handler"):
        pool.on_apply = _with_reports(pool.on_apply)


def _with_reports(on_apply: Method) -> Method:
    def apply(target: Method, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return on_apply(_reporting(target, options.get("error_callback")), args, kwargs, **options)

    return apply


def _reporting(target: Method, on_failure: Any) -> Method:
    """``on_failure``: a method of the request's."""

    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return _without_exit(target, *args, **kwargs)
        except Exception as error:
            request = getattr(on_failure, "__self__", None)
            if request is not None and _is_ours(request):
                _end(request, error)
            raise

    return reporting


def _without_exit(target: Method, *args: Any, **kwargs: Any) -> Any:
    """Call it, and raise ``WorkerLostError`` if it exits, as with prefork; Celery (5.7) would count that as success."""
    exceptions = sys.modules["celery.exceptions"]
    try:
        return target(*args, **kwargs)
    except (exceptions.WorkerShutdown, exceptions.WorkerTerminate):
        raise
    except SystemExit as error:
        lost = exceptions.WorkerLostError(f"{failure.class_of(error)}: {failure.text_of(error)}")
    raise lost  # without a context: an unprintable error there would end the worker


def _end(request: Any, error: Exception) -> None:
    if not isinstance(error, CONNECTION_ERRORS):
        request.on_failure(sys.modules["billiard.einfo"].ExceptionInfo())
    elif _is_held(request):
        _give_back(request, error)


def _is_ours(request: Any) -> bool:
    """Whether it is this transport's: the worker may also consume from another broker's connection."""
    return hasattr(request.message.channel.qos, "holds")


def _is_held(request: Any) -> bool:
    return bool(request.message.channel.qos.holds(request.message.delivery_tag))


def _give_back(request: Any, error: Exception) -> None:
    """Release the message, unless Celery has settled it, or will: that may be waiting for the worker's loop."""
    if request.acknowledged:
        logger.error(
            "task %.80r was settled, and raised afterwards: %s: %.200s",
            request.id,
            failure.class_of(error),
            failure.text_of(error),
        )
    else:
        message, info = request.message, request.message.delivery_info
        redeliveries = message.headers["x-delivery-count"] if info["redelivered"] else 0
        give_back(message, error, f"task {request.id!r:.80} of queue {info['queue']}", redeliveries)
        request.acknowledged = True
    sys.modules["celery.worker.state"].task_ready(request)


# -- joining the worker ------------------------------------------------------------------------------------------------


def join_workers(driver_type: str) -> None:
    """Tell Celery's mingle and gossip that fanout and events work here, and connect to the worker's signals.

    Both steps construct a transport, this one, to ask for its driver type, before they look that up in their sets.
    """
    vars(functional)["sleep"] = Clock().sleep  # kombu's, bound before gevent's patch, would block all greenlets
    for module, step in (("mingle", "Mingle"), ("gossip", "Gossip")):
        loaded = sys.modules.get(f"celery.worker.consumer.{module}")
        if loaded is not None:
            getattr(loaded, step).compatible_transports |= {driver_type}
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.before_task_publish.connect(tell_retry, weak=False, dispatch_uid="kombu_fdb.transport.worker")
        signals.task_received.connect(receive, weak=False, dispatch_uid="kombu_fdb.transport.worker")
        signals.worker_ready.connect(prepare_worker, weak=False, dispatch_uid="kombu_fdb.transport.worker")
        signals.worker_process_shutdown.connect(end_child, weak=False, dispatch_uid="kombu_fdb.transport.worker")


def prepare_worker(sender: Any, **_: Any) -> None:
    """For Celery's signal ``worker_ready``: the worker is about to consume."""
    guard_pool(sender.pool)
    free_cancelled_timers(sender)
    keep_started_tasks(sender.pool)
    warn(sender.app)


def end_child(**_: Any) -> None:
    """For Celery's signal ``worker_process_shutdown``: close a child's clients, which writes its pending totals.

    The child ends by ``os._exit``, without exit handlers. If the store does not answer, it ends a second later.
    """
    close_clients()


def free_cancelled_timers(consumer: Any) -> None:
    """When a worker loses its connection, release the messages of tasks that are, or were, in Celery's timer.

    Celery (5.7, ``Consumer.on_close``) cancels the timer's entries, "since the broker may redeliver", but still refers
    to an entry until its time has come, and until the next lost connection. The entry's arguments refer to the message,
    so the message's channel assumes that its task is still under way (``unacked.py``, *orphaned*). Therefore the entry
    is emptied here, and Celery finds none to cancel. Before 5.7 requests do not know their entries; there the timer is
    cleared, as Celery does itself, except for the timer of greenlets in 5.6.3. If a task's time has come, but it waits
    for a place in the pool, its entry refers to the task, and the task to the entry, until the garbage is collected.
    With eventlet, an entry is a greenlet: once killed, it holds the frames from which it was killed, and the error that
    was handled there, until the garbage is collected. Celery kills the heartbeat's greenlet, too. As that error, or one
    in its chain, may come from a delivery, the frames of the whole chain are cleared.
    """
    on_close, state = consumer.on_close, sys.modules["celery.worker.state"]

    def free_and_close() -> None:
        for request in [each for each in state.reserved_requests if each not in state.active_requests]:
            state.requests.pop(request.id, None)  # Celery does so since 5.7
        for request in [*getattr(state, "scheduled_requests", ()), *state.reserved_requests]:
            entry = getattr(request, "_eta_timer_entry", None)  # since 5.7
            if entry is not None:
                request._eta_timer_entry = None
                entry = getattr(entry, "entry", entry)
                entry.fun, entry.args = lambda: None, ()
        error, cleared = sys.exc_info()[1], list[BaseException]()
        while error is not None and error not in cleared:
            clear_frames(error.__traceback__)
            cleared.append(error)
            error = error.__cause__ or error.__context__
        if not hasattr(state, "scheduled_requests"):
            consumer.timer.clear()
        on_close()

    consumer.on_close = free_and_close


def keep_started_tasks(pool: Any) -> None:
    """Let a prefork pool learn of the end of every task that was written to a child (guarantee NOT-TWICE).

    When a worker loses its connection, Celery (5.7, ``AsynPool.flush``) forgets the tasks whose start it has not read
    yet, "since they will be redelivered by the broker"; before 5.7 it forgets all of them. But a child runs every task
    that is written to it. Such a task could no longer be acknowledged, so it would run a second time. When a worker
    stops, Celery 5.7 forgets them as well. The child would then wait 30 seconds for its result to be read
    (``billiard.pool.Worker._ensure_messages_consumed``), and the parent for the child: as long as Kubernetes waits
    before it kills.

    So ``flush`` is replaced: only tasks that were written to no child are forgotten. And before a child gets the order
    to end, it gets the rest of its task: otherwise it would take the order for a part of that, and wait for more.
    """
    processes: Any = getattr(pool, "_pool", None)
    if not hasattr(processes, "outbound_buffer"):  # threads and greenlets have no such pipe
        return

    def forget_the_unwritten() -> None:
        if sys.modules["celery.worker.state"].should_terminate is None:  # else the children are about to be killed
            _write_to_the_end(processes)
        # Only now: it reads the last reports of ended children. Tasks that they had not begun become unwritten again.
        processes.maintain_pool()
        processes._join_exited_workers()  # once a stop has begun, the pool is no longer maintained
        unwritten = processes.outbound_buffer
        while unwritten:
            unwritten.popleft().discard()

    def order_to_end(*args: Any) -> None:
        _write_to_the_end(processes)  # Celery's cold shutdown begins with this
        processes._join_exited_workers()  # the pipe of a child that has stopped reading may be full
        order(*args)

    pool.flush = forget_the_unwritten
    order, processes._stop_task_handler = processes._stop_task_handler, order_to_end


def _write_to_the_end(processes: Any) -> None:
    """Write the rest of each task that a child has a part of: the event loop no longer does so."""
    for task in list(processes._cache.values()):
        writer = task._writer() if hasattr(task, "_writer") else None  # a weak reference
        if writer in processes._active_writers:
            processes._flush_writer(task._write_to, writer)
