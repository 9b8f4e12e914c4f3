"""The verdicts as one table of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from .ledger import Verdict

HEADS = ["storm", "store", "seed", "confirmed", "lost", "doubled", "again", "unfinished", "slowest", "took", "verdict"]


def render(verdicts: Sequence[Verdict]) -> str:
    rows = [HEADS, *map(_row, verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    complaints = [f"{each.storm}: {text}" for each in verdicts for text in each.complaints]
    return "\n".join([*lines, *complaints])


def _row(verdict: Verdict) -> list[str]:
    counts = [*verdict[:3], verdict.confirmed, verdict.lost, verdict.doubled, verdict.again, verdict.unfinished]
    times = [f"{verdict.slowest_s:.2f}s", f"{verdict.took_s:.1f}s"]
    return [*map(str, counts), *times, "good" if verdict.is_good else "BROKEN"]
