"""The goals for a run's figures, beside the peers, and whether they are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

__all__ = ["ratio", "table"]

Results = Mapping[str, Mapping[str, Sequence[float]]]


class Goal(NamedTuple):
    """A figure of ours, or its ratio to a peer's."""

    ours: str
    column: str
    bound: float
    least: bool
    peer: str = ""

    @property
    def name(self) -> str:
        return f"{self.ours}: {self.column}" + (f" / {self.peer}" if self.peer else "")

    def measured(self, results: Results) -> float | None:
        if self.peer:
            return ratio(results, (self.ours, self.column), (self.peer, self.column))
        values = results.get(self.ours, {}).get(self.column)
        return statistics.median(values) if values else None

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound


def ratio(results: Results, one: tuple[str, str], other: tuple[str, str]) -> float | None:
    """The median of the rounds' ratios: what slows the machine down slows both of a round."""
    ours, theirs = (results.get(broker, {}).get(column, ()) for broker, column in (one, other))
    pairs = [a / b for a, b in zip(ours, theirs, strict=False) if b]
    return statistics.median(pairs) if pairs else None


def _of_each_store() -> Iterator[Goal]:
    for ours in ("fdb+sqlite normal", "fdb"):
        for column, least in (("publish", 0.7), ("named", 0.7), ("batch", 1.9), ("consume", 1.6), ("tasks", 1.1)):
            yield Goal(ours, column, least, True, "rabbitmq")
        for column, most in (("p50_ms", 1.0), ("p99_ms", 1.2), ("task_us", 1.1)):
            yield Goal(ours, column, most, False, "rabbitmq")


#: Of consumers with nothing to do, per minute: twice what was measured; 50 on FoundationDB: 50 times one. The first one
#: does the duties of all.
IDLE = {
    "fdb+sqlite normal": {"idle1_cpu_s": 0.3, "idle1_ops": 400, "idle50_cpu_s": 20.0, "idle50_ops": 17_000},
    "fdb": {"idle1_cpu_s": 0.9, "idle1_ops": 400, "idle50_cpu_s": 60.0, "idle50_ops": 17_000},
}
GOALS = (
    *_of_each_store(),
    Goal("fdb+sqlite full", "publish", 1.6, True, "rabbitmq confirmed"),
    *(Goal(ours, column, most, False) for ours, bounds in IDLE.items() for column, most in bounds.items()),
)


def table(results: Results) -> Table:
    """Of the goals whose figures were measured. Times: at most; all others: at least."""
    shown = Table(title="goals; of ratios the median of the rounds")
    for name in ("figure", "goal", "measured", ""):
        shown.add_column(name, justify="left" if name in ("figure", "") else "right")
    for goal in GOALS:
        value = goal.measured(results)
        if value is not None:
            sign = "at least" if goal.least else "at most"
            shown.add_row(goal.name, f"{sign} {goal.bound:,g}", f"{value:,.2f}", "met" if goal.met(value) else "MISSED")
    return shown
