"""What becomes of each message of a batch, and of each copy of a message."""

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase, CountingTransaction
from kit.faults import FaultyDatabase

from kombu_fdb.errors import CapacityExceeded
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

LARGE = b"x" * (INLINE_BYTES + 1)


def test_those_behind_a_duplicate_are_stored(bench):
    first = Publication("", "q", b"a", dedup_id="a", dedup_window_ms=1000)
    bench.engine.publisher.publish([first])
    bench.engine.publisher.publish([first, Publication("", "q", b"b"), first, Publication("", "q", b"c")])
    assert bench.payloads() == [b"a", b"b", b"c"]


@pytest.mark.parametrize("number", [2, 3])
def test_each_copy_of_a_large_message_has_a_payload_of_its_own(bench, number):
    queues = [f"q{each}" for each in range(number)]
    bench.engine.queues.declare_exchange(Exchange("wide", "fanout"))
    for queue in queues:
        bench.engine.queues.bind(queue, "wide", "")
    bench.engine.publisher.publish([Publication("wide", "", LARGE, message_id=b"m" * 16)])
    ids = []
    for queue in queues:
        (copy,) = bench.take(2, queue)
        assert copy.payload == LARGE
        assert bench.engine.messages.ack([copy.lease]) == [True]
        ids.append(copy.message_id)
    assert b"m" * 16 in ids
    assert {len(each) for each in ids} == {16}
    assert len(set(ids)) == number


def test_copies_of_messages_without_an_id_have_different_ones(bench):
    bench.engine.queues.declare_exchange(Exchange("wide", "fanout"))
    for queue in ("q", "r"):
        bench.engine.queues.bind(queue, "wide", "")
    bench.engine.publisher.publish([Publication("wide", "", b"a"), Publication("wide", "", b"b")])
    assert len({each.message_id for each in bench.take(9, "q", "r")}) == 4


@pytest.mark.parametrize("payload", [b"x", LARGE])
def test_a_message_keeps_the_id_that_it_has(bench, payload):
    bench.engine.publisher.publish([Publication("", "q", payload, message_id=b"m" * 16)])
    assert [each.message_id for each in bench.take()] == [b"m" * 16]


def test_a_message_that_is_due_at_this_moment_needs_room_in_a_full_queue(bench):
    arguments = {"x-max-length": 0, "x-overflow": "reject-publish-dlx"}
    bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))
    now_ms = bench.clock.wall_ms()
    for due_ms in (now_ms, now_ms + 1):
        bench.put(b"x", due_ms=due_ms)
    assert (bench.counts(), bench.counts("q.dead")) == ((0, 1, 0), (1, 0, 0))


def test_a_dead_letter_of_a_full_queue_comes_behind_the_other_copies(bench):
    """As in RabbitMQ, where the queue that is full is another process than the exchange."""
    bench.engine.queues.declare_exchange(Exchange("wide", "fanout"))
    arguments = {"x-max-length": 0, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "wide"}
    bench.engine.queues.declare(QueueDeclaration("full", arguments=arguments))
    for queue in ("full", "r"):
        bench.engine.queues.bind(queue, "wide", "")
    bench.engine.publisher.publish([Publication("wide", "", b"x")])
    assert [len(each.deaths) for each in bench.take(9, "r")] == [0, 1]


def test_a_message_that_is_due_at_this_moment_is_ready(bench):
    now_ms = bench.clock.wall_ms()
    bench.put(b"a", b"b", due_ms=now_ms)
    bench.put(b"c", due_ms=now_ms + 1)
    assert bench.counts() == (2, 1, 0)


def test_a_message_is_delayed_from_the_moment_that_its_publisher_names(bench):
    now_ms = bench.clock.wall_ms()
    bench.clock.advance(0.001)
    bench.engine.publisher.publish([Publication("", "q", b"x", due_ms=now_ms + 1)], now_ms=now_ms)
    assert bench.counts() == (0, 1, 0)


def test_a_payload_that_fits_into_its_record_stands_there(bench):
    bodies = range_of(bench.engine.keys._key("body"))
    bench.put(b"x" * INLINE_BYTES)
    assert bench.engine.upkeep.rows(bodies) == []
    bench.put(LARGE)
    assert len(bench.engine.upkeep.rows(bodies)) == 1


def test_only_what_empties_itself_is_stored_on_a_disk_that_is_nearly_full(monkeypatch):
    """The store is told of all else (``Transaction.fill``)."""
    bench = Bench(CountingDatabase(FaultyDatabase()))
    bench.engine.queues.declare(QueueDeclaration("events", arguments={"x-message-ttl": 5000, "x-expires": 60_000}))
    told = []
    monkeypatch.setattr(CountingTransaction, "fill", lambda _: told.append(True))
    for queues, expected in ((["events"], 0), (["q"], 1), (["events", "q"], 1)):
        told.clear()
        bench.engine.publisher.publish([Publication("", queue, b"x") for queue in queues])
        assert len(told) == expected


@pytest.mark.parametrize("keys", [1, 500])
def test_capacities_of_all_keys_of_a_batch_are_read_at_once(keys):
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.engine.queues.limit("q", "another", KeyLimits(capacity=3))
    batch = [Publication("", "q", b"x", key=f"k{number % keys}") for number in range(500)]
    bench.engine.publisher.publish(batch)
    counted.reset()
    bench.engine.publisher.publish(batch)
    assert counted.total().round_trips == 3


def test_a_delayed_message_needs_no_room_in_its_key():
    """As the retry of a running task, whose place others have taken meanwhile."""
    bench = Bench(FaultyDatabase())
    bench.engine.queues.limit("q", "k", KeyLimits(capacity=2))
    bench.engine.publisher.publish([Publication("", "q", b"x", key="k")] * 2)
    bench.engine.publisher.publish([Publication("", "q", b"retry", key="k", due_ms=bench.clock.wall_ms() + 10)])
    with pytest.raises(CapacityExceeded):
        bench.engine.publisher.publish([Publication("", "q", b"x", key="k")])
    assert bench.counts()[:2] == (2, 1)
