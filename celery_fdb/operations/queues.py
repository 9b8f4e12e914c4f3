"""A queue as a whole: its messages moved or purged, in parts; itself deleted; a test message published to it."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from kombu.exceptions import OperationalError

from celery_fdb.inspection.overview import QueueView, look
from celery_fdb.inspection.time_formats import seconds_of
from celery_fdb.operations.action import WAITING, Asked, AskedAnew, Field, Outcome, Request, in_parts, listed
from celery_fdb.operations.messages import Arguments, make, read_json
from kombu_fdb import Broker, Queue
from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

MOVE = (Field("target", "To the queue", "queue", required=True),)
PUBLISH = (
    Field("task", "Task", "task", "Its name, as shop.tasks.charge.", required=True),
    Field("args", "Arguments", "json", "A JSON list.", "[]"),
    Field("kwargs", "Keyword arguments", "json", "A JSON object.", "{}"),
    Field("fair_key", "Fairness key"),
    Field("delay", "Delay", help="90s, 10m, 2h; empty for none."),
    Field("priority", "Priority", "number", "0 to 9; 9 is the most urgent, unless the broker's option says otherwise."),
)
#: How long workers may take to say which tasks they know.
ANSWER_S = 1.0
#: Messages that are deleted with their queue.
MOST_DELETED = 100_000


def move(broker: Broker, request: Request) -> Outcome:
    """Those that waited when it was asked for, in the queue or with the key, to the end of the queue ``target``."""
    source, target = broker.queue(request.queue), request.fields.get("target", "")
    asked, (_, view) = request.asked, look(broker, queues=[request.queue, target]).queues
    check_room(view, asked.number)
    if not asked.number:
        return Outcome(f"Moved 0 messages of {request} to {target}.")
    part = partial(source.move_part, target, key=request.key)
    return in_parts(part, request, "Moved", "message", f"{request} to {target}", first=asked.by)


def check_room(target: QueueView, coming: int) -> None:
    """Nothing may be trimmed away by the target's own maximum. Raises ``QueueError``."""
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
    """All that were ready or delayed when it was asked for."""
    part, asked = broker.queue(request.queue).purge_part, request.asked
    if not asked.number:  # where nothing has come yet, there is nothing that it could have come by
        return Outcome(f"Deleted 0 messages of {request.queue}.")
    return in_parts(part, request, "Deleted", "message", request.queue, first=asked.by)


def delete(broker: Broker, request: Request) -> Outcome:
    """The queue with its bindings and messages; refused while it is in use, and if it holds others than was asked."""
    queue, asked = broker.queue(request.queue), request.asked
    mark = queue.mark()  # what comes while it is looked at is not deleted either
    counts = queue.stats()
    number = counts.ready + counts.delayed
    if number > asked.number or (number <= MOST_DELETED and _has_others(queue, asked)):
        raise AskedAnew(asked=asked.number, there=number)
    if number > MOST_DELETED:
        raise QueueError("too many messages to be deleted with their queue", messages=number, fix="Purge it first.")
    return Outcome(f"Deleted {request.queue} with {plural(queue.drop(mark), 'message')}.")


def _has_others(queue: Queue, asked: Asked) -> bool:
    """Whether a message has come since it was asked for. Reads all that wait."""
    return not all(asked.had_come(each.position) for state in WAITING for each in listed(queue, state))


def publish(broker: Broker, request: Request) -> Outcome:
    """A task, as Celery would publish it."""
    given = {each.name: request.fields.get(each.name, "").strip() or each.value for each in PUBLISH}
    if not given["task"]:
        raise InvalidArgument("a task has a name", fix="Write the name that it has in the workers.")
    arguments = Arguments(read_json("args", given["args"], list), read_json("kwargs", given["kwargs"], dict))
    (view,) = look(broker, queues=[request.queue]).queues
    task_id, key = str(UUID(bytes=random_id())), given["fair_key"]
    payload = make(view.name, given["task"], arguments, task_id, [("fair_key", key)] if key else [])
    broker.queue(view.name).put(
        payload, key=key, task_id=task_id, delay=_delay_s(given["delay"]), priority=_priority(given["priority"])
    )
    return Outcome(f"Published {given['task']} {task_id} to {view.name}.")


def unknown(request: Request) -> str:
    """What there is to say if no worker knows a task of this name; the name may be a typo."""
    task = request.fields.get("task", "").strip()
    if request.app is None or not task:
        return ""
    try:
        answers = request.app.control.inspect(timeout=ANSWER_S).registered() or {}
    except OperationalError:
        return ""
    known = {str(each).partition(" ")[0] for names in answers.values() for each in names}
    if not answers or task in known:
        return ""
    return f"No worker that answered knows a task {task}, and one that does not know it makes it a dead letter."


def _delay_s(text: str) -> float:
    seconds = seconds_of(text) if text else 0.0
    if seconds is None:
        raise InvalidArgument("no delay", given=shown(text), fix="Write a time such as 90s, 10m or 2h.")
    return seconds


def _priority(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 1:
        raise InvalidArgument("priority must be 0 to 9", given=shown(text))
    return int(text)
