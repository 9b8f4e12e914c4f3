"""Properties and headers: what a publisher may set, and what it means for the queue.

*Times.* When a message becomes due, when it expires and how long it may take:

==================================== =======================================================================
``eta`` header of a Celery task      ISO 8601; no time zone means UTC. ``countdown`` and ``retry`` end here too
``x-delay`` header                   milliseconds, as for RabbitMQ's delayed-message exchange
``DelaySeconds`` property or header  seconds, as for SQS and PGMQ
``expires`` header of a Celery task  none of the queue's business: see below
``expiration`` property              milliseconds as a string, from when the message is due; "0" is legal
``x-ttr`` header                     milliseconds from the delivery to the ack, then the message goes back
==================================== =======================================================================

Several delays: the latest moment counts, and one that has passed (a negative delay) is none. Something that is no
number or date, or is out of range (``ranges.py``), is an ``InvalidArgument``: nothing is published, as neither at once
nor never can be what was meant.

In a delivered message, ``x-delay`` and ``DelaySeconds`` among the headers are negative, as from RabbitMQ's plugin: the
delay was served, and a publish with these headers again, such as Celery's of a retry, is not delayed by it.

A task's ``expires`` is no TTL. A caller that waits for its result, and a chord that it is a part of, have to be told
that it did not run, and only a worker can tell them: it stores ``REVOKED`` when it is given the task too late. So the
message stays until then. Celery writes the same moment into ``expiration``, which therefore counts only without
``expires``.

*Checks.* Where RabbitMQ's client refuses a value, so does this: a property of the wrong type, a whole number of more
than 64 bits anywhere in the headers. What it can't know is refused too, here and in ``fairkey.py``: a publisher that
writes ``priority="high"`` or ``dedup_id=7`` means something, and would otherwise learn from production that it does
nothing. All of it is an ``InvalidArgument`` that names the field, and nothing is published.

*Tasks.* Celery takes much for granted of a task's message (protocol 2), and does not check it until it is too late. An
``id`` that is an object ends the worker's loop; a ``timelimit`` of one number, or an object in ``stamped_headers``,
ends it later, when a process becomes free, outside of any callback. A body whose third part is no object is an error in
the pool: of greenlets or threads no one hears of it, and the message stays leased for as long as the worker lives. So
the same rules hold for what is delivered, which another program may have published.
(https://docs.celeryq.dev/en/stable/internals/protocol.html)

*Identity.* The task's id is the header ``id`` of a Celery task, else the property ``message_id``. By it the store finds
and cancels the message (``engine/stored/task_index.py``). An id of more than 255 bytes is published like any other and
can't be found. The dedup id (``engine/messages/dedup.py``) is the header ``dedup_id`` or ``x-deduplication-id``, or
``MessageDeduplicationId``, a property or header, as users of SQS write it. Its window is the header ``dedup_window``
(seconds), else the option of that name. An outbox has an id of its own beside it, the header ``once_id`` with the
window ``once_window``. A retry or a replacement (``self.replace``) is never a duplicate: Celery hands a task's headers
and id on to it. It is told by ``retries`` or ``replaced_task_nesting``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from kombu.utils.json import textual_types

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import LONGEST_TASK_ID
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_MS, LONGEST_S, is_whole, number, shown, utf8_bytes

# -- times -------------------------------------------------------------------------------------------------------------


#: Headers that delay a message by a time from its publication.
_DELAYS = ("x-delay", "DelaySeconds")
#: Headers and properties that name a time, besides those of AMQP and Celery.
TIMES = frozenset({*_DELAYS, "x-ttr"})


def due_ms(headers: Mapping[str, Any], properties: Mapping[str, Any], now_ms: int) -> int:
    """The moment before which the message must not be delivered; 0 for none."""
    due = 0
    if headers.get("eta") and "task" in headers:
        due = _moment_ms("eta", headers["eta"])
    if headers.get("x-delay") is not None:
        due = max(
            due, now_ms + int(number("x-delay", headers["x-delay"], "milliseconds", least=-LONGEST_MS, most=LONGEST_MS))
        )
    for source in (headers, properties):
        if source.get("DelaySeconds") is not None:
            delay_s = number("DelaySeconds", source["DelaySeconds"], "seconds", least=-LONGEST_S, most=LONGEST_S)
            due = max(due, now_ms + int(delay_s * 1000))
    return due if due > now_ms else 0


def served(headers: dict[str, Any], now_ms: int | None) -> None:
    """Make the delays among the headers of a delivery negative; its ETA is not later than the delivery at ``now_ms``.

    The store has waited for it, by the clock of the process that made the message ready. Celery's worker, whose clock
    may be behind that one, would keep a message with an ETA that has yet to come.
    """
    if now_ms is not None and headers.get("eta") and "task" in headers:
        with suppress(InvalidArgument):  # of another writer: Celery refuses it
            if _moment_ms("eta", headers["eta"]) > now_ms:
                headers["eta"] = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat()
    for name in _DELAYS:
        delay = headers.get(name)
        if isinstance(delay, int | float) and delay > 0:
            headers[name] = -delay


def ttl_ms(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> int | None:
    """The time to live that the publisher gave it; None for none."""
    expiration = properties.get("expiration")
    if expiration is None or (headers.get("expires") and "task" in headers):
        return None
    return int(number("expiration", expiration, "milliseconds", most=LONGEST_MS))


def _moment_ms(name: str, value: Any) -> int:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        # Rounded up: not even a part of a millisecond early.
        return min(-int(-moment.timestamp() * 1000 // 1), LATEST_MS)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(
            f"{name} must be a date and time", given=shown(value), fix="Write it as 2031-12-31T23:59:59+00:00."
        ) from None


# -- properties --------------------------------------------------------------------------------------------------------


#: AMQP's largest priority; what is above 9 counts as 9.
MOST_PRIORITY = 255
#: Properties that AMQP has as short strings.
_TEXTS = frozenset({"message_id", "correlation_id", "reply_to", "type", "user_id", "app_id", "cluster_id"})
#: Headers that are easily given as an option of ``publish`` or ``apply_async``, which makes properties of them.
_HEADERS = frozenset({"fair_key", "dedup_id", "dedup_window", "once_id", "once_window"})
#: Headers in which RabbitMQ finds further routing keys, if they are lists.
ROUTES = frozenset({"CC", "BCC"})
#: Django's translations, which become texts when they are asked for; none without Django.
_LAZY: tuple[type, ...] = textual_types
#: Nearly all that headers hold.
_NEVER_LAZY = frozenset({str, int, float, bool, list, tuple, dict, type(None)})
#: What 64 bits hold, with a sign.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**63 - 1
#: So many digits in a row, when all are written as the same one: a regular expression takes eight times as long.
LONG_NUMBER = b"0" * 19
DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
#: Headers and properties that name a fairness key.
KEYS = frozenset({"fair_key", "MessageGroupId"})
_SQS_DEDUP_ID = "MessageDeduplicationId"
_DEDUP_IDS = frozenset({"dedup_id", "x-deduplication-id", _SQS_DEDUP_ID})
#: Headers and properties that give a message an id of its publication.
IDS = _DEDUP_IDS | {"once_id"}
#: The shortest window.
SHORTEST_S = 0.001
#: Names of ours, and of other queues, that steer a message: most messages have none of them.
_STEERING = KEYS | IDS | TIMES | ROUTES
#: Names and types of tasks' headers that are good: an application has few different ones.
_good: set[tuple[Any, ...]] = set()
MOST_GOOD = 1000

# -- what a publisher may write ----------------------------------------------------------------------------------------


def check_shape(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> tuple[bool, bool]:
    """All that depends on nothing but names and types. Raises ``InvalidArgument``.

    Whether one of the names steers the message, and whether it is a task: of Celery's protocol 2, as another program's
    message may have a header ``task``, or ``retries``, too.
    """
    is_task = "task" in headers and "argsrepr" in headers and "id" in headers
    # Tasks first: Celery makes properties of the same values, which its user has not named.
    if is_task:
        fault = _wrong_type(headers if _NEVER_LAZY.issuperset(map(type, headers.values())) else _told(headers))
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
    """What depends on the values, of a task. Raises ``InvalidArgument``."""
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


def _told(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The headers, with what lazy texts say now."""
    return {name: str(each) if isinstance(each, _LAZY) else each for name, each in headers.items()}


