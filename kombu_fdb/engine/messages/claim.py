"""Claim: move ready messages under leases of a session, in one transaction.

The head of the queue is read as a snapshot, and a conflict key is added for exactly the messages taken: two claims
conflict if and only if they want the same message, and a publish conflicts with nobody. The session's record is read
serializably, so a claim can't commit beside the sweep that ends its session. Guarantees: ONE-PLACE (ready key cleared
and lease written by one commit), ONE-OWNER.

A window is bounded in bytes as well (``room.py``), so a claim of large messages takes fewer of them; and all their
payloads are read in one round trip.

What is found and not delivered: an expired message is dropped or dead-lettered, a record that can't be read and a
message whose payload is gone are dead-lettered as malformed (POISON-ENDS), and a newer version's message is kept for it
(``newer.py``). They use up the window, so a claim that
returns less than ``limit`` does not mean an empty queue; ``arm`` tells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kombu_fdb.engine.messages.deadletter import Graves, bury, drop, drop_expired
from kombu_fdb.engine.scheduling import ageing, fair, single
from kombu_fdb.engine.scheduling.rates import Sightings
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.room import Room
from kombu_fdb.engine.stored.tally import CLAIMED, LEASED, Tally
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, control_of, decode_record, encode_lease, size_of
from kombu_fdb.keyspace.layout import NO_KEY, Keyspace, has_key, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Delivery, Lease, QueueControl
from kombu_fdb.store.protocol import KeyValue, Transaction, Watch

__all__ = ["Window", "arm", "claim", "payload_of"]

#: Read at once from the head of a queue, and in all.
ROWS_PER_READ = 1_000
HEAD_BYTES = 10_000_000


@dataclass(slots=True)
class Window:
    """How much to claim, for whom, and from where."""

    session: bytes
    #: Number of the first lease; the caller reserved ``limit`` of them before the retry loop.
    next_number: int
    limit: int
    #: How many windows to leave to rivals (``contention.py``).
    slice: int
    now_ms: int
    #: Where to begin among the doors of a fair queue (``fair.py``).
    first_door: int
    #: Of token buckets (``rates.py``).
    sightings: Sightings
    #: By queue, whose claim it is, where only one consumer is active (``single.py``).
    consumers: Mapping[str, str] = field(default_factory=dict)
    room: Room = field(default_factory=Room)


def claim(
    tr: Transaction, graves: Graves, tally: Tally, queues: Sequence[str], window: Window, *, no_ack: Collection[str]
) -> list[Delivery]:
    """Fill the window from the queues in turn.

    All reads come before the first write: burying may write to a queue that is also claimed from here, and a range that
    holds a versionstamped key of the same transaction can't be read.
    """
    states = _read_states(tr, graves.keys, queues, window)
    rows: list[tuple[str, KeyValue]] = []
    for queue in _open_to(tr, graves.keys, queues, states, window):
        wanted = window.limit - len(rows)
        if wanted > 0 and not window.room.is_full:
            rows += [(queue, row) for row in _choose(tr, graves.keys, queue, states[queue], wanted, window)]
    found = _open_all(tr, graves.keys, rows, states)
    taken = [
        _take(tr, graves, tally, each, window, leased=each.queue not in no_ack, state=states[each.queue])
        for each in found
    ]
    return [delivery for delivery in taken if delivery is not None]


def _slice(control: QueueControl, window: Window) -> int:
    """How many windows to leave to rivals. One active consumer has none, and wants the order."""
    if control.single_active:
        return 0
    return window.slice if control.ageing is None else min(window.slice, ageing.MOST_SLICES)


class _State(NamedTuple):
    """What a claim must know of a queue before it looks for messages."""

    fair: bool
    control: QueueControl


def _read_states(tr: Transaction, keys: Keyspace, queues: Sequence[str], window: Window) -> dict[str, _State]:
    """The session and all queues in one round trip. Raises ``LeaseLost``.

    The session's record is a conflict, and how the queues are worked on: no claim commits after a pause, or the first
    limit of a key, of which it did not know (KEY-LIMIT). The mark is none: each publish with a key sets it again.
    """
    for queue in queues:
        tr.add_read_conflict_key(keys.control(queue))
    states = [key for queue in queues for key in (keys.fair(queue), keys.control(queue))]
    values = session.require(tr, keys, window.session, and_read=states)
    return {
        queue: _State(values[2 * number] is not None, control_of(values[2 * number + 1]))
        for number, queue in enumerate(queues)
    }


def _open_to(
    tr: Transaction, keys: Keyspace, queues: Sequence[str], states: Mapping[str, _State], window: Window
) -> list[str]:
    """Those from which this claim may take."""
    single_active = [queue for queue in queues if states[queue].control.single_active]
    if not single_active:
        return list(queues)
    admitted = single.admitted(tr, keys, single_active, window.session, window.consumers)
    return [queue for queue in queues if queue in admitted or not states[queue].control.single_active]


def _choose(tr: Transaction, keys: Keyspace, queue: str, state: _State, wanted: int, window: Window) -> list[KeyValue]:
    if state.control.paused:
        return []
    slice_ = _slice(state.control, window)
    if state.fair:
        return fair.choose(
            tr,
            keys,
            queue,
            state.control,
            wanted,
            slice_=slice_,
            first_door=window.first_door,
            now_ms=window.now_ms,
            room=window.room,
            sightings=window.sightings,
        )
    limit = wanted * (slice_ + 1)
    if state.control.ageing is None:
        rows = _head(tr, *range_of(keys.ready(queue)), limit)
    else:
        rows = ageing.oldest_first(tr, keys, queue, state.control.ageing, limit, window.now_ms)
    mine = rows[wanted * slice_ :] or rows[-wanted:]
    return mine[: window.room.take(mine)]


def _head(tr: Transaction, begin: bytes, end: bytes, limit: int) -> list[KeyValue]:
    """Up to ``limit`` rows, in several reads if they are many, and no more than :data:`HEAD_BYTES` of them."""
    rows: list[KeyValue] = []
    size = 0
    while limit > len(rows) and size < HEAD_BYTES:
        most = min(limit - len(rows), ROWS_PER_READ)
        part = tr.get_range(begin, end, limit=most, snapshot=True)
        rows += part
        if len(part) < most:
            break
        begin = rows[-1][0] + b"\x00"
        size += sum(len(value) for _, value in part)
    return rows


class _Found(NamedTuple):
    """A message that was chosen. ``opened``: its record and payload, or why they can't be read."""

    queue: str
    key: bytes
    value: bytes
    place: bytes
    opened: tuple[Record, bytes] | FormatError


