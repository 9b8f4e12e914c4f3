"""Totals: how many messages passed through each queue, and with which keys, for rates and metrics.

Each process counts what it does and adds it to ``("total", queue, event)`` about once a second, in a transaction that
writes anyway: the hot path pays nothing, and reads nothing. So the totals lag by a second while a process is at work.
Its last counts are added by its next transaction, at the latest by a consumer's next heartbeat or when it closes the
store. A process that is killed loses up to a second of its counts. Totals are for charts. What must be exact is counted
in the transaction that changes it (``work.py``).

By key. A message with a key is counted twice: for its queue, and for its key or for :data:`OTHERS`. So the counts of an
event over all keys and the others always add up to that of the queue's messages with a key. Three bounds hold, whatever
the number of keys:

* a process remembers at most :data:`KINDS_PENDING` counts by key of a queue until it writes them;
* it writes at most :data:`NAMES_PER_QUEUE` keys of a queue by name in each :data:`NAMES_S`, those with the most
  messages first, and all others as others (:class:`PendingTotals`);
* the duties fold all but :data:`KEYS_KEPT` of a queue into the others: those that grew least since the previous look
  (:func:`surplus`). A fold reads what it folds, so a process that adds to it concurrently makes it start again, and if
  two processes fold the same key, only one succeeds.

So a flood of keys that occur only once costs a few rows per process, and a key that becomes busy has its own row within
:data:`NAMES_S`. Only names of keys are lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from kombu_fdb.engine.work import Event, Work
from kombu_fdb.keyspace.codec import decode_count
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.interruption import Lock
from kombu_fdb.store.protocol import Transaction

#: All keys, or queues, that are not counted by name. No message has this key, and no queue this name.
OTHERS = ""
KINDS_PENDING = 1_000
NAMES_PER_QUEUE = 50
#: The limit for all queues together, as they are written in one transaction.
NAMES = 200
#: How long a process uses the same names, in seconds.
NAMES_S = 60.0
KEYS_KEPT = 200
#: Keys of one fold. Few, as a worker that adds to one of them makes the fold start again.
KEYS_PER_FOLD = 20

#: The totals of one queue, by key and event.
KeyTotals = dict[str, dict[str, int]]


def numbers_of(keys: KeyTotals) -> dict[str, int]:
    """How many events each key with a name has had."""
    return {key: sum(events.values()) for key, events in keys.items() if key != OTHERS}


def surplus(before: Mapping[str, int] | None, now: Mapping[str, int]) -> list[str]:
    """The keys to fold if a queue has over :data:`KEYS_KEPT`: all but those that grew most since ``before``.

    ``before``, ``now``: :func:`numbers_of` at two looks; None at the first one, after which none is folded.
    """
    if before is None or len(now) <= KEYS_KEPT:
        return []
    grown = {key: (growth(before.get(key, 0), number), number) for key, number in now.items()}
    return sorted(grown, key=grown.__getitem__, reverse=True)[KEYS_KEPT:]


def growth(before: int, now: int) -> int:
    """By how much a counter has grown. One that is lower than it was has begun anew: its key was folded in between."""
    return now - before if now >= before else now


def read_keys(work: Work, begin: bytes) -> tuple[str, KeyTotals, bytes] | None:
    """The first queue from ``begin`` on that has keys, its totals, and where to continue; None at the end.

    Queues without keys cost nothing.
    """
    while head := work.tr.get_range(begin, work.keys.all_key_totals[1], limit=1, snapshot=True):
        for (queue, _key, _event), _ in work.keys.read(head, str, str, str):
            return queue, _read(work, queue), work.keys.key_totals(queue)[1]
        begin = head[0][0] + b"\x00"
    return None


def _read(work: Work, queue: str) -> KeyTotals:
    found: KeyTotals = {}
    for (_queue, key, event), value in work.keys.read(
        work.tr.get_range(*work.keys.key_totals(queue), snapshot=True), str, str, str
    ):
        found.setdefault(key, {})[event] = decode_count(value)
    return found


def fold(work: Work, queue: str, names: Sequence[str]) -> None:
    """Count these keys among the others from now on."""
    sums: defaultdict[str, int] = defaultdict(int)
    for rows in work.tr.get_ranges([(*work.keys.key_totals_of(queue, name), 0) for name in names]):
        for (_queue, _key, event), value in work.keys.read(rows, str, str, str):
            sums[event] += decode_count(value)
    for name in names:
        work.tr.clear_range(*work.keys.key_totals_of(queue, name))
    for event, number in sums.items():
        work.tr.add(work.keys.key_total(queue, OTHERS, event), number)


INTERVAL_S = 1.0
#: How many kinds of counts a process remembers until it writes them; it forgets the others.
MOST_PENDING = 10_000


class PendingTotals:
    """What this process has counted and not written yet, and which keys it counts by name. Thread-safe.

    ``note`` and :meth:`share` take no lock, as a signal handler may count; :meth:`write` raises what a ``Lock``
    raises.
    """

    def __init__(self, keys: Keyspace, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        #: ``note(events)``: count these.
        self._noted: deque[Mapping[Event, int]] = deque()
        self.note = self._noted.append
        #: When the next transaction is to write a share.
        self.next_s = clock.monotonic() + INTERVAL_S
        self._lock = Lock()
        #: Queues and keys that are counted by name, how many keys of each queue, and until when.
        self._names: set[tuple[str, str]] = set()
        self._by_queue: Counter[str] = Counter()
        self._until_s = clock.monotonic() + NAMES_S

    def share(self) -> dict[Event, int]:
        """Take all pending counts, of a bounded number of kinds, for the next transaction to write with its own events.

        If it does not write them, the caller notes them again.
        """
        self.next_s = self._clock.monotonic() + INTERVAL_S
        found: dict[Event, int] = {}
        keyed: Counter[str] = Counter()
        while self._noted:
            try:
                events = self._noted.popleft()
            except IndexError:  # another thread was faster
                break
            for event, number in events.items():
                kind = event if event in found else _new_kind(event, found, keyed)
                if kind is not None:
                    found[kind] = found.get(kind, 0) + number
        return found

    def write(self, tr: Transaction, events: Mapping[Event, int]) -> None:
        """Blind atomic adds."""
        for (queue, what, *key), number in events.items():
            if not key:
                tr.add(self._keys.total(queue, what), number)
        for (queue, what, each), number in self._by_name(events).items():
            tr.add(self._keys.key_total(queue, each, what), number)

    def _by_name(self, events: Mapping[Event, int]) -> dict[Event, int]:
        """The counts by key; keys that are not counted by name add to the others. Events without a key are left out."""
        numbers: Counter[tuple[str, str]] = Counter()
        for (queue, _, *key), number in events.items():
            if any(key):
                numbers[queue, key[0]] += number
        with self._lock:
            named = self._named(numbers)
        found: Counter[Event] = Counter()
        for (queue, event, *key), number in events.items():
            if key:
                found[queue, event, key[0] if (queue, key[0]) in named else OTHERS] += number
        return found

    def _named(self, numbers: Counter[tuple[str, str]]) -> set[tuple[str, str]]:
        if numbers and self._clock.monotonic() >= self._until_s:
            self._until_s = self._clock.monotonic() + NAMES_S
            self._names.clear()
            self._by_queue.clear()
        for name, _ in numbers.most_common():
            if len(self._names) >= NAMES:
                break
            queue = name[0]
            if name not in self._names and self._by_queue[queue] < NAMES_PER_QUEUE:
                self._names.add(name)
                self._by_queue[queue] += 1
        return self._names & numbers.keys()


def _new_kind(event: Event, found: Mapping[Event, int], keyed: Counter[str]) -> Event | None:
    """The event under which it counts in a share, or None. ``keyed``: how many kinds each queue has by key."""
    queue, what, *key = event
    if not key:
        return event if len(found) - keyed.total() < MOST_PENDING else None
    if (queue, what) not in found:
        return None  # its queue's event is not counted, either
    if keyed[queue] >= KINDS_PENDING:
        return queue, what, OTHERS
    keyed[queue] += 1
    return event


def read(work: Work) -> dict[str, dict[str, int]]:
    """How many messages ever were published, claimed, acked, ... by queue and event; ``""``: of lost leases."""
    found: dict[str, dict[str, int]] = {}
    for (queue, event), value in work.keys.read(work.tr.get_range(*work.keys.all_totals, snapshot=True), str, str):
        found.setdefault(queue, {})[event] = decode_count(value)
    return found


def forget(work: Work, queues: Sequence[str]) -> None:
    """Clear the totals of queues that are gone."""
    for queue in queues:
        work.tr.clear_range(*work.keys.totals(queue))
        work.tr.clear_range(*work.keys.key_totals(queue))
