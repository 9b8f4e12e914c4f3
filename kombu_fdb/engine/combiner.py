"""The combiner: consumers of the same queues wait in a line, and its first one claims for all of them.

Join: wait in the line of the consumers of the same queues, and settle what was done meanwhile.

Conflicts with what ends the session, with transactions that settle the same leases, and with a change of the queues'
limits (``enforcement.py``), but not with other joins or services.

Serve: the claim of a whole line of consumers, in one transaction. The protocol stands in ``scheduling/line.py``.

The first of the line claims as one consumer would that wants what all of them want, in the same order, and deals what
it gets: each message is leased to the next consumer whose window is not full, the server first. So the messages of one
commit are in the order of a single consumer (FAIR), however many there are.

A service is bounded in messages and bytes: a demand that does not fit stays in the line. So does one that gets nothing
because there is less than is wanted; the first of those is then the first of the line.

A message for another consumer is not opened further than its record: the consumer that gets it reads its payload
(:func:`look`), and rejects it as malformed if that is gone.

Conflicts: with a transaction that takes the same messages, and with what ends a demand or a session that is served
here, or the server's. Not with those who join the line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.claim import (
    FEW_QUEUES,
    choose,
    delivery_of,
    head_ranges,
    is_single,
    state_keys,
    states_of,
    take,
    take_rows,
)
from kombu_fdb.engine.messages.message import open_records, read_all
from kombu_fdb.engine.scheduling import line
from kombu_fdb.engine.scheduling.enforcement import control_keys, note_unlimited
from kombu_fdb.engine.scheduling.window import QueueState, Window
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError, SessionLost
from kombu_fdb.keyspace.codec import control_of, decode_lease
from kombu_fdb.keyspace.layout import read_or
from kombu_fdb.model import Delivery, Demand, Lease
from kombu_fdb.store.protocol import KeyValue

# -- join --------------------------------------------------------------------------------------------------------------


def join(
    work: Work, demand: Demand, acks: Sequence[Lease] = (), *, queues: Sequence[str] = (), over: Collection[int] = ()
) -> None:
    """Wait for messages in the line of the consumers of the same ``queues``. ``acks`` are settled with it.

    ``queues``: those of the line; if there are many, they are not looked at. ``over``: the first leases of demands of
    the session that have ended, and that will not be looked at any more. Raises ``SessionLost``. A caller that does not
    know what has become of a demand calls ``Sessions.recover``.
    """
    leases = settle.lease_rows(work, acks)
    few = queues if acks and len(queues) <= FEW_QUEUES else ()
    keys = [*leases.keys, *control_keys(work, few)]
    values, runs = session.require(work, demand.session, and_read=keys, ranges=leases.ranges)
    note_unlimited(work, zip(few, map(control_of, values[len(leases.keys) :]), strict=True))
    if acks:
        settle.ack(work, acks, leases.found(values[: len(leases.keys)], runs))
    line.join(work, demand, over)


# -- serve -------------------------------------------------------------------------------------------------------------


#: Limits of one service.
MOST_MESSAGES = 512


class Served(NamedTuple):
    """What the server got, and how many demands were met besides its own. ``ended``: its own demand had ended."""

    deliveries: list[Delivery]
    others: int
    ended: bool = False


#: What was granted; and the leases whose messages can't be read, and why.
Collected = tuple[list[Delivery], list[tuple[Lease, FormatError]]]


class _Seat(NamedTuple):
    """A demand that is served here, and its part of the window."""

    row: line.Row
    demand: Demand
    window: Window


def serve(work: Work, queues: Sequence[str], mine: Demand, rows: Sequence[line.Row], window: Window) -> Served:
    """Claim for those of ``rows`` that still wait, ``mine`` among them. ``window``: at most so much for all of them.

    Raises ``SessionLost`` if the server's session was fenced.
    """
    states, waiting = _read(work, queues, mine, rows, window.limit)
    note_unlimited(work, [(queue, state.control) for queue, state in states.items()])
    seats = _seats(states, mine, waiting, window)
    if not seats:
        return Served([], 0, ended=True)
    chosen = choose(work, states, replace(window, limit=sum(seat.window.limit for seat in seats)))
    dealt = list(zip(_in_turn(seats), chosen, strict=False))
    taken = _take_all(work, states, dealt)
    by_seat = [[delivery for each, delivery in taken if each is seat and delivery is not None] for seat in seats]
    for seat, found in zip(seats, by_seat, strict=True):
        if found:
            line.grant(work, seat.row, seat.demand, _timeouts(states, found))
    return Served(by_seat[0], sum(map(bool, by_seat[1:])))


def _timeouts(states: Mapping[str, QueueState], found: Sequence[Delivery]) -> dict[str, int]:
    """The consumer timeouts of these messages' queues: those of all queues might not fit into a value."""
    timeouts = {each.queue: states[each.queue].control.consumer_timeout_ms for each in found}
    return {queue: ms for queue, ms in timeouts.items() if ms}


