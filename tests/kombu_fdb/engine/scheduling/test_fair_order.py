"""The exact order of turns, against a model that knows nothing of the store; and that chance leaves no key behind.

The model is for one consumer and keys without limits that could park them: there every message has its moment.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kit.conformance.queue import Bench
from kit.duties import promote_all
from kit.faults import FaultyDatabase
from kit.machines import Machine, run

from kombu_fdb.engine.scheduling.fair import ARRIVALS
from kombu_fdb.keyspace.layout import BUCKETS
from kombu_fdb.model import KeyLimits, Publication, QueueControl

keys = st.sampled_from(["", "a", "b", "c", "d"])
priorities = st.sampled_from([0, 0, 0, 5, 9])


class Turn(NamedTuple):
    """Its place among all turns: the most urgent, the earliest round, the oldest first message."""

    rank: int
    round: int
    stamp: int
    key: str
    priority: int


class Order:
    """Rounds as docs/fairness.md tells them. A message is the number of its arrival."""

    def __init__(self):
        self.waiting = {}
        self.delayed = []
        self.turns = []
        self.rounds = {}
        self.limits = {}
        self.newcomer = "next"

    def arrive(self, key, priority, stamp):
        self.waiting.setdefault((key, priority), []).append(stamp)
        self.waiting[key, priority].sort()

    def claim(self, most):
        self._admit()
        served = []
        while self.turns and len(served) < most:
            turn = min(self.turns)
            self.turns.remove(turn)
            served += self._serve(turn, most - len(served))
        return served

    def limit(self, key, limits):
        """A turn that stands where another priority's are is none: the key comes as a newcomer."""
        self.limits[key] = limits
        self.turns = [turn for turn in self.turns if turn.rank == self._rank(turn.key, turn.priority)]

    def _limits(self, key):
        return self.limits.get(key, KeyLimits())

    def _rank(self, key, priority):
        own = self._limits(key).priority
        return -(priority if own is None else own)

    def _admit(self):
        inside = {(turn.key, turn.priority) for turn in self.turns}
        for (key, priority), stamps in self.waiting.items():
            if stamps and (key, priority) not in inside:
                rank = self._rank(key, priority)
                serving = self.rounds.get(rank, 0)
                first = {"next": serving + 1, "current": serving, "first": 0}[self.newcomer]
                self.turns.append(Turn(rank, first, stamps[0], key, priority))

    def _serve(self, turn, room):
        stamps = self.waiting[turn.key, turn.priority]
        number = min(self._limits(turn.key).weight, room)
        taken, stamps[:] = stamps[:number], stamps[number:]
        self.rounds[turn.rank] = max(self.rounds.get(turn.rank, 0), turn.round)
        if stamps:
            rank = self._rank(turn.key, turn.priority)
            self.turns.append(Turn(rank, self.rounds.get(rank, 0) + 1, stamps[0], turn.key, turn.priority))
        return taken


