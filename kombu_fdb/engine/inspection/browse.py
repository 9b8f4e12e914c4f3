"""Browse: look at single messages where they stand, and delete one there.

Snapshot reads, but for the deletion: looking never conflicts with work. Payloads come whole, as a claim would give
them; for a message that is unreadable, or whose payload is gone, the record's bytes are shown instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from kombu_fdb.engine.messages import message
from kombu_fdb.engine.messages.message import Message, end_lease, read_all, take_out
from kombu_fdb.engine.scheduling import fair
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.stored.batches import Room
from kombu_fdb.engine.stored.work import DELAYED, LEASED, READY, Work
from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import Record, control_of, decode_lease, decode_round, outline_of
from kombu_fdb.keyspace.layout import EVERY_RANK, Keyspace, Range, priority_of, range_of, read_or, readable, split_place
from kombu_fdb.model import NO_SESSION, Peeked, Rank, RoundSnapshot, SessionId
from kombu_fdb.store.protocol import KeyValue, Transaction, Watch

#: Messages looked at in one transaction.
MESSAGES_PER_TRANSACTION = 1_000


def peek(work: Work, queue: str, limit: int, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
    """Up to ``limit`` ready messages, in the order in which a lone consumer would get them.

    ``key``: only messages of this key, whether it is limited or not. ``reverse``: the last ones first, by a range read
    from the end; in a queue with keys this needs ``key``, and raises ``QueueError`` without it.
    """
    fair_queue = key is None and work.tr.get(work.keys.fair(queue), snapshot=True) is not None
    control = control_of(work.tr.get(work.keys.control(queue), snapshot=True))
    if not fair_queue and key is None and not reverse and control.ageing is not None:
        rows = fair.oldest_first(work, queue, control.ageing, limit)
    elif not fair_queue:
        whole = range_of(work.keys.items(queue, key or "", EVERY_RANK))
        rows = work.tr.get_range(*whole, limit=limit, reverse=reverse, snapshot=True)
    elif reverse:
        raise QueueError("a queue with keys has no last message", queue=queue, fix="Name a key.")
    else:
        # A claim that is never committed.
        window = Window(NO_SESSION, 0, limit, room=Room(math.inf, math.inf))
        rows = fair.choose(work._replace(tr=DryRun(work.tr)), queue, QueueState(True, control), limit, window)
    return look_all(work, [(queue, row) for row in rows])


def delayed(work: Work, queue: str, limit: int) -> list[Peeked]:
    """Up to ``limit`` delayed messages, the next due first."""
    rows = work.tr.get_range(*range_of(work.keys.delayed(queue)), limit=limit, snapshot=True)
    return look_all(work, [(queue, row) for row in rows])


def look(work: Work, queue: str, row: KeyValue) -> Peeked:
    """A stored row as a person wants to see it."""
    return look_all(work, [(queue, row)])[0]


def look_all(work: Work, rows: Sequence[tuple[str, KeyValue]]) -> list[Peeked]:
    """The same for several rows of these queues. All payloads are read in one round trip."""
    values = [record_at(work.keys, row) for _, row in rows]
    return [
        show(work.keys, *each, Record.unreadable(value) if isinstance(record, FormatError) else record)
        for each, value, record in zip(rows, values, read_all(work, values), strict=True)
    ]


def record_at(keys: Keyspace, row: KeyValue) -> bytes:
    """The record of a row. If the row is a lease, it must be readable."""
    return decode_lease(row[1])[2] if _is_lease(keys, row[0]) else row[1]


def show(keys: Keyspace, queue: str, row: KeyValue, record: Record) -> Peeked:
    """The same, from the record that was read."""
    key, value = row
    state, owner = _state(keys, queue, key)
    place: bytes = decode_lease(value)[1] if state == LEASED else key
    return Peeked(
        message_id=record.message_id,
        queue=queue,
        state=state,
        payload=record.payload,
        key=record.key,
        redeliveries=record.redeliveries,
        published_ms=record.published_ms,
        expires_ms=record.expires_ms,
        deaths=record.deaths,
        owner=owner,
        task_id=record.task_id,
        priority=record.priority or priority_of(place),
        due_ms=read_or((0, b""), keys.split_delayed, queue, key)[0] if state == DELAYED else 0,
    )


def _state(keys: Keyspace, queue: str, key: bytes) -> tuple[str, SessionId]:
    """The state that a message's key stands for and, if it is leased, the session that holds it."""
    if key.startswith(keys.delayed(queue)):
        return DELAYED, NO_SESSION
    if not _is_lease(keys, key):
        return READY, NO_SESSION
    return LEASED, SessionId(read_or((b"", 0), keys.split, key, bytes, int)[0])


