"""Inspect: what is in the store. Snapshot reads only; nothing here ever conflicts with work."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import Any

from kombu_fdb.engine import session, topology
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import (
    Record,
    control_of,
    decode_amount,
    decode_count,
    limits_of,
)
from kombu_fdb.keyspace.layout import Keyspace, Range, pack, range_of, readable
from kombu_fdb.model import (
    URGENT,
    KeyCounts,
    QueueCounts,
    QueueFacts,
    SessionFacts,
    SessionId,
    controlled_worker,
    is_internal,
)
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

STATES = ("ready", "delayed", "leased", "newer")
#: How many keys of a queue are searched for its oldest message: those next in the ring, and as many by name.
OLDEST_OF_KEYS = 100
#: How many messages of one session are counted one by one.
MOST_HELD = 1_000
#: How many keys are looked at in one transaction.
KEYS_PER_LOOK = 1_000
#: The ranges that hold the facts about keys: ready, leased, limits.
OF_KEYS = ("backlog", "flight", "limits")


def counts(work: Work, queue: str) -> QueueCounts:
    """The queue's counters; zeros if there is no such queue. Guarantee: COUNTS."""
    return _counts(work.keys, work.tr.get_range(*work.keys.counts(queue), snapshot=True)).get(queue, QueueCounts())


def exists(work: Work, queue: str) -> bool:
    """Whether it is declared, or has had messages since its last deletion, as its bell or a delayed message shows."""
    found = [work.keys.queue(queue), work.keys.bell(queue), work.keys.waiting(queue)]
    return any(value is not None for value in work.tr.get_many(found, snapshot=True))


def consumer_count(work: Work, queue: str) -> int:
    """How many consumers it has. The entry for an exclusive queue's connection does not count."""
    return topology.count_consumers(topology.consumer_tags(work, queue, snapshot=True))


def queues(work: Work) -> dict[str, QueueCounts]:
    """All queues that are declared or hold messages, by name, with their counters."""
    names = [name for (name,), _ in work.keys.read(work.tr.get_range(*work.keys.all_queues, snapshot=True), str)]
    found = _counts(work.keys, work.tr.get_range(*work.keys.all_counts, snapshot=True))
    return dict(sorted({**{name: QueueCounts() for name in names}, **found}.items()))


def _counts(keys: Keyspace, rows: list[KeyValue]) -> dict[str, QueueCounts]:
    found: dict[str, QueueCounts] = {}
    for (queue, state), value in keys.read(rows, str, str):
        if state not in STATES:
            continue
        number, size = decode_amount(value)
        fields = {state: number, **({"ready_bytes": size} if state == "ready" else {})}
        found[queue] = dataclasses.replace(found.get(queue, QueueCounts()), **fields)
    return {queue: counters for queue, counters in found.items() if counters != QueueCounts()}


def keys_of(work: Work, queue: str) -> dict[str, KeyCounts]:
    """The keys that have messages or limits, by name. Guarantee: COUNTS."""
    ranges = [work.keys.backlogs(queue), work.keys.flights(queue), work.keys.all_limits(queue)]
    parts = [work.tr.get_range(*whole, snapshot=True) for whole in ranges]
    return dict(sorted(_by_key(work.keys, parts).items()))


def key_page(
    work: Work, queue: str, *, after: str | None = None, limit: int = KEYS_PER_LOOK, prefix: str = ""
) -> dict[str, KeyCounts]:
    """:func:`keys_of` in pages: up to ``limit`` keys, by name, behind ``after``; empty at the end.

    ``prefix``: reads only those that begin with it.
    """
    ranges = [_beginning(work.keys, tag, queue, prefix) for tag in OF_KEYS]
    if after is not None:
        behind = [work.keys.prefix + pack(tag, queue, after) + b"\x00" for tag in OF_KEYS]
        ranges = [(max(begin, first), end) for (begin, end), first in zip(ranges, behind, strict=True)]
    ranges = [(min(begin, end), end) for begin, end in ranges]
    parts = work.tr.get_ranges([(*each, limit) for each in ranges], snapshot=True)
    in_order = sorted(_by_key(work.keys, parts).items())
    return dict(in_order[:limit])


def _by_key(keys: Keyspace, parts: list[list[KeyValue]]) -> dict[str, KeyCounts]:
    found: dict[str, dict[str, Any]] = {}
    for name, rows in zip(("ready", "leased", "limits"), parts, strict=True):
        for (_queue, key), value in keys.read(rows, str, str):
            found.setdefault(key, {})[name] = limits_of(value) if name == "limits" else decode_count(value)
    return {key: KeyCounts(**fields) for key, fields in found.items()}


def _beginning(keys: Keyspace, tag: str, queue: str, prefix: str) -> Range:
    """The rows of keys with this prefix: the byte that ends a text is below all that may continue it."""
    begin = keys.prefix + pack(tag, queue, prefix)[:-1]
    return begin, (begin + b"\xff" if prefix else range_of(keys.prefix + pack(tag, queue))[1])


# -- what an overview shows ------------------------------------------------------------------------------------------


