"""Actions on messages: cancel, reschedule; on dead letters replay, discard, edit; and publish a task anew.

The messages were selected, or match a filter; an action on all matches, of one queue or of all, runs in parts.

Arguments are edited only in JSON of Celery's protocol 2, neither compressed nor signed. Other messages are refused with
the next step, and nothing is ever unpickled. Headers that repeat the arguments change with them; a representation that
the publisher chose is replaced by one that shows no arguments.

Cancel: delete the selected messages, or all matches in one state; their results become ``REVOKED``. A message that a
worker holds is cancelled only if it was selected.

Edit and replay: a dead letter goes back to the queue it died in, with other arguments. One transaction takes the old
message out and stores the new one, which has the same id, key, priority and history.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from celery import Celery
from celery.utils.saferepr import saferepr
from kombu.utils.json import loads as loads_types

from celery_fdb.control import ResultNotRevoked, ask_workers, revoke_result
from celery_fdb.inspection import filters, formats
from celery_fdb.inspection.overview import look
from celery_fdb.operations.action import Field, Outcome, Request, in_parts
from kombu_fdb import Broker
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import FormatError, InvalidArgument, QueueError, QueueNotFound, StoreUnavailable
from kombu_fdb.model import URGENT, Listed, Part, Peeked, Spot
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown
from kombu_fdb.transport.envelope import Envelope, open_payload, payload_of, whole_of

# -- a task's message --------------------------------------------------------------------------------------------------


#: The most characters of a representation, as Celery has it.
LONGEST_REPR = 1024
#: Replaces a representation that a publisher has chosen, as for arguments that are not to be seen.
EDITED = "(edited)"
AS_IT_IS = "Replay it as it is, or discard it and send the task again."


#: The positional arguments of a task, and those by name: JSON as it stands in the body.
Arguments = tuple[list[Any], dict[str, Any]]


# -- when it is due ----------------------------------------------------------------------------------------------------


def due_at(payload: bytes, due_ms: int | None) -> bytes | None:
    """The payload with another ``eta``; with an ``eta`` of None for ``due_ms`` None.

    A worker holds a task until its ``eta``, whenever the queue delivers it. Returns None if the payload has no ``eta``,
    or was not published through Kombu: it needs no change.
    """
    try:
        opened = open_payload(payload)
    except FormatError:
        return None
    if not opened.headers.get("eta"):
        return None
    eta = None if due_ms is None else datetime.fromtimestamp(due_ms / 1000, UTC).isoformat()
    return _closed(opened._replace(headers={**opened.headers, "eta": eta}))


# -- what arguments it has ---------------------------------------------------------------------------------------------


def arguments_of(payload: bytes) -> Arguments:
    """The arguments of a task. Raises ``QueueError`` with the next step if they can't be edited."""
    args, kwargs, _ = _body(_editable(payload))
    return args, kwargs


def with_arguments(payload: bytes, arguments: Arguments) -> bytes:
    """The payload with other arguments. Raises what :func:`arguments_of` raises."""
    opened = _editable(payload)
    *_, embedded = _body(opened)
    body = json.dumps([*arguments, embedded]).encode()
    return _closed(opened._replace(headers=_headers(opened, arguments), body=body))


def _editable(payload: bytes) -> Envelope:
    try:
        opened = open_payload(payload)
    except FormatError:
        raise _refused("it was not published through Kombu") from None
    if not opened.headers.get("task") or not opened.headers.get("id"):
        raise _refused("it is no task of Celery's protocol 2")
    if opened.headers.get("compression"):
        raise _refused("its body is compressed")
    if opened.content_type != "application/json":
        raise _refused(f"its content type is {opened.content_type or 'unknown'}, not JSON")
    if (opened.content_encoding or "utf-8").lower() not in {"utf-8", "utf8"}:
        raise _refused(f"its encoding is {opened.content_encoding}, not UTF-8")
    return opened


def _refused(reason: str) -> QueueError:
    return QueueError("the arguments can't be edited", reason=reason, fix=AS_IT_IS)


def _body(opened: Envelope) -> tuple[list[Any], dict[str, Any], Any]:
    try:
        args, kwargs, embedded = json.loads(opened.body)
    except (ValueError, TypeError, RecursionError):
        raise _refused("its body is not that of a task") from None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise _refused("its body is not that of a task")
    return args, kwargs, embedded


