"""One measurement of one broker, in a process of its own: ``python workloads.py WORKLOAD URL --count N``.

Prints one JSON object. Every message is what Celery sends for a task with a few arguments, about 900 B.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from kombu import Connection, Consumer, Exchange, Producer, Queue

HERE = Path(__file__).parent
QUEUE = "bench"
STAMP = struct.Struct("<dd")
PREFETCH = 200
DEADLINE_S = 120.0
#: Who runs a workload: a connection, it itself, many processes (``crowds.py``), workers (``crews.py``).
CONNECTED = ("publish", "named", "batch", "consume")
ALONE = ("tasks", "naps", "latency")
CROWDS = {
    "publish4": ("publishers", 4),
    "publish16": ("publishers", 16),
    "idle1": ("idle", 1),
    "idle50": ("idle", 50),
}
#: Workers, their pool, its size.
CREWS = {
    "workers1": (1, "prefork", 4),
    "workers2": (2, "prefork", 4),
    "workers4": (4, "prefork", 4),
    "solo": (1, "solo", 1),
    "threads": (1, "threads", 4),
    "gevent": (1, "gevent", 50),
}


def celery_message(number: int) -> tuple[Any, dict[str, Any]]:
    """Body and properties of protocol 2, as ``app.amqp.send_task_message`` makes them."""
    task_id = f"11111111-2222-3333-4444-{number:012d}"
    headers = {
        "lang": "py", "task": "shop.orders.tasks.send_confirmation", "id": task_id, "shadow": None, "eta": None,
        "expires": None, "group": None, "group_index": None, "retries": 0, "timelimit": [None, None],
        "root_id": task_id, "parent_id": None, "argsrepr": f"({number}, 'customer@example.org')",
        "kwargsrepr": "{'language': 'en', 'attach_invoice': True}", "origin": "gen4242@web-1.example.org",
        "ignore_result": False, "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    body = [[number, "customer@example.org"], {"language": "en", "attach_invoice": True},
            {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]  # fmt: skip
    return body, {"headers": headers, "correlation_id": task_id, "reply_to": "b6c6ee8a-0d1f-3c8d-9a3c-2f62fd0d6b7f"}


def key(*message: Any) -> int:
    """One of a thousand, for the transport option ``fair_key``."""
    return crc32(message[-1]["id"].encode()) % 1000


def publish(connection: Connection, count: int) -> dict[str, float]:
    producer, _ = declared(connection, purge=True)
    messages = [celery_message(number) for number in range(count)]
    began = time.perf_counter()
    for body, properties in messages:
        producer.publish(body, routing_key=QUEUE, serializer="json", **properties)
    return {"rate": count / (time.perf_counter() - began)}


def named(connection: Connection, count: int) -> dict[str, float]:
    """To an exchange that has a name, to which one queue is bound."""
    producer, _ = declared(connection, purge=True)
    exchange = Exchange(f"{QUEUE}.named", type="direct")
    Queue(QUEUE, exchange, routing_key=QUEUE)(producer.channel).declare()
    messages = [celery_message(number) for number in range(count)]
    began = time.perf_counter()
    for body, properties in messages:
        producer.publish(body, exchange=exchange, routing_key=QUEUE, serializer="json", **properties)
    return {"rate": count / (time.perf_counter() - began)}


def batch(connection: Connection, count: int) -> dict[str, float]:
    producer, _ = declared(connection, purge=True)
    messages = [celery_message(number) for number in range(count)]
    began = time.perf_counter()
    _publish_in_batches(producer, messages)
    return {"rate": count / (time.perf_counter() - began)}


def consume(connection: Connection, count: int) -> dict[str, float]:
    """Consume and acknowledge what waits, with a prefetch of 200."""
    producer, queue = declared(connection, purge=True)
    _publish_in_batches(producer, [celery_message(number) for number in range(count)])
    left = [count]

    def on_message(message: Any) -> None:
        message.ack()
        left[0] -= 1

    channel = connection.channel()
    consumer = Consumer(channel, [queue], on_message=on_message)
    consumer.qos(prefetch_count=PREFETCH)
    began = time.perf_counter()
    with consumer:
        while left[0] > 0:
            connection.drain_events(timeout=DEADLINE_S)
    return {"rate": count / (time.perf_counter() - began)}


def declared(connection: Connection, *, purge: bool = False) -> tuple[Producer, Queue]:
    channel = connection.channel()
    queue = Queue(QUEUE, routing_key=QUEUE)(channel)
    queue.declare()
    if purge:
        queue.purge()
    return Producer(channel), queue


def _publish_in_batches(producer: Producer, messages: list[tuple[Any, dict[str, Any]]]) -> None:
    with producer.batch(1000):
        for body, properties in messages:
            producer.publish(body, routing_key=QUEUE, serializer="json", **properties)


# -- Celery ------------------------------------------------------------------------------------------------------------


def tasks(url: str, options: dict[str, Any], count: int) -> dict[str, float]:
    """Empty tasks that wait in the queue when the worker starts: prefork, 2 children, late acknowledgement."""
    return _worked_off(url, options, count, "bench.noop", 2)


def naps(url: str, options: dict[str, Any], count: int) -> dict[str, float]:
    """The same with 4 children, and tasks that sleep for 50 ms: 80 a second, if no child waits for the broker."""
    return _worked_off(url, options, count, "bench.nap", 4)


def _worked_off(url: str, options: dict[str, Any], count: int, task: str, children: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        app = app_of(url, options, out)
        preload(app, count, task)
        worker = Worker(out, ["-c", str(children)])
        with worker:
            before, cpu_s = len(await_stamps(out, count // 10)), worker.cpu_s
            stamps = await_stamps(out, count)
            cpu_s = worker.cpu_s - cpu_s
    return {"rate": steady_rate(stamps), "task_us": 1e6 * cpu_s / max(1, count - before)}


def steady_rate(stamps: list[tuple[float, float]]) -> float:
    """Tasks per second, without the first tenth: it goes by while the pool starts."""
    starts = sorted(started for _, started in stamps)
    steady = starts[len(starts) // 10 :]
    return (len(steady) - 1) / (steady[-1] - steady[0])


def latency(url: str, options: dict[str, Any], count: int) -> dict[str, float]:
    """From ``delay()`` to the start of the task, one task at a time on an idle worker."""
    with tempfile.TemporaryDirectory() as out:
        app = app_of(url, options, out)
        app.control.purge()
        with Worker(out), app.pool.acquire(block=True) as connection, app.amqp.Producer(connection) as producer:
            app.send_task("bench.noop", (time.time(),), producer=producer)
            await_stamps(out, 1)  # the worker is up
            for sent in range(1, count + 1):
                app.send_task("bench.noop", (time.time(),), producer=producer)
                await_stamps(out, sent + 1)
            stamps = await_stamps(out, count + 1)
    waits = sorted(1000 * (started - sent) for sent, started in stamps)[:count]
    return {"p50_ms": statistics.median(waits), "p99_ms": waits[int(0.99 * len(waits))]}


def app_of(url: str, options: dict[str, Any], out: str) -> Any:
    os.environ.update(BENCH_URL=url, BENCH_OPTIONS=json.dumps(options), BENCH_OUT=out)
    sys.path.insert(0, str(HERE))
    from celery_app import app

    return app


def preload(app: Any, count: int, task: str = "bench.noop") -> None:
    with app.pool.acquire(block=True) as connection, app.amqp.Producer(connection) as producer:
        app.amqp.queues["celery"](connection.default_channel).declare()
        connection.default_channel.queue_purge("celery")
        with producer.batch(1000):
            for _ in range(count):
                app.send_task(task, (time.time(),), producer=producer)


class Worker:
    """A real worker in a process group of its own."""

    def __init__(self, out: str, flags: Sequence[str] = ("-c", "2")) -> None:
        self._log = Path(out, "worker.log").open("ab")
        self._flags = flags

    def __enter__(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "-l", "WARNING", *self._flags]
        self._process = subprocess.Popen(
            command, cwd=HERE, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def cpu_s(self) -> float:
        """What it has spent, with its children."""
        return _cpu_s(self._process.pid)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has started and still has."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(
        _cpu_s(int(child)) for child in children
    )


def await_stamps(out: str, count: int) -> list[tuple[float, float]]:
    """Wait for ``count`` records of the children: (sent, started)."""
    deadline = time.monotonic() + DEADLINE_S
    tick = threading.Event()
    while True:
        if sum(path.stat().st_size for path in Path(out).glob("*.stamps")) >= count * STAMP.size:
            data = b"".join(path.read_bytes() for path in Path(out).glob("*.stamps"))
            return list(STAMP.iter_unpack(data[: len(data) // STAMP.size * STAMP.size]))
        if time.monotonic() > deadline:
            raise SystemExit(f"tasks did not run:\n{Path(out, 'worker.log').read_text()[-2000:]}")
        tick.wait(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=[*CONNECTED, *ALONE, *CROWDS, *CREWS])
    parser.add_argument("url")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--count", type=int, default=1000)
    given = parser.parse_args()
    if given.workload in CROWDS:
        import crowds

        verb, processes = CROWDS[given.workload]
        result = getattr(crowds, verb)(given.url, given.options, given.count, processes)
    elif given.workload in CREWS:
        import crews

        result = crews.work_off(given.url, given.options, given.count, given.workload)
    elif given.workload in ALONE:
        result = globals()[given.workload](given.url, given.options, given.count)
    else:
        with Connection(given.url, transport_options=given.options) as connection:
            result = globals()[given.workload](connection, given.count)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
