"""Window: how much one claim takes, for whom, and from where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kombu_fdb.engine.scheduling.key_limits import Sightings
from kombu_fdb.engine.stored.batches import ByteBudget
from kombu_fdb.model import QueueControl, SessionId
from kombu_fdb.store.protocol import KeyValue


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
    """One attempt of one claim. A call that only reads has no session and infinite room."""

    session: SessionId
    #: Number of the first lease; the caller reserved ``limit`` of them before the retry loop.
    next_number: int
    limit: int
    #: A random place to begin among the arrivals of a fair queue: if there are more newcomers than one claim can
    #: admit, none of them is always the last.
    first_bucket: int = 0
    #: Queues that were fair when this process last claimed from them: their order is read together with their heads.
    fair_queues: set[str] = field(default_factory=set)
    #: How long token buckets were seen unchanged (``key_limits.py``).
    sightings: Sightings | None = None
    #: By queue, the tag of the consumer that claims, where only one may be active (``single.py``).
    consumers: Mapping[str, str] = field(default_factory=dict)
    #: Whether it gives way to rivals in a line for the same queues: it raises ``Outrun`` before it does anything.
    gives_way: bool = False
    #: Whether it takes each message apart, and so does not conflict with one that is released in between: for a claim
    #: that has already lost a race.
    apart: bool = False
    #: Queues whose messages are taken without a lease.
    no_ack: Collection[str] = ()
    #: Set by the claim: those of its queues that have a single active consumer.
    single: Collection[str] = ()
    budget: ByteBudget = field(default_factory=ByteBudget)