def _headers(opened: Envelope, arguments: Arguments) -> dict[str, Any]:
    """The headers, with representations of the new arguments instead of the old ones."""
    args, kwargs, _ = loads_types(opened.body)
    old = {"argsrepr": saferepr(tuple(args), LONGEST_REPR), "kwargsrepr": saferepr(kwargs, LONGEST_REPR)}
    new = {
        "argsrepr": saferepr(tuple(arguments[0]), LONGEST_REPR),
        "kwargsrepr": saferepr(arguments[1], LONGEST_REPR),
    }
    headers = dict(opened.headers)
    for name, before in old.items():
        if headers.get(name) is not None:
            headers[name] = new[name] if headers[name] == before else EDITED
    return headers


def read_json(name: str, text: str, kind: type) -> Any:
    """A JSON list or object that a person has written. Raises ``InvalidArgument``."""
    wanted = "a JSON list, such as [1, 2]" if kind is list else 'a JSON object, such as {"order": 42}'
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} must be JSON", reason=str(error), fix=f"Write {wanted}.") from None
    if not isinstance(found, kind):
        text = f"{name} must be {wanted.partition(',')[0]}"
        raise InvalidArgument(text, fix=f"Write {wanted}.")  # without what was given: the audit has the errors
    return found


# -- from nothing ------------------------------------------------------------------------------------------------------


