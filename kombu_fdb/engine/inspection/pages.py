"""Pages: a queue's messages in parts whose cost does not depend on what else is there.

A page begins behind a *position*, which is what a message's key has after the prefix of its queue and state, so the
millionth page costs what the first one does. Positions are opaque to callers and safe to take from anybody: one that
was never given out leads to another place of the same queue, or to nothing. A message keeps its position until it
moves.

Snapshot reads, but for the deletion. A page shows the messages as they stood when it was read, the next one as they
stand then.
"""

from __future__ import annotations

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.stored.tally import DELAYED, LEASED, READY, Tally
from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES, places
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_lease, decode_record
from kombu_fdb.keyspace.layout import Keyspace, Range, split_place
from kombu_fdb.keyspace.tuples import range_of, unpack_as
from kombu_fdb.model import NO_PRIORITY, URGENT, Listed, Page, Peeked
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["delete_at", "list_task", "page", "read_at", "row_at"]

#: Leases of all queues stand together; so many are looked through for a page of one queue's.
LEASES_PER_PAGE = 1_000


# -- messages ----------------------------------------------------------------------------------------------------------


def page(
    tr: Transaction,
    keys: Keyspace,
    queue: str,
    state: str,
    limit: int,
    *,
    after: bytes = b"",
    key: str | None = None,
    reverse: bool = False,
) -> Page:
    """Up to ``limit`` messages of a state behind the position ``after``; ``reverse``: from the end.

    Ready: by fairness key, those without one last, which is not the order of delivery (that is ``browse.peek``); inside
    a key the most urgent come first, then the oldest. ``key``: of this key only. Delayed: by due time. Leased: by
    session; such a page may hold fewer messages than there are, even none.
    """
    most = LEASES_PER_PAGE if state == LEASED else limit
    behind = after and _key(keys, queue, state, after)
    rows = _read(tr, _ranges(keys, queue, state, key), behind, most + 1, reverse=reverse)
    found = [row for row in rows[:most] if state != LEASED or _is_of(queue, row[1])][:limit]
    seen = found if len(found) == limit else rows[:most]
    more = len(rows) > most or (seen != rows)
    following = _position(keys, queue, state, seen[-1][0]) if more else None
    return Page([_list(tr, keys, queue, state, row) for row in found], following)


def _read(tr: Transaction, ranges: list[Range], behind: bytes, limit: int, *, reverse: bool) -> list[KeyValue]:
    """``ranges`` in the store's order."""
    rows: list[KeyValue] = []
    for begin, end in reversed(ranges) if reverse else ranges:
        if behind and reverse:
            end = min(end, behind)  # noqa: PLW2901
        elif behind:
            begin = max(begin, behind + b"\x00")  # noqa: PLW2901
        if begin < end and len(rows) < limit:
            rows += tr.get_range(begin, end, limit=limit - len(rows), reverse=reverse, snapshot=True)
    return rows


def list_task(tr: Transaction, keys: Keyspace, task_id: str) -> list[Listed]:
    """All messages of a task, in any state; the leases are looked through only if one of them is leased."""
    wanted = places(tr, keys, task_id, snapshot=True)
    values = tr.get_many(wanted, snapshot=True) if wanted else []
    waiting = [(key, value) for key, value in zip(wanted, values, strict=True) if value is not None]
    stamps = {key[-STAMP_BYTES:] for key, value in zip(wanted, values, strict=True) if value is None}
    leases = tr.get_range(*keys.all_leases, snapshot=True) if stamps else []
    rows = [(keys.queue_of(row[0]), row) for row in waiting]
    listed = [_list(tr, keys, queue, _state(keys, queue, row[0]), row) for queue, row in rows]
    for row in leases:
        queue, place = _leased_from(row[1])
        if place[-STAMP_BYTES:] in stamps:
            listed.append(_list(tr, keys, queue, LEASED, row))
    return listed


def _state(keys: Keyspace, queue: str, key: bytes) -> str:
    return DELAYED if key.startswith(keys.delayed(queue)) else READY


