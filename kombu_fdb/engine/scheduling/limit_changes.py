"""Limits of keys and queues: how they change while everything runs, and the work that a change leaves to do.

A change applies from the next claim on, in all processes. A change of one key rings its bell; the work on all keys, and
on messages in flight, follows in parts. Lowering a limit recalls nothing: what is in flight stays in flight. A limited,
paused or full key never blocks the others.

Model. The transaction that changes limits is small, however many keys and leases there are: it writes the limits and,
if there is more to do, ``("relimit", queue)``, which records the progress. Three phases follow. Each is a walk whose
position is stored in that row, so any process can continue where the last one stopped:

* *leases*: a message without a key that was leased from a queue without limits is counted among its queue's leases
  only, and the end of its lease rings no bell. Its lease is rewritten as one of the key "", and counted. This phase
  follows a queue's first limit. Until it is done, it is unknown how many messages without a key are in flight, so none
  is served if their number is limited (``key_limits.py``). Guarantee KEY-LIMIT.
* *parked*: any key may be parked for a reason that no longer applies, so the bell of each key is rung. If all keys are
  now paused, tenants' keys leave the ring, as a single paused key does at once (``fair.py``).
* *ring*: a turn has the rank of its key's priority at the time it entered the ring. A turn that now has another rank is
  taken out, and its key's bell is rung: the next claim inserts it as a newcomer. Otherwise the first such turn, being
  ahead of all others, would be served alone until its key has no messages. If a single key in the ring gets another
  priority, only this phase follows.

Why no lease is missed. Claims conflict on the queue's control, which the change writes: a claim that commits later
knows the limits and counts its leases. Earlier leases still exist or have ended, and a lease that ends while it is
rewritten causes a conflict. Why no key is forgotten: a key that is parked after the change is parked by the new limits.
Why no turn stays at a wrong rank: a turn that enters the ring after the change is placed by the new priorities.

The process that changes the limits does all parts at once. If that process dies, the duties continue (``duties.py``).
Parts may be repeated, and two processes that do the same one conflict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from kombu_fdb.engine.scheduling import fair
from kombu_fdb.engine.scheduling.key_limits import COUNTING
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.keyspace.codec import (
    Message,
    control_of,
    decode_control,
    decode_limits,
    encode_lease,
    encode_settings,
    limits_of,
)
from kombu_fdb.keyspace.layout import Keyspace, counted, has_key, range_of, readable
from kombu_fdb.model import LEAST_LIMITS, LONGEST_KEY, NEWCOMERS, KeyLimits, QueueControl, Rank
from kombu_fdb.primitives.ranges import FLAG, LONGEST_S, MOST, PRIORITY, SLOWEST, Kind, check_fields, check_text
from kombu_fdb.store.protocol import KeyValue

# -- what a change leaves to do ----------------------------------------------------------------------------------------


#: How many queues with changed limits one transaction looks for.
QUEUES_PER_LOOK = 1_000
#: A lease carries its record, up to 100 kB: this many fit into one transaction.
LEASES_PER_PART = 50
MARKS_PER_PART = 500
TURNS_PER_PART = 500

_PARKED, _RING = b"P", b"R"


def begin(work: Work, queue: str, *, first: bool) -> None:
    """Note that the queue's limits have changed. ``first``: there were none before."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    work.tr.set(row, COUNTING if first or (stored or b"").startswith(COUNTING) else _PARKED)


def begin_ring(work: Work, queue: str) -> None:
    """Note that turns have outdated ranks. An unfinished change includes this phase already."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    if stored is None or stored.startswith(_RING):
        work.tr.set(row, _RING)


def relimited_queues(work: Work) -> list[str]:
    """Queues with a change of limits that is not finished."""
    rows = work.tr.get_range(*work.keys.all_relimits, limit=QUEUES_PER_LOOK, snapshot=True)
    return [queue for (queue,), _ in work.keys.read(rows, str)]


def part(work: Work, queue: str) -> bool:
    """Do the next part of the work that a change of the queue's limits leaves. Returns whether there may be more."""
    row = work.keys.relimit(queue)
    stored = work.tr.get(row)
    if stored is None:
        return False
    walks = {COUNTING: _count, _PARKED: _free, _RING: _rank_anew}
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
        return COUNTING + rows[-1][0][len(work.keys.prefix) :]
    work.effects.spared(queue, "")  # the key "" may have been parked since
    return _PARKED


def _count_lease(work: Work, queue: str, row: KeyValue) -> None:
    key, value = row
    try:
        of, place, record = Message.of_lease(value)
    except FormatError:  # the sweep dead-letters it
        return
    if of == queue and not has_key(place):
        work.tr.add_read_conflict_key(key)
        work.tr.set(key, encode_lease(Message(queue, counted(place), record)))
        work.effects.leased(queue, "")


