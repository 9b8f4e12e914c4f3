"""What a real RabbitMQ does to a program."""

from __future__ import annotations

from typing import Any

from amqp.exceptions import MessageNacked
from kombu.messaging import Producer

from kit.parity.broker import SHORT_LIVED, Broker
from kit.parity.program import EXCHANGES, QUEUES
from kit.rabbitmq import Node

#: Looks in a row at which nothing has changed. A message passes from queue to queue between two looks.
CALM_LOOKS = 2
#: Likewise where a quorum queue is, whose log a message passes first.
QUORUM_CALM_LOOKS = 8


class RabbitMQ(Broker):
    """Confirms are on, so a publish that returned has come to its queues."""

    name = "RabbitMQ"

    def __init__(self, node: Node, *, patience_s: float) -> None:
        super().__init__(node.url, {"confirm_publish": True}, patience_s=patience_s)
        self._sweep()

    def has_closed(self, channel: str, error: Exception) -> bool:
        # What the client opens again at once (py-amqp does) is another channel.
        is_closing = isinstance(error, self.observer().connection.channel_errors)
        return is_closing and not isinstance(error, MessageNacked)

    def settle(self) -> None:
        """All channels and queues have answered, several times, and nothing has changed meanwhile."""
        calm = 0
        has_quorum = any(each.get("x-queue-type") == "quorum" for each in self.arguments.values())
        looks = QUORUM_CALM_LOOKS if has_quorum else CALM_LOOKS

        def is_calm() -> bool:
            nonlocal calm
            before = len(self._arrived), self.counts
            self.counts = self.look()
            for opened in self.opened.values():
                opened.channel.exchange_declare("amq.direct", "direct", passive=True)  # also reads what was delivered
            moving = any(self.is_moving(queue, found[0]) for queue, found in self.counts.items() if found)
            calm = 0 if moving or before != (len(self._arrived), self.counts) else calm + 1
            return calm >= looks

        self.until(is_calm)

    def is_gone(self, queue: str) -> bool:
        returned: list[Any] = []
        asking = Producer(self.observer(), auto_declare=False, on_return=lambda *given: returned.append(given))
        asking.publish("is it there?", exchange="", routing_key=queue, mandatory=True)
        return bool(returned)

    def close(self) -> None:
        super().close()
        self._sweep()
        super().close()

    def _sweep(self) -> None:
        """Nothing of a program may stay for the next one."""
        for name in [*self.connections]:
            if name != "observer":
                self._close_connection(name)
        channel = self.observer()
        for queue in (*QUEUES, SHORT_LIVED):
            channel.queue_delete(queue)
        for exchange in EXCHANGES:
            channel.exchange_delete(exchange)
