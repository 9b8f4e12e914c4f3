"""A channel's unacked messages: those claimed, those handed out and not settled; and how many more it may have.

*The table.* A delivery is *held* under the tag it was handed out with, from just before its callback until it is
settled. Acks come from any thread, and single operations of dictionaries and sets are atomic, so nothing here takes a
lock.

*The room.* A claimed message is *waiting* in the inbox until a worker loop takes it; then it is *held* until it is
settled. Two things bound the sum of both: the prefetch and the slots. A message that is handed out uses up a slot; the
worker says from time to time how many are free. Messages claimed ahead count, too, so neither bound is exceeded.

A consumer without acks has room as if nothing bounded it (in AMQP, the prefetch does not apply to it). For it, and for
a channel without a prefetch, as many messages are claimed *ahead* as it handles in :data:`AHEAD_S` at the pace of the
last one, and no more than the window: the queue's other consumers can't reach messages in a slow consumer's inbox.

Round trips are grouped. With a prefetch, a claim is made when at least half of the prefetch is free, or when a free
place has waited as long as acks are grouped (``ack_delay_ms``); a free slot does not wait for a second one. Without a
bound, a claim is made when half of what may be claimed ahead is left.

*Settling.* A delivery is handed out under a tag of its own (one per claim, never the publisher's), and then it is
exactly one of

* acknowledged: it leaves the table at once, so that its place is free; the store learns of it a moment later;
* requeued or rejected: it leaves the table when the store has committed that. A Celery worker does not retry after an
  error: then it leaves the table when another thread has taken over the retries (:meth:`Message.reject_log_error`);
* overdue: its time to run has passed, and it was released on the consumer's behalf (``process/time_to_run.py``). It
  stays in the table, marked as late, until the consumer tries to settle it, which has no effect. So a consumer that
  hangs gets no other message in its place;
* released with everything else the channel holds when it closes. It counts as an attempt if one was made: the callback
  raised, or the worker's pool had begun with the task. Then it comes back as redelivered;
* orphaned: the connection failed, and the channel is gone, but the message may still be worked on. The channel keeps
  the client it first consumed with, and the lease belongs to the process's session, not to the connection, so it stays
  valid: a late ack through the old ``Message`` succeeds. A message without references will never be settled, and its
  finalizer releases it.

Settling a tag that is not in the table changes nothing. Leases belong to the process, too: a forked child has copies of
them, and settles nothing, whatever it closes.
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
from kombu_fdb.primitives.threads import surely
from kombu_fdb.process.client import Client

logger = logging.getLogger(__name__)

# -- handed out --------------------------------------------------------------------------------------------------------


#: The reason of a rejection without an explanation.
REJECTED: tuple[str, dict[str, Any]] = ("rejected", {})


class Held:
    """Held deliveries by their tags, in the order of the tags."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.late: set[int] = set()
        #: Tags taken by ``basic_get``.
        self.got: set[int] = set()
        #: Weak references to the messages: one without references will never be settled.
        self.messages: dict[int, weakref.ref[Any]] = {}
        self._explanations: dict[int, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def consumed(self) -> int:
        """How many fill a channel's prefetch window: those of its consumers, as in RabbitMQ."""
        return len(self.leases) - len(self.got)

    def has(self, lease: Lease) -> bool:
        """Whether it is held under any tag."""
        return lease in list(self.leases.values())

    def withdraw(self, tag: int) -> bool:
        """Take back a delivery that was not handed out after all. False if it was not held."""
        held = tag in self.leases
        self.drop(tag)
        return held

    def drop(self, tag: int) -> None:
        """Forget a delivery that is settled, or was no message after all."""
        self._explanations.pop(tag, None)
        self.messages.pop(tag, None)
        self.got.discard(tag)  # first: in between, the window may seem too full, not too empty
        self.leases.pop(tag, None)
        self.late.discard(tag)

    def expire(self, lease: Lease) -> None:
        """Note that a message's time to run has passed, and that it was released for its consumer. From any thread."""
        self.late.update([tag for tag, held in list(self.leases.items()) if held == lease])

    def drop_late(self) -> list[int]:
        """Forget the overdue ones, which are not ours any more. Returns their tags."""
        late = list(self.late)
        for tag in late:
            self.drop(tag)
        return late

    def leave(self) -> list[Lease]:
        """Give all unsettled leases to the caller, which settles them from now on."""
        held, self.leases = self.leases, {}
        leases = [lease for tag, lease in held.items() if tag not in self.late]
        self.late, self.got = set(), set()
        return leases

    # -- the messages ------------------------------------------------------------------------------------------------

    def message(self, tag: int) -> Any:
        """The message; None if it was collected, or if there was none."""
        reference = self.messages.get(tag)
        return None if reference is None else reference()

    def explain(self, tag: int, reason: str, details: dict[str, Any]) -> None:
        if tag in self.leases:
            self._explanations[tag] = reason, details

    def explanation(self, tag: int) -> tuple[str, dict[str, Any]]:
        """Reason and details, for a dead letter."""
        return self._explanations.get(tag, REJECTED)


# -- claimed ahead: the inbox ------------------------------------------------------------------------------------------


class Inbox:
    """Messages that wait for a loop. Not thread-safe: ``Dispatch`` holds its lock. Moments are seconds of its clock."""

    def __init__(self) -> None:
        self.items: deque[tuple[Subscription, Delivery]] = deque()
        #: Whether it ever held a message for a consumer without acks.
        self.is_mixed = False
        #: When a message was last taken, or the first one came.
        self.touched = 0.0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[Subscription, Delivery]]:
        return iter(self.items)

    @property
    def with_acks(self) -> int:
        """How many need an ack. Counted each time: a counter would be wrong after an interruption."""
        return sum(not consumer.no_ack for consumer, _ in self.items) if self.is_mixed else len(self.items)

    def bring_forward(self) -> bool:
        """Move the first message for a consumer without acks to the front. Returns whether there is one."""
        items = list(self.items) if self.is_mixed else []
        first = next((item for item in items if item[0].no_ack), None)
        if first is not None:
            self.items = deque([first, *(item for item in items if item is not first)])
        return first is not None

    def return_undelivered(self, consumer: Subscription, delivery: Delivery) -> None:
        """Put it at the front, unless it is still there: the thread that took it may not have removed it yet."""
        if not self.items or self.items[0][1] is not delivery:
            self.items.appendleft((consumer, delivery))

    def withdraw(
        self, chosen: Callable[[Subscription, Delivery], bool], leaving: set[Lease] | None = None
    ) -> list[Lease]:
        """Remove the chosen messages. Returns their leases; messages that a claim took out of the store have none.

        ``leaving``: the leases are added to it before the messages are removed.
        """
        taken = [item for item in self.items if chosen(*item)]
        if taken:
            if leaving is not None:
                leaving.update([delivery.lease for _, delivery in taken if delivery.leased])
            self.items = deque(item for item in self.items if not chosen(*item))
        return [delivery.lease for _, delivery in taken if delivery.leased]

    def untaken_since(self) -> float | None:
        """Since when no message was taken; None if there is none that could return to the store."""
        for _, delivery in self.items:
            if delivery.leased:
                return self.touched
        return None


