"""Metrics: how much ever happened, by queue and by key, and what was at regular moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.metrics import samples, totals
from kombu_fdb.engine.metrics.samples import QueueSample, Sample, Series
from kombu_fdb.engine.metrics.totals import KeyTotals
from kombu_fdb.engine.transactions import Group, Transactions, read, write

#: Queues that are gone, whose totals one transaction clears.
QUEUES_PER_FORGET = 200


class Metrics(Group):
    """The verbs on totals."""

    _key_totals = read(totals.read_keys)
    _samples = read(samples.read_part)
    _fold = write(totals.fold)
    _forget = write(totals.forget)
    totals = read(totals.read)

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        super().__init__(run)
        self._inspect = inspect
        self._busiest = totals.Busiest()
        #: The last that this process took.
        self._sampled: Sample | None = None

    def key_totals(self) -> dict[str, KeyTotals]:
        """The same by queue, key and event, of the busiest keys; key "": of a queue's others (``totals.py``)."""
        found: dict[str, KeyTotals] = {}
        begin = self._run.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, found[queue], begin = part
        return found

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Add what this process has counted so far, now. On an error it is not counted."""
        share = self._run.totals.share()
        if share.taken:
            timeout_s = self._run.timeouts.call_s if timeout_s is None else timeout_s
            self._run.retry(lambda tr: self._run.totals.write(tr, share.taken), timeout_s=timeout_s)

    def sample(self, series: Sequence[Series]) -> None:
        """Take a sample now, into each of these series (``samples.py``). For one thread."""
        taken_ms = self._run.now()
        busiest = samples.busiest(self._queues(), self._sampled)
        self._sampled = sample = Sample(taken_ms, self._with_ages(busiest, taken_ms))
        self._run.write(lambda work: samples.write(work, series, sample))

    def _queues(self) -> dict[str, QueueSample]:
        ever = self.totals()
        return {
            name: QueueSample(counts.ready, counts.delayed, counts.leased, None, ever.get(name, {}))
            for name, counts in self._inspect.queues().items()
        }

    def _with_ages(self, queues: dict[str, QueueSample], now_ms: int) -> dict[str, QueueSample]:
        """Queues and keys without ready messages are not asked how old their oldest one is."""
        facts = self._inspect.facts([name for name, queue in queues.items() if queue.ready and name != samples.OTHERS])
        ages = {name: max(0, now_ms - each.oldest_ms) for name, each in facts.items() if each.oldest_ms is not None}
        return {name: replace(queue, oldest_ms=ages.get(name)) for name, queue in queues.items()}

    def samples(self, series: Series) -> list[Sample]:
        """What was sampled, the oldest first."""
        parts = range(0, series.slots, samples.SLOTS_PER_READ)
        found = self._run.as_one(lambda: [each for first in parts for each in self._samples(series, first)])
        return sorted(found, key=lambda each: each.taken_ms)

    def trim_steps(self) -> Iterator[None]:
        """Forget the totals of queues that are gone, and all but the busiest keys, step by step. For one thread."""
        gone = sorted(self.totals().keys() - self._inspect.queues().keys() - {""})
        for start in range(0, len(gone), QUEUES_PER_FORGET):
            self._forget(gone[start : start + QUEUES_PER_FORGET])
            yield
        queues, begin = set(), self._run.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, keys, begin = part
            queues.add(queue)
            yield
            names = self._busiest.surplus(queue, keys)
            for start in range(0, len(names), totals.KEYS_PER_FOLD):
                self._fold(queue, names[start : start + totals.KEYS_PER_FOLD])
                yield
        self._busiest.keep(queues)
