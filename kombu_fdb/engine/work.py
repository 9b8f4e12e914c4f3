"""Work: what a verb gets for one run: a transaction, the environment, and the effects to write at its end.

Effects are the transaction's changes of counters, and the queues whose consumers it wakes.

Guarantee COUNTS: every verb that moves a message notes it in the effects of the transaction that moves it. The ready
messages of a queue are counted together with the bytes of their payloads, by one atomic add. So whenever a limit in
bytes is declared, the count is right already, and no queue pays extra for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from kombu_fdb.errors import LimitExceeded
from kombu_fdb.keyspace.codec import AMOUNT_BYTES, encode_amount
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import Rank, State
from kombu_fdb.primitives.clock import Clock, IdSource
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.protocol import Transaction

# -- environment -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Environment:
    """What a process provides (time, unique ids, chance), and its options. Sizes are in bytes."""

    clock: Clock
    ids: IdSource
    rng: Random
    #: Deadlines in seconds: of each call, and of a publish.
    call_s: float = 5.0
    publish_s: float = 10.0
    max_message_size: int = 8 * 1024 * 1024
    #: How often a message may return from a consumer before it is dead-lettered; None: no limit.
    delivery_limit: int | None = 20
    #: How long ``<queue>.dead`` keeps a message, and how many (the newest).
    dead_ttl_ms: int = 14 * 24 * 3600 * 1000
    dead_length: int = 10_000


# -- effects -----------------------------------------------------------------------------------------------------------


#: A stamp's user version has 2 bytes.
MOST_USER_VERSION = 0xFFFF

#: How messages are counted: by state, and as "newer" if they are kept for a newer version
#: (``forward_compatibility.py``).
Counted = State | Literal["newer"]
#: What happens to messages. lost: a lease ended with a dead session. late: a lease was gone before it was settled.
#: conflicts: a claim lost to a competing one. contested: a message was in such a claim.
Happening = Literal["published", "claimed", "acked", "returned", "dead", "lost", "late", "conflicts", "contested"]
#: What is counted for charts only (``totals.py``): a queue's name, what happened, and the message's key; without a key:
#: any message.
Event = tuple[str, ...]


def _add(numbers: dict[tuple[str, str], int], key: tuple[str, str], by: int) -> None:
    numbers[key] = numbers.get(key, 0) + by


class Effects:
    """Counts and bells of one transaction; also numbers its new messages."""

    __slots__ = (
        "_alarm",
        "_amounts",
        "_arrivals",
        "_backlogs",
        "_bells",
        "_counts",
        "_flights",
        "_freed",
        "deleting",
        "events",
        "stamped",
        "unlimited",
    )

    def __init__(self, stamped: int = 0) -> None:
        """``stamped``: how many new messages the transaction already has; the count continues from there."""
        #: Events of the commit, which this transaction does not write.
        self.events: dict[Event, int] = {}
        #: Queues whose keys have no limits; the transaction conflicts with a change to that.
        self.unlimited: set[str] = set()
        #: The value of ``("deleting", queue)`` for each queue to which it releases messages; b"" if there is none.
        self.deleting: dict[str, bytes] = {}
        self._counts: dict[tuple[str, Counted], int] = {}
        self._amounts: dict[str, int] = {}
        self._bells: set[str] = set()
        self._alarm = False
        self.stamped = stamped
        # Of messages with a key, by queue and key:
        self._backlogs: dict[tuple[str, str], int] = {}
        self._flights: dict[tuple[str, str], int] = {}
        self._arrivals: set[tuple[str, str, Rank]] = set()
        self._freed: set[tuple[str, str]] = set()

    def change(self, queue: str, state: Counted, by: int) -> None:
        """Count ``by`` more (or fewer) messages of ``queue`` in ``state``: delayed or leased."""
        counts, kind = self._counts, (queue, state)
        counts[kind] = counts.get(kind, 0) + by

    def note(self, queue: str, event: Happening, key: str = "", number: int = 1) -> None:
        """Count events for the charts; once more for the key, if the messages have one."""
        events, kind = self.events, (queue, event)
        events[kind] = events.get(kind, 0) + number
        if key:
            of_key = (queue, event, key)
            events[of_key] = events.get(of_key, 0) + number

    def ready(self, queue: str, size: int) -> None:
        """A message of ``size`` bytes became ready: count it and wake the consumers that wait for it."""
        self._amounts[queue] = self._amounts.get(queue, 0) + encode_amount(1, size)
        self._bells.add(queue)

    def unready(self, queue: str, messages: int, size: int) -> None:
        """These messages, of ``size`` bytes together, are no longer ready."""
        self._amounts[queue] = self._amounts.get(queue, 0) - encode_amount(messages, size)

    def wake(self, queue: str) -> None:
        """Have idle consumers look at the queue."""
        self._bells.add(queue)

    def came(self, queue: str, key: str, rank: Rank) -> None:
        """A message with a key became ready: consumers must look at the key."""
        _add(self._backlogs, (queue, key), 1)
        self._arrivals.add((queue, key, rank))

    def went(self, queue: str, key: str, messages: int) -> None:
        """These messages with a key are no longer ready."""
        _add(self._backlogs, (queue, key), -messages)

    def leased(self, queue: str, key: str) -> None:
        """A message with a key was leased. Guarantee KEY-LIMIT: counted whether the key is limited now or not."""
        _add(self._flights, (queue, key), 1)

    def freed(self, queue: str, key: str) -> None:
        """A lease on a message with a key ended: a parked key may have a slot again."""
        _add(self._flights, (queue, key), -1)
        self.spared(queue, key)

    def spared(self, queue: str, key: str) -> None:
        """A message was chosen but not leased: its key may be parked, although a slot is still free."""
        if queue in self.unlimited:
            return
        self._freed.add((queue, key))
        self._bells.add(queue)

    def delayed(self, queue: str) -> None:
        """A message was delayed: count it and let the promoter look at its due time."""
        self.change(queue, "delayed", 1)
        self._alarm = True

    def next_user_version(self) -> bytes:
        """The 2 bytes that order this transaction's new messages. Raises ``LimitExceeded`` when they are used up."""
        number = self.stamped
        if number > MOST_USER_VERSION:
            raise LimitExceeded("too many messages in one transaction", most=MOST_USER_VERSION + 1)
        self.stamped = number + 1
        return number.to_bytes(2, "big")

    def write(self, tr: Transaction, keys: Keyspace) -> None:
        """Write all effects into the transaction: one atomic add per changed counter, one blind set per bell."""
        for (queue, state), by in self._counts.items():
            if by:
                tr.add(keys.count(queue, state), by)
        for queue, by in self._amounts.items():
            if by:
                tr.add(keys.count(queue, "ready"), by, width=AMOUNT_BYTES)
        for (queue, key), by in self._backlogs.items():
            if by:
                tr.add(keys.backlog(queue, key), by)
        for (queue, key), by in self._flights.items():
            if by:
                tr.add(keys.flight(queue, key), by)
        if self._arrivals:
            for queue, key, rank in self._arrivals:
                tr.set(keys.arrival(queue, key, rank), b"")
            for queue in {queue for queue, _, _ in self._arrivals}:
                tr.set(keys.fair(queue), b"")
        for queue, key in self._freed:
            tr.set(keys.freed(queue, key), b"")
        for queue in self._bells:
            tr.set_versionstamped_value(keys.bell(queue))
        if self._alarm:
            tr.set_versionstamped_value(keys.alarm)


# -- work --------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """One run of a verb in one transaction. A verb that has to run again gets another one."""

    tr: Transaction
    keys: Keyspace
    routing: RoutingTables
    environment: Environment
    #: Wall clock: the same time throughout the run.
    now_ms: int
    #: Counters and bells, written at the end of the run; a read-only run has none.
    effects: Effects
    #: The disk is full: instead of being dead-lettered, a message is delayed, as its death record would not fit.
    rests: bool = False
