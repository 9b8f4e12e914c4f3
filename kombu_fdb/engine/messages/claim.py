"""Claim: move ready messages under leases, in one transaction; for one consumer, or for a wait queue of them.

A claim chooses messages (:func:`choose_rows`), takes their rows out of the ready ranges (:func:`take_rows`), and leases
each one (:func:`take`). It reads the head of the queue at snapshot and conflicts on what it takes. It conflicts with a
claim of the same message, and with a transaction that returns a message between two of them (``parts.py``), but not
with a publish. It reads the session's record serializably, so it can't commit once the sweep has ended its session.
Guarantees: ONE-PLACE (one commit clears the ready key and writes the lease), ONE-OWNER.

A window is bounded in bytes as well (``window.py``), so a claim of large messages takes fewer of them. All their
payloads are read in one round trip.

A claim does not deliver all messages that it finds. An expired one is dropped or dead-lettered; an unreadable record
and a message whose payload is gone are dead-lettered as malformed (POISON-ENDS). A newer version's message is kept for
that version (``forward_compatibility.py``). All of these use up the window, so a claim that returns fewer than
``limit`` messages may leave others in the queue; ``arm`` says whether it does (``watch.py``).

Join: a consumer enters the wait queue of the consumers of the same queues (``scheduling/wait_queue.py``), and settles
what it has finished. A join conflicts with the end of its session, with transactions that settle the same leases, and
with a change of the queues' limits (``key_limits.py``), but not with other joins or services.

Serve: the first consumer in the wait queue claims for all of them, in one transaction. It claims what a single consumer
with the sum of their demands would get, and deals the messages out: each one is leased to the next consumer whose
window is not full, the server first. So one commit grants messages in the order in which a single consumer would get
them (FAIR), however many consumers there are.

A queue with a single active consumer has no wait queue, as a service could serve that consumer only. If it is declared
with ``x-single-active-consumer`` while consumers are in its wait queue, each leaves on reaching the front, and claims
for itself.

A service is bounded in messages and bytes: a demand that does not fit stays in the wait queue. So does a demand that
gets nothing because there are too few messages; the first such demand then heads the wait queue. For another consumer's
message, the server reads only the record. The consumer that gets the message reads the payload (:func:`look`), and
rejects it as malformed if the payload is gone. A service conflicts with transactions that take the same messages, and
with the end of the server's session, or of a demand or session that it serves; it does not conflict with joins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from kombu_fdb.engine import session
from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.bury import bury_malformed, drop_expired
from kombu_fdb.engine.messages.message import delete_rest, open_records, put_leased, read_all, take_run
from kombu_fdb.engine.scheduling import fair, single, wait_queue
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError, Outrun, SessionLost
from kombu_fdb.keyspace.codec import Message, Record, control_of
from kombu_fdb.keyspace.layout import STAMP_BYTES, counted, has_key, range_of, read_or, split_place
from kombu_fdb.model import Delivery, Demand, Lease, QueueControl
from kombu_fdb.store.protocol import KeyValue

#: Rows read at once from the head of a queue, and bytes read in all.
ROWS_PER_READ = 1_000
#: How many queues are remembered as fair; the fair order of others costs another round trip.
MOST_FAIR = 10_000
#: Up to this many queues, all heads are read with the rest, needed or not: it costs no round trip.
FEW_QUEUES = 4
HEAD_BYTES = 10_000_000


def claim(work: Work, queues: Sequence[str], window: Window, acks: Sequence[Lease] = ()) -> list[Delivery]:
    """Fill the window from the queues in turn; ``acks`` are settled first. Raises ``Outrun`` (see ``Window``).

    All reads come before the first write: a burial may write to a queue that this claim reads, and a range that holds a
    versionstamped key of the same transaction can't be read.
    """
    states = _read(work, queues, window, acks)
    rows = choose_rows(work, states, window)
    opened = read_all(work, [value for _, (_, value) in rows])
    take_rows(work, states, rows, apart=window.apart)
    taken = [take(work, row, record, states, window) for row, record in zip(rows, opened, strict=True)]
    return [delivery for delivery in taken if delivery is not None]


#: A queue, and a row of one of its ready messages.
Row = tuple[str, KeyValue]
#: In the order in which they are taken.
Rows = list[Row]


def _read(work: Work, queues: Sequence[str], window: Window, acks: Sequence[Lease]) -> dict[str, QueueState]:
    """Read the session, the queues, their heads, and the leases to acknowledge in one round trip; settle those leases.

    Raises ``SessionLost``. Conflicts on the session's record and on the queues' controls: no claim that has missed a
    pause, or the first limit of a key, can commit (KEY-LIMIT). It does not conflict on a queue's fair mark, which each
    publish with a key sets again.
    """
    lease_keys, lease_ranges = settle.lease_rows(work, acks)
    keys = state_keys(work, queues)
    waiters = [wait_queue.first_range(work, wait_queue.name(queues))] if window.gives_way else []
    known = _known_fair(queues, window)
    ranges = [*lease_ranges, *waiters, *_head_ranges(work, queues, known, window, window.limit)]
    values, rows = session.require(work, window.session, and_read=[*lease_keys, *keys], ranges=ranges)
    held, rows = settle.in_runs(lease_keys, values, rows[: len(lease_ranges)]), rows[len(lease_ranges) :]
    states = _states_of(queues, values[len(lease_keys) :], rows[len(waiters) :], known, window)
    note_unlimited(work, [(queue, state.control) for queue, state in states.items()])
    if any(rows[: len(waiters)]) and not single_active(states):  # else a service would serve no consumer
        raise Outrun
    if acks:
        settle.ack(work, acks, held)
    return states


def control_keys(work: Work, queues: Sequence[str]) -> list[bytes]:
    """The rows of the queues' controls, which say whether their keys have limits. Each is read as a conflict."""
    keys = [work.keys.control(queue) for queue in queues]
    for key in keys:
        work.tr.add_read_conflict_key(key)
    return keys


