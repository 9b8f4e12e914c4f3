"""Browse: read messages in their places, page by page or by task.

All reads are at snapshot, except for :mod:`~kombu_fdb.engine.edit`: browsing never conflicts with work. Payloads are
complete, as a claim would return them; an unreadable message, or one whose payload is gone, shows the bytes of its
record instead.

Pages: a queue's messages in parts whose cost does not depend on what else is there. A page begins after a *position*,
the part of a message's key after the prefix of its queue and state, so the millionth page costs as much as the first.
Positions are opaque to callers and safe to accept from any client: an invented one leads to another place of the same
queue, or to nothing. A message keeps its position until it moves. Each page shows the messages as they are when it is
read.

A task's messages are found by the index (``messages/message.py``), which reads as many rows as the task has messages,
whatever else is in the store.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from kombu_fdb.engine.messages.message import open_records, read_all
from kombu_fdb.engine.scheduling import fair
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import OVER_MS, Message, Record, control_of, decode_round
from kombu_fdb.keyspace.layout import (
    STAMP_BYTES,
    Keyspace,
    Range,
    priority_of,
    range_of,
    read_or,
    readable,
    split_place,
)
from kombu_fdb.model import (
    NO_PRIORITY,
    NO_SESSION,
    Listed,
    Page,
    Peeked,
    Place,
    Rank,
    RoundSnapshot,
    SessionId,
    Stamp,
    State,
    View,
)
from kombu_fdb.store.protocol import KeyValue, Transaction, Watch

#: How many messages are looked at in one transaction.
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
        whole = work.keys.all_items(queue, key or "")
        rows = work.tr.get_range(*whole, limit=limit, reverse=reverse, snapshot=True)
    elif reverse:
        raise QueueError("a queue with keys has no last message", queue=queue, fix="Name a key.")
    else:
        # A claim that is never committed.
        window = Window(NO_SESSION, 0, limit, most_record_bytes=math.inf, most_payload_bytes=math.inf)
        rows = fair.choose(work._replace(tr=DryRun(work.tr)), queue, QueueState(True, control), limit, window)
    return look_all(work, [(queue, row) for row in rows])


def delayed(work: Work, queue: str, limit: int) -> list[Peeked]:
    """Up to ``limit`` delayed messages, the next due first."""
    rows = work.tr.get_range(*range_of(work.keys.delayed(queue)), limit=limit, snapshot=True)
    return look_all(work, [(queue, row) for row in rows])


def look(work: Work, queue: str, row: KeyValue) -> Peeked:
    """A stored row, decoded for people to read."""
    return look_all(work, [(queue, row)])[0]


def look_all(work: Work, rows: Sequence[tuple[str, KeyValue]]) -> list[Peeked]:
    """:func:`look` for several rows of these queues. All payloads are read in one round trip."""
    values = [record_at(work.keys, row) for _, row in rows]
    return [
        show(work.keys, *each, Record.unreadable(value) if isinstance(record, FormatError) else record)
        for each, value, record in zip(rows, values, read_all(work, values), strict=True)
    ]


def record_at(keys: Keyspace, row: KeyValue) -> bytes:
    """The record of a row. Raises ``FormatError`` for an unreadable lease."""
    return Message.of_lease(row[1]).value if is_lease(keys, row[0]) else row[1]


def show(keys: Keyspace, queue: str, row: KeyValue, record: Record) -> Peeked:
    """:func:`look` for a record that was read."""
    key, value = row
    state, owner = _state(keys, queue, key)
    place: bytes = Message.of_lease(value).place if state == "leased" else key
    due_ms: int = read_or((0, b""), keys.split_delayed, queue, key)[0] if state == "delayed" else 0
    return Peeked(
        message_id=record.message_id,
        queue=queue,
        state=state,
        payload=record.payload,
        key=record.key,
        redeliveries=record.redeliveries,
        published_ms=record.published_ms,
        expires_ms=(due_ms or record.published_ms) if record.expires_ms == OVER_MS else record.expires_ms,
        deaths=record.deaths,
        owner=owner,
        task_id=record.task_id,
        priority=record.priority or priority_of(place),
        due_ms=due_ms,
    )


def _state(keys: Keyspace, queue: str, key: bytes) -> tuple[State, SessionId]:
    """The state that a message's key shows and, if it is leased, the session that holds it."""
    if key.startswith(keys.delayed(queue)):
        return "delayed", NO_SESSION
    if not is_lease(keys, key):
        return "ready", NO_SESSION
    return "leased", SessionId(read_or((b"", 0), keys.split, key, bytes, int)[0])


