"""Failed tasks as dead letters: the cause of a failure is kept with the message, where it can be read and replayed.

Model. An attempt of a task ends in the worker's parent process, in its ``Request``. This module adds to it:

* The message is *explained* to its channel (``QoS.explain``): error, its class, the end of the traceback, task, worker,
  and all attempts with time and error. If the message is rejected after that, at once or because it was redelivered too
  often, it is dead-lettered with the explanation, in one transaction. Done for every failure, ``Reject`` and lost
  worker.
* If the task *keeps its failures*, its last failure is such a rejection. With ``acks_late`` the message's own lease is
  rejected instead of acknowledged, so the message is always either held or dead. Without ``acks_late`` the message was
  acknowledged before the task began; a copy of it is stored among the dead letters.
* A message that Celery can't decode, and that its worker would acknowledge, is dead-lettered as ``malformed``; an
  unknown or invalid task, which the worker rejects, is explained.
* A message that was replayed into the queue in which it died starts over: its retries count from zero, and its
  ``expires``, which may have passed while it was dead, no longer applies.

A task keeps its failures if its option ``dead_letter`` says so or, without that option, the setting
``fdb_dead_letter_failures``. The default is no, as always in Celery, where a failure is a result like any other: the
result backend keeps it, monitors see it, and many applications don't want to run the task again. Moreover, people read
``<queue>.dead``. It keeps 10,000 dead letters, and those of an unreachable web site must not push out those of poison.

Retries carry their history in the header ``fdb_attempts``, which the process that runs the task adds to the message of
the next attempt: the last 10, with 300 characters of each error.

What happens at each failure. If the store does not answer while a message is rejected, the message stays leased, and is
rejected when the store answers; if the worker ends before that, it is delivered again. If the store does not answer
while a copy is stored, the worker's duties thread retries until it does or the worker ends; then the copy is lost, as
any task without ``acks_late`` may be.
If an answer is lost, the copy may be stored: the next try finds out, so there is one dead letter.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from weakref import WeakSet

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery import Celery, bootsteps, current_task
from celery.exceptions import Ignore, NotRegistered, Reject, Retry
from celery.signals import before_task_publish
from celery.utils.imports import symbol_by_name
from celery.utils.serialization import UnpickleableExceptionWrapper
from celery.worker import state
from celery.worker.request import logger as request_logger

from kombu_fdb.engine.messages.publish import Burial
from kombu_fdb.errors import StoreError
from kombu_fdb.keyspace.codec import ATTEMPTS
from kombu_fdb.primitives import failure
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.envelope import without_deaths
from kombu_fdb.transport.worker import SETTING

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 10
ATTEMPT_ERROR_LENGTH = 300
_installed: WeakSet[Celery] = WeakSet()


def install(app: Celery) -> None:
    """Have the app's workers explain failures, and bury them where tasks ask for it. Idempotent.

    Messages of other brokers stay as they are.
    """
    if app in _installed:
        return
    _installed.add(app)
    app.add_defaults({SETTING: False})
    app.steps["consumer"].add(FailureStep)
    before_task_publish.connect(_note_attempt, weak=False, dispatch_uid="celery_fdb.tasks.failures")


def keeps_failures(task: Any) -> bool:
    """Whether the task's last failure is dead-lettered: its option ``dead_letter``, else the app's setting."""
    wanted = getattr(task, "dead_letter", None)
    return bool(task.app.conf.get(SETTING, False) if wanted is None else wanted)


# -- the details of an error -------------------------------------------------------------------------------------------


def details_of(exc: Any, traceback: str = "", **facts: Any) -> dict[str, Any]:
    """What a dead letter says about an error; it is in ``Death.details`` and in the entries of ``x-death``."""
    told = failure.details_of(_cause(exc), str(traceback or ""))
    return {**told, "error_class": _class_of(exc), **facts}


def _cause(exc: Any) -> Any:
    """Of a ``Reject`` its reason, which is an exception or a text."""
    return exc.reason if isinstance(exc, Reject) else exc


def _class_of(exc: Any) -> str:
    """The class of an exception, also of one that can't be pickled; of a ``Reject``, the class of its exception."""
    cause = _cause(exc)
    if isinstance(cause, UnpickleableExceptionWrapper):
        return f"{cause.exc_module}.{cause.exc_cls_name}"
    return failure.class_of(cause if isinstance(cause, BaseException) else exc)


