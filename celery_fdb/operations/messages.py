"""What is done to selected messages: cancel, edit and replay, run now, reschedule.

Cancel: delete messages that were selected, or all in one state that match, and tell who waits for their results.

Those in a worker's hands are cancelled only if they were selected.

Edit and replay: a dead letter goes back to the queue it died in, with other arguments.

One transaction takes the old message out and stores the new one, which has the same id, key, priority and history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from celery_fdb.inspection.filters import PART
from celery_fdb.inspection.time_formats import moment, seconds_of
from celery_fdb.operations.action import Done, Field, Outcome, Request, each_selected, names
from celery_fdb.operations.parts import in_parts
from celery_fdb.operations.task_message import Arguments, arguments_of, due_at, read_json, with_arguments
from celery_fdb.tasks.revoking import NotTold, tell
from kombu_fdb import Broker, Spot
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import Listed, Part, Peeked
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

# -- cancel ------------------------------------------------------------------------------------------------------------


#: Of one part: each is deleted in a transaction of its own, and its result may be in another store.
MOST_AT_ONCE = 20


def cancel(broker: Broker, request: Request) -> Outcome:
    """Those that are selected."""
    done = _delete(broker, request)
    text = f"Cancelled {plural(len(done.spots), 'message')} of {request.queue}"
    told = _tell(request, [message for _, message in done.results])
    return done.outcome(f"{text}{names(request, done.spots)}. {told}")


def cancel_all(broker: Broker, request: Request) -> Outcome:
    """All that match, of the ready or, with the field ``state``, of the delayed ones."""
    wanted, about, queue = request.wanted, request.asked, broker.queue(request.queue)
    state = request.state
    told: set[str] = set()

    def part(after: bytes) -> Part:
        page = queue.page(PART, state=state, after=after)
        matching = [each for each in page.messages if wanted(each.message) and about.had_come(each.position)]
        now = matching[:MOST_AT_ONCE]
        done = _delete(broker, request._replace(spots=[each.spot for each in now]))
        if done.results:
            told.add(_tell(request, [message for _, message in done.results]))
        reached = now[: len(now) - done.late]
        is_all = len(reached) == len(matching)
        return Part(len(done.results), page.following if is_all else reached[-1].position)

    done = in_parts(part, request).tell("Cancelled", f"{state} message", request.queue)
    return done._replace(text=" ".join([done.text, *sorted(told)]))


def _delete(broker: Broker, request: Request) -> Done[Peeked]:
    queue = broker.queue(request.queue)

    def act(spot: Spot) -> Peeked | None:
        listed = queue.at(spot)
        return listed.message if listed is not None and queue.delete(spot) else None

    return each_selected(request, act)


def _tell(request: Request, gone: Sequence[Peeked]) -> str:
    """What is to be said of it."""
    if request.app is None:
        return request.untold
    failures = []
    for each in gone:
        try:
            tell(request.app, each)
        except NotTold as error:
            failures.append(f"{str(error).rstrip('.')}.")
    return " ".join(failures) or "Their results, if any, became REVOKED."


# -- edit and replay ---------------------------------------------------------------------------------------------------


EDIT_FIELDS = (
    Field("args", "Arguments", "json", "A JSON list.", "[]", required=True),
    Field("kwargs", "Keyword arguments", "json", "A JSON object.", "{}", required=True),
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def arguments(broker: Broker, request: Request) -> Mapping[str, str]:
    """Those that the task has. Raises ``QueueError`` if they can't be edited."""
    listed = _look(broker, request)
    if listed is None:
        return {}
    args, kwargs = arguments_of(listed.message.payload)
    return {"args": _written(args), "kwargs": _written(kwargs)}


def _written(value: Any) -> str:
    """For a form; a lone surrogate, which no page can hold, is spelt out."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return json.dumps(value, indent=2) if _SURROGATE.search(text) else text


def edit(broker: Broker, request: Request) -> Outcome:
    """With those of the fields ``args`` and ``kwargs``, which are JSON; one that is not there stays as it is."""
    listed = _look(broker, request)
    missed: Done[None] = Done([], 1, 0)
    if listed is None:
        return missed.outcome(f"Replayed nothing of {request.queue}.")
    payload = with_arguments(listed.message.payload, _given(request, arguments_of(listed.message.payload)))
    if not broker.dead_letters(request.queue).replay_changed(listed.spot, payload):
        return missed.outcome(f"Replayed nothing of {request.queue}.")
    home = listed.message.deaths[0].queue if listed.message.deaths else request.queue.removesuffix(DEAD_SUFFIX)
    return Outcome(f"Replayed 1 dead letter to {home} with other arguments{names(request, [listed.spot])}.")


def _given(request: Request, old: Arguments) -> Arguments:
    args, kwargs = (request.fields.get(each.name) for each in EDIT_FIELDS)
    return Arguments(
        old.args if args is None else read_json("args", args, list),
        old.kwargs if kwargs is None else read_json("kwargs", kwargs, dict),
    )


def _look(broker: Broker, request: Request) -> Listed | None:
    if len(request.spots) != 1:
        raise InvalidArgument("one message can be edited at a time", fix="Select one.")
    return broker.queue(request.queue).at(request.spots[0])


# -- run now and reschedule --------------------------------------------------------------------------------------------


RESCHEDULE_FIELDS = (
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
        raise InvalidArgument(
            "no moment to be due at", given=shown(text), fix=f"Write a{RESCHEDULE_FIELDS[0].help[1:]}"
        ) from None
    if due_ms <= now_ms:
        raise InvalidArgument("the moment has passed", given=shown(text), fix="Choose a later one, or run it now.")
    return due_ms
