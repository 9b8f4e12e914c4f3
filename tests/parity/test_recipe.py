"""FoundationDB's queue recipe: what of its features the conformance suites do not ask for."""

from __future__ import annotations

from itertools import chain

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase

from kombu_fdb.errors import QueueError
from kombu_fdb.model import Publication
from kombu_fdb.testing.memory import MemoryDatabase

PATIENCE_S = 60.0


@pytest.mark.parametrize("key", ["", "alice"])
def test_conflict_free_enqueue(key):
    """Each conflicts on its own commit token only, so none is retried, whatever commits in between."""
    memory = MemoryDatabase()
    counted = CountingDatabase(memory)
    bench = Bench(counted)
    bench.put(b"first", key=key)
    rival = bench.another()
    counted.reset()

    def rival_commits_first() -> None:
        memory.before_commit = None
        rival.publisher.publish([Publication("", "q", b"rival", key=key)])

    memory.before_commit = rival_commits_first
    bench.put(b"mine", key=key)
    assert [(cost.conflict_keys, cost.conflict_ranges) for cost in counted.transactions] == [(1, 0), (1, 0)]
    assert bench.payloads() == [b"first", b"rival", b"mine"], "commit order"


def test_first_and_last_by_range_read(broker):
    queue = broker.queue("q")
    queue.put_many([str(number) for number in range(50)])
    assert [each.payload for each in queue.peek()] == [b"0"]
    assert [each.payload for each in queue.peek(reverse=True)] == [b"49"]
    assert [each.payload for each in queue.peek(2, reverse=True)] == [b"49", b"48"]
    assert broker.queue("empty").peek() == broker.queue("empty").peek(reverse=True) == []


def test_first_and_last_of_a_key(broker):
    queue = broker.queue("q")
    for number in range(6):
        queue.put(str(number), key="ab"[number % 2])
    assert [each.payload for each in queue.peek(key="b")] == [b"1"]
    assert [each.payload for each in queue.peek(key="a", reverse=True)] == [b"4"]
    with pytest.raises(QueueError):
        queue.peek(reverse=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_first_and_last_cost_one_row_of_any_backlog(reverse):
    counted = CountingDatabase(MemoryDatabase())
    bench = Bench(counted)
    bench.engine.publisher.publish([Publication("", "q", b"%d" % number) for number in range(1000)])
    counted.reset()
    bench.engine.inspect.peek("q", 1, reverse=reverse)
    assert counted.total().rows == 1


def test_high_contention_dequeue(another, threads):
    """Eight consumers of four processes take all there is, each message once."""
    brokers = [another() for _ in range(4)]
    expected = sorted(b"%d" % number for number in range(200))
    brokers[0].queue("q").put_many(expected)

    def consume(broker) -> list[bytes]:
        taken = []
        while (job := broker.queue("q").take(0)) is not None or broker.queue("q").count():
            if job is not None:
                job.ack()
                taken.append(job.payload)
        return taken

    shares = [each.result(PATIENCE_S * 3) for each in [threads.submit(consume, broker) for broker in brokers * 2]]
    assert sorted(chain.from_iterable(shares)) == expected
    assert brokers[0].queue("q").stats().leased == 0
