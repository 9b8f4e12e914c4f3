"""What Celery takes for granted of a task's message (protocol 2), and does not check until it is too late.

An ``id`` that is an object ends the worker's loop; a ``timelimit`` of one number, or an object in ``stamped_headers``,
ends it later, when a process becomes free, outside of any callback. A body whose third part is no object is an
error in the pool: of greenlets or threads it is an error that nobody hears of, and the message stays leased for as long
as the worker lives. (https://docs.celeryq.dev/en/stable/internals/protocol.html)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kombu_fdb.primitives.ranges import shown

__all__ = ["body_fault", "fault_of", "is_timelimit"]

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
#: Names and types of headers that are good: an application's tasks have few different ones.
_good: set[tuple[tuple[str, ...], tuple[type, ...]]] = set()
MOST_GOOD = 1000


def fault_of(headers: Mapping[str, Any]) -> str | None:
    """What is wrong with the headers of a task; None if nothing is, or if they are of no task."""
    if "task" not in headers:
        return None
    shape = tuple(headers), tuple(map(type, headers.values()))
    if shape not in _good:
        fault = _wrong_type(headers)
        if fault is not None:
            return fault
        if len(_good) >= MOST_GOOD:
            _good.clear()
        _good.add(shape)
    if not is_timelimit(headers.get("timelimit")):
        return f"the header timelimit is {_shown(headers['timelimit'])}"
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
