"""A stored message as pages and the terminal show it: its place and state in the queue, its headers, its body.

The body is read only on request. JSON and text are shown as they are. Of any other body, such as a pickled or
compressed one, only kind and size are shown: nothing stored in a broker is ever unpickled, decompressed or decrypted
here. The headers ``argsrepr`` and ``kwargsrepr`` repeat what is in the body, so they belong to it. Everywhere but in
the body itself, secrets are masked (``masking.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_fdb.inspection import formats
from kombu_fdb.engine.dead_letters import error_of
from kombu_fdb.errors import FormatError
from kombu_fdb.model import Death, Listed, Peeked, Spot
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import masked
from kombu_fdb.transport.envelope import Envelope, open_payload

#: Headers that repeat a task's arguments.
ARGUMENT_HEADERS = frozenset({"argsrepr", "kwargsrepr"})
#: Headers that JSON shows as fields of their own.
TASK_HEADERS = ("eta", "expires", "retries")
#: Properties that belong to a delivery; messages of other programs may have them stored.
OF_A_DELIVERY = frozenset({"delivery_tag", "delivery_info"})
#: Details of a death: the error's class, and its text.
ERROR_DETAILS = ("error_class", "error")
#: The most characters of an error in a table.
MOST_OF_ERROR = 100
MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class MessageView:
    """``now_ms``: when it is shown. Moments are in UTC: a page localises them.

    ``spot``: where a page finds it; None for a message that was found by its task. ``size``: of the whole payload;
    ``message`` may hold only its beginning.
    """

    message: Peeked
    now_ms: int
    #: None if the message was not published through Kombu, or can't be read.
    envelope: Envelope | None
    size: int
    priority: int
    due_ms: int
    spot: Spot | None = None

    @classmethod
    def of(cls, found: Listed | Peeked, now_ms: int) -> MessageView:
        """The view of a message that was listed, or peeked at."""
        message = found.message if isinstance(found, Listed) else found
        try:
            envelope = open_payload(message.payload)
        except FormatError:
            envelope = None
        if isinstance(found, Listed):
            return cls(message, now_ms, envelope, found.size, found.priority, found.due_ms, found.spot)
        return cls(message, now_ms, envelope, len(message.payload), message.priority, message.due_ms)

    @property
    def id(self) -> str:
        """Celery's task id if the message has one, else the store's id."""
        return str(self._headers.get("id") or self.message.message_id.hex())

    @property
    def title(self) -> str:
        """The task's name, or the content type of a message without one."""
        if self.envelope is None:
            return "(not published through Kombu)"
        return str(self.task or self.envelope.content_type or "(message)")

    @property
    def task(self) -> Any:
        """The task's name as Celery logs it: its ``shadow`` if the publisher has set one. None for no task."""
        headers = self._headers
        return headers.get("task") and (headers.get("shadow") or headers["task"])

    @property
    def _headers(self) -> dict[str, Any]:
        return {} if self.envelope is None else self.envelope.headers

    @property
    def age_s(self) -> float:
        return max(0.0, (self.now_ms - self.message.published_ms) / 1000)

    @property
    def due_in_s(self) -> float | None:
        return max(0.0, (self.due_ms - self.now_ms) / 1000) if self.due_ms else None

    @property
    def published(self) -> datetime:
        return formats.moment(self.message.published_ms)

    @property
    def expires(self) -> datetime | None:
        return formats.moment(self.message.expires_ms) if self.message.expires_ms else None

    @property
    def due(self) -> datetime | None:
        return formats.moment(self.due_ms) if self.due_ms else None

    @property
    def owner(self) -> str:
        return self.message.owner.hex()

    @property
    def reason(self) -> str:
        """Why the message died last; "" if it never did."""
        deaths = self.message.deaths
        return reason_of(deaths[0].reason, deaths[0].details) if deaths else ""

    @property
    def died_s(self) -> float | None:
        """Seconds since the last death; None without one."""
        deaths = self.message.deaths
        return (self.now_ms - deaths[0].time_ms) / 1000 if deaths else None

    @property
    def error(self) -> str:
        """The class of the last death's or the last attempt's exception, without its module."""
        return error_of(self.message).rpartition(".")[2]

    @property
    def said(self) -> str:
        """The class and text of the last death's error; without a death, the class that the last attempt raised."""
        deaths = self.message.deaths
        return error_line(deaths[0].details) if deaths else self.error

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """The deaths, the newest first. Details that ``celery_fdb.tasks.failures`` adds become fields of their own."""
        return [_death(each) for each in self.message.deaths]

    def headers(self, *, with_arguments: bool) -> list[tuple[str, str]]:
        """The headers by name, for reading; secrets masked, and the arguments left out unless they may be seen."""
        hidden = frozenset() if with_arguments else ARGUMENT_HEADERS
        return [
            (name, "(shown with the body)" if name in hidden else _text_of(masked(name, value)))
            for name, value in sorted(self._headers.items())
            if value is not None
        ]

    def properties(self) -> list[tuple[str, str]]:
        """The properties by name, as :attr:`headers`."""
        if self.envelope is None:
            return []
        facts: Mapping[str, Any] = {
            **self.envelope.properties,
            "content_type": self.envelope.content_type,
            "content_encoding": self.envelope.content_encoding,
            "exchange": self.envelope.exchange,
            "routing_key": self.envelope.routing_key,
        }
        return [
            (name, _text_of(masked(name, value))) for name, value in sorted(facts.items()) if value not in (None, "")
        ]

    def body(self) -> tuple[str, str]:
        """The body's text, or why it is not shown. A page shows it only to users who may see bodies."""
        if self.envelope is None:
            return "", "It was not published through Kombu, so the format of its bytes is unknown."
        refusal = _sealed(self.envelope)
        if refusal:
            return "", refusal
        kind, raw = self.envelope.content_type, self.envelope.body
        try:
            text = raw.decode()
            if _is_json(kind):
                text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            return "", f"The body is not valid {kind}."
        return text, ""

    def as_json(self, *, body: bool = False) -> dict[str, Any]:
        """The message, ready for JSON. Times in seconds since 1970; ``size`` in bytes.

        ``body``: add headers, properties and the body itself, as ``content``.
        """
        message, headers = self.message, self._headers
        found: dict[str, Any] = {
            "id": message.message_id.hex(),
            "queue": message.queue,
            "state": message.state,
            "key": message.key,
            "published": message.published_ms / 1000,
            "age_s": self.age_s,
            "due": self.due_ms / 1000 or None,
            "due_in_s": self.due_in_s,
            "expires_at": message.expires_ms / 1000 or None,
            "redeliveries": message.redeliveries,
            "size": self.size,
            "owner": self.owner or None,
            "task_id": message.task_id or headers.get("id"),
            "task": self.task,
            **{name: headers.get(name) for name in TASK_HEADERS},
            "deaths": [_death_as_json(each) for each in message.deaths],
        }
        if body:
            found["content"] = _content(message, self.envelope)
        return found


