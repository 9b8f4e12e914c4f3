"""Actions on a queue or one key of it: pause and limit; and on all that waits there: move, purge, delete."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from celery_fdb.inspection import formats
from celery_fdb.inspection.overview import QueueView, look
from celery_fdb.operations.action import AskedAnew, Field, Outcome, Request, in_parts
from kombu_fdb import Broker
from kombu_fdb.api.queue import Queue
from kombu_fdb.errors import InvalidArgument, QueueError, QueueNotFound
from kombu_fdb.model import KeyLimits, Part
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import MOST, rate_of
from kombu_fdb.transport.envelope import whole_of

# -- pause and limits --------------------------------------------------------------------------------------------------


LIMITS = (
    Field("weight", "Weight", "number", "Messages per turn."),
    Field("max_in_flight", "In flight", "number", "How many may be leased at a time; empty for no limit."),
    Field("rate", "Rate", "text", "Messages a second across all consumers: 10, 100/m, 1000/h; empty for no limit."),
    Field("burst", "Burst", "number", "How many may be delivered at once within the rate."),
    Field("capacity", "Capacity", "number", "Ready messages before publishing is refused; empty for no limit."),
    Field("priority", "Priority", "number", "0 to 9, for the whole key; empty to use each message's own."),
)
NO_LIMITS = KeyLimits()


def pause(broker: Broker, request: Request) -> Outcome:
    """Pause a queue, or one key of it."""
    _there(broker, request).pause(request.key)
    return Outcome(f"Paused {request}.")


def resume(broker: Broker, request: Request) -> Outcome:
    """Resume a queue, or one key of it."""
    _there(broker, request).resume(request.key)
    return Outcome(f"Resumed {request}.")


def limits(broker: Broker, request: Request) -> Mapping[str, str]:
    """The form's fields, filled with the present limits."""
    found = broker.queue(request.queue).limits(request.key)
    return {each.name: _shown(each.name, getattr(found, each.name)) for each in LIMITS}


def _there(broker: Broker, request: Request) -> Queue:
    """The queue. Raises ``QueueNotFound`` if it is gone: a new queue of that name would get these settings."""
    look(broker, queues=[request.queue])
    return broker.queue(request.queue)


def _shown(name: str, value: Any) -> str:
    """A limit as the form shows it and reads it back: a rate as it was written, if that is exact."""
    if name == "rate" and value is not None and rate_of(text := formats.limit(value)) == value:
        return text
    return "" if value is None else str(value).removesuffix(".0")


def limit(broker: Broker, request: Request) -> Outcome:
    """Set limits: an empty field limits nothing, a missing one changes nothing."""
    queue, given = _there(broker, request), request.fields
    changes: Any = {each.name: read_limit(each.name, given[each.name]) for each in LIMITS if each.name in given}
    if request.key is None:
        queue.limit_every_key(**changes)
    else:
        queue.limit(request.key, **changes)
    told = ", ".join(f"{name} {_shown(name, value)}" for name, value in changes.items() if value is not None)
    return Outcome(f"Set the limits of {_whose(request)}: {told}.")


def unlimit(broker: Broker, request: Request) -> Outcome:
    """Remove limits: of one key, which then has those of every key; or those of every key."""
    queue = _there(broker, request)
    if request.key is None:
        nothing: Any = {each.name: getattr(NO_LIMITS, each.name) for each in LIMITS}
        queue.limit_every_key(**nothing)
    else:
        if queue.limits(request.key).paused:  # a pause is one of the limits
            raise QueueError("the key is paused", key=request.key, fix="Resume it first, then remove its limits.")
        queue.unlimit(request.key)
    return Outcome(f"Removed the limits of {_whose(request)}.")


def _whose(request: Request) -> str:
    return f"every key of {request.queue}" if request.key is None else str(request)