# -- how many more: the credit -----------------------------------------------------------------------------------------


#: For how long a consumer without a prefetch has work ahead, in seconds.
AHEAD_S = 0.1
MOST_AHEAD = 10_000


class Room(NamedTuple):
    """How many messages are worth claiming; if none, in how many seconds it may be different (None: unknown)."""

    places: int
    again_s: float | None = None


FULL = Room(0)


class Credit:
    """The credit of one channel. ``Dispatch`` holds its lock where the inbox is touched; the rest is for any thread."""

    def __init__(self) -> None:
        #: Messages claimed and not handed out yet.
        self.inbox: Inbox = Inbox()
        #: Messages handed out and not settled.
        self.held = Held()
        #: How many messages its consumers may hold; 0 is no limit.
        self.prefetch = 0
        #: Whether one more may be handed out. Celery's ``worker_disable_prefetch`` replaces it, through the QoS.
        self.can_consume: Callable[[], bool] = self._within_prefetch
        #: Whether a message has ever waited for that; from then on, each ack wakes the thread that drains.
        self.was_blocked = False
        #: How many messages with acks were handed out, and how many may be altogether (None: any number).
        self._handed = 0
        #: The last tag among those: tags rise.
        self._last_counted = 0
        self._most_handed: int | None = None
        #: How many are worth claiming ahead, and when the last message was handed out.
        self._ahead = 1
        self._handed_at: float | None = None
        #: Since when there is free room, but less than is worth a claim.
        self._free_since: float | None = None

    # -- how many more -----------------------------------------------------------------------------------------------

    def _within_prefetch(self) -> bool:
        held = self.held  # :attr:`Held.consumed` inlined: each message would call it
        return not self.prefetch or len(held.leases) - len(held.got) < self.prefetch

    def may_pass(self) -> bool:
        """Whether a message may pass although the prefetch is used up; if not, an ack wakes the thread that drains."""
        if self.inbox.bring_forward():
            return True
        self.was_blocked = True
        return self.can_consume()  # once more: an ack just before saw no one blocked

    @property
    def is_bounded(self) -> bool:
        return self.prefetch > 0 or self._most_handed is not None

    @property
    def has_room(self) -> bool:
        """Whether one more message with acks may wait in the inbox."""
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
        """Whether the message just taken makes the next claim worthwhile."""
        if (self.prefetch or self._most_handed is not None) and not self.inbox.is_mixed:  # as is_bounded
            return False
        return self._unbounded_waiting in (0, min(self._ahead, window) // 2)

    @property
    def _unbounded_waiting(self) -> int:
        return len(self.inbox) - self.inbox.with_acks if self.is_bounded else len(self.inbox)

    def bounded_room(self, now: float, group_s: float) -> Room:
        """The room of consumers with acks, where something bounds them."""
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
        """Allow ``free`` more messages from now on. For the thread that delivers. Returns whether room was made."""
        before = self._most_handed
        self._most_handed = self._handed + max(free, 0)
        return before is None or self._most_handed > before

    # -- a message's way ---------------------------------------------------------------------------------------------

    def receive(self, consumer: Subscription, delivery: Delivery, now: float) -> None:
        """Put a claimed message into the inbox."""
        inbox = self.inbox
        if not inbox.items:
            inbox.touched = now
        inbox.is_mixed = inbox.is_mixed or consumer.no_ack
        inbox.items.append((consumer, delivery))
        self._free_since = None

    def hand_out(self, tag: int, lease: Lease | None, now: float) -> None:
        """Take the next message out of the inbox. ``lease``: None if no ack will follow."""
        self.inbox.touched = now
        self.inbox.items.popleft()
        if self._handed_at is not None:
            # The time from one message to the next, waiting included. Doubled at most, in case the consumer slows down.
            took_s = max(now - self._handed_at, AHEAD_S / MOST_AHEAD)
            self._ahead = max(1, min(2 * self._ahead, int(AHEAD_S / took_s)))
        self._handed_at = now
        if lease is not None:
            self.held.leases[tag] = lease
            self._handed, self._last_counted = self._handed + 1, tag

    def reclaim(self, tag: int) -> None:
        """Take back a message that no callback has seen."""
        if self.held.withdraw(tag) and tag <= self._last_counted:  # otherwise interrupted before the count
            self._handed -= 1


# -- settling ----------------------------------------------------------------------------------------------------------


#: This many pending acks don't wait for more.
MANY_ACKS = 64


class Connected(Protocol):
    """What a settler needs of its channel's connection."""

    @property
    def store(self) -> Client: ...

    def now_ms(self) -> int: ...

    def on_ack(self, pending: int, enough: int, *, was_blocked: bool) -> bool:
        """Note the ``pending``-th waiting ack. False if no receiver is running to settle it."""

    def on_room(self) -> None:
        """Note that room was made, or taken away."""


class Settling:
    """Settles the messages of one channel. From any thread."""

    def __init__(self, connection: Connected, credit: Credit) -> None:
        self._connection = connection
        self._credit = credit
        self._client: Client | None = None
        self._pid = os.getpid()
        #: Whether the channel is closed: then another thread settles.
        self.ended = False

    @property
    def client(self) -> Client:
        """The client with which the channel consumes; the same after a lost connection. Raises ``ForkedError``."""
        if os.getpid() != self._pid:  # ``is_foreign`` inlined: each message would call it three times
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
        """Take the delivery out of the table, and settle it soon: with others if a receiver runs, else at once.

        ``tag``: one in the table, or one that was handed out without acks. After an exception from a signal handler,
        either the ack is noted, or the delivery is still held and can be acknowledged again.
        """
        client, credit = self.client, self._credit
        try:
            if client.overdue.timers:
                client.overdue.forget((lease,))  # the consumer was in time, even if the store learns of it later
            client.acks.append(lease)
            credit.held.drop(tag)
        except BaseException:
            if lease in client.acks:
                credit.held.drop(tag)
            raise
        enough = max(1, credit.prefetch // 2) if credit.prefetch else MANY_ACKS  # to be worth a claim
        if self._connection.on_ack(len(client.acks), enough, was_blocked=credit.was_blocked):
            return
        if self.ended:
            client.nudge()
        else:
            client.flush_acks()

    # -- at once -----------------------------------------------------------------------------------------------------

    def settle(self, lease: Lease, *, requeue: bool, pause_ms: int, reason: str, details: dict[str, Any]) -> None:
        """Settle now. Raises a ``StoreError``; may be repeated. ``details`` go to the dead letter, if there is one."""
        if requeue:
            due_ms = self._connection.now_ms() + pause_ms if pause_ms else 0
            self.client.requeue([lease], details, due_ms=due_ms)
        else:
            self.client.reject([lease], reason=reason, **details)

    def refuse(self, delivery: Delivery, error: str, **details: str) -> None:
        """Dead-letter a message that no consumer can handle."""
        logger.error("dead-lettered message %s of queue %s: %s", delivery.message_id.hex(), delivery.queue, error)
        try:
            self.client.reject([delivery.lease], reason="malformed", error=error, **details)
        except StoreError:
            self.client.release_later([delivery.lease])

    def note_attempt(self, lease: Lease) -> None:
        """Have any later release of the message count an attempt."""
        self.client.attempted.add(lease)

    def release(self, leases: list[Lease], *, counted: bool) -> None:
        """Release now, or as soon as the store answers. Raises a ``StoreError``; uncounted, only once per outage."""
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
        """Release in another thread. For a finalizer: never blocks, takes no lock."""
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

    #: The caller's tag: the consumer's name within its channel.
    consumer_tag: str
    queue: str
    #: Its channel's, like the next two.
    credit: Credit
    settler: Settling
    #: Makes a message from a delivery, its tag and the consumer tag; None if the payload can't be read.
    open: Callable[[Delivery, int, str], Any]
    no_ack: bool
    callback: Callable[[Any], Any]
    #: Called by a drain when the queue was deleted.
    on_cancel: Callable[[Subscription], Any]
    #: Whether the queue vanishes with its consumers.
    transient: bool
    #: Whether the queue serves one consumer at a time.
    single: bool = False
    #: Whether the queue was declared when the consumer came; else a message has made it.
    declared: bool = False
    #: The session under which the store has registered this consumer.
    session_id: SessionId | None = None
    #: Its name in the store, unique in the process and so in the session.
    tag: str = field(init=False)
    #: Whether a claim deletes messages from the store: only without acks, and only from a queue that vanishes anyway.
    #: All others are claimed under a lease, even without acks, and settled when they are handed out, so that what was
    #: claimed ahead is not lost with the consumer.
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
    """One per channel. Replaces the base's table, which is keyed by the publisher's tag and whose acks do nothing."""

    def __init__(self, credit: Credit, settler: Settling) -> None:
        # Not the base's, which adds a finalizer: at exit the client releases everything, for all channels.
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
        """Acknowledge one delivery; with ``multiple`` all up to this one, or all for tag 0, as in AMQP."""
        if multiple:
            for earlier in [tag for tag in list(self._held.leases) if tag < delivery_tag or not delivery_tag]:
                self.ack(earlier)
            if not delivery_tag:
                return
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
        else:
            self._settler.ack(delivery_tag, lease)

    def explain(self, delivery_tag: int, details: dict[str, Any], *, reason: str = "rejected") -> None:
        """Note, for its dead letter, why a held delivery is about to be rejected, or requeued for the last time.

        ``reason`` is for a rejection; a message over its delivery limit gets a reason of its own.
        """
        self._held.explain(delivery_tag, reason, details)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Dead-letter it; with ``requeue``, release it, counting the attempt. Raises a ``StoreError``: try again."""
        self._settle(delivery_tag, requeue=requeue)

    def release(self, delivery_tag: int, pause_ms: int) -> None:
        """Release it, counting the attempt; no consumer gets it before the pause is over. Raises a ``StoreError``."""
        self._settle(delivery_tag, requeue=True, pause_ms=pause_ms)

    def settle_later(self, delivery_tag: int, *, requeue: bool) -> None:
        """Have another thread reject a delivery, or requeue it, because its consumer will not retry."""
        lease = self._held.leases.get(delivery_tag)

        def settle() -> None:
            if lease is not None and delivery_tag not in self._held.late:
                reason, details = self._held.explanation(delivery_tag)
                self._settler.client.settle_later(lease, details, reason=reason, requeue=requeue)

        def forget() -> None:
            self._held.drop(delivery_tag)
            self._settler.on_room()

        surely(settle, forget)

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
        """Forget a delivery that is settled."""
        late = delivery_tag in self._held.late
        self._held.drop(delivery_tag)
        if late:
            logger.warning(LATE, delivery_tag)
            self._settler.on_room()
        else:
            logger.warning("delivery %r was settled before, or released when its channel closed: ignored", delivery_tag)

    def note_attempt(self, delivery_tag: int) -> None:
        """Note that its consumer has begun, and may never report the end: any way back counts as an attempt."""
        lease = self._held.leases.get(delivery_tag)
        if lease is not None:
            self._settler.note_attempt(lease)

    # -- all at once -------------------------------------------------------------------------------------------------

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Release all unsettled messages, counting the attempt. Errors are raised, not returned."""
        self._release_held(counted=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """When the channel closes, release all, counted only where there was an attempt."""
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
        finally:  # after an error, the client releases them as soon as it can
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
        # Even if there are none: so the settler notes its client before the connection is forgotten.
        self._settler.release_later(unreferenced)

    def _abandon(self, delivery_tag: int) -> None:
        """A finalizer: must not block, and takes no lock."""
        lease = self._held.leases.pop(delivery_tag, None)
        if lease is not None:
            self._settler.release_later([lease])


class Message(virtual.Message):
    """The message that a channel delivers."""

    def reject_log_error(
        self, logger: logging.Logger, errors: tuple[type[Exception], ...], requeue: bool = False
    ) -> None:
        """Reject for a Celery worker, which only logs an error of the store and forgets the message.

        So another thread repeats the rejection until the store answers. As with a late ack, the message stays leased
        until then, and its task, which has run, does not run again while its worker lives. Guarantee: NOT-TWICE.
        """
        super().reject_log_error(logger, errors, requeue=requeue)
        if not self.acknowledged:
            self.channel.qos.settle_later(self.delivery_tag, requeue=requeue)
