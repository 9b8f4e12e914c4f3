"""Mark a task as revoked whose message was deleted from the store before a worker could begin it.

Its result and its chord change as if a worker had received a revoked task: the result backend, whichever it is, stores
``REVOKED`` and counts the part. No worker needs to run.

The message is deleted first. If the result were stored first, a worker could still run the task and contradict it. So
if the result backend does not answer afterwards, cancelling again does not help: the error says what to do instead.
"""

from __future__ import annotations

import logging

from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from kombu.message import Message
from kombu.serialization import loads, prepare_accept_content

from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import NO_SESSION, Delivery, Lease, Peeked
from kombu_fdb.transport.envelope import open_delivery, task_id_of

logger = logging.getLogger(__name__)

REASON = "revoked"


class NotTold(KombuFDBError):
    """The message is gone, but the callers that wait for the result still wait."""

    text = "cancelled, but its result could not be marked as REVOKED"


def tell(app: Celery, taken: Peeked) -> None:
    """Store ``REVOKED`` for the task of a message that was deleted, and count its part of a chord. Raises ``NotTold``.

    A message that is not a Celery task has no result. A task whose end is stored already (its worker died before the
    ack; a dead letter) keeps it, and its chord has been told.
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
    except Exception as error:  # each result backend has classes of its own
        fix = "When the result backend answers again, call app.backend.mark_as_revoked(task_id)."
        raise NotTold(task_id=task_id, reason=repr(error), fix=fix) from error


def _has_ended(app: Celery, taken: Peeked, task_id: str) -> bool:
    """A message that was never delivered has no result, so no backend is asked for it."""
    if not taken.redeliveries and not taken.deaths and not taken.owner:
        return False
    return app.backend.get_task_meta(task_id)["status"] in states.READY_STATES


def _opened(taken: Peeked) -> Message | None:
    """None if its bytes can't be read, whatever they raise: it is cancelled all the same."""
    delivery = Delivery(
        Lease(NO_SESSION, 0), taken.queue, taken.payload, taken.message_id, taken.redeliveries, taken.deaths, taken.key
    )
    try:
        opened = open_delivery(delivery, 0)
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
    """What the result backend wants to know of the task; None if its body must not, or can't, be read."""
    try:
        accept = prepare_accept_content(app.conf.accept_content)
        _args, _kwargs, embedded = loads(message.body, message.content_type, message.content_encoding, accept=accept)
        return Context({**message.headers, **message.properties}, **embedded)
    except Exception as error:  # noqa: BLE001 - whatever a foreign body raises
        logger.warning("task %s is cancelled; its body can't be read, so its chord is not updated: %s", task_id, error)
        return None
