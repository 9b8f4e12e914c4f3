"""Make a program small that shows a difference: leave steps out while a difference of the same kind stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kit.parity.compare import Verdict
from kit.parity.program import Step

#: Runs at most.
MOST_RUNS = 120


def shrink(program: Sequence[Step], verdict_of: Callable[[Sequence[Step]], Verdict]) -> tuple[list[Step], Verdict]:
    """The smallest program found, and its difference."""
    verdict = verdict_of(program)
    steps, runs = _up_to(program, verdict), 0
    part = max(1, len(steps) // 2)
    while True:
        at = len(steps)
        while at > 0 and runs < MOST_RUNS:
            shorter = [*steps[: max(0, at - part)], *steps[at:]]
            found = verdict_of(shorter)
            runs += 1
            if _kind(found) == _kind(verdict):
                steps, verdict = _up_to(shorter, found), found
            at = min(at - part, len(steps))
        if part == 1 or runs >= MOST_RUNS:
            return steps, verdict
        part = max(1, part // 2)


def _up_to(program: Sequence[Step], verdict: Verdict) -> list[Step]:
    """What comes after the difference shows nothing."""
    return [each for each in program if verdict.step is None or each.number <= verdict.step.number]


def _kind(verdict: Verdict) -> object:
    """Of what, in which verb; not where."""
    if verdict.step is None or not verdict.unexplained:
        return None
    first = verdict.unexplained[0]
    return verdict.step.verb, first.place[0], first.place[-1], first.theirs is None, first.ours is None
