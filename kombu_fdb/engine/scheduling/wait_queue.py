"""Wait queue: competing consumers wait for one another instead of racing, and the first one claims for all of them.

Consumers of the same queues compete for the same messages, those at the head. If each consumer claims for itself, one
wins and the work of the others is wasted. So each writes what it wants into a *demand*, and the *first* one serves the
whole wait queue in one transaction (``messages/claim.py``). In memory this is flat combining (Hendler, Incze, Shavit,
Tzafrir, SPAA 2010, https://doi.org/10.1145/1810479.1810540), and a consumer learns of its turn as in queue locks
(Mellor-Crummey and Scott, TOCS 1991, https://doi.org/10.1145/103727.103729); FoundationDB's queue recipe serves
high-contention queues in the same way (https://apple.github.io/foundationdb/queues.html).

Model. A demand is two rows: one in the wait queue, behind those that joined earlier, ``("line", name, stamp)``; and one
under its owner's session, ``("demand", session, first)``, which holds its *state*:

* W, it waits. Both rows are there, and the second one contains the stamp that is in the first one's key.
* G, it was granted messages: they are leased to its owner, in the block of numbers that begins with ``first``.
* E, it has ended without messages: its owner has left, or another consumer has evicted it.

What moves it:

* nowhere -> W: *join*. A blind write, which takes the owner's acks along. It conflicts with no other join or service.
* W -> G: *serve*, by the first consumer of the wait queue. It reads the demand's state, and the owner's session, as
  conflicts.
* W -> E: *leave*, by its owner, or *evict*, by a consumer that waits behind it, has seen it first for too long, and
  knows that there is work. Both read its state as a conflict, so each comes before or after a service, and the later
  transaction sees the earlier.
* G, E -> nowhere: at the next join of its session, or at the session's end.

A row of the wait queue that can't be read, or whose demand does not wait there, is evicted like a consumer that does
not serve. So an older version may evict a newer version's row: its owner finds the row gone, and joins again.

Each consumer watches its own demand, and those of the three right before it in the wait queue. Every change of these
commits after its look, and fires the watch. So however many are served at once, a consumer notices when it becomes the
first, or one of the two behind it, which replace dead consumers ahead of them. When one message arrives for fifty idle
consumers, four wake up: the first of the wait queue, which alone watches the queues, and the three behind it.

What happens at each failure:

* The first consumer dies, or is frozen. Those behind it look after a while, and see the same consumer first and work
  waiting. They look again when their patience is over, and evict it (``process/combiner_client.py``). If it was only
  slow, it finds that its demand has ended, and joins again; if it serves at that moment, one of the two transactions
  conflicts.
* A consumer dies while it waits: it may be granted messages, as if it had died a moment later. They are released with
  the others of its session. A fenced session is granted nothing, and :func:`forget` clears its demands.
* The answer to a join, or to a grant, is lost: ``Sessions.recover`` seals the session, with which every join and every
  serve conflicts, and then drops the demand and releases what is leased in its block.
* The answer to a service is lost: its retry reads the demands' states. Those that were granted messages no longer wait.

The waiters' patience is stored, too, in ``("served", name)``: each service writes its estimate, each eviction doubles
the last one. So if services take long, no consumer has to learn that by itself.

No clock and no process affects safety, only speed: if several consumers each believe they are first, they conflict.
Guarantees: ONE-OWNER, BOUNDED, FAIR for any number of consumers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kombu_fdb.engine.session import LEASES_PER_CLAIM
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import Demand, SessionId
from kombu_fdb.store.protocol import KeyValue, Watch

WAITING, GRANTED, ENDED = b"W", b"G", b"E"
#: The highest number that a lease may have in its session.
MOST_LEASES = 2**62
#: How many rows of its wait queue the first consumer sees, and how many rows right before it any other consumer
#: watches.
SEEN, NEAR = 64, 3
#: The contents of a demand's row in the wait queue: session, number of its first lease, how many messages.
_DEMAND = struct.Struct(">16sQI")
_STAMP = slice(1, 11)
#: The contents of the row of a wait queue's last service: the session, and the others' patience in ms.
_SESSION, _MS = 16, struct.Struct(">I")
#: Follows a stamp in the wait queue's keys; a message's key has its number within the transaction there.
_ALONE = b"\x00\x00"


#: The waiters, in order: the keys of their rows, and their demands. Unreadable rows are left out.
Waiting = dict[bytes, Demand]


class Standing(NamedTuple):
    """The state of a demand and its wait queue, as a look has found it.

    ``stands``: W, G or E. ``first``: the key of the wait queue's first row. ``waiting``: the front of the wait queue;
    only the first consumer reads it. ``server``: the session that served the wait queue last. ``behind``: how many
    waiters are ahead of it: 0 for the first, up to 3 for the three after it; None for all others. ``patience_s``: how
    long the first may be idle while there is work; 0.0 if no service has written it.
    """

    stands: bytes
    first: bytes
    waiting: Waiting
    server: bytes
    watches: list[Watch]
    behind: int | None = None
    patience_s: float = 0.0

    @property
    def waits(self) -> bool:
        return self.stands == WAITING

    @property
    def is_first(self) -> bool:
        return bool(self.waiting)

    @property
    def is_next(self) -> bool:
        return self.behind == 1


#: The standing of a demand that was granted messages, if nothing else was read.
STANDS_GRANTED = Standing(GRANTED, b"", {}, b"", [])


def name(queues: Sequence[str]) -> bytes:
    """The name of the wait queue of the consumers of exactly these queues. Each claim needs it."""
    return _digest(tuple(sorted(queues)))


@lru_cache(256)
def _digest(queues: tuple[str, ...]) -> bytes:
    digest = blake2b(digest_size=16)
    for queue in queues:
        encoded = queue.encode()
        digest.update(len(encoded).to_bytes(2, "big") + encoded)
    return digest.digest()


def first_range(work: Work, wait_queue: bytes) -> tuple[bytes, bytes, int]:
    """Where the first consumer's row is, if there is one: a range and how many rows of it."""
    return (*range_of(work.keys.wait_queue(wait_queue)), 1)


