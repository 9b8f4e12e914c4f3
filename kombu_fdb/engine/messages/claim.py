"""Claim: move ready messages under leases of a session, in one transaction.

The head of the queue is read as a snapshot, and what is taken is a conflict: two claims conflict if they want the same
message, or if one puts a message back between those that the other takes (``batches.py``), and a publish conflicts with
nothing. The session's record is read serializably, so a claim can't commit beside the sweep that ends its session.
Guarantees: ONE-PLACE (ready key cleared and lease written by one commit), ONE-OWNER.

A window is bounded in bytes as well (``batches.py``), so a claim of large messages takes fewer of them; and all their
payloads are read in one round trip.

What is found and not delivered: an expired message is dropped or dead-lettered, a record that can't be read and a
message whose payload is gone are dead-lettered as malformed (POISON-ENDS), and a newer version's message is kept for it
(``newer.py``). They use up the window, so a claim that
returns less than ``limit`` does not mean an empty queue; ``arm`` tells.

The claim of a whole line of consumers (``combiner.py``) is made of the same steps: :func:`choose`, then :func:`take`
for each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.bury import Cause, bury, drop_expired
from kombu_fdb.engine.messages.message import Message, delete_rest, put_leased, read_all, take_run
from kombu_fdb.engine.scheduling import fair, line, single
from kombu_fdb.engine.scheduling.enforcement import control_keys, note_unlimited
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.work import CLAIMED, Work
from kombu_fdb.errors import FormatError, Outrun
from kombu_fdb.keyspace.codec import Record, control_of
from kombu_fdb.keyspace.layout import STAMP_BYTES, counted, has_key, range_of, split_place
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.store.protocol import KeyValue

#: Read at once from the head of a queue, and in all.
ROWS_PER_READ = 1_000
#: Of so many queues the heads are read before it is known whether they are needed: it costs no round trip.
FEW_QUEUES = 4
HEAD_BYTES = 10_000_000


def claim(work: Work, queues: Sequence[str], window: Window, acks: Sequence[Lease] = ()) -> list[Delivery]:
    """Fill the window from the queues in turn; ``acks`` are settled first. Raises ``Outrun``, as the window has it.

    All reads come before the first write: burying may write to a queue that is also claimed from here, and a range that
    holds a versionstamped key of the same transaction can't be read.
    """
    states = _read(work, queues, window, acks)
    rows = choose(work, states, window)
    opened = read_all(work, [value for _, (_, value) in rows])
    take_rows(work, states, rows, apart=window.apart)
    taken = [take(work, row, record, states, window) for row, record in zip(rows, opened, strict=True)]
    return [delivery for delivery in taken if delivery is not None]


#: A queue, and a row of one of its ready messages.
Row = tuple[str, KeyValue]
#: In the order in which they are taken.
Rows = list[Row]


def _read(work: Work, queues: Sequence[str], window: Window, acks: Sequence[Lease]) -> dict[str, QueueState]:
    """The session, the queues, their heads, and the leases that are acknowledged, in one round trip; settle those.

    Raises ``SessionLost``. The session's record is a conflict, and how the queues are worked on: no claim commits after
    a pause, or the first limit of a key, of which it did not know (KEY-LIMIT). The mark is none: each publish with a
    key sets it again.
    """
    leases, keys = settle.lease_rows(work, acks), state_keys(work, queues)
    rivals = [line.first_range(work, line.name(queues))] if window.gives_way else []
    ranges = [*leases.ranges, *rivals, *head_ranges(work, queues, window.limit)]
    values, rows = session.require(work, window.session, and_read=[*leases.keys, *keys], ranges=ranges)
    held, rows = leases.found(values[: len(leases.keys)], rows[: len(leases.ranges)]), rows[len(leases.ranges) :]
    states = states_of(queues, values[len(leases.keys) :], rows[len(rivals) :])
    note_unlimited(work, [(queue, state.control) for queue, state in states.items()])
    if any(rows[: len(rivals)]) and not is_single(states):  # a line would be served for one only: the active one
        raise Outrun
    if acks:
        settle.ack(work, acks, held)
    return states


def states_of(
    queues: Sequence[str], values: Sequence[bytes | None], heads: Sequence[list[KeyValue]] = ()
) -> dict[str, QueueState]:
    """``values``: of the :func:`state_keys`; ``heads``: of the :func:`head_ranges`."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return {
        queue: QueueState(mark is not None, control_of(control), head)
        for queue, (mark, control), head in zip(queues, pairs, chain(heads, repeat(None)), strict=False)
    }


def state_keys(work: Work, queues: Sequence[str]) -> list[bytes]:
    """What is to be read of queues that are claimed from; how they are worked on is a conflict."""
    controls = control_keys(work, queues)
    return [key for queue, control in zip(queues, controls, strict=True) for key in (work.keys.fair(queue), control)]


def head_ranges(work: Work, queues: Sequence[str], limit: int) -> list[tuple[bytes, bytes, int]]:
    """Where the first messages without keys are; of many queues, most have none that the claim would get to."""
    few = queues if len(queues) <= FEW_QUEUES else ()
    return [(*range_of(work.keys.ready(queue)), min(limit, ROWS_PER_READ)) for queue in few]


