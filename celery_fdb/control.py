"""Revoking, also of tasks that no worker holds: ``revoke`` deletes a waiting task and marks its result as revoked.

Celery's own ``revoke`` tells the running workers; they remember the id, and drop the task when it reaches them. A
worker that starts later, or restarts, knows nothing of it, and an ETA task stays in its queue for days. Here one
transaction deletes the task's messages that no worker holds: ready, delayed or dead ones. The task's result becomes
``REVOKED``, and its chord fails. Then the workers are told as usual, for an attempt that is already running.

Result and chord change as if a worker had received a revoked task: the result backend, whichever it is, stores
``REVOKED`` and counts the part. No worker needs to run. The message is deleted first. If the result were stored first,
a worker could still run the task and contradict it. So if the result backend does not answer afterwards, cancelling
again does not help: the error says what to do instead.

Turn it on with ``Celery(control="celery_fdb.control:Control")`` or ``celery_fdb.install(app)``. With another broker it
does what Celery's does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from amqp.exceptions import NotFound
from celery import Celery, states
from celery.app.control import Control as CeleryControl
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from kombu.exceptions import ContentDisallowed, OperationalError
from kombu.message import Message
from kombu.serialization import loads, prepare_accept_content

from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError, SessionLost, StoreUnavailable
from kombu_fdb.model import Peeked
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.envelope import open_peeked, task_id_of
from kombu_fdb.transport.errors import CONNECTION_ERRORS, operational_errors

T = TypeVar("T")

logger = logging.getLogger(__name__)

REASON = "revoked"
#: Errors that mean that the workers could not be asked. Besides errors of the broker: this process was taken for dead,
#: its queue for answers was deleted, or a worker answered in a format that this app does not accept.
UNASKED: tuple[type[BaseException], ...] = (
    OperationalError,
    *CONNECTION_ERRORS,
    SessionLost,
    NotFound,
    ContentDisallowed,
)


class ResultNotRevoked(KombuFDBError):
    """The message was deleted, but callers that wait for its result still wait."""

    text = "cancelled, but its result could not be marked as REVOKED"


#: Its name before 0.3; until 0.4.
NotTold = ResultNotRevoked


class Control(CeleryControl):
    """``app.control``."""

    def cancel(self, task_id: str | Iterable[str], connection: Any = None) -> int:
        """Delete the waiting messages of a task (or tasks), and mark it as revoked. Returns how many were deleted.

        0 if the task is unknown, done, or held by a worker, or if the broker is not ours. Raises
        ``kombu.exceptions.OperationalError`` if the store does not answer, and :class:`ResultNotRevoked` if the result
        backend does not answer after the deletion.
        """
        wanted = [task_id] if isinstance(task_id, str) else list(task_id)
        with self.app.connection_or_acquire(connection) as connected:
            channel = connected.default_channel
            if not isinstance(channel, Channel):
                return 0
            broker = Broker.of(channel.client)
            return sum(operational_errors(cancel_task)(broker, each, self.app) for each in wanted)

    def revoke(self, task_id: str | list[str], destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Do what Celery's does, after :meth:`cancel`. With a ``destination``, nothing is cancelled in the store."""
        if destination is None:
            self.cancel(task_id, kwargs.get("connection"))
        return super().revoke(task_id, destination, *args, **kwargs)


def cancel_task(broker: Broker, task_id: str, app: Celery | None) -> int:
    """Delete the waiting messages of a task; with its app, mark its result as revoked. Returns how many were deleted.

    Raises :class:`ResultNotRevoked` if the result backend does not answer after the deletion.
    """
    taken = broker.cancel(task_id)
    if taken and app is not None:
        revoke_result(app, taken[0])
    return len(taken)


def ask_workers(app: Celery, question: Callable[[CeleryControl], T]) -> T:
    """Ask the running workers: call ``question`` with ``app.control``, and return its answer.

    Raises ``StoreUnavailable`` for :data:`UNASKED`. The workers may have received the question all the same.
    """
    try:
        return question(app.control)
    except UNASKED as error:
        raise StoreUnavailable("the workers could not be asked", reason=str(error)) from error


# -- the callers that wait for the result -----------------------------------------------------------------------------


def revoke_result(app: Celery, taken: Peeked) -> None:
    """Store ``REVOKED`` for the task of a deleted message, and count its part of a chord. Raises ``ResultNotRevoked``.

    Without a Celery task in it, a message has no result. A task whose end is stored already (its worker died before the
    ack; a dead letter) keeps it, and its chord has been told. An earlier revoke may have told a worker that held the
    message: it stored ``REVOKED``, and told no chord.
    """
    if isinstance(app.backend, DisabledBackend):
        return
    message = _opened(taken)
    task_id = taken.task_id or (message and task_id_of(message.headers, message.properties))
    if not task_id or (message is not None and "task" not in message.headers):
        return
    try:
        if not _has_ended(app, taken, task_id):
            request = None if message is None else _request(app, message, task_id)
            app.backend.mark_as_revoked(task_id, REASON, request=request)
    except Exception as error:  # each result backend raises errors of its own
        fix = "When the result backend answers again, call app.backend.mark_as_revoked(task_id)."
        raise ResultNotRevoked(task_id=task_id, reason=repr(error), fix=fix) from error


def _has_ended(app: Celery, taken: Peeked, task_id: str) -> bool:
    """Whether the task has ended. A message that was never delivered has no result, so no backend is asked for it."""
    if not taken.redeliveries and not taken.deaths and not taken.owner:
        return False
    return app.backend.get_task_meta(task_id)["status"] in states.READY_STATES - {states.REVOKED}


def _opened(taken: Peeked) -> Message | None:
    """The message, decoded; None if it can't be, which does not prevent its cancellation."""
    try:
        opened = open_peeked(taken)
    except Exception as error:  # noqa: BLE001 - as above
        logger.warning("a message of task %s can't be read: %s", taken.task_id, error)
        return None
    return Message(
        body=opened["body"],
        content_type=opened["content-type"],
        content_encoding=opened["content-encoding"],
        headers=opened["headers"],
        properties=opened["properties"],
    )


def _request(app: Celery, message: Message, task_id: str) -> Context | None:
    """The task's request for the result backend; None if the body's content type is refused or it can't be read."""
    try:
        accept = prepare_accept_content(app.conf.accept_content)
        _args, _kwargs, embedded = loads(message.body, message.content_type, message.content_encoding, accept=accept)
        return Context({**message.headers, **message.properties}, **embedded)
    except Exception as error:  # noqa: BLE001 - whatever a foreign body raises
        logger.warning("task %s is cancelled; its body can't be read, so its chord is not updated: %s", task_id, error)
        return None
