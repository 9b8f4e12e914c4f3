"""What a publisher may write into headers and properties: whatever steers a message has to make sense.

Where RabbitMQ's client refuses a value, so does this: a property of the wrong type, a whole number of more than 64 bits
anywhere in the headers. What it can't know is refused too, by the modules that read it (``timing.py``, ``identity.py``,
``fairkey.py``): whoever writes ``priority="high"`` or ``dedup_id=7`` means something, and would otherwise learn from
production that nothing came of it. All of it is an ``InvalidArgument`` that names the field, and nothing is published.

Nobody checks what is delivered, since it may be somebody else's: of that, ``tasks.py`` sees to what ends a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kombu.utils.json import textual_types

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.ranges import is_whole, shown
from kombu_fdb.transport.encoding.tasks import fault_of

__all__ = [
    "DIGITS",
    "LONG_NUMBER",
    "MOST_PRIORITY",
    "ROUTES",
    "check",
    "check_numbers",
    "check_routes",
    "text_of",
    "whole_of",
]

#: AMQP's largest priority; what is above 9 counts as 9.
MOST_PRIORITY = 255
#: Properties that AMQP has as short strings.
_TEXTS = frozenset({"message_id", "correlation_id", "reply_to", "type", "user_id", "app_id", "cluster_id"})
#: Headers that are easily given as an option of ``publish`` or ``apply_async``, which makes properties of them.
_HEADERS = frozenset({"fair_key", "dedup_id", "dedup_window", "once_id", "once_window"})
#: Headers in which RabbitMQ finds further routing keys, if they are lists.
ROUTES = frozenset({"CC", "BCC"})
#: Django's translations, which become texts when somebody asks for them; none without Django.
_LAZY: tuple[type, ...] = textual_types
#: Nearly all that headers hold.
_NEVER_LAZY = frozenset({str, int, float, bool, list, tuple, dict, type(None)})
#: What 64 bits hold, with a sign.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**63 - 1
#: So many digits in a row, when all are written as the same one: a regular expression takes eight times as long.
LONG_NUMBER = b"0" * 19
DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def check(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    """All that no other module reads. Raises ``InvalidArgument``."""
    # Tasks first: Celery makes properties of the same values, which its user has not named. Of Celery's protocol 2;
    # another program's message may have a header ``task``, or ``retries``, too.
    if "task" in headers and "argsrepr" in headers and "id" in headers:
        _check_task(headers)
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


def check_routes(headers: Mapping[str, Any]) -> None:
    """Raises ``InvalidArgument``."""
    for name in ROUTES:
        if isinstance(headers.get(name), list | tuple):
            raise InvalidArgument(
                f"the header {name} adds no routing keys here",
                given=shown(headers[name]),
                fix="Publish once for each key, or bind each of the queues with one key.",
            )


def _check_task(headers: Mapping[str, Any]) -> None:
    retries = headers.get("retries")
    if type(retries) is not int or not 0 <= retries <= _MOST_INTEGER:
        whole_of("retries", retries)
    fault = fault_of(headers if _NEVER_LAZY.issuperset(map(type, headers.values())) else _told(headers))
    if fault is not None:
        raise InvalidArgument(
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
