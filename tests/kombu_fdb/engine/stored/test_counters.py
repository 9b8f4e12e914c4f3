"""COUNTS as a state machine: after any history of verbs the counters equal a full scan."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kit.conformance.queue import Bench

from kombu_fdb.model import Delivery, KeyLimits
from kombu_fdb.store.protocol import Database
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.memory import MemoryDatabase

keys = st.sampled_from(["", "a", "b", "t/1"])


class Counters(RuleBasedStateMachine):
    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.database, task_ids=True)
        self.held: list[Delivery] = []
        self.number = 0

    @rule(key=keys, priority=st.sampled_from([0, 5]), delay_ms=st.sampled_from([0, 0, 500]))
    def publish(self, key: str, priority: int, delay_ms: int) -> None:
        self.number += 1
        self.bench.put(b"%d" % self.number, key=key, priority=priority, due_ms=self.bench.clock.wall_ms() + delay_ms)

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        self.held += self.bench.take(limit)

    @rule(verb=st.sampled_from(["ack", "release", "reject"]))
    def settle(self, verb: str) -> None:
        if self.held:
            assert getattr(self.bench.engine.messages, verb)([self.held.pop(0).lease]) == [True]

    @rule(key=keys, limits=st.sampled_from([None, KeyLimits(paused=True), KeyLimits(max_in_flight=1)]))
    def limit(self, key: str, limits: KeyLimits | None) -> None:
        self.bench.engine.queues.limit("q", key, limits)

    @rule()
    def promote(self) -> None:
        self.bench.later(1)
        self.bench.engine.upkeep.promote()

    @rule()
    def purge(self) -> None:
        self.bench.engine.queues.purge("q")

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        self.bench.engine.messages.cancel((b"%d" % number).hex())

    @rule(queue=st.sampled_from(["q", "r", "q.dead"]), limit=st.integers(1, 4))
    def move(self, queue: str, limit: int) -> None:
        self.bench.engine.messages.move(queue, "r" if queue == "q" else "q", limit)

    @rule(limit=st.integers(1, 4))
    def replay(self, limit: int) -> None:
        self.bench.engine.dead_letters.replay("q", limit)

    @invariant()
    def counters_equal_a_scan(self) -> None:
        self.bench.check()
        leased = sum(counts.leased for counts in self.bench.engine.inspect.keys_of("q").values())
        assert leased <= len(self.held)

    def teardown(self) -> None:
        self.bench.clean()


def test_in_memory() -> None:
    class InMemory(Counters):
        database = MemoryDatabase()

    check(InMemory, 60)


def test_in_sqlite() -> None:
    with TemporaryDirectory() as folder:
        database_ = SqliteDatabase.open(str(Path(folder) / "broker.db"))

        class InSqlite(Counters):
            database = database_

        check(InSqlite, 15)
        database_.close()


def check(machine: type[Counters], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, deadline=None))
