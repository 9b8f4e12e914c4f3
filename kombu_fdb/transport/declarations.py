"""Declaring exchanges, queues and bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from amqp.exceptions import PreconditionFailed
from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import ExchangeNotFound
from kombu_fdb.routing.tables import EXCHANGE_TYPES, Exchange, QueueDeclaration
from kombu_fdb.transport.connection import BrokerConnection
from kombu_fdb.transport.errors import amqp_errors, not_found

P = ParamSpec("P")
R = TypeVar("R")

# ruff: noqa: A002 - the signatures are kombu's


def one_call(verb: Callable[P, R]) -> Callable[P, R]:
    """Wrap a channel's method so that its calls to the store share the deadline of one."""

    @wraps(verb)
    def method(*args: P.args, **kwargs: P.kwargs) -> R:
        channel: Any = args[0]
        run: Callable[[Callable[[], R]], R] = channel.engine.transactions.as_one
        return run(lambda: verb(*args, **kwargs))

    return method


class Declarations(virtual.Channel):
    """The part of a channel that handles no message."""

    def __init__(self, connection: BrokerConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.transport = connection

    @property
    def engine(self) -> Engine:
        """The engine for everything that does not depend on a session; in a forked child, the child's own."""
        return self.transport.engine

    # -- exchanges -------------------------------------------------------------------------------------------------

    @amqp_errors("exchange_declare")
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
        """Raises 404 if ``passive`` and it is missing, 406 if it exists and routes differently."""
        exchange = exchange or f"amq.{type or 'direct'}"
        if passive:
            if self.engine.inspect.exchange(exchange) is None:
                raise not_found(f"no exchange {exchange!r}", "exchange_declare")
            return
        declared = Exchange(exchange, _kind(type, arguments), bool(durable), bool(auto_delete), dict(arguments or {}))
        self.engine.queues.declare_exchange(declared)
        self.transport.missed[exchange] = set()

    @amqp_errors("exchange_delete")
    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete it with its bindings; the queues stay."""
        if not self.engine.queues.delete_exchange(exchange, if_unused=if_unused):
            raise PreconditionFailed(f"exchange {exchange!r} is in use", (40, 20), "Channel.exchange_delete")

    @amqp_errors("get_exchanges")
    def get_exchanges(self) -> list[str]:
        return [each.name for each in self.engine.inspect.exchanges()]

    @amqp_errors("get_table")
    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """``(routing key, "", queue)`` of each binding; empty for an unknown exchange."""
        return [
            (routing_key, "", queue) for name, queue, routing_key in self.engine.inspect.bindings() if name == exchange
        ]

    def list_bindings(self) -> Iterator[tuple[str, str, str]]:
        """``(queue, exchange, routing key)``."""
        return ((queue, exchange, routing_key) for exchange, queue, routing_key in self.engine.inspect.bindings())

    @amqp_errors("typeof")
    def typeof(self, exchange: str, default: str = "direct") -> Any:
        declared = self.engine.inspect.exchange(exchange)
        return self.exchange_types[declared.type if declared else default]

    @amqp_errors("_lookup")
    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        try:
            queues = self.engine.inspect.route(exchange, routing_key)
        except ExchangeNotFound:
            queues = []
        return queues or ([default] if default else [])

    # -- queues ----------------------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Turn ``Queue(expires=..., message_ttl=..., max_length=...)`` into AMQP's arguments."""
        return dict(to_rabbitmq_queue_arguments(arguments, **options))

    @amqp_errors("queue_declare")
    @one_call
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
        """Raises 404 if ``passive`` and it is missing, 406 for an invalid argument. The reply counts ready messages."""
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            declaration = QueueDeclaration(queue, bool(durable), bool(exclusive), bool(auto_delete), arguments or {})
            self.transport.declare(declaration)
        else:
            self._require(queue, "queue_declare")
        return queue_declare_ok_t(queue, self._size(queue), self.engine.inspect.consumer_count(queue))

    @amqp_errors("queue_delete")
    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        """Delete it with its messages and bindings. Raises 406 if a condition forbids it."""
        deleted = self.engine.queues.delete(queue, if_unused=if_unused, if_empty=if_empty)
        if deleted is None:
            raise PreconditionFailed(f"queue {queue!r} is in use or not empty", (50, 40), "Channel.queue_delete")
        return deleted

    @amqp_errors("queue_bind")
    @one_call
    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raises 404 for an unknown exchange or queue."""
        self._require(queue, "queue_bind")
        self.engine.queues.bind(queue, exchange or "amq.direct", routing_key or "")

    @amqp_errors("queue_unbind")
    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.engine.queues.unbind(queue, exchange or "amq.direct", routing_key or "")

    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        """Delete ready and delayed messages; those that consumers hold stay. Returns how many. Raises 404."""
        self._require(queue, "queue_purge")
        return self.engine.queues.purge(queue)

    def after_reply_message_received(self, queue: str) -> None:
        self.queue_delete(queue)

    # Names of the base class that monitoring tools call.

    def _size(self, queue: str) -> int:
        return self.engine.inspect.counts(queue).ready

    def _purge(self, queue: str) -> int:
        return self.engine.queues.purge(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        """Whether it was declared, or created by a message to its name."""
        return self.engine.inspect.exists(queue)

    def _require(self, queue: str, method: str) -> None:
        """Raises 404. A queue's dead-letter queue needs no declaration, even before its first dead letter."""
        if not (queue.endswith(DEAD_SUFFIX) or self._has_queue(queue)):
            raise not_found(f"no queue {queue!r}. Declare it, or publish to it", method)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self.engine.queues.delete(queue)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.basic_publish(message, "", queue, **kwargs)


def _kind(exchange_type: str, arguments: dict[str, Any] | None) -> str:
    """Raises 406 for an unsupported type."""
    kind = exchange_type or "direct"
    if kind == "x-delayed-message":  # RabbitMQ's plugin; here every queue can delay
        kind = (arguments or {}).get("x-delayed-type", "direct")
    if kind not in EXCHANGE_TYPES:
        raise PreconditionFailed(f"unknown exchange type {kind!r}", (40, 10), "Channel.exchange_declare")
    return kind
