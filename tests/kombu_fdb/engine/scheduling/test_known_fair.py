"""Claims that know which queues are fair, and so read their order with the head, deliver what others do.

Two stores have the same history. In one of them the process forgets before each claim which queues are fair.
"""

import random

import pytest
from kit.conformance.queue import Bench
from kit.duties import promote_all
from kit.faults import FaultyDatabase

from kombu_fdb.model import ClaimTerms, KeyLimits

KEYS = "", "", "a", "b", "c/1", "c/2", "d/1"
QUEUES = [["q"], ["q", "p"], ["p", "q"], ["q", "p", "x", "y"], ["q", "p", "x", "y", "z"]]
LIMITS = (
    None,
    KeyLimits(max_in_flight=2),
    KeyLimits(paused=True),
    KeyLimits(weight=3),
    KeyLimits(priority=5),
    KeyLimits(rate=5, burst=2),
)
CONTROLS = (
    {"newcomer": "current"},
    {"ageing": 0.5},
    {"ageing": None},
    {"paused": True},
    {"paused": False},
)


class History:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.knows, self.forgets = Bench(FaultyDatabase()), Bench(FaultyDatabase())
        self.benches = self.knows, self.forgets
        self.held = []
        self.sent = 0

    def both(self, verb):
        for bench in self.benches:
            verb(bench)

    def put(self):
        items = [b"%d" % (self.sent + number) for number in range(self.rng.randint(1, 6))]
        self.sent += len(items)
        to = {
            name: self.rng.choice(these)
            for name, these in (("key", KEYS), ("priority", (0, 0, 5, 9)), ("queue", "qqp"))
        }
        self.both(lambda bench: bench.put(*items, **to))

    def claim(self):
        most, queues, chance = self.rng.choice([1, 1, 2, 3, 8]), self.rng.choice(QUEUES), self.rng.random()
        settled, self.held = (self.held, []) if chance < 0.4 else ([], self.held)
        self.forgets.engine.transactions.fair_queues.clear()
        found = []
        for number, bench in enumerate(self.benches):
            bench.engine.transactions.rng = random.Random(chance)
            terms = ClaimTerms(acks=[each[number].lease for each in settled])
            found.append(bench.engine.messages.claim(bench.session, queues, most, terms=terms))
        assert [*map(shown, found[0])] == [*map(shown, found[1])]
        self.held += zip(*found, strict=True)

    def settle(self):
        some = self.rng.randint(0, len(self.held))
        done, self.held = self.held[:some], self.held[some:]
        verb = self.rng.choice(["ack", "release"])
        for number, bench in enumerate(self.benches):
            getattr(bench.engine.messages, verb)([each[number].lease for each in done])

    def limit(self):
        key, limits = self.rng.choice(["", "a", "c", "c/1"]), self.rng.choice(LIMITS)
        self.both(lambda bench: bench.engine.queues.limit("q", key, limits))

    def control(self):
        changes = self.rng.choice(CONTROLS)
        self.both(lambda bench: bench.engine.queues.change_control("q", **changes))

    def wait(self):
        self.both(lambda bench: bench.later(3))
        self.both(lambda bench: promote_all(bench.engine))


def shown(delivery):
    return delivery.queue, delivery.key, delivery.payload


@pytest.mark.parametrize("seed", range(40))
def test_what_a_process_knows_changes_no_delivery(seed):
    history = History(seed)
    steps = [history.put] * 5 + [history.claim] * 4 + [history.settle] * 2 + [history.wait]
    steps += [history.limit] * (seed % 3 > 0) + [history.control] * (seed % 2)
    for _ in range(120):
        history.rng.choice(steps)()
    assert history.knows.engine.transactions.fair_queues
