"""Settle: acknowledge, hand back or reject what a session holds.

Each verb reads the leases serializably and acts only on those it finds: a lease that was swept, or settled before, is
left alone and reported as lost. That is the fence. A late owner can change nothing (ONE-OWNER), and every verb may be
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_fdb.engine.messages.deadletter import Graves, Policy, bury, drop
from kombu_fdb.engine.messages.publish import store_delayed
from kombu_fdb.engine.stored.tally import ACKED, LATE, LEASED, RETURNED, Tally
from kombu_fdb.engine.stored.whereabouts import forget
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease, names_of, outline_of, redelivered, size_of
from kombu_fdb.keyspace.layout import Keyspace, has_key, split_place
from kombu_fdb.model import Lease
from kombu_fdb.store.protocol import Transaction

__all__ = ["Policy", "ack", "end_of_lease", "put_back", "reject", "release"]


def ack(tr: Transaction, keys: Keyspace, tally: Tally, leases: Sequence[Lease]) -> list[bool]:
    """Delete the messages."""
    held = _take_leases(tr, keys, tally, leases)
    for lease in held:
        if lease is not None:
            queue, place, value = lease
            tally.note(queue, ACKED, split_place(place)[0])
            _drop_value(tr, keys, value, place)
    return [lease is not None for lease in held]


def release(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    leases: Sequence[Lease],
    now_ms: int,
    *,
    counted: bool,
    due_ms: int = 0,
    details: dict[str, Any] | None = None,
) -> list[bool]:
    """Hand the messages back. ``details``: noted at the death of those that have come back too often."""
    held = _take_leases(tr, graves.keys, tally, leases)
    for lease in held:
        if lease is not None:
            put_back(tr, graves, tally, *lease, now_ms, counted=counted, due_ms=due_ms, details=details)
    return [lease is not None for lease in held]


def reject(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    leases: Sequence[Lease],
    now_ms: int,
    *,
    reason: str,
    details: dict[str, Any],
) -> list[bool]:
    """Dead-letter the messages, in the transaction that takes their leases away."""
    held = _take_leases(tr, graves.keys, tally, leases)
    for lease in held:
        if lease is not None:
            queue, place, value = lease
            bury(tr, graves, tally, queue, value, reason, now_ms, place=place, details=details)
    return [lease is not None for lease in held]


def put_back(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    queue: str,
    place: bytes,
    value: bytes,
    now_ms: int,
    *,
    counted: bool,
    due_ms: int = 0,
    details: dict[str, Any] | None = None,
) -> None:
    """One message whose lease has just been cleared: ready at its old place, delayed, or buried."""
    if counted:
        is_over, value = graves.over_limit(tr, queue, value), redelivered(value)
        if is_over:
            bury(tr, graves, tally, queue, value, "delivery_limit", now_ms, place=place, details=details)
            return
    key, rank = split_place(place)
    tally.note(queue, RETURNED, key)
    if due_ms > now_ms:
        task_id = names_of(value)[1]
        forget(tr, graves.keys, task_id, place)
        store_delayed(tr, graves.keys, tally, queue, due_ms, rank, value, task_id=task_id)
        return
    tr.set(graves.keys.at(queue, place), value)
    tally.ready(queue, size_of(value))
    if key:
        tally.came(queue, key, rank)


def _take_leases(
    tr: Transaction, keys: Keyspace, tally: Tally, leases: Sequence[Lease]
) -> list[tuple[str, bytes, bytes] | None]:
    """Clear the leases that still exist: queue, place, record of each, or None."""
    lease_keys = [keys.lease(*lease) for lease in leases]
    held: list[tuple[str, bytes, bytes] | None] = []
    seen: set[bytes] = set()
    for key, value in zip(lease_keys, tr.get_many(lease_keys), strict=True):
        if value is None or key in seen:
            tally.note("", LATE)  # nobody knows its queue any more
            held.append(None)
            continue
        seen.add(key)
        held.append(_end_lease(tr, tally, key, value))
    return held


def _end_lease(tr: Transaction, tally: Tally, key: bytes, value: bytes) -> tuple[str, bytes, bytes] | None:
    try:
        lease = decode_lease(value)
    except FormatError:  # left where it is: the sweep keeps it for a person to look at
        return None
    tr.clear(key)
    end_of_lease(tally, lease[0], lease[1])
    return lease


def end_of_lease(tally: Tally, queue: str, place: bytes) -> None:
    """One message of the queue, and of its key, is no longer leased."""
    tally.change(queue, LEASED, -1)
    if has_key(place):
        tally.freed(queue, split_place(place)[0])


def _drop_value(tr: Transaction, keys: Keyspace, value: bytes, place: bytes) -> None:
    try:
        drop(tr, keys, outline_of(value), place)
    except FormatError:  # nothing but the record can be deleted, and that is done
        return
