"""producer.py URL NUMBER: send something that is no order, then so many orders."""

from __future__ import annotations

import sys

from kombu import Connection
from orders import EXCHANGE, QUEUE

from kombu_fdb.transport import batched


def main(url: str, number: int) -> None:
    with Connection(url) as connection:
        producer = connection.Producer(exchange=EXCHANGE)
        producer.publish({"no": "order"}, routing_key="order.odd", declare=[QUEUE])
        with batched(producer):  # since kombu 5.7 also: producer.batch()
            for each in range(number):
                producer.publish(
                    {"order": each, "total": 9.5 * each},
                    routing_key=f"order.{'large' if each > 2 else 'small'}",
                    declare=[QUEUE],
                    headers={"fair_key": f"customer{each % 2}"},
                )
    print(f"sent an odd one and {number} orders")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
