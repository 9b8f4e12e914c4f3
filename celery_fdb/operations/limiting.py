"""Pause, resume, and limits: of one key of a queue, or of every key without limits of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_fdb.inspection.moments import rate_of
from celery_fdb.operations.action import Field, Outcome, Request
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.model import KeyLimits
from kombu_fdb.primitives.ranges import shown

FIELDS = (
    Field("weight", "Weight", "number", "Messages per turn."),
    Field("max_in_flight", "In flight", "number", "How many may be leased at a time; empty for no limit."),
    Field("rate", "Rate", "text", "Messages a second across all consumers: 10, 100/m, 1000/h; empty for no limit."),
    Field("burst", "Burst", "number", "How many may be delivered at once within the rate."),
    Field("capacity", "Capacity", "number", "Ready messages before publishing is refused; empty for no limit."),
    Field("priority", "Priority", "number", "0 to 9, for the whole key; empty to use each message's own."),
)
NO_LIMITS = KeyLimits()


def pause(broker: Broker, request: Request) -> Outcome:
    """A queue, or one key of it."""
    broker.queue(request.queue).pause(request.key)
    return Outcome(f"Paused {request}.")


def resume(broker: Broker, request: Request) -> Outcome:
    """The same, delivered again."""
    broker.queue(request.queue).resume(request.key)
    return Outcome(f"Resumed {request}.")


def limits(broker: Broker, request: Request) -> Mapping[str, str]:
    """Those that hold now."""
    found = broker.queue(request.queue).limits(request.key)
    return {each.name: _shown(getattr(found, each.name)) for each in FIELDS}


def _shown(value: Any) -> str:
    """As it is: what a form shows is what it sets again."""
    return "" if value is None else str(value).removesuffix(".0")


def limit(broker: Broker, request: Request) -> Outcome:
    """All at once, as the form has them: an empty field limits nothing."""
    queue = broker.queue(request.queue)
    changes: Any = {each.name: _read(each.name, request.fields.get(each.name, "").strip()) for each in FIELDS}
    if request.key is None:
        queue.limit_every_key(**changes)
    else:
        queue.limit(request.key, **changes)
    told = ", ".join(f"{name} {_shown(value)}" for name, value in changes.items() if value is not None)
    return Outcome(f"Set the limits of {_whose(request)}: {told}.")


def unlimit(broker: Broker, request: Request) -> Outcome:
    """The key has the limits of every key again; every key has none."""
    queue = broker.queue(request.queue)
    if request.key is None:
        nothing: Any = {each.name: getattr(NO_LIMITS, each.name) for each in FIELDS}
        queue.limit_every_key(**nothing)
    else:
        if queue.limits(request.key).paused:  # which stands among them
            raise QueueError("the key is paused", key=request.key, fix="Resume it first, then remove its limits.")
        queue.unlimit(request.key)
    return Outcome(f"Removed the limits of {_whose(request)}.")


def _whose(request: Request) -> str:
    return f"every key of {request.queue}" if request.key is None else str(request)


def _read(name: str, text: str) -> float | int | None:
    if not text:
        default: float | int | None = getattr(NO_LIMITS, name)
        return default
    if name == "rate":
        return read_rate(text)
    if not text.isdecimal() or len(text) > 16:
        raise InvalidArgument(f"{name} must be a whole number", given=shown(text), fix="Write digits only, or nothing.")
    return int(text)


def read_rate(text: str) -> float:
    """Messages a second. Raises ``InvalidArgument``."""
    rate = rate_of(text)
    if rate is None:
        raise InvalidArgument(f"{text[:80]!r} is not a rate", fix="Write one such as 10, 100/m or 1000/h.")
    return rate