def text_of(name: str, value: Any) -> str:
    """The text, "" for None. A lazy one of Django's is what it says now, as kombu's JSON has it."""
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
    """All whole numbers must fit into 64 bits.

    A walk that only pays if the tables as JSON, their digits all made 0 by ``DIGITS``, contain ``LONG_NUMBER``.
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
#: As Celery writes it of most tasks.
NO_LIMITS = [None, None]


def fault_of(headers: Mapping[str, Any]) -> str | None:
    """What is wrong with the headers of a task; None if nothing is, or if they are of no task."""
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
    """What depends on nothing but the names of the headers, and on the types of their values."""
    if "id" not in headers:
        return "a task without the header id"
    for name, types in _TYPES.items():
        if name in headers and not isinstance(headers[name], types):
            return f"the header {name} is {_shown(headers[name])}"
    return None


def body_fault(body: Any) -> str | None:
    """What is wrong with the decoded body of a task with good headers; None if nothing is.

    It is ``(args, kwargs, embed)``, or the object of protocol 1. Whether args and kwargs fit the task is seen when it
    is called, and is its failure.
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
    """Hard and soft limit, in seconds."""
    if value is None:
        return True
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    for limit in value:  # a number that a timer can add to the time: an integer may be too large to be a float
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
    return task_id if utf8_bytes("task id", task_id) <= LONGEST_TASK_ID else ""


