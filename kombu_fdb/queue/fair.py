"""Fair: whose message is next. A ring of keys with rounds.

Model. A *sub-queue* is the messages of one key and one rank; those without a key are one sub-queue per rank, the ready
range itself. A sub-queue is

* *idle*: it has no mark. It may have messages only if its door was rung since.
* *active* (mark A): it has messages, and one entry in the ring: ``(rank, round, stamp of its first message, key)``.
* *parked* (mark P): it may have messages but must not be served now: its key is paused, has as many messages in
  flight as it may, or has used up its rate.

The ring is served in order. A served sub-queue goes to the round after the one being served, a newcomer to the next
round as well (``QueueControl.newcomer``), behind those whose first message came earlier. That is exactly the order of
queue-by (https://github.com/acrolinx/clj-queue-by): a round is one of its snapshots. A claim by one consumer follows
it; rivals take slices of the ring side by side (``contention.py``), and each sub-queue still has one entry, so one turn
a round.

Who moves what:

* publish, promote, release and sweep put a message into a sub-queue and *ring its door*, both blindly: they never
  conflict. An ended lease and a changed limit ring the key's *freed* bell.
* a claim answers the doors: idle -> active. It answers the freed bells: parked -> active, if nothing is in the way.
* a claim that serves a sub-queue's last message: active -> idle; one that finds it blocked: active -> parked.

Why no message is ever forgotten. (1) A door or bell is cleared only by a transaction that read the mark serializably
and leaves the sub-queue active, or parked for a reason that will ring again. (2) active -> idle conflicts on the
*whole* range of the sub-queue, not only behind the messages taken: a release puts a message back in front.
(3) active -> parked conflicts on the number in flight and on the limits: else an ack, or a resume, between our read and
our commit would ring a bell that another claim may have answered already with "it is active".

Limits (KEY-LIMIT): the limits are read serializably, so no claim by the old ones commits after a change. The number in
flight may be read at snapshot, because acks only lower it and claims of one limited key exclude each other through its
*bucket*, which each reads serializably and sets.

Two levels: of a key ``tenant/user`` only one entry of the tenant is put into each round, so that a tenant with 5,000
users gets one turn a round, like a tenant with one (stride scheduling at insertion; ``("pace", ...)`` is the tenant's
last round).

Ageing (``ageing.py``): a turn is as urgent as its next message, so the ring is read rank by rank, and the heads of the
sub-queues in one round trip more.

Cost: one round trip for doors, bells, ring and rounds, one for the marks and heads of newcomers if there are any, one
for the messages. None of it grows with the number of keys or messages; a parked key costs nothing. Guarantee FAIR.
"""

from __future__ import annotations

import heapq
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kombu_fdb.keyspace.codec import limits_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import STAMP_LENGTH, range_of
from kombu_fdb.model import URGENT, KeyLimits, QueueControl
from kombu_fdb.queue.ageing import Urgency, urgency
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["Chosen", "choose"]

ACTIVE = b"A"
PARKED = b"P"
#: Doors and bells answered by one claim at most; the others wait for the next.
DOORS = 200
SEPARATOR = "/"

#: Ranks as they stand in the ring, the most urgent first, and their priorities.
PRIORITIES = {Keyspace.rank(priority): priority for priority in range(URGENT, -1, -1)}
NOT_AGEING = (0, 0)

_BUCKET = struct.Struct(">dQ")


class Turn(NamedTuple):
    """A ring entry; their order is the order of service. ``items``: the rank of the messages, packed."""

    rank: bytes
    round: int
    stamp: bytes
    key: str
    items: bytes


#: Store keys and records of the messages to claim.
Chosen = list[KeyValue]


@dataclass(slots=True)
class _Allowance:
    """How many messages of a key may be served now; ``retry_ms``: when to look again if a rate is in the way."""

    messages: int
    weight: int = 1
    priority: int | None = None
    retry_ms: int = 0


def choose(
    tr: Transaction,
    keys: Keyspace,
    queue: str,
    control: QueueControl,
    want: int,
    *,
    slice_: int,
    first_door: int,
    now_ms: int,
) -> Chosen:
    """Up to ``want`` messages in fair order. Changes marks, doors and ring.

    ``slice_`` windows are left to rivals; ``first_door`` is the bucket of doors to begin with, a random one, so that of
    more newcomers than one claim can admit none is always the last.
    """
    return _Scheduler(tr, keys, queue, control, now_ms).run(want, slice_, first_door)


