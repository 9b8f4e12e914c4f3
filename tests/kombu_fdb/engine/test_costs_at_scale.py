"""No verb costs more with 1,000,000 ready, 1,000,000 delayed messages and 1,000,000 keys than in a small store.

The rows of the large store are written past the engine, as a million publications would have left them; that they are
what the engine writes is shown by the verbs, which find their way through them.
"""

import random
import sqlite3

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.duties import promote_all, replay
from kit.records import record_of

from kombu_fdb.keyspace.layout import pack_stamp
from kombu_fdb.model import Publication, View
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.sqlite.database import SqliteDatabase

MILLION = 1_000_000
LATER_MS = 2**41
#: Keys enough for every claim of the test; the small store has no others.
KEYS = 4_000

#: One test for all verbs: its store takes most of a minute to write, several on a busy machine, and each process of a
#: run would write its own.
pytestmark = [pytest.mark.scale, pytest.mark.timeout(1200)]


def stamp(number):
    return pack_stamp(number.to_bytes(10, "big") + bytes(2))


def record(number, key=""):
    return record_of(
        number.to_bytes(16, "big"), b"a", published_ms=0, expires_ms=0, key=key, task_id=f"task-{number}"
    ).encode()


def plain(keys, number):
    """Ready and delayed messages of the queue "q", as many of each, and what goes with them."""
    ready, rank = keys.ready("q"), keys.rank(0)
    delayed = keys.delayed_prefix("q", LATER_MS, rank)[:-1]
    for each in range(number):
        yield ready + rank + stamp(each), record(each)
        yield keys.task(f"task-{each}") + stamp(each), (ready + rank)[len(keys.prefix) :] + stamp(each)[:1]
        yield delayed + stamp(each), record(MILLION + each)
    yield keys.waiting("q"), b""
    for state in ("ready", "delayed"):
        yield keys.count("q", state), number.to_bytes(8, "little")


def keyed(keys, number):
    """Keys of the queue "fair" with one message each, at which no consumer has looked yet."""
    rank = keys.rank(0)
    for each in range(number):
        key = f"customer-{each}"
        yield keys.items("fair", key, rank) + stamp(each), record(each, key)
        yield keys.arrival("fair", key, rank), b""
        yield keys.backlog("fair", key), (1).to_bytes(8, "little")
    yield keys.fair("fair"), b""
    yield keys.count("fair", "ready"), number.to_bytes(8, "little")


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """The same in a small store and in a large one."""
    folder = tmp_path_factory.mktemp("million")
    opened = [_bench(folder / "small.db", 2_000, KEYS), _bench(folder / "large.db", MILLION, MILLION)]
    yield opened[0], opened[1]
    for bench in opened:
        bench.database.close()
    (folder / "large.db").unlink()


def _bench(path, messages, keys):
    bench = Bench(CountingDatabase(SqliteDatabase.open(str(path))))
    bench.database.commit_may_be_unknown = True  # as on FoundationDB, with commit tokens
    bench.engine.queues.declare(QueueDeclaration("q"))
    connection = sqlite3.connect(path)
    with connection:
        for rows in (plain(bench.engine.keys, messages), keyed(bench.engine.keys, keys)):
            connection.executemany("INSERT OR REPLACE INTO kv VALUES (?, ?)", rows)
        connection.execute("UPDATE kv SET v = ? WHERE k = 0", (MILLION + 1,))
    connection.close()
    return bench


def cost(bench, verb):
    bench.database.reset()
    verb(bench)
    paid = bench.database.total()
    paid.bytes_written = 0  # stamps and counters have other digits
    return paid


def leases(bench, queue="q", limit=8):
    return [delivery.lease for delivery in bench.take(limit, queue)]


VERBS = {
    "publish": lambda bench: bench.put(b"a", task_id="t"),
    "publish urgent": lambda bench: bench.put(b"a", priority=9),
    "publish delayed": lambda bench: bench.put(b"a", due_ms=LATER_MS),
    "publish keyed": lambda bench: bench.put(b"a", queue="fair", key="customer-7"),
    "dedup": lambda bench: bench.engine.publisher.publish(
        [Publication("", "q", b"a", dedup_id="d", dedup_window_ms=1)]
    ),
    "claim": leases,
    "claim and ack": lambda bench: bench.engine.messages.ack(leases(bench)),
    "claim and release": lambda bench: bench.engine.messages.release(leases(bench)),
    "claim and delay": lambda bench: bench.engine.messages.release(leases(bench), due_ms=LATER_MS),
    "claim and reject": lambda bench: bench.engine.messages.reject(leases(bench)),
    "replay": lambda bench: replay(bench.engine, "q", 5),
    "arm": lambda bench: bench.engine.messages.arm(["q"]),
    "promote": lambda bench: promote_all(bench.engine),
    "peek": lambda bench: bench.engine.inspect.peek("q", 10),
    "find": lambda bench: bench.engine.inspect.find_task("task-1900"),
    "cancel": lambda bench: bench.engine.messages.cancel("task-1900"),
    "counts": lambda bench: bench.engine.inspect.counts("q"),
    "beat": lambda bench: bench.engine.sessions.beat(bench.session),
    "sweep": lambda bench: bench.duties().sweep(),
    "facts": lambda bench: bench.engine.inspect.facts(["q", "fair"]),
    "page of keys": lambda bench: bench.engine.inspect.key_page("fair", after="customer-1", limit=10),
    "keys that begin so": lambda bench: bench.engine.inspect.key_page("fair", prefix="customer-12", limit=10),
    "page of messages": lambda bench: bench.engine.inspect.page("q", View("delayed"), 200),
    "reschedule": lambda bench: reschedule(bench, LATER_MS + 1),
    "run now": lambda bench: reschedule(bench, 0),
    "delayed": lambda bench: bench.engine.inspect.delayed("q", 10),
    "move": lambda bench: bench.engine.messages.move("q", "elsewhere", 5),
    "part of a purge": lambda bench: bench.engine.queues.purge_some("q"),
}


def reschedule(bench, due_ms):
    """The first one on a page."""
    (listed,) = bench.engine.inspect.page("q", View("delayed"), 1).messages
    assert bench.engine.messages.reschedule("q", listed.spot, due_ms, payload=b"b")


def test_a_million_messages_and_keys_change_no_cost(benches, subtests):
    for name, verb in VERBS.items():
        with subtests.test(name):
            small, large = (cost(bench, verb) for bench in benches)
            assert small.round_trips
            assert large == small
    with subtests.test("a million keys"):
        check_keys(benches)
    with subtests.test("the large store is what it says"):
        check_size(benches)


def check_keys(benches):
    """Claim after claim: the keys are met, come into the ring, have their turns and leave it."""

    def serve(bench):
        bench.engine.transactions.rng = random.Random(3)
        return [cost(bench, lambda bench: bench.engine.messages.ack(leases(bench, "fair"))) for _ in range(60)]

    small, large = map(serve, benches)
    assert max(paid.rows for paid in large) <= max(paid.rows for paid in small)
    assert max(paid.round_trips for paid in large) <= max(paid.round_trips for paid in small)
    assert max(paid.writes for paid in large) <= max(paid.writes for paid in small)
    assert max(paid.conflict_keys for paid in large) <= max(paid.conflict_keys for paid in small)


def check_size(benches):
    engine = benches[1].engine
    assert engine.inspect.counts("q").delayed >= MILLION - 1_000  # a part was purged
    assert engine.inspect.counts("fair").ready >= MILLION - KEYS
    assert [found.state for found in engine.inspect.find_task("task-999999")] == ["ready"]
    assert engine.inspect.peek("q", 1)[0].payload == b"a"
