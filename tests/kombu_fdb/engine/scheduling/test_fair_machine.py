"""The fair ring as a state machine.

As long as only puts, takes and acks happen, the order is exactly that of queue-by. Whatever happens: a key's messages
come in their order, those released at their old places; a limited key never has more in flight than it may, a paused
one gives nothing; and a claim takes as many messages as there are to be had, so no key is forgotten.
"""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.machines import Machine, run
from kit.simulation import twin

from kombu_fdb.model import KeyLimits, QueueControl
from kombu_fdb.testing.clock import ManualClock

keys = st.sampled_from(["", "a", "b", "c"])
#: A rate is time's and not the ring's: ``test_rates.py`` has it.
limits = st.builds(
    KeyLimits,
    paused=st.sampled_from([False, False, False, True]),
    weight=st.integers(1, 3),
    max_in_flight=st.sampled_from([None, 1, 1, 2]),
    priority=st.sampled_from([None, None, 0, 7]),
)
controls = st.builds(
    QueueControl,
    paused=st.sampled_from([False, False, False, True]),
    newcomer=st.sampled_from(["next", "current", "first"]),
    ageing=st.sampled_from([None, None, 60.0]),
    every_key=st.sampled_from([KeyLimits(), KeyLimits(max_in_flight=1), KeyLimits(priority=7)]),
)


class QueueBy:
    """The reference: clj-queue-by, as its README documents it."""

    def __init__(self):
        self.snapshot = deque()
        self.queues = {}

    def push(self, key, item):
        self.queues.setdefault(key, deque()).append((item, key))

    def pull(self):
        if not self.snapshot:
            self.snapshot = deque(sorted(queue.popleft() for queue in self.queues.values()))
            self.queues = {key: queue for key, queue in self.queues.items() if queue}
        return self.snapshot.popleft()[0] if self.snapshot else None


class Ring(Machine):
    """One consumer; each message is a number, in the order in which they came."""

    def __init__(self):
        super().__init__()
        self.bench = Bench(self.database)
        self.number = 0
        #: Waiting messages by key, and those in flight.
        self.waiting = {}
        self.held = []
        self.limits = {}
        self.control = QueueControl()
        #: None from the first thing on that queue-by does not know, until the queue is empty again.
        self.reference = QueueBy()

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(key=keys, number=st.integers(1, 4))
    def put(self, key, number):
        for _ in range(number):
            self.number += 1
            self.bench.put(b"%d" % self.number, key=key)
            self.waiting.setdefault(key, []).append(self.number)
            if self.reference is not None:
                self.reference.push(key, self.number)

    @rule(limit=st.integers(1, 5))
    def take(self, limit):
        available = self._available()
        taken = self.bench.take(limit)
        self.held += taken
        if self.reference is not None:
            expected = [self.reference.pull() for _ in range(limit)]
            assert [int(each.payload) for each in taken] == [each for each in expected if each is not None]
        for each in taken:
            assert int(each.payload) == self.waiting[each.key].pop(0), "in the key's own order"
        assert len(taken) == min(limit, available), "no key is forgotten, and none gets too much"

    def _available(self):
        return (
            0 if self.control.paused else sum(min(len(items), self._room(key)) for key, items in self.waiting.items())
        )

    def _room(self, key):
        given = self.limits.get(key, self.control.every_key)
        if given.paused:
            return 0
        in_flight = sum(each.key == key for each in self.held)
        return 1_000 if given.max_in_flight is None else max(0, given.max_in_flight - in_flight)

    @rule(number=st.integers(0, 20))
    def ack(self, number):
        if self.held:
            assert self.bench.engine.messages.ack([self.held.pop(number % len(self.held)).lease]) == [True]

    @rule(number=st.integers(0, 20))
    def release(self, number):
        if self.held:
            back = self.held.pop(number % len(self.held))
            assert self.bench.engine.messages.release([back.lease], counted=False) == [True]
            self.waiting[back.key] = sorted([*self.waiting[back.key], int(back.payload)])
            self.reference = None

    @rule(seconds=st.sampled_from([1, 100]))
    def wait(self, seconds):
        """Only ageing knows of it."""
        self.bench.later(seconds)

    @rule(key=keys, given=st.one_of(st.none(), limits))
    def limit(self, key, given):
        self.bench.engine.queues.limit("q", key, given)
        self.limits.pop(key, None)
        if given is not None:
            self.limits[key] = given
        self.reference = None

    @rule(given=controls)
    def change_control(self, given):
        self.bench.engine.queues.set_control("q", given)
        self.control, self.reference = given, None

    @rule(every_key=st.sampled_from([KeyLimits(paused=True), KeyLimits(max_in_flight=1)]), limit=st.integers(1, 5))
    def hold_and_let_go(self, every_key, limit):
        """No lease ends meanwhile, so that only the change of limits can wake the parked keys."""
        self.change_control(QueueControl(every_key=every_key))
        self.take(5)
        self.take(5)
        self.change_control(QueueControl())
        self.take(limit)

    @rule(limit=st.integers(1, 5), number=st.integers(0, 20))
    def ack_and_take(self, limit, number):
        """What a worker does most of the time."""
        self.ack(number)
        self.take(limit)

    @precondition(lambda self: self.number > 20)
    @rule()
    def empty(self):
        """Without limits everything comes; then the ring begins anew."""
        self.bench.engine.queues.set_control("q", QueueControl())
        for key in [*self.limits]:
            self.bench.engine.queues.limit("q", key, None)
        self.limits, self.control, self.reference = {}, QueueControl(), None
        self.take(1_000)
        self.bench.engine.messages.ack([each.lease for each in self.held])
        self.held = []
        assert not any(self.waiting.values())
        self.reference = QueueBy()

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def counters_equal_a_scan(self):
        self.bench.check()

    def teardown(self):
        self.bench.clean()


@pytest.mark.timeout(900)  # a busy machine
@pytest.mark.parametrize(("database", "examples"), [("memory", 120), ("sqlite", 15)], indirect=["database"])
def test_the_ring(database, examples):
    run(Ring, database, examples=examples, steps=40)


def turns_by_turns(ring):
    ring.put("a", 3)
    ring.put("b", 3)
    ring.take(4)


def a_slot_that_is_freed(ring):
    ring.limit("a", KeyLimits(max_in_flight=1))
    ring.put("a", 3)
    ring.take(2)
    ring.take(2)
    ring.ack_and_take(2, 0)


def limits_that_come_and_go(ring):
    ring.put("a", 3)
    ring.put("b", 1)
    ring.hold_and_let_go(KeyLimits(max_in_flight=1), 5)


def more_than_may_be_in_flight(ring):
    ring.limit("a", KeyLimits(max_in_flight=1))
    ring.put("a", 2)
    ring.take(1)
    ring.take(1)


#: Twins, and a history in which each is found out.
BROKEN = {
    "a served key keeps its turn": turns_by_turns,
    "an ended lease frees no key": a_slot_that_is_freed,
    "a limit changed rings no bell": limits_that_come_and_go,
    "a key's leases are not counted": more_than_may_be_in_flight,
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_machine_catches_a_broken_ring(name):
    """By this history, and so each time; by chance as well, as the rules are those of the machine."""
    live(BROKEN[name])
    with twin(name), pytest.raises(AssertionError):
        live(BROKEN[name])


def live(history):
    """One history, with what must hold after it."""

    class InMemory(Ring):
        database = FaultyDatabase(clock=ManualClock())  # no transaction is too old on a busy machine

    ring = InMemory()
    history(ring)
    ring.counters_equal_a_scan()
    ring.teardown()
