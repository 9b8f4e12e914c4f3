"""Limits: what a key may do and how a queue is worked on, changed while everything runs.

A change counts from the next claim on, in all processes. Of one key it rings the bell; what it has to do to all keys,
and to what is in flight, follows in parts (``relimit.py``). Lowering a limit takes nothing back: what is in flight
stays there. A limited, paused or full key never stands in the way of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kombu_fdb.engine.scheduling import relimit, turns
from kombu_fdb.engine.stored.tally import Tally
from kombu_fdb.errors import CapacityExceeded, OptionError
from kombu_fdb.keyspace.codec import (
    control_of,
    decode_control,
    decode_count,
    decode_limits,
    encode_control,
    encode_limits,
    limits_of,
)
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import LONGEST_KEY, KeyLimits, QueueControl
from kombu_fdb.primitives.ranges import check_control, check_limits, check_text
from kombu_fdb.store.protocol import Transaction

__all__ = ["change", "change_control", "check_capacity", "limit", "read", "read_control", "set_control"]

T = TypeVar("T", KeyLimits, QueueControl)

#: Noted by ``limit`` and by the queue's declaration.
NOT_SET_HERE = ("limited", "single_active", "consumer_timeout_ms")


def read_control(tr: Transaction, keys: Keyspace, queue: str) -> QueueControl:
    """Raises ``FormatError``."""
    return decode_control(tr.get(keys.control(queue)))


def read(tr: Transaction, keys: Keyspace, queue: str, key: str) -> KeyLimits:
    """The key's own limits, or those of every key. Raises ``FormatError``."""
    own, control = tr.get_many([keys.limits(queue, key), keys.control(queue)])
    return decode_control(control).every_key if own is None else decode_limits(own)


def set_control(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, control: QueueControl) -> None:
    """Raises ``OptionError``."""
    check_control(control)
    before = control_of(tr.get(keys.control(queue)))
    kept = {name: getattr(before, name) for name in NOT_SET_HERE}
    tr.set(keys.control(queue), encode_control(dataclasses.replace(control, **kept)))
    if control.every_key != before.every_key:
        tr.set(keys.fair(queue), b"")
        relimit.begin(tr, keys, queue, first=not _is_limited(before))
    tally.wake(queue)


def limit(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, limits: KeyLimits | None) -> None:
    """Raises ``OptionError``, and ``QueueError`` for a key that no message can have."""
    check_text("fairness key", key, LONGEST_KEY)
    control = control_of(tr.get(keys.control(queue)))
    if limits is None:
        tr.clear(keys.limits(queue, key))
    else:
        check_limits(limits)
        if limits.capacity is not None and not key:
            raise OptionError(
                "messages without a key have no capacity of their own",
                queue=queue,
                fix="Declare the queue with x-max-length and x-overflow=reject-publish, or give them a key.",
            )
        tr.set(keys.limits(queue, key), encode_limits(limits))
        if not control.limited:
            tr.set(keys.control(queue), encode_control(dataclasses.replace(control, limited=True)))
        if not _is_limited(control):
            relimit.begin(tr, keys, queue, first=True)
        tr.set(keys.fair(queue), b"")
    if (control.every_key if limits is None else limits).paused:
        turns.pause(tr, keys, queue, key)
    tr.set(keys.freed(queue, key), b"")
    tally.wake(queue)


def change(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, changes: Mapping[str, Any]
) -> KeyLimits:
    """Change some limits of the key and keep its others, or those of every key. Raises ``OptionError``."""
    changed = _replace(read(tr, keys, queue, key), changes)
    limit(tr, keys, tally, queue, key, changed)
    return changed


def change_control(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, changes: Mapping[str, Any], every_key: Mapping[str, Any]
) -> None:
    """Change how the queue is worked on, and some limits of every key; the rest stays. Raises ``OptionError``."""
    for name in changes.keys() & set(NOT_SET_HERE):
        raise OptionError("not set here", name=name, fix="Declare the queue with its argument, or limit a key.")
    control = _replace(read_control(tr, keys, queue), changes)
    changed = dataclasses.replace(control, every_key=_replace(control.every_key, every_key))
    set_control(tr, keys, tally, queue, changed)


def _replace(value: T, changes: Mapping[str, Any]) -> T:
    if not isinstance(changes, Mapping):
        raise OptionError("limits are given by their names", given=repr(changes)[:80])
    known = {each.name for each in dataclasses.fields(value)}
    for name in changes.keys() - known:
        raise OptionError("no such limit", name=name, fix=f"Known limits: {', '.join(sorted(known))}.")
    return dataclasses.replace(value, **changes)


def _is_limited(control: QueueControl) -> bool:
    return control.limited or control.every_key != KeyLimits()


def check_capacity(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, control: QueueControl) -> None:
    """Raises ``CapacityExceeded`` if the key is full. At snapshot: concurrent publishers may overshoot a little."""
    if not control.limited and control.every_key.capacity is None:
        return
    own, backlog = tr.get_many([keys.limits(queue, key), keys.backlog(queue, key)], snapshot=True)
    capacity = (control.every_key if own is None else limits_of(own)).capacity
    size = decode_count(backlog) + tally.coming(queue, key)
    if capacity is not None and size >= capacity:
        raise CapacityExceeded(
            queue=queue,
            key=key,
            current_size=size,
            capacity=capacity,
            fix="Nothing was stored: publish it again later, or raise the key's capacity.",
        )
