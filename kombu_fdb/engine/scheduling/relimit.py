"""What a change of limits has still to do, in parts: count what is in flight, free who waits for nothing, rank anew.

Model. The transaction that changes limits is small, however many keys and leases there are: it writes the limits and,
if more is to be done, ``("relimit", queue)``, which says how far that is. Three phases follow, each a walk whose
position is kept in that row, so that the process that does a part goes on where the last one stopped:

* *leases*: a message without a key that was leased from a plain queue is counted among its queue's leases only, and its
  end rings no bell. Its lease is rewritten as that of the key "", and counted. This comes with a queue's first limit.
  Until it is done, it is unknown how many messages without a key are in flight, so none is served that has a limit in
  flight (``fair.py``). Guarantee KEY-LIMIT.
* *parked*: every key may be parked for a reason that no longer holds. The bell of each is rung. If all are paused now,
  a tenant's keys leave the ring, as one that is paused by itself does at once (``turns.py``).
* *ring*: a turn stands at the rank that its key's priority had when it came into the ring. One that belongs elsewhere
  now is taken out, and its key's bell is rung: the next claim puts it where it belongs, as a newcomer. Else the first
  of them that is served there would be served alone until it has no messages, for the others are behind it. This is
  also all that follows where one key in the ring gets another priority.

Why no lease is missed. Claims conflict on the queue's control, which the change has written: one that commits after it
knows the limits and counts its leases. Those of before stand still or end, and a lease that ends while it is rewritten
is a conflict. Why no key is forgotten: one that is parked after the change is parked by the new limits.
Why no turn is: one that comes into the ring, or back into it, after the change comes by the new priorities.

The process that changes the limits does all parts at once. If that process dies, the duties go on (``duties.py``).
Parts may be repeated, and two processes that do the same one conflict.
"""

from __future__ import annotations

from functools import partial

from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.scheduling.turns import Turn
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import control_of, decode_lease, encode_lease, limits_of
from kombu_fdb.keyspace.layout import Keyspace, counted, has_key, readable
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Rank
from kombu_fdb.store.protocol import KeyValue

#: A lease carries its record, up to 100 kB of it: so many stay below what one transaction holds.
LEASES_PER_PART = 50
MARKS_PER_PART = 500
TURNS_PER_PART = 500

_LEASES, _PARKED, _RING = b"L", b"P", b"R"


def begin(work: Work, queue: str, *, first: bool) -> None:
    """Note that the queue's limits have changed. ``first``: there were none before."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    work.tr.set(row, _LEASES if first or is_counting(stored) else _PARKED)


def begin_ring(work: Work, queue: str) -> None:
    """Note that turns stand at ranks where they don't belong any more. What is noted already ends with that, too."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    if stored is None or stored.startswith(_RING):
        work.tr.set(row, _RING)


def is_counting(row: bytes | None) -> bool:
    """Whether it is not known yet what is in flight without a key."""
    return row is not None and row.startswith(_LEASES)


def part(work: Work, queue: str) -> bool:
    """Do the next part. Returns whether there may be another."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    if stored is None:
        return False
    walks = {_LEASES: _count, _PARKED: _free, _RING: _rank_anew}
    following = walks.get(stored[:1], _free)(work, queue, stored[1:])
    if following is None:
        work.tr.clear(row)
    else:
        work.tr.set(row, following)
    return following is not None


def _count(work: Work, queue: str, position: bytes) -> bytes | None:
    begin, end = work.keys.all_leases
    rows = work.tr.get_range(_behind(work.keys, position, begin), end, limit=LEASES_PER_PART, snapshot=True)
    for row in rows:
        _count_lease(work, queue, row)
    if len(rows) == LEASES_PER_PART:
        return _LEASES + rows[-1][0][len(work.keys.prefix) :]
    work.effects.spared(queue, "")  # it may have been parked meanwhile
    return _PARKED


def _count_lease(work: Work, queue: str, row: KeyValue) -> None:
    key, value = row
    try:
        of, place, record = decode_lease(value)
    except FormatError:  # the sweep keeps it for a person to look at
        return
    if of == queue and not has_key(place):
        work.tr.add_read_conflict_key(key)
        work.tr.set(key, encode_lease(queue, counted(place), record))
        work.effects.leased(queue, "")


def _free(work: Work, queue: str, position: bytes) -> bytes | None:
    begin, end = work.keys.all_active(queue)
    marks = work.tr.get_range(_behind(work.keys, position, begin), end, limit=MARKS_PER_PART, snapshot=True)
    _ring(work, queue, marks)
    _pause(work, queue, marks)
    return _PARKED + marks[-1][0][len(work.keys.prefix) :] if len(marks) == MARKS_PER_PART else _RING


def _ring(work: Work, queue: str, marks: list[KeyValue]) -> None:
    for (_queue, key, _rank), state in work.keys.read(marks, str, str, int):
        if state == turns.PARKED:
            work.effects.spared(queue, key)


def _pause(work: Work, queue: str, marks: list[KeyValue]) -> None:
    """Those among the tenants' keys that are paused by what holds for every key: they have no limits of their own."""
    named = [
        (key, row)
        for row in marks
        for (_queue, key, _rank), state in work.keys.read([row], str, str, int)
        if state != turns.PARKED and turns.tenant_of(key) is not None
    ]
    if not named or not control_of(work.tr.get(work.keys.control(queue))).every_key.paused:
        return
    own = work.tr.get_many([work.keys.limits(queue, key) for key, _ in named])
    paused = [row for (_key, row), limits in zip(named, own, strict=True) if limits is None]
    turns.pause_marks(work, queue, paused)


def _rank_anew(work: Work, queue: str, position: bytes) -> bytes | None:
    begin, end = range_of(work.keys.ring(queue))
    entries = work.tr.get_range(_behind(work.keys, position, begin), end, limit=TURNS_PER_PART, snapshot=True)
    misplaced = _misplaced(work, queue, entries)
    turns.take_out(work, queue, misplaced)
    for turn in misplaced:
        work.effects.spared(queue, turn.key)
    return _RING + entries[-1][0][len(work.keys.prefix) :] if len(entries) == TURNS_PER_PART else None


def _misplaced(work: Work, queue: str, entries: list[KeyValue]) -> list[Turn]:
    """Those that would come to another rank now. At snapshot: a change of that is noted in the queue's row."""
    keys = work.keys
    found = [Turn(*parts, Rank(items)) for parts, items in readable(entries, partial(keys.split_ring, queue))]
    names = sorted({turn.key for turn in found})
    rows = [keys.control(queue), *(keys.limits(queue, name) for name in names)]
    control, *own = work.tr.get_many(rows, snapshot=True)
    every_key = control_of(control).every_key
    limits = {name: every_key if row is None else limits_of(row) for name, row in zip(names, own, strict=True)}
    return [turn for turn in found if turn.rank != turns.rank_of(turn.items, limits[turn.key].priority)]


def _behind(keys: Keyspace, position: bytes, begin: bytes) -> bytes:
    """The first key behind the position."""
    return keys.prefix + position + b"\x00" if position else begin
