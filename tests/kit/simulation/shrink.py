"""Make a failing plan small: leave steps out as long as the same guarantee breaks (delta debugging, ddmin)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kit.simulation.plan import Profile, Step, walk
from kit.simulation.run import replay

#: Runs at most; each is shorter than the first.
MOST_RUNS = 400


def shrink(plan: Sequence[Step], profile: Profile, *, most_runs: int = MOST_RUNS) -> list[Step]:
    """The smallest plan found that breaks the same guarantee. Raises ``ValueError`` if the given one breaks none."""
    first, _ = replay(plan, profile)
    if first is None:
        raise ValueError("the plan violates nothing")
    tried = 0

    def still_fails(steps: Sequence[Step]) -> bool:
        nonlocal tried
        tried += 1
        violation, _ = replay(steps, profile)
        return violation is not None and violation.guarantee == first.guarantee

    def budget() -> bool:
        return tried < most_runs

    steps = list(plan)
    size = 0
    while budget() and size != _size(steps):
        size = _size(steps)
        steps = _leave_out(steps, still_fails, budget)
        steps = _simplify(steps, still_fails, budget)
    return steps


def _size(steps: Sequence[Step]) -> int:
    return sum(1 + len(step.troubles) + bool(step.stopped) for step in walk(steps))


def _leave_out(
    steps: list[Step], still_fails: Callable[[Sequence[Step]], bool], budget: Callable[[], bool]
) -> list[Step]:
    """Whole parts of the plan, halves first, then smaller ones."""
    part = max(1, len(steps) // 2)
    while True:
        at = len(steps)
        while at > 0 and budget():  # from the end: what follows the failure falls away at once
            shorter = steps[: max(0, at - part)] + steps[at:]
            if still_fails(shorter):
                steps = shorter
            at -= part
        if part == 1 or not budget():
            return steps
        part = max(1, part // 2)


def _simplify(
    steps: list[Step], still_fails: Callable[[Sequence[Step]], bool], budget: Callable[[], bool]
) -> list[Step]:
    """Each remaining step without what happens in the middle of it, and without its faults."""
    for at, step in enumerate(steps):
        for simpler in _simpler(step):
            if not budget():
                return steps
            changed = [*steps[:at], simpler, *steps[at + 1 :]]
            if _size(changed) < _size(steps) and still_fails(changed):
                return _simplify(changed, still_fails, budget)
    return steps


def _simpler(step: Step) -> list[Step]:
    found = []
    if step.meanwhile:
        found.append(dataclasses.replace(step, meanwhile=()))
    for at, inner in enumerate(step.meanwhile):
        before, after = step.meanwhile[:at], step.meanwhile[at + 1 :]
        found.append(dataclasses.replace(step, meanwhile=before + after))
        found += [dataclasses.replace(step, meanwhile=(*before, each, *after)) for each in _simpler(inner)]
    if step.stopped:
        found.append(dataclasses.replace(step, stopped=""))
    for trouble in step.troubles:
        found.append(dataclasses.replace(step, troubles=tuple(each for each in step.troubles if each != trouble)))
    return found
