"""Inspection: what is in the store. Snapshot reads; nothing here changes or conflicts with anything."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.inspection import browse, inspect
from kombu_fdb.engine.metrics import samples, totals
from kombu_fdb.engine.metrics.samples import Sample, Series
from kombu_fdb.engine.metrics.totals import KeyTotals
from kombu_fdb.engine.scheduling import limit_changes
from kombu_fdb.engine.transactions import Verbs, read
from kombu_fdb.model import Peeked, QueueFacts
from kombu_fdb.store.protocol import KeyValue

#: How many queues are looked at in one transaction.
QUEUES_PER_LOOK = 50


class Inspection(Verbs):
    """The verbs that only read."""

    queues = read(inspect.queues)
    queue = read(inspect.declaration)
    exists = read(inspect.exists)
    counts = read(inspect.counts)
    consumers = read(inspect.consumers)
    consumer_count = read(inspect.consumer_count)
    sessions = read(inspect.sessions)
    control = read(limit_changes.read_control)
    limits = read(limit_changes.read)
    keys_of = read(inspect.keys_of)
    key_page = read(inspect.key_page)

    peek = read(browse.peek)
    delayed = read(browse.delayed)
    taken = read(browse.taken)
    snapshot = read(browse.snapshot)
    page = read(browse.page)
    read_at = read(browse.read_at)
    find_task = read(browse.find_task)
    list_task = read(browse.list_task)

    exchange = read(inspect.exchange)
    exchanges = read(inspect.exchanges)
    bindings = read(inspect.bindings)
    route = read(inspect.route)

    _key_totals = read(totals.read_keys)
    _samples = read(samples.read_part)
    totals = read(totals.read)

    def facts(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Declaration, control and age of these queues, in as many transactions as necessary."""
        found: dict[str, QueueFacts] = {}
        for start in range(0, len(queues), QUEUES_PER_LOOK):
            found |= self._facts(list(queues[start : start + QUEUES_PER_LOOK]))
        return found

    _facts = read(inspect.facts)

    def find(self, queue: str, message_id: bytes) -> Peeked | None:
        """A message of the queue in any state. Reads the whole queue; may miss one that moves during the search."""
        row = self.find_row(queue, message_id)
        return None if row is None else self._look(queue, row)

    _look = read(browse.look)

    def find_row(self, queue: str, message_id: bytes) -> KeyValue | None:
        for begin, end in browse.ranges(self._run.keys, queue):
            row, following = None, begin
            while row is None and following < end:
                row, following = self._find_part(queue, message_id, (following, end))
            if row is not None:
                return row
        return None

    _find_part = read(browse.find_part)

    def key_totals(self) -> dict[str, KeyTotals]:
        """Totals of the busiest keys by queue, key and event; key "": the queue's other keys (``totals.py``)."""
        found: dict[str, KeyTotals] = {}
        begin = self._run.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, found[queue], begin = part
        return found

    def samples(self, series: Series) -> list[Sample]:
        """The samples taken, oldest first."""
        parts = range(0, series.slots, samples.SLOTS_PER_READ)
        found = self._run.as_one(lambda: [each for first in parts for each in self._samples(series, first)])
        return sorted(found, key=lambda each: each.taken_ms)
