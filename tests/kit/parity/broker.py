"""A broker as a program sees it: connections, channels, consumers, held messages; and all that can be observed.

Model. A step is one call of plain kombu. What it returns or raises, what it causes to be delivered, returned and
cancelled, and how every queue and exchange stands when all of that has come to rest, is its *observation*. A broker
comes to rest by itself (:meth:`Broker.settle`), with an event to wait for; ``patience_s`` bounds the wait for what may
never come. After an error each broker's channel is closed and opened anew, as RabbitMQ closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer

from kit.parity.program import CHANNELS, EXCHANGES, QUEUES, SHORT_MS, Step

#: What a program observes of a step: by place, as ("queue", "q0", "ready"), what was there.
Observation = dict[tuple[str, ...], Any]
#: Properties that a publisher sets.
PROPERTIES = ("priority", "expiration", "content_type", "content_encoding", "delivery_mode", "correlation_id")
#: The queue that lives for a single step.
SHORT_LIVED = "short-lived"
#: What makes a body large: of it a program observes how much there is.
FILLING = "."
PAUSE_S = 0.002
#: What tells a publisher that a queue is full; it closes nothing, anywhere.
REFUSAL = "MessageNacked"


@dataclass
class Held:
    """A message that a channel has and has not settled."""

    message: Any
    label: str
    queue: str
    tag: str | None


@dataclass
class Consumer:
    """``number``: in the order in which they came."""

    queue: str
    no_ack: bool
    number: int


@dataclass
class Opened:
    """A channel and what the program knows of it."""

    channel: Any
    producer: Producer
    held: list[Held] = field(default_factory=list)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    prefetch: int = 0
    #: The tag of what it has settled last.
    settled: int | None = None


class Skipped(Exception):
    """The step makes no sense here, or would be a race."""


class Broker:
    """One broker, for one program."""

    name = ""

    def __init__(self, url: str, options: dict[str, Any], *, patience_s: float) -> None:
        self._url, self._options = url, options
        self.patience_s = patience_s
        self.connections: dict[str, Connection] = {}
        self.opened: dict[str, Opened] = {}
        self.arguments: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, tuple[int, int] | None] = {}
        #: What may be there: a channel is lost for each look at what is not.
        self.queues: set[str] = set()
        self.exchanges: set[str] = set()
        self._arrived: list[tuple[str, str, dict[str, Any]]] = []
        self._returned: list[dict[str, Any]] = []
        self._cancelled: list[str] = []

    # -- opening and closing -----------------------------------------------------------------------------------------

    def connection(self, name: str) -> Connection:
        if name not in self.connections:
            self.connections[name] = connection = Connection(self._url, transport_options=self._options)
            connection.connect()
        return self.connections[name]

    def channel(self, name: str) -> Opened:
        if name not in self.opened:
            channel = self.connection(CHANNELS[name]).channel()
            producer = Producer(channel, auto_declare=False, on_return=self._on_return)
            self.opened[name] = Opened(channel, producer)
        return self.opened[name]

    def observer(self) -> Any:
        """A channel that declares passively, and nothing else."""
        return self.connection("observer").default_channel

    def close(self) -> None:
        for name in [*self.connections]:
            self._close_connection(name)

    def _close_connection(self, name: str) -> None:
        for channel, its_connection in CHANNELS.items():
            if its_connection == name:
                self.opened.pop(channel, None)
        connection = self.connections.pop(name, None)
        if connection is not None:
            connection.close()

    def _close_channel(self, name: str) -> None:
        opened = self.opened.pop(name, None)
        if opened is not None:
            opened.channel.close()

    # -- a step --------------------------------------------------------------------------------------------------------

    def perform(self, step: Step) -> Observation:
        """Carry it out, wait until all has come to rest, and tell what could be seen."""
        self._arrived, self._returned, self._cancelled = [], [], []
        seen: Observation = {}
        try:
            result = getattr(self, step.verb)(step, **step.given)
            seen |= _spread(("result",), result) if isinstance(result, dict) else {("result",): result}
        except Skipped:
            seen["result",] = "skipped"
        except Exception as error:
            seen["error",] = _caught(error)
            seen["code",] = getattr(error, "reply_code", None) or getattr(error, "code", None)
            seen["channel closed",] = self.has_closed(step.channel, error)
            if seen["error",] != REFUSAL:
                self._reopen(step.channel, error)
        self.settle()
        return seen | self._observed()

    def has_closed(self, channel: str, error: Exception) -> bool:
        """Whether the broker has closed the channel for that error."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until nothing moves any more."""
        raise NotImplementedError

    def _reopen(self, name: str, error: Exception) -> None:
        connection = self.connections.get(CHANNELS[name])
        if connection is None:
            return
        if isinstance(error, connection.connection_errors):
            self._close_connection(CHANNELS[name])
            # RabbitMQ ends its channels one by one, and the next may get what the first one had: it is too late.
            self._arrived = [each for each in self._arrived if CHANNELS[each[0]] != CHANNELS[name]]
        else:
            self._close_channel(name)

    def _observed(self) -> Observation:
        seen: Observation = {}
        for queue, counts in self.counts.items():
            seen["queue", queue, "ready"] = None if counts is None else counts[0]
            seen["queue", queue, "consumers"] = None if counts is None else counts[1]
        for exchange in EXCHANGES:
            seen["exchange", exchange] = exchange in self.exchanges and self.has_exchange(exchange)
            if not seen["exchange", exchange]:
                self.exchanges.discard(exchange)
        by_queue: dict[str, list[dict[str, Any]]] = {}
        for _, queue, message in self._arrived:
            by_queue.setdefault(queue, []).append(message)
        for queue, messages in by_queue.items():
            if len(self.consumers_of(queue)) > 1:  # which of them gets which, no broker says
                messages.sort(key=lambda message: str(message["body"]))
                for message in messages:
                    message["tag"] = None
            for number, message in enumerate(messages):
                seen |= _spread(("delivered", queue, str(number)), message)
        for number, message in enumerate(self._returned):
            seen |= _spread(("returned", str(number)), message)
        if self._cancelled:
            seen["cancelled",] = sorted(self._cancelled)
        return seen

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, tuple[int, int] | None]:
        """How many messages are ready, and how many consumers there are, in each queue."""
        return {queue: self.look_at(queue) for queue in QUEUES}

    def look_at(self, queue: str) -> tuple[int, int] | None:
        if queue not in self.queues:
            return None
        try:
            found = self.observer().queue_declare(queue, passive=True)
        except self.connections["observer"].channel_errors:
            self.queues.discard(queue)
            return None
        return found.message_count, found.consumer_count

    def is_empty(self, queue: str) -> bool:
        return not (self.look_at(queue) or (0,))[0]

    def has_exchange(self, exchange: str) -> bool:
        try:
            self.observer().exchange_declare(exchange, "direct", passive=True)
        except self.connections["observer"].channel_errors:
            return False
        return True

    def consumers_of(self, queue: str) -> list[tuple[str, str, Consumer]]:
        """Channel, tag and consumer, in the order in which they came."""
        found = [
            (name, tag, consumer)
            for name, opened in self.opened.items()
            for tag, consumer in opened.consumers.items()
            if consumer.queue == queue
        ]
        return sorted(found, key=lambda each: each[2].number)

    def held_of(self, queue: str) -> int:
        return sum(each.queue == queue for opened in self.opened.values() for each in opened.held)

    def is_moving(self, queue: str, ready: int) -> bool:
        """Whether what is ready there is about to go: to a consumer that has room for it, or as its time is over."""
        consumers = self.consumers_of(queue)
        if ready and self.is_short(queue):
            return True
        if self.arguments.get(queue, {}).get("x-single-active-consumer"):
            consumers = consumers[:1]
        return bool(ready) and any(self._has_room(name, consumer) for name, _, consumer in consumers)

    def is_short(self, queue: str) -> bool:
        """Whether what comes to this queue is soon gone."""
        return bool(self.arguments.get(queue, {}).get("x-message-ttl") == SHORT_MS)

    def _has_room(self, name: str, consumer: Consumer) -> bool:
        opened = self.opened[name]
        held = sum(each.tag is not None for each in opened.held)
        return consumer.no_ack or not opened.prefetch or held < opened.prefetch

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for it, as long as there is patience."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _deliver(self, name: str, raw: Any, queue: str, tag: str | None, *, no_ack: bool) -> dict[str, Any]:
        opened = self.channel(name)
        to_python = getattr(opened.channel, "message_to_python", None)
        message = to_python(raw) if to_python is not None and not hasattr(raw, "payload") else raw
        if not no_ack:
            opened.held.append(Held(message, _label(message.payload), queue, tag))
        info, headers = message.delivery_info, dict(message.headers)
        found = {
            "body": _label(message.payload),
            "exchange": info["exchange"],
            "routing_key": info["routing_key"],
            "redelivered": bool(info["redelivered"]),
            "tag": None if tag is None else info["consumer_tag"],
            **{each: message.properties.get(each) for each in PROPERTIES if each in message.properties},
            "content_type": message.content_type,
            "content_encoding": message.content_encoding,
        }
        for number, death in enumerate(headers.pop("x-death", ())):
            found |= {
                f"x-death {number} {field}": value if field != "time" else type(value).__name__
                for field, value in death.items()
            }
        return found | {f"header {name}": value for name, value in headers.items()}

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        body = message.body.decode() if isinstance(message.body, bytes) else message.body
        self._returned.append(
            {
                "error": type(error).__name__,
                "code": error.reply_code,
                "exchange": exchange,
                "routing_key": routing_key,
                "body": _label(body),
            }
        )

    # -- verbs: topology ---------------------------------------------------------------------------------------------

    def declare_exchange(
        self,
        step: Step,
        exchange: str,
        type: str,  # noqa: A002 - AMQP's name
        passive: bool = False,
        auto_delete: bool = False,
        alternate: str | None = None,
    ) -> None:
        channel = self.channel(step.channel).channel
        arguments = None if alternate is None else {"alternate-exchange": alternate}
        declared = Exchange(
            exchange, type, channel=channel, durable=False, auto_delete=auto_delete, arguments=arguments
        )
        declared.declare(passive=passive)
        self.exchanges.add(exchange)

    def delete_exchange(self, step: Step, exchange: str, if_unused: bool) -> None:
        Exchange(exchange, channel=self.channel(step.channel).channel).delete(if_unused=if_unused)

    def declare_queue(
        self,
        step: Step,
        queue: str,
        arguments: dict[str, Any] | None = None,
        auto_delete: bool = False,
        passive: bool = False,
        exclusive: bool = False,
    ) -> tuple[str, int]:
        is_quorum = (arguments or {}).get("x-queue-type") == "quorum"
        declared = Queue(
            queue,
            channel=self.channel(step.channel).channel,
            durable=is_quorum,
            auto_delete=auto_delete and not is_quorum,
            exclusive=exclusive,
            queue_arguments=dict(arguments or {}),
        )
        name, ready, _consumers = declared.queue_declare(passive=passive)
        self.queues.add(queue)
        if not passive:
            self.arguments[queue] = dict(arguments or {})
        return name, ready

    def delete_queue(self, step: Step, queue: str, if_unused: bool = False, if_empty: bool = False) -> int:
        deleted = Queue(queue, channel=self.channel(step.channel).channel).delete(if_unused, if_empty)
        self._forget_consumers(queue)
        return int(deleted)

    def _forget_consumers(self, queue: str) -> None:
        """Those of a deleted queue."""
        for name, tag, _ in self.consumers_of(queue):
            del self.opened[name].consumers[tag]

    def purge(self, step: Step, queue: str) -> int:
        return int(Queue(queue, channel=self.channel(step.channel).channel).purge())

    def bind(self, step: Step, queue: str, exchange: str, key: str, arguments: dict[str, Any] | None = None) -> None:
        Queue(queue, channel=self.channel(step.channel).channel).bind_to(exchange, key, arguments)

    def unbind(self, step: Step, queue: str, exchange: str, key: str, arguments: dict[str, Any] | None = None) -> None:
        Queue(queue, channel=self.channel(step.channel).channel).unbind_from(Exchange(exchange), key, arguments)

    def expire_queue(self, step: Step, dead_letters: bool) -> bool:
        """A queue with messages that is left alone until it is gone."""
        arguments: dict[str, Any] = {"x-expires": SHORT_MS}
        if dead_letters:
            arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": QUEUES[0]}
        channel = self.channel(step.channel)
        Queue(SHORT_LIVED, channel=channel.channel, durable=False, queue_arguments=arguments).queue_declare()
        channel.producer.publish(f"m{step.number}", exchange="", routing_key=SHORT_LIVED)
        return self.until(lambda: self.is_gone(SHORT_LIVED))

    def leave_exclusive(self, step: Step, auto_delete: bool) -> dict[str, bool]:
        """The end of an exclusive queue's last consumer, and whether the queue counts as unused then."""
        channel = self.channel(step.channel).channel
        channel.queue_declare(SHORT_LIVED, exclusive=True, durable=False, auto_delete=auto_delete)
        channel.basic_cancel(channel.basic_consume(SHORT_LIVED, no_ack=True, callback=lambda message: None))
        asking = self.connection(CHANNELS[step.channel]).channel()
        try:
            asking.queue_declare(SHORT_LIVED, passive=True)
        except self.connection(CHANNELS[step.channel]).channel_errors:
            return {"stays": False}
        asking.queue_delete(SHORT_LIVED, if_unused=True)
        asking.close()
        return {"stays": True}

    def is_gone(self, queue: str) -> bool:
        """Asked in a way that does not count as a use."""
        raise NotImplementedError

    # -- verbs: messages -----------------------------------------------------------------------------------------------

    def publish(
        self,
        step: Step,
        exchange: str,
        key: str,
        size: int = 0,
        expiration_ms: int | None = None,
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> None:
        self.channel(step.channel).producer.publish(
            f"m{step.number}".ljust(size, FILLING),
            exchange=exchange,
            routing_key=key,
            expiration=None if expiration_ms is None else expiration_ms / 1000,
            headers=dict(headers or {}),
            **{"priority": 0, **properties},
        )

    def publish_expiring(self, step: Step, queue: str, behind: bool = False) -> bool:
        """Alone in its queue it is gone when its time has come; behind others it stays until they are gone."""
        counts = self.counts.get(queue)
        if counts is None or self.consumers_of(queue) or bool(counts[0]) != behind:
            raise Skipped
        published = time.monotonic()
        self.channel(step.channel).producer.publish(
            f"m{step.number}", exchange="", routing_key=queue, expiration=SHORT_MS / 1000
        )
        if behind:
            time.sleep(max(published + 2 * SHORT_MS / 1000 - time.monotonic(), 0))  # nothing happens meanwhile
            return True
        return self.until(lambda: self.is_empty(queue))

    def get(self, step: Step, queue: str, no_ack: bool = False) -> dict[str, Any] | None:
        channel = self.channel(step.channel).channel
        raw = channel.basic_get(queue, no_ack=no_ack)
        return None if raw is None else self._deliver(step.channel, raw, queue, None, no_ack=no_ack)

    def ask_closed(self, step: Step, queue: str) -> dict[str, str]:
        """What a channel that was closed says to a get, and to a consumer."""
        closed = self.connection(CHANNELS[step.channel]).channel()
        closed.close()
        asked = {
            "get": lambda: closed.basic_get(queue),
            "consume": lambda: Queue(queue, channel=closed).consume("late", lambda message: None),
        }
        return {what: _answer(ask) for what, ask in asked.items()}

    def consume(self, step: Step, queue: str, tag: str, no_ack: bool = False) -> str:
        opened = self.channel(step.channel)
        if self.is_short(queue):
            raise Skipped
        for name, _, other in self.consumers_of(queue):  # which of them would get it, no broker says
            alone = self.arguments.get(queue, {}).get("x-single-active-consumer") or name == step.channel
            if other.no_ack != no_ack or not alone:
                raise Skipped

        def arrived(raw: Any) -> None:
            self._arrived.append((step.channel, queue, self._deliver(step.channel, raw, queue, tag, no_ack=no_ack)))

        if tag not in opened.consumers:
            opened.consumers[tag] = Consumer(queue, no_ack, step.number)
        consumed = Queue(queue, channel=opened.channel)
        return str(consumed.consume(tag, arrived, no_ack=no_ack, on_cancel=self._on_cancel))

    def _on_cancel(self, tag: str) -> None:
        self._cancelled.append(tag)

    def cancel(self, step: Step, tag: str) -> None:
        opened = self.channel(step.channel)
        opened.channel.basic_cancel(tag)
        opened.consumers.pop(tag, None)

    def qos(self, step: Step, count: int, of_channel: bool = True) -> None:
        opened = self.channel(step.channel)
        if of_channel and any(
            self.arguments.get(consumer.queue, {}).get("x-queue-type") == "quorum"
            for consumer in opened.consumers.values()
        ):  # RabbitMQ does not limit them so, and does not say it
            raise Skipped
        if of_channel and any(each.tag is None for each in opened.held):
            raise Skipped  # RabbitMQ counts what was got before; its source says that this "is not strictly right"
        opened.channel.basic_qos(0, count, of_channel)
        opened.prefetch = count

    def _pick(self, step: Step, at: int) -> Held:
        held = sorted(self.channel(step.channel).held, key=lambda each: (each.label, each.queue))
        if not held:
            raise Skipped
        return held[at % len(held)]

    def ack(self, step: Step, at: int, multiple: bool = False) -> list[str]:
        opened, picked = self.channel(step.channel), self._pick(step, at)
        if multiple and len({each.queue for each in opened.held}) > 1:  # in which order these came, no broker says
            raise Skipped
        settled = opened.held[: opened.held.index(picked) + 1] if multiple else [picked]
        picked.message.ack(multiple=multiple)
        opened.settled = picked.message.delivery_tag
        for each in settled:
            opened.held.remove(each)
        return [each.label for each in settled]

    def ack_all(self, step: Step) -> None:
        """As AMQP has it: 0 stands for all that the channel holds."""
        opened = self.channel(step.channel)
        opened.channel.basic_ack(0, multiple=True)
        opened.held.clear()

    def ack_again(self, step: Step) -> None:
        opened = self.channel(step.channel)
        if opened.settled is None:
            raise Skipped
        opened.channel.basic_ack(opened.settled)
        opened.channel.exchange_declare("amq.direct", "direct", passive=True)  # to hear of it

    def reject(self, step: Step, at: int, requeue: bool) -> str:
        picked = self._pick(step, at)
        picked.message.reject(requeue=requeue)
        self.channel(step.channel).held.remove(picked)
        return picked.label

    def recover(self, step: Step) -> None:
        opened = self.channel(step.channel)
        for queue in {each.queue for each in opened.held}:
            given = self.arguments.get(queue, {})
            if {"x-max-length", "x-max-length-bytes"} & given.keys() and given.get("x-overflow") in (None, "drop-head"):
                raise Skipped  # RabbitMQ drops at once what is too much: queue-arguments.md
        opened.channel.basic_recover(requeue=True)
        opened.held.clear()

    def close_channel(self, step: Step) -> None:
        self.channel(step.channel)
        self._close_channel(step.channel)

    def close_connection(self, step: Step) -> None:
        self.channel(step.channel)
        self._close_connection(CHANNELS[step.channel])


def _caught(error: Exception) -> str:
    """The name of the class as which a program catches it on any broker."""
    return next(each.__name__ for each in type(error).__mro__ if not each.__module__.startswith("kombu_fdb."))


def _answer(ask: Callable[[], object]) -> str:
    """The name of the error, or of what it returns."""
    try:
        return type(ask()).__name__
    except Exception as error:
        return type(error).__name__


def _label(body: Any) -> str:
    """Which message it is; of a large one also its size."""
    text = str(body)
    return f"{text.rstrip(FILLING)} of {len(text)}" if text.endswith(FILLING) else text


def _spread(place: tuple[str, ...], message: dict[str, Any]) -> Observation:
    return {(*place, field): value for field, value in message.items()}
