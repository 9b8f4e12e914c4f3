"""Run now, and reschedule: messages that were selected get another moment at which they are due."""

from __future__ import annotations

from datetime import UTC, datetime

from celery_fdb.inspection.moments import moment, seconds_of
from celery_fdb.operations.action import Done, Field, Outcome, Request, each_selected, names
from celery_fdb.operations.task_message import due_at
from kombu_fdb import Broker, Spot
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

FIELDS = (
    Field(
        "due", "Due", "moment", "A date and time, as 2031-12-31T23:59, or from now on: 90s, 10m, 2h, 7d.", required=True
    ),
)


def run_now(broker: Broker, request: Request) -> Outcome:
    """Ready at once."""
    done = _each(broker, request, None)
    return done.outcome(
        f"Made {plural(len(done.spots), 'message')} of {request.queue} ready{names(request, done.spots)}."
    )


def reschedule(broker: Broker, request: Request) -> Outcome:
    """Due at the moment, or after the time, in the field ``due``."""
    due_ms = _due_ms(request, request.clock.wall_ms())
    done = _each(broker, request, due_ms)
    at = moment(due_ms).isoformat(sep=" ", timespec="seconds")
    number = plural(len(done.spots), "message")
    return done.outcome(f"Rescheduled {number} of {request.queue} to {at}{names(request, done.spots)}.")


def _each(broker: Broker, request: Request, due_ms: int | None) -> Done[bool]:
    """Those that had not moved. Raises ``QueueError`` for one that can't be, with those before it done."""
    queue = broker.queue(request.queue)

    def act(spot: Spot) -> bool | None:
        listed = queue.at(spot)
        if listed is None:
            return None
        payload = due_at(listed.message.payload, due_ms)
        delay_s = 0 if due_ms is None else max(due_ms - request.clock.wall_ms(), 1) / 1000
        return bool(queue.reschedule(spot, delay_s, payload=payload)) or None

    return each_selected(request, act)


def _due_ms(request: Request, now_ms: int) -> int:
    text = request.fields.get("due", "").strip()
    seconds = seconds_of(text)
    if seconds is not None:
        return now_ms + int(seconds * 1000)
    try:
        found = datetime.fromisoformat(text)
        aware = found if found.tzinfo else found.replace(tzinfo=request.zone)
        due_ms = int(aware.astimezone(UTC).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidArgument("no moment to be due at", given=shown(text), fix=f"Write a{FIELDS[0].help[1:]}") from None
    if due_ms <= now_ms:
        raise InvalidArgument("the moment has passed", given=shown(text), fix="Choose a later one, or run it now.")
    return due_ms
