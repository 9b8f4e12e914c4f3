"""How ended dedup windows are cleared; what a window does is in ``tests/parity/test_dedup.py``."""

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.engine.messages import publish
from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration


@pytest.fixture
def bench(counted):
    return Bench(counted)


def test_ended_windows_are_cleared_so_many_at_once_and_without_a_conflict(bench, counted):
    for number in range(3):
        bench.engine.publisher.publish([Publication("", "q", b"a", dedup_id=str(number), dedup_window_ms=1)])
    bench.later(1)
    looked = []
    counted.reset()
    for _ in range(3):
        bench.work(lambda work: looked.append(publish.clear_ended(work, 2, work.now_ms)))
    assert looked == [2, 1, 0]
    assert counted.total().conflict_ranges == 0


@pytest.mark.parametrize("name", ["dedup", "once"])
def test_what_reached_no_queue_is_no_earlier_one(bench, name):
    """Its publisher was told that no queue has it, and publishes it again."""
    bench.engine.queues.declare_exchange(Exchange("news", "direct"))
    again = Publication("news", "k", b"a")._replace(**{f"{name}_id": "1", f"{name}_window_ms": 1_000})
    assert bench.engine.publisher.publish([again]) == [[]]
    bench.engine.queues.declare(QueueDeclaration("q"))
    bench.engine.queues.bind("q", "news", "k")
    for _ in range(2):
        assert bench.engine.publisher.publish([again]) == [["q"]]
    assert bench.counts()[0] == 1
