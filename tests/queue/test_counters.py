"""COUNTS as a state machine: after any history of verbs the counters equal a full scan."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kombu_fdb.model import Delivery, KeyLimits
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.queue_conformance import Bench

keys = st.sampled_from(["", "a", "b", "t/1"])


class Counters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(MemoryDatabase())
        self.held: list[Delivery] = []

    @rule(key=keys, priority=st.sampled_from([0, 5]), delay_ms=st.sampled_from([0, 0, 500]))
    def publish(self, key: str, priority: int, delay_ms: int) -> None:
        self.bench.put(b"x", key=key, priority=priority, due_ms=self.bench.clock.wall_ms() + delay_ms)

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        self.held += self.bench.take(limit)

    @rule(verb=st.sampled_from(["ack", "release", "reject"]))
    def settle(self, verb: str) -> None:
        if self.held:
            assert getattr(self.bench.engine, verb)([self.held.pop(0).lease]) == [True]

    @rule(key=keys, limits=st.sampled_from([None, KeyLimits(paused=True), KeyLimits(max_in_flight=1)]))
    def limit(self, key: str, limits: KeyLimits | None) -> None:
        self.bench.engine.limit("q", key, limits)

    @rule()
    def promote(self) -> None:
        self.bench.later(1)
        self.bench.engine.promote()

    @rule()
    def purge(self) -> None:
        self.bench.engine.purge("q")

    @invariant()
    def counters_equal_a_scan(self) -> None:
        self.bench.check()
        leased = sum(counts.leased for counts in self.bench.engine.keys_of("q").values())
        assert leased <= len(self.held)


Counters.TestCase.settings = settings(max_examples=60, deadline=None)
TestCounters = Counters.TestCase
