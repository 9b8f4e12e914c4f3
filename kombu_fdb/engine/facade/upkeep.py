"""Upkeep: the steps of the duties, each one bounded transaction, and what a process counts for charts.

``process/duties.py`` says which process does them.

A step moves as many messages as fit into its transaction: after a step that was too large, half as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kombu_fdb.engine import copies, topology
from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.messages import overflow, publish
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics import samples, totals
from kombu_fdb.engine.metrics.samples import QueueSample, Sample, Series
from kombu_fdb.engine.scheduling import key_limits, limit_changes
from kombu_fdb.engine.transactions import Transactions, Verbs, read, write
from kombu_fdb.engine.upkeep import expiry, promotion, quarantine, release
from kombu_fdb.keyspace.layout import Range
from kombu_fdb.model import QueueCounts
from kombu_fdb.store.protocol import KeyValue

#: How many bookkeeping rows one transaction of a duty reads or clears.
ROWS_PER_TRANSACTION = 1_000
#: How many deleted queues' totals one transaction clears.
QUEUES_PER_FORGET = 200


class Upkeep(Verbs):
    """The verbs that keep the store in order."""

    relimited_queues = read(limit_changes.relimited_queues)
    limited_queues = read(topology.limited_queues)
    ttl_queues = read(topology.ttl_queues)
    expired_heads = read(expiry.at_heads)
    clear_rows = write(topology.clear_if)
    clear_copy = write(copies.clear_abandoned)
    clear_buckets_part = write(key_limits.clear_full)
    asides = read(quarantine.read)
    set_aside = write(quarantine.write)
    forget_aside = write(quarantine.forget)
    _key_totals = read(totals.read_keys)
    _fold_totals = write(totals.fold)
    _forget_totals = write(totals.forget)

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        super().__init__(run)
        self._inspect = inspect
        #: By queue, how many events each key had at the last trim.
        self._seen: dict[str, dict[str, int]] = {}
        #: The last sample that this process took.
        self._sampled: Sample | None = None

    def due_queues(self) -> tuple[list[str], int | None, bool]:
        """The queues with messages to promote, when the next other queue is due, and whether keys wait for a rate."""
        due, next_ms, parked, begin = self._due_part()
        while begin:
            found, part_ms, parked, begin = self._due_part(begin)
            due += found
            next_ms = min((each for each in (next_ms, part_ms) if each is not None), default=None)
        return due, next_ms, parked

    _due_part = read(promotion.due_queues)

    def promote_part(self, queue: str) -> tuple[int, int | None]:
        """Make some due messages of a queue ready. Returns how many, and when its next one is due."""
        return self._run.part(promotion.promote, promotion.MESSAGES_PER_TRANSACTION, queue)

    def unpark(self) -> int | None:
        """Unpark some keys whose rate allows a message again. Returns when the next key is due."""
        return self._run.write(lambda work: promotion.unpark(work, self._run.sightings))

    def regain_part(self) -> int:
        """Regain some messages that older processes kept for this version. Returns how many."""
        if not self._run.read(release.is_any_kept):
            return 0
        return self._run.part(release.regain_part, release.MESSAGES_PER_TRANSACTION)

    def trim_full_part(self, queue: str) -> int:
        """Shed some of the oldest messages that dead letters or due messages have made too many. Returns how many."""
        return self._run.part(overflow.trim, overflow.MOST_LEAVING, queue)

    def drop_expired_part(self, queue: str, cursor: bytes = b"") -> tuple[int, bytes]:
        """Drop the expired ones among some ready messages. Returns how many, and where to continue; b"" at the end."""
        return self._run.part(expiry.drop_part, expiry.ROWS_PER_TRANSACTION, queue, cursor)

    def clear_dedup_part(self, *, kept_ms: int = publish.KEPT_MS) -> int:
        """Clear some dedup ids whose window ended ``kept_ms`` ago, by this process's clock. Returns how many."""
        end_ms = max(0, self._run.now() - kept_ms)
        return self._run.part(publish.clear_ended, publish.ENTRIES_PER_TRANSACTION, end_ms)

    def rows(self, whole: Range) -> list[KeyValue]:
        """All rows of a range, read in parts, for a FailureDetector."""
        return [*self._run.scan(whole, ROWS_PER_TRANSACTION)]

    def orphans(self) -> dict[tuple[str, str], bytes]:
        """The rows of queues and exchanges that seem to be gone: kind, name and last change, for a FailureDetector."""
        alive, exchanges = self._inspect.queues(), {each.name for each in self._inspect.exchanges()}
        found = {}
        keys = self._run.keys
        for (queue,), value in keys.read(self.rows(keys.all_bells), str):
            if not alive.keys() & {queue, queue + DEAD_SUFFIX}:
                found["queue", queue] = value
        for (exchange,), value in keys.read(self.rows(keys.all_epochs), str):
            if exchange not in exchanges:
                found["exchange", exchange] = value
        return found

    def clear_orphan(self, kind: str, name: str, value: bytes) -> bool:
        """Clear an orphan's rows, if they have not changed since, and its queue or exchange is really gone."""
        clear = quarantine.clear_queue if kind == "queue" else quarantine.clear_exchange
        return self._run.write(lambda work: clear(work, name, value))

    # -- totals and samples --------------------------------------------------------------------------------------------

    def flush_totals(self, *, timeout_s: float | None = None) -> None:
        """Write now what this process has counted so far. After an error, the counts are kept for the next write."""
        share = self._run.totals.share()
        if not share:
            return
        timeout_s = self._run.environment.call_s if timeout_s is None else timeout_s
        try:
            self._run.retry(lambda tr: self._run.totals.write(tr, share), timeout_s=timeout_s)
        except BaseException:
            self._run.totals.note(share)
            raise

    def sample(self, series: Sequence[Series]) -> None:
        """Take a sample now, into each of these series (``samples.py``). For one thread."""
        taken_ms = self._run.now()
        busiest = samples.busiest(self._queues(), self._sampled)
        self._sampled = sample = Sample(taken_ms, self._with_ages(busiest, taken_ms))
        self._run.write(lambda work: samples.write(work, series, sample))

    def _queues(self) -> dict[str, QueueSample]:
        """All queues with counters, also undeclared ones: they come and go with their messages."""
        ever, held = self._inspect.totals(), self._inspect.queues()
        ever.pop(totals.OTHERS, None)  # late settlements
        found = {}
        for name in sorted(ever.keys() | held.keys()):
            counts = held.get(name, QueueCounts())
            found[name] = QueueSample(counts.ready, counts.delayed, counts.leased, None, ever.get(name, {}))
        return found

    def _with_ages(self, queues: dict[str, QueueSample], now_ms: int) -> dict[str, QueueSample]:
        """Add the ages of the oldest messages, where there are ready ones."""
        facts = self._inspect.facts([name for name, queue in queues.items() if queue.ready and name != totals.OTHERS])
        ages = {name: max(0, now_ms - each.oldest_ms) for name, each in facts.items() if each.oldest_ms is not None}
        return {name: replace(queue, oldest_ms=ages.get(name)) for name, queue in queues.items()}

    def trim_totals(self) -> Iterator[None]:
        """Forget the totals of deleted queues, and of all but the busiest keys, step by step. For one thread."""
        gone = sorted(self._inspect.totals().keys() - self._inspect.queues().keys() - {""})
        for start in range(0, len(gone), QUEUES_PER_FORGET):
            self._forget_totals(gone[start : start + QUEUES_PER_FORGET])
            yield
        queues, begin = set(), self._run.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, keys, begin = part
            queues.add(queue)
            yield
            before, self._seen[queue] = self._seen.get(queue), totals.numbers_of(keys)
            names = totals.surplus(before, self._seen[queue])
            for start in range(0, len(names), totals.KEYS_PER_FOLD):
                self._fold_totals(queue, names[start : start + totals.KEYS_PER_FOLD])
                yield
        self._seen = {queue: numbers for queue, numbers in self._seen.items() if queue in queues}
