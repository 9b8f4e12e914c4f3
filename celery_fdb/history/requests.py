"""What a worker tells of its tasks, and the runs that are made of it.

Whatever stands in a message was written by another program: names of 100 kB, errors of 10 MB, texts that have no UTF-8
form. What is held until the flush is cut at once, so that a hostile message costs no more than another.

Every attempt of a task has a ``Request`` in the worker's main process, in every pool; there its end is seen, also of a
child that was killed. A mixin notes it: what is read from the request takes some microseconds, all else is the flush's
(``recorder.py``). Children know nothing of the history.

================================== =================================================================================
``on_success``                     SUCCESS; or the child has told of an exception, and it goes on with ``on_failure``
``on_failure``                     FAILURE, RETRY, REJECTED, IGNORED; SUCCESS if its child died after it had succeeded
``on_timeout``                     FAILURE, after the hard limit
``_announce_revoked``              REVOKED: before it began, expired, or terminated
``_announce_cancelled``            RETRY: the connection was lost, and its message is released
================================== =================================================================================

Celery makes a class of its own for each task, with an ``on_success`` that calls no other; that one is wrapped when the
class is made.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery import bootsteps, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import worker_shutdown
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from celery_fdb.history.options import History
from celery_fdb.history.recorder import CLOSING_S, Recorder, Source, Upkeep
from celery_fdb.history.run import NAME_LENGTH, PUBLISHED, Follower, Run, bounded, id_text
from celery_fdb.history.store import ActiveKey, HistoryStore
from celery_fdb.tasks.failures import ERROR_LENGTH, TRACEBACK_LENGTH, details_of, mix_in
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_S, MOST, is_number, is_whole
from kombu_fdb.process.client import Client
from kombu_fdb.transport.channel import Channel

# -- runs --------------------------------------------------------------------------------------------------------------


#: Characters of arguments that are kept, and how many tasks that follow one. Of an error and its traceback as many as
#: in a dead letter: of the traceback the end stays, of all others the beginning.
ARGUMENTS_LENGTH, MOST_FOLLOWERS = 1_024, 20
#: A text without any of these, in small letters, names no secret (``primitives/masking.py``).
HINTS = ("auth", "pass", "pw", "secret", "token", "cookie", "credential", "key", "session", "://")


#: What is taken from a request when a run ends: bounded texts, numbers, and tuples of them, in the order of
#: :func:`facts_of`. A plain tuple, so that the garbage collector has nothing to do with what waits.
Facts = tuple[Any, ...]
#: Class of the error, its text, the end of the traceback.
Error = tuple[str, str, str]
NO_ERROR: Error = ("", "", "")


def facts_of(request: Any, state: str, end_ms: int, runtime: float | None, error: Error = NO_ERROR) -> Facts:
    """Called in the worker's event loop, for each run."""
    get = request._request_dict.get
    info = request._message.delivery_info
    task_id, root = _name(get("id")), get("root_id")
    return (
        task_id,
        _name(request.name),
        _name(info.get("queue")) if info else "",
        _name(request._hostname),
        state,
        request.time_start,
        end_ms,
        runtime,
        _cut(request._argsrepr),
        _cut(request._kwargsrepr),
        _whole(get(PUBLISHED)),
        _cut(get("eta")),
        "" if root is None or root == task_id else _name(root),
        _name(get("parent_id")),
        _name(get("group")),
        _name(get("fair_key")),
        _whole(get("retries")),
        _whole(get("x-delivery-count")),
        _followers(request),
        error,
    )


def error_of(exc: Any, traceback: Any) -> Error:
    """``exc``: an exception, or a text, or None."""
    if exc is None:
        return NO_ERROR
    if not isinstance(exc, BaseException):
        return "", bounded(exc, ERROR_LENGTH), ""
    details = details_of(_cause(exc), traceback)
    return bounded(details["error_class"]), details["error"], details["traceback"]


def weight_of(facts: Facts) -> int:
    """Characters, about."""
    _error_class, error, traceback = facts[-1]
    return len(facts[8]) + len(facts[9]) + len(error) + len(traceback) + 200 * len(facts[-2])


def _cause(exc: BaseException) -> BaseException:
    """Of a retry: why."""
    inner = exc.exc if isinstance(exc, Retry) else None
    return inner if isinstance(inner, BaseException) else exc


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= ARGUMENTS_LENGTH else text[:ARGUMENTS_LENGTH]


