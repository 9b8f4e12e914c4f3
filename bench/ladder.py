"""What a message costs over its floor, step by step: the floor of ``weight.py``, extended until it is our transport.

Each step stores the same rows on SQLite with kombu in front, and does one thing more as the transport does it:

* ``no bell``: one function over ``sqlite3``, without the row in which a queue's consumers see that a message has come;
* ``floor``: with it;
* ``envelope``: what the publisher wrote is checked, and its payload made (``transport/envelope.py``);
* ``transaction``: rows are noted and written by the store's transaction, behind its write lock, within a deadline, safe
  from an exception at any line; consumers are woken (``store/sqlite``);
* ``work``: repeated until it commits, with its counters and totals (``engine/transactions.py``);
* ``publisher``: routed, admitted and not stored twice (``engine/messages/publish.py``);
* ``transport``: by a channel, whose process may have forked and whose connection may have been closed.

A consumed message, with its acknowledgement and a prefetch of 8, likewise: what kombu's consumer takes in memory, and

* ``floor``: claims of four messages, which settle those of the claim before, as one function over ``sqlite3``;
* ``transaction``: the same rows by the store's transaction;
* ``engine``: leased to a session that lives, from queues in their states, records read and checked, counters and totals
  (``engine/messages/claim.py``);
* ``transport``: by a connection that drains, claims, hands out, and settles (``transport/consuming``).

A message of a batch of a thousand likewise, in one transaction: ``floor``, ``envelope``, ``work``, ``publisher``, and
``transport``, which is kombu's ``Producer.batch``.

All steps take turns in one process, so that their differences hold on a busy machine. RabbitMQ's client is beside them,
without confirms, where a server is found: its CPU time is that of one process of the two.

With ``--fdb``, on a FoundationDB of its own: the floor of a publish, and of a claim of 250 messages that settles those
of the claim before, are the same rows by the client library alone. A claim is from a queue without keys, or with 1,000.

With ``--idle``, one message at a time is published, and claimed with the acknowledgement of the one before, without a
pause and after one, as for a worker that has had nothing to do. The time is that of a clock.

usage: python bench/ladder.py [--messages 2000] [--fdb | --idle]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

from kit.rabbitmq import Node, rabbitmq_unavailable_reason
from kombu import Connection
from kombu.transport import memory
from weight import Floor, Side, blob, celery_message, over, pack_stamp

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.message import put_ready
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.engine.work import Environment, Work
from kombu_fdb.keyspace.codec import Record
from kombu_fdb.keyspace.layout import Keyspace, range_of
from kombu_fdb.model import NO_PRIORITY, ClaimTerms, Publication
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.foundationdb.binding import binding
from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.fdbserver import Cluster
from kombu_fdb.transport.envelope import encode

ROUNDS = 9
TIMEOUT_S = 5.0
#: What a consumer with a prefetch of 8 claims at once.
CLAIM = 4
BATCH = 1000

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


def by_work(run: Transactions, *publications: Publication) -> None:
    def verb(work: Work) -> None:
        for each in publications:
            work.effects.note("weight", "published", "")
            put_ready(work, "weight", "", work.keys.rank(0), record_of(each, work.now_ms))

    run.write(verb, TIMEOUT_S)


def claim_by_transaction(database: SqliteDatabase, keys: Keyspace, held: list[tuple[bytes, bytes]]) -> int:
    """As ``Floor.claim`` does it. ``held``: the lease and the task of each message of the claim before."""
    tr = database.begin(timeout_s=TIMEOUT_S)
    session = b"session"
    tr.get_many([keys.session(session), keys.count("weight", "ready"), keys.control("weight"), keys.fair("weight")])
    rows = tr.get_range(*range_of(keys.ready("weight")), limit=CLAIM)
    for lease, task in held:
        tr.clear(lease)
        tr.clear(task)
    held.clear()
    for number, (key, value) in enumerate(rows):
        tr.clear(key)
        held.append((keys.lease(session, number), keys.task(value[2:38].decode("latin-1"))))
        tr.set(held[-1][0], value)
    tr.add(keys.count("weight", "ready"), -len(rows))
    tr.add(keys.count("weight", "leased"), len(rows))
    tr.commit()
    return len(rows)


class Gathered:
    """Kombu's producer, whose messages are gathered, and stored at once by ``store``."""

    def __init__(self, store: Callable[[list[Publication]], object]) -> None:
        self._store = store
        self._found: list[Publication] = []
        self._side = Side(behind(self._found.append))

    def publish(self, messages: list[Any]) -> float:
        us, began = self._side.publish(messages), time.process_time()
        self._store([*self._found])
        self._found.clear()
        return us + (time.process_time() - began) / len(messages) * 1e6


