"""Who gets the next message, and from which queues more may be claimed. No thread, no store: only the bookkeeping.

Model. A claimed message is *waiting* in its channel's inbox, assigned to one consumer, until a worker loop takes it;
then it is *held* until it is settled. How many of both a channel may have is its credit's business
(``unacked.py``).

Of a queue with one active consumer only the first one here is served, until it ends; the store decides whether it is
the active one of all (``engine/scheduling/single.py``).

A channel whose waiting messages had to be withdrawn, because none was taken for ``patience_s`` seconds or their
time to run had passed, is *stalled*: nothing is claimed for it until its program drains again.

A message that was claimed is *arriving* until it waits in an inbox, and one that was withdrawn is *leaving* until
its lease was released. An exception in between, as signal handlers and greenlets' killers raise it anywhere,
leaves it there, and the next turn goes on with it (:meth:`Dispatch.place`, :meth:`Dispatch.to_release`).

A message is on its way from the inbox to its callback in the *hand* of the thread that drains. It is there before it
leaves the inbox, and until the callback is called; an exception in between, from a signal handler or a greenlet's
killer, puts it back to the front.
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
    #: By queue with one active consumer, for whom.
    consumers: dict[str, str] = field(default_factory=dict)
    again_s: float | None = None

    def note(self, room: Room) -> int:
        """When to look again, if this one is not worth a claim yet. Returns how many places it has."""
        if room.again_s is not None:
            self.again_s = room.again_s if self.again_s is None else min(room.again_s, self.again_s)
        return room.places


class Dispatch:
    """The consumers of one connection. Thread-safe; raises as ``unless_mine``."""

    def __init__(
        self, window: int, group_s: float, patience_s: float, clock: Callable[[], float] = monotonic, turn: int = 0
    ) -> None:
        """``turn``: which of several queues has the first turn; other consumers have another one."""
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
        #: Channels that nothing is claimed for; whose program drains clears it.
        self.stalled: set[Credit] = set()
        #: Claimed, and not handed on yet.
        self.arriving: list[Delivery] = []
        #: Whether a turn that placed them got no further.
        self._places = False
        self._leaving: set[Lease] = set()
        #: Sessions that were lost: others have what was claimed in their names.
        self._lost: set[SessionId] = set()

    # -- consumers -------------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        with unless_mine(self._lock):
            self._by_queue.setdefault(subscription.queue, deque()).append(subscription)
            if subscription.credit not in self._credits:
                self._credits.append(subscription.credit)

    def remove(self, subscription: Subscription) -> None:
        """What was waiting for it, or arrives for it alone, is leaving."""
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
        """A session was lost: what it claimed and no consumer has seen yet belongs to others now."""
        with unless_mine(self._lock):
            self._lost.add(session_id)
            for credit in self._credits:
                credit.inbox.withdraw(lambda _, delivery: delivery.lease.session == session_id)

    def close(self) -> None:
        """No consumers any more: all that waits is leaving, and what arrives from now on has no home."""
        with unless_mine(self._lock):
            self._by_queue.clear()
            for credit in self._credits:
                credit.inbox.withdraw(_everything, self._leaving)

    def forget(self, credit: Credit) -> None:
        """The channel is closed. What still waits is leaving, as its consumers are not cancelled yet."""
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
        """The thread that withdrew them may have got no further than that they are leaving."""
        for credit in self._credits if self._leaving else ():
            credit.inbox.withdraw(lambda _, delivery: delivery.lease in self._leaving)

    def released(self, leases: Iterable[Lease]) -> None:
        """Another thread has them now."""
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
        """The other queues whose consumers have their bounded room from the same channels as those of ``queues``."""
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
        """By queue with one active consumer, the tag of the one that is served here."""
        with unless_mine(self._lock):
            return {queue: each[0].tag for queue, each in self._by_queue.items() if each[0].single}

    def serves(self, consumers: Mapping[str, str]) -> bool:
        """Whether these, by queue, have not ended."""
        return not consumers or consumers.items() <= self.consumers.items()

    @property
    def unburdened(self) -> set[str]:
        """The consumers whose channels have nothing to settle and nothing to hand out."""
        with unless_mine(self._lock):
            subscriptions = [each for subscriptions in self._by_queue.values() for each in subscriptions]
            return {each.tag for each in subscriptions if not each.credit.inbox and not each.credit.held}

    # -- patience ---------------------------------------------------------------------------------------------------

    def drop_left_lying(self, now: float) -> int:
        """What was not taken for too long is leaving. How many messages that is."""
        dropped = 0
        with unless_mine(self._lock):
            for credit in self._credits:
                since = credit.inbox.lies_since() if credit.inbox.items else None
                if since is not None and since + self._patience_s <= now:
                    self.stalled.add(credit)
                    dropped += len(credit.inbox.withdraw(lambda _, delivery: delivery.leased, self._leaving))
        return dropped

    def lies_for(self, now: float) -> float | None:
        """In how many seconds something is to be withdrawn, unless the program drains; None if nothing waits."""
        with unless_mine(self._lock):
            moments = [since for credit in self._credits if (since := credit.inbox.lies_since()) is not None]
        return min(moments) + self._patience_s - now if moments else None

    # -- times to run ----------------------------------------------------------------------------------------------

    def withdraw(self, lease: Lease) -> bool:
        """Take a message back that was not taken yet. False if it was handed out."""
        with unless_mine(self._lock):
            for credit in self._credits:
                if credit.inbox.withdraw(lambda _, delivery: delivery.lease == lease):
                    self.stalled.add(credit)
                    return True
        return False

    def overdue(self, lease: Lease) -> None:
        """A message that was handed out has gone back without its consumer."""
        with unless_mine(self._lock):
            for credit in self._credits:
                credit.held.expire(lease)

    # -- what to claim -------------------------------------------------------------------------------------------------

    def plan(self, hungry: set[str], now: float) -> Plan:
        """What to claim of those queues that may have messages; first the one that was first longest ago."""
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
        """A plan was carried out, and this queue was its first: next comes another, so that a full one shuts none out.

        No count of turns would do: plans have different queues, as now this channel has room and now that one.
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
        """Assign what is arriving to consumers. That for which none has room any more is leaving.

        A consumer may have been cancelled since it was claimed, or its prefetch lowered.
        """
        arriving, now = self.arriving, self._clock()
        with unless_mine(self._lock):
            if self._places and arriving and self._has(arriving[0].lease):
                del arriving[0]
            self._places = True
            while arriving:
                delivery = arriving[0]
                subscription = self._choose(delivery.queue)
                if subscription is not None:
                    subscription.credit.receive(subscription, delivery, now)
                elif delivery.leased:
                    self._leaving.add(delivery.lease)
                del arriving[0]
            self._places = False

    def turn_away(self) -> None:
        """What is arriving is leaving."""
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
        """Put the next waiting message into ``hand``, from the channels in turn; None if there is none that may be."""
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
        """No callback has seen it: it is its channel's next one. Returns its lease if its consumer has ended."""
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
        """Put up to so many of them into ``hand``, the first one first. Interrupted in between, they are leaving."""
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
