"""Settle: acknowledge, release or reject what a session holds.

Each verb reads the leases serializably and acts only on those that exist: a lease that was swept, or settled before, is
reported as lost. So a late owner can change nothing (ONE-OWNER), and every verb may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kombu_fdb.engine import parts
from kombu_fdb.engine.messages.bury import bury
from kombu_fdb.engine.messages.message import delete, end_lease, forget, put_delayed, put_in_place
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, Record
from kombu_fdb.keyspace.layout import TEXT_CODE, read_or, split_place
from kombu_fdb.model import Lease, Place
from kombu_fdb.store.protocol import KeyValue

#: What a release says about the attempt: it counts against the delivery limit; it does not, but a consumer has seen the
#: message, so the next one gets it as redelivered; or there was none.
Attempt = Literal["counted", "seen", "none"]


def ack(work: Work, leases: Sequence[Lease], found: Iterable[list[KeyValue]] | None = None) -> list[bool]:
    """Delete the messages. ``found``: the rows of their leases, if the caller has read :func:`lease_rows`."""
    held = _take_leases(work, leases, found)
    for message in held:
        if message is not None:
            queue, place, _ = message
            work.effects.note(queue, "acked", split_place(place)[0] if place.startswith(TEXT_CODE) else "")
            delete(work, message)
    return [message is not None for message in held]


def release(
    work: Work, leases: Sequence[Lease], attempt: Attempt, due_ms: int = 0, details: dict[str, Any] | None = None
) -> list[bool]:
    """Release the messages; see :func:`release_message`."""
    return _end_each(work, leases, lambda message: release_message(work, message, attempt, due_ms, details))


def reject(work: Work, leases: Sequence[Lease], reason: str, details: dict[str, Any]) -> list[bool]:
    """Dead-letter the messages, in the transaction that ends their leases."""
    return _end_each(work, leases, lambda message: bury(work, message, reason, details))


def _end_each(work: Work, leases: Sequence[Lease], end: Callable[[Message[Place]], None]) -> list[bool]:
    held = _take_leases(work, leases)
    for message in held:
        if message is not None:
            end(message)
    return [message is not None for message in held]


def release_message(
    work: Work, message: Message[Place], attempt: Attempt, due_ms: int = 0, details: dict[str, Any] | None = None
) -> None:
    """Make a message whose lease was just cleared ready at its old place, or delay it until ``due_ms``, or bury it.

    ``details``: for its dead letter, if it is over its delivery limit. If its queue has been deleted, so is the
    message, as in RabbitMQ.
    """
    if _queue_is_deleted(work, message):
        delete(work, message)
        return
    if attempt == "counted":
        is_over = over_limit(work, message)
        message = message._replace(value=Record.redelivered(message.value))
        if is_over:
            bury(work, message, "delivery_limit", details)
            return
    elif attempt == "seen":
        message = message._replace(value=Record.marked_seen(message.value))
    key, rank = split_place(message.place)
    work.effects.note(message.queue, "returned", key)
    if due_ms > work.now_ms:
        forget(work, message)
        put_delayed(work, message.queue, rank, due_ms, message.value)
    else:
        put_in_place(work, message)


def _queue_is_deleted(work: Work, message: Message[Place]) -> bool:
    """Whether the message's queue was deleted, even if a new one has its name."""
    marks, queue = work.effects.deleting, message.queue
    if queue not in marks:
        marks[queue] = work.tr.get(work.keys.deleting(queue)) or b""
    return bool(marks[queue]) and parts.came_by(marks[queue], message.place)


def over_limit(work: Work, message: Message[bytes], *, again: int = 1) -> bool:
    """Whether ``again`` more redeliveries would exceed the message's delivery limit."""
    limit = work.routing.queue(work.tr, message.queue).delivery_limit(work.environment.delivery_limit)
    if limit is None:
        return False
    record = read_or(None, Record.outline, message.value)
    return record is None or record.redeliveries + again > limit


def lease_rows(work: Work, leases: Sequence[Lease]) -> tuple[list[bytes], list[tuple[bytes, bytes, int]]]:
    """What to read in order to settle leases: single keys, and ranges of adjacent leases.

    Each is a conflict: of two transactions that settle the same lease, one loses. The leases of a claim have
    consecutive numbers, and most of them end together: those are read and cleared at once.
    """
    keys: list[bytes] = []
    ranges: list[tuple[bytes, bytes, int]] = []
    for first, last in _runs(leases):
        begin, end = work.keys.lease(*first), work.keys.lease(*last) + b"\x00"
        if first == last:
            work.tr.add_read_conflict_key(begin)
            keys.append(begin)
        else:
            work.tr.add_read_conflict_range(begin, end)
            ranges.append((begin, end, 0))  # no limit: other rows may lie between the leases
    return keys, ranges


def in_runs(
    keys: Sequence[bytes], values: Sequence[bytes | None], runs: Sequence[list[KeyValue]]
) -> list[list[KeyValue]]:
    """What was read of :func:`lease_rows`, in runs of adjacent rows. ``values``: those of ``keys`` come first."""
    single = zip(keys, values, strict=False)
    return [*([(key, value)] for key, value in single if value is not None), *filter(None, runs)]


def _runs(leases: Iterable[Lease]) -> list[tuple[Lease, Lease]]:
    """The first and the last lease of each series of consecutive numbers."""
    runs: list[tuple[Lease, Lease]] = []
    for lease in sorted(set(leases)):
        first, last = runs[-1] if runs else (lease, lease)
        if (lease.session, lease.number - 1) == last:
            runs[-1] = first, lease
        else:
            runs.append((lease, lease))
    return runs


def _take_leases(
    work: Work, leases: Sequence[Lease], found: Iterable[list[KeyValue]] | None = None
) -> list[Message[Place] | None]:
    """Clear the leases that still exist: the message of each, or None."""
    if found is None:
        keys, ranges = lease_rows(work, leases)
        found = in_runs(keys, *work.tr.get_together(keys, ranges, snapshot=True))
    asked = [work.keys.lease(*lease) for lease in leases]
    wanted = frozenset(asked)
    held: dict[bytes, Message[Place]] = {}
    ended: dict[str, list[Place]] = {}
    unreadable: set[bytes] = set()
    for run in found:
        for key, value in run:
            if key in wanted:
                try:
                    held[key] = message = Message.of_lease(value)
                except FormatError:  # it stays: after the session's end the sweep dead-letters it
                    unreadable.add(key)
                else:
                    ended.setdefault(message.queue, []).append(message.place)
        for keys in parts.runs_of([key for key, _ in run], held):
            work.tr.clear_run(keys)
    for queue, places in ended.items():
        end_lease(work, queue, *places)
    if late := len(asked) - len(held) - len(unreadable):  # gone before, or asked for twice
        work.effects.note("", "late", number=late)  # their queues are unknown by now
    return [held.pop(key, None) for key in asked]
