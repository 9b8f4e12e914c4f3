"""Which task a message is of, and whether it was published before: read from what its publisher wrote.

The task's id is the header ``id`` of a Celery task, else the property ``message_id``. By it the store finds and cancels
the message (``engine/stored/whereabouts.py``). An id of more than 255 bytes is published like any other and can't be
found.

The dedup id (``engine/messages/dedup.py``) is the header ``dedup_id`` or ``x-deduplication-id``, or
``MessageDeduplicationId``, a property or header, as users of SQS write it. Its window is the header ``dedup_window``
(seconds), else the option of that name. An outbox has an id of its own beside it, the header ``once_id`` with
the window ``once_window``. Ids are texts, windows are numbers; anything else is an ``InvalidArgument``.

A retry or a replacement (``self.replace``) is never a duplicate: Celery hands a task's headers and id on to it. It is
told by ``retries`` or ``replaced_task_nesting``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu_fdb.model import LONGEST_TASK_ID
from kombu_fdb.primitives.ranges import LONGEST_S, number, utf8_bytes
from kombu_fdb.transport.encoding.given import text_of

__all__ = ["IDS", "dedup_of", "once_of", "task_id_of"]

Facts = Mapping[str, Any]

_SQS_DEDUP_ID = "MessageDeduplicationId"
_DEDUP_IDS = frozenset({"dedup_id", "x-deduplication-id", _SQS_DEDUP_ID})
#: Headers and properties that give a message an id of its publication.
IDS = _DEDUP_IDS | {"once_id"}
#: The shortest window.
SHORTEST_S = 0.001


def task_id_of(headers: Facts, properties: Facts) -> str:
    """The id, "" if there is none."""
    given = headers.get("id") if "task" in headers else text_of("message_id", properties.get("message_id"))
    task_id = "" if given is None else str(given)
    if task_id.isascii() and len(task_id) <= LONGEST_TASK_ID:
        return task_id
    return task_id if utf8_bytes("task id", task_id) <= LONGEST_TASK_ID else ""


def dedup_of(headers: Facts, properties: Facts, window_s: float) -> tuple[str, int]:
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


def once_of(headers: Facts, window_s: float) -> tuple[str, int]:
    """Likewise, the once id."""
    if "once_id" not in headers:
        return "", 0
    once_id = text_of("once_id", headers["once_id"])
    if not once_id or _goes_on(headers):
        return "", 0
    return once_id, _window_ms("once_window", headers.get("once_window"), window_s)


def _goes_on(headers: Facts) -> bool:
    """Whether a task that was published before goes on with this message."""
    return bool(headers.get("retries") or headers.get("replaced_task_nesting"))


def _window_ms(name: str, given: Any, default_s: float) -> int:
    window_s = default_s if given is None else number(name, given, "seconds", least=SHORTEST_S, most=LONGEST_S)
    return int(window_s * 1000)
