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

With ``--fdb``, on a FoundationDB of its own: the floor of a publish, and of a claim of 250 messages that settles those
of the claim before, are the same rows by the client library alone. A claim is from a queue without keys, or with 1,000.

usage: python bench/ladder.py [--messages 2000] [--fdb]
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import tempfile
import time
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
from kombu_fdb.model import NO_PRIORITY, ClaimTerms, Publication
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.foundationdb.binding import binding
from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.fdbserver import Cluster
from kombu_fdb.transport.envelope import encode

ROUNDS = 9
TIMEOUT_S = 5.0

encoded = partial(encode, exchange="", routing_key="weight", now_ms=0)


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


# -- on FoundationDB ---------------------------------------------------------------------------------------------------

WINDOW, CLAIMS, KEYS = 250, 40, 1000
pack_number = struct.Struct("<q").pack


class FdbFloor:
    """The rows of a message, by the client library alone."""

    def __init__(self, cluster_file: str) -> None:
        self.fdb = binding()
        self.database, self.stored, self.held = self.fdb.open(cluster_file), 0, []

    def begin(self) -> Any:
        tr = self.database.create_transaction()
        tr.options.set_timeout(10_000)
        return tr

    def publish(self, publication: Publication) -> None:
        tr = self.begin()
        self.stored += 1
        for prefix, value in ((b"q/", publication.payload), (b"index/" + publication.task_id.encode(), b"q/")):
            tr.set_versionstamped_key(prefix + bytes(12) + struct.pack("<I", len(prefix)), value)
        tr.add(b"count", pack_number(1))
        tr.set_versionstamped_value(b"bell", bytes(14))
        tr.add_read_conflict_key(b"token")
        tr.set(b"token", pack_number(self.stored))
        tr.commit().wait()

    def fill(self, keys: int) -> None:
        self.held.clear()
        self.database.clear_range(b"", b"\xff")
        for number in range(0, WINDOW * CLAIMS, 1000):
            tr = self.begin()
            for each in range(number, number + 1000):
                tr.set(b"q/%05d/%08d" % (each % keys if keys else 0, each), b"x" * 560)
            tr.commit().wait()

    def claim(self, keys: int, turn: int) -> None:
        """Without keys a run of rows, with keys the first two rows of each of so many sub-queues, and its counters."""
        tr, mode = self.begin(), self.fdb.StreamingMode.want_all
        places = [b"q/%05d/" % (each % keys) for each in range(turn * WINDOW, (turn + 1) * WINDOW)] if keys else [b"q/"]
        most = 2 if keys else WINDOW
        asked = [tr.snapshot.get_range(each, each + b"\xff", most, False, mode) for each in places]
        found = [[(row.key, row.value) for row in rows] for rows in asked]
        rows = [each[0] for each in found] if keys else found[0]
        if self.held:
            tr.clear_range(self.held[0], self.held[-1] + b"\x00")
        self.held = [b"lease/%08d" % (turn * WINDOW + number) for number in range(len(rows))]
        for (key, value), lease in zip(rows, self.held, strict=True):
            tr.set(lease, value)
            tr.clear(b"index/" + key)
            if keys:
                tr.add_read_conflict_key(key)
                tr.clear(key)
                tr.set(b"ring/" + key, b"")
                tr.add(b"counts/" + key[:7], bytes(16))
                tr.add(b"counts/" + key[:7] + b"-", bytes(16))
                tr.compare_and_clear(b"counts/" + key[:7] + b"-", bytes(16))
        if not keys:
            tr.add_read_conflict_range(rows[0][0], rows[-1][0])
            tr.clear_range(rows[0][0], rows[-1][0] + b"\x00")
        tr.add(b"leased", pack_number(len(rows)))
        tr.commit().wait()


def on_foundationdb(messages: int) -> None:
    with Cluster() as cluster:
        floor = FdbFloor(cluster.cluster_file)
        sides = {
            "floor": Side(behind(floor.publish)),
            "transport": Side(Connection(f"fdb:///{cluster.cluster_file}")),
        }
        numbers = count()
        took: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 + ROUNDS):
            for name, side in sides.items():
                took[name].append(side.publish([celery_message(each) for each in islice(numbers, messages)]))
        tell("publish", *(statistics.median(took[name][1:]) for name in sides))
        for keys in (0, KEYS):
            floor.fill(keys)
            least = measured(lambda turn, keys=keys: floor.claim(keys, turn))
            floor.database.clear_range(b"", b"\xff")
            environment = Environment(SystemClock(), random_id, random.Random(1))
            engine = Engine(FoundationDatabase.open(cluster.cluster_file), random_id().hex(), environment)
            names = [f"key-{each % keys}" if keys else "" for each in range(WINDOW * CLAIMS)]
            for number in range(0, len(names), 1000):
                engine.publisher.publish([Publication("", "q", b"x" * 500, key=key) for key in names[number:][:1000]])
            session, held = engine.sessions.open({}, ttl_s=3600), []

            def claim(_: int, engine: Engine = engine, session: bytes = session, held: list[Any] = held) -> None:
                found = engine.messages.claim(session, ["q"], WINDOW, terms=ClaimTerms(acks=[*held]))
                held[:] = [each.lease for each in found]

            tell(f"claim, {keys} keys", least, measured(claim))


def measured(claim: Callable[[int], None]) -> float:
    """CPU time of a message, of this process, in microseconds; the first claims warm up."""
    for turn in range(CLAIMS):
        if turn == CLAIMS // 4:
            began = time.process_time()
        claim(turn)
    return (time.process_time() - began) / (CLAIMS - CLAIMS // 4) / WINDOW * 1e6


def tell(what: str, floor: float, ours: float) -> None:
    print(f"{what:<18} floor {floor:6.1f} us, ours {ours:6.1f} us  {ours / floor:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--fdb", action="store_true")
    given = parser.parse_args()
    (on_foundationdb if given.fdb else on_sqlite)(given.messages)


def on_sqlite(messages: int) -> None:
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
