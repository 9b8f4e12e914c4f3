"""Totals: how many messages went through each queue, for rates and metrics.

Each process counts what it does and adds it to ``("total", queue, event)`` about once a second, in a transaction that
writes anyway: the hot path pays nothing, and reads nothing. So the totals lag by a second while a process is at work.
What it did last is added by its next transaction, at the latest by a consumer's next heartbeat or when it closes the
store; a process that is killed takes up to a second of its counts with it. They are for charts. What must be exact is
counted in the transaction that does it (``work.py``). What happens to messages with a key is counted by key as
well, as ``keytotals.py`` says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

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
    """What this process has counted and not added yet. Thread-safe without a lock, as a signal handler counts, too."""

    def __init__(self, keys: Keyspace, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        #: ``note(events)``: these have happened.
        self._noted: deque[Mapping[Event, int]] = deque()
        self.note = self._noted.append
        self._names = keytotals.Names(clock)
        #: When it is time for a transaction to add its share.
        self.next_s = clock.monotonic() + INTERVAL_S

    def share(self) -> Share:
        """All of it, for the next transaction."""
        self.next_s = self._clock.monotonic() + INTERVAL_S
        taken = Pending()
        while self._noted:
            try:
                taken.add(self._noted.popleft())
            except IndexError:  # another thread was faster
                break
        return Share(self, taken.numbers)

    def write(self, tr: Transaction, events: Mapping[Event, int]) -> None:
        """Blind atomic adds."""
        for (queue, what, *key), number in events.items():
            if not key:
                tr.add(self._keys.total(queue, what), number)
        keytotals.write(tr, self._keys, self._names.folded(events))


class Pending:
    """A sum of what has happened, of a bounded number of kinds."""

    def __init__(self) -> None:
        self.numbers: dict[Event, int] = {}
        #: Of those, the kinds by key of each queue.
        self._keyed: Counter[str] = Counter()

    def add(self, events: Mapping[Event, int]) -> None:
        for event, number in events.items():
            kind = event if event in self.numbers else self._new_kind(event)
            if kind is not None:
                self.numbers[kind] = self.numbers.get(kind, 0) + number

    def _new_kind(self, event: Event) -> Event | None:
        """The event it counts as, or None."""
        queue, what, *key = event
        if not key:
            return event if len(self.numbers) - self._keyed.total() < MOST_PENDING else None
        if (queue, what) not in self.numbers:
            return None  # nor is it for the queue
        if self._keyed[queue] >= keytotals.KINDS_PENDING:
            return queue, what, keytotals.OTHERS
        self._keyed[queue] += 1
        return event


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
        """The transaction did not happen, but what was counted before did."""
        self._totals.note(self.taken)


def read(work: Work) -> dict[str, dict[str, int]]:
    """How many messages ever were published, claimed, acked, ... by queue and event.

    ``""`` is for lost leases, whose queue is unknown.
    """
    found: dict[str, dict[str, int]] = {}
    for (queue, event), value in work.keys.read(work.tr.get_range(*work.keys.all_totals, snapshot=True), str, str):
        found.setdefault(queue, {})[event] = decode_count(value)
    return found


def forget(work: Work, queues: Sequence[str]) -> None:
    """These queues are gone."""
    for queue in queues:
        work.tr.clear_range(*work.keys.totals(queue))
        work.tr.clear_range(*work.keys.key_totals(queue))