def _read(
    work: Work, queues: Sequence[str], mine: Demand, rows: Sequence[line.Row], most: int
) -> tuple[dict[str, QueueState], list[line.Row]]:
    """The queues, the demands and their sessions in one round trip: who still waits, and may be given anything."""
    asked = [(each, each.demand) for each in rows if each.demand is not None]
    demands = [work.keys.demand(demand.session, demand.first) for _, demand in asked]
    sessions = [work.keys.session(demand.session) for _, demand in asked]
    heads = head_ranges(work, queues, min(most, sum(demand.want for _, demand in asked)))
    values, found = work.tr.get_together([*demands, *sessions, *state_keys(work, queues)], heads, snapshot=True)
    count = len(asked)
    waiting = []
    work.tr.add_read_conflict_key(work.keys.session(mine.session))
    for (row, demand), stands, record in zip(asked, values, values[count:], strict=False):
        if record is None and demand == mine:
            raise SessionLost(session=mine.session.hex())
        if record is not None and line.waits(work, row, stands):
            waiting.append(row)
    return states_of(queues, values[2 * count :], found), waiting


def _seats(states: dict[str, QueueState], mine: Demand, waiting: Sequence[line.Row], window: Window) -> list[_Seat]:
    """The server first; none if it waits no longer. One active consumer is served by itself only."""
    first = [row for row in waiting if row.demand == mine]
    others = [] if is_single(states) else [row for row in waiting if row.demand != mine]
    seats: list[_Seat] = []
    left = window.limit
    for row in [*first, *others] if first else []:
        demand = row.demand
        if demand is not None and left > 0:
            limit = min(demand.want, left)
            seats.append(_Seat(row, demand, Window(demand.session, demand.first, limit)))
            left -= limit
    return seats


_Dealt = list[tuple[_Seat, tuple[str, KeyValue]]]


def _in_turn(seats: Sequence[_Seat]) -> Iterator[_Seat]:
    """Who gets the next message: the next one whose window is not full."""
    left = {seat.demand: seat.window.limit for seat in seats}
    for seat in cycle(seats):
        if not left:
            return
        if seat.demand in left:
            yield seat
            left[seat.demand] -= 1
            if not left[seat.demand]:
                del left[seat.demand]


def _take_all(work: Work, states: dict[str, QueueState], dealt: _Dealt) -> list[tuple[_Seat, Delivery | None]]:
    """All payloads are read before the first is taken (``claim.claim``): those of the server, in one round trip."""
    server = dealt[0][0] if dealt else None
    own = iter(read_all(work, [value for seat, (_, (_, value)) in dealt if seat is server]))
    others = iter(open_records(value for seat, (_, (_, value)) in dealt if seat is not server))
    opened = [next(own if seat is server else others) for seat, _ in dealt]
    take_rows(work, states, [row for _, row in dealt])
    return [
        (seat, take(work, row, record, states, seat.window)) for (seat, row), record in zip(dealt, opened, strict=True)
    ]


def look(work: Work, demand: Demand, *, fired: bool) -> tuple[line.Sight, Collected]:
    """How the demand stands, and what it was granted. ``fired``: that it was is likely, and looked at first."""
    if fired and (collected := _collect(work, demand)) is not None:
        return line.GRANTED_SIGHT, collected
    sight = line.look(work, demand)
    return sight, (_collect(work, demand) if sight.stands == line.GRANTED else None) or ([], [])


def _collect(work: Work, demand: Demand) -> Collected | None:
    """None if nothing was granted. A lease that can't be read is left for the sweep, which keeps it for a person."""
    keys, last = work.keys, demand.first + session.LEASES_PER_CLAIM
    own = keys.demand(demand.session, demand.first)
    block = keys.lease(demand.session, demand.first), keys.lease(demand.session, last)
    stands, rows = work.tr.get_ranges([(own, own + b"\x00", 1), (*block, 0)], snapshot=True)
    timeouts = line.granted(stands[0][1] if stands else b"")
    if timeouts is None:
        return None
    deliveries: list[Delivery] = []
    malformed: list[tuple[Lease, FormatError]] = []
    leases = keys.read(rows, bytes, int)
    decoded = [(Lease(demand.session, number), read_or(None, decode_lease, value)) for (_, number), value in leases]
    held = [(lease, what) for lease, what in decoded if what is not None]
    values = [value for _, (_, _, value) in held]
    for (lease, (queue, _, _)), opened in zip(held, read_all(work, values), strict=True):
        if isinstance(opened, FormatError):
            malformed.append((lease, opened))
        else:
            deliveries.append(delivery_of(lease, queue, opened, timeouts.get(queue, 0)))
    return deliveries, malformed
