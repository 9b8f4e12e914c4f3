"""How many messages one channel has, and how many more it may have. No thread, no store: only the bookkeeping.

Model. A claimed message is *waiting* in the inbox until a worker loop takes it; then it is *held* until it is settled.
Two things bound both together: the prefetch, and the slots, of which a message takes one for good when it is handed
out (the worker says anew how many are free). What is claimed ahead counts, so neither is exceeded.

A consumer without acks has room as if nothing bounded it (AMQP: the prefetch does not apply to it). Then, and without a
prefetch, only so many are claimed *ahead* as it works off in :data:`AHEAD_S` at the pace of the last one, and no more
than the window: what a slow consumer has in its inbox, no other one of the queue can have.

Round trips are grouped. With a prefetch, room is worth a claim when half of it is free, or all of it, or when a free
place has waited as long as an ack waits for company; a free slot is not kept waiting for a second one. Without a bound
it is worth one when the half of what it may have ahead is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple

from kombu_fdb.model import Delivery, Lease
from kombu_fdb.transport.holding.held import Held
from kombu_fdb.transport.holding.inbox import C, Inbox

#: For how long a consumer without a prefetch has work ahead, in seconds.
AHEAD_S = 0.1
MOST_AHEAD = 10_000


class Room(NamedTuple):
    """How many messages are worth claiming; if none, in how many seconds it may be different (None: unknown)."""

    places: int
    again_s: float | None = None


FULL = Room(0)


class Credit(Generic[C]):
    """Of one channel. ``Dispatch`` holds its lock where the inbox is touched; the rest is for any thread."""

    def __init__(self) -> None:
        #: Claimed and not handed out yet.
        self.inbox: Inbox[C] = Inbox()
        #: Handed out and not settled.
        self.held = Held()
        #: How many its consumers may hold; 0 is no limit.
        self.prefetch = 0
        #: Whether one more may be handed out. Celery's ``worker_disable_prefetch`` replaces it, through the QoS.
        self.can_consume: Callable[[], bool] = self._within_prefetch
        #: A message has waited for that, so each ack wakes the thread that drains.
        self.was_blocked = False
        #: Messages with acks that were handed out, and how many may be altogether (None: any number).
        self._handed = 0
        #: The last one of those: a tag is greater than all before it.
        self._last_counted = 0
        self._most_handed: int | None = None
        #: How many are worth having ahead, and when the last message was handed out.
        self._ahead = 1
        self._handed_at: float | None = None
        #: Since when less room than is worth a claim is free.
        self._free_since: float | None = None

    # -- how many more -----------------------------------------------------------------------------------------------

    def _within_prefetch(self) -> bool:
        return not self.prefetch or self.held.consumed < self.prefetch

    def may_consume(self) -> bool:
        """Whether the next message may be handed out; if not, from now on an ack wakes the thread that drains."""
        if self.can_consume() or self.inbox.bring_forward():
            return True
        self.was_blocked = True
        return self.can_consume()  # once more: an ack in between did not know

    @property
    def is_bounded(self) -> bool:
        return self.prefetch > 0 or self._most_handed is not None

    @property
    def has_room(self) -> bool:
        """Whether one more with acks may wait."""
        return (not self.prefetch or self._free > 0) and (self._most_handed is None or self._slots > 0)

    @property
    def _free(self) -> int:
        return self.prefetch - self.held.consumed - self.inbox.with_acks

    @property
    def _slots(self) -> int:
        return (self._most_handed or 0) - self._handed - self.inbox.with_acks

    def unbounded_room(self, window: int) -> int:
        """How many messages are worth claiming where nothing else bounds them."""
        waiting, ahead = self._unbounded_waiting, min(self._ahead, window)
        return ahead - waiting if waiting <= ahead // 2 else 0

    def is_low(self, window: int) -> bool:
        """Whether taking a message has just made that worth a claim."""
        if self.is_bounded and not self.inbox.is_mixed:
            return False
        return self._unbounded_waiting in (0, min(self._ahead, window) // 2)

    @property
    def _unbounded_waiting(self) -> int:
        return len(self.inbox) - self.inbox.with_acks if self.is_bounded else len(self.inbox)

    def bounded_room(self, now: float, group_s: float) -> Room:
        """With acks, where something bounds them."""
        if not self.can_consume():
            return FULL
        if self._most_handed is not None:
            return Room(max(min(self._free, self._slots) if self.prefetch else self._slots, 0))
        return self._grouped_room(now, group_s)

    def _grouped_room(self, now: float, group_s: float) -> Room:
        free = self._free
        if free <= 0:
            self._free_since = None
            return FULL
        if free >= max(1, self.prefetch // 2):
            return Room(free)
        if self._free_since is None:
            self._free_since = now
        left_s = self._free_since + group_s - now
        return Room(free) if left_s <= 0 else Room(0, left_s)

    def limit_slots(self, free: int) -> bool:
        """No more than ``free`` messages may be had from now on. By the handing thread. Whether room was made."""
        before = self._most_handed
        self._most_handed = self._handed + max(free, 0)
        return before is None or self._most_handed > before

    # -- a message's way ---------------------------------------------------------------------------------------------

    def receive(self, consumer: C, delivery: Delivery, now: float) -> None:
        """It was claimed."""
        self.inbox.put(consumer, delivery, now)
        self._free_since = None

    def hand_out(self, tag: int, lease: Lease | None, now: float) -> None:
        """The next one leaves the inbox. ``lease``: None if no ack will follow."""
        self.inbox.take(now)
        self._learn_pace(now)
        if lease is not None:
            self.held.leases[tag] = lease
            self._handed, self._last_counted = self._handed + 1, tag

    def _learn_pace(self, now: float) -> None:
        """From one to the next, waiting included. At most twice as many as before, in case it slows down."""
        if self._handed_at is not None:
            took_s = max(now - self._handed_at, AHEAD_S / MOST_AHEAD)
            self._ahead = max(1, min(2 * self._ahead, int(AHEAD_S / took_s)))
        self._handed_at = now

    def reclaim(self, tag: int) -> None:
        """No callback has seen it."""
        if self.held.withdraw(tag) and tag <= self._last_counted:  # else interrupted before it was counted
            self._handed -= 1
