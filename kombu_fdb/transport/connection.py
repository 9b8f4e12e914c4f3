"""A connection to a broker: the process's client, the channels, and the delivery to a drain or an event loop.

Model. Every kombu ``Connection`` has one of these: as with all of kombu's virtual transports, the transport is also the
connection on which channels are made. ``transport.py`` has what kombu reads before it connects. A connection is

* *new*: constructed, with nothing opened (Celery constructs some transports only to read their flags);
* *established*: attached to the process's ``Client``, with a ``Receiver`` from its first consumer on;
* *broken*: established, but the receiver has failed. Kombu sees ``verify_connection`` fail and establishes again, which
  checks the store and continues with the same consumers;
* *closed*, in one of two ways. ``close_connection``, after normal use, releases what is unsettled at once.
  ``_collect``, after an error, does not call the store: messages that consumers are still working on keep their leases
  (``unacked.py``);
* *collected* by Python without having been closed. Only the program and its event loop refer to a connection, so an
  abandoned one is collected. Another thread then releases its messages, uncounted (:func:`settle_orphaned`).

What ends with it. When a connection is closed or collected, or its process dies, its consumers end, its messages are
released, and its exclusive queues are deleted. To that end, an entry among each exclusive queue's consumers represents
the connection, under the process's session. The entry ends with the connection. If the process dies, its session is
swept, and the queue loses its last consumer like any other queue. Like RabbitMQ's, an exclusive queue that is also
auto-delete (kombu's are) is deleted earlier, with its last consumer.

In a forked child an inherited connection is *foreign*: its first use drops what belongs to the parent, without touching
it, and attaches to the child's own client.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from kombu.connection import Connection
from kombu.exceptions import OperationalError
from kombu.log import get_logger
from kombu.transport import virtual

from kombu_fdb.engine import topology
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import InvalidArgument, KombuFDBError, OptionError, QueueError, StoreUnavailable
from kombu_fdb.model import Lease, SessionId
from kombu_fdb.primitives.interruption import Ticket, surely
from kombu_fdb.process.client import Client, client_for
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.location import MEMORY_SCHEME, SCHEMES, UrlParts, locate, parse_url
from kombu_fdb.settings.options import Options, parse_options
from kombu_fdb.store.retry import ENDING_S
from kombu_fdb.transport.consuming.loop import Loop
from kombu_fdb.transport.consuming.receiver import Receiver, deliver_next
from kombu_fdb.transport.envelope import KeyOf, now_ms
from kombu_fdb.transport.fairkey import key_reader

# -- addresses ---------------------------------------------------------------------------------------------------------


def url_parts_of(connection: Connection) -> UrlParts:
    """The parts of the connection's URL. Raises ``OptionError``.

    Kombu passes ``fdb+sqlite:///path`` in two forms: at first as transport "fdb" and hostname "sqlite:///path"; after a
    failover parsed, as transport "fdb+sqlite" without a host. Each clone of a connection that has failed over, to this
    URL or later to another, gets another "fdb+" before its hostname: "fdb+None", "fdb+fdb+10.0.0.1".
    """
    hostname = connection.hostname or "None"
    if "://" in hostname:
        return parse_url(f"{connection.uri_prefix or SCHEMES[0]}+{hostname}")
    scheme = connection.transport_cls if connection.transport_cls in {*SCHEMES, MEMORY_SCHEME} else SCHEMES[0]
    last = hostname.rpartition("+")[2]
    host, port = (None, None) if last == "None" else (last, connection.port)  # kombu keeps the previous URL's port
    return UrlParts(scheme, host, port, connection.userid, connection.password, connection.virtual_host)


# -- exclusive queues --------------------------------------------------------------------------------------------------


#: A session has many connections; all their tags differ.
_numbers = count(1)


class ExclusiveQueues:
    """The exclusive queues of one connection."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[SessionId, str, str]] = {}
        #: Whether the connection has ended: a declaration that is still under way must be undone.
        self._given_up = False

    def give_up(self) -> list[tuple[SessionId, str, str]]:
        """Note that all queues end. Returns the connection's entries: session, queue, tag."""
        self._given_up = True  # first: a declaration that begins later sees it
        return list(self._owners.values())

    def declare(self, client: Client, declaration: QueueDeclaration) -> None:
        """Declare a queue for this connection alone. Raises what the engine's ``declare`` raises."""
        client.in_session(partial(self._declare, client, declaration))

    def _declare(self, client: Client, declaration: QueueDeclaration, session: ClientSession) -> None:
        queue, session_id = declaration.name, session.session_id
        owner = self._owners.get(queue)
        if owner is None or owner[0] != session_id:
            owner = self._owners[queue] = session_id, queue, f"{topology.OWNER}{next(_numbers)}"
        try:
            client.engine.queues.declare(declaration, owner=(session_id, owner[2]))
        except (QueueError, InvalidArgument):  # after other errors the queue may have been declared
            self._owners.pop(queue, None)
            raise
        finally:
            if self._given_up:  # another thread may have removed the entry before it was added
                client.later(partial(client.remove_consumer, *owner))

    def leave(self, client: Client) -> None:
        """End the connection's queues. Raises a ``StoreError``."""
        for owner in list(self._owners.values()):
            client.engine.queues.remove_consumer(*owner)
            self._owners.pop(owner[1], None)  # only these: another thread may be declaring a queue


