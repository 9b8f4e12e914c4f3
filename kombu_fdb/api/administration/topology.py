"""Exchanges and bindings, for programs that publish through Kombu and are arranged from here."""

from __future__ import annotations

from kombu_fdb.api.arguments import check_name
from kombu_fdb.api.connection import Connection
from kombu_fdb.routing.tables import Exchange

__all__ = ["Topology"]


class Topology:
    """Get it from :attr:`.broker.Broker.topology`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def exchanges(self) -> list[Exchange]:
        """Those that were declared."""
        return self._connection.engine.inspect.exchanges()

    def bindings(self) -> list[tuple[str, str, str]]:
        """``(exchange, queue, routing key)`` of every binding."""
        return self._connection.engine.inspect.bindings()

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message would reach now. Raises ``ExchangeNotFound``."""
        return self._connection.engine.inspect.route(_exchange(exchange), check_name("routing key", routing_key))

    def declare_exchange(self, exchange: Exchange) -> None:
        """Create an exchange. Raises ``NotEquivalent`` if it has another type, ``QueueError`` for a long name."""
        self._connection.engine.queues.declare_exchange(exchange)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange and its bindings; False if refused. The queues stay."""
        return self._connection.engine.queues.delete_exchange(_exchange(name), if_unused=if_unused)

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Raises ``ExchangeNotFound``, and ``QueueError`` for a key of more than AMQP's 255 bytes. Idempotent."""
        self._connection.engine.queues.bind(queue, _exchange(exchange), routing_key)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Idempotent."""
        names = check_name("queue's name", queue), _exchange(exchange), check_name("routing key", routing_key)
        self._connection.engine.queues.unbind(*names)


def _exchange(name: str) -> str:
    return check_name("exchange's name", name)