def facts(work: Work, queues: list[str]) -> dict[str, QueueFacts]:
    """More facts about these queues, in two round trips. Ask for a few dozen queues per transaction."""
    stored = work.tr.get_many(
        [key for queue in queues for key in (work.keys.queue(queue), work.keys.control(queue))], snapshot=True
    )
    oldest = _oldest(work, queues)
    found = {}
    for number, queue in enumerate(queues):
        declared, control = stored[2 * number : 2 * number + 2]
        declaration = QueueDeclaration.if_readable(queue, declared)
        arguments = {} if declaration is None else declaration.arguments
        vanishes = declaration is not None and declaration.can_vanish
        found[queue] = QueueFacts(
            declared=declared is not None,
            arguments=arguments,
            control=control_of(control),
            oldest_ms=oldest.get(queue),
            can_vanish=vanishes,
        )
    return found


def _oldest(work: Work, queues: list[str]) -> dict[str, int]:
    """Since when each queue's oldest ready message has waited, judging by :data:`OLDEST_OF_KEYS` keys."""
    heads: list[tuple[str, Range]] = []
    for queue in queues:
        heads += [(queue, range_of(work.keys.items(queue, "", work.keys.rank(rank)))) for rank in range(URGENT + 1)]
    found: dict[str, int] = {}
    _note_oldest(work, heads, found)
    around = [each for queue in queues for each in (range_of(work.keys.ring(queue)), work.keys.backlogs(queue))]
    parts = work.tr.get_ranges([(*each, OLDEST_OF_KEYS) for each in around], snapshot=True)
    heads = []
    for number, queue in enumerate(queues):
        names = {turn[3] for turn, _ in readable(parts[2 * number], partial(work.keys.split_ring, queue))}
        names |= {key for (_queue, key), _ in work.keys.read(parts[2 * number + 1], str, str)}
        heads += [(queue, work.keys.all_items(queue, name)) for name in names if name]
    _note_oldest(work, heads, found)
    return found


def _note_oldest(work: Work, heads: list[tuple[str, Range]], found: dict[str, int]) -> None:
    parts = work.tr.get_ranges([(*each, 1) for _, each in heads], snapshot=True) if heads else []
    for (queue, _), rows in zip(heads, parts, strict=True):
        for _key, value in rows:
            published_ms = Record.published_at(value, 0)
            if published_ms:
                found[queue] = min(published_ms, found.get(queue, published_ms))


def sessions(work: Work, *, held: bool = False) -> list[SessionFacts]:
    """Every session that is open or not yet cleaned up. ``held``: count its messages, too."""
    described = {
        session_id: session.description_of(value)
        for (session_id,), value in work.keys.read(work.tr.get_range(*work.keys.all_sessions, snapshot=True), bytes)
    }
    known = session.beats(work)
    consumed = {session_id: session.consumed_of(beat) for session_id, beat, _ in known}
    # A session that consumes only Celery's own queues takes no tasks. A worker that stopped consuming is still one.
    idle = {
        each
        for each, names in consumed.items()
        if all(is_internal(name) and not controlled_worker(name) for name in names)
    }
    asked = [session_id for session_id, _, _ in known if held or session_id in idle]
    ranges = [(*range_of(work.keys.leases(each)), MOST_HELD if held else 1) for each in asked]
    parts = work.tr.get_ranges(ranges, snapshot=True) if ranges else []
    numbers = {session_id: len(rows) for session_id, rows in zip(asked, parts, strict=True)}
    return [
        SessionFacts(
            session_id=session_id,
            description=described.get(session_id, {}),
            beat=beat,
            ttl_s=ttl_s,
            open=session_id in described,
            consumed=consumed[session_id],
            held=numbers[session_id] if held else None,
            beat_ms=session.beat_ms(beat),
            is_internal=session_id in idle and not numbers[session_id],
        )
        for session_id, beat, ttl_s in known
    ]


def consumers(work: Work, queue: str) -> list[SessionId]:
    """The sessions that consumed the queue, or waited for it, at their last heartbeat."""
    return [session_id for session_id, beat, _ in session.beats(work) if queue in session.consumed_of(beat)]


# -- how messages are routed ---------------------------------------------------------------------------------------


def declaration(work: Work, name: str) -> QueueDeclaration | None:
    """How the queue was declared; None if there is no such queue."""
    return work.routing.read_queue(work.tr, name)


def exchange(work: Work, name: str) -> Exchange | None:
    """How the exchange was declared; None if there is no such exchange."""
    return work.routing.read_exchange(work.tr, name)


def route(work: Work, exchange: str, routing_key: str) -> list[str]:
    """The queues a message would reach now. Raises ``ExchangeNotFound``."""
    return work.routing.route(work.tr, exchange, routing_key)


def exchanges(work: Work) -> list[Exchange]:
    """All exchanges whose declarations can be read."""
    found = []
    for (name,), value in work.keys.read(work.tr.get_range(*work.keys.all_exchanges, snapshot=True), str):
        with suppress(FormatError):
            found.append(Exchange.decode(name, value))
    return found


def bindings(work: Work) -> list[tuple[str, str, str]]:
    """``(exchange, queue, routing key)`` of every binding."""
    rows = work.keys.read(work.tr.get_range(*work.keys.all_bindings, snapshot=True), str, str, str)
    return [(exchange, queue, routing_key) for (exchange, queue, routing_key), _ in rows]