def _attempt(exc: Any) -> dict[str, str]:
    """One entry of the history. The time is when the attempt ended, in UTC."""
    error = "" if exc is None else f"{_class_of(exc)}: {failure.text_of(_cause(exc))}"[:ATTEMPT_ERROR_LENGTH]
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "error": error}


def _attempts(earlier: Any, exc: Any) -> list[dict[str, str]]:
    before = [each for each in earlier if isinstance(each, dict)] if isinstance(earlier, list) else []
    return [*before, _attempt(exc)][-MOST_ATTEMPTS:]


def _note_attempt(headers: Any = None, **_: Any) -> None:
    """In the process that runs a task: the message of its next attempt is about to be published."""
    task = current_task
    if not task or not isinstance(headers, dict) or not headers.get("retries") or task.app not in _installed:
        return
    if task.request.id == headers.get("id") and not task.request.called_directly:
        headers[ATTEMPTS] = _attempts(getattr(task.request, ATTEMPTS, None), sys.exc_info()[1])
        for name in headers.keys() - without_deaths(headers)[0].keys():
            del headers[name]  # Celery does so since 5.6: else each retry would be taken for what was replayed


# -- the request -------------------------------------------------------------------------------------------------------


class FailureRequest:
    """Mixed in before a task's own ``Request``."""

    #: The details of the failure that is being handled.
    _death: dict[str, Any] | None = None
    _copied = False
    acknowledged: bool
    _message: Any
    _on_reject: Callable[..., None]

    def __init__(self, message: Any, *args: Any, headers: Any = None, **options: Any) -> None:
        headers = message.headers if headers is None else headers
        super().__init__(message, *args, headers=_anew(headers, message), **options)  # type: ignore[call-arg]  # a mixin

    @property
    def _own_channel(self) -> Channel | None:
        channel = self._message.channel
        return channel if isinstance(channel, Channel) else None

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Celery calls this in the parent process when an attempt did not succeed."""
        exc = exc_info.exception
        self._fail(exc.exc if isinstance(exc, ExceptionWithTraceback) else exc, exc_info.traceback)
        result = super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]  # a mixin
        self._keep_copy()
        return result

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Celery calls this when a time limit has passed; the hard one ends the attempt."""
        if not soft and not state.should_terminate and self._death is None:
            self._fail(TimeLimitExceeded(timeout), "")
        result = super().on_timeout(soft, timeout)  # type: ignore[misc]  # a mixin
        if not soft:
            self._keep_copy()
        return result

    def _fail(self, exc: Any, traceback: str) -> None:
        """Explain the message, unless this is no failure: a retry, or an attempt that Celery itself has ended."""
        channel = self._own_channel
        if channel is None or isinstance(exc, Terminated | Ignore | Retry):
            return
        if self._already_revoked or self._already_cancelled:  # type: ignore[attr-defined]  # of the Request
            return
        self._death = details_of(
            exc,
            traceback,
            task=self.name,  # type: ignore[attr-defined]  # of the Request
            task_id=self.id,  # type: ignore[attr-defined]  # of the Request
            worker=self.hostname,  # type: ignore[attr-defined]  # of the Request
            attempts=_attempts(self._request_dict.get(ATTEMPTS), exc),  # type: ignore[attr-defined]  # of the Request
        )
        channel.qos.explain(self._message.delivery_tag, self._death)

    @property
    def _is_kept(self) -> bool:
        return self._death is not None and keeps_failures(self.task)  # type: ignore[attr-defined]  # of the Request

    def acknowledge(self) -> None:
        """Settle the message of an ended attempt. A failure that is kept becomes a rejection, without an event."""
        if not self._is_kept:
            super().acknowledge()  # type: ignore[misc]  # a mixin
        elif not self.acknowledged:
            self._on_reject(request_logger, self._connection_errors, False)  # type: ignore[attr-defined]  # of the Request
            self.acknowledged = True

    def _keep_copy(self) -> None:
        """Keep a copy of a message that was acknowledged before its task began."""
        if self._is_kept and not self.task.acks_late and not self._copied:  # type: ignore[attr-defined]  # of the Request
            self._copied = True
            channel = self._own_channel
            if channel is not None and self._death is not None:
                bury_copy(channel, self._message, self._death)

    def _success_was_stored(self) -> Any:
        """Whether the child process was lost after the task had succeeded: then it is no failure."""
        stored = super()._success_was_stored()  # type: ignore[misc]  # a mixin
        if stored:
            self._death = None
        return stored

    def _retry_worker_lost(self, exc: Any, exc_info: Any) -> Any:
        """Retry the task of a worker that was lost. The retry acknowledges the message."""
        death, self._death = self._death, None
        retried = super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]  # a mixin
        if not retried:
            self._death = death
        return retried


