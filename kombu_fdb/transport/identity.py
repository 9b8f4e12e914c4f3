"""Which task a message is of, and whether it was published before: read from what its publisher wrote.

The task's id is the header ``id`` of a Celery task, else the property ``message_id``. By it the store finds and cancels
the message (``queue/whereabouts.py``). An id of more than 255 bytes is published like any other and can't be found.

The dedup id (``queue/dedup.py``) is the header ``dedup_id`` or ``x-deduplication-id``, or ``MessageDeduplicationId``, a
property or header, as users of SQS write it. Its window is the header ``dedup_window`` (seconds), else the option of
that name; one that can't be read is the option's. An outbox has an id of its own beside it, the header ``once_id`` with
the window ``once_window``. A retry is never a duplicate: Celery hands a task's headers on to its
next attempt, which is told by ``retries``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu_fdb.model import LONGEST_TASK_ID

__all__ = ["dedup_of", "once_of", "task_id_of"]

Facts = Mapping[str, Any]


def task_id_of(headers: Facts, properties: Facts) -> str:
    """The id, "" if there is none."""
    given = headers.get("id") if "task" in headers else properties.get("message_id")
    task_id = "" if given is None else str(given)
    return task_id if len(task_id.encode()) <= LONGEST_TASK_ID else ""


def dedup_of(headers: Facts, properties: Facts, window_s: float) -> tuple[str, int]:
    """The dedup id, "" if there is none, and its window in milliseconds."""
    given = (
        headers.get("dedup_id"),
        headers.get("x-deduplication-id"),
        properties.get("MessageDeduplicationId"),
        headers.get("MessageDeduplicationId"),
    )
    dedup_id = next((str(each) for each in given if each not in (None, "")), "")
    if not dedup_id or headers.get("retries"):
        return "", 0
    return dedup_id, _window_ms(headers.get("dedup_window"), window_s)


def once_of(headers: Facts, window_s: float) -> tuple[str, int]:
    """Likewise, the once id."""
    given = headers.get("once_id")
    if given in (None, "") or headers.get("retries"):
        return "", 0
    return str(given), _window_ms(headers.get("once_window"), window_s)


def _window_ms(given: Any, default_s: float) -> int:
    try:
        window_s = float(default_s if given is None else given)
        return max(0, int(window_s * 1000))
    except (TypeError, ValueError, OverflowError):
        return int(default_s * 1000)
