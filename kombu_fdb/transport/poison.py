"""Messages that a consumer can't handle must not end a Celery worker. Guarantee: POISON-ENDS.

Model. As usual in kombu, an exception from a consumer's callback propagates to the program that drains. On a Celery
worker's own connection nothing catches it: it ends the worker, then the next worker that gets the message, and so each
worker in turn. A connection is the worker's once the worker consumes tasks or remote control on it, as its consumers'
callbacks show; any other connection of the process, such as one that a task opens, is the program's.

Celery's consumer does not check headers and bodies (an ``id`` that is an object, a body that is not a list of three, an
event that is no object), so one such message suffices. Therefore on a worker's connection, and only there, the message
is released as an attempt, with a delay: a second at first, then twice as long each time, up to a minute. The cause may
be temporary; and a message that no worker can handle never ties up a worker or floods the log: only its first attempt
logs the traceback. When the message reaches its delivery limit, its dead letter shows the error. A message without
acks, such as a broadcast, is logged and gone.

A task's headers and body are checked before Celery's task consumer gets them (``envelope.py``): some parts are used
only later, when a process, a thread or a greenlet is free. If they are wrong, the message is dead-lettered at once.

Connection errors pass through, as Celery recovers from them: it reconnects, and the message is delivered again. Channel
errors do not: unless ``broker_channel_error_retry`` is set, they end Celery. One of them is caused by an id that is too
long for a key of the result backend.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu_fdb.primitives import failure
from kombu_fdb.transport.envelope import body_fault, fault_of

logger = logging.getLogger(__name__)

#: The modules of Celery's callbacks: for tasks alone, and for tasks and remote control.
TASKS = "celery.worker.consumer.consumer"
WORKER = "celery.worker."
#: How long a message rests after its first attempt, and the longest rest, in milliseconds.
FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 60_000


def fault_in(message: Any, callback: Any) -> dict[str, str] | None:
    """A fault in a task's message that would fail in Celery later, as details of a death; None if there is none.

    Celery would acknowledge, and so lose, a message whose body can't be unpacked or decoded.
    """
    if "task" not in message.headers or TASKS not in _modules(callback):
        return None
    if message.errors:
        return _unreadable("unpacked", message.errors[0][1])
    try:
        fault = fault_of(message.headers) or _fault_of_body(message, callback)
    except Exception as error:  # noqa: BLE001 - whatever a decoder, or an embedded object's class, raises
        return _unreadable("decoded", error)
    return None if fault is None else {"error": fault}


def _unreadable(step: str, error: BaseException) -> dict[str, str]:
    name = failure.class_of(error)
    return {"error_class": name, "error": f"the body can't be {step}: {name}: {failure.text_of(error):.200}"}


def _fault_of_body(message: Any, callback: Any) -> str | None:
    """Decode the body in place of the consumer, which then finds it decoded. Raises what the decoder raises."""
    accept = getattr(getattr(callback, "__self__", None), "accept", None)
    if accept is None:
        return None
    message.accept = accept
    return body_fault(message.payload)


def is_workers(callback: Any) -> bool:
    """Whether a consumer with this callback makes its connection the worker's."""
    return any(each.startswith(WORKER) for each in _modules(callback))


def _modules(callback: Any) -> list[str]:
    """The modules of the functions that a kombu consumer calls; ``callback`` is a method of that consumer."""
    consumer = getattr(callback, "__self__", None)
    handlers = (getattr(consumer, "on_message", None), *(getattr(consumer, "callbacks", None) or ()))
    return [getattr(each, "__module__", None) or "" for each in handlers]


def give_back(message: Any, error: Exception, name: str, redeliveries: int) -> None:
    """Release the message, counted, after a pause. Raises a ``StoreError`` if that can't be done."""
    tag, qos = message.delivery_tag, message.channel.qos
    held = qos.holds(tag)
    _log(name, redeliveries, error, goes_back=held)
    qos.explain(tag, failure.details_of(error, failure.traceback_of(error)), reason="malformed")
    if held:
        qos.release(tag, _pause_ms(redeliveries))


def _log(name: str, redeliveries: int, error: Exception, *, goes_back: bool) -> None:
    """Log the first attempt with its traceback, each later one in a line."""
    logger.error(
        "attempt %d: %s can't be handled%s: %s: %.200s",
        redeliveries + 1,
        name,
        " and is released" if goes_back else "",
        failure.class_of(error),
        failure.text_of(error),
        exc_info=None if redeliveries or failure.traceback_of(error) == failure.UNPRINTABLE else error,
    )


def _pause_ms(redeliveries: int) -> int:
    return min(FIRST_PAUSE_MS << min(redeliveries, 16), LONGEST_PAUSE_MS)
