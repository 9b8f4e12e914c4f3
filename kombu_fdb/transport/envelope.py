"""kombu's message dict <-> the payload bytes the queue stores; what a publisher may set, and what a delivery says.

A payload is ``version (1 byte), length of meta (4 bytes), meta (JSON), body (bytes as they are)``. No base64: the body
is most of a Celery task's message, and is copied here instead of encoded.

Meta is a list: content type, content encoding, headers, properties, exchange, routing key. The JSON is kombu's dialect
(uuid, datetime, Decimal, bytes in headers), but the encoder is made once, and the decoding hook is called only for
payloads that contain the marker of an encoded type: that halves the time. A header that only looks like an encoded
type, ``{"__type__": "uuid", "__value__": 5}``, stays that object: kombu's decoders, and an application's own, may raise
anything. Guarantee: POISON-ENDS.

*Times.* When a message becomes due, when it expires and how long its consumer may take:

==================================== =======================================================================
``eta`` header of a Celery task      ISO 8601; no time zone means UTC. ``countdown`` and ``retry`` end here too
``x-delay`` header                   milliseconds, as for RabbitMQ's delayed-message exchange
``DelaySeconds`` property or header  seconds, as for SQS and PGMQ
``expires`` header of a Celery task  not used by the queue: see below
``expiration`` property              milliseconds as a string, from when the message is due; "0" is legal
``x-ttr`` header                     milliseconds from the delivery to the ack, then the message goes back
==================================== =======================================================================

Of several delays, the latest time counts; a past time (a negative delay) is no delay. A value that is not a number or a
date, or is out of range (``ranges.py``), raises ``InvalidArgument``, and nothing is published: the publisher can have
meant neither "at once" nor "never".

In a delivered message, ``x-delay`` and ``DelaySeconds`` among the headers are negative, as from RabbitMQ's plugin: the
delay is over. A message that is published again with these headers, such as a Celery retry, is not delayed again.

A task's ``expires`` is not a TTL. A caller that waits for the result, and the task's chord, must learn that the task
did not run. Only a worker can report that: it stores ``REVOKED`` when it receives the task too late. So the message
stays until then. Celery writes the same time into ``expiration``, which therefore counts only without ``expires``.

*Checks.* Values that py-amqp refuses are refused here, too: a property of the wrong type, a whole number of more than
64 bits anywhere in the headers. So are wrong values of fields that py-amqp does not check: a publisher that writes
``priority="high"`` or ``dedup_id=7`` has an intention, and would otherwise notice only in production that it has no
effect. Each raises an ``InvalidArgument`` that names the field, and nothing is published.

*Tasks.* Celery assumes much about a task's message (protocol 2), and detects errors too late. An ``id`` that is an
object ends the worker's loop; a ``timelimit`` of one number, or an object in ``stamped_headers``, ends it later, when a
process becomes free, outside any callback. A body whose third part is not an object is an error in the pool: with
greenlets or threads it is not reported, and the message stays leased as long as the worker lives. So the same rules
apply to each delivery, as another program may have published the message.
(https://docs.celeryq.dev/en/stable/internals/protocol.html)

*Identity.* The task's id is the header ``id`` of a Celery task, else the property ``message_id``. The store finds and
cancels messages by it (``engine/messages/message.py``). A message with an id of more than 255 bytes is published like
any other, but can't be found. The dedup id (``engine/messages/publish.py``) is the header ``dedup_id`` or
``x-deduplication-id``, or ``MessageDeduplicationId``, a property or header, as users of SQS write it. Its window is the
header ``dedup_window`` (seconds), else the option of that name. An outbox has its own additional id, the header
``once_id`` with the window ``once_window``. A retry or a replacement (``self.replace``) is never a duplicate: Celery
hands a task's id on to it. It is recognised by ``retries``, or by ``replaced_task_nesting`` if it is its own parent:
tasks behind it have the nesting, too, and may be duplicates. With protocol 1, ``transport/worker.py`` puts ``retries``
among the headers.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from operator import call, itemgetter
from typing import Any, NamedTuple

from kombu.utils.json import JSONEncoder, object_hook, textual_types

from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.keyspace.codec import PAYLOAD_HEAD, PAYLOAD_VERSION, decode_json, encode_json
from kombu_fdb.model import LONGEST_TASK_ID, NO_SESSION, URGENT, Death, Delivery, Lease, Peeked, Publication
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_MS, LONGEST_S, SHORTEST_S, is_whole, number, shown, utf8

# -- times -------------------------------------------------------------------------------------------------------------


#: Headers that delay a message by a time from its publication.
_DELAYS = ("x-delay", "DelaySeconds")
#: Headers and properties for times, in addition to those of AMQP and Celery.
TIMES = frozenset({*_DELAYS, "x-ttr"})


def now_ms() -> int:
    """The current time, rounded up: a delay from it does not end a fraction of a millisecond early."""
    return -(-time.time_ns() // 1_000_000)


def due_ms(headers: Mapping[str, Any], properties: Mapping[str, Any], now_ms: int) -> int:
    """The time before which the message must not be delivered; 0 for none.

    A past time still counts: a message that is published again after it is the same message (``publish.py``).
    """
    due = 0
    if headers.get("eta") and "task" in headers:
        due = max(due, _moment_ms("eta", headers["eta"]))
    if headers.get("x-delay") is not None:
        due = max(
            due, now_ms + int(number("x-delay", headers["x-delay"], "milliseconds", least=-LONGEST_MS, most=LONGEST_MS))
        )
    for source in (headers, properties):
        if source.get("DelaySeconds") is not None:
            delay_s = number("DelaySeconds", source["DelaySeconds"], "seconds", least=-LONGEST_S, most=LONGEST_S)
            due = max(due, now_ms + int(delay_s * 1000))
    return due


def served(headers: dict[str, Any], now_ms: int | None) -> None:
    """Make the delays among the headers of a delivery negative, and its ETA not later than the delivery at ``now_ms``.

    The delay is over by the clock of the process that made the message ready. The clock of Celery's worker may be
    behind; then the worker would hold the message until its ETA.
    """
    if now_ms is not None and headers.get("eta") and "task" in headers:
        with suppress(InvalidArgument):  # from another writer: Celery refuses it
            if _moment_ms("eta", headers["eta"]) > now_ms:
                headers["eta"] = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat()
    for name in _DELAYS:
        delay = headers.get(name)
        if isinstance(delay, int | float) and delay > 0:
            headers[name] = -delay


def ttl_ms(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> int | None:
    """The publisher's time to live; None for none."""
    expiration = properties.get("expiration")
    if expiration is None or (headers.get("expires") and "task" in headers):
        return None
    return int(number("expiration", expiration, "milliseconds", most=LONGEST_MS))


