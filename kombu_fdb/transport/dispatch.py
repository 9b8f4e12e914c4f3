"""Who gets the next message, and how many more may be claimed. No thread, no store: only the bookkeeping.

Model. A claimed message is *waiting* in its channel's inbox, assigned to one consumer, until a worker loop takes it;
then it is *held* in the channel's QoS until it is settled. Room of a channel = prefetch - held - waiting, so what is
claimed ahead counts and the prefetch is never exceeded. Without a prefetch limit the inbox is bounded by the window.

Round trips are grouped: a channel with a prefetch limit claims when half of its room is free, or all of it, or when a
free place has waited as long as an ack waits for company; one without claims when its inbox is half empty.

A consumer without acks has room as if without prefetch (AMQP: the limit does not apply to it).

Of a queue with one active consumer only the first one here is served, until it ends; the store decides whether it is
the active one of all (``engine/scheduling/single.py``).

A channel whose waiting messages had to be withdrawn, because nobody has taken any for ``patience_s`` seconds or their
time to run had passed, is *stalled*: nothing is claimed for it until somebody drains again.

A message is on its way from the inbox to its callback in the *hand* of whoever drains. It is there before it leaves the
inbox, and until the callback is called; an exception in between, from a signal handler or a greenlet's killer, puts it
back to the front.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu_fdb.model import Delivery, Lease

if TYPE_CHECKING:
    from kombu_fdb.transport.channel import Channel

__all__ = ["Arrival", "Dispatch", "Plan", "Subscription", "next_tag"]

_tags = count(1)


def next_tag() -> int:
    """A delivery tag: rising, unique in the process."""
    return next(_tags)


@dataclass(eq=False, slots=True)
class Subscription:
    """One consumer of one queue."""

    tag: str
    queue: str
    channel: Channel
    no_ack: bool
    callback: Callable[[Any], Any]
    #: The queue vanishes with its consumers.
    transient: bool
    #: The queue serves one consumer at a time.
    single: bool = False
    #: The session in whose name the store knows of this consumer.
    session_id: bytes | None = None

    @property
    def leaseless(self) -> bool:
        """Whether claiming takes messages out of the store: without acks, from a queue that vanishes anyway.

        Others are claimed under a lease even without acks, and settled when they are handed out: what was claimed ahead
        is not lost with the consumer.
        """
        return self.no_ack and self.transient


class Arrival(NamedTuple):
    """A message for a worker loop."""

    subscription: Subscription
    delivery: Delivery
    tag: int


@dataclass(slots=True)
class Plan:
    """What to claim now; if nothing, when to look again (seconds; None: when something changes)."""

    queues: list[str] = field(default_factory=list)
    limit: int = 0
    leaseless: set[str] = field(default_factory=set)
    #: By queue with one active consumer, for whom.
    consumers: dict[str, str] = field(default_factory=dict)
    again_s: float | None = None


class Dispatch:
    """The consumers of one connection. Thread-safe."""

    def __init__(self, window: int, group_s: float, patience_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._window = window
        self._group_s = group_s
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._by_queue: dict[str, deque[Subscription]] = {}
        self._channels: deque[Channel] = deque()
        self._turn = 0
        self._stalled: set[Channel] = set()

    # -- consumers -------------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            self._by_queue.setdefault(subscription.queue, deque()).append(subscription)
            if subscription.channel not in self._channels:
                self._channels.append(subscription.channel)

    def remove(self, subscription: Subscription) -> list[Lease]:
        """Returns the leases of what was waiting for it."""
        with self._lock:
            subscriptions = self._by_queue.get(subscription.queue)
            if subscriptions is None or subscription not in subscriptions:
                return []
            subscriptions.remove(subscription)
            if not subscriptions:
                del self._by_queue[subscription.queue]
            return subscription.channel.inbox.withdraw(lambda each, _: each is subscription)

    def drop_session(self, session_id: bytes) -> None:
        """A session was lost: what it claimed and nobody has seen yet belongs to others now."""
        with self._lock:
            for channel in self._channels:
                channel.inbox.withdraw(lambda _, delivery: delivery.lease.session == session_id)

    def close(self) -> list[Lease]:
        """No consumers any more: what arrives from now on has no home. Returns the leases of all that waits."""
        with self._lock:
            self._by_queue.clear()
            return [lease for channel in self._channels for lease in channel.inbox.withdraw(_everything)]

    def forget(self, channel: Channel) -> list[Lease]:
        """The channel is closed. Returns the leases of what still waits, as its consumers are not cancelled yet."""
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)
            self._stalled.discard(channel)
            return channel.inbox.withdraw(_everything)

    @property
    def subscriptions(self) -> list[Subscription]:
        with self._lock:
            return [each for subscriptions in self._by_queue.values() for each in subscriptions]

    @property
    def queues(self) -> set[str]:
        with self._lock:
            return set(self._by_queue)

    @property
    def consumers(self) -> dict[str, str]:
        """By queue with one active consumer, the tag of the one that is served here."""
        with self._lock:
            return {queue: each[0].tag for queue, each in self._by_queue.items() if each[0].single}

    @property
    def unburdened(self) -> set[str]:
        """The consumers whose channels have nothing to settle and nothing to hand out."""
        with self._lock:
            subscriptions = [each for subscriptions in self._by_queue.values() for each in subscriptions]
            return {each.tag for each in subscriptions if not each.channel.inbox and not len(each.channel.qos)}

    # -- patience ---------------------------------------------------------------------------------------------------

    def left_lying(self, now: float) -> list[Lease]:
        """Withdraw what nobody has taken for too long, and return its leases."""
        leases = []
        with self._lock:
            for channel in self._channels:
                since = channel.inbox.lies_since()
                if since is not None and since + self._patience_s <= now:
                    leases += channel.inbox.withdraw(lambda each, _: not each.leaseless)
                    self._stalled.add(channel)
        return leases

    def lies_for(self, now: float) -> float | None:
        """In how many seconds something is to be withdrawn, unless somebody drains; None if nothing waits."""
        with self._lock:
            moments = [since for channel in self._channels if (since := channel.inbox.lies_since()) is not None]
        return min(moments) + self._patience_s - now if moments else None

    # -- times to run ----------------------------------------------------------------------------------------------

    def withdraw(self, lease: Lease) -> bool:
        """Take a message back that nobody has taken yet. False if it was handed out."""
        with self._lock:
            for channel in self._channels:
                if channel.inbox.withdraw(lambda _, delivery: delivery.lease == lease):
                    self._stalled.add(channel)
                    return True
        return False

    def overdue(self, lease: Lease) -> None:
        """A message that was handed out has gone back without its consumer."""
        with self._lock:
            for channel in self._channels:
                channel.qos.overdue(lease)

    def resume(self) -> bool:
        """Somebody drains. Whether that ends a stall."""
        stalled = bool(self._stalled)
        self._stalled.clear()
        return stalled

    # -- credit ----------------------------------------------------------------------------------------------------

    def plan(self, hungry: set[str], now: float) -> Plan:
        """What to claim of those queues that may have messages."""
        plan = Plan()
        limit = self._window
        with self._lock:
            for queue, subscriptions in self._by_queue.items():
                if queue in hungry and (room := self._room(subscriptions, plan, now)):
                    plan.queues.append(queue)
                    limit = min(limit, room)
                    if subscriptions[0].single:
                        plan.consumers[queue] = subscriptions[0].tag
                    if all(each.leaseless for each in subscriptions):
                        plan.leaseless.add(queue)
        if plan.queues:
            plan.limit = limit
            self._rotate(plan.queues)
        return plan

    def _rotate(self, queues: list[str]) -> None:
        """Each queue is the first in turn, so that a full one does not shut out the others."""
        self._turn += 1
        start = self._turn % len(queues)
        queues[:] = queues[start:] + queues[:start]

    def _room(self, subscriptions: Sequence[Subscription], plan: Plan, now: float) -> int:
        rooms: dict[Channel, int] = {}
        for each in _served(subscriptions):
            if each.channel in self._stalled:
                continue
            bounded = each.channel.qos.prefetch_count or each.channel.most_handed is not None
            if each.no_ack or not bounded:
                waiting = len(each.channel.inbox)
                rooms[each.channel] = self._window - waiting if waiting <= self._window // 2 else 0
            elif each.channel.qos.can_consume():
                rooms.setdefault(each.channel, self._bounded_room(each.channel, plan, now))
        return sum(rooms.values())

    def _bounded_room(self, channel: Channel, plan: Plan, now: float) -> int:
        prefetch = channel.qos.prefetch_count
        free = prefetch - len(channel.qos) - len(channel.inbox)
        if channel.most_handed is not None:
            # A free slot is not kept waiting for a second one.
            slots = channel.most_handed - channel.handed - len(channel.inbox)
            return max(int(min(free, slots)), 0) if prefetch else max(slots, 0)
        if free <= 0:
            channel.free_since = None
            return 0
        if free >= max(1, prefetch // 2):
            return int(free)
        if channel.free_since is None:
            channel.free_since = now
        left = channel.free_since + self._group_s - now
        if left <= 0:
            return int(free)
        plan.again_s = left if plan.again_s is None else min(plan.again_s, left)
        return 0

    # -- messages ----------------------------------------------------------------------------------------------------

    def place(self, deliveries: Iterable[Delivery]) -> list[Lease]:
        """Assign claimed messages to consumers. Returns the leases of those whose consumers are gone."""
        homeless = []
        now = self._clock()
        with self._lock:
            for delivery in deliveries:
                subscription = self._choose(delivery.queue)
                if subscription is None:
                    homeless.append(delivery.lease)
                else:
                    subscription.channel.inbox.put(subscription, delivery, now)
                    subscription.channel.free_since = None
        return homeless

    def _choose(self, queue: str) -> Subscription | None:
        """The next consumer with room, in turn; if none has, the next."""
        subscriptions = self._by_queue.get(queue)
        if subscriptions is None:
            return None
        if subscriptions[0].single:
            return subscriptions[0]
        for _ in range(len(subscriptions)):
            chosen = subscriptions[0]
            subscriptions.rotate(-1)
            if len(subscriptions) == 1 or self._has_room(chosen):
                return chosen
        return subscriptions[0]

    @staticmethod
    def _has_room(subscription: Subscription) -> bool:
        qos = subscription.channel.qos
        return (
            subscription.no_ack
            or not qos.prefetch_count
            or qos.prefetch_count > len(qos) + len(subscription.channel.inbox)
        )

    def next(self, hand: list[Arrival]) -> Arrival | None:
        """Put the next waiting message into ``hand``, from the channels in turn; None if there is none that may be."""
        now = self._clock()
        with self._lock:
            for _ in range(len(self._channels)):
                channel = self._channels[0]
                self._channels.rotate(-1)
                if channel.inbox and (channel.inbox.head[0].no_ack or channel.qos.can_consume()):
                    return self._hand_out(channel, hand, now)
        return None

    @staticmethod
    def _hand_out(channel: Channel, hand: list[Arrival], now: float) -> Arrival:
        """In this order: interrupted anywhere, the message can be put back."""
        subscription, delivery = channel.inbox.head
        arrival = Arrival(subscription, delivery, next_tag())
        hand.append(arrival)
        channel.inbox.take(now)
        if not subscription.no_ack:
            channel.qos.hold(arrival.tag, delivery.lease)
            channel.handed += 1
        return arrival

    def put_back(self, arrival: Arrival) -> Lease | None:
        """No callback has seen it: it is its channel's next one. Returns its lease if its consumer has ended."""
        subscription, delivery, tag = arrival
        with self._lock:
            if subscription.channel.qos.unhold(tag):
                subscription.channel.handed -= 1
            if subscription.channel.qos.has(delivery.lease):
                return None  # another thread was faster
            if subscription in self._by_queue.get(subscription.queue, ()):
                subscription.channel.inbox.put_back(subscription, delivery)
                return None
        return None if subscription.leaseless else delivery.lease

    def is_low(self, channel: Channel) -> bool:
        """Whether taking a message has just made room for a claim."""
        return not channel.qos.prefetch_count and len(channel.inbox) == self._window // 2


def _served(subscriptions: Sequence[Subscription]) -> Iterable[Subscription]:
    """Of the consumers of one queue, those that may get messages."""
    return [subscriptions[0]] if subscriptions[0].single else subscriptions


def _everything(*_: object) -> bool:
    return True
