"""Window: how much one claim takes, for whom, and from where.

A claim is bounded in bytes, too: it writes each record into a lease, and reads each payload, while a transaction takes
10,000,000 bytes and 5 seconds. The first message always fits, so even the largest one gets through, alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kombu_fdb.engine.scheduling.key_limits import Sightings
from kombu_fdb.keyspace.codec import size_of
from kombu_fdb.model import QueueControl, SessionId
from kombu_fdb.store.protocol import KeyValue

RECORD_BYTES = 2_000_000
PAYLOAD_BYTES = 8_000_000


class QueueState(NamedTuple):
    """What a claim must know about a queue before it looks for messages.

    ``fair``: whether it has had messages with keys. ``head``: its first messages without a key, and ``order``: the rows
    of ``fair.order_ranges``, if they were read in the same round trip; else None.
    """

    fair: bool
    control: QueueControl
    head: list[KeyValue] | None = None
    order: list[list[KeyValue]] | None = None


@dataclass(slots=True)
class Window:
    """One attempt of one claim. A read-only call has no session and infinite room."""

    session: SessionId
    #: Number of the first lease; the caller reserved ``limit`` of them before the retry loop.
    next_number: int
    limit: int
    #: A random place to begin among the arrivals of a fair queue: if there are more newcomers than one claim can admit,
    #: none is always last.
    first_bucket: int = 0
    #: Queues that were fair when this process last claimed from them: their order is read together with their heads.
    fair_queues: set[str] = field(default_factory=set)
    #: Since when this process has seen token buckets unchanged (``key_limits.py``).
    sightings: Sightings | None = None
    #: By queue, the tag of the consumer that claims, where only one may be active (``single.py``).
    consumers: Mapping[str, str] = field(default_factory=dict)
    #: Whether it gives way to a wait queue for the same queues: then it raises ``Outrun`` before it does anything.
    gives_way: bool = False
    #: Whether it takes each message separately, and so does not conflict with one that is released in between: for a
    #: claim that has already lost a race.
    apart: bool = False
    #: Queues whose messages are taken without a lease.
    no_ack: Collection[str] = ()
    #: Set by the claim: those of its queues that have a single active consumer.
    single: Collection[str] = ()
    most_record_bytes: float = RECORD_BYTES
    most_payload_bytes: float = PAYLOAD_BYTES
    record_bytes: int = 0
    payload_bytes: int = 0
    #: Whether a message did not fit; then no later one is taken either, which preserves the order.
    is_full: bool = False

    def take(self, rows: Sequence[KeyValue]) -> int:
        """How many of these messages fit, from the first on. Uses up their room."""
        values = [value for _, value in rows]
        records, payloads = self.record_bytes + sum(map(len, values)), self.payload_bytes + size_of(*values)
        if records <= self.most_record_bytes and payloads <= self.most_payload_bytes and not self.is_full:
            self.record_bytes, self.payload_bytes = records, payloads
            return len(rows)
        for number, value in enumerate(values):
            if not self.fits(value):
                return number
            self.record_bytes += len(value)
            self.payload_bytes += size_of(value)
        return len(rows)

    def fits(self, value: bytes) -> bool:
        """Whether there is room for this record; if not, the window is full."""
        records, payloads = self.record_bytes + len(value), self.payload_bytes + size_of(value)
        is_over = records > self.most_record_bytes or payloads > self.most_payload_bytes
        if is_over and self.record_bytes > 0:
            self.is_full = True
        return not self.is_full
