"""Moments, durations and rates as people see and write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_S, MOST, SLOWEST

__all__ = ["age", "moment", "rate_of", "seconds_of"]

#: Two days before a ``datetime`` ends, as every time zone needs some hours more.
LAST_MS = LATEST_MS + 1 - 2 * 86_400_000
#: Units as people write them.
LETTERS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
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


def seconds_of(text: str) -> float | None:
    """Seconds, or a number with its unit: 30s, 10m, 12h, 7d. None for what is none, or over a hundred years."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smhd]?)", text)
    if found is None:
        return None
    seconds = float(found[1]) * LETTERS_S[found[2] or "s"]
    return seconds if seconds <= LONGEST_S else None


def rate_of(text: str) -> float | None:
    """Messages a second, as Celery writes rates: 10, 10/s, 100/m, 1000/h. None for what is none, or out of range."""
    number, _, unit = text.partition("/")
    try:
        rate = float(number) / LETTERS_S[unit or "s"]
    except (ValueError, KeyError):
        return None
    return rate if SLOWEST <= rate <= MOST else None  # nan is not