def note_unlimited(work: Work, controls: Iterable[tuple[str, QueueControl]]) -> None:
    """Note the queues whose control says that no key has limits: there no key waits for the end of a lease."""
    work.effects.unlimited.update(queue for queue, control in controls if not control.limits_keys)


def states_of(queues: Sequence[str], values: Sequence[bytes | None]) -> dict[str, QueueState]:
    """``values``: those of :func:`state_keys`."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return {
        queue: QueueState(mark is not None, control_of(control))
        for queue, (mark, control) in zip(queues, pairs, strict=True)
    }


def _known_fair(queues: Sequence[str], window: Window) -> frozenset[str]:
    """The queues whose fair order is read with their heads. Computed once, as other threads change what is known."""
    return frozenset(queue for queue in queues if queue in window.fair_queues)


def _states_of(
    queues: Sequence[str],
    values: Sequence[bytes | None],
    rows: Sequence[list[KeyValue]],
    known: frozenset[str],
    window: Window,
) -> dict[str, QueueState]:
    """``rows``: those of :func:`_head_ranges`. Notes which queues are fair."""
    states, left = states_of(queues, values), iter(rows)
    for queue, state in states.items() if rows else ():
        head = next(left)
        order = list(islice(left, fair.ORDER_RANGES)) if queue in known else None
        states[queue] = state._replace(head=head, order=order if state.control.ageing is None else None)
        if state.fair and len(window.fair_queues) < MOST_FAIR:
            window.fair_queues.add(queue)
        else:
            window.fair_queues.discard(queue)
    return states


def state_keys(work: Work, queues: Sequence[str]) -> list[bytes]:
    """The keys to read of queues that are claimed from; each queue's control is a conflict."""
    controls = control_keys(work, queues)
    return [key for queue, control in zip(queues, controls, strict=True) for key in (work.keys.fair(queue), control)]


