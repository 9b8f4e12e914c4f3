"""consumer.py URL NUMBER: print so many orders, reject what is none."""

from __future__ import annotations

import sys
from typing import Any

from kombu import Connection, Consumer, Message
from kombu.mixins import ConsumerMixin
from orders import QUEUE


class Orders(ConsumerMixin):
    """Reconnects by itself if the store was away."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.left = number

    def get_consumers(self, consumer: type[Consumer], _channel: Any) -> list[Consumer]:
        return [consumer([QUEUE], callbacks=[self.on_order], accept=["json"], prefetch_count=10)]

    def on_order(self, body: dict[str, Any], message: Message) -> None:
        if "order" not in body:
            print(f"rejected {body}")
            message.reject()
            return
        print(f"order {body['order']} by {message.headers['fair_key']}")
        message.ack()
        self.left -= 1
        self.should_stop = self.left == 0


if __name__ == "__main__":
    with Connection(sys.argv[1]) as opened:
        Orders(opened, int(sys.argv[2])).run()
