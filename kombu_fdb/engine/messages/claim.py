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

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kombu_fdb.engine.messages.bury import Cause, bury, drop_expired
from kombu_fdb.engine.messages.message import Message, Opened, delete_rest, put_leased, read_all, take_row
from kombu_fdb.engine.scheduling import ageing, fair, single
from kombu_fdb.engine.scheduling.window import Window
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.effects import CLAIMED
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import control_of
from kombu_fdb.keyspace.layout import Keyspace, counted, has_key, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Delivery, Lease, Place, QueueControl, Rank, SessionId
from kombu_fdb.store.protocol import KeyValue, Watch

__all__ = ["Window", "arm", "claim"]

#: Read at once from the head of a queue, and in all.
ROWS_PER_READ = 1_000
HEAD_BYTES = 10_000_000


def claim(work: Work, queues: Sequence[str], window: Window, *, no_ack: Collection[str]) -> list[Delivery]:
    """Fill the window from the queues in turn.

    All reads come before the first write: burying may write to a queue that is also claimed from here, and a range that
    holds a versionstamped key of the same transaction can't be read.
    """
    states = _read_states(work, queues, window)
    rows: list[tuple[str, KeyValue]] = []
    for queue in _open_to(work, queues, states, window):
        wanted = window.limit - len(rows)
        if wanted > 0 and not window.room.is_full:
            rows += [(queue, row) for row in _choose(work, queue, states[queue], wanted, window)]
    found = _open_all(work, rows, states)
    taken = [
        _take(work, each, window, leased=each.queue not in no_ack, control=states[each.queue].control) for each in found
    ]
    return [delivery for delivery in taken if delivery is not None]


class _State(NamedTuple):
    """What a claim must know of a queue before it looks for messages."""

    fair: bool
    control: QueueControl


def _read_states(work: Work, queues: Sequence[str], window: Window) -> dict[str, _State]:
    """The session and all queues in one round trip. Raises ``SessionLost``.

    The session's record is a conflict, and how the queues are worked on: no claim commits after a pause, or the first
    limit of a key, of which it did not know (KEY-LIMIT). The mark is none: each publish with a key sets it again.
    """
    for queue in queues:
        work.tr.add_read_conflict_key(work.keys.control(queue))
    values = session.require(work, window.session, and_read=_state_keys(work.keys, queues))
    return _states_of(queues, values)


def _states_of(queues: Sequence[str], values: Sequence[bytes | None]) -> dict[str, _State]:
    """``values``: mark and control of each queue."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return {
        queue: _State(mark is not None, control_of(control))
        for queue, (mark, control) in zip(queues, pairs, strict=True)
    }


def _state_keys(keys: Keyspace, queues: Sequence[str]) -> list[bytes]:
    return [key for queue in queues for key in (keys.fair(queue), keys.control(queue))]


def _open_to(work: Work, queues: Sequence[str], states: Mapping[str, _State], window: Window) -> list[str]:
    """Those from which this claim may take."""
    single_active = [queue for queue in queues if states[queue].control.single_active]
    if not single_active:
        return list(queues)
    admitted = single.admitted(work, single_active, window.session, window.consumers)
    return [queue for queue in queues if queue in admitted or not states[queue].control.single_active]


def _choose(work: Work, queue: str, state: _State, wanted: int, window: Window) -> list[KeyValue]:
    control = state.control
    if control.paused:
        return []
    if state.fair:
        return fair.choose(work, queue, control, wanted, window)
    slice_ = window.slice_of(control)
    limit = wanted * (slice_ + 1)
    if control.ageing is None:
        rows = _head(work, *range_of(work.keys.ready(queue)), limit)
    else:
        rows = ageing.oldest_first(work, queue, control.ageing, limit)
    mine = rows[wanted * slice_ :] or rows[-wanted:]
    return mine[: window.room.take(mine)]


def _head(work: Work, begin: bytes, end: bytes, limit: int) -> list[KeyValue]:
    """Up to ``limit`` rows, in several reads if they are many, and no more than :data:`HEAD_BYTES` of them."""
    rows: list[KeyValue] = []
    size = 0
    while limit > len(rows) and size < HEAD_BYTES:
        most = min(limit - len(rows), ROWS_PER_READ)
        part = work.tr.get_range(begin, end, limit=most, snapshot=True)
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
    place: Place
    opened: Opened | FormatError

    @property
    def message(self) -> Message[bytes]:
        """As it is buried."""
        return Message(self.queue, self.key, self.value)


def _take(work: Work, found: _Found, window: Window, *, leased: bool, control: QueueControl) -> Delivery | None:
    """Take one message out of the ready range: deliver it, or drop or bury what can't be delivered."""
    take_row(work, found.queue, (found.key, found.value))
    try:
        fair_key = split_place(found.place)[0]
    except FormatError as error:  # it would be at the head of each claim
        bury(work, found.message, Cause.malformed(error))
        return None
    delivery = _deliver(work, found, window, leased=leased)
    if delivery is not None and control.consumer_timeout_ms:
        delivery = delivery._replace(ttr_ms=_shorter(delivery.ttr_ms, control.consumer_timeout_ms))
    if has_key(found.place) and (delivery is None or not leased):
        work.effects.spared(found.queue, fair_key)
    return delivery


