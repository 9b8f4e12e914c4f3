"""When a message becomes due, when it expires and how long it may take, read from what its publisher wrote.

==================================== =======================================================================
``eta`` header of a Celery task      ISO 8601; no time zone means UTC. ``countdown`` and ``retry`` end here too
``x-delay`` header                   milliseconds, as for RabbitMQ's delayed-message exchange
``DelaySeconds`` property or header  seconds, as for SQS and PGMQ
``expires`` header of a Celery task  ISO 8601: absolute, no delay extends it
``expiration`` property              milliseconds as a string, from when the message is due; "0" is legal
``x-ttr`` header                     milliseconds from the delivery to the ack, then the message goes back
==================================== =======================================================================

Several delays: the latest moment counts. Something that can't be read delays nothing: publishing a message at once is
the smaller harm, and Celery's worker waits for its ``eta`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

__all__ = ["due_ms", "expiry", "ttr_ms"]


def due_ms(headers: Mapping[str, Any], properties: Mapping[str, Any], now_ms: int) -> int:
    """The moment before which the message must not be delivered; 0 for none."""
    due = 0
    if headers.get("eta") and "task" in headers:
        due = _moment_ms(headers["eta"]) or 0
    if "x-delay" in headers:
        due = max(due, now_ms + _milliseconds(headers["x-delay"], 1))
    for source in (headers, properties):
        if "DelaySeconds" in source:
            due = max(due, now_ms + _milliseconds(source["DelaySeconds"], 1000))
    return due if due > now_ms else 0


def expiry(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> tuple[int | None, int]:
    """``ttl_ms`` (None for none) and ``expires_ms`` (0 for none): see :class:`~kombu_fdb.model.Publication`."""
    if headers.get("expires") and "task" in headers:
        expires_ms = _moment_ms(headers["expires"])
        if expires_ms is not None:
            return None, expires_ms  # Celery sets ``expiration`` too, counted from now: the same moment
    expiration = properties.get("expiration")
    if expiration is None:
        return None, 0
    try:
        return max(0, int(float(expiration))), 0
    except (TypeError, ValueError, OverflowError):
        return None, 0


def ttr_ms(headers: Mapping[str, Any]) -> int:
    """The time to run; 0 for none."""
    return _milliseconds(headers.get("x-ttr"), 1)


def _moment_ms(value: Any) -> int | None:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        # Rounded up: not even a part of a millisecond early.
        return -int(-moment.timestamp() * 1000 // 1)
    except (TypeError, ValueError, OverflowError):
        return None


def _milliseconds(value: Any, unit: int) -> int:
    """Negative and unreadable delays are none."""
    try:
        return max(0, int(float(value) * unit))
    except (TypeError, ValueError, OverflowError):
        return 0
