"""What a change of limits has still to do, in parts: count what is in flight, free who waits for nothing, rank anew.

Model. The transaction that changes limits is small, however many keys and leases there are: it writes the limits and,
if more is to be done, ``("relimit", queue)``, which says how far that is. Three phases follow, each a walk whose
position is kept in that row, so that whoever does a part goes on where the last one stopped:

* *leases*: a message without a key that was leased from a plain queue is counted among its queue's leases only, and its
  end rings no bell. Its lease is rewritten as that of the key "", and counted. This comes with a queue's first limit.
  Until it is done, nobody knows how many messages without a key are in flight, so none is served that has a limit in
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

Whoever changes the limits does all parts at once. If that process dies, the duties go on (``duties.py``). Parts may be
repeated, and two processes that do the same one conflict.
"""

from __future__ import annotations

from functools import partial

from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.scheduling.turns import Turn
from kombu_fdb.engine.stored.tally import Tally
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import control_of, decode_lease, encode_lease, limits_of
from kombu_fdb.keyspace.layout import NO_KEY, Keyspace, has_key, readable
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["LEASES_PER_PART", "MARKS_PER_PART", "TURNS_PER_PART", "begin", "begin_ring", "is_counting", "part"]

#: A lease carries its record, up to 100 kB of it: so many stay below what one transaction holds.
LEASES_PER_PART = 50
MARKS_PER_PART = 500
TURNS_PER_PART = 500

_LEASES, _PARKED, _RING = b"L", b"P", b"R"


def begin(tr: Transaction, keys: Keyspace, queue: str, *, first: bool) -> None:
    """Note that the queue's limits have changed. ``first``: there were none before."""
    row = keys.relimit(queue)
    stored = tr.get(row)
    tr.set(row, _LEASES if first or is_counting(stored) else _PARKED)


def begin_ring(tr: Transaction, keys: Keyspace, queue: str) -> None:
    """Note that turns stand at ranks where they don't belong any more. What is noted already ends with that, too."""
    row = keys.relimit(queue)
    stored = tr.get(row)
    if stored is None or stored.startswith(_RING):
        tr.set(row, _RING)


def is_counting(row: bytes | None) -> bool:
    """Whether it is not known yet what is in flight without a key."""
    return row is not None and row.startswith(_LEASES)


def part(tr: Transaction, keys: Keyspace, tally: Tally, queue: str) -> bool:
    """Do the next part. Returns whether there may be another."""
    row = keys.relimit(queue)
    stored = tr.get(row)
    if stored is None:
        return False
    walks = {_LEASES: _count, _PARKED: _free, _RING: _rank_anew}
    following = walks.get(stored[:1], _free)(tr, keys, tally, queue, stored[1:])
    if following is None:
        tr.clear(row)
    else:
        tr.set(row, following)
    return following is not None


def _count(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, position: bytes) -> bytes | None:
    begin, end = keys.all_leases
    rows = tr.get_range(_behind(keys, position, begin), end, limit=LEASES_PER_PART, snapshot=True)
    for row in rows:
        _count_lease(tr, tally, queue, row)
    if len(rows) == LEASES_PER_PART:
        return _LEASES + rows[-1][0][len(keys.prefix) :]
    tally.spared(queue, "")  # it may have been parked meanwhile
    return _PARKED


def _count_lease(tr: Transaction, tally: Tally, queue: str, row: KeyValue) -> None:
    key, value = row
    try:
        of, place, record = decode_lease(value)
    except FormatError:  # the sweep keeps it for a person to look at
        return
    if of == queue and not has_key(place):
        tr.add_read_conflict_key(key)
        tr.set(key, encode_lease(queue, NO_KEY + place, record))
        tally.leased(queue, "")


def _free(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, position: bytes) -> bytes | None:
    begin, end = keys.all_active(queue)
    marks = tr.get_range(_behind(keys, position, begin), end, limit=MARKS_PER_PART, snapshot=True)
    _ring(keys, tally, queue, marks)
    _pause(tr, keys, queue, marks)
    return _PARKED + marks[-1][0][len(keys.prefix) :] if len(marks) == MARKS_PER_PART else _RING


def _ring(keys: Keyspace, tally: Tally, queue: str, marks: list[KeyValue]) -> None:
    for (_queue, key, _rank), state in keys.read(marks, str, str, int):
        if state == turns.PARKED:
            tally.spared(queue, key)


def _pause(tr: Transaction, keys: Keyspace, queue: str, marks: list[KeyValue]) -> None:
    """Those among the tenants' keys that are paused by what holds for every key: they have no limits of their own."""
    named = [
        (key, row)
        for row in marks
        for (_queue, key, _rank), state in keys.read([row], str, str, int)
        if state != turns.PARKED and turns.tenant_of(key) is not None
    ]
    if not named or not control_of(tr.get(keys.control(queue))).every_key.paused:
        return
    own = tr.get_many([keys.limits(queue, key) for key, _ in named])
    paused = [row for (_key, row), limits in zip(named, own, strict=True) if limits is None]
    turns.pause_marks(tr, keys, queue, paused)


def _rank_anew(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, position: bytes) -> bytes | None:
    begin, end = range_of(keys.ring(queue))
    entries = tr.get_range(_behind(keys, position, begin), end, limit=TURNS_PER_PART, snapshot=True)
    misplaced = _misplaced(tr, keys, queue, entries)
    turns.take_out(tr, keys, queue, misplaced)
    for turn in misplaced:
        tally.spared(queue, turn.key)
    return _RING + entries[-1][0][len(keys.prefix) :] if len(entries) == TURNS_PER_PART else None


def _misplaced(tr: Transaction, keys: Keyspace, queue: str, entries: list[KeyValue]) -> list[Turn]:
    """Those that would come to another rank now. At snapshot: whoever changes that notes it in the queue's row."""
    found = [Turn(*parts, items) for parts, items in readable(entries, partial(keys.split_ring, queue))]
    names = sorted({turn.key for turn in found})
    control, *own = tr.get_many([keys.control(queue), *(keys.limits(queue, name) for name in names)], snapshot=True)
    every_key = control_of(control).every_key
    limits = {name: every_key if row is None else limits_of(row) for name, row in zip(names, own, strict=True)}
    return [turn for turn in found if turn.rank != turns.rank_of(turn.items, limits[turn.key].priority)]


def _behind(keys: Keyspace, position: bytes, begin: bytes) -> bytes:
    """The first key behind the position."""
    return keys.prefix + position + b"\x00" if position else begin
