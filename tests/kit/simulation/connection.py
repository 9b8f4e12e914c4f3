"""A connection of a simulated process: the real fetcher, dispatch, credit, QoS and client, without their threads.

What their threads do are steps of the plan (``acts/consuming.py``). The receiver's thread sleeps as the fetcher tells
it to: it turns when its bell has rung or its time has come, and at no other time, or no lost wake-up would be found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from weakref import ref

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import Delivery
from kombu_fdb.primitives.interruption import Ticket
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.settings.location import MemoryLocation
from kombu_fdb.settings.options import Options
from kombu_fdb.transport.connection import BrokerConnection
from kombu_fdb.transport.consuming import fetcher
from kombu_fdb.transport.consuming.dispatch import Credit, Subscription
from kombu_fdb.transport.consuming.watch_set import WatchSet
from kombu_fdb.transport.unacked import QoS

# What goes wrong is in the plan, and is no news.
for module in (Client.__module__, fetcher.__name__, QoS.__module__):
    logging.getLogger(module).addHandler(logging.NullHandler())


class Flag(Bell):
    """A bell whose sleeper is a step of the plan."""

    def __init__(self) -> None:
        """Without sockets."""
        self._rung = False

    @property
    def rung(self) -> bool:
        return self._rung

    def ring(self) -> None:
        self._rung = True

    def clear(self) -> None:
        self._rung = False


class SimulatedClient(Client):
    """The real one; its session is opened by the world, and its deferred calls are a step."""

    def __init__(self, engine: Any, options: Options, join: Callable[[], ClientSession]) -> None:
        super().__init__(MemoryLocation("simulated"), options, engine)
        self._users.add(self)
        self._open_session = join
        self._is_joining = False

    def session(self) -> ClientSession:
        member = self._standing()
        if member is not None:
            return member
        if self._is_joining:  # the thread that waited for the other one has waited long enough
            raise StoreUnavailable("another thread opens the session")
        self._is_joining = True
        try:
            self._session = self._open_session()
        finally:
            self._is_joining = False
        return self._session

    def nudge(self) -> None:
        """Deferred calls have steps of their own."""

    def keep_house(self) -> None:
        self._run_deferred()

    def reconnect(self) -> None:
        """A connection found that the store answers."""
        self._suspect = False


class Letter:
    """A message in an application's hands."""

    def __init__(self, delivery: Delivery, tag: int) -> None:
        self.headers: dict[str, Any] = {}
        self.delivery = delivery
        self.delivery_tag = tag


class SimulatedTransport(BrokerConnection):
    """One connection with one channel, and the application that consumes from it."""

    def __init__(
        self,
        client: SimulatedClient,
        clock: Callable[[], float],
        rng: Random,
        prefetch: int,
        now_ms: Callable[[], int],
        single_active: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Without kombu's connection, as its client is open."""
        self._client = client
        self.watch_set = WatchSet(Flag())
        self.arrived = Flag()
        self.fetcher = fetcher.Fetcher(client, self.watch_set, self.arrived, clock, rng)
        self.credit: Credit = Credit()
        self.credit.prefetch = prefetch
        self.qos = QoS(self, self.credit)
        self.subscriptions: list[Subscription] = []
        #: When the receiver's thread looks by itself; None: when its bell rings.
        self.due: float | None = 0.0
        #: What the callbacks were given and have not settled, by tag.
        self.given: dict[int, Delivery] = {}
        #: Looks at each message that is given.
        self.on_given: Callable[[Delivery], None] = lambda _: None
        self.now_ms = now_ms
        #: Whether a queue serves one consumer at a time.
        self.single_active = single_active
        self.clock = clock

    @property
    def store(self) -> SimulatedClient:
        return self._client

    # -- the receiver's thread -----------------------------------------------------------------------------------------

    def on_ack(self, pending: int, enough: int, *, was_blocked: bool) -> bool:
        self.fetcher.on_ack(pending, enough)
        if was_blocked:
            self.arrived.ring()
        return True

    def on_room(self) -> None:
        self.fetcher.on_room()

    @property
    def bell(self) -> Flag:
        bell = self.watch_set.bell
        assert isinstance(bell, Flag)
        return bell

    @property
    def is_awake(self) -> bool:
        due = self.due is not None and self.due <= self.clock()
        return self.fetcher.error is None and (self.bell.rung or due)

    def turn(self) -> None:
        try:
            pause_s = self.fetcher.turn()
        except Exception as error:
            self.fetcher.fail(error)
            raise
        self.due = None if pause_s is None else self.clock() + pause_s

    # -- the application -----------------------------------------------------------------------------------------------

    def consume(self, queue: str, tag: str, *, no_ack: bool = False, transient: bool = False) -> None:
        subscription = Subscription(
            tag,
            queue,
            self.credit,
            self.qos.ack_lease,
            self._open,
            no_ack,
            self._on_message,
            self._consume_anew,
            transient,
        )
        try:
            self.fetcher.subscribe(subscription, single=self.single_active(queue))
        except BaseException:
            self.fetcher.cancel(subscription, leave=True)
            raise
        self.subscriptions.append(subscription)
        self.bell.ring()

    def _consume_anew(self, ended: Subscription) -> None:
        """Its queue was deleted."""
        if ended in self.subscriptions:
            self.subscriptions.remove(ended)
            self.consume(ended.queue, ended.consumer_tag, no_ack=ended.no_ack, transient=ended.transient)

    def cancel(self, subscription: Subscription) -> None:
        self.subscriptions.remove(subscription)
        self.fetcher.cancel(subscription, leave=True)
        self.bell.ring()

    def _open(self, delivery: Delivery, tag: int, _consumer_tag: str) -> Letter:
        letter = Letter(delivery, tag)
        self.credit.held.messages[tag] = ref(letter)
        return letter

    def _on_message(self, letter: Letter) -> None:
        self.given[letter.delivery_tag] = letter.delivery
        self.on_given(letter.delivery)

    @contextmanager
    def draining(self) -> Iterator[None]:
        drain = Ticket()
        self.fetcher.attend(drain)
        try:
            yield
        finally:
            self.fetcher.end_drain(drain)

    def reconnect(self) -> None:
        """As kombu does after an error: the same consumers go on."""
        self.store.reconnect()
        if self.fetcher.error is not None:
            self.fetcher.recover()
            self.due = 0.0

    def end(self) -> None:
        """Its process is no more."""
        self.watch_set.disarm()

    @property
    def has_room(self) -> bool:
        return self.credit.has_room and not self.fetcher.dispatch.stalled
