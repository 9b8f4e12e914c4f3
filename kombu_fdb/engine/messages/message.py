"""The stored message: every verb takes it out, stores, leases, reads, deletes or finds it by the functions here.

Only a change of limits rewrites leases elsewhere, to count them (``scheduling/limit_changes.py``).

Model. A message is one *row*, which holds its record, and *chunks* if its payload is too large for that. The row is
ready, among the messages of its key or among those without a key, or it is delayed; or a lease holds its record. A verb
that moves a message takes its row out and stores the record elsewhere in the same transaction (ONE-PLACE), and adds the
changed counts to the transaction's effects (COUNTS).

* nowhere -> ready, delayed: :func:`put_ready`, :func:`put_delayed`, with a new stamp and a row in the index by task.
* ready, delayed -> out: :func:`take_out`. It conflicts only with a transaction that takes the same message.
* out -> leased: :func:`put_leased`; leased -> out: the lease is cleared, and :func:`end_lease` counts it.
* out -> ready at its old place: :func:`put_in_place`. Stamp and index stay.
* out -> gone: :func:`delete` clears the message's other rows.
* out -> ready, delayed elsewhere: :func:`forget` its old stamp, then as above; :func:`with_payload` replaces its
  payload.

A record that can't be read is moved like any other: what a move needs is patched in its bytes, or read from its place.
Where the record must be read, the caller gets a ``FormatError``, or the substitute :meth:`.Record.unreadable`.

The index by task finds a task's messages wherever they wait. A message's place ends in its stamp, and a row ``("task",
task_id, stamp)`` holds the part of the place before the stamp. The row is written wherever a message gets a stamp
(publish, promote, release with a delay, burial, replay). It is cleared wherever the stamp ends (the same verbs, and
ack, deletion, purge, expiry), in the same transaction. A claim, and the return to the old place, leave stamp and row
alone, so they pay nothing for the index. A row whose place is empty belongs to a leased message, or to one that is kept
for a newer version. A task may have several messages at a time: one per queue it was routed to, and another while an
attempt publishes the next one. A message without a task id has no row and pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kombu_fdb.engine import parts
from kombu_fdb.engine.scheduling import fair
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import (
    INLINE_BYTES,
    Message,
    Record,
    chunks_of,
    encode_lease,
    size_of,
)
from kombu_fdb.keyspace.layout import STAMP_BYTES, STAMP_CODE, TEXT_CODE, split_place
from kombu_fdb.model import Lease, Place, Rank
from kombu_fdb.store.protocol import KeyValue

# -- out ---------------------------------------------------------------------------------------------------------------


def take_out(work: Work, queue: str, rows: Sequence[KeyValue]) -> None:
    """Take these rows, ready or delayed, out of the queue.

    A key that has no message left gives up its turn. Checking that takes a read, so take out all rows before storing
    anything.
    """
    for row in rows:
        take_run(work, queue, [row])
    fair.leave_places(work, queue, [key for key, _ in rows])


def take_run(work: Work, queue: str, rows: Sequence[KeyValue]) -> None:
    """:func:`take_out` for adjacent rows of one sub-queue; the caller takes care of the turns."""
    key = rows[0][0]
    parts.take_run(work.tr, [key for key, _ in rows])
    if key.startswith(work.keys.delayed(queue)):
        work.effects.change(queue, "delayed", -len(rows))
        return
    work.effects.unready(queue, len(rows), size_of(*[value for _, value in rows]))
    if fair_key := work.keys.key_at(queue, key):
        work.effects.went(queue, fair_key, len(rows))


def end_lease(work: Work, queue: str, *places: Place) -> None:
    """Count the ends of these messages' leases, which the caller has cleared."""
    work.effects.change(queue, "leased", -len(places))
    for place in places:
        if place.startswith(TEXT_CODE):  # ``has_key`` inlined: a call for each message would cost more
            work.effects.freed(queue, split_place(place)[0])


def forget(work: Work, message: Message[bytes]) -> None:
    """Clear the index row of the old stamp: the message gets another stamp, or none."""
    unindex(work, Record.known(message.value).task_id, message.place)


def delete(work: Work, message: Message[bytes]) -> None:
    """Delete the other rows of a message; one that can't be read has none."""
    try:
        message_id, chunks, task_id = Record.traces_of(message.value)
    except FormatError:
        return
    unindex(work, task_id, message.place)
    if chunks:
        work.tr.clear_range(*work.keys.bodies(message_id))


def delete_rest(work: Work, record: Record, place: bytes) -> None:
    """:func:`delete` for a record that was read."""
    unindex(work, record.task_id, place)
    if record.chunks:
        work.tr.clear_range(*work.keys.bodies(record.message_id))


# -- in ----------------------------------------------------------------------------------------------------------------


def rank_in(work: Work, queue: str, priority: int) -> Rank:
    """The rank of a message of this priority in the queue, capped by its ``x-max-priority``."""
    return work.keys.rank(min(priority, work.routing.queue(work.tr, queue).max_priority))


