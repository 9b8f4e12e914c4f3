"""Totals: how many messages went through each queue, for rates and metrics.

Each process counts what it does and adds it to ``("total", queue, event)`` about once a second, in a transaction that
writes anyway: the hot path pays nothing, and reads nothing. So the totals lag by a second while a process is at work.
What it did last is added by its next transaction, at the latest by a consumer's next heartbeat or when it closes the
store; a process that is killed takes up to a second of its counts with it. They are for charts. What must be exact is
counted in the transaction that does it (``work.py``). What happens to messages with a key is counted by key as
well, as ``keytotals.py`` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import Lock

from kombu_fdb.engine.metrics import keytotals
from kombu_fdb.engine.stored.work import Event, Work
from kombu_fdb.keyspace.codec import decode_count
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import Transaction

INTERVAL_S = 1.0
#: A process that only ever counts, and writes nothing, forgets what it counted beyond so many kinds.
MOST_PENDING = 10_000


class Totals:
    """What this process has counted and not added yet. Thread-safe."""

    def __init__(self, keys: Keyspace, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._lock = Lock()
        self._pending: dict[Event, int] = {}
        #: Of those, the kinds by key of each queue.
        self._keyed: Counter[str] = Counter()
        self._names = keytotals.Names(clock)
        self._next_s = clock.monotonic() + INTERVAL_S

    def note(self, events: Mapping[Event, int]) -> None:
        """These have happened."""
        pending = self._pending
        with self._lock:
            for event, number in events.items():
                kind = event if event in pending else self._new_kind(event)
                if kind is not None:
                    pending[kind] = pending.get(kind, 0) + number

    def _new_kind(self, event: Event) -> Event | None:
        """As what it is counted; None: not at all."""
        queue, what, *key = event
        if not key:
            return event if len(self._pending) - self._keyed.total() < MOST_PENDING else None
        if (queue, what) not in self._pending:
            return None  # nor is it for the queue
        if self._keyed[queue] >= keytotals.KINDS_PENDING:
            return queue, what, keytotals.OTHERS
        self._keyed[queue] += 1
        return event

    def due(self) -> Share | None:
        """What the next transaction is to add, if it is time for it."""
        return None if self._clock.monotonic() < self._next_s else self.share()

    def share(self) -> Share:
        """All of it, now."""
        with self._lock:
            taken = dict(self._pending)
            self._pending.clear()
            self._keyed.clear()
            self._next_s = self._clock.monotonic() + INTERVAL_S
        return Share(self, taken)

    def write(self, tr: Transaction, events: Mapping[Event, int]) -> None:
        """Blind atomic adds."""
        for (queue, what, *key), number in events.items():
            if not key:
                tr.add(self._keys.total(queue, what), number)
        keytotals.write(tr, self._keys, self._names.folded(events))


class Share:
    """What one transaction adds, besides its own events."""

    def __init__(self, totals: Totals, taken: dict[Event, int]) -> None:
        self.taken = taken
        self._totals = totals
        self._written = False

    def join(self, tr: Transaction, events: Mapping[Event, int]) -> None:
        """Before each try to commit: add it all, unless this transaction writes nothing."""
        self._written = not tr.read_only
        if self._written:
            self._totals.write(tr, Counter(events) + Counter(self.taken))

    def committed(self, events: Mapping[Event, int]) -> None:
        """Keep for later what was not written."""
        if not self._written:
            self._totals.note(events)
            self.failed()

    def failed(self) -> None:
        """The transaction did not happen; what others did before did."""
        self._totals.note(self.taken)


def read(work: Work) -> dict[str, dict[str, int]]:
    """By queue and event; ``""`` is for what is of no queue."""
    found: dict[str, dict[str, int]] = {}
    for (queue, event), value in work.keys.read(work.tr.get_range(*work.keys.all_totals, snapshot=True), str, str):
        found.setdefault(queue, {})[event] = decode_count(value)
    return found


def forget(work: Work, queue: str) -> None:
    """The queue is gone."""
    work.tr.clear_range(*work.keys.totals(queue))
    keytotals.forget(work, queue)
