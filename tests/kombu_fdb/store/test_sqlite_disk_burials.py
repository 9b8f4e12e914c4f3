"""On a full disk there is no room for death records: such messages delay no others."""

import pytest
from kit.disks import fill_queue, small_broker

from kombu_fdb.engine.parts import Budget
from kombu_fdb.errors import StoreFull
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.duties import Guard
from kombu_fdb.process.duty_cycle import Sweep
from kombu_fdb.routing.tables import Exchange

PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path):
    with small_broker(tmp_path / "disk", PATIENCE_S) as broker:
        yield broker


def use_up(broker):
    """What publishers may take, and what dead letters may add to it."""
    small = broker.queue("small")
    small.put_many([b""] * 400)
    for size in (20_000, 100):
        fill_queue(broker.queue("filler"), size)
    for story in ("y" * 2_000, ""):
        with pytest.raises(StoreFull):
            while job := small.take(timeout=PATIENCE_S):
                job.bury(error=story)


#: Each of which dies into so many queues that no disk of this size has room for all.
MANY, LETTERS = 200, 20


def deadly(broker, **arguments):
    """A queue in which messages die expensively."""
    broker.topology.declare_exchange(Exchange("graveyard", "fanout", True, False, {}))
    for number in range(LETTERS):
        broker.declare(f"grave-{number}")
        broker.topology.bind(f"grave-{number}", "graveyard", "")
    return broker.declare("q", arguments={"x-dead-letter-exchange": "graveyard", **arguments})


@pytest.mark.parametrize("key", ["", "tenant"])
def test_a_message_that_cant_be_buried_delays_none_behind_it(broker, key):
    """The claim that met it was refused as a whole, so no message of this queue was claimed."""
    queue = deadly(broker)
    queue.put_many([b"expired"] * MANY, ttl=0.001, key=key)
    queue.put(b"alive", key=key)
    use_up(broker)
    job = queue.take(timeout=PATIENCE_S)
    assert job is not None
    assert job.payload == b"alive"
    job.ack()
    left = queue.stats()
    assert left.delayed > 0
    assert left.delayed + broker.queue("grave-7").count() == MANY
    assert left.ready == left.leased == 0


def test_a_dead_worker_s_message_that_cant_be_buried_delays_none_of_its_others(broker):
    """The sweep was refused as a whole, and none of that worker's messages came back."""
    queue = deadly(broker, **{"x-delivery-limit": 0})
    other = broker.queue("other")
    queue.put_many([b"deadly"] * MANY)
    other.put_many([b"harmless"] * 5)
    engine = queue._engine
    dead = engine.sessions.open({}, ttl_s=0.1)
    assert len(engine.messages.claim(dead, ["q", "other"], MANY + 5)) == MANY + 5
    use_up(broker)
    reported = []
    clock = Clock()
    guard = Guard(engine.upkeep, clock, lambda duty, subject, error: reported.append(duty))
    sweep = Sweep(engine, clock, guard, engine.transactions.ids(), 0.1)
    until = clock.monotonic() + PATIENCE_S
    while other.stats().ready < 5 and clock.monotonic() < until:
        sweep.run(guard, Budget(clock))
    assert other.stats().ready == 5
    assert reported == ["sweep"]
    assert queue.stats().leased > 1


def test_a_duty_that_a_full_disk_refuses_keeps_no_other_from_its_turn(broker):
    """Nor does it fail and work again, with a line in the log each time."""
    use_up(broker)
    reported = []
    guard = Guard(broker.queue("q")._engine.upkeep, Clock(), lambda duty, _, error: reported.append(duty))
    filler = broker.queue("filler")
    for _ in range(2):
        guard.attempt("sample", "", lambda: filler.put(b"x" * 20_000))
    assert reported == ["sample"]
    assert not broker.queue("q")._engine.upkeep.asides()
