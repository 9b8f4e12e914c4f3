"""kombu's message dict <-> the payload bytes the queue stores.

A payload is ``version (1 byte), length of meta (4 bytes), meta (JSON), body (bytes as they are)``. No base64: the body
of a Celery task is most of a message, and costs a copy here instead of an encoding.

Meta is a list: content type, content encoding, headers, properties, exchange, routing key. JSON is kombu's dialect
(uuid, datetime, Decimal, bytes in headers), but its encoder is made once and its decoding hook is called only for
payloads in which the marker of an encoded type occurs: that halves the time. A header that only looks like an encoded
type, ``{"__type__": "uuid", "__value__": 5}``, is the object it is: kombu's decoders raise whatever they like, and so
may those that an application registers. Guarantee: POISON-ENDS.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import call, itemgetter
from typing import Any, NamedTuple

from kombu.utils.json import JSONEncoder, object_hook

from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.model import URGENT, Death, Delivery, Publication
from kombu_fdb.primitives.kombu_payload import HEAD, VERSION
from kombu_fdb.primitives.ranges import is_whole, utf8, utf8_bytes
from kombu_fdb.transport.encoding.fairkey import KeyOf, explicit_key
from kombu_fdb.transport.encoding.properties import (
    DIGITS,
    LONG_NUMBER,
    MOST_PRIORITY,
    check_numbers,
    check_shape,
    check_task,
    served,
    steered_by,
    task_id_of,
    ttl_ms,
    whole_of,
)

_MARKER = b'"__type__"'
#: An object of these names stands for a value of another type in kombu's JSON.
_ENCODED_TYPE = {"__type__", "__value__"}
#: Set anew at each delivery, so not stored.
_PER_DELIVERY = ("delivery_tag", "delivery_info", "body_encoding")


def _encoder() -> Callable[[Any, int], Iterable[str]]:
    """``JSONEncoder``'s C part, which is made once, not for each text: that is a third of its time."""
    plain = JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # a Python without it
        return lambda value, _: [plain.encode(value)]
    # No markers: of a circle it learns by its depth, and threads may share it.
    return make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)  # type: ignore[no-any-return]  # untyped in the standard library


_encoded = _encoder()
_loads = json.JSONDecoder().decode


def _typed(found: dict[str, Any]) -> Any:
    try:
        return object_hook(found)
    except Exception:  # noqa: BLE001 - see the module's docstring
        return found


_loads_types = json.JSONDecoder(object_hook=_typed).decode


