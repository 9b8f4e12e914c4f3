"""Browse: look at single messages where they stand, and delete one there.

Snapshot reads, but for the deletion: looking never conflicts with work. Payloads come whole, as a claim would give
them; of a message that is unreadable, or whose payload is gone, the bytes of its record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kombu_fdb.engine.messages.claim import payload_of
from kombu_fdb.engine.messages.deadletter import drop
from kombu_fdb.engine.messages.settle import end_of_lease
from kombu_fdb.engine.scheduling import ageing, fair, turns
from kombu_fdb.engine.stored.room import Room
from kombu_fdb.engine.stored.tally import DELAYED, LEASED, READY, Tally
from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import (
    Record,
    control_of,
    decode_lease,
    decode_record,
    decode_round,
    outline_of,
    size_of,
)
from kombu_fdb.keyspace.layout import Keyspace, Range, priority_of, readable, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Peeked, RoundSnapshot
from kombu_fdb.store.protocol import KeyValue, Transaction, Watch

__all__ = ["delayed", "delete", "find_part", "look", "owner_of", "peek", "ranges", "remove", "snapshot", "taken"]

#: Messages looked at in one transaction.
MESSAGES_PER_TRANSACTION = 1_000


def peek(
    tr: Transaction, keys: Keyspace, queue: str, limit: int, *, key: str | None, reverse: bool, now_ms: int
) -> list[Peeked]:
    """Up to ``limit`` ready messages, in the order in which a lone consumer would get them.

    ``key``: of this key only, whether it is limited or not. ``reverse``: the last ones first, by a range read from the
    end; in a queue with keys only together with ``key``. Raises ``QueueError`` otherwise.
    """
    fair_queue = key is None and tr.get(keys.fair(queue), snapshot=True) is not None
    control = control_of(tr.get(keys.control(queue), snapshot=True))
    if not fair_queue and key is None and not reverse and control.ageing is not None:
        rows = ageing.oldest_first(tr, keys, queue, control.ageing, limit, now_ms)
    elif not fair_queue:
        whole = range_of(keys.items(queue, key or "", b""))
        rows = tr.get_range(*whole, limit=limit, reverse=reverse, snapshot=True)
    elif reverse:
        raise QueueError("a queue with keys has no last message", queue=queue, fix="Name a key.")
    else:
        # A claim that is never committed.
        room = Room(math.inf, math.inf)
        rows = fair.choose(DryRun(tr), keys, queue, control, limit, slice_=0, first_door=0, now_ms=now_ms, room=room)
    return [look(tr, keys, queue, row) for row in rows]


def delayed(tr: Transaction, keys: Keyspace, queue: str, limit: int) -> list[Peeked]:
    """Up to ``limit`` delayed messages, those that are due first first."""
    rows = tr.get_range(*range_of(keys.delayed(queue)), limit=limit, snapshot=True)
    return [look(tr, keys, queue, row) for row in rows]


def look(tr: Transaction, keys: Keyspace, queue: str, row: KeyValue) -> Peeked:
    """A stored row as what a person wants to see."""
    key, value = row
    state, owner = _state(keys, queue, key)
    if state == LEASED:
        _queue, key, value = decode_lease(value)  # found by a reader that could
    try:
        record = decode_record(value)
        payload = payload_of(tr, keys, record)
    except FormatError:
        record, payload = Record(b"", 0, 0, 0, 0, len(value), value, ()), value
    return Peeked(
        record.message_id,
        queue,
        state,
        payload,
        record.key,
        record.redeliveries,
        record.published_ms,
        record.expires_ms,
        record.deaths,
        owner,
        record.task_id,
        record.priority or priority_of(key),
        _due_ms(keys, queue, key) if state == DELAYED else 0,
    )


def _due_ms(keys: Keyspace, queue: str, key: bytes) -> int:
    """0 if it can't be read."""
    try:
        return keys.split_delayed(queue, key)[0]
    except FormatError:
        return 0


def _state(keys: Keyspace, queue: str, key: bytes) -> tuple[str, bytes]:
    """Where a message's key stands, and whose session's a leased one is."""
    if key.startswith(keys.delayed(queue)):
        return DELAYED, b""
    begin, end = keys.all_leases
    if begin <= key < end:
        return LEASED, owner_of(keys, key)
    return READY, b""


def owner_of(keys: Keyspace, lease: bytes) -> bytes:
    """Whose lease it is, by its key; b"" if that can't be read."""
    try:
        return bytes(keys.split(lease, bytes, int)[0])
    except FormatError:
        return b""


# -- the round ---------------------------------------------------------------------------------------------------------


