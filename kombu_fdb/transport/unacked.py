"""What a channel holds: messages that are claimed, or handed out and not settled; how many more it may have.

*The table.* A delivery is *held* under the tag it was handed out with, from just before its callback until it is
settled. Acks come from any thread, and single operations of dictionaries and sets
are atomic, so nothing here takes a lock.

*The room.* A claimed message is *waiting* in the inbox until a worker loop takes it; then it is *held* until it is
settled. Two things bound both together: the prefetch, and the slots, of which a message takes one for good when it is
handed out (the worker says anew how many are free). What is claimed ahead counts, so neither is exceeded.

A consumer without acks has room as if nothing bounded it (AMQP: the prefetch does not apply to it). Then, and without a
prefetch, only so many are claimed *ahead* as it works off in :data:`AHEAD_S` at the pace of the last one, and no more
than the window: what a slow consumer has in its inbox, no other one of the queue can have.

Round trips are grouped. With a prefetch, room is worth a claim when half of it is free, or all of it, or when a free
place has waited as long as an ack waits for company; a free slot is not kept waiting for a second one. Without a bound
it is worth one when the half of what it may have ahead is left.

*Settling.* A delivery is handed out under a tag of its own (one per claim, never the publisher's), and then it is
exactly one of

* acknowledged: it leaves the table at once, so that its place is free; the store hears of it a moment later;
* requeued or rejected: it leaves the table when the store has done it;
* overdue: its time to run has passed, and it was released in the consumer's stead (``process/time_to_run.py``). It
  stays in the table, as late, until the consumer settles it in vain: so a consumer that hangs gets no other message for
  it;
* released with everything else the channel holds when it closes. It counts as an attempt if one was made: the callback
  raised, or the worker's pool had begun with the task. Then it comes back as redelivered;
* orphaned: the connection failed, and the channel is gone, but the message may still be worked on. The channel keeps
  the client it first consumed with, and the lease belongs to the process's session, not to the connection, so it stays
  valid: a late ack through the old ``Message`` succeeds. A message without references will never be settled, and is
  released by its finalizer.

Settling a tag that is not in the table changes nothing. Leases are the process's, too: a forked child, which has a copy
of them, settles nothing, whatever it closes.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

from kombu.transport import virtual

from kombu_fdb.errors import ForkedError, StoreError
from kombu_fdb.model import Delivery, Lease, SessionId
from kombu_fdb.process.client import Client

logger = logging.getLogger(__name__)

# -- handed out --------------------------------------------------------------------------------------------------------


#: Of a rejection without an explanation.
REJECTED: tuple[str, dict[str, Any]] = ("rejected", {})


class Held:
    """By delivery tag, in the order of the tags."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.late: set[int] = set()
        #: Taken by ``basic_get``.
        self.got: set[int] = set()
        #: Weakly: one without references will never be settled.
        self.messages: dict[int, weakref.ref[Any]] = {}
        self._explanations: dict[int, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def consumed(self) -> int:
        """How many fill a channel's prefetch window: what its consumers have, as in RabbitMQ."""
        return len(self.leases) - len(self.got)

    def has(self, lease: Lease) -> bool:
        """Whether it is held under any tag."""
        return lease in list(self.leases.values())

    def withdraw(self, tag: int) -> bool:
        """It was not handed out after all. False if it was not held."""
        held = tag in self.leases
        self.drop(tag)
        return held

    def drop(self, tag: int) -> None:
        """It is settled, or was no message after all."""
        self._explanations.pop(tag, None)
        self.messages.pop(tag, None)
        self.got.discard(tag)  # before: in between, the window may seem too full, not too empty
        self.leases.pop(tag, None)
        self.late.discard(tag)

    def expire(self, lease: Lease) -> None:
        """Its time to run has passed, and it was released without its consumer. From any thread."""
        self.late.update([tag for tag, held in list(self.leases.items()) if held == lease])

    def drop_late(self) -> list[int]:
        """They are not ours any more. Returns their tags."""
        late = list(self.late)
        for tag in late:
            self.drop(tag)
        return late

    def leave(self) -> list[Lease]:
        """All that is unsettled, which the caller settles from now on."""
        held, self.leases = self.leases, {}
        leases = [lease for tag, lease in held.items() if tag not in self.late]
        self.late, self.got = set(), set()
        return leases

    # -- the messages ------------------------------------------------------------------------------------------------

    def message(self, tag: int) -> Any:
        """None if it was collected, or never was a message."""
        reference = self.messages.get(tag)
        return None if reference is None else reference()

    def explain(self, tag: int, reason: str, details: dict[str, Any]) -> None:
        if tag in self.leases:
            self._explanations[tag] = reason, details

    def explanation(self, tag: int) -> tuple[str, dict[str, Any]]:
        """Reason and details, for a dead letter."""
        return self._explanations.get(tag, REJECTED)


# -- claimed ahead -----------------------------------------------------------------------------------------------------


class Inbox:
    """Not thread-safe: ``Dispatch`` holds its lock. Moments are seconds of its clock."""

    def __init__(self) -> None:
        self.items: deque[tuple[Subscription, Delivery]] = deque()
        #: Whether it ever had one for a consumer without acks.
        self.is_mixed = False
        #: When a message was last taken, or the first one came.
        self.touched = 0.0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[Subscription, Delivery]]:
        return iter(self.items)

    @property
    def with_acks(self) -> int:
        """How many of them are to be settled. Counted, not kept: a counter would not survive an interruption."""
        return sum(not consumer.no_ack for consumer, _ in self.items) if self.is_mixed else len(self.items)

    def bring_forward(self) -> bool:
        """The first one for a consumer without acks becomes the head. Whether there is one."""
        items = list(self.items) if self.is_mixed else []
        first = next((item for item in items if item[0].no_ack), None)
        if first is not None:
            self.items = deque([first, *(item for item in items if item is not first)])
        return first is not None

    def return_undelivered(self, consumer: Subscription, delivery: Delivery) -> None:
        """To the front, unless it is there: the thread that took it may have been interrupted before it left."""
        if not self.items or self.items[0][1] is not delivery:
            self.items.appendleft((consumer, delivery))

    def withdraw(
        self, chosen: Callable[[Subscription, Delivery], bool], leaving: set[Lease] | None = None
    ) -> list[Lease]:
        """Remove what is chosen. Returns the leases; what was taken out of the store has none.

        ``leaving``: they are put into it before they are removed.
        """
        taken = [item for item in self.items if chosen(*item)]
        if taken:
            if leaving is not None:
                leaving.update([delivery.lease for _, delivery in taken if delivery.leased])
            self.items = deque(item for item in self.items if not chosen(*item))
        return [delivery.lease for _, delivery in taken if delivery.leased]

    def lies_since(self) -> float | None:
        """Since when nothing was taken; None if nothing is here that could go back."""
        for _, delivery in self.items:
            if delivery.leased:
                return self.touched
        return None


