"""One entry of a beat's schedule, as beat tells of it in the store, and as pages show it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from celery.schedules import crontab, schedule

from kombu_fdb.errors import FormatError
from kombu_fdb.primitives.ranges import MOST, is_number

#: Ends a crontab as Celery writes it.
CELERYS_HINT = " (m/h/dM/MY/d)"
#: Characters of a text.
LONGEST = 500
#: What a foreign entry may end in.
BROKEN = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class Told(NamedTuple):
    """Moments in milliseconds since 1970 by beat's clock, None for never and for unknown.

    ``last_ms``: when beat published it last, ``next_ms``: when it will, ``runs``: how often it has. ``told_ms``: when
    beat said so; it says so again within ``again_s`` seconds.
    """

    name: str
    task: str
    timing: str
    queue: str
    last_ms: int | None
    next_ms: int | None
    runs: int
    told_ms: int
    again_s: float


def told_of(name: str, entry: Any, now_ms: int, again_s: float) -> Told:
    """Of what a scheduler has in its schedule, whatever that is."""
    try:
        runs = int(entry.total_run_count or 0)
        queue = str((entry.options or {}).get("queue") or "")
        last_ms = _ms(entry.last_run_at) if runs else None
        task, timing, next_ms = str(entry.task), text_of(entry.schedule), _next_ms(entry, now_ms)
    except BROKEN as error:
        task, timing, queue, last_ms, next_ms, runs = "", f"{type(error).__name__}: {error}", "", None, None, 0
    return Told(fit(name), fit(task), fit(timing), fit(queue), last_ms, next_ms, runs, now_ms, again_s)


def fit(text: str) -> str:
    """A text as it may be stored."""
    return text[:LONGEST].encode(errors="replace").decode()


def _next_ms(entry: Any, now_ms: int) -> int | None:
    """Beat's own reckoning: how long it is until then."""
    if entry.last_run_at is None:
        return None
    left = entry.schedule.remaining_estimate(entry.schedule.maybe_make_aware(entry.last_run_at))
    if not isinstance(left, timedelta):
        return None
    # Its clock was a moment ahead of ours, and a crontab's moments are whole seconds.
    return round(now_ms / 1000 + max(left.total_seconds(), 0)) * 1000


def _ms(at: Any) -> int | None:
    """Beat's moments are in UTC if they name no zone, unless the app says otherwise."""
    return int(at.timestamp() * 1000) if isinstance(at, datetime) and at.tzinfo else None


def text_of(timing: Any) -> str:
    """When an entry is due, in words, and in which zone if that matters."""
    if type(timing) is schedule:
        return f"every {timing.human_seconds.replace('.00 ', ' ')}"
    text = str(timing).removeprefix("<").removesuffix(">")
    return f"{text.removesuffix(CELERYS_HINT)} {timing.tz}" if isinstance(timing, crontab) else text


def pack(told: Told) -> bytes:
    return json.dumps(told[1:]).encode()


def unpack(name: str, value: bytes) -> Told:
    """Raises ``FormatError`` for what no version of ours can have written."""
    try:
        found = Told(name, *json.loads(value))
    except (ValueError, TypeError, RecursionError):
        raise FormatError("unreadable entry of a schedule", entry=name[:80]) from None
    texts, moments = found[1:4], (found.last_ms, found.next_ms)
    numbers = (found.runs, found.told_ms, found.again_s, *(each for each in moments if each is not None))
    if not all(isinstance(each, str) for each in texts) or not all(is_number(each, -MOST, MOST) for each in numbers):
        raise FormatError("unreadable entry of a schedule", entry=name[:80])
    return found
