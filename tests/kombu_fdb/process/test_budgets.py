"""No turn of any duty takes longer than its budget and a step, where a transaction takes 4 ms as on a cluster.

Each duty has work for several turns. A transaction does a hundredth of what it does else, so that a thousand messages
take as many of them as a hundred thousand.
"""

import random
from collections import defaultdict

from kit.whole.mortal import small_parts

from kombu_fdb.engine import topology
from kombu_fdb.engine.facade import upkeep
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.metrics import totals
from kombu_fdb.engine.work import Environment
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process.duty_cycle import TURN_S, TURN_TRANSACTIONS, DutyCycle
from kombu_fdb.routing.tables import QueueDeclaration

TRANSACTION_S = 0.004
#: A step that has begun comes to its end; so does a look at what there is to do.
STEP_S = 10 * TRANSACTION_S
#: Of a turn that has ended with its last transaction.
SPENT_S = TURN_TRANSACTIONS * TRANSACTION_S - 1e-9
PART = 5
MANY = 500
#: Duties whose work takes more than a turn.
LONG = {
    "promote",
    "sweep",
    "expire queues",
    "finish deletions",
    "trim dead letters",
    "drop expired messages",
    "clear dedup ids",
    "trim totals",
}


class SlowDatabase:
    """Each transaction takes its time."""

    commit_may_be_unknown = True
    writers_take_turns = False

    def __init__(self, inner, clock):
        self._inner = inner
        self._clock = clock

    def begin(self, *, timeout_s, read_only=False):
        self._clock.advance(TRANSACTION_S)
        return self._inner.begin(timeout_s=timeout_s, read_only=read_only)

    def close(self):
        self._inner.close()


def fill(bench):
    """Queues that are gone or unused, a dead process's own, and messages that are due, dead and expired."""
    engine, keys, dead = bench.engine, bench.engine.keys, bench.engine.sessions.open({}, ttl_s=10.0)
    expiring = {"x-expires": 1_000}

    def declare(work):
        topology.declare_queue(work, QueueDeclaration("large", arguments=expiring))
        for number in range(MANY):
            topology.declare_queue(work, QueueDeclaration(f"unused{number}", arguments=expiring))
            topology.declare_queue(work, QueueDeclaration(f"own{number}", exclusive=True))
            work.tr.set(keys.consumer(f"own{number}", dead, "tag"), b"")
            work.tr.add(keys.total(f"gone{number}", "published"), 1)
            work.tr.add(keys.key_total(f"unused{number}", "key", "published"), 1)
            work.tr.add(keys.key_total("large", f"key{number}", "published"), 1)
            work.tr.set(keys.dedup_end(1, "", "q", f"{number}"), b"")

    engine.transactions.write(declare)

    def put(queue, **given):
        engine.publisher.publish([Publication("", queue, b"", **given) for _ in range(MANY)])

    put("held")
    engine.messages.claim(dead, ["held"], MANY)
    for queue in ("large", "own0", "own1"):
        put(queue)
    put("delayed", due_ms=engine.transactions.now() + 1)
    for queue in ("expired", "q.dead"):
        put(queue, ttl_ms=1)
    bench.later(1)


def test_no_turn_of_a_duty_is_longer_than_its_budget(bench, monkeypatch):
    fill(bench)
    small_parts(monkeypatch, PART)
    monkeypatch.setattr(upkeep, "ROWS_PER_TRANSACTION", 1_000)  # of a look
    monkeypatch.setattr(totals, "KEYS_KEPT", 5)
    environment = Environment(bench.clock, random_id, random.Random(7))
    engine = Engine(SlowDatabase(bench.database, bench.clock), bench.namespace, environment)
    duties = DutyCycle(engine, bench.clock, bench.session, sweep_interval_s=5.0)
    turns = defaultdict(list)

    def timed(duty):
        run = duty.run

        def run_and_note(guard, budget):
            began = bench.clock.monotonic()
            pause_s = run(guard, budget)
            turns[duty.name].append(bench.clock.monotonic() - began)
            return pause_s

        return run_and_note

    for duty in duties._duties:
        monkeypatch.setattr(duty, "run", timed(duty))
    for pause_s in (*[2.5] * 8, 200.0, 200.0):
        while duties.run_once() == 0:
            bench.engine.sessions.beat(bench.session)
        bench.later(pause_s)
        bench.engine.sessions.beat(bench.session)
    assert max(max(each) for each in turns.values()) <= TURN_S + STEP_S, {
        name: max(each) for name, each in turns.items()
    }
    assert {name for name, each in turns.items() if max(each) >= SPENT_S} >= LONG
    left = bench.engine.inspect.queues()
    assert {name: (each.ready, each.delayed, each.leased) for name, each in left.items()} == {
        "held": (MANY, 0, 0),
        "delayed": (MANY, 0, 0),
    }
