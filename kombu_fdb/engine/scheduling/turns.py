"""Turns of tenants: of each tenant's keys, ``tenant/user``, one has a turn in each round.

Model. A tenant's keys stand in the ring like others, but in rounds of their own: a key that enters it goes as many
rounds behind the next one as the tenant has turns in the ring already (stride scheduling at insertion; Waldspurger and
Weihl 1995). ``("turns", queue, rank, tenant)`` counts them: a turn that comes into the ring, or leaves it, for whatever
reason, is counted in the transaction that does it. So a tenant waits for the turns it has, never for those it had.

The mark of such a key names its turn (``A`` and what stands behind the ring's prefix). By the mark, a transaction that
removes a key's last message without a claim, pauses the key, or changes its priority finds the turn and takes it out
too: else it would count as one of the tenant's until its round comes. Turns of stores that were written before there
were such marks are served, and not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_count
from kombu_fdb.keyspace.layout import Keyspace, range_of, readable, split_place
from kombu_fdb.model import Rank, Stamp
from kombu_fdb.store.protocol import KeyValue

#: Marks. Behind the first one stands the turn of a tenant's key.
ACTIVE = b"A"
PARKED = b"P"
SEPARATOR = "/"


class Turn(NamedTuple):
    """A ring entry; their order is the order of service. ``items``: the rank of the messages, packed."""

    rank: Rank
    round: int
    stamp: Stamp
    key: str
    items: Rank


def tenant_of(key: str) -> str | None:
    """None if the key has no tenant."""
    tenant, separator, _ = key.partition(SEPARATOR)
    return tenant if separator else None


def rank_of(items: Rank, priority: int | None) -> Rank:
    """Where the turns of a sub-queue are: at its messages' rank, or at that of the key's own priority."""
    return items if priority is None else Keyspace.rank(priority)


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
        """Read, at snapshot, the numbers for keys of a rank, and the marks of turns; nothing where no key has a tenant.

        A turn's mark changes with its entry in the ring only, on which the claim that serves it conflicts.
        """
        named = {(rank, tenant) for rank, key in subqueues if (tenant := tenant_of(key)) is not None}
        wanted = sorted(named - self._turns.keys())
        marked = [turn for turn in turns if tenant_of(turn.key) is not None]
        if not wanted and not marked:
            return
        rows = [self._keys.turns(self._queue, *each) for each in wanted]
        marks = [self._keys.active(self._queue, turn.key, turn.items) for turn in marked]
        values = self._tr.get_many(rows + marks, snapshot=True)
        self._turns.update({each: _number(value) for each, value in zip(wanted, values, strict=False)})
        named_by = zip(marked, values[len(rows) :], strict=True)
        self._counted.update(turn for turn, mark in named_by if mark == self.mark(turn))

    def round(self, rank: Rank, key: str, first: int) -> int:
        """The first round from ``first`` on in which the key's tenant has no other turn."""
        tenant = tenant_of(key)
        return first if tenant is None else first + max(0, self._turns.get((rank, tenant), 0))

    def mark(self, turn: Turn) -> bytes:
        """What the mark of an active sub-queue says."""
        if tenant_of(turn.key) is None:
            return ACTIVE
        return ACTIVE + self._keys.ring_suffix(turn.rank, turn.round, turn.stamp, turn.key)

    def entered(self, turn: Turn) -> None:
        """The turn stands in the ring now, and its mark names it."""
        if tenant_of(turn.key) is not None:
            self._counted.add(turn)
            self._change(turn.rank, turn.key, 1)

    def left(self, turn: Turn) -> None:
        """The turn has left the ring."""
        if turn in self._counted:
            self._counted.remove(turn)
            self._change(turn.rank, turn.key, -1)

    def _change(self, rank: Rank, key: str, by: int) -> None:
        each = rank, tenant_of(key) or ""
        self._turns[each] = self._turns.get(each, 0) + by
        self._changes[each] += by

    def write(self) -> None:
        """One atomic add for each tenant whose number has changed."""
        for each, by in self._changes.items():
            if by:
                self._tr.add(self._keys.turns(self._queue, *each), by)


def leave_places(work: Work, queue: str, messages: Iterable[bytes]) -> None:
    """As :func:`leave`, by the keys of the messages' rows; those without a fairness key have no turn to leave."""
    keys = work.keys
    rows = [(each, b"") for each in messages if each.startswith(keys.keyed(queue))]
    leave(work, queue, [subqueue for subqueue, _ in readable(rows, lambda key: split_place(keys.place(queue, key)))])


def leave(work: Work, queue: str, subqueues: Iterable[tuple[str, Rank]]) -> None:
    """Messages of these sub-queues were removed: those of tenants leave the ring if no message is left.

    Reads nothing where no key has a tenant. Conflicts with a message that comes to such a key, and with a claim that
    serves it. In this transaction no message has been stored there.
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
    """As :func:`pause`, for sub-queues by the rows of their marks, which may have been read at snapshot."""
    for row, mark in marks:
        if (entry := _entry_of(work.keys, queue, mark)) is not None:
            work.tr.add_read_conflict_key(row)
            work.tr.set(row, PARKED)
            _take_out(work, queue, entry)


def take_out(work: Work, queue: str, turns: Sequence[Turn]) -> None:
    """Take these turns, which may have been read at snapshot, out of the ring; their sub-queues are parked.

    The caller rings the keys' bells. Conflicts with a claim that serves one of them.
    """
    rows = [work.keys.active(queue, turn.key, turn.items) for turn in turns]
    for turn, row, mark in zip(turns, rows, work.tr.get_many(rows, snapshot=True) if rows else [], strict=True):
        entry = _ring_entry(work.keys, queue, turn)
        if _entry_of(work.keys, queue, mark) == entry:
            pause_marks(work, queue, [(row, mark or b"")])
            continue
        work.tr.add_read_conflict_key(entry)
        work.tr.clear(entry)
        if mark is not None and mark.startswith(ACTIVE):
            work.tr.set(row, PARKED)


def _ring_entry(keys: Keyspace, queue: str, turn: Turn) -> bytes:
    return keys.ring_entry(queue, turn.rank, turn.round, turn.stamp, turn.key)


def _entry_of(keys: Keyspace, queue: str, mark: bytes | None) -> bytes | None:
    """The entry in the ring that a mark names; None for any other mark."""
    if mark is None or len(mark) <= len(ACTIVE) or not mark.startswith(ACTIVE):
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


def _number(value: bytes | None) -> int:
    return decode_count(value)
