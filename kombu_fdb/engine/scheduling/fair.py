"""Fair order: which key is served next, how tenants share turns, and how waiting raises a priority.

Model. A *sub-queue* is the messages of one key and one rank; those without a key are one sub-queue per rank, the ready
range itself. A sub-queue is

* *idle*: it has no mark. If it has messages, an arrival has been noted.
* *active* (mark A): it has messages, and one entry in the ring: ``(rank, round, stamp of its first message, key)``.
* *parked* (mark P): it may have messages, but none may be served now. Its key is paused, has reached its limit of
  messages in flight, or has used up its rate.

The ring is served in order. A sub-queue that was served goes to the round after the current one; so does a newcomer
(``QueueControl.newcomer``), behind sub-queues whose first message is older. That is exactly the order of queue-by
(https://github.com/acrolinx/clj-queue-by): a round is one of its snapshots. Every claim follows this order, also one
that serves a wait queue (``wait_queue.py``), so the order is the same with any number of consumers.

Which transaction moves what:

* publish, promote, release and sweep put a message into a sub-queue and *note an arrival*, both blindly: they never
  conflict. The end of a lease and a change of limits ring the key's *freed* bell. The end of a lease rings no bell if
  its transaction has read, as a conflict, that no key of the queue has limits.
* a claim admits the arrivals: idle -> active. It answers the freed bells: parked -> active, if nothing prevents it.
* a claim that serves a sub-queue's last message: active -> idle. A claim that finds the sub-queue blocked: active ->
  parked.

Why no message is ever forgotten. (1) An arrival or bell is cleared only by a transaction that read the mark
serializably and leaves the sub-queue active, or parked for a reason that will ring again. (2) active -> idle conflicts
on the *whole* range of the sub-queue, not only behind the messages taken: a release returns a message to the front. (3)
active -> parked conflicts on the number in flight and on the limits. Otherwise the bell of an ack, or of a resume,
between this claim's read and its commit could be lost: another claim, which still saw the sub-queue active, may have
answered it already.

``key_limits.py`` says what a key's limits allow (KEY-LIMIT).

Cost: arrivals, bells, ring and rounds are read together with the queue's head (:func:`order_ranges`) if this process
knows that the queue has keys; else in one more round trip. Another round trip reads the marks and first messages of
newcomers, if there are any; a third reads other messages. If many keys in a row are blocked, up to :data:`MOST_LOOKS`
more follow. None of it grows with the number of keys or messages; a parked key costs nothing. Guarantee FAIR.

Tenants: of each tenant's keys, ``tenant/user``, one has a turn in each round. These keys are in the ring like others.
But a key that enters the ring is placed as many rounds after the next one as its tenant has turns there (stride
scheduling at insertion; Waldspurger and Weihl 1995). ``("turns", queue, rank, tenant)`` counts them, in each
transaction in which a turn enters or leaves the ring. So a tenant waits for its present turns, never for past ones.

The mark of such a key names its turn (``A``, and the part of the ring entry's key after the ring's prefix). A
transaction that removes a key's last message without a claim, pauses the key, or changes its priority, finds the turn
by the mark and takes it out: otherwise the turn would count for the tenant until its round comes. A turn written by a
version without such marks is served, and not counted.

Ageing: a message that has waited long goes before more urgent ones, so that strict priority starves no message. With
``QueueControl.ageing`` (or the argument ``x-fair-ageing``) of n seconds, each n seconds of waiting count as one
priority more, up to the most urgent. Of two messages that are then equally urgent, the one with the lower priority goes
first: it has waited longer. A message waits from its publication on, a delayed one from its due time on.

Versionstamps can't be compared with a clock, so the wall clocks of publishers and consumers decide. A wrong clock gives
a message a better or worse turn, and harms nothing else. The order within a priority does not change.

With ageing, a turn is as urgent as its next message. So a claim reads the ring rank by rank, and the heads of the
sub-queues in one more round trip. In a queue without keys, a claim reads a full window of every priority, still in one
round trip. A queue without ageing pays nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kombu_fdb.engine import parts
from kombu_fdb.engine.scheduling.key_limits import Allowances
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_count, decode_round
from kombu_fdb.keyspace.layout import STAMP_BYTES, Keyspace, range_of, read_or, readable, split_place
from kombu_fdb.model import URGENT, Rank, Stamp
from kombu_fdb.store.protocol import KeyValue

#: The marks. For a tenant's key, the turn follows the first one.
ACTIVE = b"A"
PARKED = b"P"
SEPARATOR = "/"


class Turn(NamedTuple):
    """A ring entry; the order of turns is the order of service. ``items``: the rank of the messages, packed."""

    rank: Rank
    round: int
    stamp: Stamp
    key: str
    items: Rank


def tenant_of(key: str) -> str | None:
    """The key's tenant; None if it has none."""
    tenant, separator, _ = key.partition(SEPARATOR)
    return tenant if separator else None


