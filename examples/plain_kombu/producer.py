"""producer.py URL NUMBER: send so many orders, and one that nobody can read."""

from __future__ import annotations

import sys

from kombu import Connection
from orders import EXCHANGE, QUEUE


def main(url: str, number: int) -> None:
    with Connection(url) as connection:
        producer = connection.Producer(exchange=EXCHANGE)
        with producer.batch():
            for each in range(number):
                producer.publish(
                    {"order": each, "total": 9.5 * each},
                    routing_key=f"order.{'large' if each > 2 else 'small'}",
                    declare=[QUEUE],
                    headers={"fair_key": f"customer{each % 2}"},
                )
        producer.publish({"no": "order"}, routing_key="order.odd", declare=[QUEUE])
    print(f"sent {number} orders and an odd one")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