def _anew(headers: Any, message: Any) -> Any:
    """The message's headers; those of a first attempt, if the message was replayed."""
    if not isinstance(message.channel, Channel) or not isinstance(headers, dict):
        return headers
    _published, deaths = without_deaths(headers)
    if not deaths or deaths[0].queue != (message.delivery_info or {}).get("queue"):
        return headers
    return {name: value for name, value in headers.items() if name not in {ATTEMPTS, "expires"}} | {"retries": 0}


def bury_copy(channel: Channel, message: Any, death: dict[str, Any]) -> None:
    """Store a dead letter for a message that is acknowledged already; later, if the store does not answer now."""
    queue = message.delivery_info["queue"]
    publication, deaths = channel.encode_again(message)
    burial = Burial(publication)  # one burial for all tries, so that the message is buried once

    def bury() -> None:
        channel.engine.publisher.bury_copy(queue, burial, deaths, details=death)

    try:
        bury()
    except StoreError:
        logger.exception("the dead letter of a failed task will be stored when the store answers again")
        channel.client.later(bury)


# -- the worker --------------------------------------------------------------------------------------------------------


def mix_in(app: Celery, mixin: type, **fields: Any) -> None:
    """Give each task of the app a ``Request`` with ``mixin`` before its own, unless it has one. ``fields``: of it."""
    requests: dict[type, type] = {}
    for task in app.tasks.values():
        base = symbol_by_name(task.Request)
        if not issubclass(base, mixin):
            task.Request = requests.setdefault(base, type("Request", (mixin, base), fields))


class FailureStep(bootsteps.Step):
    """Made with the consumer, before it builds its tasks' strategies."""

    def __init__(self, consumer: Any, **_: Any) -> None:
        mix_in(consumer.app, FailureRequest)
        self._explain_strangers(consumer)

    @staticmethod
    def _explain_strangers(consumer: Any) -> None:
        """Explain messages that are not tasks of this worker."""
        decode_error, unknown_task = consumer.on_decode_error, consumer.on_unknown_task
        unknown_message, invalid_task = consumer.on_unknown_message, consumer.on_invalid_task

        def on_decode_error(message: Any, exc: Any) -> Any:
            if not isinstance(message.channel, Channel):
                return decode_error(message, exc)
            _explain(message, exc, reason="malformed")
            message.ack = message.reject  # Celery logs it and acknowledges it
            return decode_error(message, exc)

        def on_unknown_task(body: Any, message: Any, exc: Any) -> Any:
            _explain(message, NotRegistered(str(exc)))
            return unknown_task(body, message, exc)

        def on_unknown_message(body: Any, message: Any) -> Any:
            _explain(message, ValueError("not a Celery message"))
            return unknown_message(body, message)

        def on_invalid_task(body: Any, message: Any, exc: Any) -> Any:
            _explain(message, exc)
            return invalid_task(body, message, exc)

        consumer.on_decode_error, consumer.on_unknown_task = on_decode_error, on_unknown_task
        consumer.on_unknown_message, consumer.on_invalid_task = on_unknown_message, on_invalid_task


def _explain(message: Any, exc: Any, reason: str = "rejected") -> None:
    if isinstance(message.channel, Channel):
        headers = message.headers if isinstance(message.headers, dict) else {}
        facts = {name: str(headers[key]) for name, key in (("task", "task"), ("task_id", "id")) if key in headers}
        message.channel.qos.explain(message.delivery_tag, details_of(exc, **facts), reason=reason)
