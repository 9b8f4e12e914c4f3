"""Which queues a session consumes, as its heartbeat shows them."""

import pytest
from kit.conformance.queue import Bench
from kit.simulation.connection import Flag

from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.settings.options import Options


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        pytest.param([f"tenant-{number:03}" for number in range(500)], 500, id="many"),
        pytest.param([f"{number:03}{'é' * 126}" for number in range(500)], 98, id="as long as names can be"),
    ],
)
def test_each_queue_of_a_worker_with_many_has_a_consumer(database, names, shown):
    bench = Bench(database)
    session = ClientSession(bench.engine, Options(), bench.session, Flag(), bench.clock)
    session.consumed["a", "b"] = names
    bench.engine.sessions.beat(bench.session, consumed=session.queues)
    (facts,) = bench.engine.inspect.sessions()
    assert facts.consumed == names[:shown]
    bench.clean()