def _head_ranges(
    work: Work, queues: Sequence[str], known: frozenset[str], window: Window, limit: int
) -> list[tuple[bytes, bytes, int]]:
    """Where the first messages without keys are, and the fair order of the queues ``known`` as fair.

    With many queues there are no ranges, as most heads would not be used.
    """
    ranges: list[tuple[bytes, bytes, int]] = []
    for queue in dict.fromkeys(queues) if len(queues) <= FEW_QUEUES else ():
        is_fair, most = queue in known, min(limit, ROWS_PER_READ)
        ranges.append((*range_of(work.keys.ready(queue)), most + is_fair))  # a turn of one sub-queue needs one more
        if is_fair:
            ranges += fair.order_ranges(work.keys, queue, window.first_bucket, limit)
    return ranges


def choose_rows(work: Work, states: Mapping[str, QueueState], window: Window) -> Rows:
    """Choose messages for the window from the queues in turn. Changes nothing but the turns of keys."""
    rows: Rows = []
    for queue in _open_to(work, states, window):
        wanted = window.limit - len(rows)
        if wanted > 0 and not window.is_full:
            rows += [(queue, row) for row in _choose_from(work, queue, states[queue], wanted, window)]
    return rows


def single_active(states: Mapping[str, QueueState]) -> list[str]:
    """Those of the queues that have a single active consumer."""
    found = []
    for queue, state in states.items():  # no comprehension: its call would slow down each claim
        if state.control.single_active:
            found.append(queue)
    return found


def _open_to(work: Work, states: Mapping[str, QueueState], window: Window) -> list[str]:
    """The queues from which this claim may take."""
    window.single = single_active(states)
    if not window.single:
        return list(states)
    admitted = single.admitted(work, window.single, window.session, window.consumers)
    return [queue for queue in states if queue in admitted or queue not in window.single]


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
    return rows[: window.take(rows)]