# -- how many more -----------------------------------------------------------------------------------------------------


#: For how long a consumer without a prefetch has work ahead, in seconds.
AHEAD_S = 0.1
MOST_AHEAD = 10_000


class Room(NamedTuple):
    """How many messages are worth claiming; if none, in how many seconds it may be different (None: unknown)."""

    places: int
    again_s: float | None = None


FULL = Room(0)


class Credit:
    """Of one channel. ``Dispatch`` holds its lock where the inbox is touched; the rest is for any thread."""

    def __init__(self) -> None:
        #: Claimed and not handed out yet.
        self.inbox: Inbox = Inbox()
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
        held = self.held  # what of it counts is :attr:`Held.consumed`, which each message would call
        return not self.prefetch or len(held.leases) - len(held.got) < self.prefetch

    def may_pass(self) -> bool:
        """Whether one may be handed out that can't be consumed; if not, an ack wakes the thread that drains."""
        if self.inbox.bring_forward():
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
        held, inbox = self.held, self.inbox  # Held.consumed and Inbox.with_acks, without a call for each message
        waiting = inbox.with_acks if inbox.is_mixed else len(inbox.items)
        return self.prefetch - (len(held.leases) - len(held.got)) - waiting

    @property
    def _slots(self) -> int:
        return (self._most_handed or 0) - self._handed - self.inbox.with_acks

    def unbounded_room(self, window: int) -> int:
        """How many messages are worth claiming where nothing else bounds them."""
        waiting, ahead = self._unbounded_waiting, min(self._ahead, window)
        return ahead - waiting if waiting <= ahead // 2 else 0

    def is_low(self, window: int) -> bool:
        """Whether taking a message has just made that worth a claim."""
        if (self.prefetch or self._most_handed is not None) and not self.inbox.is_mixed:  # as is_bounded
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

    def receive(self, consumer: Subscription, delivery: Delivery, now: float) -> None:
        """It was claimed."""
        inbox = self.inbox
        if not inbox.items:
            inbox.touched = now
        inbox.is_mixed = inbox.is_mixed or consumer.no_ack
        inbox.items.append((consumer, delivery))
        self._free_since = None

    def hand_out(self, tag: int, lease: Lease | None, now: float) -> None:
        """The next one leaves the inbox. ``lease``: None if no ack will follow."""
        self.inbox.touched = now
        self.inbox.items.popleft()
        if self._handed_at is not None:
            # From one to the next, waiting included. At most twice as many as before, in case it slows down.
            took_s = max(now - self._handed_at, AHEAD_S / MOST_AHEAD)
            self._ahead = max(1, min(2 * self._ahead, int(AHEAD_S / took_s)))
        self._handed_at = now
        if lease is not None:
            self.held.leases[tag] = lease
            self._handed, self._last_counted = self._handed + 1, tag

    def reclaim(self, tag: int) -> None:
        """No callback has seen it."""
        if self.held.withdraw(tag) and tag <= self._last_counted:  # else interrupted before it was counted
            self._handed -= 1


