"""Moments, durations and rates: how people read and write them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, tzinfo
from itertools import pairwise

from kombu_fdb.primitives.ranges import LATEST_MS, LETTERS_S, LONGEST_S

#: Two days before the latest ``datetime``: conversion into a time zone may add some hours.
LAST_MS = LATEST_MS + 1 - 2 * 86_400_000
UNITS_S = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def moment(ms: float) -> datetime:
    """The moment in UTC; pages localise it. A moment beyond the calendar becomes the nearest day in it."""
    return datetime.fromtimestamp(min(max(ms, 0), LAST_MS) / 1000, tz=UTC)


def read(text: str, zone: tzinfo = UTC) -> datetime:
    """The moment of this text in ISO 8601; in ``zone`` if it names none. Raises ``ValueError``."""
    found = datetime.fromisoformat(text.strip())
    return found if found.tzinfo else found.replace(tzinfo=zone)


def age(seconds: float | None, nothing: str = "") -> str:
    """Two units at most: "4.2 s", "12 s", "3 min 5 s", "2 h", "3 d 4 h"; ``nothing`` for None."""
    if seconds is None:
        return nothing
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s" if seconds < 9.95 else f"{int(seconds)} s"
    for (unit, size), (smaller, smaller_size) in pairwise(UNITS_S):
        if seconds >= size:
            rest = int(seconds % size // smaller_size)
            return f"{int(seconds // size)} {unit}{f' {rest} {smaller}' if rest else ''}"
    raise AssertionError


def took(seconds: float | None, nothing: str = "") -> str:
    """A runtime: "12.5 ms", "4.21 s", from a minute on as :func:`age`; ``nothing`` for None."""
    if seconds is None:
        return nothing
    if seconds < 0.9995:  # from here on, three digits are a second
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else age(seconds)


def seconds_of(text: str) -> float | None:
    """Seconds, or a number with its unit: 30s, 10m, 12h, 7d. None for another text, or over a hundred years."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smhd]?)", text)
    if found is None:
        return None
    seconds = float(found[1]) * LETTERS_S[found[2] or "s"]
    return seconds if seconds <= LONGEST_S else None


def rate(per_second: float | None, nothing: str = "") -> str:
    """Three digits, in the largest unit with one before the point: "8.33/s", "12/m", "3/h"; ``nothing`` for None."""
    if per_second is None:
        return nothing
    for unit in ("s", "m"):
        if per_second * LETTERS_S[unit] >= 1 or not per_second:
            return f"{_digits(per_second * LETTERS_S[unit])}/{unit}"
    return f"{_digits(per_second * LETTERS_S['h'])}/h"


def _digits(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 100 else f"{value:.3g}"


def limit(per_second: float) -> str:
    """A rate limit as a person wrote it, such as "10/m"; :func:`~kombu_fdb.primitives.ranges.rate_of` reads it."""
    for unit in ("s", "m", "h"):
        number = per_second * LETTERS_S[unit]
        if math.isclose(float(f"{number:.4g}"), number, rel_tol=1e-9):
            return f"{number:.10g}/{unit}"
    return f"{per_second:.10g}/s"
