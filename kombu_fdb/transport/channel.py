"""A channel: declares, publishes, consumes. Every exchange, binding and queue is the store's; none is remembered here.

The base class keeps routing in the process and delivers by it; this one overrides all of that and keeps the base for
its helpers (``prepare_message``, ``Consumer``, ``Producer``, channel ids).
"""

# ruff: noqa: A002 - the signatures are kombu's

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from amqp.exceptions import PreconditionFailed
from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning
from kombu.utils.uuid import uuid

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import ExchangeNotFound, FormatError, OptionError, StoreError
from kombu_fdb.model import LONGEST_NAME, Death, Delivery, Lease, Publication
from kombu_fdb.primitives.ranges import check_text
from kombu_fdb.primitives.weakly import weakly
from kombu_fdb.process.client import Client
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.transport.batch import PublishBatch
from kombu_fdb.transport.dispatch import Subscription
from kombu_fdb.transport.envelope import encode, open_delivery, payload_of, without_deaths
from kombu_fdb.transport.errors import amqp_errors, not_found
from kombu_fdb.transport.estate import Estate
from kombu_fdb.transport.given import whole_of
from kombu_fdb.transport.inbox import Inbox
from kombu_fdb.transport.qos import QoS
from kombu_fdb.transport.receiver import MANY_ACKS

if TYPE_CHECKING:
    from kombu_fdb.transport.transport import Transport

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

EXCHANGE_TYPES = ("direct", "topic", "fanout")
#: A direct get meets at most this many expired messages.
MOST_EXPIRED = 1000


