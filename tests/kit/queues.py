"""What tests do with a queue through a connection of kombu's."""

from __future__ import annotations

from kombu.connection import Connection

from kombu_fdb.transport import batched


def fill(connection: Connection, number: int, queue: str = "q", first: int = 0) -> None:
    producer = connection.Producer(auto_declare=False)
    with batched(producer):
        for each in range(first, first + number):
            producer.publish(each, routing_key=queue)


def drain_all(connection: Connection) -> None:
    while True:
        try:
            connection.drain_events(timeout=0)
        except TimeoutError:
            return
