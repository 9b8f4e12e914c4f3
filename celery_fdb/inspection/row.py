"""A message as a row of a page, and on a page of its own: the view model of the admin and of the dashboard.

Headers are read, bodies are not: the body's bytes are kept apart until somebody with the permission asks for them, and
then only JSON and text are shown. Nothing here ever unpickles, decompresses or decrypts. A Celery message repeats its
arguments in two headers; they are treated as the body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from celery_fdb.inspection.moments import age, moment
from kombu_fdb.engine.dead_letters.scan import error_of
from kombu_fdb.errors import FormatError
from kombu_fdb.model import Death, Listed, Spot
from kombu_fdb.primitives.masking import masked
from kombu_fdb.transport.encoding.envelope import Envelope, open_payload

__all__ = ["Body", "Row", "body_of", "row_of"]

#: Headers that repeat a task's arguments.
ARGUMENT_HEADERS = frozenset({"argsrepr", "kwargsrepr"})
#: Characters of a body that are shown.
LONGEST_BODY = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """``now_ms``: when the page is made. Moments are in UTC: whoever shows them localises them."""

    spot: Spot
    listed: Listed
    now_ms: int
    #: None if it was not published through Kombu, or can't be read.
    envelope: Envelope | None

    @property
    def id(self) -> str:
        """Celery's task id if it has one, else the queue's own."""
        headers = self.envelope.headers if self.envelope else {}
        return str(headers.get("id") or self.listed.message.message_id.hex())

    @property
    def title(self) -> str:
        """The task's name, or what else is known."""
        if self.envelope is None:
            return "(not published through Kombu)"
        return str(self.envelope.headers.get("task") or self.envelope.content_type or "(message)")

    @property
    def age(self) -> str:
        return age(self.now_ms - self.listed.message.published_ms)

    @property
    def published(self) -> datetime:
        return moment(self.listed.message.published_ms)

    @property
    def expires(self) -> datetime | None:
        return moment(self.listed.message.expires_ms) if self.listed.message.expires_ms else None

    @property
    def due(self) -> datetime | None:
        return moment(self.listed.due_ms) if self.listed.due_ms else None

    @property
    def due_in(self) -> str:
        return age(max(self.listed.due_ms - self.now_ms, 0))

    @property
    def owner(self) -> str:
        return self.listed.message.owner.hex()

    @property
    def reason(self) -> str:
        """Why it died last; "" if it never did."""
        deaths = self.listed.message.deaths
        return deaths[0].reason if deaths else ""

    @property
    def died(self) -> str:
        deaths = self.listed.message.deaths
        return age(self.now_ms - deaths[0].time_ms) if deaths else ""

    @property
    def home(self) -> str:
        """The queue it died in last."""
        deaths = self.listed.message.deaths
        return deaths[0].queue if deaths else ""

    @property
    def error(self) -> str:
        """The class of the exception that it died of last, or that its last attempt raised, without its module."""
        return error_of(self.listed.message).rpartition(".")[2]

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """The newest first. What ``celery_fdb.tasks.failures`` tells of a failed task has places of its own."""
        return [_death(each) for each in self.listed.message.deaths]

    def headers(self, *, with_arguments: bool) -> list[tuple[str, str]]:
        """By name, for reading; secrets masked, and the arguments left out unless they may be seen."""
        if self.envelope is None:
            return []
        return [
            (name, _shown(name, value, with_arguments=with_arguments))
            for name, value in sorted(self.envelope.headers.items())
            if value is not None
        ]

    def properties(self) -> list[tuple[str, str]]:
        if self.envelope is None:
            return []
        facts: Mapping[str, Any] = {
            **self.envelope.properties,
            "content_type": self.envelope.content_type,
            "content_encoding": self.envelope.content_encoding,
            "exchange": self.envelope.exchange,
            "routing_key": self.envelope.routing_key,
        }
        return [(name, _shown(name, value)) for name, value in sorted(facts.items()) if value not in (None, "")]


def _death(death: Death) -> dict[str, Any]:
    details = {name: masked(name, value) for name, value in death.details.items()}
    error = ": ".join(str(part) for name in ("error_class", "error") if (part := details.pop(name, None)))
    attempts = details.pop("attempts", None)
    return {
        "queue": death.queue,
        "reason": death.reason,
        "count": death.count,
        "last": moment(death.time_ms),
        "error": error,
        "traceback": details.pop("traceback", ""),
        "attempts": [_attempt(each) for each in attempts if isinstance(each, dict)]
        if isinstance(attempts, list)
        else [],
        "others": sorted((name, value) for name, value in details.items() if name not in {"task", "task_id"}),
    }


def _attempt(told: Mapping[str, Any]) -> dict[str, Any]:
    """``time`` is a moment, or None if it was told in another way."""
    try:
        at = datetime.fromisoformat(str(told.get("time")))
        when = moment(at.timestamp() * 1000) if at.tzinfo else None
    except ValueError:
        when = None
    return {"time": when, "error": told.get("error")}


def row_of(listed: Listed, now_ms: int) -> Row:
    message = listed.message
    try:
        envelope = open_payload(message.payload)
    except FormatError:
        envelope = None
    return Row(listed.spot, listed, now_ms, envelope)


def _shown(name: str, value: Any, *, with_arguments: bool = False) -> str:
    if name in ARGUMENT_HEADERS and not with_arguments:
        return "(shown with the body)"
    seen = masked(name, value)
    return seen if isinstance(seen, str) else json.dumps(seen, default=str, ensure_ascii=False)


class Body(NamedTuple):
    """A body for reading: its text, or why it is not shown."""

    text: str
    refusal: str = ""
    cut: bool = False


def body_of(row: Row) -> Body:
    """Only for those who may see it."""
    if row.envelope is None:
        return Body("", "It was not published through Kombu, so the format of its bytes is unknown.")
    kind, raw = str(row.envelope.content_type or ""), row.envelope.body
    if row.envelope.headers.get("compression"):
        return Body("", "The body is compressed.")
    if kind != "application/json" and not kind.startswith("text/"):
        return Body(
            "", f"Its content type is {kind or 'unknown'}: only JSON and text are shown, and pickle is never loaded."
        )
    try:
        text = raw.decode()
        if kind == "application/json":
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return Body("", f"The body is not valid {kind}.")
    return Body(text[:LONGEST_BODY], cut=len(text) > LONGEST_BODY)