def _free(work: Work, queue: str, position: bytes) -> bytes | None:
    begin, end = work.keys.all_active(queue)
    marks = work.tr.get_range(_behind(work.keys, position, begin), end, limit=MARKS_PER_PART, snapshot=True)
    _ring(work, queue, marks)
    _pause(work, queue, marks)
    return _PARKED + marks[-1][0][len(work.keys.prefix) :] if len(marks) == MARKS_PER_PART else _RING


def _ring(work: Work, queue: str, marks: list[KeyValue]) -> None:
    for (_queue, key, _rank), state in work.keys.read(marks, str, str, int):
        if state == fair.PARKED:
            work.effects.spared(queue, key)


def _pause(work: Work, queue: str, marks: list[KeyValue]) -> None:
    """Pause the tenants' keys that have no limits of their own, and are paused by those of every key."""
    named = [
        (key, row)
        for row in marks
        for (_queue, key, _rank), state in work.keys.read([row], str, str, int)
        if state != fair.PARKED and fair.tenant_of(key) is not None
    ]
    if not named or not control_of(work.tr.get(work.keys.control(queue))).every_key.paused:
        return
    own = work.tr.get_many([work.keys.limits(queue, key) for key, _ in named])
    paused = [row for (_key, row), limits in zip(named, own, strict=True) if limits is None]
    fair.pause_marks(work, queue, paused)


def _rank_anew(work: Work, queue: str, position: bytes) -> bytes | None:
    begin, end = range_of(work.keys.ring(queue))
    entries = work.tr.get_range(_behind(work.keys, position, begin), end, limit=TURNS_PER_PART, snapshot=True)
    misplaced = _misplaced(work, queue, entries)
    fair.take_out(work, queue, misplaced)
    for turn in misplaced:
        work.effects.spared(queue, turn.key)
    return _RING + entries[-1][0][len(work.keys.prefix) :] if len(entries) == TURNS_PER_PART else None


def _misplaced(work: Work, queue: str, entries: list[KeyValue]) -> list[fair.Turn]:
    """The turns that now belong to another rank. Read at snapshot: a further change rewrites the queue's row."""
    keys = work.keys
    found = [fair.Turn(*parts, Rank(items)) for parts, items in readable(entries, partial(keys.split_ring, queue))]
    names = sorted({turn.key for turn in found})
    rows = [keys.control(queue), *(keys.limits(queue, name) for name in names)]
    control, *own = work.tr.get_many(rows, snapshot=True)
    every_key = control_of(control).every_key
    limits = {name: every_key if row is None else limits_of(row) for name, row in zip(names, own, strict=True)}
    return [turn for turn in found if turn.rank != fair.rank_of(turn.items, limits[turn.key].priority)]


def _behind(keys: Keyspace, position: bytes, begin: bytes) -> bytes:
    """The first key after the position."""
    return keys.prefix + position + b"\x00" if position else begin


# -- what is accepted --------------------------------------------------------------------------------------------------


def _at_least(least: int) -> Kind:
    return Kind.whole(f"a whole number of at least {least}", least, fix=f"At most {MOST:,}.")


#: What each limit of a key may be.
LIMIT_KINDS = {
    "paused": FLAG,
    **{
        name: _at_least(least) if name in {"weight", "burst"} else _at_least(least).or_none()
        for name, least in LEAST_LIMITS.items()
    },
    "rate": Kind.number(
        "more than 0 messages per second",
        SLOWEST,
        MOST,
        fix=f"From one in a hundred years, {SLOWEST:.2g}, to {MOST:,}; None for no limit.",
    ).or_none(),
    "priority": PRIORITY.or_none(),
}
_CONTROL = {
    "paused": FLAG,
    "newcomer": Kind("one of next, current, first", lambda value: value in NEWCOMERS),
    "ageing": Kind.number(
        "more than 0 seconds per priority", 0.001, LONGEST_S, fix=f"From 0.001 to {LONGEST_S:,}."
    ).or_none(),
}


def check_limits(limits: KeyLimits) -> None:
    """Raises ``InvalidArgument``."""
    check_fields(LIMIT_KINDS, limits)


def check_control(control: QueueControl) -> None:
    """Raises ``InvalidArgument``."""
    check_fields(_CONTROL, control)
    check_limits(control.every_key)


# -- the change --------------------------------------------------------------------------------------------------------


T = TypeVar("T", KeyLimits, QueueControl)

#: The field of a control that ``limit`` and the queue's declaration set.
NOT_SET_HERE = ("limited", "single_active", "consumer_timeout_ms")


