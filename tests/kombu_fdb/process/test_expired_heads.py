"""The duty that looks at the heads of queues whose messages expire there: how soon it looks again."""

import pytest
from kit.conformance.newer import make_newer
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.parts import Budget
from kombu_fdb.process.duties import LOOK_S, Guard, expired_heads
from kombu_fdb.routing.tables import QueueDeclaration


def next_look(bench):
    guard = Guard(bench.engine.upkeep, bench.clock, lambda *_: None)
    return expired_heads(bench.engine, bench.clock).run(guard, Budget(bench.clock, seconds=1.0, transactions=50))


@pytest.mark.parametrize("key", ["", "k"])
def test_it_goes_on_at_once_only_behind_what_it_has_dropped(key):
    """Else a message that it can't drop has it look again and again, without a pause."""
    bench = Bench(FaultyDatabase())
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": 1_000}))
    bench.put(b"a", key=key)
    make_newer(bench)
    bench.put(b"b", key="other")
    bench.later(2)
    assert next_look(bench) == 0.0
    assert next_look(bench) == LOOK_S
    assert bench.counts() == (1, 0, 0)
