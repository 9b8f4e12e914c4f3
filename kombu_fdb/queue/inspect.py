"""Inspect: what is in the store. Snapshot reads only; nothing here ever conflicts with work."""

from __future__ import annotations

import dataclasses
from typing import Any

from kombu_fdb.keyspace.codec import decode_amount, decode_lease, decode_limits, size_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import KeyCounts, QueueCounts
from kombu_fdb.queue.tally import DELAYED, LEASED, READY
from kombu_fdb.routing.tables import Exchange
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["bindings", "counts", "exchanges", "keys_of", "queues", "scan"]

STATES = (READY, DELAYED, LEASED)


def counts(tr: Transaction, keys: Keyspace, queue: str) -> QueueCounts:
    """The counters of one queue."""
    return _counts(keys, tr.get_range(*keys.counts(queue), snapshot=True)).get(queue, QueueCounts())


def queues(tr: Transaction, keys: Keyspace) -> dict[str, QueueCounts]:
    """All queues that are declared or hold messages, by name."""
    names = [str(keys.unpack(key)[1]) for key, _ in tr.get_range(*keys.all_queues, snapshot=True)]
    found = _counts(keys, tr.get_range(*keys.all_counts, snapshot=True))
    return dict(sorted({**{name: QueueCounts() for name in names}, **found}.items()))


def _counts(keys: Keyspace, rows: list[KeyValue]) -> dict[str, QueueCounts]:
    found: dict[str, QueueCounts] = {}
    for key, value in rows:
        _tag, queue, state = keys.unpack(key)
        number, size = decode_amount(value)
        fields = {str(state): number, **({"ready_bytes": size} if state == READY else {})}
        found[str(queue)] = dataclasses.replace(found.get(str(queue), QueueCounts()), **fields)
    return {queue: counters for queue, counters in found.items() if counters != QueueCounts()}


def keys_of(tr: Transaction, keys: Keyspace, queue: str) -> dict[str, KeyCounts]:
    """The keys that have messages or limits, by name."""
    found: dict[str, dict[str, Any]] = {}
    ranges = (keys.backlogs(queue), keys.flights(queue), keys.all_limits(queue))
    for name, whole in zip(("ready", "leased", "limits"), ranges, strict=True):
        for key, value in tr.get_range(*whole, snapshot=True):
            number = int.from_bytes(value, "little", signed=True) if name != "limits" else decode_limits(value)
            found.setdefault(str(keys.unpack(key)[2]), {})[name] = number
    return {key: KeyCounts(**fields) for key, fields in sorted(found.items())}


def scan(tr: Transaction, keys: Keyspace, queue: str) -> QueueCounts:
    """The same numbers counted message by message: for tests and ``doctor``, as the counters must equal it."""
    prefixes = (keys.ready(queue), keys.keyed(queue))
    ready = [row for prefix in prefixes for row in tr.get_range(*range_of(prefix), snapshot=True)]
    delayed = len(tr.get_range(*range_of(keys.delayed(queue)), snapshot=True))
    leased = sum(_lease_queue(value) == queue for _, value in tr.get_range(*keys.all_leases, snapshot=True))
    return QueueCounts(len(ready), delayed, leased, sum(size_of(value) for _, value in ready))


def _lease_queue(value: bytes) -> str:
    return decode_lease(value)[0]


def exchanges(tr: Transaction, keys: Keyspace) -> list[Exchange]:
    rows = tr.get_range(*keys.all_exchanges, snapshot=True)
    return [Exchange.decode(str(keys.unpack(key)[1]), value) for key, value in rows]


def bindings(tr: Transaction, keys: Keyspace) -> list[tuple[str, str, str]]:
    """``(exchange, queue, routing key)``."""
    found = []
    for key, _ in tr.get_range(*keys.all_bindings, snapshot=True):
        _tag, exchange, queue, routing_key = keys.unpack(key)
        found.append((str(exchange), str(queue), str(routing_key)))
    return found