def _followers(request: Any) -> tuple[Follower, ...]:
    """The tasks that are published after it: the rest of its chain, and its chord's body."""
    payload = request._payload
    embed = payload[2] if isinstance(payload, (list, tuple)) and len(payload) > 2 else None
    if not isinstance(embed, dict):
        return ()
    chain, chord = embed.get("chain"), embed.get("chord")
    if not chain and not chord:
        return ()
    signatures = [*reversed(chain[-MOST_FOLLOWERS:] if isinstance(chain, list) else ()), chord]
    found = [each for each in map(_follower, signatures) if each is not None]
    return tuple(found[:MOST_FOLLOWERS])


def _follower(signature: Any) -> Follower | None:
    options = signature.get("options") if isinstance(signature, dict) else None
    task_id = options.get("task_id") if isinstance(options, dict) else None
    return Follower(id_text(task_id), bounded(signature.get("task"))) if task_id else None


# -- by the flush ------------------------------------------------------------------------------------------------------


def run_of(facts: Facts, options: History) -> Run:
    """As it is stored. Called for each run, so what most runs don't have costs nothing."""
    task_id, task, queue, worker, state, started_s, end_ms, runtime, args, kwargs, *rest = facts
    published_ms, eta, root, parent, group, key, retries, redeliveries, followers, (error_class, error, traceback) = (
        rest
    )
    start_ms = _moment(started_s)
    runtime_s = _runtime(runtime, start_ms, end_ms)
    if start_ms and runtime_s:  # not when the main process heard of it, which may be a moment later
        end_ms = min(end_ms, start_ms + int(runtime_s * 1000))
    return Run(  # by their places: names take a microsecond more
        task_id,
        task,
        queue,
        worker,
        state,
        start_ms,
        end_ms,
        runtime_s,
        _argument(args, options),
        _argument(kwargs, options),
        min(published_ms, LATEST_MS),
        _eta_ms(eta) if eta else 0,
        key,
        retries,
        redeliveries,
        root,
        parent,
        error_class,
        _shown(error, ERROR_LENGTH),
        _shown(traceback, TRACEBACK_LENGTH, end=True) if options.tracebacks else "",
        group,
        followers,
    )


def _name(value: Any) -> str:
    """As :func:`bounded`, at once for what is nothing or needs no change."""
    if value is None:
        return ""
    return value if type(value) is str and len(value) <= NAME_LENGTH and value.isascii() else bounded(value)


def _argument(text: str, options: History) -> str:
    if options.arguments == "none":
        return ""
    return _shown(text, ARGUMENTS_LENGTH) if options.arguments == "masked" else bounded(text, ARGUMENTS_LENGTH)


def _shown(text: str, most: int, *, end: bool = False) -> str:
    """Without the secrets that it names."""
    if not text:
        return ""
    small = text.lower()
    for hint in HINTS:
        if hint in small:
            return bounded(masked_text(text), most, end=end)
    return bounded(text, most, end=end)


