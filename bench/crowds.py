"""Many processes at one broker: publishers at the same time, and consumers with nothing to do.

They are forked, before anything is connected, from one process that has imported all there is: fifty interpreters would
be busy starting for longer than the measurement takes.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

from kombu import Connection, Consumer
from workloads import QUEUE, celery_message, declared

_fork = multiprocessing.get_context("fork")
DEADLINE_S = 120.0
MINUTE_S = 60.0


def publishers(url: str, options: dict[str, Any], count: int, processes: int) -> dict[str, float]:
    """So many at the same time, ``count`` messages altogether."""
    gate = _fork.Barrier(processes + 1)

    def publish(_tell: Callable[[float], None]) -> None:
        with Connection(url, transport_options=options) as connection:
            producer, _ = declared(connection)
            messages = [celery_message(number) for number in range(count // processes)]
            gate.wait(DEADLINE_S)
            for body, properties in messages:
                producer.publish(body, routing_key=QUEUE, serializer="json", **properties)

    crowd = _Crowd(processes, publish)
    gate.wait(DEADLINE_S)
    began = time.perf_counter()
    crowd.join()
    return {f"publish{processes}": count // processes * processes / (time.perf_counter() - began)}


def idle(url: str, options: dict[str, Any], seconds: int, processes: int) -> dict[str, float]:
    """CPU seconds and transactions per minute of so many consumers of an empty queue, all together."""
    gate = _fork.Barrier(processes)

    def wait(tell: Callable[[float], None]) -> None:
        with Connection(url, transport_options=options) as connection:
            _, queue = declared(connection)
            begun = _count_transactions(connection)
            with Consumer(connection, [queue], on_message=lambda message: message.ack()):
                _drain(connection, 1.0)  # until it has found nothing, and sleeps
                gate.wait(DEADLINE_S)
                before, transactions = _cpu_s(), len(begun)
                _drain(connection, seconds)
                tell(_cpu_s() - before)
                tell(len(begun) - transactions)

    told = _Crowd(processes, wait).join()
    scale = MINUTE_S / seconds
    return {f"idle{processes}_cpu_s": scale * sum(told[::2]), f"idle{processes}_ops": scale * sum(told[1::2])}


def _drain(connection: Connection, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection.drain_events(timeout=left)
        except TimeoutError:
            return


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _count_transactions(connection: Connection) -> list[None]:
    """One entry for each transaction from now on; of other brokers there are none."""
    begun: list[None] = []
    client = getattr(connection.default_channel, "client", None)
    database = getattr(client, "database", None)
    if database is not None:
        begin = database.begin

        def counting(**given: Any) -> Any:
            begun.append(None)
            return begin(**given)

        database.begin = counting
    return begun


class _Crowd:
    """Processes that do the same; each may tell numbers, which come back in the order of the processes."""

    def __init__(self, number: int, work: Callable[[Callable[[float], None]], None]) -> None:
        self._told = [_fork.SimpleQueue() for _ in range(number)]
        self._processes = [_fork.Process(target=work, args=(told.put,)) for told in self._told]
        for process in self._processes:
            process.start()

    def join(self) -> list[float]:
        for process in self._processes:
            process.join(DEADLINE_S)
            if process.exitcode != 0:
                raise SystemExit(f"a process of the crowd ended with {process.exitcode}")
        numbers: list[float] = []
        for told in self._told:
            while not told.empty():
                numbers.append(told.get())
        return numbers
