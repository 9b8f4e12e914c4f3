"""Pages: a queue's messages in parts whose cost does not depend on what else is there.

A page begins behind a *position*, which is what a message's key has after the prefix of its queue and state, so the
millionth page costs what the first one does. Positions are opaque to callers and safe to take from anybody: one that
was never given out leads to another place of the same queue, or to nothing. A message keeps its position until it
moves.

Snapshot reads, but for the deletion. A page shows the messages as they stood when it was read, the next one as they
stand then.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.inspection import browse, cancel
from kombu_fdb.engine.messages.message import read_beginnings
from kombu_fdb.engine.stored.effects import DELAYED, LEASED, READY
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease
from kombu_fdb.keyspace.layout import EVERY_RANK, Keyspace, Range, split_place
from kombu_fdb.keyspace.tuples import range_of, unpack_as
from kombu_fdb.model import NO_PRIORITY, URGENT, Listed, Page, Place, View
from kombu_fdb.store.protocol import KeyValue

#: Leases of all queues stand together; so many are looked through for a page of one queue's.
LEASES_PER_PAGE = 1_000


# -- messages ----------------------------------------------------------------------------------------------------------


def page(work: Work, queue: str, view: View, limit: int) -> Page:
    """Up to ``limit`` messages.

    Ready: by fairness key, those without one last, which is not the order of delivery (that is ``browse.peek``); inside
    a key the most urgent come first, then the oldest. Delayed: by due time. Leased: by session; such a page may hold
    fewer messages than there are, even none.
    """
    state = view.state
    most = LEASES_PER_PAGE if state == LEASED else limit
    behind = view.after and _key(work.keys, queue, state, view.after)
    rows = _read(work, _ranges(work.keys, queue, view), behind, most + 1, reverse=view.reverse)
    found = [row for row in rows[:most] if state != LEASED or _is_of(queue, row[1])][:limit]
    seen = found if len(found) == limit else rows[:most]
    more = len(rows) > most or (seen != rows)
    following = _position(work.keys, queue, state, seen[-1][0]) if more else None
    return Page(_list(work, [(queue, row) for row in found]), following)


def _read(work: Work, ranges: list[Range], behind: bytes, limit: int, *, reverse: bool) -> list[KeyValue]:
    """``ranges`` in the store's order."""
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
    """The first messages of a task, in any state; the leases are looked through only if one of them is leased."""
    return _list(work, cancel.where(work, task_id))


def _ranges(keys: Keyspace, queue: str, view: View) -> list[Range]:
    if view.state == LEASED:
        return [keys.all_leases]
    if view.state == DELAYED:
        return [range_of(keys.delayed(queue))]
    if view.key is not None:
        return [range_of(keys.items(queue, view.key, EVERY_RANK))]
    return [range_of(keys.keyed(queue)), range_of(keys.ready(queue))]


def _key(keys: Keyspace, queue: str, state: str, position: bytes) -> bytes:
    """The message's key in the store."""
    return keys.at(queue, Place(position)) if state == READY else _prefix(keys, queue, state) + position


def _position(keys: Keyspace, queue: str, state: str, key: bytes) -> bytes:
    return keys.place(queue, key) if state == READY else key[len(_prefix(keys, queue, state)) :]


def _prefix(keys: Keyspace, queue: str, state: str) -> bytes:
    return keys.delayed(queue) if state == DELAYED else keys.leases_prefix


def _is_of(queue: str, lease: bytes) -> bool:
    try:
        return decode_lease(lease)[0] == queue
    except FormatError:
        return False


def _list(work: Work, rows: Sequence[cancel.Found]) -> list[Listed]:
    listed = []
    beginnings = read_beginnings(work, [browse.record_at(work.keys, row) for _, row in rows])
    for (queue, row), opened in zip(rows, beginnings, strict=True):
        message = browse.show(work.keys, queue, row, opened)
        position = _position(work.keys, queue, message.state, row[0])
        priority = _priority(work.keys, queue, message.state, row)
        listed.append(Listed(position, message, opened.record.size, priority, message.due_ms))
    return listed


def _priority(keys: Keyspace, queue: str, state: str, row: KeyValue) -> int:
    """The one at which it waits; the lowest if that can't be read."""
    key, value = row
    try:
        if state == DELAYED:
            rank = keys.split_delayed(queue, key)[1]
        else:
            rank = split_place(decode_lease(value)[1] if state == LEASED else keys.place(queue, key))[1]
    except FormatError:  # as it is, for a person to look at
        return NO_PRIORITY
    return URGENT - int(unpack_as(rank, int)[0])


# -- one message -------------------------------------------------------------------------------------------------------


def read_at(work: Work, queue: str, state: str, position: bytes) -> Listed | None:
    """The message at a position, with its whole payload; None if it has moved, or never was there."""
    key = _key(work.keys, queue, state, position)
    value = work.tr.get(key, snapshot=True)
    if value is None or (state == LEASED and not _is_of(queue, value)):
        return None
    (listed,) = _list(work, [(queue, (key, value))])
    return listed._replace(message=browse.look(work, queue, (key, value)))


def delete_at(work: Work, queue: str, state: str, position: bytes, message_id: bytes) -> bool:
    """Delete the message if it is still at its position; False if it has moved. Its owner loses its lease."""
    row = row_at(work, queue, state, position, message_id)
    return row is not None and browse.delete(work, queue, row)


def row_at(work: Work, queue: str, state: str, position: bytes, message_id: bytes) -> KeyValue | None:
    """The message's row, if it is still at its position; conflicts with a transaction that moves it."""
    key = _key(work.keys, queue, state, position)
    value = work.tr.get(key)
    if value is None or (state == LEASED and not _is_of(queue, value)):
        return None
    ((record, _beginning),) = read_beginnings(work, [browse.record_at(work.keys, (key, value))])
    return (key, value) if record.message_id == message_id else None
