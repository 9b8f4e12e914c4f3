"""An application's options of its history: ``celery_fdb.install(app, history=History(...))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.ranges import FLAG, Kind, refused

ARGUMENTS = ("masked", "full", "none")
#: A history is in up to so many segments, and a segment holds no more runs than this.
SEGMENTS, LARGEST_SEGMENT = 50, 5_000
MOST_RUNS = 1_000_000
LONGEST_AGE_S = 366 * 86_400
_KINDS = {
    "runs": Kind.whole(f"a whole number from 100 to {MOST_RUNS:,}", 100, MOST_RUNS),
    "max_age": Kind.number(f"seconds, from 60 to {LONGEST_AGE_S:,}", 60, LONGEST_AGE_S),
    "arguments": Kind(f"one of {', '.join(ARGUMENTS)}", lambda value: value in ARGUMENTS),
    "tracebacks": Kind("True or False", FLAG.accepts),
}


@dataclass(frozen=True, slots=True)
class History:
    """Bounds and privacy of the history. Raises ``OptionError`` for an unusable value.

    ``runs``: so many are kept at most. ``max_age``: seconds after which a run is deleted. ``arguments``: ``"masked"``
    keeps a task's arguments as Celery's log shows them, without the secrets that they name; ``"full"`` as they are;
    ``"none"`` keeps none. ``tracebacks``: whether the end of a failure's traceback is kept.
    """

    runs: int = 100_000
    max_age: float = 7 * 86_400.0
    arguments: str = "masked"
    tracebacks: bool = True

    def __post_init__(self) -> None:
        for name, value, kind in refused(_KINDS, {name: getattr(self, name) for name in _KINDS}):
            raise _unusable(name, value, kind.what)

    @classmethod
    def of(cls, given: Any) -> History | None:
        """The history that ``install`` was given: a :class:`History`, True for its defaults, False for none."""
        if isinstance(given, History):
            return given
        if given is True or given is False or given is None:
            return cls() if given else None
        raise _unusable("history", given, "True, False, or celery_fdb.History(runs=..., max_age=...)")

    @property
    def segment_runs(self) -> int:
        """How many runs fill a segment."""
        return min(max(self.runs // SEGMENTS, 1), LARGEST_SEGMENT)

    @property
    def segment_ms(self) -> int:
        """For how long a segment is written to."""
        return max(int(self.max_age * 1000) // SEGMENTS, 1)


def _unusable(name: str, value: Any, accepted: str) -> OptionError:
    return OptionError("unusable option of the history", name=name, given=repr(value)[:80], fix=f"It takes {accepted}.")