def rank_of(items: Rank, priority: int | None) -> Rank:
    """The rank of a sub-queue's turns: that of its messages, or that of the key's own priority."""
    return items if priority is None else Keyspace.rank(priority)


# -- turns of tenants --------------------------------------------------------------------------------------------------


class Tenants:
    """How many turns each tenant has, as one claim reads and changes it."""

    def __init__(self, work: Work, queue: str) -> None:
        self._tr = work.tr
        self._keys = work.keys
        self._queue = queue
        self._turns: dict[tuple[Rank, str], int] = {}
        self._changes: Counter[tuple[Rank, str]] = Counter()
        self._counted: set[Turn] = set()

    def load(self, subqueues: Iterable[tuple[Rank, str]], turns: Iterable[Turn] = ()) -> None:
        """Read, at snapshot, the tenants' numbers by rank, and the marks of turns; nothing if no key has a tenant.

        A turn's mark changes only with its entry in the ring, on which the claim that serves it conflicts.
        """
        named = {(rank, tenant) for rank, key in subqueues if (tenant := tenant_of(key)) is not None}
        wanted = sorted(named - self._turns.keys())
        marked = [turn for turn in turns if tenant_of(turn.key) is not None]
        if not wanted and not marked:
            return
        rows = [self._keys.turns(self._queue, *each) for each in wanted]
        marks = [self._keys.active(self._queue, turn.key, turn.items) for turn in marked]
        values = self._tr.get_many(rows + marks, snapshot=True)
        self._turns.update({each: decode_count(value) for each, value in zip(wanted, values, strict=False)})
        named_by = zip(marked, values[len(rows) :], strict=True)
        self._counted.update(turn for turn, mark in named_by if mark == self.mark(turn))

    def round(self, rank: Rank, key: str, first: int) -> int:
        """The first round from ``first`` on in which the key's tenant has no other turn."""
        tenant = tenant_of(key)
        return first if tenant is None else first + max(0, self._turns.get((rank, tenant), 0))

    def mark(self, turn: Turn) -> bytes:
        """The mark of the active sub-queue with this turn."""
        if tenant_of(turn.key) is None:
            return ACTIVE
        return ACTIVE + self._keys.ring_suffix(turn.rank, turn.round, turn.stamp, turn.key)

    def entered(self, turn: Turn) -> None:
        """Note that the turn is in the ring, and named by its mark."""
        if tenant_of(turn.key) is not None:
            self._counted.add(turn)
            self._change(turn.rank, turn.key, 1)

    def left(self, turn: Turn) -> None:
        """Note that the turn has left the ring."""
        if turn in self._counted:
            self._counted.remove(turn)
            self._change(turn.rank, turn.key, -1)

    def _change(self, rank: Rank, key: str, by: int) -> None:
        each = rank, tenant_of(key) or ""
        self._turns[each] = self._turns.get(each, 0) + by
        self._changes[each] += by

    def write(self) -> None:
        """Write one atomic add for each tenant whose number has changed."""
        for each, by in self._changes.items():
            if by:
                self._tr.add(self._keys.turns(self._queue, *each), by)


def leave_places(work: Work, queue: str, messages: Iterable[bytes]) -> None:
    """:func:`leave`, given the messages' row keys. A message without a fairness key has no turn."""
    keys = work.keys
    rows = [(each, b"") for each in messages if each.startswith(keys.keyed(queue))]
    leave(work, queue, [subqueue for subqueue, _ in readable(rows, lambda key: split_place(keys.place(queue, key)))])