def join(work: Work, demand: Demand, over: Iterable[int]) -> None:
    """Wait. ``over``: the first leases of the session's earlier demands, which are cleared."""
    for first in over:
        work.tr.clear(work.keys.demand(demand.session, first))
    value = _DEMAND.pack(demand.session, demand.first, demand.want)
    work.tr.set_versionstamped_key(work.keys.wait_queue(demand.wait_queue), _ALONE, value)
    _stand(work, demand, WAITING, demand.wait_queue)


def look(work: Work, demand: Demand) -> Standing:
    """The demand's standing; if it waits and is not the first, watch for a change. Two round trips."""
    keys = work.keys
    own, served = keys.demand(demand.session, demand.first), keys.served(demand.wait_queue)
    begin, end, _ = in_wait_queue = first_range(work, demand.wait_queue)
    asked = [(own, own + b"\x00", 1), (served, served + b"\x00", 1), in_wait_queue]
    found = work.tr.get_ranges(asked, snapshot=True)
    value, service = (rows[0][1] if rows else b"" for rows in found[:2])
    server, patience_s = service[:_SESSION], _seconds(service[_SESSION:])
    first = found[2][0][0] if found[2] else b""
    row = _waits_at(work, demand, value)
    if row is None:
        return Standing(GRANTED if value[:1] == GRANTED else ENDED, first, {}, server, [])
    if row == first:
        waiting = waiting_in(demand.wait_queue, work.tr.get_range(begin, end, limit=SEEN, snapshot=True))
        if waiting.get(row) != demand:  # damaged: it would be the first forever, and never serve
            return Standing(ENDED, first, {}, server, [])
        return Standing(WAITING, first, waiting, server, [], 0, patience_s)
    here = work.tr.get_range(begin, row + b"\x00", limit=1 + NEAR, reverse=True, snapshot=True)
    if not here or here[0][0] != row:
        return Standing(ENDED, first, {}, server, [])
    behind = next((number for number, (key, _) in enumerate(here) if key == first), None)
    watched = [demand, *waiting_in(demand.wait_queue, here[1:]).values()]
    watches = [work.tr.watch(keys.demand(each.session, each.first)) for each in watched]
    return Standing(WAITING, first, {}, server, watches, behind, patience_s)


def end(work: Work, session_id: SessionId, first: int) -> bytes:
    """End the demand, if it waits. Returns its state before: W, G, or E."""
    key = work.keys.demand(session_id, first)
    value = work.tr.get(key) or ENDED
    row = _row_of(work, value)
    if row is not None:
        work.tr.clear(row)
        work.tr.set_versionstamped_value(key, prefix=ENDED)
    return value[:1]


