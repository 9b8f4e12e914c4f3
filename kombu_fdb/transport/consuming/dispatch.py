"""Which consumer gets the next message, and from which queues to claim more. Only bookkeeping: no thread, no store.

Model. A claimed message is *waiting* in its channel's inbox, assigned to one consumer, until a worker loop takes it;
then it is *held* until it is settled. The channel's credit says how many of both it may have (``unacked.py``).

In a queue with a single active consumer, only the first consumer here is served, until it ends; the store decides
whether it is the active one among those of all processes (``engine/scheduling/single.py``).

A channel whose waiting messages had to be withdrawn, because none was taken for ``patience_s`` seconds or their
time to run had passed, is *stalled*: nothing is claimed for it until its program drains again.

A claimed message is *arriving* until it waits in an inbox, and a withdrawn one is *leaving* until its lease is
released. Signal handlers, and programs that kill greenlets, may raise an exception anywhere in between. It leaves the
message in that state, and the next turn goes on with it (:meth:`Dispatch.place`, :meth:`Dispatch.to_release`).

On its way from the inbox to its callback, a message is in the *hand* of the thread that drains: from before it leaves
the inbox until the callback is called. Such an exception in between returns it to the front of the inbox.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from kombu_fdb.model import Delivery, Lease, SessionId
from kombu_fdb.primitives.threads import unless_mine
from kombu_fdb.transport.unacked import Arrival, Credit, Room, Subscription, next_tag


@dataclass(slots=True)
class Plan:
    """What to claim now; if nothing, when to look again (seconds; None: when something changes)."""

    queues: list[str] = field(default_factory=list)
    limit: int = 0
    leaseless: set[str] = field(default_factory=set)
    #: For each queue with a single active consumer: the tag of the consumer to claim for.
    consumers: dict[str, str] = field(default_factory=dict)
    again_s: float | None = None

    def note(self, room: Room) -> int:
        """Note when to look again, if ``room`` is not worth a claim yet. Returns how many places it has."""
        if room.again_s is not None:
            self.again_s = room.again_s if self.again_s is None else min(room.again_s, self.again_s)
        return room.places


class Dispatch:
    """The consumers of one connection. Thread-safe; its methods raise what ``unless_mine`` raises."""

    def __init__(
        self, window: int, group_s: float, patience_s: float, clock: Callable[[], float] = monotonic, turn: int = 0
    ) -> None:
        """``turn``: selects the queue that is first in the first turn; other consumers should pass another number."""
        self.window = window
        self._group_s = group_s
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.RLock()
        self._by_queue: dict[str, deque[Subscription]] = {}
        self._credits: deque[Credit] = deque()
        self._offset = turn
        #: By queue, the last turn in which it was the first.
        self._firsts: dict[str, int] = {}
        self._turns = 0
        #: Channels for which nothing is claimed; emptied when the program drains.
        self.stalled: set[Credit] = set()
        #: Claimed, and not handed on yet.
        self.arriving: list[Delivery] = []
        #: Whether a turn is placing them, or was interrupted while it did.
        self._placing = False
        self._leaving: set[Lease] = set()
        #: Sessions that were lost: other sessions have what they had claimed.
        self._lost: set[SessionId] = set()

    # -- consumers -------------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        with unless_mine(self._lock):
            self._by_queue.setdefault(subscription.queue, deque()).append(subscription)
            if subscription.credit not in self._credits:
                self._credits.append(subscription.credit)

    def remove(self, subscription: Subscription) -> None:
        """Remove a consumer. What was waiting for it, or is arriving for it alone, is leaving from now on."""
        with unless_mine(self._lock):
            subscriptions = self._by_queue.get(subscription.queue, deque())
            if subscription in subscriptions:
                subscriptions.remove(subscription)
            if not subscriptions and self._by_queue.pop(subscription.queue, None) is not None:
                self._firsts.pop(subscription.queue, None)
            subscription.credit.inbox.withdraw(lambda each, _: each is subscription, self._leaving)
            for each in list(self.arriving) if subscription.single else ():
                if each.queue == subscription.queue:
                    self._leaving.add(each.lease)
                    with suppress(ValueError):  # its claim was given up
                        self.arriving.remove(each)

    def drop_session(self, session_id: SessionId) -> None:
        """Forget what a lost session had claimed and no consumer has seen yet: other sessions have it now."""
        with unless_mine(self._lock):
            self._lost.add(session_id)
            for credit in self._credits:
                credit.inbox.withdraw(lambda _, delivery: delivery.lease.session == session_id)

    def close(self) -> None:
        """Remove all consumers. What waits is leaving, and so is what arrives from now on."""
        with unless_mine(self._lock):
            self._by_queue.clear()
            for credit in self._credits:
                credit.inbox.withdraw(_everything, self._leaving)

    def forget(self, credit: Credit) -> None:
        """Forget a closed channel. What still waits is leaving: its consumers may not be cancelled yet."""
        with unless_mine(self._lock):
            credit.inbox.withdraw(_everything, self._leaving)
            if credit in self._credits:
                self._credits.remove(credit)
            self.stalled.discard(credit)

    def to_release(self) -> list[Lease]:
        """The leases of what is leaving; :meth:`released` must follow."""
        if not self._leaving:
            return []
        with unless_mine(self._lock):
            self._drop_leaving()
            return list(self._leaving)

    def _drop_leaving(self) -> None:
        """Remove what is leaving from the inboxes: the thread that withdrew it may have been interrupted."""
        for credit in self._credits if self._leaving else ():
            credit.inbox.withdraw(lambda _, delivery: delivery.lease in self._leaving)

    def released(self, leases: Iterable[Lease]) -> None:
        """Forget leases that are released, or that another thread will release."""
        self._leaving.difference_update(leases)

    @property
    def subscriptions(self) -> list[Subscription]:
        with unless_mine(self._lock):
            return [each for subscriptions in self._by_queue.values() for each in subscriptions]

    @property
    def queues(self) -> set[str]:
        return set(self._by_queue)  # one call into C, so it needs no lock

    @property
    def shared(self) -> set[str]:
        """Queues from which any number of consumers may claim, in any number of processes."""
        with unless_mine(self._lock):
            return {
                queue
                for queue, subscriptions in self._by_queue.items()
                if not any(each.single or each.transient for each in subscriptions)
            }

    def competing(self, queues: Collection[str]) -> set[str]:
        """The other queues whose consumers share a channel's bounded room with a consumer of ``queues``."""
        with unless_mine(self._lock):
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
        with unless_mine(self._lock):
            return {queue: each[0].tag for queue, each in self._by_queue.items() if each[0].single}

    def serves(self, consumers: Mapping[str, str]) -> bool:
        """Whether these consumers, given by queue, are still served."""
        return not consumers or consumers.items() <= self.consumers.items()

    @property
    def unburdened(self) -> set[str]:
        """The consumers whose channels have nothing to settle and nothing to hand out."""
        with unless_mine(self._lock):
            subscriptions = [each for subscriptions in self._by_queue.values() for each in subscriptions]
            return {each.tag for each in subscriptions if not each.credit.inbox and not each.credit.held}

    # -- patience ---------------------------------------------------------------------------------------------------

    def withdraw_untaken(self, now: float) -> int:
        """Withdraw what was not taken for ``patience_s``: it is leaving. Returns the number of messages."""
        dropped = 0
        with unless_mine(self._lock):
            for credit in self._credits:
                since = credit.inbox.untaken_since() if credit.inbox.items else None
                if since is not None and since + self._patience_s <= now:
                    self.stalled.add(credit)
                    dropped += len(credit.inbox.withdraw(lambda _, delivery: delivery.leased, self._leaving))
        return dropped

    def next_withdrawal_s(self, now: float) -> float | None:
        """In how many seconds a message must be withdrawn, unless the program drains; None if none waits."""
        with unless_mine(self._lock):
            moments = [since for credit in self._credits if (since := credit.inbox.untaken_since()) is not None]
        return min(moments) + self._patience_s - now if moments else None

    # -- times to run ----------------------------------------------------------------------------------------------

    def withdraw(self, lease: Lease) -> bool:
        """Withdraw a message that was not taken yet. False if it was handed out."""
        with unless_mine(self._lock):
            for credit in self._credits:
                if credit.inbox.withdraw(lambda _, delivery: delivery.lease == lease):
                    self.stalled.add(credit)
                    return True
        return False

    def overdue(self, lease: Lease) -> None:
        """Note that a message that was handed out has been released without its consumer."""
        with unless_mine(self._lock):
            for credit in self._credits:
                credit.held.expire(lease)

    # -- what to claim -------------------------------------------------------------------------------------------------

    def plan(self, hungry: set[str], now: float) -> Plan:
        """What to claim from those queues that may have messages, first the queue that was first longest ago."""
        plan = Plan()
        limit = self.window
        with unless_mine(self._lock):
            for queue, subscriptions in self._by_queue.items():
                if queue in hungry and (room := self._room(subscriptions, plan, now)):
                    plan.queues.append(queue)
                    limit = min(limit, room)
                    if subscriptions[0].single:
                        plan.consumers[queue] = subscriptions[0].tag
                    if subscriptions[0].leaseless and all(each.leaseless for each in subscriptions):
                        plan.leaseless.add(queue)
        plan.limit = limit if plan.queues else 0
        if len(plan.queues) > 1:
            start = self._offset % len(plan.queues)
            plan.queues = sorted(plan.queues[start:] + plan.queues[:start], key=lambda each: self._firsts.get(each, 0))
        return plan

    def end_turn(self, first: str) -> None:
        """Note that a plan was carried out with this queue first: others go first next, so a full one shuts none out.

        Counting turns would not do: plans have different queues, as different channels have room at different times.
        """
        with unless_mine(self._lock):
            self._turns += 1
            if first in self._by_queue:
                self._firsts[first] = self._turns

    def _room(self, subscriptions: Sequence[Subscription], plan: Plan, now: float) -> int:
        rooms: dict[Credit, int] = {}
        for each in _served(subscriptions):
            credit = each.credit
            if credit in self.stalled:
                continue
            if each.no_ack or not credit.is_bounded:
                rooms[credit] = credit.unbounded_room(self.window)
            else:
                rooms.setdefault(credit, plan.note(credit.bounded_room(now, self._group_s)))
        return sum(rooms.values())

    # -- messages ----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Assign arriving messages to consumers. Those for which no consumer has room any more are leaving.

        Since the claim, a consumer may have been cancelled, or its prefetch lowered.
        """
        arriving, now = self.arriving, self._clock()
        with unless_mine(self._lock):
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
        for _ in range(1 if subscriptions[0].single else len(subscriptions)):
            chosen = subscriptions[0]
            if not chosen.single:
                subscriptions.rotate(-1)
            if chosen.no_ack or chosen.credit.has_room:
                return chosen
        return None

    def next(self, hand: list[Arrival]) -> Arrival | None:
        """Put the next waiting message into ``hand``, from the channels in turn; None if none may be handed out."""
        now = self._clock()
        with unless_mine(self._lock):
            if self._leaving:
                self._drop_leaving()
            for _ in range(len(self._credits)):
                credit = self._credits[0]
                self._credits.rotate(-1)
                if credit.inbox.items and (credit.can_consume() or credit.may_pass()):
                    # In this order: interrupted anywhere, the message can be put back.
                    subscription, delivery = credit.inbox.items[0]
                    arrival = Arrival(subscription, delivery, next_tag())
                    hand.append(arrival)
                    credit.hand_out(arrival.tag, None if subscription.no_ack else delivery.lease, now)
                    return arrival
        return None

    def return_undelivered(self, arrival: Arrival) -> Lease | None:
        """Make a message that no callback has seen its channel's next. Returns its lease if its consumer has ended."""
        subscription, delivery, tag = arrival
        with unless_mine(self._lock):
            subscription.credit.reclaim(tag)
            if delivery.leased and delivery.lease.session in self._lost:
                return None  # another consumer has it
            if subscription.credit.held.has(delivery.lease):
                return None  # another thread was faster
            if subscription in self._by_queue.get(subscription.queue, ()):
                subscription.credit.inbox.return_undelivered(subscription, delivery)
                return None
        return delivery.lease if delivery.leased else None

    def waiting(self, credit: Credit, queue: str) -> int:
        """How many messages of a queue a channel has that its program has not seen, and that could go back."""
        with unless_mine(self._lock):
            return len(_of_queue(credit, queue))

    def take_waiting(self, credit: Credit, queue: str, hand: list[Delivery], most: int) -> None:
        """Move up to ``most`` of them into ``hand``, in their order. If this is interrupted, they are leaving."""
        with unless_mine(self._lock):
            self._drop_leaving()
            taken = _of_queue(credit, queue)[:most]
            leases = [each.lease for each in taken]
            self._leaving.update(leases)
            self._drop_leaving()
            hand += taken
            self._leaving.difference_update(leases)


def _of_queue(credit: Credit, queue: str) -> list[Delivery]:
    return [delivery for _, delivery in credit.inbox if delivery.queue == queue and delivery.leased]


def _served(subscriptions: Sequence[Subscription]) -> Sequence[Subscription]:
    """Of the consumers of one queue, those that may get messages."""
    return [subscriptions[0]] if subscriptions[0].single else subscriptions


def _everything(*_: object) -> bool:
    return True