def _deliver(work: Work, found: _Found, window: Window, *, leased: bool) -> Delivery | None:
    queue, key, value, place, opened = found
    if isinstance(opened, FormatError):
        bury(work, found.message, Cause.malformed(opened))
        return None
    record, payload = opened
    if record.expires_ms and record.expires_ms <= work.now_ms:
        drop_expired(work, found.message, record)
        return None
    work.effects.note(queue, CLAIMED, split_place(place)[0])
    lease = Lease(window.session, window.next_number)
    window.next_number += 1
    if leased:
        put_leased(work, lease, Message(queue, place, value))
    else:
        delete_rest(work, record, key)
    return Delivery(
        lease, queue, payload, record.message_id, record.redeliveries, record.deaths, record.key, record.ttr_ms
    )


def _shorter(ttr_ms: int, timeout_ms: int) -> int:
    return min(ttr_ms or timeout_ms, timeout_ms)


def _open_all(work: Work, rows: Sequence[tuple[str, KeyValue]], states: Mapping[str, _State]) -> list[_Found]:
    """The messages with their payloads."""
    opened = read_all(work, [value for _, (_, value) in rows])
    return [
        _Found(queue, key, value, _place(work.keys, queue, key, states[queue]), each)
        for (queue, (key, value)), each in zip(rows, opened, strict=True)
    ]


def _place(keys: Keyspace, queue: str, key: bytes, state: _State) -> Place:
    place = keys.place(queue, key)
    return counted(place) if state.fair else place


def arm(work: Work, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]) -> list[Watch] | None:
    """Watch the bells of empty queues; None as soon as one is not empty.

    Of a queue with another active consumer the change of that is watched instead.

    Probe and watch are of one version, so a message is either seen by the probe or changes the bell after it.
    """
    heads = work.tr.get_ranges([(*range_of(work.keys.ready(queue)), 1) for queue in queues], snapshot=True)
    states = _states_of(queues, work.tr.get_many(_state_keys(work.keys, queues), snapshot=True))
    single_active = [queue for queue, state in states.items() if state.control.single_active]
    others = single.standing_by(work, single_active, session_id, consumers)
    for queue, head in zip(queues, heads, strict=True):
        state = states[queue]
        if queue not in others and not state.control.paused and _has_work(work, queue, state, head):
            return None
    return [work.tr.watch(work.keys.single(queue) if queue in others else work.keys.bell(queue)) for queue in queues]


def _has_work(work: Work, queue: str, state: _State, head: list[KeyValue]) -> bool:
    if not state.fair:
        return bool(head)
    if work.tr.get_range(*work.keys.todo(queue), limit=1, snapshot=True):
        return True
    # Messages without a key wait, but nobody may have them: their sub-queue is parked.
    try:
        return bool(head) and _is_unmarked(work, queue, work.keys.place_rank(queue, head[0][0]))
    except FormatError:  # a claim sets it aside
        return True


def _is_unmarked(work: Work, queue: str, rank: Rank) -> bool:
    return work.tr.get(work.keys.active(queue, "", rank), snapshot=True) is None