def _take(
    tr: Transaction, graves: Graves, tally: Tally, found: _Found, window: Window, *, leased: bool, state: _State
) -> Delivery | None:
    """Take one message out of the ready range: deliver it, or drop or bury what can't be delivered."""
    try:
        fair_key = split_place(found.place)[0]
    except FormatError as error:
        _set_aside(tr, graves, tally, found, error, window.now_ms)
        return None
    tr.add_read_conflict_key(found.key)
    tr.clear(found.key)
    tally.unready(found.queue, size_of(found.value))
    if fair_key:
        tally.went(found.queue, fair_key)
    delivery = _deliver(tr, graves, tally, found, window, leased=leased)
    if delivery is not None and state.control.consumer_timeout_ms:
        delivery = delivery._replace(ttr_ms=_shorter(delivery.ttr_ms, state.control.consumer_timeout_ms))
    if has_key(found.place) and (delivery is None or not leased):
        tally.spared(found.queue, fair_key)
    return delivery


def _set_aside(tr: Transaction, graves: Graves, tally: Tally, found: _Found, error: FormatError, now_ms: int) -> None:
    """A message at a place that can't be read would be at the head of each claim."""
    queue, key, value, *_ = found
    tr.add_read_conflict_key(key)
    tr.clear(key)
    tally.unready(queue, size_of(value))
    bury(tr, graves, tally, queue, value, "malformed", now_ms, place=key, details={"error": str(error)})


def _deliver(
    tr: Transaction, graves: Graves, tally: Tally, found: _Found, window: Window, *, leased: bool
) -> Delivery | None:
    queue, key, value, place, opened = found
    if isinstance(opened, FormatError):
        bury(tr, graves, tally, queue, value, "malformed", window.now_ms, place=key, details={"error": str(opened)})
        return None
    record, payload = opened
    if record.expires_ms and record.expires_ms <= window.now_ms:
        drop_expired(tr, graves, tally, queue, record, value, window.now_ms, place=key)
        return None
    fair_key = split_place(place)[0]
    tally.note(queue, CLAIMED, fair_key)
    lease = Lease(window.session, window.next_number)
    window.next_number += 1
    if leased:
        tr.set(graves.keys.lease(*lease), encode_lease(queue, place, value))
        tally.change(queue, LEASED, 1)
        if has_key(place):
            tally.leased(queue, fair_key)
    else:
        drop(tr, graves.keys, record, key)
    return Delivery(
        lease, queue, payload, record.message_id, record.redeliveries, record.deaths, record.key, record.ttr_ms
    )