def dedup_of(headers: Mapping[str, Any], properties: Mapping[str, Any], window_s: float) -> tuple[str, int]:
    """The dedup id, "" if there is none, and its window in milliseconds."""
    if _DEDUP_IDS.isdisjoint(headers) and _SQS_DEDUP_ID not in properties:
        return "", 0
    given = (
        ("dedup_id", headers),
        ("x-deduplication-id", headers),
        (_SQS_DEDUP_ID, properties),
        (_SQS_DEDUP_ID, headers),
    )
    dedup_id = next(filter(None, (text_of(name, source.get(name)) for name, source in given)), "")
    if not dedup_id or _goes_on(headers):
        return "", 0
    return dedup_id, _window_ms("dedup_window", headers.get("dedup_window"), window_s)


def _once_of(headers: Mapping[str, Any], window_s: float) -> tuple[str, int]:
    """Likewise, the once id."""
    if "once_id" not in headers:
        return "", 0
    once_id = text_of("once_id", headers["once_id"])
    if not once_id or _goes_on(headers):
        return "", 0
    return once_id, _window_ms("once_window", headers.get("once_window"), window_s)


def steered_by(
    headers: Mapping[str, Any], properties: Mapping[str, Any], now_ms: int, window_s: float
) -> dict[str, Any]:
    """What the names that steer a message say, as fields of its publication. Raises ``InvalidArgument``.

    ``window_s``: of dedup and once ids without one of their own.
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
    once_id, once_window_ms = _once_of(headers, window_s)
    return {
        "due_ms": due_ms(headers, properties, now_ms),
        "ttr_ms": 0 if ttr is None else int(number("x-ttr", ttr, "milliseconds", most=LONGEST_MS)),
        "dedup_id": dedup_id,
        "dedup_window_ms": dedup_window_ms,
        "once_id": once_id,
        "once_window_ms": once_window_ms,
    }


def _goes_on(headers: Mapping[str, Any]) -> bool:
    """Whether a task that was published before goes on with this message."""
    return bool(headers.get("retries") or headers.get("replaced_task_nesting"))


def _window_ms(name: str, given: Any, default_s: float) -> int:
    window_s = default_s if given is None else number(name, given, "seconds", least=SHORTEST_S, most=LONGEST_S)
    return int(window_s * 1000)