class Turns(Machine):
    """One consumer. A message's payload is its number."""

    def __init__(self):
        super().__init__()
        self.bench = Bench(self.database)
        self.order = Order()
        self.number = 0
        self.names = {}
        self.held = []
        self.priorities = {}
        self.bench.put(b"0", key="a")  # so that the queue is a fair one from here on
        self.bench.engine.messages.ack([each.lease for each in self.bench.take()])
        self.order.rounds[0] = 1

    def _named(self, key, priority, due_ms=0):
        self.number += 1
        self.priorities[self.number] = priority
        self.bench.put(b"%d" % self.number, key=key, priority=priority, due_ms=due_ms)
        return self.number

    @rule(key=keys, priority=priorities, number=st.integers(1, 3))
    def put(self, key, priority, number):
        for _ in range(number):
            name = self._named(key, priority)
            self._arrived(key, priority, name)

    def _arrived(self, key, priority, name):
        stamp = len(self.names) + 1
        self.names[stamp] = name
        self.order.arrive(key, priority, stamp)

    @rule(key=keys, priority=priorities, seconds=st.integers(1, 3))
    def put_delayed(self, key, priority, seconds):
        due_ms = self.bench.clock.wall_ms() + seconds * 1000
        name = self._named(key, priority, due_ms)
        self.order.delayed.append((due_ms, -priority, name, key, priority))

    @rule()
    def promote(self):
        """In the order of their moments, the more urgent first."""
        self.bench.later(1)
        promote_all(self.bench.engine)
        due = sorted(each for each in self.order.delayed if each[0] <= self.bench.clock.wall_ms())
        self.order.delayed = [each for each in self.order.delayed if each not in due]
        for _due, _rank, name, key, priority in due:
            self._arrived(key, priority, name)

    @rule(most=st.integers(1, 6))
    def take(self, most):
        taken = self.bench.take(most)
        stamps = self.order.claim(most)
        expected = [self.names[stamp] for stamp in stamps]
        assert [int(each.payload) for each in taken] == expected
        for each, stamp in zip(taken, stamps, strict=True):
            self.held.append((each, stamp, self.priorities[self.names[stamp]]))

    @rule(number=st.integers(0, 20))
    def release(self, number):
        """To its old place."""
        if self.held:
            delivery, stamp, priority = self.held.pop(number % len(self.held))
            self.bench.engine.messages.release([delivery.lease], counted=False)
            self.order.arrive(delivery.key, priority, stamp)

    @rule()
    def ack(self):
        self.bench.engine.messages.ack([each.lease for each, _, _ in self.held])
        self.held = []

    @rule(key=keys, weight=st.integers(1, 3), priority=st.sampled_from([None, None, 0, 7]))
    def limit(self, key, weight, priority):
        limits = KeyLimits(weight=weight, priority=priority)
        self.order.limit(key, limits)
        self.bench.engine.queues.limit("q", key, limits)

    @rule(newcomer=st.sampled_from(["next", "current", "first"]))
    def change_newcomers(self, newcomer):
        self.order.newcomer = newcomer
        self.bench.engine.queues.set_control("q", QueueControl(newcomer=newcomer))

    def teardown(self):
        self.bench.clean()


@pytest.mark.parametrize(("database", "examples"), [("memory", 150), ("sqlite", 20)], indirect=["database"])
def test_the_order(database, examples):
    run(Turns, database, examples=examples, steps=30)


# -- chance ------------------------------------------------------------------------------------------------------------


def test_no_newcomer_is_always_the_last():
    """More come before each claim than one can admit, all with arrivals in front of this one's."""
    bench = Bench(FaultyDatabase())
    names = (f"n{number}" for number in range(10**6))
    bench.put(b"here", key=next(name for name in names if crc32(name.encode()) % BUCKETS == BUCKETS - 1))
    for _claim in range(100):
        flood = [next(name for name in names if crc32(name.encode()) % BUCKETS < 250) for _ in range(ARRIVALS + 10)]
        bench.engine.publisher.publish([Publication("", "q", b"", key=name) for name in flood])
        bench.take(1)
        if not any(_doors(bench, BUCKETS - 1)):
            return
    raise AssertionError("it waits for ever")


def _doors(bench, bucket):
    keys_ = bench.engine.keys
    return bench.engine.transactions.read(
        lambda work: work.tr.get_range(keys_.arrivals_from("q", bucket), keys_.arrivals("q")[1], snapshot=True)
    )


def test_by_age_no_turn_is_served_twice_by_a_claim():
    """Its place changes with its next message; behind a blocked key stand those only that stood there before."""
    bench = Bench(FaultyDatabase())
    bench.engine.queues.change_control("q", ageing=5)
    for key, payload in (("first", b"0"), ("z", b"z1"), ("k", b"k1"), ("z", b"z2"), ("z", b"z3")):
        bench.put(payload, key=key)
        bench.later(10)
    assert bench.payloads(1) == [b"0"]
    bench.engine.queues.limit("q", "k", KeyLimits(paused=True))
    assert bench.payloads(10) == [b"z1", b"z2", b"z3"]
    bench.check()