def _head(work: Work, queue: str, state: QueueState, limit: int) -> list[KeyValue]:
    """Up to ``limit`` rows, in several reads if there are many, and no more than :data:`HEAD_BYTES` of them."""
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
    """Take the chosen rows out of the ready ranges. The first messages of a queue without keys form a run.

    A run (``parts.py``) ends with its rank: concurrent publishes append behind the last message of their rank, outside
    the run. ``apart``: as in ``Window``.
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
    """Deliver one message whose row was taken, or drop or bury it if it can't be delivered.

    ``record``: with its payload, or why it can't be read.
    """
    queue, (key, value) = row
    state, leased, delivery = states[queue], queue not in window.no_ack, None
    place = work.keys.place(queue, key)
    if state.fair:
        place = counted(place)
    try:
        fair_key = split_place(place)[0]
    except FormatError as error:  # left there, it would head every claim
        bury_malformed(work, Message(queue, key, value), error)
        return None
    if isinstance(record, FormatError):
        bury_malformed(work, Message(queue, key, value), record)
    elif record.expires_ms and record.has_expired(work.now_ms):
        drop_expired(work, Message(queue, key, value), record)
    else:
        work.effects.note(queue, "claimed", fair_key)
        lease = Lease(window.session, window.next_number)
        window.next_number += 1
        delivery = delivery_of(lease, queue, record, state.control.consumer_timeout_ms)
        if leased:
            put_leased(work, lease, Message(queue, place, value))
        else:
            work.effects.note(queue, "acked", fair_key)
            delete_rest(work, record, key)
            delivery = delivery._replace(leased=False)
    if (delivery is None or not leased) and has_key(place):
        work.effects.spared(queue, fair_key)
    return delivery


def delivery_of(lease: Lease, queue: str, record: Record, timeout_ms: int) -> Delivery:
    """A leased message for its owner. ``timeout_ms``: the consumer timeout of the queue, 0 for none."""
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
        delivery_info=record.delivery_info,
        seen=record.seen,
    )


# -- join --------------------------------------------------------------------------------------------------------------


def join(
    work: Work, demand: Demand, acks: Sequence[Lease] = (), *, queues: Sequence[str] = (), over: Collection[int] = ()
) -> None:
    """Join the wait queue of the consumers of the same ``queues``; ``acks`` are settled in the same transaction.

    ``queues``: if there are many, they are not read. ``over``: the first lease numbers of the session's ended demands,
    whose rows are cleared. Raises ``SessionLost``. A caller that does not know the outcome calls ``Sessions.recover``.
    """
    keys, ranges = settle.lease_rows(work, acks)
    few = queues if acks and len(queues) <= FEW_QUEUES else ()
    values, runs = session.require(work, demand.session, and_read=[*keys, *control_keys(work, few)], ranges=ranges)
    note_unlimited(work, zip(few, map(control_of, values[len(keys) :]), strict=True))
    if acks:
        settle.ack(work, acks, settle.in_runs(keys, values, runs))
    wait_queue.join(work, demand, over)


# -- serve -------------------------------------------------------------------------------------------------------------


#: The limit for one service.
MOST_MESSAGES = 512


class Served(NamedTuple):
    """What the server got, and how many other demands got messages. ``ended``: the server's own demand had ended.

    ``single``: the queues that have a single active consumer; if there are any, no demand was served.
    """

    deliveries: list[Delivery]
    others: int
    ended: bool = False
    single: Collection[str] = ()


#: What was granted, and the leases whose messages can't be read, with the reason.
Collected = tuple[list[Delivery], list[tuple[Lease, FormatError]]]


def serve(work: Work, queues: Sequence[str], mine: Demand, seen: wait_queue.Waiting, window: Window) -> Served:
    """Claim for the demands that were ``seen`` in the wait queue and still wait, ``mine`` among them.

    ``window``: at most this much for all of them together. Raises ``SessionLost`` if the server's session was fenced.
    """
    states, waiting = _read_wait_queue(work, queues, mine, seen, window)
    if single := single_active(states):
        return Served([], 0, single=single)
    note_unlimited(work, [(queue, state.control) for queue, state in states.items()])
    windows = _shares(mine, waiting.values(), window)
    if not windows:
        return Served([], 0, ended=True)
    chosen = choose_rows(work, states, replace(window, limit=sum(each.limit for each in windows.values())))
    dealt = list(zip(_in_turn(windows), chosen, strict=False))
    found: dict[Demand, list[Delivery]] = {}
    for demand, delivery in _take_all(work, states, windows, dealt):
        if delivery is not None:
            found.setdefault(demand, []).append(delivery)
    for row, demand in waiting.items():
        if demand in found:
            wait_queue.grant(work, row, demand, _timeouts(states, found[demand]))
    own = found.pop(mine, [])
    return Served(own, len(found))


def _timeouts(states: Mapping[str, QueueState], found: Sequence[Delivery]) -> dict[str, int]:
    """The consumer timeouts, of these messages' queues only: all queues' timeouts might not fit into a value."""
    timeouts = {each.queue: states[each.queue].control.consumer_timeout_ms for each in found}
    return {queue: ms for queue, ms in timeouts.items() if ms}


def _read_wait_queue(
    work: Work, queues: Sequence[str], mine: Demand, seen: wait_queue.Waiting, window: Window
) -> tuple[dict[str, QueueState], wait_queue.Waiting]:
    """Read queues, demands and sessions in one round trip. Returns the queues, and the demands that wait."""
    demands = [work.keys.demand(demand.session, demand.first) for demand in seen.values()]
    sessions = [work.keys.session(demand.session) for demand in seen.values()]
    known = _known_fair(queues, window)
    heads = _head_ranges(work, queues, known, window, min(window.limit, sum(each.want for each in seen.values())))
    values, found = work.tr.get_together([*demands, *sessions, *state_keys(work, queues)], heads, snapshot=True)
    count = len(seen)
    waiting = {}
    work.tr.add_read_conflict_key(work.keys.session(mine.session))
    for (row, demand), stands, record in zip(seen.items(), values, values[count:], strict=False):
        if record is None and demand == mine:
            raise SessionLost(session=mine.session.hex())
        if record is not None and wait_queue.waits(work, row, demand, stands):
            waiting[row] = demand
    return _states_of(queues, values[2 * count :], found, known, window), waiting


def _shares(mine: Demand, waiting: Collection[Demand], window: Window) -> dict[Demand, Window]:
    """The windows of the demands that are served, the server's first; none if it no longer waits."""
    shares: dict[Demand, Window] = {}
    left = window.limit
    for demand in [mine, *(each for each in waiting if each != mine)] if mine in waiting else []:
        if left > 0:
            limit = min(demand.want, left)
            shares[demand] = Window(demand.session, demand.first, limit)
            left -= limit
    return shares


