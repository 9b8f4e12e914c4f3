"""What a change of limits has still to do, in parts: count what is in flight, and free who waits for nothing.

Model. The transaction that changes limits is small, however many keys and leases there are: it writes the limits and,
if more is to be done, ``("relimit", queue)``, which says how far that is. Two phases follow, each a walk whose position
is kept in that row, so that whoever does a part goes on where the last one stopped:

* *leases*: a message without a key that was leased from a plain queue is counted among its queue's leases only, and its
  end rings no bell. Its lease is rewritten as that of the key "", and counted. This comes with a queue's first limit.
  Until it is done, nobody knows how many messages without a key are in flight, so none is served that has a limit in
  flight (``fair.py``). Guarantee KEY-LIMIT.
* *parked*: every key may be parked for a reason that no longer holds. The bell of each is rung. If all are paused now,
  a tenant's keys leave the ring, as one that is paused by itself does at once (``turns.py``).

Why no lease is missed. Claims conflict on the queue's control, which the change has written: one that commits after it
knows the limits and counts its leases. Those of before stand still or end, and a lease that ends while it is rewritten
is a conflict. Why no key is forgotten: one that is parked after the change is parked by the new limits.

Whoever changes the limits does all parts at once. If that process dies, the duties go on (``duties.py``). Parts may be
repeated, and two processes that do the same one conflict.
"""

from __future__ import annotations

from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import control_of, decode_lease, encode_lease
from kombu_fdb.keyspace.layout import Keyspace, counted, has_key
from kombu_fdb.store.protocol import KeyValue

__all__ = ["LEASES_PER_PART", "MARKS_PER_PART", "begin", "is_counting", "part"]

#: A lease carries its record, up to 100 kB of it: so many stay below what one transaction holds.
LEASES_PER_PART = 50
MARKS_PER_PART = 500

_LEASES, _PARKED = b"L", b"P"


def begin(work: Work, queue: str, *, first: bool) -> None:
    """Note that the queue's limits have changed. ``first``: there were none before."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    work.tr.set(row, _LEASES if first or is_counting(stored) else _PARKED)


def is_counting(row: bytes | None) -> bool:
    """Whether it is not known yet what is in flight without a key."""
    return row is not None and row.startswith(_LEASES)


def part(work: Work, queue: str) -> bool:
    """Do the next part. Returns whether there may be another."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    if stored is None:
        return False
    walk = _count if is_counting(stored) else _free
    following = walk(work, queue, stored[1:])
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
    return _PARKED + marks[-1][0][len(work.keys.prefix) :] if len(marks) == MARKS_PER_PART else None


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


def _behind(keys: Keyspace, position: bytes, begin: bytes) -> bytes:
    """The first key behind the position."""
    return keys.prefix + position + b"\x00" if position else begin
