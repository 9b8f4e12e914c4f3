"""A Celery task as a message, changed by a person: when it is due, and what arguments it has; or made from nothing.

Only what is in plain sight is changed: JSON of Celery's protocol 2, neither compressed nor signed. Everything else is
refused with the next step, and nothing is ever unpickled. What Celery repeats of the arguments in headers changes with
them: a representation that its publisher has chosen is replaced by one that tells nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.saferepr import saferepr
from kombu.utils.json import loads as loads_types

from kombu_fdb.errors import FormatError, InvalidArgument, QueueError
from kombu_fdb.transport.encoding.envelope import Envelope, open_payload, payload_of

#: Characters of a representation, as Celery has it.
LONGEST_REPR = 1024
#: Stands for one that a publisher has chosen itself, as for arguments that are not to be seen.
EDITED = "(edited)"
AS_IT_IS = "Replay it as it is, or discard it and send the task again."


class Arguments(NamedTuple):
    """Of a task: JSON as it stands in the body."""

    args: list[Any]
    kwargs: dict[str, Any]


# -- when it is due ----------------------------------------------------------------------------------------------------


def due_at(payload: bytes, due_ms: int | None) -> bytes | None:
    """The task with another ``eta``, None for none; None if it has no ``eta``, or is no message of Kombu's.

    A worker holds a task until its ``eta``, whatever the queue does.
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
    """Raises ``QueueError`` with the next step if they can't be edited."""
    args, kwargs, _ = _body(_editable(payload))
    return Arguments(args, kwargs)


def with_arguments(payload: bytes, arguments: Arguments) -> bytes:
    """The same task with other arguments. Raises as :func:`arguments_of`."""
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
    """With representations of the new arguments, where those of the old ones stood."""
    args, kwargs, _ = loads_types(opened.body)
    old = {"argsrepr": saferepr(tuple(args), LONGEST_REPR), "kwargsrepr": saferepr(kwargs, LONGEST_REPR)}
    new = {
        "argsrepr": saferepr(tuple(arguments.args), LONGEST_REPR),
        "kwargsrepr": saferepr(arguments.kwargs, LONGEST_REPR),
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
        raise InvalidArgument(text, fix=f"Write {wanted}.")  # not what was given: the audit tells of errors
    return found


# -- from nothing ------------------------------------------------------------------------------------------------------


def make(queue: str, task: str, arguments: Arguments, task_id: str, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A task as Celery would publish it to the queue. ``headers``: besides Celery's own."""
    app = Celery("celery_fdb", set_as_current=False)
    message = app.amqp.as_task_v2(task_id, task, tuple(arguments.args), arguments.kwargs)
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
