"""How the oldest of a full queue give way: a publisher tries for a while, and never fails for it. Who is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.engine.facade import upkeep
from kombu_fdb.engine.messages import overflow
from kombu_fdb.errors import CapacityExceeded
from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.testing.faults import Fault
from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryDatabase(), task_ids=True)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 2}))
    bench.put(b"a", b"b")
    yield bench
    bench.check()


def shown(bench: Bench) -> list[bytes]:
    return [each.payload for each in bench.engine.inspect.peek("q", 100)]


@pytest.mark.parametrize("lost", range(overflow.ATTEMPTS))
def test_a_publisher_that_loses_a_race_tries_again(bench: Bench, lost: int) -> None:
    bench.database.faults.at_commits(None, *[Fault.CONFLICT] * lost)
    bench.put(b"c")
    assert shown(bench) == [b"b", b"c"]


def test_after_so_many_races_it_is_left_to_the_next_one(bench: Bench) -> None:
    bench.database.faults.at_commits(None, *[Fault.CONFLICT] * overflow.ATTEMPTS)
    bench.put(b"c")
    assert shown(bench) == [b"a", b"b", b"c"]
    bench.put(b"d")
    assert shown(bench) == [b"c", b"d"]


def test_a_store_that_fails_afterwards_fails_no_publisher(bench: Bench) -> None:
    """Its message is stored."""
    bench.database.faults.at_commits(None, *[Fault.UNAVAILABLE] * 1_000)
    bench.put(b"c")
    bench.database.faults.stop()
    assert shown(bench) == [b"a", b"b", b"c"]
    assert bench.engine.upkeep.trim_full_part("q") == 1
    assert shown(bench) == [b"b", b"c"]


def test_a_queue_with_room_does_not_hide_a_full_one_of_the_same_batch(bench: Bench) -> None:
    bench.engine.queues.declare(QueueDeclaration("roomy", arguments={"x-max-length": 9}))
    bench.engine.queues.declare(QueueDeclaration("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"}))
    with pytest.raises(CapacityExceeded):
        bench.engine.publisher.publish([Publication("", "roomy", b"c"), Publication("", "full", b"d")])
    assert (bench.counts("roomy"), bench.counts("full")) == ((0, 0, 0), (0, 0, 0))


def test_all_that_are_over_their_maximum_are_trimmed_and_a_while_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overflow, "MOST_LEAVING", 2)
    monkeypatch.setattr(upkeep, "MOST_TRIMS", 2)
    for queue in ("one", "other"):
        bench.put(*(b"%d" % number for number in range(7)), queue=queue)
        bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-max-length": 1}))
    assert bench.engine.upkeep.trim_full() == 8
    assert bench.engine.upkeep.trim_full() == 4
    assert [bench.counts(queue)[0] for queue in ("one", "other")] == [1, 1]