def drop(work: Work, session_id: SessionId, first: int) -> None:
    """Clear all rows of the demand, whatever its state."""
    key = work.keys.demand(session_id, first)
    row = _row_of(work, work.tr.get(key) or b"")
    if row is not None:
        work.tr.clear(row)
    work.tr.clear(key)


def evict(work: Work, wait_queue: bytes, row: bytes, patience_s: float) -> None:
    """End the wait of the consumer at this row. ``patience_s``: the others' new patience."""
    value = work.tr.get(row)
    if value is None:
        return
    server = (work.tr.get(work.keys.served(wait_queue), snapshot=True) or b"")[:_SESSION]
    work.tr.set(work.keys.served(wait_queue), server.ljust(_SESSION, b"\x00") + _MS.pack(round(1000 * patience_s)))
    work.tr.clear(row)
    for demand in waiting_in(wait_queue, [(row, value)]).values():
        end(work, demand.session, demand.first)


def waits(work: Work, row: bytes, demand: Demand, stands: bytes | None) -> bool:
    """Whether the demand in this row of the wait queue still waits."""
    return _waits_at(work, demand, stands or b"") == row


def grant(work: Work, row: bytes, demand: Demand, timeouts: Mapping[str, int]) -> None:
    """Note that the demand was served. Wakes its owner, and the waiters behind it.

    ``timeouts``: the consumer timeouts of queues that have one, in ms.
    """
    work.tr.add_read_conflict_key(work.keys.demand(demand.session, demand.first))
    work.tr.add_read_conflict_key(work.keys.session(demand.session))
    work.tr.clear(row)
    _stand(work, demand, GRANTED, encode_json(dict(timeouts)) if timeouts else b"")


def served(work: Work, demand: Demand, patience_s: float) -> None:
    """Note that the demand's owner has served the wait queue."""
    work.tr.set(work.keys.served(demand.wait_queue), demand.session + _MS.pack(round(1000 * patience_s)))


def granted(value: bytes) -> dict[str, int] | None:
    """The timeouts in the demand's row if it was granted messages, else None."""
    if value[:1] != GRANTED:
        return None
    try:
        timeouts = decode_json(value[_STAMP.stop :] or b"{}")
    except FormatError:
        return {}
    return {each: ms for each, ms in timeouts.items() if isinstance(ms, int)} if isinstance(timeouts, dict) else {}


def forget(work: Work, session_id: SessionId) -> None:
    """Clear what the demands of a session have left in any wait queue."""
    whole = work.keys.demands(session_id)
    for _key, value in work.tr.get_range(*whole):
        row = _row_of(work, value)
        if row is not None:
            work.tr.clear(row)
    work.tr.clear_range(*whole)
    for key, server in work.tr.get_range(*work.keys.all_served, snapshot=True):
        if server[:_SESSION] == session_id:
            work.tr.clear(key)


def _stand(work: Work, demand: Demand, how: bytes, more: bytes) -> None:
    work.tr.set_versionstamped_value(work.keys.demand(demand.session, demand.first), prefix=how, suffix=more)


def _waits_at(work: Work, demand: Demand, value: bytes) -> bytes | None:
    """The demand's row in its wait queue; None if it does not wait there."""
    return _row_of(work, value) if value[_STAMP.stop :] == demand.wait_queue else None


def _row_of(work: Work, value: bytes) -> bytes | None:
    """A waiting demand's row in the wait queue, by the value of its state."""
    stamp, wait_queue = value[_STAMP], value[_STAMP.stop :]
    if value[:1] != WAITING or len(stamp) != _STAMP.stop - _STAMP.start:
        return None
    return work.keys.wait_queue(wait_queue) + stamp + _ALONE


def waiting_in(wait_queue: bytes, rows: Iterable[KeyValue]) -> Waiting:
    """The waiters in these rows."""
    return {key: demand for key, value in rows if (demand := _decode(wait_queue, value)) is not None}


def _decode(wait_queue: bytes, value: bytes) -> Demand | None:
    """The demand; None if it can't be read."""
    if len(value) != _DEMAND.size:
        return None
    session_id, first, want = _DEMAND.unpack(value)
    if first > MOST_LEASES or not 0 < want <= LEASES_PER_CLAIM:
        return None
    return Demand(wait_queue, SessionId(session_id), first, want)


def _seconds(value: bytes) -> float:
    return float(_MS.unpack(value)[0]) / 1000 if len(value) == _MS.size else 0.0
