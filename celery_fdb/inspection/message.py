"""A stored message as people may see it: what the queue knows, and the envelope's headers that name the task.

The body is not looked at unless it was asked for. Then JSON and texts are shown as such, and of everything else, be it
pickle or compressed, only kind and size: nothing stored in a broker is ever unpickled here. The headers ``argsrepr``
and ``kwargsrepr`` repeat what is in the body, so they belong to it. Everywhere but in the body itself, secrets are
masked (``masking.py``).
"""

from __future__ import annotations

import json
from typing import Any

from kombu_fdb.errors import FormatError
from kombu_fdb.model import NO_SESSION, Death, Delivery, Lease, Peeked
from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.primitives.masking import masked
from kombu_fdb.transport.encoding.envelope import open_delivery

__all__ = ["body_of", "describe"]

#: Headers of the body's content.
OF_THE_BODY = ("argsrepr", "kwargsrepr")
MOST_LEVELS = 100
#: Headers shown as fields of their own.
TASK_HEADERS = ("task", "eta", "expires", "retries")


def describe(message: Peeked, *, body: bool = False) -> dict[str, Any]:
    """All that may be shown of ``message``, ready for JSON. Times in seconds since 1970; ``size`` in bytes.

    ``body``: with headers, properties and the body itself, under ``content``.
    """
    now_s = SystemClock().wall_ms() / 1000
    opened = _opened(message)
    headers = {} if opened is None else opened["headers"]
    due_s = message.due_ms / 1000 or None
    found: dict[str, Any] = {
        "id": message.message_id.hex(),
        "queue": message.queue,
        "state": message.state,
        "key": message.key,
        "published": message.published_ms / 1000,
        "age_s": max(0.0, now_s - message.published_ms / 1000),
        "due": due_s,
        "due_in_s": None if due_s is None else max(0.0, due_s - now_s),
        "expires_at": message.expires_ms / 1000 or None,
        "redeliveries": message.redeliveries,
        "size": len(message.payload),
        "owner": message.owner.hex() or None,
        "task_id": message.task_id or headers.get("id"),
        **{name: headers.get(name) for name in TASK_HEADERS},
        "deaths": [_death(each) for each in message.deaths],
    }
    if body:
        found["content"] = _content(message, opened)
    return found


def _opened(message: Peeked) -> dict[str, Any] | None:
    """The envelope; None for a payload that has none, as the Python API stores them."""
    nobody = Lease(NO_SESSION, 0)
    try:
        return open_delivery(
            Delivery(nobody, message.queue, message.payload, message.message_id, message.redeliveries, (), ""), 0
        )
    except FormatError:
        return None


def _death(death: Death) -> dict[str, Any]:
    return {
        "queue": death.queue,
        "reason": death.reason,
        "count": death.count,
        "time": death.time_ms / 1000,
        "exchange": death.exchange,
        "routing_keys": list(death.routing_keys),
        "details": {name: masked(name, value) for name, value in death.details.items()},
    }


def _content(message: Peeked, opened: dict[str, Any] | None) -> dict[str, Any]:
    if opened is None:
        return {"content_type": None, "headers": {}, "properties": {}, "body": _text(message.payload)}
    properties = {k: v for k, v in opened["properties"].items() if k not in {"delivery_tag", "delivery_info"}}
    return {
        "content_type": opened["content-type"],
        "headers": {name: masked(name, value) for name, value in _shallow(opened["headers"]).items()},
        "properties": {name: masked(name, value) for name, value in _shallow(properties).items()},
        "body": body_of(opened),
    }


def body_of(opened: dict[str, Any]) -> Any:
    """JSON as data, text as text, of all else a line that says what it is."""
    body, kind = opened["body"], opened["content-type"] or ""
    if "compression" in opened["headers"]:
        return f"<{len(body)} bytes of {kind}, compressed: {opened['headers']['compression']}>"
    if kind == "application/json":
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return _text(body)
        return _text(body) if _is_deep(found) else found
    if kind.startswith("text/"):
        return _text(body)
    return f"<{len(body)} bytes of {kind or 'an unknown kind'}>"


def _shallow(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: "<nested too deeply>" if _is_deep(value) else value for name, value in facts.items()}


def _is_deep(value: Any) -> bool:
    """Whether it is nested more than :data:`MOST_LEVELS` times: no page and no encoder could show it."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"<{len(body)} bytes that are not text>"
