"""Limits: what a key may do and how a queue is worked on, changed while everything runs.

A change counts from the next claim on, in all processes. Of one key it rings the bell; what it has to do to all keys,
and to what is in flight, follows in parts (``relimit.py``). Lowering a limit takes nothing back: what is in flight
stays there. A limited, paused or full key never stands in the way of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from kombu_fdb.engine.scheduling import relimit, turns
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import CapacityExceeded, FormatError, InvalidArgument
from kombu_fdb.keyspace.codec import (
    control_of,
    decode_control,
    decode_count,
    decode_limits,
    encode_control,
    encode_limits,
    limits_of,
)
from kombu_fdb.model import LONGEST_KEY, KeyLimits, QueueControl
from kombu_fdb.primitives.ranges import check_control, check_limits, check_text

T = TypeVar("T", KeyLimits, QueueControl)

#: Noted by ``limit`` and by the queue's declaration.
NOT_SET_HERE = ("limited", "single_active", "consumer_timeout_ms")


def read_control(work: Work, queue: str) -> QueueControl:
    """Raises ``FormatError``."""
    return decode_control(work.tr.get(work.keys.control(queue)))


def read(work: Work, queue: str, key: str) -> KeyLimits:
    """The key's own limits, or those of every key. Raises ``FormatError``."""
    own, control = work.tr.get_many([work.keys.limits(queue, key), work.keys.control(queue)])
    return decode_control(control).every_key if own is None else decode_limits(own)


def set_control(work: Work, queue: str, control: QueueControl) -> None:
    """Raises ``InvalidArgument``."""
    check_control(control)
    stored = work.tr.get(work.keys.control(queue))
    before = control_of(stored)
    kept = {name: getattr(before, name) for name in NOT_SET_HERE}
    work.tr.set(work.keys.control(queue), encode_control(dataclasses.replace(control, **kept)))
    if control.every_key != before.every_key or not _can_be_read(stored):
        work.tr.set(work.keys.fair(queue), b"")
        relimit.begin(work, queue, first=not before.limits_keys)
    work.effects.wake(queue)


def _can_be_read(control: bytes | None) -> bool:
    """If not, it is unknown which keys are parked by it."""
    try:
        decode_control(control)
    except FormatError:
        return False
    return True


def limit(work: Work, queue: str, key: str, limits: KeyLimits | None) -> None:
    """Raises ``InvalidArgument``, and ``QueueError`` for a key that no message can have."""
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
        work.tr.set(work.keys.limits(queue, key), encode_limits(limits))
        if not control.limited:
            work.tr.set(work.keys.control(queue), encode_control(dataclasses.replace(control, limited=True)))
        if not control.limits_keys:
            relimit.begin(work, queue, first=True)
        work.tr.set(work.keys.fair(queue), b"")
    _leave_ring(work, queue, key, before, control.every_key if limits is None else limits)
    work.tr.set(work.keys.freed(queue, key), b"")
    work.effects.wake(queue)


def _leave_ring(work: Work, queue: str, key: str, before: KeyLimits, after: KeyLimits) -> None:
    """Of a key that is paused, or whose turns belong elsewhere now; a tenant's at once, others' by ``relimit.py``."""
    is_moved = before.priority != after.priority
    if is_moved or after.paused:
        turns.pause(work, queue, key)
    if is_moved and turns.is_in_ring(work, queue, key):
        relimit.begin_ring(work, queue)


def change(work: Work, queue: str, key: str, changes: Mapping[str, Any]) -> KeyLimits:
    """Change some limits of the key and keep its others, or those of every key. Raises ``InvalidArgument``."""
    changed = _replace(read(work, queue, key), changes)
    limit(work, queue, key, changed)
    return changed


def change_control(work: Work, queue: str, changes: Mapping[str, Any], every_key: Mapping[str, Any]) -> None:
    """Change how the queue is worked on, and some limits of every key; the rest stays. Raises ``InvalidArgument``."""
    for name in changes.keys() & set(NOT_SET_HERE):
        raise InvalidArgument("not set here", name=name, fix="Declare the queue with its argument, or limit a key.")
    control = _replace(read_control(work, queue), changes)
    changed = dataclasses.replace(control, every_key=_replace(control.every_key, every_key))
    set_control(work, queue, changed)


def _replace(value: T, changes: Mapping[str, Any]) -> T:
    if not isinstance(changes, Mapping):
        raise InvalidArgument("limits are given by their names", given=repr(changes)[:80])
    known = {each.name for each in dataclasses.fields(value)}
    for name in changes.keys() - known:
        raise InvalidArgument("no such limit", name=name, fix=f"Known limits: {', '.join(sorted(known))}.")
    return dataclasses.replace(value, **changes)


def check_capacity(work: Work, keys: Mapping[str, Collection[str]]) -> None:
    """Whether what this transaction has made ready fits. Raises ``CapacityExceeded`` for the first key that is full.

    ``keys``: those of each queue. At snapshot, in one round trip: concurrent publishers may overshoot a little. A
    delayed message needs no room until it is due, and then enters even a full key, so the retry of a running task is
    not lost.
    """
    controls = work.routing.controls(work.tr, keys)
    asked = [(queue, key) for queue, control in controls.items() if _has_capacities(control) for key in keys[queue]]
    rows = [row for each in asked for row in (work.keys.limits(*each), work.keys.backlog(*each))]
    found = work.tr.get_many(rows, snapshot=True) if rows else []
    for (queue, key), own, backlog in zip(asked, found[::2], found[1::2], strict=True):
        capacity = (controls[queue].every_key if own is None else limits_of(own)).capacity
        before = decode_count(backlog)
        if capacity is not None and before + work.effects.coming(queue, key) > capacity:
            raise CapacityExceeded(
                queue=queue,
                key=key,
                current_size=max(before, capacity),
                capacity=capacity,
                fix="Nothing was stored: publish it again later, or raise the key's capacity.",
            )


def _has_capacities(control: QueueControl) -> bool:
    return control.limited or control.every_key.capacity is not None