def leave(work: Work, queue: str, subqueues: Iterable[tuple[str, Rank]]) -> None:
    """Take tenants' sub-queues out of the ring if this transaction has removed their last message.

    Reads nothing if no key has a tenant. Conflicts with a transaction that adds a message to such a key, and with a
    claim that serves it. The transaction must not have stored a message there.
    """
    asked = sorted({each for each in subqueues if tenant_of(each[0]) is not None})
    if not asked:
        return
    ranges = [range_of(work.keys.items(queue, *each)) for each in asked]
    heads = work.tr.get_ranges([(*whole, 1) for whole in ranges], snapshot=True)
    marks = [work.keys.active(queue, *each) for each in asked]
    for whole, head, row, mark in zip(ranges, heads, marks, work.tr.get_many(marks), strict=True):
        if not head and (entry := _entry_of(work.keys, queue, mark)) is not None:
            work.tr.add_read_conflict_range(*whole)
            work.tr.clear(row)
            _take_out(work, queue, entry)


def is_in_ring(work: Work, queue: str, key: str) -> bool:
    """Whether the key has a turn."""
    return any(mark.startswith(ACTIVE) for _row, mark in work.tr.get_range(*work.keys.active_ranks(queue, key)))


def pause(work: Work, queue: str, key: str) -> None:
    """Take a tenant's key out of the ring, and park it. Conflicts with a claim that serves it."""
    if tenant_of(key) is not None:
        pause_marks(work, queue, work.tr.get_range(*work.keys.active_ranks(queue, key)))


def pause_marks(work: Work, queue: str, marks: Iterable[KeyValue]) -> None:
    """:func:`pause` for the sub-queues of these marks' rows, which may have been read at snapshot."""
    for row, mark in marks:
        if (entry := _entry_of(work.keys, queue, mark)) is not None:
            work.tr.add_read_conflict_key(row)
            work.tr.set(row, PARKED)
            _take_out(work, queue, entry)


def take_out(work: Work, queue: str, turns: Sequence[Turn]) -> None:
    """Take these turns, which may have been read at snapshot, out of the ring, and park their sub-queues.

    The caller rings the keys' bells. Conflicts with a claim that serves one of them.
    """
    rows = [work.keys.active(queue, turn.key, turn.items) for turn in turns]
    for turn, row, mark in zip(turns, rows, work.tr.get_many(rows, snapshot=True) if rows else [], strict=True):
        entry = work.keys.ring_entry(queue, turn.rank, turn.round, turn.stamp, turn.key)
        if _entry_of(work.keys, queue, mark) == entry:
            pause_marks(work, queue, [(row, mark or b"")])
            continue
        work.tr.add_read_conflict_key(entry)
        work.tr.clear(entry)
        if mark is not None and mark.startswith(ACTIVE):
            work.tr.set(row, PARKED)


def _entry_of(keys: Keyspace, queue: str, mark: bytes | None) -> bytes | None:
    """The ring entry that a mark names; None for any other mark."""
    if mark is None or not mark.startswith(ACTIVE):
        return None
    entry = keys.ring(queue) + mark[len(ACTIVE) :]
    try:
        keys.split_ring(queue, entry)
    except FormatError:
        return None
    return entry


def _take_out(work: Work, queue: str, entry: bytes) -> None:
    rank, _round, _stamp, key = work.keys.split_ring(queue, entry)
    work.tr.add_read_conflict_key(entry)
    work.tr.clear(entry)
    work.tr.add(work.keys.turns(queue, rank, tenant_of(key) or ""), -1)


# -- ageing ------------------------------------------------------------------------------------------------------------


#: The smaller goes first.
Urgency = tuple[int, int]


def urgency(priority: int, record: bytes, ageing_s: float, now_ms: int) -> Urgency:
    """The urgency of a waiting message."""
    waited_s = max(0, now_ms - Record.published_at(record, now_ms)) / 1000
    return max(0, URGENT - priority - int(waited_s / ageing_s)), priority