def is_lease(keys: Keyspace, key: bytes) -> bool:
    begin, end = keys.all_leases
    return begin <= key < end


# -- the round ---------------------------------------------------------------------------------------------------------


def snapshot(work: Work, queue: str, limit: int) -> RoundSnapshot:
    """As queue-by's ``deref``: the rest of the round being served, and each key's messages after it.

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
    """Whether the lease is on a message of the queue."""
    return read_or((None,), Message.of_lease, lease)[0] == queue


def taken(work: Work, queue: str) -> list[Peeked]:
    """The queue's leased messages."""
    rows = work.tr.get_range(*work.keys.all_leases, snapshot=True)
    return look_all(work, [(queue, row) for row in rows if is_of(queue, row[1])])


def ranges(keys: Keyspace, queue: str) -> list[Range]:
    """Where a message of the queue may be, in the order in which it moves through these ranges."""
    prefixes = (keys.delayed(queue), keys.ready(queue), keys.keyed(queue))
    return [*map(range_of, prefixes), keys.all_leases]


def find_part(work: Work, queue: str, message_id: bytes, whole: Range) -> tuple[KeyValue | None, bytes]:
    """Look through :data:`MESSAGES_PER_TRANSACTION` rows. Returns the message's row or None, and where to continue."""
    begin, end = whole
    rows = work.tr.get_range(begin, end, limit=MESSAGES_PER_TRANSACTION, snapshot=True)
    leases = work.keys.all_leases[0] <= begin < work.keys.all_leases[1]
    for key, value in rows:
        if message_id in value and (not leases or is_of(queue, value)):
            record = read_or(None, Record.outline, Message.of_lease(value).value if leases else value)
            if (b"" if record is None else record.message_id) == message_id:
                return (key, value), end
    return None, rows[-1][0] + b"\x00" if len(rows) == MESSAGES_PER_TRANSACTION else end


# -- dry run -----------------------------------------------------------------------------------------------------------


class DryRun(Transaction):
    """A transaction that reads the store and keeps its writes to itself, to show what a verb would do."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner
        #: Keys with the values set; None for a cleared key.
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
        """The rows with this transaction's writes to these keys applied. A spare row was read for each of the keys."""
        if not own:
            return rows
        seen = dict(rows) | {key: self._own[key] for key in own}
        return sorted(((key, value) for key, value in seen.items() if value is not None), reverse=reverse)

    def set(self, key: bytes, value: bytes) -> None:
        self._own[key] = value

    def clear(self, key: bytes) -> None:
        self._own[key] = None

    def clear_run(self, keys: Sequence[bytes]) -> None:
        self._own.update(dict.fromkeys(keys))

    def clear_range(self, begin: bytes, end: bytes) -> None:
        """Ignored: the verbs never read again what they cleared as a range."""

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


# -- pages -------------------------------------------------------------------------------------------------------------


#: The leases of all queues share one range: how many of them are searched for a page of one queue.
LEASES_PER_PAGE = 1_000


