"""Numbers by task over the last hour or days: rate, failures, runtimes. Read from counters, never from the runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from celery import states

from celery_fdb.history.counters import SLOTS, Counters
from celery_fdb.history.run import ENDED
from celery_fdb.history.views.runs import kept_by
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock, SystemClock

HOUR_S, DAY_S = 3_600, 86_400


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task. ``states``: runs by how they ended. Quantiles are at most 5 % off; None without runs."""

    task: str
    runs: int
    per_second: float
    failures: int
    failure_share: float
    states: dict[str, int]
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class SlotView:
    """A piece of the period, for charts: ``begin`` in seconds since 1970."""

    begin: int
    runs: int
    failures: int
    mean_s: float | None


@dataclass(frozen=True, slots=True)
class TasksView:
    """``seconds``: how long the period is, in whole slots and what has passed of the last one."""

    seconds: float
    slot_s: int
    tasks: list[TaskView]
    slots: list[SlotView]


def look_at_tasks(
    broker: Broker, *, period_s: int = HOUR_S, task: str | None = None, clock: Clock | None = None
) -> TasksView:
    """Of every task, the busiest first, or of one. Up to an hour is read by five minutes, more by hours.

    Raises ``HistoryOff``.
    """
    now_s = (clock or SystemClock()).wall_ms() / 1000
    slot_s = min(length_s for length_s, kept_s in SLOTS.items() if period_s < kept_s or length_s == max(SLOTS))
    begin = int(now_s - period_s) // slot_s * slot_s
    by_task: dict[str, Counters] = defaultdict(Counters)
    by_slot: dict[int, Counters] = {each: Counters() for each in range(begin, int(now_s) + 1, slot_s)}
    for at, name, counted in kept_by(broker).slots(slot_s, begin, int(now_s) + 1):
        if task is None or name == task:
            by_task[name] = by_task[name].plus(counted)
            by_slot[at] = by_slot.get(at, Counters()).plus(counted)
    seconds = max(now_s - begin, 1.0)
    tasks = [_task(name, counted, seconds) for name, counted in by_task.items()]
    slots = [SlotView(at, each.runs, _failures(each), _mean(each)) for at, each in sorted(by_slot.items())]
    return TasksView(seconds, slot_s, sorted(tasks, key=lambda each: (-each.runs, each.task)), slots)


def _task(name: str, counted: Counters, seconds: float) -> TaskView:
    failures = _failures(counted)
    return TaskView(
        task=name,
        runs=counted.runs,
        per_second=counted.runs / seconds,
        failures=failures,
        failure_share=failures / counted.runs if counted.runs else 0.0,
        states={state: counted.of(state) for state in ENDED if counted.of(state)},
        mean_s=_mean(counted),
        p50_s=counted.quantile_s(0.5),
        p95_s=counted.quantile_s(0.95),
    )


def _failures(counted: Counters) -> int:
    return counted.of(states.FAILURE)


def _mean(counted: Counters) -> float | None:
    timed = sum(counted.buckets)
    return counted.runtime_us / 1e6 / timed if timed else None
