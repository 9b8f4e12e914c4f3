"""A queue's messages page by page, and what is done to one of them: reschedule it, delete it, cancel its task.

Reschedule: a waiting message gets another due time, or none: then it is ready at once. It leaves its row and enters
another in one transaction (ONE-PLACE), behind the messages of its key and rank there. It keeps id, key, priority, end
of life, redeliveries and history; a due time behind the end of its life is refused. It may get another payload: a
task's payload says in a header when the task is due, and a worker would wait for that.

A message that was delayed counts as waiting from the moment it was due, so one that is made ready waits from now on.

States: the message is *delayed* or *ready*, and is one of the two in its queue afterwards; if anything fails, it is
where it was. A transaction that takes, promotes or deletes it meanwhile conflicts with this: one of the two has it, and
the other finds that it has moved. If the answer to the commit is lost, it is found to have happened or is done again
(``store/retry.py``).

Pages: a queue's messages in parts whose cost does not depend on what else is there.

A page begins behind a *position*, the part of a message's key after the prefix of its queue and state, so the millionth
page costs what the first one does. Positions are opaque to callers and safe to accept from any client: one that was
never given out leads to another place of the same queue, or to nothing. A message keeps its position until it moves.

Snapshot reads, but for the deletion. A page shows the messages as they stood when it was read, the next one as they
stand then.

Cancel: delete the messages of a task that no worker has begun, by its id; and find where a task is.

Both use the index (``messages/message.py``), so they read as many rows as the task has messages, whatever else is in
the store. A leased message belongs to its consumer, and stays: only the worker can stop what it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.messages.message import (
    Message,
    Subqueue,
    forget,
    places,
    put_delayed,
    put_ready,
    read_beginnings,
    take_out,
    with_payload,
)
from kombu_fdb.engine.stored.work import DELAYED, LEASED, READY, Work
from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import decode_lease, decode_record, names_of
from kombu_fdb.keyspace.layout import (
    EVERY_RANK,
    STAMP_BYTES,
    Keyspace,
    Range,
    range_of,
    read_or,
    split_place,
    unpack_as,
)
from kombu_fdb.model import NO_PRIORITY, URGENT, Listed, Page, Peeked, Place, Rank, Spot, Stamp, View
from kombu_fdb.store.protocol import KeyValue

# -- reschedule --------------------------------------------------------------------------------------------------------


def reschedule(work: Work, queue: str, spot: Spot, due_ms: int, payload: bytes | None = None) -> bool:
    """The message at a page's position, ready or delayed. False if it has moved.

    ``due_ms``: now or earlier makes it ready. ``payload``: None for the one it has. Raises ``QueueError`` for a due
    time at which it will have expired and for a message that a session holds, and ``FormatError`` if the record can't
    be read, or is a newer version's.
    """
    if spot.state == LEASED:
        raise QueueError("a worker holds this message", queue=queue, fix="Wait until it is back, or cancel it.")
    row = row_at(work, queue, *spot)
    if row is not None:
        _put(work, queue, row, due_ms, payload)
    return row is not None


def _put(work: Work, queue: str, row: KeyValue, due_ms: int, payload: bytes | None) -> None:
    key, value = row
    record = decode_record(value)
    if record.expires_ms and record.expires_ms <= max(due_ms, work.now_ms):
        raise QueueError(
            "the message expires before it is due",
            queue=queue,
            expires_ms=record.expires_ms,
            due_ms=due_ms,
            fix="Choose an earlier moment.",
        )
    rank = _rank(work, queue, key)
    take_out(work, queue, [row])
    forget(work, Message(queue, key, value))
    if payload is not None:
        record = with_payload(work, record, payload)
    if due_ms > work.now_ms:
        put_delayed(work, Subqueue(queue, "", rank), due_ms, record)
    else:
        put_ready(work, Subqueue(queue, record.key, rank), record._replace(published_ms=work.now_ms))


def _rank(work: Work, queue: str, key: bytes) -> Rank:
    if key.startswith(work.keys.delayed(queue)):
        return work.keys.split_delayed(queue, key)[1]
    return split_place(work.keys.place(queue, key))[1]


# -- pages -------------------------------------------------------------------------------------------------------------


#: Leases of all queues stand together: how many are looked through for a page of one queue.
LEASES_PER_PAGE = 1_000


# -- messages ----------------------------------------------------------------------------------------------------------


def page(work: Work, queue: str, view: View, limit: int) -> Page:
    """Up to ``limit`` messages, at a cost that does not depend on the queue.

    Ready: by fairness key, those without one last, which is not the order of delivery (that is ``browse.peek``); inside
    a key the most urgent come first, then the oldest. Delayed: by due time. Leased: by session; such a page may hold
    fewer messages than there are, even none.
    """
    state = view.state
    most = LEASES_PER_PAGE if state == LEASED else limit
    behind = view.after and _key(work.keys, queue, state, view.after)
    rows = _read(work, _ranges(work.keys, queue, view), behind, most + 1, reverse=view.reverse)
    found = [row for row in rows[:most] if state != LEASED or browse.is_of(queue, row[1])][:limit]
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
    """:func:`find_task` with positions; the leases are looked through only if one of the messages is leased."""
    return _list(work, where(work, task_id))


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


def _list(work: Work, rows: Sequence[Found]) -> list[Listed]:
    listed = []
    beginnings = read_beginnings(work, [browse.record_at(work.keys, row) for _, row in rows])
    for (queue, row), record in zip(rows, beginnings, strict=True):
        message = browse.show(work.keys, queue, row, record)
        position = _position(work.keys, queue, message.state, row[0])
        priority = _priority(work.keys, queue, message.state, row)
        listed.append(Listed(position, message, record.size, priority, message.due_ms))
    return listed


def _priority(keys: Keyspace, queue: str, state: str, row: KeyValue) -> int:
    """The priority at which it waits; the lowest if that can't be read."""
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
    if value is None or (state == LEASED and not browse.is_of(queue, value)):
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
    if value is None or (state == LEASED and not browse.is_of(queue, value)):
        return None
    (record,) = read_beginnings(work, [browse.record_at(work.keys, (key, value))])
    return (key, value) if record.message_id == message_id else None