def _shorter(ttr_ms: int, timeout_ms: int) -> int:
    return min(ttr_ms or timeout_ms, timeout_ms)


def _open_all(
    tr: Transaction, keys: Keyspace, rows: Sequence[tuple[str, KeyValue]], states: Mapping[str, _State]
) -> list[_Found]:
    """The messages with their payloads, all of which are read in one round trip, and none if they stand in the records.

    Snapshot: nobody writes them while the record, on which a claim conflicts, exists.
    """
    records = [_decode(value) for _, (_, value) in rows]
    wanted = [chunk for record in records if isinstance(record, Record) for chunk in _chunks(keys, record)]
    chunks = iter(tr.get_many(wanted, snapshot=True) if wanted else [])
    found = []
    for (queue, (key, value)), record in zip(rows, records, strict=True):
        opened = _join(record, islice(chunks, record.chunks)) if isinstance(record, Record) else record
        found.append(_Found(queue, key, value, _place(keys, queue, key, states[queue]), opened))
    return found


def _place(keys: Keyspace, queue: str, key: bytes, state: _State) -> bytes:
    place = keys.place(queue, key)
    return NO_KEY + place if state.fair and not has_key(place) else place


def _decode(value: bytes) -> Record | FormatError:
    try:
        return decode_record(value)
    except FormatError as error:
        return error


def _chunks(keys: Keyspace, record: Record) -> list[bytes]:
    return [keys.body(record.message_id, number) for number in range(record.chunks)]


def _join(record: Record, chunks: Iterable[bytes | None]) -> tuple[Record, bytes] | FormatError:
    payload = b"".join([chunk for chunk in chunks if chunk is not None]) if record.chunks else record.payload
    if len(payload) != record.size:
        return FormatError("part of the payload is missing", message_id=record.message_id.hex())
    return record, payload


def payload_of(tr: Transaction, keys: Keyspace, record: Record) -> bytes:
    """Join the chunks. Raises ``FormatError`` if one is missing. Snapshot."""
    opened = _join(record, tr.get_many(_chunks(keys, record), snapshot=True) if record.chunks else [])
    if isinstance(opened, FormatError):
        raise opened
    return opened[1]


def arm(
    tr: Transaction, keys: Keyspace, queues: Sequence[str], session_id: bytes, consumers: Mapping[str, str]
) -> list[Watch] | None:
    """Watch the bells of empty queues; None as soon as one is not empty.

    Of a queue with another active consumer the change of that is watched instead.

    Probe and watch are of one version, so a message is either seen by the probe or changes the bell after it.
    """
    heads = tr.get_ranges([(*range_of(keys.ready(queue)), 1) for queue in queues], snapshot=True)
    values = tr.get_many([key for queue in queues for key in (keys.fair(queue), keys.control(queue))], snapshot=True)
    states = [
        _State(values[2 * number] is not None, control_of(values[2 * number + 1])) for number in range(len(queues))
    ]
    single_active = [queue for queue, state in zip(queues, states, strict=True) if state.control.single_active]
    others = single.standing_by(tr, keys, single_active, session_id, consumers)
    for queue, state, head in zip(queues, states, heads, strict=True):
        if queue not in others and not state.control.paused and _has_work(tr, keys, queue, state, head):
            return None
    return [tr.watch(keys.single(queue) if queue in others else keys.bell(queue)) for queue in queues]


def _has_work(tr: Transaction, keys: Keyspace, queue: str, state: _State, head: list[KeyValue]) -> bool:
    if not state.fair:
        return bool(head)
    if tr.get_range(*keys.todo(queue), limit=1, snapshot=True):
        return True
    # Messages without a key wait, but nobody may have them: their sub-queue is parked.
    try:
        return bool(head) and tr.get(keys.active(queue, "", keys.place_rank(queue, head[0][0])), snapshot=True) is None
    except FormatError:  # a claim sets it aside
        return True