def _is_lease(keys: Keyspace, key: bytes) -> bool:
    begin, end = keys.all_leases
    return begin <= key < end


# -- the round ---------------------------------------------------------------------------------------------------------


def snapshot(work: Work, queue: str, limit: int) -> RoundSnapshot:
    """What queue-by's ``deref`` shows: the rest of the round being served, and each key's messages behind it.

    Up to ``limit`` messages without a key, and as many with one.
    """
    ring, rounds, keyed, unkeyed = work.tr.get_ranges(
        [
            (*range_of(work.keys.ring(queue)), 0),
            (*work.keys.rounds(queue), 0),
            (*range_of(work.keys.keyed(queue)), limit),
            (*range_of(work.keys.ready(queue)), limit),
        ],
        snapshot=True,
    )
    serving = {work.keys.round_rank(queue, key): decode_round(value) for key, value in rounds}
    waiting = _by_subqueue(work.keys, queue, unkeyed + keyed)
    heads: list[KeyValue] = []
    for (rank, round_, _stamp, key), items in readable(ring, partial(work.keys.split_ring, queue)):
        messages = waiting.get((key, Rank(items)))
        if messages and round_ <= serving.get(rank, 0):
            heads.append(messages.pop(0))
    behind = [(key, row) for (key, _rank), rows in sorted(waiting.items()) for row in rows]
    seen = look_all(work, [(queue, row) for row in [*heads, *(row for _, row in behind)]])
    queues: dict[str, list[Peeked]] = {}
    for (key, _), each in zip(behind, seen[len(heads) :], strict=True):
        queues.setdefault(key, []).append(each)
    return RoundSnapshot(seen[: len(heads)], queues)


def _by_subqueue(keys: Keyspace, queue: str, rows: Sequence[KeyValue]) -> dict[tuple[str, Rank], list[KeyValue]]:
    found: dict[tuple[str, Rank], list[KeyValue]] = {}
    for (key, subqueue), value in readable(rows, lambda key: (key, split_place(keys.place(queue, key)))):
        found.setdefault(subqueue, []).append((key, value))
    return found


# -- one message -------------------------------------------------------------------------------------------------------


def is_of(queue: str, lease: bytes) -> bool:
    """Whether it is the lease of a message of the queue."""
    return read_or((None,), decode_lease, lease)[0] == queue


def taken(work: Work, queue: str) -> list[Peeked]:
    """The queue's messages under leases."""
    rows = work.tr.get_range(*work.keys.all_leases, snapshot=True)
    return look_all(work, [(queue, row) for row in rows if is_of(queue, row[1])])


def ranges(keys: Keyspace, queue: str) -> list[Range]:
    """Where a message of the queue may be, in the direction in which messages move."""
    prefixes = (keys.delayed(queue), keys.ready(queue), keys.keyed(queue))
    return [*map(range_of, prefixes), keys.all_leases]


