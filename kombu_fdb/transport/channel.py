"""A channel: declares, publishes, consumes. Exchanges, bindings and queues live in the store only.

The base class has its routing tables in the process, and delivers by them. This class overrides all of that, and uses
only the base's helpers (``prepare_message``, ``Consumer``, ``Producer``, channel ids).
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from amqp import spec
from amqp.exceptions import (
    ChannelError,
    ConsumerCancelled,
    NotAllowed,
    PreconditionFailed,
    RecoverableConnectionError,
)
from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning
from kombu.utils.uuid import uuid

from kombu_fdb.errors import ExchangeNotFound, FormatError, InvalidArgument, KombuFDBError, LimitExceeded, StoreError
from kombu_fdb.model import LONGEST_NAME, Death, Delivery, Lease, Publication
from kombu_fdb.primitives.ranges import check_text
from kombu_fdb.primitives.wakeup import weakly
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store.retry import Patience
from kombu_fdb.transport.connection import BrokerConnection
from kombu_fdb.transport.consuming.dispatch import Credit, Subscription, next_tag
from kombu_fdb.transport.declarations import Declarations, one_call
from kombu_fdb.transport.envelope import encode, now_ms, open_delivery, payload_of, whole_of, without_deaths
from kombu_fdb.transport.errors import ExchangeVanished, amqp_errors, not_found, raise_as_amqp
from kombu_fdb.transport.unacked import Message, QoS

#: How many expired messages a direct get may skip.
MOST_EXPIRED = 1000
#: RabbitMQ's consumer arguments that are refused, and what to do instead.
ONE_OF_SEVERAL = {
    "exclusive": "Declare the queue with x-single-active-consumer",
    "x-priority": "For one consumer before others, declare the queue with x-single-active-consumer",
    "x-stream-offset": "There are no streams",
}


def _refuse(given: object, what: str, method: str, fix: str) -> None:
    """Raises 406 for an argument that RabbitMQ honours: accepting it here would silently do nothing."""
    if given:
        raise PreconditionFailed(f"PRECONDITION_FAILED - no {what} here. {fix}", (50, 10), f"Channel.{method}")


class Channel(Declarations):
    """Any thread may publish and ack; everything else is for one thread at a time."""

    supports_fanout = True
    Message = Message
    #: Bodies are stored as they are.
    body_encoding = None  # type: ignore[assignment]  # as other transports of kombu
    from_transport_options = ("deadletter_queue",)  # type: ignore[assignment]  # as other transports of kombu

    def __init__(self, connection: BrokerConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        #: ``Producer(on_return=...)`` adds its callback under ``basic_return``.
        self.events: dict[str, set[Callable[..., Any]]] = defaultdict(set)
        self._begin()
        self._subscriptions: dict[str, Subscription] = {}
        #: Tags of consumers without acks: kombu's ``Message.ack`` does nothing for their messages.
        self.no_ack_consumers: set[str] = set()  # type: ignore[assignment]  # kombu's None is a default
        #: Makes a publication from a message dict, an exchange, a routing key and the current time.
        self.encode: Callable[..., Publication] = partial(
            encode,
            most_urgent_is_zero=connection.options.priority_order == "redis",
            key_of=connection.key_of,
            dedup_window_s=connection.options.dedup_window,
        )

    def _begin(self) -> None:
        """Begin with nothing claimed, held or settled."""
        self.credit: Credit = Credit()
        self._qos: QoS = QoS(self.transport, self.credit)

    # -- the store -------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client with which this channel consumes; it stays the same after the connection is lost."""
        return self._qos.client

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
        """Store the message. ``confirm_timeout``, or else ``timeout``: seconds, instead of ``publish_timeout``.

        Raises 404 for an unknown exchange, 406 for a message over the maximum, ``MessageNacked`` for a full queue, and
        a connection error if the store does not answer: then only ``CommitUnknown`` leaves open whether the message is
        stored.
        """
        if immediate:
            _refuse(
                immediate, "immediate publication", "basic_publish", "Give the message an expiration, or leave it out"
            )
        if isinstance(message, (str, bytes)):  # ``celery amqp basic.publish``
            message = self.prepare_message(message, content_type="text/plain", content_encoding="utf-8")
        moment_ms = now_ms()
        publication = self.encode(message, exchange or "", routing_key or "", moment_ms)
        try:
            publisher, timeout_s = self.transport.engine.publisher, kwargs.get("confirm_timeout") or timeout
            queues = publisher.publish([publication], timeout_s=timeout_s, now_ms=moment_ms)[0]
        except KombuFDBError as error:
            if isinstance(error, StoreError) and not isinstance(error, LimitExceeded):
                self.transport.suspect()
            self.raise_unpublished(error)
            raise
        if not queues:
            self.on_unroutable(message, publication, mandatory)

    def raise_unpublished(self, error: KombuFDBError) -> None:
        """:func:`raise_as_amqp` for a publish's error; lets a retry declare a vanished exchange again."""
        if isinstance(error, ExchangeNotFound) and self.transport.forget_declared(error.exchange):
            raise not_found(str(error), "basic_publish", ExchangeVanished) from error
        raise_as_amqp(error, "basic_publish")

    def on_unroutable(self, message: dict[str, Any], publication: Publication, mandatory: bool) -> None:
        """Send a message that reached no queue to ``deadletter_queue``, return it to the publisher, or drop it."""
        exchange, routing_key = publication.exchange, publication.routing_key
        if self.deadletter_queue:
            warnings.warn(
                UndeliverableWarning(UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)), stacklevel=2
            )
            Channel.basic_publish(self, message, "", self.deadletter_queue)  # not into a batch
        elif mandatory:
            self._return(message, exchange, routing_key)

    def _return(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        error = ChannelError("NO_ROUTE", spec.Basic.Return, reply_code=312)
        properties = {**message["properties"], "delivery_tag": None}
        returned = self.Message({**message, "properties": properties}, channel=self)
        for callback in list(self.events["basic_return"]):
            callback(error, exchange, routing_key, returned)

    def encode_again(self, message: Any) -> tuple[Publication, tuple[Death, ...]]:
        """The publication of a delivered message, and its history as a dead letter."""
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
            return self.encode(again, exchange, routing_key, now_ms()), deaths
        except InvalidArgument:  # from another writer: its odd headers stay, without effect
            plain = self.encode({**again, "headers": {}, "properties": {}}, exchange, routing_key, now_ms())
            return plain._replace(payload=payload_of(again, exchange, routing_key)), deaths

    # -- consume -----------------------------------------------------------------------------------------------------

    @amqp_errors("basic_consume")
    @one_call
    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str = "", **kwargs: Any
    ) -> str:
        """Raises 404 for a missing queue, 406 for an unsupported argument, 530 for a tag that is in use.

        When the queue is deleted, a drain calls ``on_cancel`` with the tag, or raises ``ConsumerCancelled``. A channel
        that is closed raises a connection error.
        """
        self._require_open()
        for what, given in {"exclusive": kwargs.get("exclusive"), **(kwargs.get("arguments") or {})}.items():
            if what in ONE_OF_SEVERAL:
                _refuse(given, f"{what} consumers", "basic_consume", ONE_OF_SEVERAL[what])
        consumer_tag = consumer_tag or f"amq.ctag-{uuid()}"
        check_text("consumer tag", consumer_tag, LONGEST_NAME)
        if consumer_tag in self._subscriptions:
            raise NotAllowed(
                f"NOT_ALLOWED - attempt to reuse consumer tag {consumer_tag!r}. Cancel its consumer first, or leave "
                "the tag out: then the channel makes one",
                (60, 20),
                "Channel.basic_consume",
            )
        declaration = self.engine.inspect.queue(queue)
        if declaration is None:
            self._require(queue, "basic_consume")
        transient = declaration is not None and declaration.can_vanish
        on_cancel = partial(self._end_consumer, on_cancel=kwargs.get("on_cancel"))
        subscription = Subscription(
            consumer_tag,
            queue,
            self.credit,
            self._qos.ack_lease,
            self.open,
            bool(no_ack),
            callback,
            on_cancel,
            transient,
            declaration is not None,
        )
        single = declaration is not None and declaration.single_active
        try:
            self._subscriptions[consumer_tag] = subscription  # first: if interrupted, it is ended here, or by the close
            self.transport.receiver.subscribe(subscription, single=single)
            self._consumers.add(consumer_tag)
            if no_ack:
                self.no_ack_consumers.add(consumer_tag)
            return consumer_tag
        except BaseException:
            self._cancel_later(subscription)
            self._forget_consumer(consumer_tag)
            raise

    def _require_open(self) -> None:
        """Raises py-amqp's error for a closed channel: nothing would release its messages, or end its consumers."""
        if self.closed:
            raise RecoverableConnectionError("the channel is closed. Open another one: connection.channel()")

    def basic_cancel(self, consumer_tag: str) -> None:
        """Cancel a consumer. Messages claimed for it, but not handed out, return to their places at once."""
        subscription, receiver = self._subscriptions.get(consumer_tag), self.transport.receiver_if_any
        if subscription is not None and receiver is not None:
            receiver.cancel(subscription)
        self._forget_consumer(consumer_tag)  # only now: if interrupted, it can be cancelled again

    def _cancel_later(self, subscription: Subscription) -> None:
        """Have the receiver end a consumer, without waiting for it."""
        receiver = self.transport.receiver_if_any
        if receiver is not None:
            receiver.fetcher.cancel(subscription, leave=True)
            receiver.fetcher.on_room()  # wakes its thread

    def _forget_consumer(self, consumer_tag: str) -> None:
        self._consumers.discard(consumer_tag)
        self.no_ack_consumers.discard(consumer_tag)
        self._subscriptions.pop(consumer_tag, None)

    def _end_consumer(self, subscription: Subscription, on_cancel: Callable[[str], Any] | None) -> None:
        """End the consumer of a deleted queue. Without ``on_cancel``, raises ``ConsumerCancelled``, as py-amqp does."""
        tag = subscription.consumer_tag
        if self._subscriptions.get(tag) is not subscription:  # cancelled since
            return
        self._forget_consumer(tag)
        if on_cancel is None:
            fix = "Connect again, declare it, and consume again: Celery's workers and kombu's ConsumerMixin do"
            raise ConsumerCancelled(
                f"the queue {subscription.queue!r} of consumer {tag!r} was deleted. {fix}", spec.Basic.Cancel
            )
        on_cancel(tag)

    @amqp_errors("basic_get")
    @one_call
    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Claim one message now; None if there is none, or if the queue has an active consumer. Raises 404.

        A message that waits for a consumer of this channel comes first: it was claimed earlier. A channel that is
        closed raises a connection error.
        """
        self._require_open()
        tag, found = next_tag(), list[Delivery]()
        self.engine.queues.got_from(queue)

        def claim(session: ClientSession) -> list[Delivery]:
            return session.claim([queue], 1, no_ack={queue} if no_ack else (), into=found)

        try:
            for _ in range(MOST_EXPIRED):
                found.clear()
                self._take_waiting(queue, found, 1)
                if not found and self.client.in_session(claim):
                    lease = found[0].lease
                    if found[0].leased:
                        self.client.watch(found[0], gone=weakly(self.credit.held.expire, lease, otherwise=None))
                if found:
                    message = self._hand_out(found[0], tag, no_ack=no_ack)
                    if message is not None:
                        return message
                elif not super()._size(queue) or self._is_shut(queue):  # an empty claim may have met expired messages
                    break
        except BaseException:  # from a signal handler: the program has not seen the message
            self.credit.held.drop(tag)
            self.client.release_later([each.lease for each in found if each.leased])
            raise
        self._require(queue, "basic_get")
        return None

    def _take_waiting(self, queue: str, into: list[Delivery], most: int) -> None:
        receiver = self.transport.receiver_if_any
        if receiver is not None:
            receiver.fetcher.dispatch.take_waiting(self.credit, queue, into, most)

    @amqp_errors("queue_purge")
    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        """Also deletes messages that wait for a consumer of this channel: the program has not seen them."""
        taken: list[Delivery] = []
        try:
            self._take_waiting(queue, taken, sys.maxsize)
            purged = self.client.discard([each.lease for each in taken]) if taken else 0
        except BaseException:
            self.client.release_later([each.lease for each in taken])
            raise
        return purged + super().queue_purge(queue, **kwargs)

    def _size(self, queue: str) -> int:
        """The number of ready messages, and of those that wait for a consumer of this channel."""
        receiver = self.transport.receiver_if_any
        waiting = 0 if receiver is None else receiver.fetcher.dispatch.waiting(self.credit, queue)
        return waiting + super()._size(queue)

    def _hand_out(self, delivery: Delivery, tag: int, *, no_ack: bool) -> Any:
        if not no_ack:
            self.credit.held.leases[tag] = delivery.lease
            self.credit.held.got.add(tag)
        message = self.open(delivery, tag)
        if no_ack and delivery.leased and message is not None:
            self._qos.ack_lease(tag, delivery.lease)
        return message

    def _is_shut(self, queue: str) -> bool:
        """Whether no message may be claimed: all are paused, over a limit, or for the single active consumer."""
        watches = self.engine.messages.arm([queue])
        for watch in watches or ():
            watch.cancel()
        return watches is not None

    def open(self, delivery: Delivery, tag: int, consumer_tag: str | None = None) -> Any:
        """The message of a delivery; None if its payload can't be read: then it is dead-lettered."""
        try:
            opened = open_delivery(delivery, tag, consumer_tag, now_ms=now_ms())
            message = self.Message(opened, channel=self)
        except FormatError as error:  # nothing else: a signal handler's timeout is no fault of the message
            self.credit.held.drop(tag)
            self._qos.client.refuse(delivery, str(error))
            return None
        self.credit.held.messages[tag] = ref(message)
        if delivery.leased:
            self._qos.client.seen.add(delivery.lease)
        return message

    # -- settle ------------------------------------------------------------------------------------------------------

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        self.qos.ack(delivery_tag, multiple)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """``prefetch_count`` is for the whole channel; 0 is no limit. Raises ``InvalidArgument``, and 406."""
        _refuse(prefetch_size, "prefetch_size", "basic_qos", "Set prefetch_count: messages are counted")
        self.credit.prefetch = whole_of("prefetch_count", prefetch_count)
        self.transport.on_room()

    def limit_slots(self, free: int) -> None:
        """Allow ``free`` more messages, until this is called again. For the thread that delivers."""
        if self.credit.limit_slots(free):
            self.transport.on_room()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the consumers, release what is unsettled. Idempotent; cleans up even if the store fails."""
        if self.closed:
            return
        if self._qos.is_foreign:
            self.disown()
        try:
            self.closed = self._qos.ended = True
            with Patience.ending():
                self._end()
        except BaseException:  # a signal handler's, anywhere; after an error, there is nothing left to do
            self.abandon()
            raise

    def abandon(self) -> None:
        """Have other threads finish an interrupted close."""
        for subscription in list(self._subscriptions.values()):
            self._cancel_later(subscription)
        leases = self.bequeath()
        if leases:
            self._qos.client.release_later(leases)
        self.closed = self._qos.ended = True
        self.leave()

    def _end(self) -> None:
        receiver, ended = self.transport.receiver_if_any, list(self._subscriptions.values())
        if receiver is not None:
            receiver.cancel(*ended, leave=False)
        try:
            self.qos.restore_unacked_once()
        finally:
            # Only now: with a single active consumer, the next one must find what this one held.
            if receiver is not None:
                for subscription in ended:
                    receiver.fetcher.leave(subscription)
            self.leave()

    def orphan(self) -> None:
        """After a lost connection: stop consuming without calling the store; keep messages that are being worked on."""
        self.closed = self._qos.ended = True
        self.qos.orphan()
        self.leave()

    def bequeath(self) -> list[Lease]:
        """The leases of all messages that a collected channel holds. Takes no lock."""
        waiting = self.credit.withdraw(lambda *_: True)
        return [*self.credit.held.leave(), *waiting]

    def disown(self) -> None:
        """In a forked child: forget what the channel held, as it is the parent's."""
        self._begin()
        self._subscriptions = {}
        self._consumers = set()

    def leave(self) -> None:
        """Forget the consumers and the connection, in this process."""
        self._subscriptions.clear()
        self._consumers.clear()
        self.transport.close_channel(self)
