"""What producer and consumer agree on."""

from __future__ import annotations

from kombu import Exchange, Queue

EXCHANGE = Exchange("orders", type="topic")
QUEUE = Queue("orders", EXCHANGE, routing_key="order.#")
