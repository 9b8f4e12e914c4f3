"""What a run's history bears out: each guarantee holds, is violated (the shortest witness), or was not exercised."""

from __future__ import annotations

from typing import NamedTuple

from kit.history.checks import CHECKS, Violation
from kit.history.events import History


class Line(NamedTuple):
    """One guarantee's verdict."""

    guarantee: str
    exercised: int
    violations: int
    shortest: Violation | None

    @property
    def verdict(self) -> str:
        if self.shortest is not None:
            return "VIOLATED"
        return "holds" if self.exercised else "not exercised"


def judge(history: History) -> list[Line]:
    lines = []
    for guarantee, checks in CHECKS.items():
        findings = [check(history) for check in checks]
        violations = [each for finding in findings for each in finding.violations]
        shortest = min(violations, key=lambda each: len(each.events), default=None)
        lines.append(Line(guarantee, sum(each.exercised for each in findings), len(violations), shortest))
    return lines


def render(lines: list[Line]) -> str:
    rows = [f"{each.guarantee:15} {each.verdict:13} {each.exercised:6} {each.violations or '':4}" for each in lines]
    for each in lines:
        if each.shortest is not None:
            rows.append(f"\n{each.guarantee}: {each.shortest.text}")
            rows += [f"    {event.told()}" for event in each.shortest.events[:40]]
    return "\n".join(row.rstrip() for row in rows)