def snapshot(tr: Transaction, keys: Keyspace, queue: str, limit: int) -> RoundSnapshot:
    """What queue-by's ``deref`` shows: the rest of the round being served, and each key's messages behind it.

    Of ``limit`` messages without a key and as many with one.
    """
    ring, rounds, keyed, unkeyed = tr.get_ranges(
        [
            (*range_of(keys.ring(queue)), 0),
            (*keys.rounds(queue), 0),
            (*range_of(keys.keyed(queue)), limit),
            (*range_of(keys.ready(queue)), limit),
        ],
        snapshot=True,
    )
    serving = {keys.round_rank(queue, key): decode_round(value) for key, value in rounds}
    waiting = _by_subqueue(keys, queue, unkeyed + keyed)
    heads = []
    for (rank, round_, _stamp, key), items in readable(ring, partial(keys.split_ring, queue)):
        messages = waiting.get((key, items))
        if messages and round_ <= serving.get(rank, 0):
            heads.append(messages.pop(0))
    queues: dict[str, list[Peeked]] = {}
    for (key, _rank), rows in sorted(waiting.items()):
        if rows:
            queues.setdefault(key, []).extend([look(tr, keys, queue, row) for row in rows])
    return RoundSnapshot([look(tr, keys, queue, row) for row in heads], queues)


def _by_subqueue(keys: Keyspace, queue: str, rows: Sequence[KeyValue]) -> dict[tuple[str, bytes], list[KeyValue]]:
    found: dict[tuple[str, bytes], list[KeyValue]] = {}
    for (key, subqueue), value in readable(rows, lambda key: (key, split_place(keys.place(queue, key)))):
        found.setdefault(subqueue, []).append((key, value))
    return found


# -- one message -------------------------------------------------------------------------------------------------------


def taken(tr: Transaction, keys: Keyspace, queue: str) -> list[Peeked]:
    """The queue's messages under leases."""
    rows = tr.get_range(*keys.all_leases, snapshot=True)
    return [look(tr, keys, queue, row) for row in rows if _is_of(queue, row[1])]


def ranges(keys: Keyspace, queue: str) -> list[Range]:
    """Where a message of the queue may be, in the direction in which messages move."""
    prefixes = (keys.delayed(queue), keys.ready(queue), keys.keyed(queue))
    return [*map(range_of, prefixes), keys.all_leases]


def find_part(
    tr: Transaction, keys: Keyspace, queue: str, message_id: bytes, begin: bytes, end: bytes
) -> tuple[KeyValue | None, bytes]:
    """Look through :data:`MESSAGES_PER_TRANSACTION` rows. Returns the message's, if found, and where to go on."""
    rows = tr.get_range(begin, end, limit=MESSAGES_PER_TRANSACTION, snapshot=True)
    leases = keys.all_leases[0] <= begin < keys.all_leases[1]
    for key, value in rows:
        if message_id in value and (not leases or _is_of(queue, value)):
            record = decode_lease(value)[2] if leases else value
            if _id_of(record) == message_id:
                return (key, value), end
    return None, rows[-1][0] + b"\x00" if len(rows) == MESSAGES_PER_TRANSACTION else end


def delete(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: bytes, value: bytes) -> bool:
    """Delete a message that is still as it was seen. False if it has moved."""
    if tr.get(key) != value:
        return False
    remove(tr, keys, tally, queue, key, value)
    return True


def remove(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: bytes, value: bytes) -> None:
    """Delete a message that this transaction has read, serializably."""
    tr.clear(key)
    state, _owner = _state(keys, queue, key)
    place, record = key, value
    if state == LEASED:
        _queue, place, record = decode_lease(value)
        end_of_lease(tally, queue, place)
    elif state == DELAYED:
        tally.change(queue, DELAYED, -1)
    else:
        tally.unready(queue, size_of(value))
    if key.startswith(keys.keyed(queue)):
        fair_key = keys.key_at(queue, key)
        tally.went(queue, fair_key)
        turns.leave_places(tr, keys, queue, [key])
    with suppress(FormatError):  # then there is nothing else of it
        drop(tr, keys, outline_of(record), place)


def _is_of(queue: str, lease: bytes) -> bool:
    try:
        return decode_lease(lease)[0] == queue
    except FormatError:
        return False


def _id_of(record: bytes) -> bytes:
    try:
        return outline_of(record).message_id
    except FormatError:
        return b""


# -- what would be -----------------------------------------------------------------------------------------------------


class DryRun:
    """A transaction that reads what is there, and keeps its writes to itself: to see what a verb would do."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner
        self._own: dict[bytes, bytes] = {}

    @property
    def read_only(self) -> bool:
        return True

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        del snapshot
        return self._own[key] if key in self._own else self._inner.get(key, snapshot=True)

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        del snapshot
        return self._inner.get_many(keys, snapshot=True)

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        del snapshot
        return self._inner.get_range(begin, end, limit=limit, reverse=reverse, snapshot=True)

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        del snapshot
        return self._inner.get_ranges(ranges, snapshot=True)

    def set(self, key: bytes, value: bytes) -> None:
        self._own[key] = value

    def clear(self, key: bytes) -> None:
        """The queue's verbs never read again what they cleared."""

    def clear_range(self, begin: bytes, end: bytes) -> None: ...
    def add(self, key: bytes, delta: int, *, width: int = 8) -> None: ...
    def byte_max(self, key: bytes, value: bytes) -> None: ...
    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None: ...
    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None: ...
    def add_read_conflict_key(self, key: bytes) -> None: ...
    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None: ...

    def watch(self, key: bytes) -> Watch:
        raise NotImplementedError

    def commit(self) -> None: ...
    def cancel(self) -> None: ...