def _in_turn(windows: Mapping[Demand, Window]) -> Iterator[Demand]:
    """The demands in dealing order, each until its window is full."""
    left = {demand: window.limit for demand, window in windows.items()}
    for demand in cycle(windows):
        if not left:
            return
        if demand in left:
            yield demand
            left[demand] -= 1
            if not left[demand]:
                del left[demand]


def _take_all(
    work: Work, states: dict[str, QueueState], windows: Mapping[Demand, Window], dealt: Sequence[tuple[Demand, Row]]
) -> list[tuple[Demand, Delivery | None]]:
    """Read the server's payloads, in one round trip, and then take all messages (see :func:`claim`)."""
    server = next(iter(windows))
    own = iter(read_all(work, [value for demand, (_, (_, value)) in dealt if demand == server]))
    others = iter(open_records(value for demand, (_, (_, value)) in dealt if demand != server))
    opened = [next(own if demand == server else others) for demand, _ in dealt]
    take_rows(work, states, [row for _, row in dealt])
    return [
        (demand, take(work, row, record, states, windows[demand]))
        for (demand, row), record in zip(dealt, opened, strict=True)
    ]


def look(work: Work, demand: Demand, *, fired: bool) -> tuple[wait_queue.Standing, Collected]:
    """The demand's state, and what it was granted. ``fired``: a grant is likely, so look for it first."""
    if fired and (collected := _collect(work, demand)) is not None:
        return wait_queue.STANDS_GRANTED, collected
    standing = wait_queue.look(work, demand)
    return standing, (_collect(work, demand) if standing.stands == wait_queue.GRANTED else None) or ([], [])


def _collect(work: Work, demand: Demand) -> Collected | None:
    """What was granted, or None. A lease that can't be read is left for the sweep, which dead-letters it."""
    keys, last = work.keys, demand.first + session.LEASES_PER_CLAIM
    own = keys.demand(demand.session, demand.first)
    block = keys.lease(demand.session, demand.first), keys.lease(demand.session, last)
    stands, rows = work.tr.get_ranges([(own, own + b"\x00", 1), (*block, 0)], snapshot=True)
    timeouts = wait_queue.granted(stands[0][1] if stands else b"")
    if timeouts is None:
        return None
    deliveries: list[Delivery] = []
    malformed: list[tuple[Lease, FormatError]] = []
    leases = keys.read(rows, bytes, int)
    decoded = [(Lease(demand.session, number), read_or(None, Message.of_lease, value)) for (_, number), value in leases]
    held = [(lease, what) for lease, what in decoded if what is not None]
    values = [value for _, (_, _, value) in held]
    for (lease, (queue, _, _)), opened in zip(held, read_all(work, values), strict=True):
        if isinstance(opened, FormatError):
            malformed.append((lease, opened))
        else:
            deliveries.append(delivery_of(lease, queue, opened, timeouts.get(queue, 0)))
    return deliveries, malformed