# -- the connection ----------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: Longer than a task's publish tries to connect by default (Celery's ``task_publish_retry_policy``), in seconds.
REPEATED_S = 2.0
#: How long a drain with a timeout of 0 still waits for the receiver's first look, in seconds.
FIRST_LOOK_S = 1.0


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step of a clean-up, even if one fails; then raise the first error."""
    first: KombuFDBError | None = None
    for step in list(steps):
        try:
            step()
        except KombuFDBError as error:
            first = first or error
    try:
        if first is not None:
            raise first
    finally:
        del first  # its frames refer to this local


class BrokerConnection(virtual.Transport):
    """A connection, as channels, producers and consumers see it."""

    now_ms = staticmethod(now_ms)
    # Class-level defaults, as the finalizer also runs after a failed constructor.
    _store: Client | None = None
    _receiver: Receiver | None = None
    #: Since when every attempt to open the store has failed (``monotonic``); 0 if the last one succeeded.
    _refused_since = 0.0

    def __init__(self, client: Connection, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._options: Options | None = None
        self._loop: Any = None
        self._exclusive_queues = ExclusiveQueues()
        #: For each exchange declared on this connection, the threads that have since found it missing.
        self.missed: dict[str, set[int]] = {}
        #: How a message's fairness key is found.
        self.key_of: KeyOf = key_reader(None)

    @property
    def _kombu(self) -> Connection:
        connection: Connection | None = self.client
        assert connection is not None, "kombu removes it once it has closed the transport"
        return connection

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """For Celery's banner and logs. Kombu would add a host and a password that the URL does not have."""
        try:
            if self.client is not None:
                return url_parts_of(self.client).url(None if include_password else mask)
        except OptionError:
            pass
        raise NotImplementedError  # then kombu formats the URL as given

    # -- establish and close -----------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The connection's options, parsed at the first use. Raises ``OptionError``."""
        if self._options is None:
            client = self._kombu
            self._options = parse_options(client.transport_options, connect_timeout=client.connect_timeout or None)
        return self._options

    def establish_connection(self) -> BrokerConnection:
        """Raises a connection error within ``connect_timeout`` if the store does not answer, or ``OptionError``."""
        if self._store is not None and self._store.pid != os.getpid():
            self._disown()
        self.key_of = key_reader(self.options.fair_key)  # before anything is published: the option may be wrong
        store = client_for(locate(url_parts_of(self._kombu), self.options), self.options)
        store.patience.stopping = is_stopping
        self._attach(store)
        self._store = store
        if self._receiver is not None:
            self._receiver.restart()
        return self

    def _attach(self, store: Client) -> None:
        timeout_s, failing_s = store.patience.allow(self.options.connect_timeout), store.patience.failing_s
        if failing_s > ENDING_S:  # each time, the store may open and then refuse every write
            end_repetition(StoreUnavailable("the store refuses what is written"), failing_s)
        # A worker would repeat that endlessly, as kombu and Celery pause only between failed attempts to connect. Not
        # so a task: the retries of its publishes end by themselves.
        repeats = "celery.worker.consumer" in sys.modules and not self._refused_since and not in_task()
        pause_s = min(store.patience.pause_s, timeout_s / 2) if repeats else 0.0
        store.patience.clock.sleep(pause_s)
        began = monotonic()
        try:
            store.attach(self, timeout_s=timeout_s - pause_s)
        except StoreUnavailable as error:
            store.patience.wasted(monotonic() - began)
            self._refused_since = self._refused_since or began
            refused_s = monotonic() - self._refused_since
            if store.patience.is_over or refused_s > ENDING_S:  # a missing file is refused at once
                end_repetition(error, refused_s)
            raise
        self._refused_since = 0.0

    def verify_connection(self, connection: BrokerConnection) -> bool:
        """Whether the connection is usable. Kombu asks at each access to it, so this must not call the store."""
        store = self._store
        receiver = self._receiver
        return store is not None and store.pid == os.getpid() and (receiver is None or receiver.fetcher.error is None)

    @property
    def store(self) -> Client:
        """The process's client. Raises ``StoreUnavailable`` if the connection is closed."""
        store = self._store
        if store is None:
            raise StoreUnavailable("the connection is closed")
        if store.pid != os.getpid():
            self.establish_connection()
            return self.store
        return store

    @property
    def engine(self) -> Engine:
        """The client's engine. Raises ``StoreUnavailable`` if the connection, or the client, is closed."""
        store = self._store
        if store is not None and store.pid == os.getpid() and store.engine_if_open is not None:
            return store.engine_if_open
        return self.store.engine

    def suspect(self) -> None:
        """Note that a call has failed: until one succeeds, new connections don't wait long."""
        if self._store is not None:
            self._store.suspected = True

    def forget_declared(self, exchange: str) -> bool:
        """Have kombu redeclare what it publishes to. Returns whether this thread should retry with this exchange.

        It should retry once, if the exchange was declared on this connection: kombu retries at once, perhaps endlessly,
        and an exchange that it does not declare with the message stays missing.
        """
        client = self.client
        if client is not None:  # else another thread has just closed the connection
            client.declared_entities.clear()
        missed, thread = self.missed.get(exchange), threading.get_ident()
        if missed is None or thread in missed:
            return False
        missed.add(thread)
        return True

    def close_connection(self, connection: BrokerConnection) -> None:
        """Release everything at once. Idempotent; leaves nothing behind, even if the store fails."""
        store = self._store
        if store is None:
            return
        if store.pid != os.getpid():
            self._disown()
            return
        self._leave_loop()
        with store.patience.ending():
            surely(partial(self._settle, store), partial(self._detach, store))

    def _detach(self, store: Client) -> None:
        self._store = None  # first: a thread that makes a receiver now sees that it is closed
        self._end_consumers_later(store)
        self._stop_receiver(store, timeout_s=store.patience.allow(self.options.operation_timeout))
        self._receiver = None
        store.detach(self)

    def __del__(self) -> None:
        """Collected without having been closed. Runs in any thread at any moment: takes no lock and never waits."""
        if self._store is None or sys.is_finalizing() or self._store.pid != os.getpid():
            return
        leases = [lease for channel in self.channels for lease in channel.bequeath()]
        consumers = self._give_up_consumers()
        if leases or consumers:
            self._store.later(partial(settle_orphaned, self._store, leases, consumers))
        self._store.abandon(self)
        if self._receiver is not None:
            self._receiver.abandon()

    def _give_up_consumers(self) -> list[tuple[SessionId, str, str]]:
        """Note that all consumers leave. Returns them, and the exclusive queues' entries, as the store knows them."""
        own = [] if self._receiver is None else self._receiver.fetcher.give_up_consumers()
        return [*own, *self._exclusive_queues.give_up()]

    def _end_consumers_later(self, store: Client) -> None:
        """Have another thread end the remaining consumers and exclusive queues."""
        consumers = self._give_up_consumers()
        if consumers:
            held: Callable[[], list[Lease]] = list if self._receiver is None else self._receiver.fetcher.close
            store.later(partial(settle_orphaned, store, (), consumers, held))
        self._exclusive_queues = ExclusiveQueues()  # kombu may establish this connection again

    def _settle(self, store: Client) -> None:
        try:
            run_all([*(channel.close for channel in self.channels), store.flush_acks, self._disclaim])
        except KombuFDBError as error:
            logger.warning("the connection did not close cleanly: %s", error)
        except BaseException:  # a signal handler's
            for channel in list(self.channels):
                channel.abandon()
            raise

    def _disclaim(self) -> None:
        """End the exclusive queues, consumed or not: they belong to the connection that declared them."""
        if self._store is not None:
            self._exclusive_queues.leave(self._store)

    def _collect(self, connection: BrokerConnection | None) -> None:
        """Drop the connection without calling the store, after an error or in a forked child."""
        store = self._store
        if store is None:
            return
        if store.pid != os.getpid():
            self._disown()
            return
        self._leave_loop()
        self._stop_receiver(store, timeout_s=0)
        self._end_consumers_later(store)  # first: if interrupted, a close still finds all channels open
        for channel in list(self.channels):
            channel.orphan()
        self._store = self._receiver = None
        store.detach(self)

    def _stop_receiver(self, store: Client, *, timeout_s: float) -> None:
        if self._receiver is None:
            return
        began = monotonic()
        store.release_later(self._receiver.stop(timeout_s))
        if self._receiver.alive:
            store.patience.wasted(monotonic() - began)

    def _disown(self) -> None:
        """In a forked child: forget what belongs to the parent."""
        self._store = self._receiver = self._loop = None
        self._exclusive_queues = ExclusiveQueues()
        for channel in list(self.channels):
            channel.disown()

    def close_channel(self, channel: Any) -> None:
        receiver = self.receiver_if_any
        if receiver is not None:
            receiver.fetcher.forget(channel.credit)
        super().close_channel(channel)

    # -- consume -----------------------------------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        store, receiver = self._store, self._receiver
        if receiver is not None and store is not None and store.pid == os.getpid():
            return receiver
        store = self.store
        if self._receiver is None:
            self._receiver = Receiver(store)
            if self._store is not store:  # another thread has closed the connection: nothing would end the receiver
                self._receiver = None
                raise StoreUnavailable("the connection is closed")
            if self._loop is not None:
                self.register_with_event_loop(self, self._loop.hub)
        return self._receiver

    @property
    def receiver_if_any(self) -> Receiver | None:
        """The receiver; None also in a forked child, which must not touch its parent's."""
        return self._receiver if self._store is not None and self._store.pid == os.getpid() else None

    def drain_events(self, connection: BrokerConnection, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message to its consumer. Raises ``TimeoutError`` after ``timeout`` seconds; None: no limit."""
        deadline = None if timeout is None else monotonic() + timeout
        receiver, drain = self.receiver, Ticket()
        try:
            receiver.fetcher.attend(drain)
            if receiver.fetcher.owes_acks:
                receiver.catch_up()
            while not deliver_next(receiver.fetcher):
                receiver.fetcher.arrived.clear()
                if deliver_next(receiver.fetcher):
                    return
                if receiver is not self._receiver:
                    raise StoreUnavailable("the connection was closed while it was drained")
                left_s = None if deadline is None else deadline - monotonic()
                if left_s is not None and left_s <= 0 and not self._first_look(receiver):
                    raise TimeoutError
                receiver.wait(left_s)
        finally:
            receiver.fetcher.end_drain(drain)
            if self._loop is not None:  # the drain may have cleared a ring that was for the loop
                receiver.fetcher.arrived.ring()

    def _first_look(self, receiver: Receiver) -> bool:
        """Wait briefly for the receiver's first look, so that a drain with a timeout of 0 finds the messages there."""
        deadline = monotonic() + FIRST_LOOK_S
        while receiver.running and not receiver.fetcher.idle and monotonic() < deadline:
            receiver.wait(0.001)
            if receiver.fetcher.arrived.wait(0):
                return True
        return False

    # -- event loop --------------------------------------------------------------------------------------------------

    def register_with_event_loop(self, connection: BrokerConnection, loop: Any) -> None:
        """Have ``loop`` deliver from now on. May be called again, e.g. after a reset of the loop."""
        self._loop = Loop(loop, self.receiver, lambda: self.receiver_if_any)

    def unregister_from_event_loop(self, connection: BrokerConnection, loop: Any) -> None:
        self._leave_loop()

    def _leave_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.leave()

    # -- calls of channels about their messages ------------------------------------------------------------------------

    def on_ack(self, pending: int, enough: int, *, was_blocked: bool) -> bool:
        """Note the ``pending``-th waiting ack. False if no receiver is running to settle it."""
        receiver = self._receiver  # not a parent's: settling fails in a forked child
        if receiver is None or not receiver.running:
            return False
        receiver.fetcher.on_ack(pending, enough)
        if was_blocked:
            receiver.fetcher.arrived.ring()
        return True

    def on_room(self) -> None:
        """Tell the receiver that the room for messages has changed."""
        receiver = self.receiver_if_any
        if receiver is not None:
            receiver.fetcher.on_room()

    # -- small services to the channels ----------------------------------------------------------------------------

    def declare(self, declaration: QueueDeclaration) -> None:
        """Declare a queue; an exclusive one ends with this connection. Raises what the engine's ``declare`` raises."""
        if declaration.can_vanish:  # a deferred call may still end a lost connection's consumer, and the queue with it
            self.store.make_deferred_calls()
        if declaration.exclusive:
            self._exclusive_queues.declare(self.store, declaration)
        else:
            self.engine.queues.declare(declaration)


def settle_orphaned(
    client: Client,
    leases: Collection[Lease],
    consumers: Iterable[tuple[SessionId, str, str]],
    held: Callable[[], Collection[Lease]] = list,
) -> None:
    """Settle for a connection that is gone: the leases it held, and its consumers as session, queue and tag.

    ``held``: as in ``Client.leave``. For another thread. Raises a ``StoreError``: call again.
    """
    client.release(leases)
    # Only now: where one consumer is active at a time, the next one must find what this one held.
    for consumer in consumers:
        client.remove_consumer(*consumer, held)


# -- a worker's end ----------------------------------------------------------------------------------------------------


def is_stopping() -> bool:
    """Whether this is a Celery worker that is stopping: its last messages to others must not wait for a store."""
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return False
    stop, terminate = getattr(state, "should_stop", None), getattr(state, "should_terminate", None)
    return (stop is not None and stop is not False) or (terminate is not None and terminate is not False)


def in_task() -> bool:
    """Whether this thread or greenlet of a worker runs a task."""
    return sys.modules["celery._state"].get_current_task() is not None


def end_repetition(error: StoreUnavailable, repeated_s: float) -> None:
    """In a stopping worker, end a call that Celery repeats until there is a connection.

    One such call sends its heartbeat event. In the main thread, raise ``WorkerShutdown``, as Celery does when it
    connects itself. In another thread or greenlet, and in a task of the solo pool, raise an error after which kombu
    does not retry, but only after :data:`REPEATED_S`: until then, a task's publish may still succeed. This includes
    greenlets: with gevent, the main greenlet waits for a lock that the heartbeat's greenlet holds.
    """
    if not is_stopping():
        return
    if threading.current_thread() is threading.main_thread() and not in_task():
        sys.modules["celery.worker.state"].maybe_shutdown()
    if repeated_s > REPEATED_S:
        raise OperationalError(str(error)) from error