def _moment_ms(name: str, value: Any) -> int:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        # Rounded up, so as not to be a fraction of a millisecond early.
        return min(-int(-moment.timestamp() * 1000 // 1), LATEST_MS)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(
            f"{name} must be a date and time", given=shown(value), fix="Write it as 2031-12-31T23:59:59+00:00."
        ) from None


# -- properties --------------------------------------------------------------------------------------------------------


#: AMQP's largest priority; priorities above 9 count as 9.
MOST_PRIORITY = 255
#: Properties that are short strings in AMQP.
_TEXTS = frozenset({"message_id", "correlation_id", "reply_to", "type", "user_id", "app_id", "cluster_id"})
#: Headers that users may pass as options to ``publish`` or ``apply_async``, which makes them properties.
_HEADERS = frozenset({"fair_key", "dedup_id", "dedup_window", "once_id", "once_window"})
#: Headers from which RabbitMQ reads additional routing keys, if they are lists.
ROUTES = frozenset({"CC", "BCC"})
#: Django's lazy translations, which become text when they are used; none without Django.
_LAZY: tuple[type, ...] = textual_types
#: The types of nearly all header values.
_NEVER_LAZY = frozenset({str, int, float, bool, list, tuple, dict, type(None)})
#: The range of 64 bits, with a sign.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**63 - 1
#: A run of this many digits, once all digits are replaced by 0: a regular expression takes eight times as long.
LONG_NUMBER = b"0" * 19
DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
#: Finds the fairness key of a message.
KeyOf = Callable[[Mapping[str, Any]], str]
#: Headers and properties that name a fairness key.
_KEYS = frozenset({"fair_key", "MessageGroupId"})
_SQS_DEDUP_ID = "MessageDeduplicationId"
#: Headers, and a property, for a dedup id.
DEDUP_IDS = frozenset({"dedup_id", "x-deduplication-id", _SQS_DEDUP_ID})
#: Headers and properties for the ids of a publication.
IDS = DEDUP_IDS | {"once_id"}
#: Names that steer a message, here or in other brokers: most messages have none of them.
_STEERING = _KEYS | IDS | TIMES | ROUTES
#: Header names and types of tasks that are known to be good: an application has few different ones.
_good: set[tuple[Any, ...]] = set()
MOST_GOOD = 1000

# -- what a publisher may write ----------------------------------------------------------------------------------------


def check_shape(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> tuple[bool, bool]:
    """Check everything that depends only on names and types. Raises ``InvalidArgument``.

    Returns whether a name steers the message, and whether it is a task of Celery's protocol 2: another program's
    message may also have a header ``task``, or ``retries``.
    """
    is_task = "task" in headers and "argsrepr" in headers and "id" in headers
    # Tasks first: Celery copies the same values to properties that its user has not set.
    if is_task:
        fault = _wrong_type(headers if _NEVER_LAZY.issuperset(map(type, headers.values())) else _resolved(headers))
        if fault is not None:
            raise _no_task(fault)
    for name, value in properties.items():
        if name in _TEXTS:
            if type(value) is not str:
                text_of(name, value)
        elif name in _HEADERS:
            raise InvalidArgument(
                f"{name} is a header, not a property",
                given=shown(value),
                fix=f"Write headers={{{name!r}: ...}}; as an option, apply_async of tasks with base=FdbTask takes it.",
            )
    return not (_STEERING.isdisjoint(headers) and _STEERING.isdisjoint(properties)), is_task


def check_task(headers: Mapping[str, Any]) -> None:
    """Check what depends on the values in a task's headers. Raises ``InvalidArgument``."""
    retries = headers.get("retries")
    if type(retries) is not int or not 0 <= retries <= _MOST_INTEGER:
        whole_of("retries", retries)
    fault = _wrong_value(headers)
    if fault is not None:
        raise _no_task(fault)


def _no_task(fault: str) -> InvalidArgument:
    return InvalidArgument(
        "a task that no Celery worker can handle",
        reason=fault,
        fix="See apply_async's options; ids are strings, as in task_id=str(...).",
    )


def _resolved(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The headers, with lazy values resolved to their current texts."""
    return {name: str(each) if isinstance(each, _LAZY) else each for name, each in headers.items()}


def text_of(name: str, value: Any) -> str:
    """The text, "" for None. Django's lazy ones become their current text, as in kombu's JSON."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, _LAZY):
        return str(value)
    if not isinstance(value, str):
        fix = f"Try {name}.decode()." if isinstance(value, bytes) else f"Try str({name})."
        raise InvalidArgument(f"{name} must be a string", given=shown(value), fix=fix)
    return value


def explicit_key(message: Mapping[str, Any]) -> str:
    """The key that the publisher has named."""
    headers, properties = message.get("headers") or {}, message.get("properties") or {}
    if _KEYS.isdisjoint(headers) and "MessageGroupId" not in properties:
        return ""
    given = (("fair_key", headers), ("MessageGroupId", properties), ("MessageGroupId", headers))
    for name, source in given:
        if source.get(name) is not None:
            return text_of(name, source[name])
    return ""


def whole_of(name: str, value: Any, most: int = _MOST_INTEGER) -> int:
    """The whole number that ``value`` is or spells, 0 for None."""
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= most:
        return value
    found = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    if not is_whole(found, 0, most):
        raise InvalidArgument(f"{name} must be a whole number", given=shown(value), fix=f"From 0 to {most:,}.")
    return int(found)


def check_numbers(*tables: Mapping[str, Any]) -> None:
    """Check that all whole numbers fit into 64 bits. Raises ``InvalidArgument``.

    Call it only if the tables as JSON, with all digits replaced by ``DIGITS``, contain ``LONG_NUMBER``.
    """
    for table in tables:
        for name, value in table.items():
            for each in _numbers_in(value):
                if not _LEAST_INTEGER <= each <= _MOST_INTEGER:
                    raise InvalidArgument(
                        f"{name} holds a whole number of more than 64 bits",
                        given=shown(each),
                        fix="Write it as a string, or put it into the body.",
                    )


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers_in(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _numbers_in(each)


# -- tasks -------------------------------------------------------------------------------------------------------------


_TEXT, _MAYBE_TEXT = (str,), (str, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "id": _TEXT,
    "task": _TEXT,
    **dict.fromkeys(("root_id", "parent_id", "group", "shadow", "lang", "origin"), _MAYBE_TEXT),
    **dict.fromkeys(("argsrepr", "kwargsrepr"), _MAYBE_TEXT),
    **dict.fromkeys(("eta", "expires"), (*_MAYBE_TEXT, datetime)),
    **dict.fromkeys(("retries", "replaced_task_nesting", "group_index"), (int, type(None))),
    "ignore_result": (int, type(None)),
    "stamps": (dict, type(None)),
    "stamped_headers": (list, tuple, type(None)),
}
#: The value that Celery writes for most tasks.
NO_LIMITS = [None, None]


def fault_of(headers: Mapping[str, Any]) -> str | None:
    """What is wrong with the headers of a task; None if nothing is, or if it is not a task."""
    if "task" not in headers:
        return None
    shape = (*headers, *map(type, headers.values()))
    if shape not in _good:
        fault = _wrong_type(headers)
        if fault is not None:
            return fault
        if len(_good) >= MOST_GOOD:
            _good.clear()
        _good.add(shape)
    return _wrong_value(headers)


def _wrong_value(headers: Mapping[str, Any]) -> str | None:
    limits = headers.get("timelimit")
    if limits is not None and limits != NO_LIMITS and not is_timelimit(limits):
        return f"the header timelimit is {_shown(limits)}"
    stamped = headers.get("stamped_headers")
    if stamped and not all(isinstance(name, str) for name in stamped):
        return f"the header stamped_headers is {_shown(stamped)}"
    return None


def _wrong_type(headers: Mapping[str, Any]) -> str | None:
    """What is wrong with the names of the headers, or the types of their values."""
    if "id" not in headers:
        return "a task without the header id"
    for name, types in _TYPES.items():
        if name in headers and not isinstance(headers[name], types):
            return f"the header {name} is {_shown(headers[name])}"
    return None


def body_fault(body: Any) -> str | None:
    """What is wrong with the decoded body of a task with good headers; None if nothing is.

    It is ``(args, kwargs, embed)``, or the object of protocol 1. Args and kwargs that don't fit the task make the task
    fail, and are no fault of the body.
    """
    if isinstance(body, dict) and "args" in body:
        return None
    if not isinstance(body, list | tuple) or len(body) != 3:
        return f"the body is {_shown(body)}, not args, kwargs and embed"
    embed = body[2]
    if embed and not (isinstance(embed, dict) and all(isinstance(name, str) for name in embed)):
        return f"the third part of the body is {_shown(embed)}, not an object"
    return None


def is_timelimit(value: Any) -> bool:
    """Whether it is a hard and a soft limit, in seconds."""
    if value is None:
        return True
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    for limit in value:  # a number that a timer can add to a time: an integer may be too large for a float
        if limit is not None and not (isinstance(limit, int | float) and 0 <= limit <= sys.float_info.max):
            return False
    return True


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {shown(value)}"


# -- identity ----------------------------------------------------------------------------------------------------------


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """The id, "" if there is none."""
    given = headers.get("id") if "task" in headers else text_of("message_id", properties.get("message_id"))
    task_id = "" if given is None else str(given)
    if task_id.isascii() and len(task_id) <= LONGEST_TASK_ID:
        return task_id
    return task_id if len(utf8("task id", task_id)) <= LONGEST_TASK_ID else ""


def dedup_of(headers: Mapping[str, Any], properties: Mapping[str, Any], window_s: float) -> tuple[str, int]:
    """The dedup id, "" if there is none, and its window in milliseconds."""
    if DEDUP_IDS.isdisjoint(headers) and _SQS_DEDUP_ID not in properties:
        return "", 0
    given = (
        ("dedup_id", headers),
        ("x-deduplication-id", headers),
        (_SQS_DEDUP_ID, properties),
        (_SQS_DEDUP_ID, headers),
    )
    return _first_id(given, "dedup_window", headers, window_s)


def _first_id(
    given: Iterable[tuple[str, Mapping[str, Any]]], window: str, headers: Mapping[str, Any], window_s: float
) -> tuple[str, int]:
    """The first id that is not empty, "" if there is none, and its window in milliseconds."""
    found = next(filter(None, (text_of(name, source.get(name)) for name, source in given)), "")
    if not found or _goes_on(headers):
        return "", 0
    own = headers.get(window)
    if own is not None:
        window_s = number(window, own, "seconds", least=SHORTEST_S, most=LONGEST_S)
    return found, int(window_s * 1000)


def steered_by(
    headers: Mapping[str, Any], properties: Mapping[str, Any], now_ms: int, window_s: float
) -> dict[str, Any]:
    """The fields of a publication that steering names set. Raises ``InvalidArgument``.

    ``window_s``: for dedup and once ids without a window of their own.
    """
    for name in ROUTES:
        if isinstance(headers.get(name), list | tuple):
            raise InvalidArgument(
                f"the header {name} adds no routing keys here",
                given=shown(headers[name]),
                fix="Publish once for each key, or bind each of the queues with one key.",
            )
    ttr = headers.get("x-ttr")
    dedup_id, dedup_window_ms = dedup_of(headers, properties, window_s)
    once_id, once_window_ms = _first_id([("once_id", headers)], "once_window", headers, window_s)
    return {
        "due_ms": due_ms(headers, properties, now_ms),
        "ttr_ms": 0 if ttr is None else int(number("x-ttr", ttr, "milliseconds", most=LONGEST_MS)),
        "dedup_id": dedup_id,
        "dedup_window_ms": dedup_window_ms,
        "once_id": once_id,
        "once_window_ms": once_window_ms,
    }


def _goes_on(headers: Mapping[str, Any]) -> bool:
    """Whether this message continues a task that was published before."""
    # Without the nesting, a task has published a duplicate under its own id.
    is_replacement = headers.get("replaced_task_nesting") and headers.get("id") == headers.get("parent_id")
    return bool(headers.get("retries") or is_replacement)


_MARKER = b'"__type__"'
#: In kombu's JSON, an object with these names represents a value of another type.
_ENCODED_TYPE = {"__type__", "__value__"}
#: Set at each delivery, so not stored.
_PER_DELIVERY = ("delivery_tag", "delivery_info", "body_encoding")


def _kept(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties that are stored. In AMQP, a property of None is absent."""
    return {name: value for name, value in properties.items() if value is not None and name not in _PER_DELIVERY}


def _encoder() -> Callable[[Any, int], Iterable[str]]:
    """``JSONEncoder``'s C part, made once instead of for each text: that saves a third of the time."""
    plain = JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # a Python without it
        return lambda value, _: [plain.encode(value)]
    # No markers: it detects cycles by the recursion depth, and threads may share it.
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
    """Everything about a message that depends only on the names and types of its headers and properties.

    An application's tasks have few different shapes, so each is prepared once. ``template`` is the meta, with a
    placeholder for each value that varies; None if a value has a rare type.
    """

    #: Whether one of the names steers the message (:func:`check_shape`).
    steers: bool
    is_task: bool
    template: str | None = None
    #: The converters of the values, in the order of the placeholders.
    encoders: tuple[Callable[[Any], str], ...] = ()
    of_headers: Callable[[Mapping[str, Any]], Iterable[Any]] = tuple
    of_properties: Callable[[Mapping[str, Any]], Iterable[Any]] = tuple

    @classmethod
    def of(cls, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> Shape:
        """Raises ``InvalidArgument`` if names or types are wrong."""
        steers, is_task = check_shape(headers, properties)
        kept = _kept(properties)
        names, types = [*headers, *kept], [*map(type, headers.values()), *map(type, kept.values())]
        is_common = _ENCODERS.keys() >= {*types} and {*map(type, names)} <= {str}
        if not is_common or _ENCODED_TYPE in (headers.keys(), kept.keys()):
            return cls(steers, is_task)
        template = ",".join(["[%s,%s", _object(headers), _object(kept), "%s,%s]"])
        encoders = (_text, _text, *(_ENCODERS[each] for each in types if each is not _NONE), _text, _text)
        return cls(steers, is_task, template, encoders, _picker(headers), _picker(kept))


_NONE = type(None)
_text: Callable[[str], str] = json.encoder.encode_basestring_ascii
#: The cache is emptied when it has this many shapes, as happens if headers are named after their values.
MOST_SHAPES = 1000
_shapes: dict[tuple[Any, ...], Shape] = {}


def _object(table: Mapping[str, Any]) -> str:
    """The template of a table; it contains the values that are None."""
    fields = [
        f"{_text(name)}:".replace("%", "%%") + ("null" if value is None else "%s") for name, value in table.items()
    ]
    return "{" + ",".join(fields) + "}"


def _picker(table: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterable[Any]]:
    """Picks the values that are not None from a table of the same shape."""
    names = [name for name, value in table.items() if value is not None]
    return itemgetter(*names) if len(names) > 1 else lambda found: [found[name] for name in names]


def _nested(value: Any) -> str:
    if not value:
        return "{}" if type(value) is dict else "[]"
    if len(value) == 2 and type(value) is list and value[0] is None and value[1] is None:  # no time limits
        return "[null,null]"
    text = "".join(_encoded(value, 0))
    if LONG_NUMBER in text.encode().translate(DIGITS):  # it may contain a whole number of more than 64 bits
        raise ValueError(text)
    return text


@lru_cache(maxsize=1_000)
def _whole(value: int) -> str:
    if not -(2**63) <= value < 2**63:  # the template can't hold it
        raise ValueError(value)
    return repr(value)


_ENCODERS: dict[type, Callable[[Any], str]] = {
    str: _text,
    int: _whole,
    bool: {True: "true", False: "false"}.__getitem__,
    **dict.fromkeys((dict, list, tuple), _nested),
    _NONE: str,  # not called: the template contains it
}


# -- a message ---------------------------------------------------------------------------------------------------------


def encode(
    message: Mapping[str, Any],
    exchange: str,
    routing_key: str,
    now_ms: int,
    *,
    most_urgent_is_zero: bool = False,
    key_of: KeyOf = explicit_key,
    dedup_window_s: float = 300.0,
) -> Publication:
    """The publication of a message made by ``Channel.prepare_message``.

    Raises ``TypeError`` for values that JSON or bytes can't hold, and ``InvalidArgument`` for nonsense in a field that
    is read (:func:`check_shape`), text that UTF-8 can't encode, and headers too deep for JSON.
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
    if type(priority) is not int or not 0 <= priority <= URGENT:  # AMQP has 256 priorities: those above 9 count as 9
        priority = min(whole_of("priority", priority, MOST_PRIORITY), URGENT)
    if most_urgent_is_zero:
        priority = URGENT - priority
    if "expiration" in properties:
        ttl = ttl_ms(headers, properties)
    task_id = task_id_of(headers, properties)
    if not (shape.steers or headers.get("eta")):
        key = "" if key_of is explicit_key else key_of(message)
        return Publication(exchange, routing_key, payload, priority, 0, ttl, 0, key, 0, task_id)
    steered = steered_by(headers, properties, now_ms, dedup_window_s)
    return Publication(
        exchange, routing_key, payload, priority, ttl_ms=ttl, key=key_of(message), task_id=task_id, **steered
    )


def payload_of(message: Mapping[str, Any], exchange: str, routing_key: str) -> bytes:
    """The stored form of another program's message, whatever it contains. Raises what :func:`encode` raises."""
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
                utf8(name, text)
    meta = b""
    if shape is not None and shape.template is not None:
        around = exchange, routing_key
        values = (content_type, content_encoding, *shape.of_headers(headers), *shape.of_properties(properties), *around)
        try:  # noqa: SIM105 - suppress takes longer than the guarded code
            meta = (shape.template % (*map(call, shape.encoders, values),)).encode()
        except (TypeError, ValueError, RecursionError):  # written, or refused, below
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
    return PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(meta)) + meta + body


def _meta(headers: Mapping[str, Any], properties: Mapping[str, Any], before: list[Any], behind: list[Any]) -> bytes:
    """The meta for any values; for common ones a template makes the same."""
    kept = _kept(properties)
    if _ENCODED_TYPE in (headers.keys(), kept.keys()):
        raise InvalidArgument(
            "headers that would be misread", names=sorted(_ENCODED_TYPE), fix="Add a header with another name."
        )
    try:
        return "".join(_encoded([*before, headers, kept, *behind], 0)).encode()
    except (RecursionError, ValueError) as error:  # a cycle, or whole numbers of thousands of digits
        raise InvalidArgument(
            "headers and properties that JSON can't hold", reason=str(error), fix="Put such data into the body."
        ) from error


def open_delivery(
    delivery: Delivery, delivery_tag: int, consumer_tag: str | None = None, *, now_ms: int | None = None
) -> dict[str, Any]:
    """The message dict as ``virtual.Message`` takes it. Raises ``FormatError`` for a foreign payload.

    ``now_ms``: the time of delivery; None if it is only looked at.
    """
    content_type, content_encoding, headers, properties, exchange, routing_key, body = open_payload(delivery.payload)
    for name in _PER_DELIVERY:  # from another writer
        properties.pop(name, None)
    served(headers, now_ms)
    if delivery.delivery_info is not None:
        exchange, routing_key = delivery.delivery_info
    redelivered = delivery.redeliveries > 0 or delivery.seen
    properties["delivery_tag"] = delivery_tag
    properties["delivery_info"] = info = {
        "exchange": exchange,
        "routing_key": routing_key,
        "queue": delivery.queue,
        "redelivered": redelivered,  # Celery looks here
    }
    if consumer_tag is not None:
        info["consumer_tag"] = consumer_tag
    if delivery.key and headers.get("fair_key") != delivery.key:  # by MessageGroupId, or the option fair_key
        info["fair_key"] = delivery.key
    if delivery.redeliveries:
        headers["x-delivery-count"] = delivery.redeliveries  # as RabbitMQ's quorum queues do
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


def open_peeked(peeked: Peeked) -> dict[str, Any]:
    """:func:`open_delivery` for a message that was only read, not claimed."""
    unleased = Lease(NO_SESSION, 0)
    delivery = Delivery(
        unleased, peeked.queue, peeked.payload, peeked.message_id, peeked.redeliveries, peeked.deaths, peeked.key
    )
    return open_delivery(delivery, 0)


class Envelope(NamedTuple):
    """A parsed payload. The body is the publisher's serializer's output, unchanged."""

    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    body: bytes


def open_payload(payload: bytes) -> Envelope:
    """Parse a payload; never touches the body, which may be cut. Raises ``FormatError`` for a foreign payload.

    Creates only objects of kombu's JSON (uuid, datetime, Decimal, bytes).
    """
    try:
        version, length = PAYLOAD_HEAD.unpack_from(payload)
        start = PAYLOAD_HEAD.size + length
        meta = payload[PAYLOAD_HEAD.size : start]
        decoded = (_loads_types if _MARKER in meta else _loads)(meta.decode())
        content_type, content_encoding, headers, properties, exchange, routing_key = decoded
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, struct.error) as error:
        raise _foreign(payload, str(error)) from error
    if version != PAYLOAD_VERSION or len(meta) != length:
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
    """Add RabbitMQ's headers (https://www.rabbitmq.com/docs/dlx#effects), with ``time`` in seconds, as there.

    ``expiration``: the property as published. The first death removed it, and its entry records it.
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


#: The fields of a death, by RabbitMQ's names and ours; all others are details.
_OF_A_DEATH = ("queue", "reason", "count", "time", "exchange", "routing-keys")
_OF_DEATHS = ("x-death", "x-first-death-", "x-last-death-")


def without_deaths(headers: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Death, ...]]:
    """The headers of a delivery as they were published, and the history that was among them.

    A malformed history, which another program may have written, counts as none.
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