def describe(message: Peeked, *, body: bool = False) -> dict[str, Any]:
    """The message now, ready for JSON (:meth:`MessageView.as_json`)."""
    return MessageView.of(message, Clock().wall_ms()).as_json(body=body)


# -- deaths ------------------------------------------------------------------------------------------------------------


def reason_of(reason: str, details: Mapping[str, Any]) -> str:
    """The reason of a death in a person's words: "failed" for a task that raised, which AMQP calls "rejected"."""
    return "failed" if reason == "rejected" and "error_class" in details else reason


def error_line(details: Mapping[str, Any]) -> str:
    """The class and the text of a death's or a run's error, in one line that fits into a table; "" for none."""
    kind, error = (str(masked(name, details.get(name) or "")) for name in ERROR_DETAILS)
    text = " ".join(": ".join(filter(None, (kind.rpartition(".")[2], error))).split())
    return text if len(text) <= MOST_OF_ERROR else f"{text[: MOST_OF_ERROR - 1]}\N{HORIZONTAL ELLIPSIS}"


def _death(death: Death) -> dict[str, Any]:
    details = {name: masked(name, value) for name, value in death.details.items()}
    error = ": ".join(str(part) for name in ERROR_DETAILS if (part := details.pop(name, None)))
    attempts = details.pop("attempts", None)
    return {
        "queue": death.queue,
        "reason": reason_of(death.reason, death.details),
        "count": death.count,
        "last": formats.moment(death.time_ms),
        "error": error,
        "traceback": details.pop("traceback", ""),
        "attempts": [_attempt(each) for each in attempts if isinstance(each, dict)]
        if isinstance(attempts, list)
        else [],
        "others": sorted((name, value) for name, value in details.items() if name not in {"task", "task_id"}),
    }


def _attempt(told: Mapping[str, Any]) -> dict[str, Any]:
    """One attempt. ``time`` is a moment, or None if it was written in another way."""
    try:
        at = datetime.fromisoformat(str(told.get("time")))
        when = formats.moment(at.timestamp() * 1000) if at.tzinfo else None
    except ValueError:
        when = None
    return {"time": when, "error": told.get("error")}


def _death_as_json(death: Death) -> dict[str, Any]:
    return {
        "queue": death.queue,
        "reason": death.reason,
        "count": death.count,
        "time": death.time_ms / 1000,
        "exchange": death.exchange,
        "routing_keys": list(death.routing_keys),
        "details": {name: masked(name, value) for name, value in death.details.items()},
    }


# -- contents ----------------------------------------------------------------------------------------------------------


def _content(message: Peeked, envelope: Envelope | None) -> dict[str, Any]:
    if envelope is None:
        return {"content_type": None, "headers": {}, "properties": {}, "body": _decoded(message.payload)}
    properties = {name: value for name, value in envelope.properties.items() if name not in OF_A_DELIVERY}
    return {
        "content_type": envelope.content_type,
        "headers": {name: masked(name, value) for name, value in _shallow(envelope.headers).items()},
        "properties": {name: masked(name, value) for name, value in _shallow(properties).items()},
        "body": _body(envelope),
    }


def _body(envelope: Envelope) -> Any:
    """A body's content: JSON as data, text as text, and for any other body a line with its kind and size."""
    body, kind = envelope.body, envelope.content_type or "an unknown kind"
    if _sealed(envelope):
        compression = envelope.headers.get("compression")
        return f"<{len(body)} bytes of {kind}{f', compressed: {compression}' if compression else ''}>"
    if not _is_json(kind):
        return _decoded(body)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return _decoded(body)
    return _decoded(body) if _is_deep(found) else found


def _sealed(envelope: Envelope) -> str:
    """Why the body is not shown; "" for JSON and text."""
    kind = envelope.content_type or ""
    if envelope.headers.get("compression"):
        return "The body is compressed."
    if not _is_json(kind) and not kind.startswith("text/"):
        return f"Its content type is {kind or 'unknown'}: only JSON and text are shown, and pickle is never loaded."
    return ""


def _is_json(kind: str | None) -> bool:
    return kind == "application/json"


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _shallow(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: "<nested too deeply>" if _is_deep(value) else value for name, value in facts.items()}


def _is_deep(value: Any) -> bool:
    """Whether a document is nested more than :data:`MOST_LEVELS` times: no page and no encoder could show it."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def _decoded(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"<{len(body)} bytes that are not text>"
