"""Did everything happen that should have, exactly as often as it should have? Pure functions of the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from journal import Journal, Task

PARTS = ("tasks.fetch", "tasks.parse", "tasks.count")


@dataclass(frozen=True)
class Check:
    claim: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Outcome:
    """All there is to judge by. ``left``: messages still in the store, by queue and state."""

    journal: Journal
    expected: Mapping[str, Mapping[str, int]]
    total: Mapping[str, int] | None
    left: Mapping[str, int]


def judge(outcome: Outcome) -> list[Check]:
    checks = (_indexed, _no_extra_runs, _chord, _retries, _eta, _killed, _empty)
    return [check(outcome) for check in checks]


def _indexed(outcome: Outcome) -> Check:
    expected = {name: [sum(words.values())] for name, words in outcome.expected.items()}
    wrong = sorted(name for name in expected if outcome.journal.indexed.get(name) != expected[name])
    wrong += sorted(outcome.journal.indexed.keys() - expected.keys())
    found = f"{len(outcome.journal.indexed)} of {len(expected)} texts" + (
        f"; wrong: {', '.join(wrong)}" if wrong else ""
    )
    return Check("every text was indexed exactly once", not wrong, found)


def _no_extra_runs(outcome: Outcome) -> Check:
    tasks = [task for name in PARTS for task in outcome.journal.named(name)]
    wrong = [task for task in tasks if len(task.started) != 1 or task.ended != ["SUCCESS"]]
    whole = len(tasks) == len(PARTS) * len(outcome.expected)
    runs = sum(len(task.started) for task in tasks)
    return Check("every link of every chain ran once", whole and not wrong, f"{len(tasks)} tasks, {runs} runs")


def _chord(outcome: Outcome) -> Check:
    expected: dict[str, int] = {}
    for words in outcome.expected.values():
        for word, number in words.items():
            expected[word] = expected.get(word, 0) + number
    if outcome.total is None:
        return Check("the chord's total is that of a direct count", holds=False, found="no total")
    found = f"{sum(outcome.total.values()):,} words, {len(outcome.total):,} different"
    return Check("the chord's total is that of a direct count", outcome.total == expected, found)


def _only(outcome: Outcome, claim: str, name: str, judge_task: Callable[[Task], tuple[bool, str]]) -> Check:
    tasks = outcome.journal.named(name)
    if len(tasks) != 1:
        return Check(claim, holds=False, found=f"{len(tasks)} tasks")
    holds, found = judge_task(tasks[0])
    return Check(claim, holds, found)


def _retries(outcome: Outcome) -> Check:
    def judge_task(task: Task) -> tuple[bool, str]:
        gaps = [later - sooner for sooner, later in zip(task.started, task.started[1:], strict=False)]
        holds = task.ended == ["RETRY", "RETRY", "SUCCESS"] and len(gaps) == 2 and gaps[0] >= 1 and gaps[1] >= 2
        return holds, f"{len(task.started)} runs, pauses {', '.join(f'{gap:.1f} s' for gap in gaps)}"

    return _only(outcome, "what failed twice ran 3 times, after 1 s and 2 s", "tasks.look_up_errata", judge_task)


def _eta(outcome: Outcome) -> Check:
    def judge_task(task: Task) -> tuple[bool, str]:
        if len(task.started) != 1 or not task.due or not task.due[0]:
            return False, f"{len(task.started)} runs"
        late = task.started[0] - task.due[0]
        return late >= 0, f"{abs(late):.2f} s {'after' if late >= 0 else 'BEFORE'} its time"

    return _only(outcome, "what was for later ran once, not early", "tasks.send_report", judge_task)


def _killed(outcome: Outcome) -> Check:
    def judge_task(task: Task) -> tuple[bool, str]:
        holds = len(task.started) == 2 and len(set(task.pids)) == 2 and task.ended == ["SUCCESS"]
        return holds, f"{len(task.started)} runs in {len(set(task.pids))} processes, {len(task.ended)} ended"

    return _only(outcome, "what was killed ran again and finished", "tasks.scan_archive", judge_task)


def _empty(outcome: Outcome) -> Check:
    left = {where: number for where, number in outcome.left.items() if number}
    found = ", ".join(f"{number} {where}" for where, number in left.items()) or "nothing left"
    return Check("the store is empty", not left, found)
