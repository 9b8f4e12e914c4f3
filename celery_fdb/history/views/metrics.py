"""Prometheus metrics by task, read from the history's counters when they are scraped.

They stand beside those of the broker (``inspection/metrics.py``)::

    from celery_fdb.history.views.metrics import make_collector

    REGISTRY.register(make_collector("fdb://"))

Labels are bounded: the :data:`TASKS` tasks that ran most have series of their own, all others are combined under
``(other)``. A task keeps its series once it has one, so that no counter of ``(other)`` shrinks. While history is off,
nothing is exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from celery_fdb import brokers
from celery_fdb.history.layout import Counters
from celery_fdb.history.run import ENDED
from celery_fdb.history.store import HistoryStore
from celery_fdb.history.views.runs import history_of
from celery_fdb.inspection.metrics import OTHER, StoreCollector
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError

#: Tasks with series of their own.
TASKS = 100

RUNS, RUNTIME = "celery_fdb_task_runs", "celery_fdb_task_runtime_seconds"
ACTIVE, DROPPED = "celery_fdb_task_active", "celery_fdb_history_dropped"
ABOUT = {
    RUNS: "Runs of tasks that ended, by task and state.",
    RUNTIME: "How long runs took that succeeded or failed, by task.",
    ACTIVE: "Runs that have begun and not ended, by task, of those longer than a second.",
    DROPPED: "Runs that are not in the history, because the store did not answer in time.",
}
#: The metrics' names as they are exported.
NAMES = {f"{name}_total" if name in {RUNS, DROPPED} else name: about for name, about in ABOUT.items()}


def make_collector(url: str, **options: Any) -> TaskCollector:
    """A collector for ``REGISTRY.register``, of the broker at ``url``. It reads the store at a scrape only.

    Raises ``OptionError``.
    """
    brokers.location_of(url, options)
    return TaskCollector(lambda: Broker.open(url, **options))


class TaskCollector(StoreCollector):
    """Collects the metrics by task."""

    def __init__(self, open_: Callable[[], Broker]) -> None:
        super().__init__(open_)
        self._named: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            try:
                yield from self._metrics(history_of(self._lazy_broker.broker()))
            except KombuFDBError:
                self._lazy_broker.close()

    def _metrics(self, history: HistoryStore) -> list[Metric]:
        if history.settings() is None:
            return []
        by_task = self._bounded(history.totals())
        active = Counter(run.task for _, run in history.active())
        gauge = GaugeMetricFamily(ACTIVE, ABOUT[ACTIVE], labels=["task"])
        for task, number in self._bounded_active(active).items():
            gauge.add_metric([task], number)
        dropped = CounterMetricFamily(DROPPED, ABOUT[DROPPED])
        dropped.add_metric([], history.dropped())
        return [_runs(by_task), _runtimes(by_task), gauge, dropped]

    def _bounded(self, totals: Mapping[str, Counters]) -> dict[str, Counters]:
        busiest = sorted(totals, key=lambda task: (-totals[task].runs, task))
        self._name(busiest)
        found = {task: totals[task] for task in busiest if task in self._named}
        others = [totals[task] for task in busiest if task not in self._named]
        if others:
            found[OTHER] = found.get(OTHER, Counters())
            for each in others:
                found[OTHER] = found[OTHER].plus(each)
        return found

    def _name(self, tasks: Iterable[str]) -> None:
        """Give the first of these tasks series of their own, as far as there is room."""
        for task in tasks:
            if len(self._named) < TASKS:
                self._named.add(task)

    def _bounded_active(self, active: Mapping[str, int]) -> Counter[str]:
        self._name(sorted(active))  # a long task's first run is active before it is counted
        found: Counter[str] = Counter()
        for task, number in active.items():
            found[task if task in self._named else OTHER] += number
        return found


def _runs(by_task: Mapping[str, Counters]) -> Metric:
    metric = CounterMetricFamily(RUNS, ABOUT[RUNS], labels=["task", "state"])
    for task, counted in by_task.items():
        for state in ENDED:
            metric.add_metric([task, state], counted.of(state))
    return metric


def _runtimes(by_task: Mapping[str, Counters]) -> Metric:
    metric = HistogramMetricFamily(RUNTIME, ABOUT[RUNTIME], labels=["task"])
    for task, counted in by_task.items():
        buckets = [(floatToGoString(bound), number) for bound, number in counted.up_to()]
        metric.add_metric([task], buckets, sum_value=counted.runtime_us / 1e6)
    return metric
