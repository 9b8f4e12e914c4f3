"""Declaring exchanges, queues and bindings; and what ends with a connection.

When a connection is closed or collected, or its process dies, its consumers end, it loses the messages that it holds,
and its exclusive queues are deleted. To that end, an entry among the consumers of each exclusive queue stands for the
connection, under the process's session. The entry ends with the connection. If the process dies, its session is swept,
and the queue loses its last consumer like any other queue. Like RabbitMQ's, an exclusive queue that is also auto-delete
(kombu's are) is deleted earlier, with its last consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

from amqp.exceptions import PreconditionFailed
from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.topology import OWNER
from kombu_fdb.errors import ExchangeNotFound, InvalidArgument, QueueError
from kombu_fdb.model import Lease, SessionId
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.routing.tables import EXCHANGE_TYPES, Exchange, QueueDeclaration
from kombu_fdb.transport.errors import amqp_errors, not_found

P = ParamSpec("P")
R = TypeVar("R")

# -- declaring ---------------------------------------------------------------------------------------------------------


# ruff: noqa: A002 - the signatures are kombu's


def one_call(verb: Callable[P, R]) -> Callable[P, R]:
    """A channel's method that makes several calls to the store, within the deadline of one."""

    @wraps(verb)
    def method(*args: P.args, **kwargs: P.kwargs) -> R:
        channel: Any = args[0]
        run: Callable[[Callable[[], R]], R] = channel.engine.transactions.as_one
        return run(lambda: verb(*args, **kwargs))

    return method


class DeclaringChannel(virtual.Channel):
    """The part of a channel that handles no message."""

    #: For each exchange that was declared on this connection, the threads that have missed it since.
    missed: dict[str, set[int]]

    @property
    def engine(self) -> Engine:
        raise NotImplementedError

    def declare(self, declaration: QueueDeclaration) -> None:
        raise NotImplementedError

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
        """Raises 404 if ``passive`` and there is none, 406 if it exists and routes differently."""
        exchange = exchange or f"amq.{type or 'direct'}"
        if passive:
            if self.engine.inspect.exchange(exchange) is None:
                raise not_found(f"no exchange {exchange!r}", "exchange_declare")
            return
        declared = Exchange(exchange, _kind(type, arguments), bool(durable), bool(auto_delete), dict(arguments or {}))
        self.engine.queues.declare_exchange(declared)
        self.missed[exchange] = set()

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
        """Raises 404 if ``passive`` and there is none, 406 for an invalid argument. The reply counts ready messages."""
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            declaration = QueueDeclaration(queue, bool(durable), bool(exclusive), bool(auto_delete), arguments or {})
            self.declare(declaration)
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
        """Raises 404 for an unknown exchange, or queue."""
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
        """Delete ready and delayed messages. Returns how many; what consumers hold stays. Raises 404."""
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
        """Whether it was declared, or made by a message to its name."""
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
    """Raises 406 for a type we don't have."""
    kind = exchange_type or "direct"
    if kind == "x-delayed-message":  # RabbitMQ's plugin; here every queue can delay
        kind = (arguments or {}).get("x-delayed-type", "direct")
    if kind not in EXCHANGE_TYPES:
        raise PreconditionFailed(f"unknown exchange type {kind!r}", (40, 10), "Channel.exchange_declare")
    return kind


# -- exclusive queues --------------------------------------------------------------------------------------------------


#: A session has many connections; no two of its tags are the same.
_numbers = count(1)


class ExclusiveQueues:
    """The exclusive queues of one connection."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[SessionId, str, str]] = {}
        #: Whether the connection has ended: a declaration that is still under way must be undone.
        self._given_up = False

    def give_up(self) -> list[tuple[SessionId, str, str]]:
        """Note that all end. Returns the entries that stand for the connection: session, queue, tag."""
        self._given_up = True  # first: a declaration that begins later sees it
        return list(self._owners.values())

    def declare(self, client: Client, declaration: QueueDeclaration) -> None:
        """Declare a queue for this connection alone. Raises what the engine's ``declare`` raises."""
        client.in_session(partial(self._declare, client, declaration))

    def _declare(self, client: Client, declaration: QueueDeclaration, session: ClientSession) -> None:
        queue, session_id = declaration.name, session.session_id
        owner = self._owners.get(queue)
        if owner is None or owner[0] != session_id:
            owner = self._owners[queue] = session_id, queue, f"{OWNER}{next(_numbers)}"
        try:
            client.engine.queues.declare(declaration, owner=(session_id, owner[2]))
        except (QueueError, InvalidArgument):  # after other errors it may have been declared
            self._owners.pop(queue, None)
            raise
        finally:
            if self._given_up:  # another thread may have removed the entry before it was added
                client.later(partial(client.remove_consumer, *owner))

    def leave(self, client: Client) -> None:
        """End the connection's queues. Raises a ``StoreError``."""
        for owner in list(self._owners.values()):
            client.engine.queues.remove_consumer(*owner)
            self._owners.pop(owner[1], None)  # no other: another thread may be declaring it

    def forget(self) -> None:
        """Forget them: in a forked child they are the parent's."""
        self._owners.clear()


# -- what is left behind -----------------------------------------------------------------------------------------------


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
