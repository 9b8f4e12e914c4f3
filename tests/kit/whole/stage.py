"""A store in which there is something of everything, made once and loaded as often as a test needs it.

Two processes use it: one *acts*, through a way to the store that can count and kill; the other one lives on, and
observes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kit.faults import FaultyDatabase
from kit.records import record_of
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.forward_compatibility import RECORD
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.engine.work import Environment, Work
from kombu_fdb.keyspace.codec import CHUNK_BYTES
from kombu_fdb.keyspace.layout import Keyspace, pack_stamp
from kombu_fdb.model import ClaimTerms, Demand, KeyLimits, Lease, Place, Publication, SessionId
from kombu_fdb.process.duty_cycle import DutyCycle
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import Database, KeyValue
from kombu_fdb.testing.clock import ManualClock

NAMESPACE = "stage"
#: When what is delayed on the stage is due, and what has a time to live expires, in seconds after it was made.
DUE_S = 10.0
#: What a session holds.
HELD = b"held"
LARGE = b"x" * (2 * CHUNK_BYTES)


@dataclass(frozen=True)
class Sizes:
    """How much there is."""

    messages: int = 4
    keys: int = 4
    bindings: int = 4
    consumers: int = 4
    queues: int = 4
    #: Messages of each kind with payloads in chunks.
    large: int = 1


@dataclass
class Store:
    """All rows, and what one has to know about them."""

    sizes: Sizes
    rows: list[KeyValue]
    version: int
    session: SessionId
    dead: SessionId
    observer: SessionId
    leases: list[Lease]
    kept: list[Lease]
    demands: list[Demand]


def _engine(database: Database, clock: ManualClock, process: str) -> Engine:
    ids = random.Random(process)
    return Engine(
        database,
        NAMESPACE,
        Environment(clock, lambda: ids.randbytes(16), random.Random(7), call_s=300.0, publish_s=300.0),
    )


class Stage:
    """One loading of a store. ``way``: to the store, of the process that acts."""

    def __init__(self, store: Store, way: Callable[[FaultyDatabase], Database] = lambda database: database) -> None:
        self.clock = ManualClock()
        self.database = FaultyDatabase(clock=self.clock)
        self.database.version = store.version
        for key, value in store.rows:
            self.database.map.put(key, store.version, value, store.version)
        self.store = store
        self.sizes = store.sizes
        self.way = way(self.database)
        self.engine = _engine(self.way, self.clock, "acts")
        self.observer = _engine(self.database, self.clock, "observes")
        self.session = store.session

    @property
    def keys(self) -> Keyspace:
        return self.engine.keys

    def duties(self, engine: Engine, session: SessionId, **given: Any) -> DutyCycle:
        return DutyCycle(engine, self.clock, session, sweep_interval_s=5.0, **given)

    def tidy(self) -> None:
        """The process that acts is dead; the other one does its duties, for most of an hour."""
        duties = self.duties(self.observer, self.store.observer, report=_raise)
        for pause_s in (0.0, *[8.0] * 5, *[225.0] * 9):
            self.clock.advance(pause_s)
            self.observer.sessions.beat(self.store.observer)
            while duties.run_once() == 0:
                pass
        self._look_at_all()

    def _look_at_all(self) -> None:
        """What a consumer does by the way: it answers arrivals and bells, and clears marks of what is gone.

        Twice: a key that has all it may have is parked, and looked at again when that has ended.
        """
        for queue in [*self.observer.inspect.queues()] * 2:
            held = []
            while more := self.observer.messages.claim(self.store.observer, [queue], 1_000):
                held += [each.lease for each in more]
            self.observer.messages.release(held, counted=False)


def _raise(duty: str, subject: str, error: Exception | None) -> None:
    raise AssertionError(f"{duty} of {subject!r} was set aside") from error


def store_of(sizes: Sizes) -> Store:
    """Make it."""
    clock = ManualClock()
    database = FaultyDatabase(clock=clock)
    engine = _engine(database, clock, "made it")
    engine.check_format()
    session, dead, observer = (engine.sessions.open({}) for _ in range(3))
    _declare(engine, sizes)
    _publish(engine, sizes, clock)
    leases = _hold(engine, session, sizes)
    kept = _hold(engine, dead, sizes)
    _consume(engine, dead, sizes)
    demands = _stand_in_wait_queue(engine, session, sizes)
    _operate(engine, sizes)
    engine.upkeep.flush_totals()
    clock.advance(5)
    return Store(sizes, database.items(), database.version, session, dead, observer, leases, kept, demands)


def _declare(engine: Engine, sizes: Sizes) -> None:
    engine.queues.declare_exchange(Exchange("x", "topic"))
    declared: dict[str, dict[str, Any]] = {
        "q": {},
        "fair": {},
        "full": {},
        "ttl": {"x-message-ttl": 5_000},
        "expires": {"x-expires": 5_000},
        "single": {"x-single-active-consumer": True},
        "lone": {"x-single-active-consumer": True},
        "target": {},
        **{f"other{number}": {"x-max-length": 1_000_000} for number in range(sizes.queues)},
    }
    for queue, arguments in declared.items():
        engine.queues.declare(QueueDeclaration(queue, arguments=arguments))
    for number in range(sizes.bindings):
        for queue in ("q", "expires"):
            engine.queues.bind(queue, "x", f"k{number}")
    for number in range(sizes.queues):
        engine.queues.bind(f"other{number}", "x", "k0")
        engine.queues.limit(f"other{number}", "key", KeyLimits(capacity=1_000_000))
    for number in range(sizes.keys):
        engine.queues.limit("fair", f"key{number}", KeyLimits(max_in_flight=1, capacity=1_000_000))
        engine.queues.limit("expires", f"key{number}", KeyLimits(rate=1, burst=1))


def _publish(engine: Engine, sizes: Sizes, clock: ManualClock) -> None:
    due_ms = clock.wall_ms() + round(DUE_S * 1000)
    many, keys = range(sizes.messages), range(sizes.keys)

    def put(queue: str, payload: bytes, numbers: Iterable[int], key: str = "", **given: Any) -> None:
        """One for each number, which stands behind the key."""
        keys = [key + str(number) if key.startswith(("key", "tenant")) else key for number in numbers]
        engine.publisher.publish([Publication("", queue, payload, key=each, **given) for each in keys])

    for queue in ("q", "full", "ttl", "expires", "single"):
        put(queue, b"r", many, task_id="ready")
    for queue in ("q", "expires"):
        put(queue, b"d", many, due_ms=due_ms, task_id="delayed")
        put(queue, b"k", many, key="busy")
    put("q", LARGE, range(sizes.large), priority=8)
    put("q", LARGE, range(sizes.large), due_ms=due_ms, task_id="delayed")
    put("fair", LARGE, range(sizes.large), key="large", task_id="ready")
    for _ in range(sizes.large):
        engine.publisher.bury_copy("q", Publication("", "q", LARGE, task_id="dead"))
    put("q", HELD, [*many, *many], priority=9)
    put("fair", HELD, keys, key="key", priority=9)
    for queue in ("fair", "expires"):
        for key in ("key", "key", "tenant/user"):
            put(queue, b"f", keys, key=key)
    engine.publisher.publish([Publication("", "q", b"", dedup_id=f"id{each}", dedup_window_ms=1) for each in many])
    for number in range(sizes.queues):
        put(f"other{number}", b"r", [0])
        put(f"other{number}", b"d", [0], due_ms=due_ms)
    for _ in many:
        for queue in ("q", "expires"):
            engine.publisher.bury_copy(queue, Publication("", queue, b"dead", task_id="dead"))
    engine.queues.declare(QueueDeclaration("full", arguments={"x-max-length": 1}))


def _hold(engine: Engine, session: SessionId, sizes: Sizes) -> list[Lease]:
    """Half of what is there to be held."""
    held = engine.messages.claim(session, ["q"], sizes.messages)
    held += engine.messages.claim(session, ["fair"], sizes.keys // 2)
    return [each.lease for each in held]


def _consume(engine: Engine, session: SessionId, sizes: Sizes) -> None:
    """Queues that end with the session, and one that it is the active consumer of."""
    for number in range(sizes.consumers):
        own = f"own{number}"
        engine.queues.declare(QueueDeclaration(own, exclusive=True), owner=(session, "tag"))
        engine.queues.bind(own, "x", "k0")
        engine.publisher.publish([Publication("", own, b"r") for _ in range(5)])
    engine.queues.declare(QueueDeclaration("shared", auto_delete=True))
    engine.publisher.publish([Publication("", "shared", b"r") for _ in range(sizes.messages)])
    for number in range(sizes.consumers):
        engine.queues.add_consumer(session, "shared", f"tag{number}")
    engine.messages.claim(session, ["single"], 1, terms=ClaimTerms(consumers={"single": "tag"}))


def _stand_in_wait_queue(engine: Engine, session: SessionId, sizes: Sizes) -> list[Demand]:
    demands = []
    for number in range(max(2, sizes.consumers)):
        owner = session if number == 0 else engine.sessions.open({}, ttl_s=5.0)
        demand = Demand(wait_queue.name(["q"]), owner, engine.messages.reserve(), 2)
        engine.messages.join(demand, queues=["q"])
        demands.append(demand)
    return demands


def _operate(engine: Engine, sizes: Sizes) -> None:
    """Rows that the duties clear one day, a message that was of a newer version, and totals of queues that are gone."""
    engine.upkeep.set_aside(Aside("duty", "subject", "error", 1, 0))
    keys = engine.keys

    def count(work: Work) -> None:
        for number in range(sizes.queues):
            work.tr.add(keys.total(f"gone{number}", "published"), 1)
        for number in range(sizes.keys):
            work.tr.add(keys.key_total("q", f"key{number}", "acked"), 1)
        work.tr.set(keys.copy(bytes(16), "gone"), bytes(21))
        kept = record_of(bytes(16), b"kept", published_ms=0, expires_ms=0).encode()
        work.tr.set(keys.newer(RECORD, kept[0], "target", Place(keys.rank(0) + pack_stamp(bytes(12)))), kept)
        work.effects.change("target", "newer", 1)

    engine.transactions.write(count)