def make(queue: str, task: str, arguments: Arguments, task_id: str, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """The payload of a task, as Celery would publish it to the queue. ``headers``: besides Celery's own."""
    app = Celery("celery_fdb", set_as_current=False)
    args, kwargs = arguments
    message = app.amqp.as_task_v2(task_id, task, tuple(args), kwargs)
    body = json.dumps(message.body).encode()
    made = Envelope(
        "application/json", "utf-8", {**message.headers, **dict(headers)}, message.properties, "", queue, body
    )
    return _closed(made)


def _closed(opened: Envelope) -> bytes:
    message = {
        "content-type": opened.content_type,
        "content-encoding": opened.content_encoding,
        "headers": opened.headers,
        "properties": opened.properties,
        "body": opened.body,
    }
    return payload_of(message, opened.exchange, opened.routing_key)


# -- publish -----------------------------------------------------------------------------------------------------------


TASK = Field("task", "Task", "task", "Its name, as shop.tasks.charge.", required=True)
PUBLISH = (
    TASK,
    Field("args", "Arguments", "json", "A JSON list.", "[]"),
    Field("kwargs", "Keyword arguments", "json", "A JSON object.", "{}"),
    Field("fair_key", "Fairness key"),
    Field("delay", "Delay", help="90s, 10m, 2h; empty for none."),
    Field("priority", "Priority", "number", "0 to 9; 9 is the most urgent, unless the broker's option says otherwise."),
)
#: How long workers may take to say which tasks they know.
ANSWER_S = 1.0


def publish(broker: Broker, request: Request) -> Outcome:
    """Publish a task, as Celery would publish it."""
    given = {each.name: request.fields.get(each.name, "").strip() or each.value for each in PUBLISH}
    task = task_of(request)
    arguments = (read_json("args", given["args"], list), read_json("kwargs", given["kwargs"], dict))
    (view,) = look(broker, queues=[request.queue]).queues
    task_id, key = str(UUID(bytes=random_id())), given["fair_key"]
    priority = whole_of("priority", given["priority"], URGENT) if given["priority"] else None
    payload = make(view.name, task, arguments, task_id, [("fair_key", key)] if key else [])
    broker.queue(view.name).put(payload, key=key, task_id=task_id, delay=_delay_s(given["delay"]), priority=priority)
    return Outcome(f"Published {task} {task_id} to {view.name}.")


def task_of(request: Request) -> str:
    """The name in the field :data:`TASK`. Raises ``InvalidArgument``."""
    name = request.fields.get(TASK.name, "").strip()
    if not name:
        raise InvalidArgument("a task has a name", fix="Write the name that it has in the workers.")
    return name


def unknown(request: Request) -> str:
    """The note on a task name that no answering worker knows, as it may be a typo; "" for nothing to say."""
    task = request.fields.get("task", "").strip()
    if request.app is None or not task:
        return ""
    try:
        answers = ask_workers(request.app, lambda control: control.inspect(timeout=ANSWER_S).registered()) or {}
    except StoreUnavailable:
        return ""
    known = {str(each).partition(" ")[0] for registered in answers.values() for each in registered}
    if not answers or task in known:
        return ""
    return f"No worker that answered knows a task {task}, and one that does not know it makes it a dead letter."


def _delay_s(text: str) -> float:
    seconds = formats.seconds_of(text) if text else 0.0
    if seconds is None:
        raise InvalidArgument("no delay", given=shown(text), fix="Write a time such as 90s, 10m or 2h.")
    return seconds


# -- outcomes of selected messages -------------------------------------------------------------------------------------


T = TypeVar("T")


#: The selected messages that were acted on, each with what ``act`` returned, and how many were not reached in time.
Done = tuple[dict[Spot, T], int]


def _each_selected(request: Request, act: Callable[[Spot], T | None]) -> Done[T]:
    """Act on the selected messages until the time is over. ``act`` returns None for a message that has moved."""
    ends = request.clock.monotonic() + request.seconds
    done: dict[Spot, T] = {}
    for number, spot in enumerate(request.spots):
        if number and request.clock.monotonic() >= ends:
            return done, len(request.spots) - number
        found = act(spot)
        if found is not None:
            done[spot] = found
    return done, 0


def _told(request: Request, text: str, done: Collection[Spot], late: int = 0, *, besides: str = "") -> Outcome:
    """The outcome: a text, the names of the messages, what else is told, and sentences about the others."""
    names = [request.names.get(spot.message_id) or spot.message_id.hex() for spot in done]
    missed = len(request.spots) - len(done) - late
    sentences = [f"{text}: {', '.join(names)}." if names else f"{text}."]
    if besides:
        sentences.append(besides)
    if missed:
        sentences.append(f"Left alone: {plural(missed, 'message')} that had moved meanwhile.")
    if late:
        sentences.append(f"Not reached in time: {plural(late, 'message')}; select them again to go on.")
    return Outcome(" ".join(sentences), missed)


# -- cancel ------------------------------------------------------------------------------------------------------------


#: Messages that one part looks at, and deletes. Each deletion is a transaction of its own, and stores a result.
PART, MOST_AT_ONCE = 200, 20


def cancel(broker: Broker, request: Request) -> Outcome:
    """Cancel the selected messages."""
    gone, late = _delete(broker, request)
    text = f"Cancelled {plural(len(gone), 'message')} of {request.queue}"
    return _told(request, text, gone, late, besides=_revoke(request, gone.values()))


def cancel_all(broker: Broker, request: Request) -> Outcome:
    """Cancel all matching messages that are ready or, with the field ``state``, delayed."""
    wanted, about, queue = request.wanted, request.asked, broker.queue(request.queue)
    state = request.state
    told: set[str] = set()

    def part(after: bytes) -> Part:
        page = queue.page(PART, state=state, after=after)
        matching = [each for each in page.messages if wanted(each.message) and about.had_come(each.position)]
        now = matching[:MOST_AT_ONCE]
        gone, late = _delete(broker, request._replace(spots=[each.spot for each in now]))
        if gone:
            told.add(_revoke(request, gone.values()))
        reached = now[: len(now) - late]
        is_all = len(reached) == len(matching)
        return Part(len(gone), page.following if is_all else reached[-1].position)

    done = in_parts(part, request, "Cancelled", f"{state} message", request.queue)
    return done._replace(text=" ".join([done.text, *sorted(told)]))


def _delete(broker: Broker, request: Request) -> Done[Peeked]:
    queue = broker.queue(request.queue)

    def act(spot: Spot) -> Peeked | None:
        listed = queue.at(spot)
        return listed.message if listed is not None and queue.delete(spot) else None

    return _each_selected(request, act)


def _revoke(request: Request, gone: Iterable[Peeked]) -> str:
    """Store ``REVOKED`` for the deleted messages. Returns a sentence about their results."""
    if request.app is None:
        return request.untold
    failures = []
    for each in gone:
        try:
            revoke_result(request.app, each)
        except ResultNotRevoked as error:
            failures.append(f"{str(error).rstrip('.')}.")
    return " ".join(failures) or "Their results, if any, became REVOKED."


# -- replay and discard ------------------------------------------------------------------------------------------------


def replay(broker: Broker, request: Request) -> Outcome:
    """Replay each selected letter to the queue in which it died."""
    queue, letters = broker.queue(request.queue), broker.dead_letters(request.queue)

    def act(spot: Spot) -> Listed | None:
        listed = queue.at(spot)
        return listed if listed is not None and letters.replay(at=[spot]) else None

    done, late = _each_selected(request, act)
    queues = ", ".join(sorted({death.queue for listed in done.values() for death in listed.message.deaths[:1]}))
    text = f"Replayed {plural(len(done), 'dead letter')}" + (f" to {queues}" if queues else "")
    return _told(request, text, done, late)


def discard(broker: Broker, request: Request) -> Outcome:
    """Discard the selected letters for good."""
    done, late = _each_selected(request, lambda spot: broker.queue(request.queue).delete(spot) or None)
    return _told(request, f"Discarded {plural(len(done), 'dead letter')} of {request.queue}", done, late)


def _all(verb: Callable[..., Part], done: str, broker: Broker, request: Request) -> Outcome:
    """Replay or discard all letters that match, and had died when the action was asked for."""
    part = partial(verb, broker.dead_letters(request.queue), **conditions(request))
    return in_parts(part, request, done, "dead letter", _target(request), first=request.asked.by)


replay_all = partial(_all, DeadLetters.replay_part, "Replayed")
discard_all = partial(_all, DeadLetters.discard_part, "Discarded")


def conditions(request: Request) -> dict[str, Any]:
    """The conditions of a walk. If the question named no letters, because they were too many, all matches count."""
    found = request.filter.conditions()
    return found if request.asked.named is None else {**found, "where": request.wanted}


def _target(request: Request) -> str:
    return f"{request.queue} ({request.filter})" if request.filter else request.queue


# -- of all queues of dead letters -------------------------------------------------------------------------------------


def _everywhere(verb: Callable[..., Part], done: str, broker: Broker, request: Request) -> Outcome:
    """Replay or discard all matching letters, queue by queue; a part's mark names a queue, and a place in it.

    If the queue to which letters are to be replayed is gone, the rest of their queue's letters stays.
    """
    stuck: set[str] = set()
    given, wanted, by = request.filter.conditions(), request.wanted, request.asked.by
    queues = sorted(filters.dead_queues(broker, look(broker)))

    def part(mark: bytes) -> Part:
        """One part of the mark's queue, or of the next queue if that one is gone."""
        name, inner = _split(mark) if mark else ("", b"")
        at = bisect_left(queues, name)
        if at == len(queues):
            return Part(0, None)
        queue = queues[at]
        found = part_of(queue, inner if queue == name and inner else by)
        if found.following:
            return found._replace(following=_joined(queue, found.following))
        return found._replace(following=_joined(queues[at + 1], b"") if at + 1 < len(queues) else None)

    def part_of(queue: str, mark: bytes) -> Part:
        here: dict[str, Any] = {
            **given,
            "where": lambda letter: filters.died_elsewhere(letter, queue) and wanted(letter),
        }
        try:
            return verb(broker.dead_letters(queue), mark, **here)
        except QueueNotFound as error:
            stuck.add(f"Some stay in {queue}: {error}")
            return Part(0, None)

    outcome = in_parts(part, request, done, "dead letter", _target(request))
    return outcome._replace(text=" ".join([outcome.text, *sorted(stuck)]))


replay_everywhere = partial(_everywhere, DeadLetters.replay_part, "Replayed")
discard_everywhere = partial(_everywhere, DeadLetters.discard_part, "Discarded")


def _joined(queue: str, inner: bytes) -> bytes:
    name = queue.encode(errors="surrogatepass")
    return len(name).to_bytes(4, "big") + name + inner


def _split(mark: bytes) -> tuple[str, bytes]:
    end = 4 + int.from_bytes(mark[:4], "big")
    try:
        return mark[4:end].decode(errors="surrogatepass"), mark[end:]
    except ValueError:
        raise InvalidArgument("no mark of an action", fix="Begin it anew.") from None


# -- edit and replay ---------------------------------------------------------------------------------------------------


EDIT_FIELDS = (
    Field("args", "Arguments", "json", "A JSON list.", "[]", required=True),
    Field("kwargs", "Keyword arguments", "json", "A JSON object.", "{}", required=True),
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def arguments(broker: Broker, request: Request) -> Mapping[str, str]:
    """The form's fields with the task's arguments. Raises ``QueueError`` if they can't be edited."""
    listed = _look(broker, request)
    if listed is None:
        return {}
    args, kwargs = arguments_of(listed.message.payload)
    return {"args": _written(args), "kwargs": _written(kwargs)}


def _written(value: Any) -> str:
    """JSON for a form. A lone surrogate, which no page can hold, is spelt out."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return json.dumps(value, indent=2) if _SURROGATE.search(text) else text


def edit(broker: Broker, request: Request) -> Outcome:
    """Replay with the arguments in the JSON fields ``args`` and ``kwargs``; a missing field changes nothing."""
    listed = _look(broker, request)
    missed = _told(request, f"Replayed nothing of {request.queue}", ())
    if listed is None:
        return missed
    payload = with_arguments(listed.message.payload, _given(request, arguments_of(listed.message.payload)))
    if not broker.dead_letters(request.queue).replay_changed(listed.spot, payload):
        return missed
    home = listed.message.deaths[0].queue if listed.message.deaths else request.queue.removesuffix(DEAD_SUFFIX)
    return _told(request, f"Replayed 1 dead letter to {home} with other arguments", [listed.spot])


def _given(request: Request, old: Arguments) -> Arguments:
    args, kwargs = (request.fields.get(each.name) for each in EDIT_FIELDS)
    return (
        old[0] if args is None else read_json("args", args, list),
        old[1] if kwargs is None else read_json("kwargs", kwargs, dict),
    )


def _look(broker: Broker, request: Request) -> Listed | None:
    if len(request.spots) != 1:
        raise InvalidArgument("one message can be edited at a time", fix="Select one.")
    return broker.queue(request.queue).at(request.spots[0])


# -- run now and reschedule --------------------------------------------------------------------------------------------


RESCHEDULE_FIELDS = (Field("due", "Due", "moment", required=True),)


def in_an_hour(_: Broker, request: Request) -> Mapping[str, str]:
    """The moment with which a date picker begins: on a whole minute, in the page's time zone."""
    due = formats.moment(request.clock.wall_ms()) + timedelta(hours=1)
    return {"due": f"{due.astimezone(request.zone):%Y-%m-%dT%H:%M}"}


def run_now(broker: Broker, request: Request) -> Outcome:
    """Make the selected messages ready at once."""
    done, late = _each(broker, request, None)
    return _told(request, f"Made {plural(len(done), 'message')} of {request.queue} ready", done, late)


def reschedule(broker: Broker, request: Request) -> Outcome:
    """Make the selected messages due at the moment, or after the time, in the field ``due``."""
    due_ms = _due_ms(request, request.clock.wall_ms())
    done, late = _each(broker, request, due_ms)
    at = f"{formats.moment(due_ms).astimezone(request.zone):%Y-%m-%d %H:%M:%S %Z}"
    return _told(request, f"Rescheduled {plural(len(done), 'message')} of {request.queue} to {at}", done, late)


def _each(broker: Broker, request: Request, due_ms: int | None) -> Done[bool]:
    """Reschedule the selected messages that had not moved.

    Raises ``QueueError`` for a message that can't be rescheduled; those before it are done by then.
    """
    queue = broker.queue(request.queue)

    def act(spot: Spot) -> bool | None:
        listed = queue.at(spot)
        if listed is None:
            return None
        payload = due_at(listed.message.payload, due_ms)
        delay_s = 0 if due_ms is None else max(due_ms - request.clock.wall_ms(), 1) / 1000
        return bool(queue.reschedule(spot, delay_s, payload=payload)) or None

    return _each_selected(request, act)


def _due_ms(request: Request, now_ms: int) -> int:
    text = request.fields.get("due", "").strip()
    seconds = formats.seconds_of(text)
    if seconds is not None:
        return now_ms + int(seconds * 1000)
    try:
        due_ms = int(formats.read(text, request.zone).timestamp() * 1000)
    except (ValueError, OverflowError):
        fix = "Write a date and time, as 2031-12-31T23:59, or from now on: 90s, 10m, 2h, 7d."
        raise InvalidArgument("this is no date and time", given=shown(text), fix=fix) from None
    if due_ms <= now_ms:
        raise InvalidArgument("the moment has passed", given=shown(text), fix="Choose a later one, or run it now.")
    return due_ms