def find_part(work: Work, queue: str, message_id: bytes, whole: Range) -> tuple[KeyValue | None, bytes]:
    """Look through :data:`MESSAGES_PER_TRANSACTION` rows. Returns the message's, if found, and where to go on."""
    begin, end = whole
    rows = work.tr.get_range(begin, end, limit=MESSAGES_PER_TRANSACTION, snapshot=True)
    leases = work.keys.all_leases[0] <= begin < work.keys.all_leases[1]
    for key, value in rows:
        if message_id in value and (not leases or is_of(queue, value)):
            record = read_or(None, outline_of, decode_lease(value)[2] if leases else value)
            if (b"" if record is None else record.message_id) == message_id:
                return (key, value), end
    return None, rows[-1][0] + b"\x00" if len(rows) == MESSAGES_PER_TRANSACTION else end


def delete(work: Work, queue: str, row: KeyValue) -> bool:
    """Delete a message that is still as it was seen. False if it has moved."""
    if work.tr.get(row[0]) != row[1]:
        return False
    remove(work, queue, row)
    return True


def remove(work: Work, queue: str, row: KeyValue) -> None:
    """Delete a message that this transaction has read, serializably."""
    key, value = row
    if _is_lease(work.keys, key):
        work.tr.clear(key)
        held = Message(*decode_lease(value))
        end_lease(work, queue, held.place)
        message.delete(work, held)
    else:
        take_out(work, queue, [row])
        message.delete(work, Message(queue, key, value))


# -- what would be -----------------------------------------------------------------------------------------------------


class DryRun:
    """A transaction that reads what is there, and keeps its writes to itself: to see what a verb would do."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner
        #: What was set, and what was cleared: None.
        self._own: dict[bytes, bytes | None] = {}

    @property
    def read_only(self) -> bool:
        return True

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        del snapshot
        return self._own[key] if key in self._own else self._inner.get(key, snapshot=True)

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        del snapshot
        stored = self._inner.get_many(keys, snapshot=True)
        return [self._own.get(key, value) for key, value in zip(keys, stored, strict=True)]

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        del snapshot
        own = self._own_in(sorted(self._own), begin, end)
        rows = self._inner.get_range(begin, end, limit=limit and limit + len(own), reverse=reverse, snapshot=True)
        return self._seen(rows, own, reverse=reverse)[: limit or None]

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        del snapshot
        keys = sorted(self._own)
        own = [self._own_in(keys, begin, end) for begin, end, _ in ranges]
        both = [(*whole, each) for whole, each in zip(ranges, own, strict=True)]
        asked = [(begin, end, limit and limit + len(each)) for begin, end, limit, each in both]
        found = zip(self._inner.get_ranges(asked, snapshot=True), both, strict=True)
        return [self._seen(rows, each)[: limit or None] for rows, (_, _, limit, each) in found]

    @staticmethod
    def _own_in(keys: Sequence[bytes], begin: bytes, end: bytes) -> Sequence[bytes]:
        return keys[bisect_left(keys, begin) : bisect_left(keys, end)]

    def _seen(self, rows: list[KeyValue], own: Sequence[bytes], *, reverse: bool = False) -> list[KeyValue]:
        """The rows, with this transaction's writes to these keys applied. As many extra rows were read as may go."""
        if not own:
            return rows
        seen = dict(rows) | {key: self._own[key] for key in own}
        return sorted(((key, value) for key, value in seen.items() if value is not None), reverse=reverse)

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        return self.get_many(keys, snapshot=snapshot), self.get_ranges(ranges, snapshot=snapshot)

    def set(self, key: bytes, value: bytes) -> None:
        self._own[key] = value

    def clear(self, key: bytes) -> None:
        self._own[key] = None

    def clear_run(self, keys: Sequence[bytes]) -> None:
        self._own.update(dict.fromkeys(keys))

    def clear_range(self, begin: bytes, end: bytes) -> None:
        """Ignored: the queue's verbs never read again what they cleared as a range."""

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None: ...
    def byte_max(self, key: bytes, value: bytes) -> None: ...
    def fill(self, *, moving: bool = False) -> None: ...
    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None: ...
    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None: ...
    def add_read_conflict_key(self, key: bytes) -> None: ...
    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None: ...

    def watch(self, key: bytes) -> Watch:
        raise NotImplementedError

    def commit(self) -> None: ...
    def cancel(self) -> None: ...
