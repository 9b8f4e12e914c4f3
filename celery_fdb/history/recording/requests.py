"""What became of each task, as the worker's main process learns it: from its requests.

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
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery import bootsteps, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import worker_shutdown
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from celery_fdb.history.options import History
from celery_fdb.history.recording.recorder import CLOSING_S, Recorder, Source
from celery_fdb.history.recording.run_builder import error_of, facts_of, run_of, weight_of
from celery_fdb.history.recording.upkeep import Upkeep
from celery_fdb.history.store import ActiveKey, HistoryStore
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.process.client import Client
from kombu_fdb.transport.channel import Channel

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
        requests: dict[type, type] = {}
        fields = {"recorder": self.recorder}
        for task in consumer.app.tasks.values():
            base = symbol_by_name(task.Request)
            if not issubclass(base, HistoryRequest):
                task.Request = requests.setdefault(base, type("Request", (HistoryRequest, base), fields))
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