# -- settling ----------------------------------------------------------------------------------------------------------


#: This many pending acks don't wait for more.
MANY_ACKS = 64


class Connected(Protocol):
    """A channel's connection, as its settler sees it."""

    @property
    def store(self) -> Client: ...

    def now_ms(self) -> int: ...

    def on_ack(self, pending: int, enough: int, *, was_blocked: bool) -> bool:
        """An ack waits, the ``pending``-th. False if no receiver runs that would settle it."""

    def on_room(self) -> None:
        """Room was made, or taken away."""


class Settling:
    """Settles what one channel was given. From any thread."""

    def __init__(self, connection: Connected, credit: Credit) -> None:
        self._connection = connection
        self._credit = credit
        self._client: Client | None = None
        self._pid = os.getpid()
        #: The channel is closed: another thread settles what comes now.
        self.ended = False

    @property
    def client(self) -> Client:
        """What the channel consumed with: stays the same when the connection is lost. Raises ``ForkedError``."""
        if os.getpid() != self._pid:  # as is_foreign, which each message would call three times
            raise ForkedError(
                "these messages were given to the parent process, which settles them",
                parent=self._pid,
                fix="Settle them there. What a child is to work on, it consumes through a connection of its own.",
            )
        if self._client is None:
            self._client = self._connection.store
        return self._client

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child of the process that was given the messages."""
        return os.getpid() != self._pid

    # -- acks --------------------------------------------------------------------------------------------------------

    def ack(self, tag: int, lease: Lease) -> None:
        """It leaves the table, and is settled soon: with others if a receiver runs, else at once.

        ``tag``: in the table, or of one that was handed out without acks. An exception out of a signal handler leaves
        it noted, or held, to be acknowledged again.
        """
        client, credit = self.client, self._credit
        try:
            if client.overdue.timers:
                client.overdue.forget((lease,))  # the consumer was in time, even if the store hears of it later
            client.acks.append(lease)
            credit.held.drop(tag)
        except BaseException:
            if lease in client.acks:
                credit.held.drop(tag)
            raise
        enough = max(1, credit.prefetch // 2) if credit.prefetch else MANY_ACKS  # for a claim of their own
        if self._connection.on_ack(len(client.acks), enough, was_blocked=credit.was_blocked):
            return
        if self.ended:
            client.nudge()
        else:
            client.flush_acks()

    # -- at once -----------------------------------------------------------------------------------------------------

    def settle(self, lease: Lease, *, requeue: bool, pause_ms: int, reason: str, details: dict[str, Any]) -> None:
        """Now. Raises a ``StoreError``; may be repeated. ``details`` go to the dead letter, if it becomes one."""
        if requeue:
            due_ms = self._connection.now_ms() + pause_ms if pause_ms else 0
            self.client.requeue([lease], details, due_ms=due_ms)
        else:
            self.client.reject([lease], reason=reason, **details)

    def refuse(self, delivery: Delivery, error: str, **details: str) -> None:
        """Dead-letter what no consumer can handle."""
        logger.error("dead-lettered message %s of queue %s: %s", delivery.message_id.hex(), delivery.queue, error)
        try:
            self.client.reject([delivery.lease], reason="malformed", error=error, **details)
        except StoreError:
            self.client.release_later([delivery.lease])

    def note_attempt(self, lease: Lease) -> None:
        """Whenever it is released, an attempt at it counts."""
        self.client.attempted.add(lease)

    def release(self, leases: list[Lease], *, counted: bool) -> None:
        """At once; if the store does not answer, as soon as it does. Raises a ``StoreError``, once in an outage."""
        if not leases:
            return
        client = self.client
        if client.suspected and not counted:
            client.release_later(leases)
            return
        try:
            client.release(leases, counted=counted)
        except StoreError:
            client.suspect()
            raise

    def release_later(self, leases: list[Lease]) -> None:
        """By another thread. For a finalizer: never blocks, takes no lock."""
        if not self.is_foreign:
            self.client.release_later(leases)

    # -- room --------------------------------------------------------------------------------------------------------

    def on_room(self) -> None:
        self._connection.on_room()


# -- consumers ---------------------------------------------------------------------------------------------------------


_numbers = count(1)


#: A delivery tag: rising, unique in the process.
next_tag: Callable[[], int] = partial(next, count(1))


@dataclass(eq=False, slots=True)
class Subscription:
    """One consumer of one queue."""

    #: The caller's, which is its name in its channel only.
    consumer_tag: str
    queue: str
    #: Of its channel, as are the next two.
    credit: Credit
    settler: Settling
    #: Makes the message of a delivery, tag and consumer tag; None if it can't be one.
    open: Callable[[Delivery, int, str], Any]
    no_ack: bool
    callback: Callable[[Any], Any]
    #: Called by a drain when the queue was deleted.
    on_cancel: Callable[[Subscription], Any]
    #: The queue vanishes with its consumers.
    transient: bool
    #: The queue serves one consumer at a time.
    single: bool = False
    #: The session in whose name the store knows of this consumer.
    session_id: SessionId | None = None
    #: Its name in the store: no two of a process, and so of a session, are the same.
    tag: str = field(init=False)
    #: Whether claiming takes messages out of the store: without acks, from a queue that vanishes anyway. Others are
    #: claimed under a lease even without acks, and settled when they are handed out: what was claimed ahead is not lost
    #: with the consumer.
    leaseless: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tag = f"{next(_numbers)}-{self.consumer_tag}"
        self.leaseless = self.no_ack and self.transient


class Arrival(NamedTuple):
    """A message for a worker loop."""

    subscription: Subscription
    delivery: Delivery
    tag: int


LATE = (
    "delivery %r was settled after its time to run (x-ttr, x-consumer-timeout): the message had been released, and may "
    "run twice. This settlement changes nothing; give such messages more time."
)


class QoS(virtual.QoS):
    """Per channel. The base class's table is replaced: it is keyed by the publisher's tag, and its acks go nowhere."""

    def __init__(self, credit: Credit, settler: Settling) -> None:
        # Without the base's finalizer: the client hands everything back at exit, of all channels.
        self._credit = credit
        self._held = credit.held
        self._settler = settler

    # -- room ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many are unsettled."""
        return len(self._held.leases)

    @property
    def prefetch_count(self) -> int:
        return self._credit.prefetch

    @prefetch_count.setter
    def prefetch_count(self, count: int) -> None:
        self._credit.prefetch = count or 0

    @property
    def can_consume(self) -> Callable[[], bool]:
        return self._credit.can_consume

    @can_consume.setter
    def can_consume(self, replaced: Callable[[], bool]) -> None:
        self._credit.can_consume = replaced

    def can_consume_max_estimate(self) -> int | None:
        """How many more may be handed out; None for no limit."""
        if not self._credit.prefetch:
            return None
        return max(self._credit.prefetch - self._held.consumed, 0)

    # -- in ----------------------------------------------------------------------------------------------------------

    def holds(self, delivery_tag: int) -> bool:
        """Whether it was handed out with acks and is not settled."""
        return delivery_tag in self._held.leases

    def append(self, message: Any, delivery_tag: int) -> None:
        """Remember the message of a held delivery, weakly."""
        self._held.messages[delivery_tag] = weakref.ref(message)

    def get(self, delivery_tag: int) -> Any:
        """The unsettled message of this tag. Raises ``KeyError``."""
        return self._held.messages[delivery_tag]()

    # -- out ---------------------------------------------------------------------------------------------------------

    def ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Acknowledge one, or with ``multiple`` all handed out up to this one, as AMQP has it."""
        if multiple:
            for earlier in [tag for tag in list(self._held.leases) if tag < delivery_tag]:
                self.ack(earlier)
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
        else:
            self._settler.ack(delivery_tag, lease)

    def explain(self, delivery_tag: int, details: dict[str, Any], *, reason: str = "rejected") -> None:
        """Why a held delivery is about to be rejected, or put back for the last time: for its dead letter.

        ``reason`` is that of a rejection; one that came back too often has its own.
        """
        self._held.explain(delivery_tag, reason, details)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Put it back where it was, counting the attempt; or dead-letter it. Raises a ``StoreError``: try again."""
        self._settle(delivery_tag, requeue=requeue)

    def release(self, delivery_tag: int, pause_ms: int) -> None:
        """Put it back, counting the attempt; no consumer gets it before the pause is over. Raises as :meth:`reject`."""
        self._settle(delivery_tag, requeue=True, pause_ms=pause_ms)

    def give_up(self, delivery_tag: int) -> None:
        """It could not be settled, and no caller will try again: another thread releases it, and the attempt counts."""
        self.note_attempt(delivery_tag)
        self._abandon(delivery_tag)
        self._held.drop(delivery_tag)
        self._settler.on_room()

    def _settle(self, delivery_tag: int, *, requeue: bool, pause_ms: int = 0) -> None:
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
            return
        # Its room is free only when it is back in the store: the next claim finds it at its place.
        reason, details = self._held.explanation(delivery_tag)
        self._settler.settle(lease, requeue=requeue, pause_ms=pause_ms, reason=reason, details=details)
        self._held.drop(delivery_tag)
        self._settler.on_room()

    def _pop(self, delivery_tag: int) -> None:
        """There is nothing to settle any more."""
        late = delivery_tag in self._held.late
        self._held.drop(delivery_tag)
        if late:
            logger.warning(LATE, delivery_tag)
            self._settler.on_room()
        else:
            logger.warning("delivery %r was settled before, or released when its channel closed: ignored", delivery_tag)

    def note_attempt(self, delivery_tag: int) -> None:
        """Its consumer has begun with it, and may never tell how that ended. However it comes back, that counts."""
        lease = self._held.leases.get(delivery_tag)
        if lease is not None:
            self._settler.note_attempt(lease)

    # -- all at once -------------------------------------------------------------------------------------------------

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Hand back all unsettled messages; the attempt counts. Errors are raised, not returned."""
        self._release_held(counted=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The channel closes: release, uncounted but for those with an attempt."""
        if self._held.leases:
            # Celery's own tests wait for this text.
            logger.info("Restoring %d unacknowledged message(s)", len(self))
        self._release_held(counted=False)

    def _release_held(self, *, counted: bool) -> None:
        held = dict(self._held.leases)
        for tag in self._held.drop_late():
            held.pop(tag, None)
        try:
            self._settler.release(list(held.values()), counted=counted)
        finally:  # else the client keeps them, to hand them back as soon as it can
            for tag in held:
                self._held.drop(tag)
        self._settler.on_room()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: there is no visibility timeout."""

    def orphan(self) -> None:
        """The connection is lost. Keep what is still worked on; release what can't be settled any more."""
        unreferenced = []
        self._held.drop_late()
        for tag, lease in list(self._held.leases.items()):
            message = self._held.message(tag)
            if message is None:
                unreferenced.append(lease)
                self._held.leases.pop(tag, None)
            else:
                weakref.finalize(message, self._abandon, tag).atexit = False
        # Even if there are none: from here on the settler knows its client, when the connection is forgotten.
        self._settler.release_later(unreferenced)

    def _abandon(self, delivery_tag: int) -> None:
        """A finalizer: must not block, and takes no lock."""
        lease = self._held.leases.pop(delivery_tag, None)
        if lease is not None:
            self._settler.release_later([lease])


class Message(virtual.Message):
    """What a channel delivers."""

    def reject_log_error(
        self, logger: logging.Logger, errors: tuple[type[Exception], ...], requeue: bool = False
    ) -> None:
        """How Celery rejects: what the store could not do is logged, and the message forgotten.

        So it would stay leased for as long as its worker lives. Instead another thread releases it, and it comes to be
        rejected again.
        """
        super().reject_log_error(logger, errors, requeue=requeue)
        if not self.acknowledged:
            self.channel.qos.give_up(self.delivery_tag)