def oldest_first(work: Work, queue: str, ageing_s: float, want: int) -> list[KeyValue]:
    """The first ``want`` messages without a key."""
    priorities = range(URGENT + 1)
    windows = work.tr.get_ranges(
        [(*range_of(work.keys.items(queue, "", work.keys.rank(priority))), want) for priority in priorities],
        snapshot=True,
    )
    candidates = [[(priority, row) for row in rows] for priority, rows in zip(priorities, windows, strict=True)]
    # The merge compares heads only, so each priority keeps its order, whatever its publishers' clocks say.
    merged = heapq.merge(*candidates, key=lambda each: urgency(each[0], each[1][1], ageing_s, work.now_ms))
    return [row for _, row in islice(merged, want)]


# -- fair order --------------------------------------------------------------------------------------------------------


#: How many arrivals and bells a claim answers: this number, or its number of messages if that is larger.
ARRIVALS = 200
#: How often a claim that has found nothing yet looks for :data:`ARRIVALS` more turns behind the blocked ones.
MOST_LOOKS = 2

#: Ranks as packed in the ring, the most urgent first, and their priorities.
PRIORITIES = {Keyspace.rank(priority): priority for priority in range(URGENT, -1, -1)}
NOT_AGEING = (0, 0)

#: The sort key of turns, and turns in that order.
_Place = tuple[Urgency, Turn]
_Heap = list[_Place]
#: Store keys and records of the messages to claim.
Chosen = list[KeyValue]


#: How many :func:`order_ranges` there are.
ORDER_RANGES = 6


def order_ranges(keys: Keyspace, queue: str, first_bucket: int, want: int) -> list[tuple[bytes, bytes, int]]:
    """The ranges of arrivals (two), bells, marks without a key, rounds, and, without ageing, the next turns."""
    begin, end = keys.arrivals(queue)
    middle, most = keys.arrivals_from(queue, first_bucket), max(ARRIVALS, want)
    return [
        (middle, end, most),
        (begin, middle, most),
        (*keys.all_freed(queue), most),
        (*keys.active_ranks(queue, ""), 0),
        (*keys.rounds(queue), 0),
        (*range_of(keys.ring(queue)), want),
    ]


def choose(work: Work, queue: str, state: QueueState, want: int, window: Window) -> Chosen:
    """Up to ``want`` messages in fair order. Changes marks, arrivals and ring."""
    return _Scheduler(work, queue, state, window).run(want, window.first_bucket)