def _leased_from(lease: bytes) -> tuple[str, bytes]:
    """Queue and place; of unreadable bytes none."""
    try:
        return decode_lease(lease)[:2]
    except FormatError:
        return "", b""


def _ranges(keys: Keyspace, queue: str, state: str, key: str | None) -> list[Range]:
    if state == LEASED:
        return [keys.all_leases]
    if state == DELAYED:
        return [range_of(keys.delayed(queue))]
    if key is not None:
        return [range_of(keys.items(queue, key, b""))]
    return [range_of(keys.keyed(queue)), range_of(keys.ready(queue))]


def _key(keys: Keyspace, queue: str, state: str, position: bytes) -> bytes:
    """The message's key in the store."""
    return keys.at(queue, position) if state == READY else _prefix(keys, queue, state) + position


def _position(keys: Keyspace, queue: str, state: str, key: bytes) -> bytes:
    return keys.place(queue, key) if state == READY else key[len(_prefix(keys, queue, state)) :]


def _prefix(keys: Keyspace, queue: str, state: str) -> bytes:
    return keys.delayed(queue) if state == DELAYED else keys.leases_prefix


def _is_of(queue: str, lease: bytes) -> bool:
    return _leased_from(lease)[0] == queue


def _list(tr: Transaction, keys: Keyspace, queue: str, state: str, row: KeyValue) -> Listed:
    position = _position(keys, queue, state, row[0])
    place, value, owner, due_ms = position, row[1], b"", 0
    if state == LEASED:
        _queue, place, value = decode_lease(value)
        owner = browse.owner_of(keys, row[0])
    try:
        due_ms, rank = keys.split_delayed(queue, row[0]) if state == DELAYED else (0, split_place(place)[1])
    except FormatError:  # as it is, for a person to look at
        rank = keys.rank(NO_PRIORITY)
    record, payload = _beginning(tr, keys, value)
    message = Peeked(
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
    )
    return Listed(position, message, record.size, _priority(rank), due_ms)


def _priority(rank: bytes) -> int:
    return URGENT - int(unpack_as(rank, int)[0])


def _beginning(tr: Transaction, keys: Keyspace, value: bytes) -> tuple[Record, bytes]:
    """The record and the first chunk of its payload; unreadable bytes are shown as a payload."""
    try:
        record = decode_record(value)
    except FormatError:
        return Record(b"", 0, 0, 0, 0, len(value), value, ()), value
    if not record.chunks:
        return record, record.payload
    return record, tr.get(keys.body(record.message_id, 0), snapshot=True) or b""


# -- one message -------------------------------------------------------------------------------------------------------


def read_at(tr: Transaction, keys: Keyspace, queue: str, state: str, position: bytes) -> Listed | None:
    """The message at a position, with its whole payload; None if it has moved, or never was there."""
    key = _key(keys, queue, state, position)
    value = tr.get(key, snapshot=True)
    if value is None or (state == LEASED and not _is_of(queue, value)):
        return None
    listed = _list(tr, keys, queue, state, (key, value))
    return listed._replace(message=browse.look(tr, keys, queue, (key, value)))


def delete_at(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, state: str, position: bytes, message_id: bytes
) -> bool:
    """Delete the message if it is still at its position; False if it has moved. Its owner loses its lease."""
    row = row_at(tr, keys, queue, state, position, message_id)
    return row is not None and browse.delete(tr, keys, tally, queue, *row)


def row_at(
    tr: Transaction, keys: Keyspace, queue: str, state: str, position: bytes, message_id: bytes
) -> KeyValue | None:
    """The message's row, if it is still at its position; conflicts with whoever moves it."""
    key = _key(keys, queue, state, position)
    value = tr.get(key)
    if value is None or (state == LEASED and not _is_of(queue, value)):
        return None
    record, _payload = _beginning(tr, keys, decode_lease(value)[2] if state == LEASED else value)
    return (key, value) if record.message_id == message_id else None