def page(work: Work, queue: str, view: View, limit: int) -> Page:
    """Up to ``limit`` messages, at a cost that does not depend on the queue.

    Ready: by fairness key, those without one last; inside a key, the most urgent first, then the oldest. (``peek`` has
    the order of delivery.) Delayed: by due time. Leased: by session; such a page may be short, even empty.
    """
    state = view.state
    most = LEASES_PER_PAGE if state == "leased" else limit
    behind = view.after and _key(work.keys, queue, state, view.after)
    rows = _read(work, _ranges(work.keys, queue, view), behind, most + 1, reverse=view.reverse)
    found = [row for row in rows[:most] if state != "leased" or is_of(queue, row[1])][:limit]
    seen = found if len(found) == limit else rows[:most]
    more = len(rows) > most or (seen != rows)
    following = _position(work.keys, queue, state, seen[-1][0]) if more else None
    return Page(_list(work, [(queue, row) for row in found]), following)


def _read(work: Work, ranges: list[Range], behind: bytes, limit: int, *, reverse: bool) -> list[KeyValue]:
    """Up to ``limit`` rows of ``ranges``, which are in the store's order."""
    rows: list[KeyValue] = []
    for begin, end in reversed(ranges) if reverse else ranges:
        if behind and reverse:
            end = min(end, behind)  # noqa: PLW2901
        elif behind:
            begin = max(begin, behind + b"\x00")  # noqa: PLW2901
        if begin < end and len(rows) < limit:
            rows += work.tr.get_range(begin, end, limit=limit - len(rows), reverse=reverse, snapshot=True)
    return rows


def list_task(work: Work, task_id: str) -> list[Listed]:
    """:func:`find_task` with positions. Looks through the leases only if one of the messages is leased."""
    return _list(work, where(work, task_id))


def _ranges(keys: Keyspace, queue: str, view: View) -> list[Range]:
    if view.state == "leased":
        return [keys.all_leases]
    if view.state == "delayed":
        return [range_of(keys.delayed(queue))]
    if view.key is not None:
        return [keys.all_items(queue, view.key)]
    return [range_of(keys.keyed(queue)), range_of(keys.ready(queue))]


def _key(keys: Keyspace, queue: str, state: State, position: bytes) -> bytes:
    """The message's key in the store."""
    return keys.at(queue, Place(position)) if state == "ready" else _prefix(keys, queue, state) + position


def _position(keys: Keyspace, queue: str, state: State, key: bytes) -> bytes:
    return keys.place(queue, key) if state == "ready" else key[len(_prefix(keys, queue, state)) :]


def _prefix(keys: Keyspace, queue: str, state: State) -> bytes:
    return keys.delayed(queue) if state == "delayed" else keys.leases_prefix


def _list(work: Work, rows: Sequence[Found]) -> list[Listed]:
    listed = []
    beginnings = read_beginnings(work, [record_at(work.keys, row) for _, row in rows])
    for (queue, row), record in zip(rows, beginnings, strict=True):
        message = show(work.keys, queue, row, record)
        position = _position(work.keys, queue, message.state, row[0])
        priority = _priority(work.keys, queue, message.state, row)
        listed.append(Listed(position, message, record.size, priority, message.due_ms))
    return listed


def read_beginnings(work: Work, values: Sequence[bytes]) -> list[Record]:
    """Each record with the first chunk of its payload, in one round trip; unreadable bytes become the payload."""
    records = open_records(values)
    firsts = [work.keys.body(each.message_id, 0) for each in records if isinstance(each, Record) and each.chunks]
    chunks = iter(work.tr.get_many(firsts, snapshot=True) if firsts else [])
    found = []
    for value, record in zip(values, records, strict=True):
        if isinstance(record, FormatError):
            found.append(Record.unreadable(value))
        else:
            found.append(record._replace(payload=next(chunks) or b"") if record.chunks else record)
    return found


