"""Which consumer gets the next message, and how many more to claim (credit). Only bookkeeping: no thread, no store.

Model. A claimed message is *waiting* in its channel's inbox, assigned to one consumer, until a worker loop takes it.
Then it is *held*, under its delivery tag, from just before its callback until it is settled (``unacked.py``). Acks come
from any thread, and single operations of dictionaries and sets are atomic, so an ack takes no lock; the dispatch's lock
protects the inboxes.

*The room.* The channel's credit says how many waiting and held messages it may have: the prefetch and the slots bound
the sum. A message that is handed out uses up a slot; the worker reports from time to time how many are free. Messages
claimed ahead count, too, so neither bound is exceeded.

A consumer without acks is unbounded (in AMQP, the prefetch does not apply to it). For it, and for a channel without a
prefetch, as many messages are claimed *ahead* as it handles in :data:`AHEAD_S` at the pace of the last one, up to the
window. More would only keep messages in a slow consumer's inbox, where the queue's other consumers can't reach them.

Round trips are saved. With a prefetch, a claim is made when at least half of it is free, or when a free place has
waited as long as acks do (``ack_delay_ms``) since its ack; so a message that arrives later is claimed at once. A free
slot does not wait for a second one. Without a bound, a claim is made when half of what may be claimed ahead is left.

In a queue with a single active consumer, only this process's first consumer is served, until it ends; the store decides
whether it is the active one among those of all processes (``engine/scheduling/single.py``). Which queues these are may
change at any time, as a queue may be redeclared. So each claim reports what it has read, and if it was planned on
another assumption, it is given up and planned again (:meth:`Dispatch.agrees`).

A channel whose waiting messages were withdrawn, because none was taken for ``patience_s`` seconds or their time to run
had passed, is *stalled*: nothing is claimed for it until its program drains again.

A claimed message is *arriving* until it waits in an inbox, and a withdrawn one is *leaving* until its lease is
released. Signal handlers, and programs that kill greenlets, may raise an exception anywhere in between. Then the
message stays in that state, and the next turn continues with it (:meth:`Dispatch.place`, :meth:`Dispatch.to_release`).

From before it leaves the inbox until its callback is called, a message is in the *hand* of the thread that drains. Such
an exception in between returns it to the front of the inbox.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from time import monotonic
from typing import Any, NamedTuple

from kombu_fdb.model import Delivery, Lease, SessionId
from kombu_fdb.primitives.interruption import Lock

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
    #: This and the next two are its channel's.
    credit: Credit
    #: Acknowledges a delivery, given by its tag and its lease.
    ack: Callable[[int, Lease], None]
    #: Makes a message from a delivery, its tag and the consumer tag; None if the payload can't be read.
    open: Callable[[Delivery, int, str], Any]
    no_ack: bool
    callback: Callable[[Any], Any]
    #: Called by a drain after the queue was deleted.
    on_cancel: Callable[[Subscription], Any]
    #: Whether the queue vanishes with its consumers.
    transient: bool
    #: Whether the queue was declared when the consumer came; else a message created it.
    declared: bool = False
    #: The session under which the store has registered this consumer; until ``registered``, it may have.
    session_id: SessionId | None = None
    registered: bool = False
    #: Whether it is leaving, or has left: a registration that is still under way must be undone.
    leaves: bool = False
    #: Its tag in the store, unique in the process and so in the session.
    tag: str = field(init=False)
    #: Whether a claim deletes messages from the store: only without acks, and only from a queue that vanishes anyway.
    #: All others are claimed under a lease, even without acks, and settled when they are handed out, so that messages
    #: claimed ahead are not lost with the consumer.
    leaseless: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tag = f"{next(_numbers)}-{self.consumer_tag}"
        self.leaseless = self.no_ack and self.transient


class Arrival(NamedTuple):
    """A message for a worker loop."""

    subscription: Subscription
    delivery: Delivery
    tag: int


# -- handed out --------------------------------------------------------------------------------------------------------


#: The reason for a rejection without an explanation.
REJECTED: tuple[str, dict[str, Any]] = ("rejected", {})


class Held:
    """Held deliveries by their tags, in the order of the tags."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.late: set[int] = set()
        #: Tags taken by ``basic_get``.
        self.got: set[int] = set()
        #: Weak references to the messages: an unreferenced message will never be settled.
        self.messages: dict[int, weakref.ref[Any]] = {}
        self._explanations: dict[int, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def consumed(self) -> int:
        """How many count against the channel's prefetch: those of its consumers, as in RabbitMQ."""
        return len(self.leases) - len(self.got)

    def has(self, lease: Lease) -> bool:
        """Whether it is held under any tag."""
        return lease in list(self.leases.values())

    def withdraw(self, tag: int) -> bool:
        """Withdraw a delivery that was not handed out after all. False if it was not held."""
        held = tag in self.leases
        self.drop(tag)
        return held

    def drop(self, tag: int) -> None:
        """Forget a delivery that is settled, or turned out to be unreadable."""
        self._explanations.pop(tag, None)
        self.messages.pop(tag, None)
        self.got.discard(tag)  # first: in between, the window may look too full, but not too empty
        self.leases.pop(tag, None)
        self.late.discard(tag)

    def expire(self, lease: Lease) -> None:
        """Note that a message's time to run has passed, and that it has been released. From any thread."""
        self.late.update([tag for tag, held in list(self.leases.items()) if held == lease])

    def drop_late(self) -> list[int]:
        """Forget the overdue deliveries, which are no longer held here. Returns their tags."""
        late = list(self.late)
        for tag in late:
            self.drop(tag)
        return late

    def leave(self) -> list[Lease]:
        """Hand all unsettled leases over to the caller, which is to settle them."""
        held, self.leases = self.leases, {}
        leases = [lease for tag, lease in held.items() if tag not in self.late]
        self.late, self.got = set(), set()
        return leases

    # -- the messages ------------------------------------------------------------------------------------------------

    def message(self, tag: int) -> Any:
        """The message; None if it was collected, or did not exist."""
        reference = self.messages.get(tag)
        return None if reference is None else reference()

    def explain(self, tag: int, reason: str, details: dict[str, Any]) -> None:
        if tag in self.leases:
            self._explanations[tag] = reason, details

    def explanation(self, tag: int) -> tuple[str, dict[str, Any]]:
        """Reason and details, for a dead letter."""
        return self._explanations.get(tag, REJECTED)


# -- how many more: the credit -----------------------------------------------------------------------------------------


#: How long a consumer without a prefetch has work ahead, in seconds.
AHEAD_S = 0.1
MOST_AHEAD = 10_000


class Credit:
    """What the consumers of one channel have, and how much more they may have.

    ``Dispatch`` holds its lock whenever it touches the inbox; the rest is for any thread. Times are by its clock.
    """

    def __init__(self) -> None:
        #: Messages claimed, but not handed out yet.
        self.inbox: deque[tuple[Subscription, Delivery]] = deque()
        #: Whether the inbox has ever had a message for a consumer without acks.
        self._is_mixed = False
        #: When a message was last taken out of the inbox, or the first one came.
        self._touched = 0.0
        #: Messages handed out and not settled.
        self.held = Held()
        #: How many messages its consumers may hold; 0 is no limit.
        self.prefetch = 0
        #: Whether another message may be handed out. Celery's ``worker_disable_prefetch`` replaces it, through the QoS.
        self.can_consume: Callable[[], bool] = self._within_prefetch
        #: Whether a message has ever waited for that; since then, each ack wakes the thread that drains.
        self.was_blocked = False
        #: How many messages with acks were handed out, and how many may be in total (None: any number).
        self._handed = 0
        #: The last of their tags, which rise.
        self._last_counted = 0
        self._most_handed: int | None = None
        #: How many messages are worth claiming ahead, and when the last one was handed out.
        self._ahead = 1
        self._handed_at: float | None = None
        #: Since when there is room, but too little for a claim.
        self._free_since: float | None = None

    # -- how many more -----------------------------------------------------------------------------------------------

    def _within_prefetch(self) -> bool:
        held = self.held  # :attr:`Held.consumed` inlined: each message would call it
        return not self.prefetch or len(held.leases) - len(held.got) < self.prefetch

    def may_pass(self) -> bool:
        """Whether a message may be handed out despite a full prefetch; if not, an ack wakes the thread that drains."""
        items = list(self.inbox) if self._is_mixed else []
        first = next((item for item in items if item[0].no_ack), None)
        if first is not None:  # it needs no room, so it comes next
            self.inbox = deque([first, *(item for item in items if item is not first)])
            return True
        self.was_blocked = True
        return self.can_consume()  # again: an ack just before may have seen no blocked message

    @property
    def is_bounded(self) -> bool:
        return self.prefetch > 0 or self._most_handed is not None

    @property
    def has_room(self) -> bool:
        """Whether one more message with acks may wait in the inbox."""
        return (not self.prefetch or self._free > 0) and (self._most_handed is None or self._slots > 0)

    @property
    def _free(self) -> int:
        held = self.held  # Held.consumed and _with_acks inlined, to save calls
        waiting = self._with_acks if self._is_mixed else len(self.inbox)
        return self.prefetch - (len(held.leases) - len(held.got)) - waiting

    @property
    def _slots(self) -> int:
        return (self._most_handed or 0) - self._handed - self._with_acks

    @property
    def _with_acks(self) -> int:
        """How many in the inbox need an ack. Counted each time: a counter would be wrong after an interruption."""
        return sum(not consumer.no_ack for consumer, _ in self.inbox) if self._is_mixed else len(self.inbox)

    def unbounded_room(self, window: int) -> int:
        """How many messages are worth claiming if nothing else bounds them."""
        waiting, ahead = self._unbounded_waiting, min(self._ahead, window)
        return ahead - waiting if waiting <= ahead // 2 else 0

    def is_low(self, window: int) -> bool:
        """Whether the message just taken makes the next claim worthwhile."""
        if (self.prefetch or self._most_handed is not None) and not self._is_mixed:  # as is_bounded
            return False
        return self._unbounded_waiting in (0, min(self._ahead, window) // 2)

    @property
    def _unbounded_waiting(self) -> int:
        return len(self.inbox) - self._with_acks if self.is_bounded else len(self.inbox)

    def bounded_room(self, now: float, group_s: float, freed_at: float | None) -> tuple[int, float | None]:
        """How many messages with acks are worth claiming, if something bounds them.

        If none, also in how many seconds that may change; None: unknown. ``freed_at``: as in ``Dispatch.plan``.
        """
        if not self.can_consume():
            return 0, None
        if self._most_handed is not None:
            return max(min(self._free, self._slots) if self.prefetch else self._slots, 0), None
        free = self._free
        if free <= 0:
            self._free_since = None
            return 0, None
        if free >= max(1, self.prefetch // 2):
            return free, None
        if self._free_since is None:
            if freed_at is None:  # the place was free before a message came
                return free, None
            self._free_since = freed_at
        left_s = self._free_since + group_s - now
        return (free, None) if left_s <= 0 else (0, left_s)

    def limit_slots(self, free: int) -> bool:
        """Allow ``free`` more messages from now on. For the thread that delivers. Returns whether that adds room."""
        before = self._most_handed
        self._most_handed = self._handed + max(free, 0)
        return before is None or self._most_handed > before

    # -- a message's way ---------------------------------------------------------------------------------------------

    def receive(self, consumer: Subscription, delivery: Delivery, now: float) -> None:
        """Put a claimed message into the inbox."""
        if not self.inbox:
            self._touched = now
        self._is_mixed = self._is_mixed or consumer.no_ack
        self.inbox.append((consumer, delivery))
        self._free_since = None

    def hand_out(self, tag: int, lease: Lease | None, now: float) -> None:
        """Take the next message out of the inbox. ``lease``: None if no ack will follow."""
        self._touched = now
        self.inbox.popleft()
        if self._handed_at is not None:
            # The time from one message to the next, waiting included. Doubled at most, in case the consumer slows down.
            took_s = max(now - self._handed_at, AHEAD_S / MOST_AHEAD)
            self._ahead = max(1, min(2 * self._ahead, int(AHEAD_S / took_s)))
        self._handed_at = now
        if lease is not None:
            self.held.leases[tag] = lease
            self._handed, self._last_counted = self._handed + 1, tag

    def reclaim(self, tag: int) -> None:
        """Undo handing out a message that no callback has seen."""
        if self.held.withdraw(tag) and tag <= self._last_counted:  # else it was interrupted before the count
            self._handed -= 1

    def return_undelivered(self, consumer: Subscription, delivery: Delivery) -> None:
        """Put a message at the front, unless it is there: the thread that took it may not have removed it yet."""
        if not self.inbox or self.inbox[0][1] is not delivery:
            self.inbox.appendleft((consumer, delivery))

    def withdraw(self, chosen: Callable[[Subscription, Delivery], bool], into: set[Lease] | None = None) -> list[Lease]:
        """Remove the chosen messages from the inbox. Returns their leases; messages claimed without a lease have none.

        ``into``: the leases are added to it before the messages are removed.
        """
        taken = [item for item in self.inbox if chosen(*item)]
        if taken:
            if into is not None:
                into.update([delivery.lease for _, delivery in taken if delivery.leased])
            self.inbox = deque(item for item in self.inbox if not chosen(*item))
        return [delivery.lease for _, delivery in taken if delivery.leased]

    def untaken_since(self) -> float | None:
        """Since when no message has been taken out of the inbox; None if it has none that could return to the store."""
        for _, delivery in self.inbox:
            if delivery.leased:
                return self._touched
        return None


# -- what to claim, and for whom ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """What to claim now; if nothing, when to look again (seconds; None: when something changes)."""

    queues: list[str] = field(default_factory=list)
    limit: int = 0
    leaseless: set[str] = field(default_factory=set)
    #: For each queue with a single active consumer: the tag of the consumer to claim for.
    consumers: dict[str, str] = field(default_factory=dict)
    again_s: float | None = None
    #: Whether that many messages leave no room until the next ack.
    uses_all: bool = True

    def note(self, again_s: float | None) -> None:
        """Note when to look again."""
        if again_s is not None:
            self.again_s = again_s if self.again_s is None else min(again_s, self.again_s)


class Dispatch:
    """The consumers of one connection. Thread-safe; its methods raise what a ``Lock`` raises."""

    def __init__(
        self, window: int, group_s: float, patience_s: float, clock: Callable[[], float] = monotonic, turn: int = 0
    ) -> None:
        """``turn``: selects the first queue of the first turn; other consumers should pass other numbers."""
        self.window = window
        self._group_s = group_s
        self._patience_s = patience_s
        self._clock = clock
        self._lock = Lock()
        self._by_queue: dict[str, deque[Subscription]] = {}
        self._credits: deque[Credit] = deque()
        self._offset = turn
        #: By queue, the last turn in which it was the first.
        self._firsts: dict[str, int] = {}
        self._turns = 0
        #: Channels for which nothing is claimed; emptied when the program drains.
        self.stalled: set[Credit] = set()
        #: Claimed messages that are not placed yet. Claims put their messages here (``process/client_session.py``).
        self.arriving: list[Delivery] = []
        #: Whether a turn is placing them, or was interrupted doing so.
        self._placing = False
        self._leaving: set[Lease] = set()
        #: Lost sessions: other sessions have the messages that these had claimed.
        self._lost: set[SessionId] = set()
        #: The consumed queues that are known to have a single active consumer.
        self.single: set[str] = set()

    # -- consumers -------------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription, *, single: bool = False) -> None:
        """``single``: whether its queue is known to have a single active consumer."""
        with self._lock:
            if single:
                self.single.add(subscription.queue)
            self._by_queue.setdefault(subscription.queue, deque()).append(subscription)
            if subscription.credit not in self._credits:
                self._credits.append(subscription.credit)

    def remove(self, subscription: Subscription) -> None:
        """Remove a consumer. Messages that wait for it, or arrive for it alone, are leaving from now on.

        May be repeated, for messages that a claim has brought since.
        """
        with self._lock:
            subscriptions = self._by_queue.get(subscription.queue, deque())
            if subscription in subscriptions:
                subscriptions.remove(subscription)
            subscription.credit.withdraw(lambda each, _: each is subscription, self._leaving)
            # Without consumers here, it is unknown whether the queue has a single active consumer.
            for each in list(self.arriving) if subscription.queue in self.single or not subscriptions else ():
                if each.queue == subscription.queue:
                    if each.leased:
                        self._leaving.add(each.lease)
                    with suppress(ValueError):  # its claim was given up
                        self.arriving.remove(each)
            if not subscriptions and self._by_queue.pop(subscription.queue, None) is not None:
                self._firsts.pop(subscription.queue, None)
                self.single.discard(subscription.queue)

    def drop_session(self, session_id: SessionId) -> None:
        """Forget messages that a lost session had claimed and no consumer has seen: other sessions have them now."""
        with self._lock:
            self._lost.add(session_id)
            for credit in self._credits:
                credit.withdraw(lambda _, delivery: delivery.lease.session == session_id)

    def close(self) -> None:
        """Remove all consumers. Waiting messages are leaving, and so are those that arrive from now on."""
        with self._lock:
            self._by_queue.clear()
            for credit in self._credits:
                credit.withdraw(_everything, self._leaving)

    def forget(self, credit: Credit) -> None:
        """Forget a closed channel. Its waiting messages are leaving: its consumers may not be cancelled yet."""
        with self._lock:
            credit.withdraw(_everything, self._leaving)
            if credit in self._credits:
                self._credits.remove(credit)
            self.stalled.discard(credit)

    def to_release(self) -> list[Lease]:
        """The leases of the leaving messages; :meth:`released` must follow."""
        if not self._leaving:
            return []
        with self._lock:
            self._drop_leaving()
            return list(self._leaving)

    def _drop_leaving(self) -> None:
        """Remove leaving messages from the inboxes: the thread that withdrew them may have been interrupted."""
        for credit in self._credits if self._leaving else ():
            credit.withdraw(lambda _, delivery: delivery.lease in self._leaving)

    def released(self, leases: Iterable[Lease]) -> None:
        """Forget leases that are released, or that another thread will release."""
        self._leaving.difference_update(leases)

    @property
    def subscriptions(self) -> list[Subscription]:
        with self._lock:
            return [each for subscriptions in self._by_queue.values() for each in subscriptions]

    @property
    def queues(self) -> set[str]:
        return set(self._by_queue)  # one call into C, so it needs no lock

    @property
    def shared(self) -> set[str]:
        """Queues from which any number of consumers may claim, in any number of processes."""
        with self._lock:
            return {
                queue
                for queue, subscriptions in self._by_queue.items()
                if queue not in self.single and not any(each.transient for each in subscriptions)
            }

    def competing(self, queues: Collection[str]) -> set[str]:
        """The other queues whose consumers share a channel's bounded room with a consumer of ``queues``."""
        with self._lock:
            among = {
                each.credit
                for queue in queues
                for each in self._by_queue.get(queue, ())
                if each.credit.is_bounded and not each.no_ack
            }
            return {
                queue
                for queue, subscriptions in self._by_queue.items()
                if queue not in queues and any(each.credit in among and not each.no_ack for each in subscriptions)
            }

    @property
    def consumers(self) -> dict[str, str]:
        """For each queue with a single active consumer, the tag of the consumer that is served here."""
        with self._lock:
            return {queue: each[0].tag for queue, each in self._by_queue.items() if queue in self.single}

    def note_single(self, queues: Iterable[str], single: Collection[str]) -> None:
        """Note which of the ``queues`` have a single active consumer, as they are declared now."""
        with self._lock:
            for queue in queues:
                if queue in single and queue in self._by_queue:
                    self.single.add(queue)
                else:
                    self.single.discard(queue)

    def agrees(self, plan: Plan, single: Collection[str]) -> bool:
        """Note what a claim has found, as :meth:`note_single`. False if it would be planned differently now.

        Since it was planned, a queue may have been redeclared, or a consumer may have ended.
        """
        if not (single or self.single or plan.consumers):
            return True
        self.note_single(plan.queues, single)
        consumers = self.consumers
        return all(consumers.get(queue) == plan.consumers.get(queue) for queue in plan.queues)

    @property
    def unburdened(self) -> set[str]:
        """The consumers whose channels have nothing to settle or to hand out."""
        with self._lock:
            subscriptions = [each for subscriptions in self._by_queue.values() for each in subscriptions]
            return {each.tag for each in subscriptions if not each.credit.inbox and not each.credit.held}

    # -- patience ---------------------------------------------------------------------------------------------------

    def withdraw_untaken(self, now: float) -> int:
        """Withdraw messages that were not taken for ``patience_s``: they are leaving. Returns how many."""
        dropped = 0
        with self._lock:
            for credit in self._credits:
                since = credit.untaken_since() if credit.inbox else None
                if since is not None and since + self._patience_s <= now:
                    self.stalled.add(credit)
                    dropped += len(credit.withdraw(lambda _, delivery: delivery.leased, self._leaving))
        return dropped

    def next_withdrawal_s(self, now: float) -> float | None:
        """In how many seconds a message must be withdrawn, unless the program drains; None if none waits."""
        with self._lock:
            moments = [since for credit in self._credits if (since := credit.untaken_since()) is not None]
        return min(moments) + self._patience_s - now if moments else None

    # -- times to run ----------------------------------------------------------------------------------------------

    def withdraw(self, lease: Lease) -> bool:
        """Withdraw a message that is still waiting. False if it was handed out."""
        with self._lock:
            for credit in self._credits:
                if credit.withdraw(lambda _, delivery: delivery.lease == lease):
                    self.stalled.add(credit)
                    return True
        return False

    def overdue(self, lease: Lease) -> None:
        """Note that a message that was handed out has been released on its consumer's behalf."""
        with self._lock:
            for credit in self._credits:
                credit.held.expire(lease)

    # -- what to claim -------------------------------------------------------------------------------------------------

    def plan(self, hungry: set[str], now: float, freed_at: float | None = None) -> Plan:
        """What to claim from the ``hungry`` queues. The queue whose last turn as the first is longest ago comes first.

        ``freed_at``: when the first of the pending acks came, which may have made room; None: there are none.
        """
        plan = Plan()
        limit, total = self.window, 0
        with self._lock:
            for queue, subscriptions in self._by_queue.items():
                if queue in hungry and (room := self._room(self._served(queue), plan, now, freed_at)):
                    plan.queues.append(queue)
                    limit, total = min(limit, room), total + room
                    if queue in self.single:
                        plan.consumers[queue] = subscriptions[0].tag
                    if subscriptions[0].leaseless and all(each.leaseless for each in subscriptions):
                        plan.leaseless.add(queue)
        plan.limit = limit if plan.queues else 0
        plan.uses_all = plan.uses_all and plan.limit == total and plan.again_s is None
        if len(plan.queues) > 1:
            start = self._offset % len(plan.queues)
            plan.queues = sorted(plan.queues[start:] + plan.queues[:start], key=lambda each: self._firsts.get(each, 0))
        return plan

    def end_turn(self, first: str) -> None:
        """Note that a plan with this queue first was carried out: others go first next, so a full queue starves none.

        Counting turns would not do: plans have different queues, as different channels have room at different times.
        """
        with self._lock:
            self._turns += 1
            if first in self._by_queue:
                self._firsts[first] = self._turns

    def _room(self, subscriptions: Sequence[Subscription], plan: Plan, now: float, freed_at: float | None) -> int:
        rooms: dict[Credit, int] = {}
        for each in subscriptions:
            credit = each.credit
            if credit in self.stalled:
                continue
            if each.no_ack or not credit.is_bounded:
                rooms[credit], plan.uses_all = credit.unbounded_room(self.window), False
            else:
                places, again_s = credit.bounded_room(now, self._group_s, freed_at)
                rooms.setdefault(credit, places)
                plan.note(again_s)
        return sum(rooms.values())

    # -- messages ----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Assign arriving messages to consumers. Those for which no consumer has room are leaving.

        Since the claim, a consumer may have been cancelled, or its prefetch lowered.
        """
        arriving, now = self.arriving, self._clock()
        with self._lock:
            if self._placing and arriving and self._has(arriving[0].lease):
                del arriving[0]
            self._placing = True
            while arriving:
                delivery = arriving[0]
                subscription = self._choose(delivery.queue)
                if subscription is not None:
                    subscription.credit.receive(subscription, delivery, now)
                elif delivery.leased:
                    self._leaving.add(delivery.lease)
                del arriving[0]
            self._placing = False

    def turn_away(self) -> None:
        """Place none of the arriving messages: they are leaving."""
        self._leaving.update([each.lease for each in self.arriving if each.leased])
        self.arriving.clear()

    def _has(self, lease: Lease) -> bool:
        return any(
            credit.held.has(lease) or any(delivery.lease == lease for _, delivery in credit.inbox)
            for credit in self._credits
        )

    def _choose(self, queue: str) -> Subscription | None:
        """The next consumer with room, in turn; None if none has."""
        subscriptions = self._by_queue.get(queue)
        if subscriptions is None:
            return None
        is_single = queue in self.single
        for _ in range(1 if is_single else len(subscriptions)):
            chosen = subscriptions[0]
            if not is_single:
                subscriptions.rotate(-1)
            if chosen.no_ack or chosen.credit.has_room:
                return chosen
        return None

    def _served(self, queue: str) -> list[Subscription]:
        """The queue's consumers that may get messages, the next one first."""
        return list(islice(self._by_queue[queue], 1 if queue in self.single else None))

    def next(self, into: list[Arrival]) -> Arrival | None:
        """Put the next waiting message, from the channels in turn, ``into`` a list; None if none may be handed out."""
        now = self._clock()
        with self._lock:
            if self._leaving:
                self._drop_leaving()
            for _ in range(len(self._credits)):
                credit = self._credits[0]
                self._credits.rotate(-1)
                if credit.inbox and (credit.can_consume() or credit.may_pass()):
                    # In this order, the message can be returned after an interruption anywhere.
                    subscription, delivery = credit.inbox[0]
                    arrival = Arrival(subscription, delivery, next_tag())
                    into.append(arrival)
                    credit.hand_out(arrival.tag, None if subscription.no_ack else delivery.lease, now)
                    return arrival
        return None

    def return_undelivered(self, arrival: Arrival) -> Lease | None:
        """Put a message that no callback has seen first in its channel. Returns its lease if its consumer has ended."""
        subscription, delivery, tag = arrival
        with self._lock:
            subscription.credit.reclaim(tag)
            if delivery.leased and delivery.lease.session in self._lost:
                return None  # another consumer has it
            if subscription.credit.held.has(delivery.lease):
                return None  # another thread was faster
            if subscription in self._by_queue.get(subscription.queue, ()):
                subscription.credit.return_undelivered(subscription, delivery)
                return None
        return delivery.lease if delivery.leased else None

    def waiting(self, credit: Credit, queue: str) -> int:
        """How many messages of a queue wait in a channel, unseen by its program, and could be released."""
        with self._lock:
            return len(_of_queue(credit, queue))

    def take_waiting(self, credit: Credit, queue: str, into: list[Delivery], most: int) -> None:
        """Move up to ``most`` of them ``into`` a list, in order. If this is interrupted, they are leaving."""
        with self._lock:
            self._drop_leaving()
            first = _of_queue(credit, queue)[:most]
            leases = [each.lease for each in first]
            self._leaving.update(leases)
            self._drop_leaving()
            into += first
            self._leaving.difference_update(leases)


def _of_queue(credit: Credit, queue: str) -> list[Delivery]:
    return [delivery for _, delivery in credit.inbox if delivery.queue == queue and delivery.leased]


def _everything(*_: object) -> bool:
    return True