class GatheredFloor(Floor):
    """The floor of a batch: what is stored is gathered first."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._found: list[tuple[bytes, str]] = []
        self._side = Side(over(self))

    def store(self, payload: bytes, task_id: str) -> None:
        self._found.append((payload, task_id))

    def publish_all(self, messages: list[Any]) -> float:
        us, began = self._side.publish(messages), time.process_time()
        self.store_all(self._found)
        self._found.clear()
        return us + (time.process_time() - began) / len(messages) * 1e6

    def store_all(self, found: Sequence[tuple[bytes, str]]) -> None:
        self.begin()
        stored = self.get(b"version", b"count")
        version = stored[b"version"] + 1
        rows = [(blob(b"version"), version), (blob(b"count"), stored.get(b"count", 0) + len(found)), (blob(b"last"), 0)]
        for number, (payload, task_id) in enumerate(found):
            stamp = pack_stamp(version, number)
            rows += [(blob(b"q/items/" + stamp), blob(payload)), (blob(b"index/" + task_id.encode()), blob(stamp))]
        self.cursor.executemany("INSERT INTO kv (k, v) VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v=excluded.v", rows)
        self.end()


def batches(folder: str) -> Mapping[str, list[float]]:
    environment = Environment(Clock(), random_id, random.Random(1))
    databases = [SqliteDatabase.open(f"{folder}/batched-{name}.db") for name in ("work", "publisher")]
    engine, run = Engine(databases[1], "bench", environment), Transactions(databases[0], "bench", environment)
    engine.queues.declare(QueueDeclaration("weight"))
    floor, enveloped = (GatheredFloor(tempfile.mkdtemp(dir=folder)) for _ in range(2))
    ours, numbers = Side(Connection(f"fdb+sqlite:///{folder}/batched.db")), count()

    def by_transport(messages: list[Any]) -> float:
        began = time.process_time()
        with ours.producer.batch(BATCH):
            ours.publish(messages)
        return (time.process_time() - began) / len(messages) * 1e6

    steps = {
        "floor": floor.publish_all,
        "envelope": Gathered(
            lambda found: enveloped.store_all([(each.payload, each.task_id) for each in found])
        ).publish,
        "work": Gathered(lambda found: by_work(run, *found)).publish,
        "publisher": Gathered(engine.publisher.publish).publish,
        "transport": by_transport,
    }
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + ROUNDS):
        for name, publish in steps.items():
            took[name].append(publish([celery_message(each) for each in islice(numbers, BATCH)]))
    return took


#: Between two calls of an idle process, in seconds; and how many messages it gets.
PAUSES_S, SINGLE = (0.0, 0.003), 500


def one_by_one(folder: str) -> None:
    floor, engine = (
        Floor(folder),
        Engine(SqliteDatabase.open(f"{folder}/engine.db"), "bench", Environment(Clock(), random_id, random.Random(1))),
    )
    session, leases = engine.sessions.open({}, ttl_s=3600), []

    def by_engine() -> None:
        found = engine.messages.claim(session, ["weight"], CLAIM, terms=ClaimTerms(acks=[*leases]))
        leases[:] = [each.lease for each in found]

    sides = {
        "floor": Side(over(floor)),
        "ours": Side(behind(lambda publication: engine.publisher.publish([publication]))),
    }
    claims = {"floor": partial(floor.claim, CLAIM), "ours": by_engine}
    for pause_s in PAUSES_S:
        took: dict[str, list[float]] = {f"{verb}, {name}": [] for verb in ("publish", "claim") for name in sides}
        for number in range(SINGLE):
            for name, side in sides.items():
                message = [celery_message(number)]
                for verb, act in (("publish", partial(side.publish, message)), ("claim", claims[name])):
                    time.sleep(pause_s)
                    began = time.perf_counter()
                    act()
                    took[f"{verb}, {name}"].append(time.perf_counter() - began)
        for what, each in took.items():
            print(f"{what:<16} after {1000 * pause_s:g} ms: {1000 * statistics.median(each):.2f} ms")


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
            environment = Environment(Clock(), random_id, random.Random(1))
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


def tell_steps(what: str, took: Mapping[str, list[float]]) -> None:
    """The first round warms up."""
    floor, before = statistics.median(took["floor"][1:]), 0.0
    print(what)
    for name, each in took.items():
        us = statistics.median(each[1:])
        print(f"  {name:<12} {us:6.1f} us  {us - before:+6.1f}  {us / floor:.2f}")
        before = us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--fdb", action="store_true")
    parser.add_argument("--idle", action="store_true")
    given = parser.parse_args()
    if given.idle:
        with tempfile.TemporaryDirectory() as folder:
            one_by_one(folder)
    else:
        (on_foundationdb if given.fdb else on_sqlite)(given.messages)


def on_sqlite(messages: int) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        peers = {}
        if rabbitmq_unavailable_reason() is None:
            peers["rabbitmq"] = Side(stack.enter_context(Connection(stack.enter_context(Node()).url)))
        tell_steps("publish", publishes(folder, messages, peers))
        tell_steps("consume", consumes(folder, messages, peers))
        tell_steps("batch", batches(folder))


def publishes(folder: str, messages: int, peers: Mapping[str, Side]) -> Mapping[str, list[float]]:
    environment = Environment(Clock(), random_id, random.Random(1))
    databases = [SqliteDatabase.open(f"{folder}/{name}.db") for name in ("transaction", "work", "publisher")]
    run, work = (Transactions(database, "bench", environment) for database in databases[:2])
    engine = Engine(databases[2], "bench", environment)
    engine.queues.declare(QueueDeclaration("weight"))
    steps = {
        "no bell": over(Floor(tempfile.mkdtemp(dir=folder), bell=False)),
        "floor": over(Floor(tempfile.mkdtemp(dir=folder))),
        "envelope": behind(partial(to_floor, Floor(tempfile.mkdtemp(dir=folder)))),
        "transaction": behind(partial(by_transaction, databases[0], run)),
        "work": behind(partial(by_work, work)),
        "publisher": behind(lambda publication: engine.publisher.publish([publication])),
        "transport": Connection(f"fdb+sqlite:///{folder}/transport.db"),
    }
    sides, numbers = {name: Side(connection) for name, connection in steps.items()} | peers, count()
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + ROUNDS):
        for name, side in sides.items():
            took[name].append(side.publish([celery_message(each) for each in islice(numbers, messages)]))
    for side in sides.values():
        side.queue.purge()
    for connection in steps.values():
        connection.release()
    for database in databases:
        database.close()
    return took


def consumes(folder: str, messages: int, peers: Mapping[str, Side]) -> Mapping[str, list[float]]:
    with Connection("memory://") as in_memory, Connection(f"fdb+sqlite:///{folder}/consumed.db") as connection:
        kombus, sides = Side(in_memory), {"transport": Side(connection)} | peers
        took: dict[str, list[float]] = {name: [] for name in ("floor", "transaction", "engine", *sides)}
        for number in range(1 + ROUNDS):
            batch = [celery_message(each) for each in range(number * messages, (number + 1) * messages)]
            for side in (kombus, *sides.values()):
                side.publish(batch)
            kombu_us = kombus.consume(messages, 2 * CLAIM)
            for name, claim in claims(tempfile.mkdtemp(dir=folder), batch).items():
                began = time.process_time()
                while claim():
                    pass
                took[name].append(kombu_us + (time.process_time() - began) / messages * 1e6)
            for name, side in sides.items():
                took[name].append(side.consume(messages, 2 * CLAIM))
        return took


def claims(folder: str, batch: list[Any]) -> dict[str, Callable[[], int]]:
    """Each claims four messages of its own full queue, and returns how many there were."""
    floor = Floor(folder)
    floor.fill(batch)
    environment = Environment(Clock(), random_id, random.Random(1))
    databases = [SqliteDatabase.open(f"{folder}/{name}.db") for name in ("transaction", "engine")]
    engines = [Engine(database, "bench", environment) for database in databases]
    for engine in engines:
        with behind(lambda publication, engine=engine: engine.publisher.publish([publication])) as connection:
            Side(connection).publish(batch)
    held: list[tuple[bytes, bytes]] = []
    leases: list[Any] = []
    session = engines[1].sessions.open({}, ttl_s=3600)

    def by_engine() -> int:
        found = engines[1].messages.claim(session, ["weight"], CLAIM, terms=ClaimTerms(acks=[*leases]))
        leases[:] = [each.lease for each in found]
        return len(found)

    keys = Keyspace("bench")
    return {
        "floor": partial(floor.claim, CLAIM),
        "transaction": partial(claim_by_transaction, databases[0], keys, held),
        "engine": by_engine,
    }


if __name__ == "__main__":
    main()
