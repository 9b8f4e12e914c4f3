"""Two calls at once, case by case: the second runs between the reads and the commit of the first.

Each race is run as it is, and with the guard it depends on taken out (``simulation.TWINS``), which must break it: else
the race would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kombu_fdb.errors import LeaseLost
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.testing.invariants import check_counts, messages
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.queue_conformance import Bench
from kombu_fdb.testing.simulation import twin

Race = Callable[[Bench], None]


@pytest.fixture
def bench() -> Bench:
    return Bench(MemoryDatabase())


def during(bench: Bench, first: Callable[[], object], second: Callable[[], object]) -> object:
    """Run ``second`` once, just before the first writing commit of ``first``."""
    database = bench.database
    assert isinstance(database, MemoryDatabase)

    def once() -> None:
        database.before_commit = None
        second()

    database.before_commit = once
    return first()


def two_claims(bench: Bench) -> None:
    bench.put(b"a")
    taken: list[object] = []
    other, session = bench.another(), bench.engine.open_session({})
    during(bench, lambda: taken.extend(bench.take()), lambda: taken.extend(other.claim(session, ["q"], 1)))
    assert len(taken) == 1
    check_counts(bench.engine)


def claim_while_the_session_ends(bench: Bench) -> None:
    bench.put(b"a")
    with pytest.raises(LeaseLost):
        during(bench, bench.take, lambda: bench.another().close_session(bench.session))
    assert bench.counts() == (1, 0, 0)


def ack_while_swept(bench: Bench) -> None:
    bench.put(b"a")
    (delivery,) = bench.take()
    acked = during(
        bench, lambda: bench.engine.ack([delivery.lease]), lambda: bench.another().close_session(bench.session)
    )
    assert acked == [False]
    assert bench.counts() == (1, 0, 0)
    check_counts(bench.engine)


def sweep_while_acked(bench: Bench) -> None:
    bench.put(b"a")
    (delivery,) = bench.take()
    bench.engine.fence(bench.session, dict(bench.engine.beats())[bench.session])
    during(
        bench,
        lambda: bench.engine.release_session(bench.session),
        lambda: bench.another().ack([delivery.lease]),
    )
    assert messages(bench.engine) == {}
    check_counts(bench.engine)


def fence_while_beating(bench: Bench) -> None:
    stale = dict(bench.engine.beats())[bench.session]
    fenced = during(
        bench, lambda: bench.engine.fence(bench.session, stale), lambda: bench.another().beat(bench.session)
    )
    assert fenced is False
    assert bench.engine.beat(bench.session)


def two_promoters(bench: Bench) -> None:
    bench.put(b"a", due_ms=bench.clock.wall_ms() + 1)
    bench.later(1)
    during(bench, bench.engine.promote, bench.another().promote)
    assert bench.counts() == (1, 0, 0)
    assert len(messages(bench.engine)) == 1


def delay_while_the_last_delayed_is_promoted(bench: Bench) -> None:
    """The promoter clears the note that the queue has delayed messages, having seen none left."""
    bench.put(b"a", due_ms=bench.clock.wall_ms() + 1)
    bench.later(1)
    due_ms = bench.clock.wall_ms() + 1000
    during(bench, bench.engine.promote, lambda: bench.put(b"b", due_ms=due_ms))
    bench.later(2)
    bench.engine.promote()
    assert bench.payloads() == [b"a", b"b"]


def consume_while_the_queue_expires(bench: Bench) -> None:
    bench.engine.declare_queue(QueueDeclaration("q", arguments={"x-expires": 1000}))
    ((_, last_use, _),) = bench.engine.expiring_queues()
    during(
        bench,
        lambda: bench.engine.expire_queue("q", last_use),
        lambda: bench.another().add_consumer(bench.session, "q", "tag"),
    )
    assert bench.engine.queue("q") is not None


def claim_while_purged(bench: Bench) -> None:
    bench.put(b"a")
    taken: list[object] = []
    other, session = bench.another(), bench.engine.open_session({})
    purged = during(bench, lambda: bench.engine.purge("q"), lambda: taken.extend(other.claim(session, ["q"], 1)))
    assert (purged, len(taken)) == (0, 1)
    check_counts(bench.engine)


GUARDS: dict[Race, str] = {
    two_claims: "a claim does not conflict on what it takes",
    claim_while_the_session_ends: "a claim does not conflict with the end of its session",
    ack_while_swept: "an acknowledgement does not conflict on the lease",
    sweep_while_acked: "the sweep does not conflict on the leases",
    fence_while_beating: "fencing ignores the last beat",
    two_promoters: "two promoters do not conflict",
    delay_while_the_last_delayed_is_promoted: "two promoters do not conflict",
    consume_while_the_queue_expires: "a queue expires under its consumer",
    claim_while_purged: "a purge does not conflict with claims",
}
races = pytest.mark.parametrize("race", GUARDS, ids=lambda race: race.__name__)


@races
def test_race(bench: Bench, race: Race) -> None:
    race(bench)


@races
def test_without_its_guard_the_race_is_lost(bench: Bench, race: Race) -> None:
    with twin(GUARDS[race]), pytest.raises((AssertionError, pytest.fail.Exception)):
        race(bench)
