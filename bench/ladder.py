"""What a publish costs over its floor, step by step: the floor of ``weight.py``, extended until it is a publish.

Each step stores the same rows on SQLite with kombu in front, and does one thing more as the transport does it:

* ``floor``: one function over ``sqlite3``;
* ``envelope``: what the publisher wrote is checked, and its payload made (``transport/envelope.py``);
* ``transaction``: rows are noted and written by the store's transaction, behind its write lock, within a deadline, safe
  from an exception at any line; consumers are woken (``store/sqlite``);
* ``work``: repeated until it commits, with its counters and totals (``engine/transactions.py``);
* ``publisher``: routed, admitted and not stored twice (``engine/messages/publish.py``);
* ``transport``: by a channel, whose process may have forked and whose connection may have been closed.

All steps take turns in one process, so that their differences hold on a busy machine.

usage: python bench/ladder.py [--messages 2000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from typing import Any

from kombu import Connection
from kombu.transport import memory
from weight import Floor, Side, celery_message, over

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.message import Subqueue, put_ready
from kombu_fdb.engine.stored.work import PUBLISHED, Work
from kombu_fdb.engine.transactions import Environment, Transactions
from kombu_fdb.keyspace.codec import Record
from kombu_fdb.model import NO_PRIORITY, Publication
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.transport.envelope import encode

ROUNDS = 9
TIMEOUT_S = 5.0

encoded = partial(encode, exchange="", routing_key="weight", now_ms=lambda: 0)


def behind(publish: Callable[[Publication], object]) -> Connection:
    """Kombu's own producer in front of it, and the transport's envelope."""

    class Channel(memory.Channel):
        def basic_publish(self, message: Any, *_: Any, **__: Any) -> None:
            publish(encoded(message))

    return Connection(transport=type("Transport", (memory.Transport,), {"Channel": Channel}))


def record_of(publication: Publication, now_ms: int) -> Record:
    payload, task_id = publication.payload, publication.task_id
    return Record(random_id(), now_ms, 0, 0, 0, len(payload), payload, (), "", 0, task_id, NO_PRIORITY)


def to_floor(floor: Floor, publication: Publication) -> None:
    floor.store(publication.payload, publication.task_id)


def by_transaction(database: SqliteDatabase, run: Transactions, publication: Publication) -> None:
    record = record_of(publication, run.clock.wall_ms())
    keys, tr = run.keys, database.begin(timeout_s=TIMEOUT_S)
    prefix = keys.items("weight", "", keys.rank(0)) + b"\x33"
    tr.set_versionstamped_key(prefix, b"\x00\x00", record.encode())
    tr.set_versionstamped_key(keys.task(record.task_id) + b"\x33", b"\x00\x00", prefix[len(keys.prefix) :])
    tr.add(keys.count("weight", "ready"), 1)
    tr.set_versionstamped_value(keys.bell("weight"))
    tr.commit()


def by_work(run: Transactions, publication: Publication) -> None:
    def verb(work: Work) -> None:
        work.effects.note("weight", PUBLISHED, "")
        put_ready(work, Subqueue("weight", "", work.keys.rank(0)), record_of(publication, work.now_ms))

    run.write(verb, TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2000)
    messages = parser.parse_args().messages
    environment = Environment(SystemClock(), random_id, random.Random(1))
    with tempfile.TemporaryDirectory() as folder:
        databases = [SqliteDatabase.open(f"{folder}/{name}.db") for name in ("transaction", "work", "publisher")]
        run, work = (Transactions(database, "bench", environment) for database in databases[:2])
        engine = Engine(databases[2], "bench", environment)
        engine.queues.declare(QueueDeclaration("weight"))
        steps = {
            "floor": over(Floor(tempfile.mkdtemp(dir=folder))),
            "envelope": behind(partial(to_floor, Floor(tempfile.mkdtemp(dir=folder)))),
            "transaction": behind(partial(by_transaction, databases[0], run)),
            "work": behind(partial(by_work, work)),
            "publisher": behind(lambda publication: engine.publisher.publish([publication])),
            "transport": Connection(f"fdb+sqlite:///{folder}/transport.db"),
        }
        sides, numbers = {name: Side(connection) for name, connection in steps.items()}, count()
        took: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(1 + ROUNDS):  # the first one warms up
            for name, side in sides.items():
                took[name].append(side.publish([celery_message(each) for each in islice(numbers, messages)]))
        floor, before = statistics.median(took["floor"][1:]), 0.0
        for name, each in took.items():
            us = statistics.median(each[1:])
            print(f"{name:<12} {us:6.1f} us  {us - before:+6.1f}  {us / floor:.2f}")
            before = us
        for connection in steps.values():
            connection.release()
        for database in databases:
            database.close()


if __name__ == "__main__":
    main()