def read_control(work: Work, queue: str) -> QueueControl:
    """The queue's control. Raises ``FormatError``."""
    return decode_control(work.tr.get(work.keys.control(queue)))


def read(work: Work, queue: str, key: str) -> KeyLimits:
    """The key's own limits, or those of every key. Raises ``FormatError``."""
    own, control = work.tr.get_many([work.keys.limits(queue, key), work.keys.control(queue)])
    return decode_control(control).every_key if own is None else decode_limits(own)


def set_control(
    work: Work, queue: str, control: QueueControl, declared: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Replace the queue's control. Raises ``InvalidArgument``.

    ``declared``: returns what the queue's arguments say, for a control that can't be read.
    """
    check_control(control)
    stored = work.tr.get(work.keys.control(queue))
    before = control_of(stored)
    if not _can_be_read(stored):
        before = dataclasses.replace(before, **declared())
    kept = {name: getattr(before, name) for name in NOT_SET_HERE}
    work.tr.set(work.keys.control(queue), encode_settings(dataclasses.replace(control, **kept)))
    if control.every_key != before.every_key or not _can_be_read(stored):
        work.tr.set(work.keys.fair(queue), b"")
        begin(work, queue, first=not before.limits_keys)
    work.effects.wake(queue)


def _can_be_read(control: bytes | None) -> bool:
    """Whether the control can be read; if not, it is unknown which keys it has parked."""
    try:
        decode_control(control)
    except FormatError:
        return False
    return True


def limit(work: Work, queue: str, key: str, limits: KeyLimits | None) -> None:
    """Set the key's limits. Raises ``InvalidArgument``, and ``QueueError`` for a key that no message can have."""
    check_text("fairness key", key, LONGEST_KEY)
    stored, declared = work.tr.get_many([work.keys.limits(queue, key), work.keys.control(queue)])
    control = control_of(declared)
    before = control.every_key if stored is None else limits_of(stored)
    if limits is None and stored is None:
        return
    if limits is None:
        work.tr.clear(work.keys.limits(queue, key))
    else:
        check_limits(limits)
        if limits.capacity is not None and not key:
            raise InvalidArgument(
                "messages without a key have no capacity of their own",
                queue=queue,
                fix="Declare the queue with x-max-length and x-overflow=reject-publish, or give them a key.",
            )
        work.tr.set(work.keys.limits(queue, key), encode_settings(limits))
        if not control.limited:
            work.tr.set(work.keys.control(queue), encode_settings(dataclasses.replace(control, limited=True)))
        if not control.limits_keys:
            begin(work, queue, first=True)
        work.tr.set(work.keys.fair(queue), b"")
    _leave_ring(work, queue, key, before, control.every_key if limits is None else limits)
    work.tr.set(work.keys.freed(queue, key), b"")
    work.effects.wake(queue)


def _leave_ring(work: Work, queue: str, key: str, before: KeyLimits, after: KeyLimits) -> None:
    """Take out a key's turns if it is paused or they have another rank now: a tenant's at once, others' in parts."""
    is_moved = before.priority != after.priority
    if is_moved or after.paused:
        fair.pause(work, queue, key)
    if is_moved and fair.is_in_ring(work, queue, key):
        begin_ring(work, queue)


def change(work: Work, queue: str, key: str, changes: Mapping[str, Any]) -> KeyLimits:
    """Change some of the key's limits. Its other limits, or those of every key, stay. Raises ``InvalidArgument``."""
    changed = _replace(read(work, queue, key), changes)
    limit(work, queue, key, changed)
    return changed


def change_control(work: Work, queue: str, changes: Mapping[str, Any], every_key: Mapping[str, Any]) -> None:
    """Change some of the queue's control, and some limits of every key. Raises ``InvalidArgument``."""
    for name in changes.keys() & set(NOT_SET_HERE):
        raise InvalidArgument("not set here", name=name, fix="Declare the queue with its argument, or limit a key.")
    control = _replace(read_control(work, queue), changes)
    changed = dataclasses.replace(control, every_key=_replace(control.every_key, every_key))
    set_control(work, queue, changed)


def _replace(value: T, changes: Mapping[str, Any]) -> T:
    if not isinstance(changes, Mapping):
        raise InvalidArgument("limits are given by their names", given=repr(changes)[:80])
    known = {each.name for each in dataclasses.fields(value)} - {*NOT_SET_HERE}
    for name in changes.keys() - known:
        raise InvalidArgument("no such limit", name=name, fix=f"Known limits: {', '.join(sorted(known))}.")
    return dataclasses.replace(value, **changes)