def choose(work: Work, states: Mapping[str, QueueState], window: Window) -> Rows:
    """Fill the window from the queues in turn. All it does to what it chooses is to move the keys' turns."""
    rows: Rows = []
    for queue in _open_to(work, states, window):
        wanted = window.limit - len(rows)
        if wanted > 0 and not window.room.is_full:
            rows += [(queue, row) for row in _choose_from(work, queue, states[queue], wanted, window)]
    return rows


def is_single(states: Mapping[str, QueueState]) -> bool:
    """Whether one of the queues serves one consumer only."""
    return any(state.control.single_active for state in states.values())


def _open_to(work: Work, states: Mapping[str, QueueState], window: Window) -> list[str]:
    """Those from which this claim may take."""
    single_active = [queue for queue, state in states.items() if state.control.single_active]
    window.single = bool(single_active)
    if not single_active:
        return list(states)
    admitted = single.admitted(work, single_active, window.session, window.consumers)
    return [queue for queue, state in states.items() if queue in admitted or not state.control.single_active]


def _choose_from(work: Work, queue: str, state: QueueState, wanted: int, window: Window) -> list[KeyValue]:
    control = state.control
    if control.paused:
        return []
    if state.fair:
        return fair.choose(work, queue, state, wanted, window)
    if control.ageing is None:
        rows = _head(work, queue, state, wanted)
    else:
        rows = fair.oldest_first(work, queue, control.ageing, wanted)
    return rows[: window.room.take(rows)]


def _head(work: Work, queue: str, state: QueueState, limit: int) -> list[KeyValue]:
    """Up to ``limit`` rows, in several reads if they are many, and no more than :data:`HEAD_BYTES` of them."""
    begin, end = range_of(work.keys.ready(queue))
    most = min(limit, ROWS_PER_READ)
    part = work.tr.get_range(begin, end, limit=most, snapshot=True) if state.head is None else state.head[:most]
    rows, size = part, 0
    while most == len(part) and limit > len(rows) and size < HEAD_BYTES:
        size += sum(len(value) for _, value in part)
        most = min(limit - len(rows), ROWS_PER_READ)
        part = work.tr.get_range(rows[-1][0] + b"\x00", end, limit=most, snapshot=True)
        rows = rows + part
    return rows


def take_rows(work: Work, states: Mapping[str, QueueState], rows: Rows, *, apart: bool = False) -> None:
    """Take what was chosen out of the ready ranges. The first messages of a plain queue are a run (``batches.py``).

    Those of each rank are one: what is published meanwhile stands behind the last of its rank, and so in none.
    ``apart``: as in ``Window``.
    """
    runs: list[tuple[str, bytes, list[KeyValue]]] = []
    for queue, row in rows:
        rank, state = row[0][:-STAMP_BYTES], states[queue]
        stands_behind = runs and (queue, rank) == runs[-1][:2]
        if stands_behind and not apart and not state.fair and state.control.ageing is None:
            runs[-1][2].append(row)
        else:
            runs.append((queue, rank, [row]))
    for queue, _, run in runs:
        take_run(work, queue, run)


def take(
    work: Work, row: Row, record: Record | FormatError, states: Mapping[str, QueueState], window: Window
) -> Delivery | None:
    """One message whose row was taken: deliver it, or drop or bury what can't be delivered.

    ``record``: with its payload, or why it can't be read.
    """
    queue, (key, value) = row
    state, leased, delivery = states[queue], queue not in window.no_ack, None
    place = work.keys.place(queue, key)
    if state.fair:
        place = counted(place)
    try:
        fair_key = split_place(place)[0]
    except FormatError as error:  # it would be at the head of each claim
        bury(work, Message(queue, key, value), Cause.malformed(error))
        return None
    if isinstance(record, FormatError):
        bury(work, Message(queue, key, value), Cause.malformed(record))
    elif 0 < record.expires_ms <= work.now_ms:
        drop_expired(work, Message(queue, key, value), record)
    else:
        work.effects.note(queue, CLAIMED, fair_key)
        lease = Lease(window.session, window.next_number)
        window.next_number += 1
        delivery = delivery_of(lease, queue, record, state.control.consumer_timeout_ms)
        if leased:
            put_leased(work, lease, Message(queue, place, value))
        else:
            delete_rest(work, record, key)
            delivery = delivery._replace(leased=False)
    if (delivery is None or not leased) and has_key(place):
        work.effects.spared(queue, fair_key)
    return delivery


def delivery_of(lease: Lease, queue: str, record: Record, timeout_ms: int) -> Delivery:
    """A leased message, as its owner gets it. ``timeout_ms``: of the queue's consumers, 0 for none."""
    ttr_ms = min(record.ttr_ms or timeout_ms, timeout_ms) if timeout_ms else record.ttr_ms
    return Delivery(
        lease,
        queue,
        record.payload,
        record.message_id,
        record.redeliveries,
        record.deaths,
        record.key,
        ttr_ms,
        way=record.way,
        seen=record.seen,
    )
