"""When a message becomes due, when it expires and how long it may take, read from what its publisher wrote.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_MS, LONGEST_S, number, shown

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


def served(headers: dict[str, Any]) -> None:
    """Make the delays among the headers of a delivery negative."""
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


def ttr_ms(headers: Mapping[str, Any]) -> int:
    """The time to run; 0 for none."""
    given = headers.get("x-ttr")
    return 0 if given is None else int(number("x-ttr", given, "milliseconds", most=LONGEST_MS))


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
