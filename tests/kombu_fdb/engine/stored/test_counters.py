"""COUNTS as a state machine: after any history of verbs the counters equal a full scan."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from kit.conformance.queue import Bench
from kit.duties import promote_all, replay
from kit.machines import Machine, run

from kombu_fdb.model import Delivery, KeyLimits
from kombu_fdb.store.protocol import Database

keys = st.sampled_from(["", "a", "b", "t/1"])


class Counters(Machine):
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
        promote_all(self.bench.engine)

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
        replay(self.bench.engine, "q", limit)

    @invariant()
    def counters_equal_a_scan(self) -> None:
        self.bench.check()
        leased = sum(counts.leased for counts in self.bench.engine.inspect.keys_of("q").values())
        assert leased <= len(self.held)

    def teardown(self) -> None:
        self.bench.clean()


@pytest.mark.parametrize(("database", "examples"), [("memory", 60), ("sqlite", 15)], indirect=["database"])
def test_counters_equal_a_scan(database: Database, examples: int) -> None:
    run(Counters, database, examples=examples)