def put_ready(work: Work, queue: str, key: str, rank: Rank, message: Record | bytes) -> None:
    """Put a message behind its key's messages of this rank; ``key`` "": behind those without a key.

    ``message``: a record, or the bytes of a record that stays unchanged.
    """
    work.effects.ready(queue, _put(work, work.keys.items(queue, key, rank) + STAMP_CODE, message))
    if key:
        work.effects.came(queue, key, rank)


def put_delayed(work: Work, queue: str, rank: Rank, due_ms: int, message: Record | bytes) -> None:
    """Store a message outside the ready range until it is due; its key is in its record. Guarantee: NOT-EARLY."""
    _put(work, work.keys.delayed_prefix(queue, due_ms, rank), message)
    work.tr.set(work.keys.waiting(queue), b"")
    work.effects.delayed(queue)


def _put(work: Work, prefix: bytes, message: Record | bytes) -> int:
    """Store the message behind ``prefix`` and a new stamp, and index it. Returns the size of its payload."""
    if isinstance(message, bytes):
        value, task_id, size = message, Record.known(message).task_id, size_of(message)
    else:
        if message.size > INLINE_BYTES:
            message = _write_chunks(work, message)
        value, task_id, size = message.encode(), message.task_id, message.size
    user_version = work.effects.next_user_version()
    work.tr.set_versionstamped_key(prefix, user_version, value)
    if task_id:
        keys = work.keys
        work.tr.set_versionstamped_key(keys.task(task_id) + STAMP_CODE, user_version, prefix[len(keys.prefix) :])
    return size


def with_payload(work: Work, record: Record, payload: bytes) -> Record:
    """The record with another payload, to be stored again. Clears the old chunks."""
    if record.chunks:
        work.tr.clear_range(*work.keys.bodies(record.message_id))
    return record._replace(payload=payload, size=len(payload), chunks=0)


def from_outside(work: Work, queue: str, record: Record) -> Message[bytes]:
    """A message from outside, as if it had been taken out of ``queue``. Only its chunks are stored."""
    return Message(queue, b"", _write_chunks(work, record).encode())


def _write_chunks(work: Work, record: Record) -> Record:
    """Write the record's payload as chunks if it is too large to be inline. Returns the record to store."""
    if len(record.payload) <= INLINE_BYTES:
        return record
    chunks = chunks_of(record.payload)
    for number, chunk in enumerate(chunks):
        work.tr.set(work.keys.body(record.message_id, number), chunk)
    return record._replace(chunks=len(chunks))


def put_in_place(work: Work, message: Message[Place]) -> None:
    """Make the message ready again, at its old place."""
    queue, place, value = message
    work.tr.set(work.keys.at(queue, place), value)
    work.effects.ready(queue, size_of(value))
    key, rank = split_place(place)
    if key:
        work.effects.came(queue, key, rank)


def put_leased(work: Work, lease: Lease, message: Message[Place]) -> None:
    """Lease the message to the session."""
    queue, place, _ = message
    work.tr.set(work.keys.lease(*lease), encode_lease(message))
    work.effects.change(queue, "leased", 1)
    if place.startswith(TEXT_CODE):  # ``has_key`` inlined: a call for each message would cost more
        work.effects.leased(queue, split_place(place)[0])


# -- read --------------------------------------------------------------------------------------------------------------


def read_all(work: Work, values: Sequence[bytes]) -> list[Record | FormatError]:
    """Each record with its whole payload, or the error that explains why it can't be read. Chunks take one round trip.

    A snapshot read suffices: chunks do not change while the row exists, and each transaction that takes the row
    conflicts on it.
    """
    records = open_records(values)
    chunked = [record for record in records if isinstance(record, Record) and record.chunks]
    if not chunked:
        return records
    wanted = [work.keys.body(record.message_id, at) for record in chunked for at in range(record.chunks)]
    chunks = iter(work.tr.get_many(wanted, snapshot=True))
    return [
        _whole(record, islice(chunks, record.chunks)) if isinstance(record, Record) and record.chunks else record
        for record in records
    ]


def open_records(values: Iterable[bytes]) -> list[Record | FormatError]:
    """The records, for a caller that moves them and does not need payloads in chunks."""
    found: list[Record | FormatError] = []
    for value in values:
        try:
            found.append(Record.decode(value))
        except FormatError as error:
            found.append(error.with_traceback(None))  # its frames would keep this list alive
    return found


def _whole(record: Record, chunks: Iterable[bytes | None]) -> Record | FormatError:
    payload = b"".join([chunk for chunk in chunks if chunk is not None])
    if len(payload) != record.size:
        return FormatError("part of the payload is missing", message_id=record.message_id.hex())
    return record._replace(payload=payload)


# -- the index by task -------------------------------------------------------------------------------------------------


def unindex(work: Work, task_id: str, place: bytes) -> None:
    """Clear the index row of a message that leaves ``place`` (or key) for good."""
    if task_id and place:
        work.tr.clear(work.keys.task(task_id) + STAMP_CODE + place[-STAMP_BYTES:])
