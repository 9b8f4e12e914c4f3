"""Promotion: a delayed message becomes ready when it is due, and a key is served again when its rate allows it.

Delayed messages have a range of their own, in the order of their due times, so no claim reads past them and no worker
holds them. One consumer process at a time (``session.hold_role``) promotes due messages: the record moves to the end of
the ready range, or of its rank there. Due times depend on the wall clocks of publisher and promoter: a wrong clock
shifts the time by its error, and harms nothing else. Two promoters at once are harmless too: they conflict on the
messages they both want.

``("waiting", queue)`` says that a queue may have delayed messages. A promoter clears it after reading the whole range
serializably as empty: a message that is delayed concurrently makes that transaction fail.
"""

from __future__ import annotations

from kombu_fdb.engine.messages.bury import bury_malformed
from kombu_fdb.engine.messages.message import forget, put_ready, take_run
from kombu_fdb.engine.scheduling import key_limits
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, Record
from kombu_fdb.keyspace.layout import Keyspace, range_of, read_or
from kombu_fdb.primitives.ranges import LONGEST_MS
from kombu_fdb.store.protocol import KeyValue

MESSAGES_PER_TRANSACTION = 200
#: How many queues' next messages one transaction reads.
QUEUES_PER_LOOK = 500
#: The assumed wait of entries that an older version wrote without a duration.
ASSUMED_WAIT_MS = 60_000


def due_queues(work: Work, begin: bytes = b"") -> tuple[list[str], int | None, bool, bytes]:
    """Queues with due messages, or no delayed ones, and when the next other queue has one; all at snapshot.

    Also returns whether a key waits for its rate, and where to continue, b"" at the end: it reads some queues only,
    from the row ``begin`` on.
    """
    first, end = work.keys.all_waiting
    ranges = [(begin or first, end, QUEUES_PER_LOOK), (*work.keys.all_unparks, 1)]
    rows, unparks = work.tr.get_ranges(ranges, snapshot=True)
    queues = [name for (name,), _ in work.keys.read(rows, str)]
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
    following = rows[-1][0] + b"\x00" if len(rows) == QUEUES_PER_LOOK else b""
    return due, min(later, default=None), bool(unparks), following


def _due(keys: Keyspace, queue: str, head: list[KeyValue]) -> int | None:
    """When its next message is due; None if that can't be read, so that promotion looks at the message."""
    return read_or((None,), keys.split_delayed, queue, head[0][0])[0] if head else None


def promote(work: Work, limit: int, queue: str) -> tuple[int, int | None]:
    """Make up to ``limit`` due messages ready. Returns how many, and when the next one is due.

    A message with an unreadable due time, among these or at the head of the others, is dead-lettered as malformed.
    """
    begin, end = work.keys.delayed_until(queue, work.now_ms)
    due = work.tr.get_range(begin, end, limit=limit, snapshot=True)
    for row in due:
        _promote_one(work, queue, row)
    return len(due), _next_due(work, queue)


def _promote_one(work: Work, queue: str, row: KeyValue) -> None:
    take_run(work, queue, [row])
    message = Message(queue, *row)
    try:
        due_ms, rank = work.keys.split_delayed(queue, message.place)
    except FormatError as error:
        bury_malformed(work, message, error)
        return
    forget(work, message)
    put_ready(work, queue, Record.known(message.value).key, rank, Record.due_from(message.value, due_ms))


def unpark(work: Work, sightings: key_limits.Sightings) -> int | None:
    """Unpark keys whose rate allows a message again. Returns when the next is due; now if some may be left.

    An entry is due at its time by this clock, or when this process has seen it for as long as it was meant to wait: the
    clocks may differ, or this one may have been set back. A bell that is rung too early costs a look.

    The tokens that have accrued are put into the bucket (:func:`.key_limits.credit`): the consumer that answers the
    bell may not have seen that bucket before.
    """
    found = [(row, read_or(None, work.keys.split, row[0], int, str, str)) for row in _unparks(work)]
    for row, entry in found:
        if entry is None:  # not written by celery-fdb
            work.tr.clear(row[0])
    waiting = [(row, entry) for row, entry in found if entry is not None]
    buckets = key_limits.read_buckets(work, [entry[1:3] for _, entry in waiting], sightings)
    waits, over = [], []
    for (row, (due_ms, queue, key)), bucket in zip(waiting, buckets, strict=True):
        wait_ms = min(int.from_bytes(row[1], "big"), LONGEST_MS) if row[1] else ASSUMED_WAIT_MS
        left_ms = min(due_ms - work.now_ms, wait_ms - key_limits.known_for_ms(sightings, work.environment.clock, *row))
        if left_ms > 0:
            waits.append(left_ms)
            continue
        over.append(bucket)
        work.tr.clear(row[0])
        work.tr.set(work.keys.freed(queue, key), b"")
        work.tr.set_versionstamped_value(work.keys.bell(queue))
    key_limits.credit(work, over)
    if len(found) >= MESSAGES_PER_TRANSACTION and len(waits) < len(found):
        return work.now_ms
    return work.now_ms + min(waits) if waits else None


def _unparks(work: Work) -> list[KeyValue]:
    """The entries due first and, if there are many, those due last, where wrong clocks put them."""
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