# -- what is prepared once ---------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What depends on nothing but the names and types of a message's headers and properties.

    An application's tasks have few different ones, so it is prepared once. ``template`` is the meta, with a place for
    each value that differs from message to message; None: there is none, as a value is of a rare type.
    """

    #: One of the names steers the message (``properties.py``).
    steers: bool
    is_task: bool
    template: str | None = None
    #: Of the values, in the order of their places.
    encoders: tuple[Callable[[Any], str], ...] = ()
    of_headers: Callable[[Mapping[str, Any]], Iterable[Any]] = tuple
    of_properties: Callable[[Mapping[str, Any]], Iterable[Any]] = tuple

    @classmethod
    def of(cls, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> Shape:
        """Raises ``InvalidArgument`` if names or types are wrong."""
        steers, is_task = check_shape(headers, properties)
        kept = {name: value for name, value in properties.items() if name not in _PER_DELIVERY}
        names, types = [*headers, *kept], [*map(type, headers.values()), *map(type, kept.values())]
        is_common = _ENCODERS.keys() >= {*types} and {*map(type, names)} <= {str}
        if not is_common or _ENCODED_TYPE in (headers.keys(), kept.keys()):
            return cls(steers, is_task)
        template = ",".join(["[%s,%s", _object(headers), _object(kept), "%s,%s]"])
        encoders = (_text, _text, *(_ENCODERS[each] for each in types if each is not _NONE), _text, _text)
        return cls(steers, is_task, template, encoders, _picker(headers), _picker(kept))


_NONE = type(None)
_text: Callable[[str], str] = json.encoder.encode_basestring_ascii
#: More of them, as of headers that are named by what they hold, are prepared anew.
MOST_SHAPES = 1000
_shapes: dict[tuple[Any, ...], Shape] = {}


def _object(table: Mapping[str, Any]) -> str:
    """The template of a table: what is None stands in it."""
    fields = [
        f"{_text(name)}:".replace("%", "%%") + ("null" if value is None else "%s") for name, value in table.items()
    ]
    return "{" + ",".join(fields) + "}"


def _picker(table: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterable[Any]]:
    """Of a table of the same shape, what is not None."""
    names = [name for name, value in table.items() if value is not None]
    return itemgetter(*names) if len(names) > 1 else lambda found: [found[name] for name in names]


class _Rare(Exception):
    """A value that the template has no place for: it may hold a whole number of more than 64 bits."""


class _Wholes(dict[int, str]):
    """Of whole numbers, of which headers have mostly small ones."""

    def __missing__(self, value: int) -> str:
        if not -(2**63) <= value < 2**63:
            raise _Rare
        return repr(value)


def _nested(value: Any) -> str:
    if not value:
        return "{}" if type(value) is dict else "[]"
    if len(value) == 2 and type(value) is list and value[0] is None and value[1] is None:  # no time limits
        return "[null,null]"
    text = "".join(_encoded(value, 0))
    if LONG_NUMBER in text.encode().translate(DIGITS):
        raise _Rare
    return text


_ENCODERS: dict[type, Callable[[Any], str]] = {
    str: _text,
    int: _Wholes({number: repr(number) for number in range(256)}).__getitem__,
    bool: {True: "true", False: "false"}.__getitem__,
    **dict.fromkeys((dict, list, tuple), _nested),
    _NONE: str,  # asked for nothing: it stands in the template
}


# -- a message ---------------------------------------------------------------------------------------------------------


def encode(
    message: Mapping[str, Any],
    exchange: str,
    routing_key: str,
    *,
    now_ms: Callable[[], int],
    most_urgent_is_zero: bool = False,
    key_of: KeyOf = explicit_key,
    dedup_window_s: float = 300.0,
) -> Publication:
    """A message as ``Channel.prepare_message`` made it.

    Raises ``TypeError`` for what JSON or bytes can't hold, and ``InvalidArgument`` for what makes no sense in a field
    that is read (``properties.py``), a text without a UTF-8 form, and headers too deep for JSON.
    """
    headers = message.get("headers") or {}
    properties = message.get("properties") or {}
    names = (len(headers), *headers, *map(type, headers.values()), *properties, *map(type, properties.values()))
    shape = _shapes.get(names)
    if shape is None:
        shape = Shape.of(headers, properties)
        if len(_shapes) >= MOST_SHAPES:
            _shapes.clear()
        _shapes[names] = shape
    if shape.is_task:
        check_task(headers)
    payload = _payload(message, headers, properties, exchange, routing_key, shape)
    priority, ttl = properties.get("priority"), None
    if type(priority) is not int or not 0 <= priority <= URGENT:  # AMQP has 256 of them: those above 9 count as 9
        priority = min(whole_of("priority", priority, MOST_PRIORITY), URGENT)
    if most_urgent_is_zero:
        priority = URGENT - priority
    if "expiration" in properties:
        ttl = ttl_ms(headers, properties)
    task_id = task_id_of(headers, properties)
    if not (shape.steers or headers.get("eta")):
        key = "" if key_of is explicit_key else key_of(message)
        return Publication(exchange, routing_key, payload, priority, 0, ttl, 0, key, 0, task_id)
    steered = steered_by(headers, properties, now_ms(), dedup_window_s)
    return Publication(
        exchange, routing_key, payload, priority, ttl_ms=ttl, key=key_of(message), task_id=task_id, **steered
    )


def payload_of(message: Mapping[str, Any], exchange: str, routing_key: str) -> bytes:
    """As it is stored, whatever it says: of a message that another program made. Raises as :func:`encode` does."""
    return _payload(message, message.get("headers") or {}, message.get("properties") or {}, exchange, routing_key, None)


def _payload(
    message: Mapping[str, Any],
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    exchange: str,
    routing_key: str,
    shape: Shape | None,
) -> bytes:
    content_type, content_encoding = message.get("content-type"), message.get("content-encoding")
    if not (type(content_type) is type(content_encoding) is str and (content_type + content_encoding).isascii()):
        for name, text in (("content type", content_type), ("content encoding", content_encoding)):
            if text is not None:
                utf8_bytes(name, text)
    meta = b""
    if shape is not None and shape.template is not None:
        around = exchange, routing_key
        values = (content_type, content_encoding, *shape.of_headers(headers), *shape.of_properties(properties), *around)
        try:  # noqa: SIM105 - suppress takes longer than what it would guard
            meta = (shape.template % (*map(call, shape.encoders, values),)).encode()
        except (TypeError, ValueError, RecursionError, _Rare):  # written, or refused, below
            pass
    if not meta:
        meta = _meta(headers, properties, [content_type, content_encoding], [exchange, routing_key])
        if shape is not None and LONG_NUMBER in meta.translate(DIGITS):
            check_numbers(headers, properties)
    body = message.get("body")
    if isinstance(body, str):
        body = body.encode() if body.isascii() else utf8("body", body)
    elif type(body) is not bytes:
        body = b"" if body is None else bytes(memoryview(body))  # unlike bytes(body), refuses numbers and lists
    return HEAD.pack(VERSION, len(meta)) + meta + body


def _meta(headers: Mapping[str, Any], properties: Mapping[str, Any], before: list[Any], behind: list[Any]) -> bytes:
    """What a template makes of common values, of all."""
    kept = {name: value for name, value in properties.items() if name not in _PER_DELIVERY}
    if _ENCODED_TYPE in (headers.keys(), kept.keys()):
        raise InvalidArgument("headers that would be misread", names=sorted(_ENCODED_TYPE), fix="Add one.")
    try:
        return "".join(_encoded([*before, headers, kept, *behind], 0)).encode()
    except (RecursionError, ValueError) as error:  # a circle, or whole numbers of thousands of digits
        raise InvalidArgument(
            "headers and properties that JSON can't hold", reason=str(error), fix="Put such data into the body."
        ) from error


def open_delivery(
    delivery: Delivery, delivery_tag: int, consumer_tag: str | None = None, *, now_ms: int | None = None
) -> dict[str, Any]:
    """The message dict as ``virtual.Message`` takes it. Raises ``FormatError`` if the payload is not one of ours.

    ``now_ms``: when it is delivered; None if it is only looked at.
    """
    content_type, content_encoding, headers, properties, exchange, routing_key, body = open_payload(delivery.payload)
    for name in _PER_DELIVERY:  # from another writer
        properties.pop(name, None)
    served(headers, now_ms)
    if delivery.way is not None:
        exchange, routing_key = delivery.way
    redelivered = delivery.redeliveries > 0 or delivery.seen
    properties["delivery_tag"] = delivery_tag
    properties["delivery_info"] = info = {
        "exchange": exchange,
        "routing_key": routing_key,
        "queue": delivery.queue,
        "redelivered": redelivered,  # where Celery looks
    }
    if consumer_tag is not None:
        info["consumer_tag"] = consumer_tag
    if delivery.redeliveries:
        headers["x-delivery-count"] = delivery.redeliveries  # as RabbitMQ's quorum queues
    if delivery.deaths:
        _add_deaths(headers, delivery.deaths, properties.pop("expiration", None))
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

    content_type: str | None
    content_encoding: str | None
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
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        raise _foreign(payload, "exchange and routing key are not strings")
    if not isinstance(content_type, str | None) or not isinstance(content_encoding, str | None):
        raise _foreign(payload, "content type and encoding are not strings")
    return Envelope(content_type, content_encoding, headers, properties, exchange, routing_key, payload[start:])


def _foreign(payload: bytes, reason: str) -> FormatError:
    return FormatError("not a message of this transport", reason=reason, length=len(payload))


def _add_deaths(headers: dict[str, Any], deaths: tuple[Death, ...], expiration: Any) -> None:
    """RabbitMQ's headers (https://www.rabbitmq.com/docs/dlx#effects); ``time`` is in seconds there.

    ``expiration``: what the message was published with. It is over with the first death, of which it is a note.
    """
    first = next((death for death in deaths if death.first), deaths[-1])
    headers["x-death"] = [
        {
            "queue": death.queue,
            "reason": death.reason,
            "count": death.count,
            "time": (death.since_ms or death.time_ms) // 1000,
            "exchange": death.exchange,
            "routing-keys": list(death.routing_keys),
            **death.details,
        }
        for death in deaths
    ]
    if expiration is not None:
        headers["x-death"][deaths.index(first)].setdefault("original-expiration", expiration)
    for which, death in (("first", first), ("last", deaths[0])):
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
        deaths = tuple(_death(entry) for entry in headers.get("x-death") or ())
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError):
        return kept, ()
    first = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    return kept, tuple(replace(each, first=True) if (each.queue, each.reason) == first else each for each in deaths)


def _death(entry: Mapping[str, Any]) -> Death:
    texts = (entry["queue"], entry["reason"], entry["exchange"], *entry["routing-keys"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(texts)
    count, time_ms = int(entry["count"]), int(entry["time"]) * 1000
    if not (is_whole(count, 0) and is_whole(time_ms, 0)):
        raise ValueError(count, time_ms)
    details = {name: value for name, value in entry.items() if name not in _OF_A_DEATH}
    return Death(
        entry["queue"],
        entry["reason"],
        count,
        time_ms,
        entry["exchange"],
        tuple(entry["routing-keys"]),
        decode_json(encode_json(details)),  # TypeError for what a record can't hold
    )