def _priority(keys: Keyspace, queue: str, state: State, row: KeyValue) -> int:
    """The priority at which it waits; the lowest if that can't be read."""
    key, value = row
    try:
        if state == "delayed":
            rank = keys.split_delayed(queue, key)[1]
        else:
            rank = split_place(Message.of_lease(value).place if state == "leased" else keys.place(queue, key))[1]
    except FormatError:  # shown as it is
        return NO_PRIORITY
    return keys.priority(rank)


# -- at a page's position ----------------------------------------------------------------------------------------------


def read_at(work: Work, queue: str, state: State, position: bytes) -> Listed | None:
    """The message at a position, with its whole payload; None if it has moved, or was never there."""
    key = _key(work.keys, queue, state, position)
    value = work.tr.get(key, snapshot=True)
    if value is None or (state == "leased" and not is_of(queue, value)):
        return None
    (listed,) = _list(work, [(queue, (key, value))])
    return listed._replace(message=look(work, queue, (key, value)))


def row_at(work: Work, queue: str, state: State, position: bytes, message_id: bytes) -> KeyValue | None:
    """The message's row, if it is still at its position. Conflicts with a transaction that moves it."""
    key = _key(work.keys, queue, state, position)
    value = work.tr.get(key)
    if value is None or (state == "leased" and not is_of(queue, value)):
        return None
    (record,) = read_beginnings(work, [record_at(work.keys, (key, value))])
    return (key, value) if record.message_id == message_id else None


# -- a task ------------------------------------------------------------------------------------------------------------


#: A queue, and a row of one of its messages.
Found = tuple[str, KeyValue]


def find_task(work: Work, task_id: str) -> list[Peeked]:
    """The task's first 500 messages, in any state, wherever they are. The cost does not grow with the store."""
    return look_all(work, where(work, task_id))


#: How many messages of one task a transaction reads. Publishers choose the ids, and may reuse one for many messages.
MOST_OF_TASK = 500


def places(work: Work, task_id: str, after: bytes = b"", *, snapshot: bool = False) -> tuple[list[bytes], bytes]:
    """The keys of the task's messages, in the order of their stamps; for a leased one, its old key.

    Returns up to :data:`MOST_OF_TASK`, from ``after`` on, and where to continue; b"" at the end. A row that leads to
    anything but a message is ignored, as callers may delete what they get here.
    """
    begin, end = range_of(work.keys.task(task_id))
    rows = work.tr.get_range(max(begin, after), end, limit=MOST_OF_TASK, snapshot=snapshot)
    found = [work.keys.prefix + prefix + key[-STAMP_BYTES:] for key, prefix in rows]
    following = rows[-1][0] + b"\x00" if len(rows) == MOST_OF_TASK else b""
    return [key for key in found if read_or(None, work.keys.queue_of, key) is not None], following


def where(work: Work, task_id: str) -> list[Found]:
    """The task's first messages. Reads all leases, but only if one of these is leased. Snapshot."""
    wanted, _ = places(work, task_id, snapshot=True)
    rows = rows_at(work, wanted, snapshot=True)
    waiting = [(work.keys.queue_of(row[0]), row) for row in rows]
    leased = {Stamp(key[-STAMP_BYTES:]) for key in wanted} - {Stamp(key[-STAMP_BYTES:]) for key, _ in rows}
    return waiting + (_leased(work, leased) if leased else [])


def _leased(work: Work, stamps: set[Stamp]) -> list[Found]:
    rows = work.tr.get_range(*work.keys.all_leases, snapshot=True)
    held = [(read_or(None, Message.of_lease, row[1]), row) for row in rows]  # an unreadable one belongs to no task
    return [(lease[0], row) for lease, row in held if lease is not None and lease[1][-STAMP_BYTES:] in stamps]


def rows_at(work: Work, wanted: list[bytes], *, snapshot: bool = False) -> list[KeyValue]:
    values = work.tr.get_many(wanted, snapshot=snapshot) if wanted else []
    return [(key, value) for key, value in zip(wanted, values, strict=True) if value is not None]