# -- cancel ------------------------------------------------------------------------------------------------------------


#: A queue, and a row of one of its messages.
Found = tuple[str, KeyValue]


def cancel(work: Work, task_id: str, after: bytes) -> tuple[list[Peeked], bytes]:
    """Delete the task's ready, delayed and dead messages. Returns what was deleted, and where the others begin.

    Serializable: a message that moves meanwhile, or is just being published, makes the transaction start again.
    """
    wanted, following = places(work, task_id, after)
    rows = _rows(work, wanted)
    found = [(work.keys.queue_of(row[0]), row) for row in rows if names_of(row[1])[1] == task_id]
    taken = browse.look_all(work, found)
    for each in found:
        browse.remove(work, *each)
    return taken, following


def find_task(work: Work, task_id: str) -> list[Peeked]:
    """The task's first 500 messages, in any state, wherever they are. The cost does not grow with the store."""
    return browse.look_all(work, where(work, task_id))


def where(work: Work, task_id: str) -> list[Found]:
    """The task's first messages. Reads all leases, but only if one of these is leased. Snapshot."""
    wanted, _ = places(work, task_id, snapshot=True)
    rows = _rows(work, wanted, snapshot=True)
    waiting = [(work.keys.queue_of(row[0]), row) for row in rows]
    leased = {Stamp(key[-STAMP_BYTES:]) for key in wanted} - {Stamp(key[-STAMP_BYTES:]) for key, _ in rows}
    return waiting + (_leased(work, leased) if leased else [])


def _leased(work: Work, stamps: set[Stamp]) -> list[Found]:
    rows = work.tr.get_range(*work.keys.all_leases, snapshot=True)
    held = [(read_or(None, decode_lease, row[1]), row) for row in rows]  # one that can't be read is no task's
    return [(lease[0], row) for lease, row in held if lease is not None and lease[1][-STAMP_BYTES:] in stamps]


def _rows(work: Work, wanted: list[bytes], *, snapshot: bool = False) -> list[KeyValue]:
    values = work.tr.get_many(wanted, snapshot=snapshot) if wanted else []
    return [(key, value) for key, value in zip(wanted, values, strict=True) if value is not None]
