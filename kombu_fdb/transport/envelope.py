"""kombu's message dict <-> the payload bytes the queue stores.

A payload is ``version (1 byte), length of meta (4 bytes), meta (JSON), body (bytes as they are)``. No base64: the body
of a Celery task is most of a message, and costs a copy here instead of an encoding.

Meta is a list: content type, content encoding, headers, properties, exchange, routing key. JSON is kombu's dialect
(uuid, datetime, Decimal, bytes in headers), but its encoder is made once and its decoding hook is called only for
payloads in which the marker of an encoded type occurs: that halves the time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu.utils.json import JSONEncoder, object_hook

from kombu_fdb.errors import FormatError
from kombu_fdb.headers import HEAD, VERSION
from kombu_fdb.model import Death, Delivery, Publication
from kombu_fdb.transport.identity import dedup_of, once_of, task_id_of
from kombu_fdb.transport.timing import due_ms, expiry, ttr_ms

__all__ = ["Envelope", "encode", "open_delivery", "open_payload", "without_deaths"]

_MARKER = b'"__type__"'
#: Set anew at each delivery, so not stored.
_PER_DELIVERY = ("delivery_tag", "delivery_info", "body_encoding")

_dumps = JSONEncoder(separators=(",", ":")).encode
_loads = json.JSONDecoder().decode
_loads_types = json.JSONDecoder(object_hook=object_hook).decode


def encode(
    message: Mapping[str, Any],
    exchange: str,
    routing_key: str,
    *,
    now_ms: int,
    most_urgent_is_zero: bool = False,
    key: str = "",
    dedup_window_s: float = 300.0,
) -> Publication:
    """A message as ``Channel.prepare_message`` made it. Raises ``TypeError`` for what JSON or bytes can't hold."""
    headers = message.get("headers") or {}
    properties = message.get("properties") or {}
    ttl_ms, expires_ms = expiry(headers, properties)
    dedup_id, dedup_window_ms = dedup_of(headers, properties, dedup_window_s)
    once_id, once_window_ms = once_of(headers, dedup_window_s)
    return Publication(
        exchange,
        routing_key,
        _payload(message, headers, properties, exchange, routing_key),
        _priority(properties, most_urgent_is_zero),
        due_ms(headers, properties, now_ms),
        ttl_ms,
        expires_ms,
        key,
        ttr_ms=ttr_ms(headers),
        task_id=task_id_of(headers, properties),
        dedup_id=dedup_id,
        dedup_window_ms=dedup_window_ms,
        once_id=once_id,
        once_window_ms=once_window_ms,
    )


def _payload(
    message: Mapping[str, Any],
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    exchange: str,
    routing_key: str,
) -> bytes:
    kept = {name: value for name, value in properties.items() if name not in _PER_DELIVERY}
    meta = _dumps(
        [message.get("content-type"), message.get("content-encoding"), headers, kept, exchange, routing_key]
    ).encode()
    return HEAD.pack(VERSION, len(meta)) + meta + _body(message.get("body"))


def _body(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode()
    if body is None:
        return b""
    return bytes(memoryview(body))  # unlike bytes(body), refuses numbers and lists


def _priority(properties: Mapping[str, Any], most_urgent_is_zero: bool) -> int:
    """0 to 9, 9 the most urgent; what is outside goes to the nearest, what is no number is 0."""
    try:
        priority = min(max(int(properties.get("priority") or 0), 0), 9)
    except (TypeError, ValueError):
        priority = 0
    return 9 - priority if most_urgent_is_zero else priority


def open_delivery(delivery: Delivery, delivery_tag: int, consumer_tag: str | None = None) -> dict[str, Any]:
    """The message dict as ``virtual.Message`` takes it. Raises ``FormatError`` if the payload is not one of ours."""
    content_type, content_encoding, headers, properties, exchange, routing_key, body = open_payload(delivery.payload)
    redelivered = delivery.redeliveries > 0
    properties["delivery_tag"] = delivery_tag
    properties["delivery_info"] = info = {
        "exchange": exchange,
        "routing_key": routing_key,
        "queue": delivery.queue,
        "redelivered": redelivered,  # where Celery looks
    }
    if consumer_tag is not None:
        info["consumer_tag"] = consumer_tag
    if redelivered:
        headers["x-delivery-count"] = delivery.redeliveries  # as RabbitMQ's quorum queues
    if delivery.deaths:
        _add_deaths(headers, delivery.deaths)
    return {
        "body": body,
        "content-type": content_type,
        "content-encoding": content_encoding,
        "headers": headers,
        "properties": properties,
        "redelivered": redelivered,
    }


class Envelope(NamedTuple):
    """A payload taken apart. The body is what the publisher's serializer made, as it is."""

    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    body: bytes


def open_payload(payload: bytes) -> Envelope:
    """Take a payload apart; never touches the body, which may be cut. Raises ``FormatError`` if it is not one of ours.

    Makes no object but those of kombu's JSON (uuid, datetime, Decimal, bytes).
    """
    try:
        version, length = HEAD.unpack_from(payload)
        start = HEAD.size + length
        meta = payload[HEAD.size : start]
        decoded = (_loads_types if _MARKER in meta else _loads)(meta.decode())
        content_type, content_encoding, headers, properties, exchange, routing_key = decoded
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, struct.error) as error:
        raise _foreign(payload, str(error)) from error
    if version != VERSION or len(meta) != length:
        raise _foreign(payload, "another version, or cut short")
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise _foreign(payload, "headers and properties are not objects")
    return Envelope(content_type, content_encoding, headers, properties, exchange, routing_key, payload[start:])


def _foreign(payload: bytes, reason: str) -> FormatError:
    return FormatError("not a message of this transport", reason=reason, length=len(payload))


def _add_deaths(headers: dict[str, Any], deaths: tuple[Death, ...]) -> None:
    """RabbitMQ's headers (https://www.rabbitmq.com/docs/dlx#effects); ``time`` is in seconds there."""
    headers["x-death"] = [
        {
            "queue": death.queue,
            "reason": death.reason,
            "count": death.count,
            "time": death.time_ms // 1000,
            "exchange": death.exchange,
            "routing-keys": list(death.routing_keys),
            **death.details,
        }
        for death in deaths
    ]
    for which, death in (("first", deaths[-1]), ("last", deaths[0])):
        headers[f"x-{which}-death-queue"] = death.queue
        headers[f"x-{which}-death-reason"] = death.reason
        headers[f"x-{which}-death-exchange"] = death.exchange


#: What RabbitMQ, and we, call the fields of a death; others are details.
_OF_A_DEATH = ("queue", "reason", "count", "time", "exchange", "routing-keys")
_OF_DEATHS = ("x-death", "x-first-death-", "x-last-death-")


def without_deaths(headers: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Death, ...]]:
    """The headers of a delivery as they were published, and the history that stood among them.

    A history that a publisher has invented, and that does not look like one, is none.
    """
    kept = {name: value for name, value in headers.items() if not name.startswith(_OF_DEATHS)}
    kept.pop("x-delivery-count", None)
    try:
        return kept, tuple(_death(entry) for entry in headers.get("x-death") or ())
    except (TypeError, ValueError, LookupError, AttributeError):
        return kept, ()


def _death(entry: Mapping[str, Any]) -> Death:
    return Death(
        entry["queue"],
        entry["reason"],
        int(entry["count"]),
        int(entry["time"]) * 1000,
        entry["exchange"],
        tuple(entry["routing-keys"]),
        {name: value for name, value in entry.items() if name not in _OF_A_DEATH},
    )
