"""Moments and durations for people's eyes."""

from __future__ import annotations

from datetime import UTC, datetime

from kombu_fdb.primitives.ranges import LATEST_MS

__all__ = ["age", "moment"]

#: Two days before a ``datetime`` ends, as every time zone needs some hours more.
LAST_MS = LATEST_MS + 1 - 2 * 86_400_000
UNITS_S = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def moment(ms: float) -> datetime:
    """In UTC; who shows it localises it. What no calendar has is the nearest day that it has."""
    return datetime.fromtimestamp(min(max(ms, 0), LAST_MS) / 1000, tz=UTC)


def age(ms: float) -> str:
    """Two units at most: "12 s", "3 min", "2 h 5 min", "4 d 1 h"."""
    seconds = max(int(ms // 1000), 0)
    parts = []
    for unit, length in UNITS_S:
        number, seconds = divmod(seconds, length)
        parts.append((number, unit))
    first = next((at for at, (number, _) in enumerate(parts) if number), len(parts) - 1)
    shown = parts[first : first + 2] if first < 2 else parts[first : first + 1]
    return " ".join(f"{number} {unit}" for number, unit in shown if number or unit == "s")