class _Scheduler:
    """One claim of one queue."""

    def __init__(self, work: Work, queue: str, state: QueueState, window: Window) -> None:
        self._tr = work.tr
        self._keys = work.keys
        self._queue = queue
        self._control = state.control
        self._head = state.head
        self._order_rows = state.order
        #: The first messages of sub-queues that other reads have brought, and whether these are all.
        self._first: dict[tuple[str, Rank], tuple[list[KeyValue], bool]] = {}
        self._has_all_unkeyed = False
        self._now_ms = work.now_ms
        self._window = window
        self._rounds: dict[Rank, int] = {}
        self._tenants = Tenants(work, queue)
        self._allowances = Allowances(work, queue, state.control, window.sightings)
        self._rows: dict[tuple[str, Rank], list[KeyValue]] = {}
        self._exhausted: set[tuple[str, Rank]] = set()
        #: The next message of each sub-queue; only with ageing.
        self._heads: dict[tuple[str, Rank], bytes] = {}
        self._chosen: Chosen = []
        #: Turns that this claim has created and not served: a lone key gets many, and only the last is stored.
        self._entries: dict[bytes, Rank] = {}
        #: The entries of the ring, in parts, as last read; and the entries that have left it.
        self._parts_read: list[list[bytes]] = []
        self._left: set[bytes] = set()
        #: The last turn that was read, if more turns follow it than one claim looks at.
        self._sight: _Place | None = None

    def run(self, want: int, first_bucket: int) -> Chosen:
        keys, queue, most = self._keys, self._queue, max(ARRIVALS, want)
        rows = self._order_rows
        if rows is None:
            ranges = [*order_ranges(keys, queue, first_bucket, want)[:-1], *self._rings(want)]
            if self._head is None:
                ranges.append((*range_of(keys.ready(queue)), 1))
            rows = self._tr.get_ranges(ranges, snapshot=True)
        else:
            rows = [*rows[:-1], rows[-1][:want]]
        head = rows.pop() if self._head is None else self._head
        arrivals, wrapped, freed, marks, rounds, *rings = rows
        self._rounds = {keys.round_rank(queue, key): decode_round(value) for key, value in rounds}
        self._has_all_unkeyed = self._head is not None and len(head) < min(want, ARRIVALS)
        unkeyed: dict[Rank | None, list[KeyValue]] = {}
        for row in head:
            unkeyed.setdefault(read_or(None, keys.place_rank, queue, row[0]), []).append(row)
        self._chosen += unkeyed.pop(None, [])[:1]  # the claim dead-letters it
        self._first.update(
            {("", Rank(rank)): (found, self._has_all_unkeyed) for rank, found in unkeyed.items() if rank}
        )
        idle = self._idle_unkeyed({key for key, _ in marks})
        turns = self._in_order(rings, self._answer((arrivals + wrapped)[:most], freed[:most], idle, want))
        self._serve(turns, want, unread=any(len(ring) == want for ring in rings))
        self._end()
        return self._chosen

    def _in_order(self, rings: list[list[KeyValue]], newcomers: Sequence[Turn] = ()) -> list[Turn]:
        self._parts_read = [[key for key, _ in ring] for ring in rings]
        turns = [turn for ring in rings for row in ring if (turn := self._turn(row)) is not None]
        turns += newcomers
        self._look_at_heads(turns)
        return sorted(turns, key=self._order)

    def _write_entries(self) -> None:
        self._clear_entries()
        for entry, items in self._entries.items():
            self._tr.set(entry, items)
        self._entries.clear()

    def _clear_entries(self) -> None:
        """Clear the entries that have left the ring, adjacent ones in one call."""
        for run in [run for part in self._parts_read for run in parts.runs_of(part, self._left)]:
            parts.take_run(self._tr, run)
            self._left.difference_update(run)
        for entry in sorted(self._left):
            parts.take_run(self._tr, [entry])
        self._left.clear()

    def _end(self) -> None:
        self._write_entries()
        for rank, round_ in self._rounds.items():
            self._tr.byte_max(self._keys.round(self._queue, rank), round_.to_bytes(8, "big"))
        self._tenants.write()

    def _turn(self, row: KeyValue) -> Turn | None:
        """The turn; None for an entry that can't be read, which is cleared."""
        try:
            turn = Turn(*self._keys.split_ring(self._queue, row[0]), Rank(row[1]))
        except FormatError:
            turn = None
        if turn is None or turn.items not in PRIORITIES:
            self._tr.add_read_conflict_key(row[0])
            self._tr.clear(row[0])
            return None
        return turn

    def _rings(self, window: int) -> list[tuple[bytes, bytes, int]]:
        """Where the next turns are: at the head of the ring or, with ageing, at the head of each rank."""
        ring = self._keys.ring(self._queue)
        if self._control.ageing is None:
            return [(*range_of(ring), window)]
        return [(*range_of(ring + rank), window) for rank in PRIORITIES]

    # -- ageing ----------------------------------------------------------------------------------------------------

    def _look_at_heads(self, turns: list[Turn]) -> None:
        if self._control.ageing is None or not turns:
            return
        heads = [(*range_of(self._keys.items(self._queue, turn.key, turn.items)), 1) for turn in turns]
        for turn, head in zip(turns, self._tr.get_ranges(heads, snapshot=True), strict=True):
            if head:
                self._heads[turn.key, turn.items] = head[0][1]

    def _order(self, turn: Turn) -> _Place:
        head = self._heads.get((turn.key, turn.items), b"")
        if self._control.ageing is None:
            return NOT_AGEING, turn
        return urgency(PRIORITIES[turn.rank], head, self._control.ageing, self._now_ms), turn

    # -- arrivals and bells -------------------------------------------------------------------------------------------

    def _answer(
        self, arrivals: list[KeyValue], freed: list[KeyValue], unkeyed: list[tuple[str, Rank]], want: int
    ) -> list[Turn]:
        """Activate sub-queues where possible, also those ``unkeyed``. Returns their new turns."""
        rung = [arrival for arrival, _ in readable(arrivals, self._keys.split_arrival)]
        bells = [key for key, _ in readable(freed, self._keys.split_freed)]
        candidates = self._idle(rung, want) + unkeyed + self._parked(bells)
        self._allowances.load([key for key, _ in candidates])
        turns = self._activate(candidates)
        for key, _ in [*arrivals, *freed]:
            self._tr.clear(key)
        return turns

    def _idle(self, rung: list[tuple[str, Rank]], want: int) -> list[tuple[str, Rank]]:
        """The unmarked sub-queues among those with an arrival; for a few, also reads their first messages."""
        if not rung:
            return []
        rows = [self._keys.active(self._queue, *each) for each in rung]
        for row in rows:
            self._tr.add_read_conflict_key(row)
        few = rung if len(rung) <= want else []
        ranges = [(*range_of(self._keys.items(self._queue, *each)), 2) for each in few]
        marks, found = self._tr.get_together(rows, ranges, snapshot=True)
        self._first.update({each: (head, len(head) < 2) for each, head in zip(few, found, strict=True)})
        return [each for each, mark in zip(rung, marks, strict=True) if mark is None]

    def _idle_unkeyed(self, marked: set[bytes]) -> list[tuple[str, Rank]]:
        """The unmarked sub-queues without a key. The ready range is their arrival.

        A rank beyond the head gets its turn once the head reaches it: a claim takes more urgent ranks first.
        """
        if not self._first:
            return []
        found = {rank: self._keys.active(self._queue, "", rank) for rank in self._unkeyed_ranks()}
        idle = [(rank, mark) for rank, mark in found.items() if mark not in marked]
        for _, mark in idle:
            self._tr.add_read_conflict_key(mark)
        return [("", rank) for rank, _ in idle]

    def _unkeyed_ranks(self) -> list[Rank]:
        """The ranks in which messages without a key wait; the head's suffice unless another rank may precede them."""
        if self._head is not None and self._control.ageing is None and not self._control.limits_keys:
            return [rank for _, rank in self._first if rank in PRIORITIES]
        ranges = [(*range_of(self._keys.items(self._queue, "", rank)), 1) for rank in PRIORITIES]
        heads = self._tr.get_ranges(ranges, snapshot=True)
        return [rank for rank, head in zip(PRIORITIES, heads, strict=True) if head]

    def _parked(self, freed: list[str]) -> list[tuple[str, Rank]]:
        """The parked sub-queues of keys whose bells rang."""
        found = []
        ranges = [(*self._keys.active_ranks(self._queue, key), 0) for key in freed]
        for key, marks in zip(freed, self._tr.get_ranges(ranges) if ranges else [], strict=True):
            found += [(key, self._keys.active_rank(self._queue, key, mark)) for mark, state in marks if state == PARKED]
        return [each for each in found if each[1] in PRIORITIES]

    def _activate(self, candidates: list[tuple[str, Rank]]) -> list[Turn]:
        if not candidates:
            return []
        items = [range_of(self._keys.items(self._queue, *each)) for each in candidates]
        unread = [each for each in candidates if each not in self._first]
        ranges = [(*range_of(self._keys.items(self._queue, *each)), 1) for each in unread]
        found = self._tr.get_ranges(ranges, snapshot=True) if ranges else []
        self._first.update({each: (head, not head) for each, head in zip(unread, found, strict=True)})
        heads = [self._first[each][0][:1] for each in candidates]
        self._tenants.load([(self._ring_rank(key, rank), key) for key, rank in candidates])
        turns = []
        for (key, rank), whole, head in zip(candidates, items, heads, strict=True):
            turn = self._admit(key, rank, whole, head)
            if turn is not None:
                turns.append(turn)
        return turns

    def _admit(self, key: str, rank: Rank, whole: tuple[bytes, bytes], head: list[KeyValue]) -> Turn | None:
        mark = self._keys.active(self._queue, key, rank)
        if not head:
            # No message is left. If one arrives before this commits, the transaction fails.
            self._tr.add_read_conflict_range(*whole)
            self._tr.clear(mark)
            return None
        if self._allowances.free(key) <= 0:
            self._park(key, rank)
            return None
        self._tr.set(mark, ACTIVE)
        return self._insert(key, rank, self._first_round(self._ring_rank(key, rank)), _stamp_of(head[0]))

    def _first_round(self, rank: Rank) -> int:
        serving = self._rounds.get(rank, 0)
        return {"next": serving + 1, "current": serving, "first": 0}[self._control.newcomer]

    def _ring_rank(self, key: str, items: Rank) -> Rank:
        return rank_of(items, self._allowances.priority(key))

    def _insert(self, key: str, items: Rank, round_: int, stamp: Stamp) -> Turn:
        rank = self._ring_rank(key, items)
        turn = Turn(rank, self._tenants.round(rank, key, round_), stamp, key, items)
        self._entries[self._entry(turn)] = items
        if (mark := self._tenants.mark(turn)) != ACTIVE:
            self._tr.set(self._keys.active(self._queue, key, items), mark)
        self._tenants.entered(turn)
        return turn

    def _entry(self, turn: Turn) -> bytes:
        return self._keys.ring_entry(self._queue, turn.rank, turn.round, turn.stamp, turn.key)

    # -- service ---------------------------------------------------------------------------------------------------

    def _serve(self, turns: list[Turn], want: int, *, unread: bool) -> None:
        """``unread``: whether the ring may have more turns than ``turns``."""
        heap = self._ordered(turns[:want], want)
        parts = self._behind(turns, heap, want, unread=unread)
        while heap and len(self._chosen) < want:
            served = len(self._chosen)
            place = heapq.heappop(heap)
            _urgency, turn = place
            if not self._has_room(turn) or self._is_out_of_sight(place):  # it stays in the ring as it is
                break
            following = self._serve_one(turn, want - served)
            if following is not None:
                heapq.heappush(heap, self._order(following))
            if len(self._chosen) == served:
                # It gave nothing, so turns from beyond the window move up: else others would get their next turns
                # first.
                for each in next(parts, []):
                    heapq.heappush(heap, each)

    def _ordered(self, turns: list[Turn], want: int) -> _Heap:
        self._load(turns, want)
        return [self._order(turn) for turn in turns]

    def _behind(self, turns: list[Turn], heap: _Heap, want: int, *, unread: bool) -> Iterator[_Heap]:
        """The turns after the window, in parts, each twice as long: many keys in a row may be blocked."""
        if not unread:
            return self._parts(turns, heap, max(heap, default=None), want)
        return self._read_on(heap, want)

    def _read_on(self, heap: _Heap, want: int) -> Iterator[_Heap]:
        """Read the turns after the first window. Every unserved turn is in the ring or in the heap.

        With ageing, a turn that comes after the window in the ring may still go first.
        """
        sight = None
        for _ in range(MOST_LOOKS):
            turns, unread = self._look(ARRIVALS + len(heap))
            sight = max(map(self._order, turns), default=None) if unread else None
            yield from self._parts(turns, heap, None, want)
            if sight is None or self._chosen:
                break
        self._sight = sight

    def _look(self, most: int) -> tuple[list[Turn], bool]:
        """The next turns, and whether the ring may have more."""
        self._write_entries()
        rings = self._tr.get_ranges(self._rings(most), snapshot=True)
        return self._in_order(rings), any(len(ring) == most for ring in rings)

    def _parts(self, turns: list[Turn], heap: _Heap, last: _Place | None, want: int) -> Iterator[_Heap]:
        """The turns that are not in the heap and come after ``last``, in parts."""
        standing = {turn for _urgency, turn in heap}
        behind = [turn for turn in turns if turn not in standing and (last is None or self._order(turn) > last)]
        return self._loaded(behind, want)

    def _loaded(self, behind: list[Turn], want: int) -> Iterator[_Heap]:
        """A separate generator, because its input must not change: with ageing, serving a turn changes the order."""
        size = want
        while behind:
            yield self._ordered(behind[:size], want)
            behind, size = behind[size:], size * 2

    def _is_out_of_sight(self, place: _Place) -> bool:
        """Whether turns that this claim has not read may come before it: those are for the next claim."""
        return self._sight is not None and place > self._sight

    def _has_room(self, turn: Turn) -> bool:
        """Whether its next message fits into the claim. A turn that may not be served needs no room."""
        if self._allowances.free(turn.key) <= 0:
            return True
        rows = self._rows[turn.key, turn.items]
        return not self._window.is_full and (not rows or self._window.fits(rows[0][1]))

    def _load(self, turns: list[Turn], want: int) -> None:
        """Read the messages of all turns at once: for each, its share if all have messages, and a spare."""
        if not turns:
            return
        self._allowances.load([turn.key for turn in turns])
        here = [(turn.rank, turn.key) for turn in turns]
        there = [(self._ring_rank(turn.key, turn.items), turn.key) for turn in turns]
        self._tenants.load(here + there, turns)  # a priority may have changed since a turn entered the ring
        most = -(-want // len(turns)) + max(self._allowances.weight(turn.key) for turn in turns)
        self._fetch([(turn.key, turn.items) for turn in turns], most)

    def _fetch(self, subqueues: list[tuple[str, Rank]], most: int) -> None:
        found = {each: rows for each in subqueues if (rows := self._read_before(each, most)) is not None}
        asked = [each for each in subqueues if each not in found]
        ranges = [(*range_of(self._keys.items(self._queue, *each)), most) for each in asked]
        if ranges:
            found.update(zip(asked, self._tr.get_ranges(ranges, snapshot=True), strict=True))
        for each, rows in found.items():
            self._rows[each] = rows
            if len(rows) < most:
                self._exhausted.add(each)

    def _read_before(self, subqueue: tuple[str, Rank], most: int) -> list[KeyValue] | None:
        """Its first messages, if earlier reads have brought that many, or all there are."""
        rows, are_all = self._first.get(subqueue, ([], not subqueue[0] and self._has_all_unkeyed))
        return rows[:most] if are_all or len(rows) >= most else None

    def _serve_one(self, turn: Turn, room: int) -> Turn | None:
        """Serve a sub-queue. Returns its next turn, None if it left the ring."""
        entry = self._entry(turn)
        if self._entries.pop(entry, None) is None:
            self._left.add(entry)
        self._tenants.left(turn)
        free = self._allowances.free(turn.key)
        if free <= 0:
            self._park(turn.key, turn.items)
            return None
        most = min(self._allowances.weight(turn.key), room)
        rows = self._waiting(turn, most)
        most = max(1, self._window.take(rows[: min(most, free)]))
        taken, left = rows[:most], rows[most:]
        self._rows[turn.key, turn.items] = left
        self._chosen += taken
        self._allowances.used(turn.key, len(taken))
        self._rounds[turn.rank] = max(self._rounds.get(turn.rank, 0), turn.round)
        if not left:
            self._retire(turn)
            return None
        self._heads[turn.key, turn.items] = left[0][1]
        following = self._rounds.get(self._ring_rank(turn.key, turn.items), 0) + 1  # its priority may have changed
        return self._insert(turn.key, turn.items, following, _stamp_of(left[0]))

    def _waiting(self, turn: Turn, most: int) -> list[KeyValue]:
        """The sub-queue's remaining messages: at least one more than can be taken, or all."""
        each = turn.key, turn.items
        rows = self._rows[each]
        if len(rows) > most or each in self._exhausted:
            return rows
        chosen = sum(key.startswith(self._keys.items(self._queue, *each)) for key, _ in self._chosen)
        self._fetch([each], chosen + most + len(self._chosen) + 1)
        return self._rows[each][chosen:]

    def _retire(self, turn: Turn) -> None:
        """Make an active sub-queue idle."""
        if turn.key:  # every claim reads the ready range, so it needs no guard
            self._tr.add_read_conflict_range(*range_of(self._keys.items(self._queue, turn.key, turn.items)))
        self._tr.clear(self._keys.active(self._queue, turn.key, turn.items))

    def _park(self, key: str, items: Rank) -> None:
        self._tr.set(self._keys.active(self._queue, key, items), PARKED)
        self._tr.add_read_conflict_key(self._keys.flight(self._queue, key))
        self._tr.add_read_conflict_key(self._keys.control(self._queue))
        if pause_ms := self._allowances.wait_ms(key):
            due_ms = self._now_ms + pause_ms
            self._tr.set(self._keys.unpark(due_ms, self._queue, key), pause_ms.to_bytes(8, "big"))
            self._tr.set_versionstamped_value(self._keys.alarm)


def _stamp_of(row: KeyValue) -> Stamp:
    """Every message's key ends with its stamp."""
    return Stamp(row[0][-STAMP_BYTES:])
