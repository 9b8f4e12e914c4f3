"""How much of our code a message passes, and what that costs beside a floor; through public interfaces only.

``calls``: Python calls into the packages' own files, of all threads, for each message; ``files``: distinct ones. Both
for a process that has published, or consumed, before.
``floor``: the same durable work (rows, locks, a look at the file's names) as one function over ``sqlite3`` with kombu
in front, in the same process and interleaved, so that the ratio holds on a busy machine.

usage: python bench/weight.py [--messages 3000]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sqlite3
import statistics
import struct
import sys
import tempfile
import threading
import time
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

from kombu import Connection, Consumer, Producer, Queue
from kombu.transport import memory

import celery_fdb
import kombu_fdb.transport

ROOTS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (kombu_fdb, celery_fdb))
ROUNDS = 5
TRACED = 200
blob = bytearray
pack_stamp = struct.Struct(">QH").pack


def celery_message(number: int) -> tuple[list, dict]:
    """What Celery hands to kombu for a plain task."""
    task_id = f"11111111-2222-3333-4444-{number:012d}"
    headers = {
        "lang": "py",
        "task": "shop.orders.tasks.send_confirmation",
        "id": task_id,
        **dict.fromkeys(("shadow", "eta", "expires", "group", "group_index", "parent_id", "stamped_headers")),
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "argsrepr": f"({number}, 'customer@example.org')",
        "kwargsrepr": "{'language': 'en', 'attach_invoice': True}",
        "origin": "gen4242@web-1.example.org",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamps": {},
    }
    embed = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
    body = [[number, "customer@example.org"], {"language": "en", "attach_invoice": True}, embed]
    return body, {"headers": headers, "correlation_id": task_id, "reply_to": "b6c6ee8a-0d1f-3c8d-9a3c-2f62fd0d6b7f"}


class Trace:
    """Counts calls into our files while it is open."""

    def __init__(self) -> None:
        self.calls, self.files = 0, set()

    def __call__(self, frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOTS):
            self.calls += 1
            self.files.add(frame.f_code.co_filename)

    def __enter__(self) -> Self:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


class Floor:
    """One table as the store's: rows in the order in which they came, an index of keys; two locks around each write."""

    def __init__(self, folder: str, *, bell: bool = True) -> None:
        self.path, self.bell = f"{folder}/floor.db", bell
        self.connection = sqlite3.connect(self.path, isolation_level=None, cached_statements=200)
        for pragma in ("journal_mode=wal", "synchronous=normal"):
            self.connection.execute(f"PRAGMA {pragma}").fetchall()
        self.connection.execute("CREATE TABLE kv (n INTEGER PRIMARY KEY, k BLOB UNIQUE NOT NULL, v BLOB)")
        self.connection.execute("INSERT INTO kv (k, v) VALUES (?, 0)", (blob(b"version"),))
        self.gate, self.main = (os.open(folder + name, os.O_CREAT | os.O_RDWR) for name in ("/gate", "/lock"))
        self.cursor, self.stored, self.held = self.connection.cursor(), 0, []

    def begin(self) -> None:
        fcntl.flock(self.gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(self.main, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(self.gate, fcntl.LOCK_UN)
        self.cursor.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        os.stat(self.path)  # noqa: PTH116 - as the store does it
        os.stat(f"{self.path}-wal")  # noqa: PTH116
        self.cursor.execute("COMMIT")
        fcntl.flock(self.main, fcntl.LOCK_UN)

    def get(self, *keys: bytes) -> dict:
        marks = ", ".join("?" * len(keys))
        return dict(self.cursor.execute(f"SELECT k, v FROM kv WHERE k IN ({marks})", [*map(blob, keys)]).fetchall())

    def publish(self, body: bytes, properties: dict, headers: dict, content_type: str) -> None:
        names = [properties.get("correlation_id"), properties.get("reply_to"), content_type, headers]
        self.store(json.dumps(names).encode() + body, headers["id"])

    def store(self, payload: bytes, task_id: str) -> None:
        self.begin()
        found = self.get(b"version", b"count")
        version = found[b"version"] + 1
        stamp = pack_stamp(version, 0)
        self.stored += 1
        rows = (
            *(blob(b"version"), version),
            *(blob(b"q/items/" + stamp), blob(payload)),
            *(blob(b"index/" + task_id.encode()), blob(stamp)),
            *(blob(b"count"), found.get(b"count", 0) + 1),
            *((blob(b"last"), self.stored) if self.bell else ()),
        )
        marks = ", ".join(["(?, ?)"] * (len(rows) // 2))
        self.cursor.execute(f"INSERT INTO kv (k, v) VALUES {marks} ON CONFLICT (k) DO UPDATE SET v=excluded.v", rows)
        self.end()

    def fill(self, messages: list) -> None:
        self.connection.execute("BEGIN")
        for number, (_, options) in enumerate(messages):
            value = b"[]" + options["correlation_id"].encode() + b"x" * 1100
            row = blob(b"q/items/" + pack_stamp(number, 0)), blob(value)
            self.cursor.execute("INSERT INTO kv (k, v) VALUES (?, ?)", row)
        self.connection.execute("COMMIT")

    def claim(self, window: int) -> int:
        """Lease so many, and delete those of the claim before. Returns how many there were."""
        self.begin()
        self.get(b"session", b"count", b"mark", b"leased")
        rows = self.cursor.execute(
            "SELECT k, v FROM kv WHERE k>=? AND k<? ORDER BY k LIMIT ?", (blob(b"q/items/"), blob(b"q/items0"), window)
        ).fetchall()
        gone = [(blob(key),) for key, _ in rows]
        gone += [(blob(key),) for lease, task in self.held for key in (lease, b"index/" + task)]
        self.cursor.executemany("DELETE FROM kv WHERE k=?", gone)
        self.held = [(b"lease/session-1/" + key[-10:], value[2:38]) for key, value in rows]
        kept = [
            (blob(lease), blob(value + b"queue and place"))
            for (lease, _), (_, value) in zip(self.held, rows, strict=True)
        ]
        kept += [(blob(b"leased"), window), (blob(b"mark"), window)]
        self.cursor.executemany("INSERT INTO kv (k, v) VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v=excluded.v", kept)
        self.end()
        return len(rows)


def over(floor: Floor) -> Connection:
    """Kombu's own producer in front of the floor."""

    class Channel(memory.Channel):
        def basic_publish(self, message: Any, *_: Any, **__: Any) -> None:
            body = message["body"]
            body = body.encode() if isinstance(body, str) else body
            floor.publish(body, message["properties"], message["headers"], message["content-type"])

    return Connection(transport=type("Transport", (memory.Transport,), {"Channel": Channel}))


class Side:
    """A connection with one queue."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.channel = connection, connection.channel()
        self.queue = Queue("weight", routing_key="weight")(self.channel)
        self.queue.declare()
        self.producer = Producer(self.channel)

    def publish(self, messages: list) -> float:
        """CPU time of a message, in microseconds."""
        began = time.process_time()
        for body, options in messages:
            self.producer.publish(body, routing_key="weight", serializer="json", **options)
        return (time.process_time() - began) / len(messages) * 1e6

    def consume(self, number: int, prefetch: int) -> float:
        """Likewise, acknowledged."""
        left = number

        def receive(_body: Any, message: Any) -> None:
            nonlocal left
            message.ack()
            left -= 1

        began = time.process_time()
        with Consumer(
            self.channel,
            [self.queue],
            callbacks=[receive],
            prefetch_count=prefetch,
            accept=["json"],
            auto_declare=False,
        ):
            while left > 0:
                self.connection.drain_events(timeout=10)
        return (time.process_time() - began) / number * 1e6


def compare(ours: list[float], floors: list[float]) -> str:
    ratio = statistics.median(each / floor for each, floor in zip(ours, floors, strict=True))
    return f"cpu {statistics.median(ours):.0f} us  floor {statistics.median(floors):.0f} us  ratio {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=3000)
    messages = [celery_message(number) for number in range(parser.parse_args().messages)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Connection(f"fdb+sqlite:///{folder}/broker.db") as connection,
        over(Floor(folder)) as floored,
        Connection("memory://") as in_memory,
    ):
        ours, floor, kombus = Side(connection), Side(floored), Side(in_memory)
        ours.publish(messages[:TRACED]), floor.publish(messages[:TRACED])
        with Trace() as trace:
            ours.publish(messages[:TRACED])
        # Each task has an id of its own: of one that it knows, the floor would only change a row.
        numbers = count(len(messages))
        rounds = [[celery_message(number) for number in islice(numbers, len(messages))] for _ in range(ROUNDS)]
        both = [(ours.publish(each), floor.publish(each)) for each in rounds]
        print(
            f"publish   calls {trace.calls / TRACED:.0f}  files {len(trace.files)}  {compare(*zip(*both, strict=True))}"
        )
        ours.consume(TRACED, 8)  # a session begins
        with Trace() as trace:
            ours.consume(TRACED, 8)
        print(f"consume   calls {trace.calls / TRACED:.0f}  files {len(trace.files)}  (prefetch 8, with acks)")
        ours.queue.purge()
        for prefetch in (8, 64):
            rows = []
            for number in range(ROUNDS):
                ours.publish(messages), kombus.publish(messages)
                claims = Floor(tempfile.mkdtemp(prefix=f"{number}-", dir=folder))
                claims.fill(messages)
                took = ours.consume(len(messages), prefetch)
                least = kombus.consume(len(messages), prefetch)
                began = time.process_time()
                while claims.claim(prefetch // 2):
                    pass
                rows.append((took, least + (time.process_time() - began) / len(messages) * 1e6))
            print(f"consume   prefetch {prefetch}  {compare(*zip(*rows, strict=True))}")


if __name__ == "__main__":
    main()
