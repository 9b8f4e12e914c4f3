"""Limits: what a key may do and how a queue is worked on, changed while everything runs.

A change counts from the next claim on, in all processes, and rings the bells of the keys it may set free. Lowering a
limit takes nothing back: what is in flight stays there. A limited, paused or full key never stands in the way of the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kombu_fdb.errors import CapacityExceeded, OptionError
from kombu_fdb.keyspace.codec import control_of, decode_control, decode_limits, encode_control, encode_limits, limits_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import LEAST_LIMITS, NEWCOMERS, URGENT, KeyLimits, QueueControl
from kombu_fdb.queue.tally import Tally
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
    if control.newcomer not in NEWCOMERS:
        raise OptionError("newcomer is one of next, current, first", newcomer=control.newcomer)
    if control.ageing is not None and not control.ageing > 0:
        raise OptionError("ageing must be more than 0 seconds per priority, or None", given=control.ageing)
    _check(control.every_key)
    before = control_of(tr.get(keys.control(queue)))
    kept = {name: getattr(before, name) for name in NOT_SET_HERE}
    tr.set(keys.control(queue), encode_control(dataclasses.replace(control, **kept)))
    if control.every_key != before.every_key:
        tr.set(keys.fair(queue), b"")
        _free_parked(tr, keys, queue)
    tally.wake(queue)


def limit(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, limits: KeyLimits | None) -> None:
    """Raises ``OptionError``."""
    if limits is None:
        tr.clear(keys.limits(queue, key))
    else:
        _check(limits)
        if limits.capacity is not None and not key:
            raise OptionError(
                "messages without a key have no capacity of their own",
                queue=queue,
                fix="Declare the queue with x-max-length and x-overflow=reject-publish, or give them a key.",
            )
        tr.set(keys.limits(queue, key), encode_limits(limits))
        control = control_of(tr.get(keys.control(queue)))
        if not control.limited:
            tr.set(keys.control(queue), encode_control(dataclasses.replace(control, limited=True)))
        tr.set(keys.fair(queue), b"")
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
    known = {each.name for each in dataclasses.fields(value)}
    for name in changes.keys() - known:
        raise OptionError("no such limit", name=name, fix=f"Known: {', '.join(sorted(known))}.")
    return dataclasses.replace(value, **changes)


def _free_parked(tr: Transaction, keys: Keyspace, queue: str) -> None:
    """Every key may be parked for a reason that no longer holds."""
    for mark, _ in tr.get_range(*keys.all_active(queue)):
        _tag, _queue, key, _rank = keys.unpack(mark)
        tr.set(keys.freed(queue, str(key)), b"")


def check_capacity(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, control: QueueControl) -> None:
    """Raises ``CapacityExceeded`` if the key is full. At snapshot: concurrent publishers may overshoot a little."""
    if not control.limited and control.every_key.capacity is None:
        return
    own, backlog = tr.get_many([keys.limits(queue, key), keys.backlog(queue, key)], snapshot=True)
    capacity = (control.every_key if own is None else limits_of(own)).capacity
    size = int.from_bytes(backlog or b"", "little", signed=True) + tally.coming(queue, key)
    if capacity is not None and size >= capacity:
        raise CapacityExceeded(
            queue=queue,
            key=key,
            current_size=size,
            capacity=capacity,
            fix="Nothing was stored: publish it again later, or raise the key's capacity.",
        )


def _check(limits: KeyLimits) -> None:
    for name, least in LEAST_LIMITS.items():
        value = getattr(limits, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise OptionError(f"{name} must be a whole number of at least {least}", given=value)
    if limits.rate is not None and not limits.rate > 0:
        raise OptionError("rate must be more than 0 messages per second", given=limits.rate)
    if limits.priority is not None and limits.priority not in range(URGENT + 1):
        raise OptionError("priority must be 0 to 9", given=limits.priority)