class _Scheduler:
    """One claim of one queue."""

    def __init__(self, tr: Transaction, keys: Keyspace, queue: str, control: QueueControl, now_ms: int) -> None:
        self._tr = tr
        self._keys = keys
        self._queue = queue
        self._control = control
        self._now_ms = now_ms
        self._rounds: dict[bytes, int] = {}
        self._paces: dict[tuple[bytes, str], int] = {}
        self._limits: dict[str, KeyLimits] = {}
        self._flights: dict[str, int] = {}
        self._rows: dict[tuple[str, bytes], list[KeyValue]] = {}
        self._exhausted: set[tuple[str, bytes]] = set()
        #: The next message of a sub-queue; only with ageing.
        self._heads: dict[tuple[str, bytes], bytes] = {}
        self._chosen: Chosen = []

    def run(self, want: int, slice_: int, first_door: int) -> Chosen:
        keys, queue = self._keys, self._queue
        begin, end = keys.doors(queue)
        middle = keys.doors_from(queue, first_door)
        doors, wrapped, freed, rounds, unkeyed, *rings = self._tr.get_ranges(
            [
                (middle, end, DOORS),
                (begin, middle, DOORS),
                (*keys.all_freed(queue), DOORS),
                (*keys.rounds(queue), 0),
                (*range_of(keys.ready(queue)), 1),
                *self._rings(want * (slice_ + 1)),
            ],
            snapshot=True,
        )
        self._rounds = {keys.round_rank(queue, key): int.from_bytes(value, "big") for key, value in rounds}
        turns = [Turn(*keys.split_ring(queue, key), value) for ring in rings for key, value in ring]
        turns += self._answer((doors + wrapped)[:DOORS], freed, unkeyed)
        self._look_at_heads(turns)
        self._serve(sorted(turns, key=self._order), want, slice_)
        return self._chosen

    def _rings(self, window: int) -> list[tuple[bytes, bytes, int]]:
        """Where the next turns are: at the head of the ring, or with ageing at that of each rank."""
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

    def _order(self, turn: Turn) -> tuple[Urgency, Turn]:
        """What turns are sorted by."""
        head = self._heads.get((turn.key, turn.items), b"")
        if self._control.ageing is None:
            return NOT_AGEING, turn
        return urgency(PRIORITIES[turn.rank], head, self._control.ageing, self._now_ms), turn

    # -- doors and bells -------------------------------------------------------------------------------------------

    def _answer(self, doors: list[KeyValue], freed: list[KeyValue], unkeyed: list[KeyValue]) -> list[Turn]:
        """Activate what can be; returns the new ring entries."""
        rung = [self._keys.split_door(key) for key, _ in doors]
        candidates = self._idle(rung, unkeyed) + self._parked([self._keys.split_freed(k) for k, _ in freed])
        self._load_limits([key for key, _ in candidates])
        turns = self._activate(candidates)
        for key, _ in [*doors, *freed]:
            self._tr.clear(key)
        return turns

    def _idle(self, rung: list[tuple[str, bytes]], unkeyed: list[KeyValue]) -> list[tuple[str, bytes]]:
        """Of the sub-queues whose doors rang, those without a mark. The ready range is its own door."""
        asked = rung + (self._unkeyed_ranks() if unkeyed else [])
        if not asked:
            return []
        marks = self._tr.get_many([self._keys.active(self._queue, *each) for each in asked])
        return [each for each, mark in zip(asked, marks, strict=True) if mark is None]

    def _unkeyed_ranks(self) -> list[tuple[str, bytes]]:
        """The ranks in which messages without a key wait."""
        ranks = [self._keys.rank(priority) for priority in range(URGENT + 1)]
        heads = self._tr.get_ranges(
            [(*range_of(self._keys.items(self._queue, "", rank)), 1) for rank in ranks], snapshot=True
        )
        return [("", rank) for rank, head in zip(ranks, heads, strict=True) if head]

    def _parked(self, freed: list[str]) -> list[tuple[str, bytes]]:
        """The parked sub-queues of keys whose bells rang."""
        found = []
        ranges = [(*self._keys.active_ranks(self._queue, key), 0) for key in freed]
        for key, marks in zip(freed, self._tr.get_ranges(ranges) if ranges else [], strict=True):
            found += [(key, self._keys.active_rank(self._queue, key, mark)) for mark, state in marks if state == PARKED]
        return found

    def _activate(self, candidates: list[tuple[str, bytes]]) -> list[Turn]:
        if not candidates:
            return []
        items = [range_of(self._keys.items(self._queue, *each)) for each in candidates]
        heads = self._tr.get_ranges([(*each, 1) for each in items], snapshot=True)
        self._load_paces([(rank, key) for key, rank in candidates])
        turns = []
        for (key, rank), whole, head in zip(candidates, items, heads, strict=True):
            turn = self._admit(key, rank, whole, head)
            if turn is not None:
                turns.append(turn)
        return turns

    def _admit(self, key: str, rank: bytes, whole: tuple[bytes, bytes], head: list[KeyValue]) -> Turn | None:
        mark = self._keys.active(self._queue, key, rank)
        if not head:
            # Nothing there any more; it stays so, or this transaction fails.
            self._tr.add_read_conflict_range(*whole)
            self._tr.clear(mark)
            return None
        allowance = self._allowance(key)
        if allowance.messages <= 0:
            self._park(key, rank, allowance)
            return None
        self._tr.set(mark, ACTIVE)
        return self._insert(key, rank, self._first_round(rank), _stamp_of(head[0]), allowance)

    def _first_round(self, rank: bytes) -> int:
        serving = self._rounds.get(rank, 0)
        return {"next": serving + 1, "current": serving, "first": 0}[self._control.newcomer]

    def _insert(self, key: str, items: bytes, round_: int, stamp: bytes, allowance: _Allowance) -> Turn:
        rank = items if allowance.priority is None else self._keys.rank(allowance.priority)
        turn = Turn(rank, self._paced(rank, key, round_), stamp, key, items)
        self._tr.set(self._entry(turn), items)
        return turn

    def _entry(self, turn: Turn) -> bytes:
        return self._keys.ring_entry(self._queue, turn.rank, turn.round, turn.stamp, turn.key)

    # -- two levels ------------------------------------------------------------------------------------------------

    def _load_paces(self, subqueues: list[tuple[bytes, str]]) -> None:
        asked = {(rank, _tenant(key)) for rank, key in subqueues if SEPARATOR in key} - self._paces.keys()
        wanted = sorted(asked)
        if wanted:
            values = self._tr.get_many([self._keys.pace(self._queue, *each) for each in wanted], snapshot=True)
            self._paces.update({each: int.from_bytes(v or b"", "big") for each, v in zip(wanted, values, strict=True)})

    def _paced(self, rank: bytes, key: str, round_: int) -> int:
        """The first round from ``round_`` on in which the key's tenant has no other turn yet."""
        if SEPARATOR not in key:
            return round_
        tenant = _tenant(key)
        round_ = max(round_, self._paces.get((rank, tenant), 0) + 1)
        self._paces[rank, tenant] = round_
        self._tr.byte_max(self._keys.pace(self._queue, rank, tenant), round_.to_bytes(8, "big"))
        return round_

    # -- service ---------------------------------------------------------------------------------------------------

    def _serve(self, turns: list[Turn], want: int, slice_: int) -> None:
        mine = turns[:want] if slice_ == 0 else turns[want * slice_ :][:want] or turns[-want:]
        self._load(mine, want)
        again = [self._order(turn) for turn in mine]
        while again and len(self._chosen) < want:
            _urgency, turn = heapq.heappop(again)
            following = self._serve_one(turn, want - len(self._chosen))
            # With rivals each has one turn per claim, if that fills the window: the order is approximate anyway.
            if following is not None and (slice_ == 0 or len(mine) < want):
                heapq.heappush(again, self._order(following))
        for rank, round_ in self._rounds.items():
            self._tr.byte_max(self._keys.round(self._queue, rank), round_.to_bytes(8, "big"))

    def _load(self, turns: list[Turn], want: int) -> None:
        """Read the messages of all turns at once: as many as each can have at most if all have some, and one more."""
        if not turns:
            return
        self._load_limits([turn.key for turn in turns])
        self._load_paces([(turn.rank, turn.key) for turn in turns])
        most = -(-want // len(turns)) + max(self._weight(turn.key) for turn in turns)
        self._fetch([(turn.key, turn.items) for turn in turns], most)

    def _fetch(self, subqueues: list[tuple[str, bytes]], most: int) -> None:
        ranges = [(*range_of(self._keys.items(self._queue, *each)), most) for each in subqueues]
        for each, rows in zip(subqueues, self._tr.get_ranges(ranges, snapshot=True), strict=True):
            self._rows[each] = rows
            if len(rows) < most:
                self._exhausted.add(each)

    def _serve_one(self, turn: Turn, room: int) -> Turn | None:
        """Serve a sub-queue; returns its next turn, None if it left the ring."""
        self._tr.add_read_conflict_key(self._entry(turn))
        self._tr.clear(self._entry(turn))
        allowance = self._allowance(turn.key)
        if allowance.messages <= 0:
            self._park(turn.key, turn.items, allowance)
            return None
        rows = self._waiting(turn, min(allowance.weight, room))
        most = min(allowance.weight, room, allowance.messages)
        taken, left = rows[:most], rows[most:]
        self._rows[turn.key, turn.items] = left
        self._chosen += taken
        self._note(turn.key, len(taken))
        self._rounds[turn.rank] = max(self._rounds.get(turn.rank, 0), turn.round)
        if not left:
            self._retire(turn)
            return None
        self._heads[turn.key, turn.items] = left[0][1]
        return self._insert(turn.key, turn.items, self._rounds[turn.rank] + 1, _stamp_of(left[0]), allowance)

    def _waiting(self, turn: Turn, most: int) -> list[KeyValue]:
        """The sub-queue's messages that are not chosen yet: at least one more than can be taken, or all."""
        each = turn.key, turn.items
        rows = self._rows[each]
        if len(rows) > most or each in self._exhausted:
            return rows
        chosen = sum(key.startswith(self._keys.items(self._queue, *each)) for key, _ in self._chosen)
        self._fetch([each], chosen + most + len(self._chosen) + 1)
        return self._rows[each][chosen:]

    def _retire(self, turn: Turn) -> None:
        """From active to idle."""
        if turn.key:  # the ready range is looked at by every claim, so it needs no guard
            self._tr.add_read_conflict_range(*range_of(self._keys.items(self._queue, turn.key, turn.items)))
        self._tr.clear(self._keys.active(self._queue, turn.key, turn.items))

    def _park(self, key: str, items: bytes, allowance: _Allowance) -> None:
        self._tr.set(self._keys.active(self._queue, key, items), PARKED)
        self._tr.add_read_conflict_key(self._keys.flight(self._queue, key))
        self._tr.add_read_conflict_key(self._keys.control(self._queue))
        if allowance.retry_ms:
            self._tr.set(self._keys.thaw(allowance.retry_ms, self._queue, key), b"")
            self._tr.set_versionstamped_value(self._keys.alarm)

    # -- limits ----------------------------------------------------------------------------------------------------

    def _load_limits(self, wanted: list[str]) -> None:
        """Only where a key of the queue has limits; else nobody pays for them."""
        asked = sorted(set(wanted) - self._limits.keys())
        if not asked or not self._limited:
            return
        values = self._tr.get_many([self._keys.limits(self._queue, key) for key in asked])
        for key, value in zip(asked, values, strict=True):
            self._limits[key] = self._control.every_key if value is None else limits_of(value)

    @property
    def _limited(self) -> bool:
        return self._control.limited or self._control.every_key != KeyLimits()

    def _weight(self, key: str) -> int:
        return self._limits[key].weight if key in self._limits else 1

    def _allowance(self, key: str) -> _Allowance:
        """What the key may have now."""
        limits = self._limits.get(key)
        if limits is None:
            return _Allowance(messages=2**31)
        if limits.paused:
            return _Allowance(0)
        free, retry_ms = 2**31, 0
        if limits.max_in_flight is not None:
            free = limits.max_in_flight - self._in_flight(key)
        if limits.rate is not None:
            tokens = self._tokens(key, limits)
            free = min(free, int(tokens))
            retry_ms = self._now_ms + max(1, int((1 - tokens) / limits.rate * 1000) + 1) if tokens < 1 else 0
        return _Allowance(free, limits.weight, limits.priority, retry_ms)

    def _in_flight(self, key: str) -> int:
        if key not in self._flights:
            self._exclude_rivals(key)
            value = self._tr.get(self._keys.flight(self._queue, key), snapshot=True)
            self._flights[key] = int.from_bytes(value or b"", "little", signed=True)
        return self._flights[key]

    def _tokens(self, key: str, limits: KeyLimits) -> float:
        assert limits.rate is not None
        stored = self._exclude_rivals(key)
        if stored is None or len(stored) != _BUCKET.size:
            return float(limits.burst)
        tokens: float
        filled_ms: int
        tokens, filled_ms = _BUCKET.unpack(stored)
        refilled: float = max(0, self._now_ms - filled_ms) / 1000 * limits.rate
        return min(float(limits.burst), tokens + refilled)

    def _exclude_rivals(self, key: str) -> bytes | None:
        """Claims of one limited key exclude each other: each reads its bucket serializably and sets it."""
        bucket = self._keys.bucket(self._queue, key)
        stored = self._tr.get(bucket)
        self._tr.set(bucket, stored or b"")
        return stored

    def _note(self, key: str, taken: int) -> None:
        limits = self._limits.get(key)
        if limits is None or not taken:
            return
        if limits.max_in_flight is not None:
            self._flights[key] += taken
        if limits.rate is not None:
            left = self._tokens(key, limits) - taken
            self._tr.set(self._keys.bucket(self._queue, key), _BUCKET.pack(left, self._now_ms))


def _stamp_of(row: KeyValue) -> bytes:
    """Every message's key ends with its stamp."""
    return row[0][-STAMP_LENGTH:]


def _tenant(key: str) -> str:
    return key.split(SEPARATOR, 1)[0]
