"""Named backoff schedules: how long to wait before which attempt.

A name spells its schedule: pauses separated by slashes and their unit (``s``, ``min`` or ``h``). ``"1/5/25min"`` waits
1 minute after the first attempt, 5 after the second, 25 after every later one. That one is also called
``"processing-queue"``, after the recipe it comes from.
"""

from __future__ import annotations

import difflib
import re

from kombu_fdb.errors import InvalidArgument

__all__ = ["seconds"]

FIX = "Write pauses and a unit (1/5/25min, 10/30s, 1h), or processing-queue."
_NAMED = {"processing-queue": "1/5/25min"}
_UNITS = {"s": 1, "min": 60, "h": 3600}
_NAME = re.compile(r"(?P<pauses>\d+(\.\d+)?(/\d+(\.\d+)?)*)(?P<unit>s|min|h)", re.ASCII)


def seconds(name: str, attempt: int) -> float:
    """The pause after the ``attempt``-th attempt (from 1), in seconds. Raises ``InvalidArgument``."""
    match = _NAME.fullmatch(_NAMED.get(str(name), str(name)))
    if match is None:
        near = difflib.get_close_matches(str(name), _NAMED, n=1)
        raise InvalidArgument("not a backoff schedule", name=name, fix=f"Did you mean {near[0]}?" if near else FIX)
    if attempt < 1:
        raise InvalidArgument("attempts count from 1", attempt=attempt)
    pauses = match["pauses"].split("/")
    return float(pauses[min(attempt, len(pauses)) - 1]) * _UNITS[match["unit"]]
