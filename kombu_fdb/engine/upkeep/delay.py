"""Delays: messages that are not ready before a moment, and their promotion when it comes.

A delayed message stands in a range of its own, ordered by its due time, so no claim ever walks over it and no worker
holds it. One consumer process at a time (``session.hold_role``) promotes what is due: its record moves to the end of
the ready range, or of its rank there. By the wall clocks of publisher and promoter: a wrong one moves a start by its
error and harms nothing else. Two promoters at once are harmless too: they conflict on the messages they both want.

``("waiting", queue)`` says that a queue may have delayed messages; it is cleared by a promoter that read the whole
range, serializably, as empty: a message delayed meanwhile makes that transaction fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.messages.bury import Cause, bury
from kombu_fdb.engine.messages.message import Message, Subqueue, forget, put_ready, take_row
from kombu_fdb.engine.scheduling import rates
from kombu_fdb.engine.scheduling.rates import Sightings
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import due_from, names_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.primitives.ranges import LONGEST_MS
from kombu_fdb.store.protocol import KeyValue

MESSAGES_PER_TRANSACTION = 200
#: Whose next message is looked at in one transaction.
QUEUES_PER_LOOK = 500
#: Of entries of older stores, which don't say how long they wait.
UNTOLD_WAIT_MS = 60_000


def due_queues(work: Work, begin: bytes = b"") -> tuple[list[str], int | None, bytes]:
    """Queues that have due messages, or none any more, and when the next of the others is due; all at snapshot.

    Of some queues only, from the row ``begin`` on; the last result is where to go on, b"" at the end.
    """
    first, end = work.keys.all_waiting
    rows = work.tr.get_range(begin or first, end, limit=QUEUES_PER_LOOK, snapshot=True)
    queues = names_in(work.keys, rows)
    heads = (
        work.tr.get_ranges([(*range_of(work.keys.delayed(queue)), 1) for queue in queues], snapshot=True)
        if queues
        else []
    )
    due, later = [], []
    for queue, head in zip(queues, heads, strict=True):
        due_ms = _due(work.keys, queue, head)
        if due_ms is None or due_ms <= work.now_ms:
            due.append(queue)
        else:
            later.append(due_ms)
    return due, min(later, default=None), rows[-1][0] + b"\x00" if len(rows) == QUEUES_PER_LOOK else b""


def names_in(keys: Keyspace, rows: Sequence[KeyValue]) -> list[str]:
    """The queues that these rows are of; those whose key can't be read are left out."""
    return [name for (name,), _ in keys.read(rows, str)]


def _due(keys: Keyspace, queue: str, head: list[KeyValue]) -> int | None:
    """When its next message is due; None if that can't be told, so that the promotion looks at it by itself."""
    try:
        return keys.split_delayed(queue, head[0][0])[0] if head else None
    except FormatError:
        return None


def promote(work: Work, queue: str, limit: int = MESSAGES_PER_TRANSACTION) -> tuple[int, int | None]:
    """Make up to ``limit`` due messages ready. Returns how many, and when the next is due.

    One whose due time can't be read, among them or at the head of the others, is dead-lettered as malformed.
    """
    begin, end = work.keys.delayed_until(queue, work.now_ms)
    due = work.tr.get_range(begin, end, limit=limit, snapshot=True)
    for row in due:
        _promote_one(work, queue, row)
    return len(due), _next_due(work, queue)


def _promote_one(work: Work, queue: str, row: KeyValue) -> None:
    take_row(work, queue, row)
    message = Message(queue, *row)
    try:
        due_ms, rank = work.keys.split_delayed(queue, message.place)
    except FormatError as error:
        bury(work, message, Cause.malformed(error))
        return
    forget(work, message)
    fair_key, _task_id = names_of(message.value)
    put_ready(work, Subqueue(queue, fair_key, rank), due_from(message.value, due_ms))


def unpark(work: Work, sightings: Sightings) -> int | None:
    """Ring for keys whose rate allows a message again. Returns when the next one is due, or now if some may be left.

    That is when the moment has come by this clock, or when the entry has been seen here for as long as it was to wait:
    who wrote it may have another clock, or this one was set back since. A bell that is rung too early costs a look.

    What has come since is put into the bucket (:func:`.rates.credit`): of many consumers the one that answers the bell
    may never have seen it.
    """
    found = [(row, _unpark(work.keys, *row)) for row in _unparks(work)]
    for row, frozen in found:
        if frozen is None:  # not one of ours
            work.tr.clear(row[0])
    waiting = [(row, frozen) for row, frozen in found if frozen is not None]
    seen = rates.seen(work, [frozen[1:3] for _, frozen in waiting], sightings)
    waits, over = [], []
    for (row, (due_ms, queue, key, wait_ms)), bucket in zip(waiting, seen, strict=True):
        left_ms = min(due_ms - work.now_ms, wait_ms - sightings.unchanged_ms(*row))
        if left_ms > 0:
            waits.append(left_ms)
            continue
        over.append(bucket)
        work.tr.clear(row[0])
        work.tr.set(work.keys.freed(queue, key), b"")
        work.tr.set_versionstamped_value(work.keys.bell(queue))
    rates.credit(work, over)
    if len(found) >= MESSAGES_PER_TRANSACTION and len(waits) < len(found):
        return work.now_ms
    return work.now_ms + min(waits) if waits else None


def _unpark(keys: Keyspace, entry: bytes, value: bytes) -> tuple[int, str, str, int] | None:
    """When it is due, whose it is, and how long it was to wait; None if it can't be read."""
    try:
        due_ms, queue, key = keys.split(entry, int, str, str)
    except FormatError:
        return None
    return due_ms, queue, key, min(int.from_bytes(value, "big"), LONGEST_MS) if value else UNTOLD_WAIT_MS


def _unparks(work: Work) -> list[KeyValue]:
    """Those due first, and if there are many, those due last: wrong clocks' are there."""
    first = work.tr.get_range(*work.keys.all_unparks, limit=MESSAGES_PER_TRANSACTION, snapshot=True)
    if len(first) < MESSAGES_PER_TRANSACTION:
        return first
    begin = first[-1][0] + b"\x00"
    last = work.tr.get_range(
        begin, work.keys.all_unparks[1], limit=MESSAGES_PER_TRANSACTION, reverse=True, snapshot=True
    )
    return first + last


def _next_due(work: Work, queue: str) -> int | None:
    whole = range_of(work.keys.delayed(queue))
    head = work.tr.get_range(*whole, limit=1, snapshot=True)
    if head:
        due_ms = _due(work.keys, queue, head)
        if due_ms is None:
            _promote_one(work, queue, head[0])
        return work.now_ms if due_ms is None else due_ms
    work.tr.add_read_conflict_range(*whole)
    work.tr.clear(work.keys.waiting(queue))
    return None