def read_limit(name: str, text: str) -> float | int | None:
    """A limit as a form has it; "" for its default. Raises ``InvalidArgument``."""
    text = text.strip()
    if not text:
        default: float | int | None = getattr(NO_LIMITS, name)
        return default
    if name == "rate":
        return read_rate(text)
    return whole_of(name, text, MOST)


def read_rate(text: str) -> float:
    """A rate in messages a second. Raises ``InvalidArgument``."""
    rate = rate_of(text)
    if rate is None:
        raise InvalidArgument(f"{text[:80]!r} is not a rate", fix="Write one such as 10, 100/m or 1000/h.")
    return rate


# -- all that wait -----------------------------------------------------------------------------------------------------


MOVE = (Field("target", "To the queue", "queue", required=True),)
#: The first messages that are moved in one part.
MOVED_AT_ONCE = 1_000
#: Messages that are deleted with their queue.
MOST_DELETED = 100_000


def move(broker: Broker, request: Request) -> Outcome:
    """Move the messages of the queue or key that waited when the action was asked for to the end of ``target``.

    Fields of the command line: ``first``, for those that a consumer would get first, as many as were asked about;
    ``new``, for a target that need not be there. Raises ``QueueNotFound``, ``QueueError`` before the first part.
    """
    source, target, number = broker.queue(request.queue), request.fields.get("target", ""), request.asked.number
    first, part = request.asked.by, partial(source.move_part, target, key=request.key)
    if "first" in request.fields:
        first, part = number.to_bytes(8), partial(_move_first, source, target, request.key)
    if not request.mark:
        _there(broker, request)
    try:
        (view,) = look(broker, queues=[target]).queues
        if not request.mark:  # afterwards the target has some of them
            _check_room(view, number)
    except QueueNotFound:
        if "new" not in request.fields:
            raise
    if not number:
        return Outcome(f"Moved 0 messages of {request} to {target}.")
    return in_parts(part, request, "Moved", "message", f"{request} to {target}", first=first)


def _move_first(source: Queue, target: str, key: str | None, left: bytes) -> Part:
    """A part that moves the first messages; its mark says how many are left to be moved."""
    number = int.from_bytes(left)
    moved = source.move(target, min(number, MOVED_AT_ONCE), key=key)
    return Part(moved, (number - moved).to_bytes(8) if 0 < moved < number else None)


def _check_room(target: QueueView, coming: int) -> None:
    """Check that the target's maximum length would drop no message. Raises ``QueueError``."""
    most = target.arguments.get("x-max-length")
    most_bytes = target.arguments.get("x-max-length-bytes")
    if (most is not None and target.ready + target.delayed + coming > most) or most_bytes is not None:
        raise QueueError(
            "the target's maximum leaves no room for these messages",
            target=target.name,
            coming=coming,
            ready=target.ready,
            max_length=most,
            max_length_bytes=most_bytes,
            fix="Declare it without its maximum, or move fewer messages (fdb move --limit).",
        )


def purge(broker: Broker, request: Request) -> Outcome:
    """Delete all messages that were ready or delayed when the action was asked for."""
    part, asked = broker.queue(request.queue).purge_part, request.asked
    if not asked.number:  # where nothing has come yet, there is nothing that it could have come by
        return Outcome(f"Deleted 0 messages of {request.queue}.")
    return in_parts(part, request, "Deleted", "message", request.queue, first=asked.by)


def delete(broker: Broker, request: Request) -> Outcome:
    """Delete the queue with its bindings and messages. Refused if it is in use, or if messages have arrived since."""
    queue, asked = broker.queue(request.queue), request.asked
    mark = queue.mark()  # messages that arrive during the check below are not deleted either
    counts = queue.stats()
    number = counts.ready + counts.delayed
    if number > asked.number or (number <= MOST_DELETED and not asked.includes_all_of(queue)):
        raise AskedAnew(asked=asked.number, there=number)
    if number > MOST_DELETED:
        raise QueueError("too many messages to be deleted with their queue", messages=number, fix="Purge it first.")
    return Outcome(f"Deleted {request.queue} with {plural(queue.drop(mark), 'message')}.")