class Channel(virtual.Channel):
    """Publishing is safe from any thread, acks too; the rest is for one thread at a time."""

    QoS = QoS
    supports_fanout = True
    #: Bodies are stored as they are.
    body_encoding = None  # type: ignore[assignment]
    from_transport_options = ("deadletter_queue",)  # type: ignore[assignment]

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.transport = connection
        #: ``Producer(on_return=...)`` adds its callback under ``basic_return``.
        self.events: dict[str, set[Callable[..., Any]]] = defaultdict(set)
        #: Claimed and not handed out yet (``dispatch.py``).
        self.inbox = Inbox()
        #: Messages with acks that were handed out, and how many may be altogether (None: any number).
        self.handed = 0
        self.most_handed: int | None = None
        #: Since when less room than is worth a claim is free.
        self.free_since: float | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._dedup_window_s = connection.options.dedup_window
        #: What ``Producer.batch()`` makes; see :func:`~kombu_fdb.transport.batch.batching`.
        self.batch_kind: Callable[[Channel, int], PublishBatch] = PublishBatch
        self._zero_first = connection.options.priority_order == "redis"
        self._client: Client | None = None

    # -- the store -------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """What this channel consumed with: stays the same when the connection is lost."""
        if self._client is None:
            self._client = self.transport.store
        return self._client

    @property
    def engine(self) -> Engine:
        """For everything that does not depend on who asks: in a forked child it is the child's own."""
        return self.transport.store.engine

    # -- exchanges -------------------------------------------------------------------------------------------------

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Raises 404 if ``passive`` and there is none, 406 if it exists with another type."""
        exchange = exchange or f"amq.{type or 'direct'}"
        if passive:
            if self.engine.exchange(exchange) is None:
                raise not_found(f"no exchange {exchange!r}", "exchange_declare")
            return
        declared = Exchange(exchange, _kind(type, arguments), bool(durable), bool(auto_delete), dict(arguments or {}))
        with amqp_errors("exchange_declare"):
            self.engine.declare_exchange(declared)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete it with its bindings; the queues stay."""
        if not self.engine.delete_exchange(exchange, if_unused=if_unused):
            raise PreconditionFailed(f"exchange {exchange!r} is in use", (40, 20), "Channel.exchange_delete")

    def get_exchanges(self) -> list[str]:
        return [each.name for each in self.engine.exchanges()]

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """``(routing key, "", queue)`` of each binding; empty for an unknown exchange."""
        return [(routing_key, "", queue) for name, queue, routing_key in self.engine.bindings() if name == exchange]

    def list_bindings(self) -> Iterator[tuple[str, str, str]]:
        """``(queue, exchange, routing key)``."""
        return ((queue, exchange, routing_key) for exchange, queue, routing_key in self.engine.bindings())

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        declared = self.engine.exchange(exchange)
        return self.exchange_types[declared.type if declared else default]

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        try:
            queues = self.engine.route(exchange, routing_key)
        except ExchangeNotFound:
            queues = []
        return queues or ([default] if default else [])

    # -- queues ----------------------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
        """``Queue(expires=..., message_ttl=..., max_length=...)`` become AMQP's arguments."""
        return dict(to_rabbitmq_queue_arguments(arguments, **options))

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Raises 404 if ``passive`` and there is none, 406 for a senseless argument. Counts ready messages."""
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            declaration = QueueDeclaration(queue, bool(durable), bool(exclusive), bool(auto_delete), arguments or {})
            with amqp_errors("queue_declare"):
                self.engine.declare_queue(declaration)
            self.transport.declared(declaration)
        elif not self._has_queue(queue):
            raise not_found(f"no queue {queue!r}", "queue_declare")
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        """Delete it with its messages and bindings. Raises 406 if a condition forbids it."""
        deleted = self.engine.delete_queue(queue, if_unused=if_unused, if_empty=if_empty)
        if deleted is None:
            raise PreconditionFailed(f"queue {queue!r} is in use or not empty", (50, 40), "Channel.queue_delete")
        return deleted

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raises 404 for an unknown exchange."""
        with amqp_errors("queue_bind"):
            self.engine.bind(queue, exchange or "amq.direct", routing_key or "")

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.engine.unbind(queue, exchange or "amq.direct", routing_key or "")

    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        """Delete what is ready or delayed. Returns how many; what consumers hold stays."""
        return self.engine.purge(queue)

    def after_reply_message_received(self, queue: str) -> None:
        self.queue_delete(queue)

    # Names of the base class that monitoring tools call.

    def _size(self, queue: str) -> int:
        return self.engine.counts(queue).ready

    def _purge(self, queue: str) -> int:
        return self.engine.purge(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        """Declared, or made by a message to its name."""
        if self.engine.queue(queue) is not None:
            return True
        counts = self.engine.counts(queue)
        return bool(counts.ready or counts.delayed or counts.leased)

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        self.queue_declare(queue, **kwargs)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self.engine.delete_queue(queue)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.basic_publish(message, "", queue, **kwargs)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        self.basic_publish(message, exchange, routing_key, **kwargs)

    # -- publish -----------------------------------------------------------------------------------------------------

    def basic_publish(
        self,
        message: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the message. ``timeout``: seconds, instead of ``publish_timeout``.

        Raises 404 for an unknown exchange, 406 for a message over the maximum, a connection error if the store does not
        answer: the message may be stored only after ``CommitUnknown``.
        """
        publication = self.encode(message, exchange, routing_key)
        store = self.transport.store
        try:
            with amqp_errors("basic_publish"):
                queues = store.engine.publish([publication], timeout_s=timeout)[0]
        except StoreError:
            store.suspect()
            raise
        if not queues:
            self.on_unroutable(message, publication, mandatory)

    def encode(self, message: Any, exchange: str, routing_key: str) -> Publication:
        if isinstance(message, (str, bytes)):  # ``celery amqp basic.publish``
            message = self.prepare_message(message, content_type="text/plain", content_encoding="utf-8")
        return encode(
            message,
            exchange or "",
            routing_key or "",
            now_ms=self.transport.now_ms(),
            most_urgent_is_zero=self._zero_first,
            key=self.transport.key_of(message),
            dedup_window_s=self._dedup_window_s,
        )

    def encode_again(self, message: Any) -> tuple[Publication, tuple[Death, ...]]:
        """A message that was delivered, as it was published, and its history as a dead letter."""
        headers, deaths = without_deaths(message.headers or {})
        again = {
            "body": message.body,
            "content-type": message.content_type,
            "content-encoding": message.content_encoding,
            "headers": headers,
            "properties": message.properties,
        }
        info = message.delivery_info
        exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or info["queue"]
        try:
            return self.encode(again, exchange, routing_key), deaths
        except OptionError:  # it came from elsewhere: it keeps its odd headers, and they steer nothing
            plain = self.encode({**again, "headers": {}, "properties": {}}, exchange, routing_key)
            return plain._replace(payload=payload_of(again, exchange, routing_key)), deaths

    def on_unroutable(self, message: dict[str, Any], publication: Publication, mandatory: bool) -> None:
        """No queue was reached: to the queue named by ``deadletter_queue``, back to the publisher, or dropped."""
        exchange, routing_key = publication.exchange, publication.routing_key
        if self.deadletter_queue:
            warnings.warn(
                UndeliverableWarning(UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)), stacklevel=2
            )
            self.basic_publish(message, "", self.deadletter_queue)
        elif mandatory:
            self._return(message, exchange, routing_key)

    def _return(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        error = not_found(f"NO_ROUTE (312) from exchange {exchange!r}", "basic_publish")
        properties = {**message["properties"], "delivery_tag": None}
        returned = self.Message({**message, "properties": properties}, channel=self)
        for callback in list(self.events["basic_return"]):
            callback(error, exchange, routing_key, returned)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """For ``Producer.batch()``."""
        return self.batch_kind(self, max_size)

    # -- consume -----------------------------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str = "", **kwargs: Any
    ) -> str:
        consumer_tag = consumer_tag or f"amq.ctag-{uuid()}"
        check_text("consumer tag", consumer_tag, LONGEST_NAME)
        declaration = self.engine.queue(queue)
        transient = declaration is not None and declaration.can_vanish
        single = declaration is not None and declaration.single_active
        subscription = Subscription(consumer_tag, queue, self, bool(no_ack), callback, transient, single)
        self.transport.receiver.subscribe(subscription)
        self._subscriptions[consumer_tag] = subscription
        self._consumers.add(consumer_tag)
        return consumer_tag

    def basic_cancel(self, consumer_tag: str) -> None:
        """What was claimed for it and not handed out goes back to its place at once."""
        self._consumers.discard(consumer_tag)
        subscription = self._subscriptions.pop(consumer_tag, None)
        receiver = self.transport.receiver_if_any
        if subscription is not None and receiver is not None:
            receiver.cancel(subscription)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Claim one message now; None if there is none, or the queue's one active consumer is somebody."""
        membership, tag, hand = self.client.membership(), self.transport.next_tag(), list[Delivery]()
        try:
            for _ in range(MOST_EXPIRED):
                hand.clear()
                if membership.claim([queue], 1, no_ack={queue} if no_ack else (), hand=hand):
                    message = self._hand_out(hand[0], tag, no_ack=no_ack)
                    if message is not None:
                        return message
                elif not self._size(queue) or self._is_shut(queue):  # an empty window may have met an expired message
                    break
        except BaseException:  # from a signal handler: nobody has seen the message
            self.qos.drop(tag)
            if not no_ack:
                self.client.release_later([each.lease for each in hand])
            raise
        self.transport.used(queue)
        return None

    def _hand_out(self, delivery: Delivery, tag: int, *, no_ack: bool) -> Any:
        if not no_ack:
            self.qos.hold(tag, delivery.lease)
            self.client.watch(delivery, gone=weakly(self.qos.overdue, delivery.lease, otherwise=None))
        return self.open(delivery, tag)

    def _is_shut(self, queue: str) -> bool:
        """Whether there is nothing for us: what is ready is paused, limited, or for the one active consumer."""
        watches = self.engine.arm([queue])
        for watch in watches or ():
            watch.cancel()
        return watches is not None

    def open(self, delivery: Delivery, tag: int, consumer_tag: str | None = None) -> Any:
        """The message of a delivery; None if it is not one: then it is dead-lettered, and the worker lives on."""
        try:
            message = self.Message(open_delivery(delivery, tag, consumer_tag), channel=self)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the next consumer would meet it too
            self.refuse(delivery, tag, str(error) if isinstance(error, FormatError) else repr(error))
            return None
        self.qos.append(message, tag)
        return message

    def refuse(self, delivery: Delivery, tag: int, error: str) -> None:
        """Dead-letter what nobody can handle."""
        logger.error("dead-lettered message %s of queue %s: %s", delivery.message_id.hex(), delivery.queue, error)
        self.qos.drop(tag)
        try:
            self.client.reject([delivery.lease], reason="malformed", error=error)
        except StoreError:
            self.client.release_later([delivery.lease])

    # -- settle ------------------------------------------------------------------------------------------------------

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        self.qos.ack(delivery_tag, multiple)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Only ``prefetch_count`` counts, for the whole channel; 0 is no limit. Raises ``OptionError``."""
        prefetch_count = whole_of("prefetch_count", prefetch_count)
        self.qos.prefetch_count = prefetch_count
        self.on_room()

    def note_ack(self, lease: Lease) -> None:
        """It will be settled; :meth:`acknowledged` must follow. The note is the last step, in one call into C."""
        client = self.client
        client.check_process()
        client.unwatch(lease)
        client.acks.append(lease)

    def acknowledged(self) -> None:
        """Settle what was noted soon: with others if a receiver runs, else at once."""
        client = self.client
        receiver = self.transport.receiver_if_any
        if receiver is not None and receiver.running:
            receiver.on_ack(len(client.acks), _enough(self.qos.prefetch_count))
            if self.inbox:
                receiver.arrived.ring()
        elif self.closed:
            client.nudge()
        else:
            client.flush_acks()

    def settle(self, lease: Lease, *, requeue: bool, pause_ms: int, reason: str, details: dict[str, Any]) -> None:
        """Now. Raises a ``StoreError``; may be repeated. ``details`` go to the dead letter, if it becomes one."""
        if requeue:
            due_ms = self.transport.now_ms() + pause_ms if pause_ms else 0
            self.client.requeue([lease], details, due_ms=due_ms)
        else:
            self.client.reject([lease], reason=reason, **details)

    def hand_back(self, leases: list[Lease], *, counted: bool) -> None:
        """At once; if the store does not answer, as soon as it does. Raises a ``StoreError``, once in an outage."""
        client = self.client
        if leases and client.suspected and not counted:
            client.release_later(leases)
        elif leases:
            self._release(client, leases, counted=counted)

    @staticmethod
    def _release(client: Client, leases: list[Lease], *, counted: bool) -> None:
        try:
            client.release(leases, counted=counted)
        except StoreError:
            client.suspect()
            raise

    def hand_back_later(self, leases: Iterable[Lease]) -> None:
        self.client.release_later(leases)

    def limit_slots(self, free: int) -> None:
        """No more than ``free`` messages may be had from now on, until this is called again. By the handing thread."""
        before = self.most_handed
        self.most_handed = self.handed + max(free, 0)
        if before is None or self.most_handed > before:
            self.on_room()

    def on_room(self) -> None:
        """Room was made, or taken away."""
        receiver = self.transport.receiver_if_any
        if receiver is not None:
            receiver.on_room()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the consumers, hand back what is unsettled. Idempotent; leaves nothing behind if the store fails."""
        if self.closed:
            return
        self.closed = True
        receiver, ended = self.transport.receiver_if_any, list(self._subscriptions.values())
        if receiver is not None:
            receiver.cancel(*ended, leave=False)
        try:
            if self._qos is not None:
                self._qos.restore_unacked_once()
        finally:
            # Only now: where one consumer is active at a time, the next one must find what this one held.
            if receiver is not None:
                for subscription in ended:
                    receiver.leave(subscription)
            self.leave()

    def orphan(self, store: Client) -> None:
        """The connection failed: give up consuming without asking the store, keep what is being worked on."""
        self.closed = True
        store.later(Estate(consumers=self.consumers).settler(store))
        if self._qos is not None:
            self._qos.orphan()
        self.leave()

    def bequeath(self) -> list[Lease]:
        """The leases of all it holds, as it is garbage. Takes no lock."""
        waiting = self.inbox.withdraw(lambda *_: True)
        return waiting if self._qos is None else [*self._qos.leave(), *waiting]

    @property
    def consumers(self) -> list[tuple[bytes, str, str]]:
        """As the store knows them: session, queue, tag."""
        return [
            (each.session_id, each.queue, each.tag)
            for each in self._subscriptions.values()
            if each.session_id is not None
        ]

    def disown(self) -> None:
        """In a forked child: what it held is the parent's."""
        self._client = None
        self._qos = None
        self.inbox = Inbox()
        self._subscriptions = {}
        self._consumers = set()

    def leave(self) -> None:
        """Forget the consumers and the connection, in this process."""
        self._subscriptions.clear()
        self._consumers.clear()
        self.transport.close_channel(self)


def _enough(prefetch: int) -> int:
    """How many acks are worth a claim of their own."""
    return max(1, prefetch // 2) if prefetch else MANY_ACKS


def _kind(exchange_type: str, arguments: dict[str, Any] | None) -> str:
    """Raises 406 for a type we don't have."""
    kind = exchange_type or "direct"
    if kind == "x-delayed-message":  # RabbitMQ's plugin; here every queue can delay
        kind = (arguments or {}).get("x-delayed-type", "direct")
    if kind not in EXCHANGE_TYPES:
        raise PreconditionFailed(f"unknown exchange type {kind!r}", (40, 10), "Channel.exchange_declare")
    return kind
