"""Settle: acknowledge, release or reject what a session holds.

Each verb reads the leases serializably and acts only on those it finds: a lease that was swept, or settled before, is
left alone and reported as lost. That is the fence. A late owner can change nothing (ONE-OWNER), and every verb may be
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kombu_fdb.engine.messages.bury import Cause, bury
from kombu_fdb.engine.messages.message import Message, Subqueue, delete, end_lease, forget, put_delayed, put_in_place
from kombu_fdb.engine.stored.effects import ACKED, LATE, RETURNED
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_lease, outline_of, redelivered
from kombu_fdb.keyspace.layout import key_of, split_place
from kombu_fdb.model import Lease, Place

__all__ = ["Release", "ack", "lease_keys", "over_limit", "reject", "release", "release_message"]


class Release(NamedTuple):
    """How messages come back: as an attempt that counts or not, and not before ``due_ms``.

    ``details``: noted at the death of those that have come back too often.
    """

    counted: bool
    due_ms: int = 0
    details: dict[str, Any] | None = None


def ack(work: Work, leases: Sequence[Lease], values: Sequence[bytes | None] | None = None) -> list[bool]:
    """Delete the messages. ``values``: of their leases, for a caller who has read :func:`lease_keys`."""
    held = _take_leases(work, leases, values)
    for message in held:
        if message is not None:
            work.effects.note(message.queue, ACKED, key_of(message.place))
            delete(work, message)
    return [message is not None for message in held]


def release(work: Work, leases: Sequence[Lease], how: Release) -> list[bool]:
    """Hand the messages back."""
    held = _take_leases(work, leases)
    for message in held:
        if message is not None:
            release_message(work, message, how)
    return [message is not None for message in held]


def reject(work: Work, leases: Sequence[Lease], cause: Cause) -> list[bool]:
    """Dead-letter the messages, in the transaction that takes their leases away."""
    held = _take_leases(work, leases)
    for message in held:
        if message is not None:
            bury(work, message, cause)
    return [message is not None for message in held]


def release_message(work: Work, message: Message[Place], how: Release) -> None:
    """One message whose lease has just been cleared: ready at its old place, delayed, or buried."""
    if how.counted:
        is_over = over_limit(work, message)
        message = message._replace(value=redelivered(message.value))
        if is_over:
            bury(work, message, Cause("delivery_limit", how.details))
            return
    key, rank = split_place(message.place)
    work.effects.note(message.queue, RETURNED, key)
    if how.due_ms > work.now_ms:
        forget(work, message)
        put_delayed(work, Subqueue(message.queue, key, rank), how.due_ms, message.value)
    else:
        put_in_place(work, message)


def over_limit(work: Work, message: Message[bytes], *, again: int = 1) -> bool:
    """Whether it will have come back more often than it may, once it has come back ``again`` times."""
    limit = work.routing.delivery_limit(work.tr, message.queue, work.policy.delivery_limit)
    try:
        return limit is not None and outline_of(message.value).redeliveries + again > limit
    except FormatError:
        return True


def lease_keys(work: Work, leases: Sequence[Lease]) -> list[bytes]:
    """What is to be read of leases that are settled. Each is a conflict: of two who settle one, one comes first."""
    keys = [work.keys.lease(*lease) for lease in leases]
    for key in keys:
        work.tr.add_read_conflict_key(key)
    return keys


def _take_leases(
    work: Work, leases: Sequence[Lease], values: Sequence[bytes | None] | None = None
) -> list[Message[Place] | None]:
    """Clear the leases that still exist: the message of each, or None."""
    keys = [work.keys.lease(*lease) for lease in leases]
    held: list[Message[Place] | None] = []
    seen: set[bytes] = set()
    for key, value in zip(keys, work.tr.get_many(keys) if values is None else values, strict=True):
        if value is None or key in seen:
            work.effects.note("", LATE)  # nobody knows its queue any more
            held.append(None)
            continue
        seen.add(key)
        held.append(_take_lease(work, key, value))
    return held


def _take_lease(work: Work, key: bytes, value: bytes) -> Message[Place] | None:
    try:
        message = Message(*decode_lease(value))
    except FormatError:  # left where it is: the sweep keeps it for a person to look at
        return None
    work.tr.clear(key)
    end_lease(work, message.queue, message.place)
    return message