def _moment(seconds: Any) -> int:
    return int(seconds * 1000) if is_number(seconds, 0, LATEST_MS // 1000) else 0


def _eta_ms(eta: str) -> int:
    """Of the header, in which Celery writes a date; without a zone it is in UTC."""
    try:
        moment = datetime.fromisoformat(eta)
        return _moment((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return 0


def _runtime(runtime: Any, start_ms: int, end_ms: int) -> float | None:
    """As the process that ran it measured it, else since it was accepted."""
    if is_number(runtime, 0, LONGEST_S):
        return round(float(runtime), 6)
    return max(end_ms - start_ms, 0) / 1000 if start_ms and end_ms else None


def _whole(value: Any) -> int:
    return value if is_whole(value, 0, MOST) else 0


# -- requests ----------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

CLOCK = SystemClock()
CANCELLED = "cancelled: the connection to the broker was lost"


class HistoryRequest:
    """Mixed in before a task's own ``Request``."""

    #: Of the application; set where the class is made.
    recorder: Recorder
    active_key: ActiveKey | None = None
    recorded = False
    _runtime: float | None = None
    _released = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inner = cls.__dict__.get("on_success")
        if inner is not None:
            cls.on_success = _noting(inner)  # type: ignore[attr-defined]  # of the Request

    def note(self, state: str, exc: Any = None, traceback: Any = None, *, runtime: float | None = None) -> None:
        """The run has ended. Raises nothing."""
        if self.recorded:
            return
        self.recorded = True
        try:
            runtime = self._runtime if runtime is None else runtime
            facts = facts_of(self, state, CLOCK.wall_ms(), runtime, error_of(exc, traceback))
            self.recorder.note(facts, weight_of(facts), self.active_key)
        except Exception as error:  # noqa: BLE001 - whatever it is, the task goes on
            self.recorder.failed(error)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """An attempt did not succeed."""
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]  # a mixin
        finally:
            exc = exc_info.exception
            exc = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
            if not isinstance(exc, Terminated):
                self.note(self._state_of(exc), exc, exc_info.traceback)

    def _state_of(self, exc: Any) -> str:
        if isinstance(exc, Retry) or self._released:
            return str(states.RETRY)
        if isinstance(exc, Reject):
            return str(states.REJECTED)
        return str(states.IGNORED if isinstance(exc, Ignore) else states.FAILURE)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """A time limit has passed; the hard one ends the attempt."""
        result = super().on_timeout(soft, timeout)  # type: ignore[misc]  # a mixin
        if not soft and not worker_state.should_terminate:
            self.note(states.RETRY if self._released else states.FAILURE, TimeLimitExceeded(timeout))
        return result

    def reject(self, requeue: bool = False) -> Any:
        """Its message is dead-lettered, or released."""
        self._released = requeue
        return super().reject(requeue)  # type: ignore[misc]  # a mixin

    def _announce_revoked(self, reason: str, *rest: Any) -> Any:
        try:
            return super()._announce_revoked(reason, *rest)  # type: ignore[misc]  # a mixin
        finally:
            self.note(states.REVOKED, reason)

    def _announce_cancelled(self, *rest: Any, **options: Any) -> Any:
        try:
            return super()._announce_cancelled(*rest, **options)  # type: ignore[misc]  # a mixin
        finally:
            self.note(states.RETRY, CANCELLED)

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]  # a mixin
        if stored:
            self.note(states.SUCCESS)
        return stored

    def _retry_worker_lost(self, exc: Any, exc_info: Any) -> Any:
        retried = super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]  # a mixin
        if retried:
            self.note(states.RETRY, exc, exc_info.traceback)
        return retried


def _noting(inner: Callable[..., Any]) -> Callable[..., Any]:
    """``on_success`` that notes a success before anything else is done about it."""

    @wraps(inner)
    def on_success(self: HistoryRequest, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        failed, _result, runtime = failed__retval__runtime
        if failed:
            self._runtime = runtime
        else:
            self.note(states.SUCCESS, runtime=runtime)
        return inner(self, failed__retval__runtime, **kwargs)

    return on_success


# -- the worker --------------------------------------------------------------------------------------------------------


class Keeper(bootsteps.StartStopStep):
    """A step of the worker's consumer. Made with it, before it builds its tasks' strategies."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    #: Of the application.
    recorder: Recorder

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        mix_in(consumer.app, HistoryRequest, recorder=self.recorder)
        worker_shutdown.connect(self._on_shutdown)
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        """Also after a reconnection."""
        channel = consumer.task_consumer.channel
        if not isinstance(channel, Channel):
            logger.warning("no history is kept: it needs a broker at fdb:// or fdb+sqlite://")
            return
        client = channel.client
        options = client.options
        client.attach(self.recorder, timeout_s=options.connect_timeout)  # stays open when the connection is closed
        store = HistoryStore(
            client.database,
            client.location.namespace,
            clock=CLOCK,
            timeout_s=options.operation_timeout,
            patience=client.patience,
        )
        store.set_settings(self.recorder.bounds)
        self.recorder.open(
            store,
            _source(client, self.recorder.bounds),
            Upkeep(store, self.recorder.bounds, Broker.of(client).inspect.sessions, clock=CLOCK),
        )
        self._client = client

    def stop(self, consumer: Any) -> None:
        """The tasks that run now end later: the rest is flushed when the worker has shut down."""

    _client: Client | None = None

    def _on_shutdown(self, **_: Any) -> None:
        if self._client is None or not self.recorder.is_open:
            return
        patience = self._client.patience
        with patience.ending():
            self.recorder.close(patience.allow(CLOSING_S))
        self._client.detach(self.recorder)


def step(bounds: History) -> type[Keeper]:
    """For ``app.steps["consumer"]``."""
    return type("Keeper", (Keeper,), {"recorder": Recorder(bounds)})


def _source(client: Client, bounds: History) -> Source:
    return Source(
        running=_running,
        run_of=lambda request: run_of(facts_of(request, states.STARTED, 0, None), bounds),
        make=lambda facts: run_of(facts, bounds),
        session=lambda: bytes(client.membership().session_id),
    )


def _running() -> list[Any]:
    return [each for each in list(worker_state.active_requests) if isinstance(each, HistoryRequest)]
