"""A publication with a dedup id is stored once within its window: ONCE-PUBLISHED."""

import pytest

from kombu_fdb.errors import CapacityExceeded, InvalidArgument, QueueError
from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration


def once(dedup_id="d", queue="q", exchange="", window_ms=10_000, payload=b"a"):
    return Publication(exchange, queue, payload, dedup_id=dedup_id, dedup_window_ms=window_ms)


def test_the_window_counts_from_the_first(bench):
    bench.engine.publisher.publish([once()])
    bench.later(9)
    bench.engine.publisher.publish([once()])
    assert bench.counts() == (1, 0, 0)
    bench.later(1)
    bench.engine.publisher.publish([once()])
    assert bench.counts() == (2, 0, 0)


def test_the_end_of_the_message_does_not_end_the_window(bench):
    bench.engine.publisher.publish([once()])
    bench.engine.messages.ack([bench.take()[0].lease])
    assert bench.another().publisher.publish([once()]) == [["q"]], "its publisher hears what the first one heard"
    assert bench.counts() == (0, 0, 0)


def test_an_id_counts_for_one_destination(bench):
    bench.engine.publisher.publish([once(queue="one"), once(queue="two"), once("e", queue="one")])
    assert (bench.counts("one")[0], bench.counts("two")[0]) == (2, 1)


def test_twice_in_one_batch(bench):
    bench.engine.publisher.publish([once(), once(payload=b"later"), once("e")])
    assert bench.payloads() == [b"a", b"a"]


def test_every_queue_of_an_exchange_gets_one(bench):
    bench.engine.queues.declare_exchange(Exchange("x", "fanout"))
    bench.engine.queues.bind("one", "x", "")
    bench.engine.queues.bind("two", "x", "")
    for _ in range(2):
        bench.engine.publisher.publish([once(exchange="x", queue="")])
    assert (bench.counts("one")[0], bench.counts("two")[0]) == (1, 1)


def test_a_refused_message_was_not_published(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}))
    bench.put(b"full")
    with pytest.raises(CapacityExceeded):
        bench.engine.publisher.publish([once()])
    bench.engine.queues.purge("q")
    bench.engine.publisher.publish([once()])
    assert bench.counts() == (1, 0, 0)


def test_a_duplicate_takes_no_room(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}))
    bench.engine.publisher.publish([once()])
    bench.engine.publisher.publish([once()])
    assert bench.counts() == (1, 0, 0)


# -- a second id, of a publisher that may come again -------------------------------------------------------------------


def row(once_id="row", dedup_id="", window_ms=10_000):
    return once(dedup_id, window_ms=window_ms)._replace(once_id=once_id, once_window_ms=60_000)


def test_one_that_comes_again_is_not_stored_though_its_dedup_window_is_over(bench):
    bench.engine.publisher.publish([row(dedup_id="d")])
    bench.later(30)
    bench.engine.publisher.publish([row(dedup_id="d")])
    assert bench.counts() == (1, 0, 0)
    bench.engine.publisher.publish([row("other", dedup_id="d")])
    assert bench.counts() == (2, 0, 0), "the one that came again began no new window"


def test_another_one_of_the_same_dedup_id_is_not_stored_and_not_when_it_comes_again(bench):
    bench.engine.publisher.publish([row("one", dedup_id="d"), row("two", dedup_id="d")])
    assert bench.counts() == (1, 0, 0)
    bench.later(30)
    bench.engine.publisher.publish([row("two", dedup_id="d")])
    assert bench.counts() == (1, 0, 0)


def test_without_a_dedup_id_the_other_one_is_enough(bench):
    for _ in range(2):
        bench.engine.publisher.publish([row("one"), row("two")])
    assert bench.counts() == (2, 0, 0)
    bench.later(61)
    bench.engine.publisher.publish([row("one")])
    assert bench.counts() == (3, 0, 0)


def test_two_publishers_at_once(bench, threads):
    engines = [bench.another() for _ in range(4)]
    list(threads.map(lambda engine: engine.publisher.publish([once()]), engines))
    assert bench.counts() == (1, 0, 0)


def test_ids_that_are_over_are_cleared(bench):
    bench.engine.publisher.publish([once(str(number)) for number in range(700)])
    bench.later(5)
    bench.engine.publisher.publish([once("late")])
    bench.later(6)
    bench.engine.publisher.publish([once("1")])
    assert [bench.engine.upkeep.clear_dedup_part(kept_ms=0) for _ in range(2)] == [500, 200]
    bench.engine.publisher.publish([once("1"), once("late")])
    assert bench.counts() == (702, 0, 0), "those within their window are known"
    bench.later(60)
    assert bench.engine.upkeep.clear_dedup_part(kept_ms=0) == 2
    assert bench.engine.upkeep.clear_dedup_part(kept_ms=0) == 0


def test_the_duties_clear_them(bench):
    duties = bench.duties()
    bench.engine.publisher.publish([once()])
    for _ in range(2):
        bench.later(3_600)
        bench.engine.sessions.beat(bench.session)
        duties.run_once()
    assert bench.engine.upkeep.clear_dedup_part(kept_ms=0) == 0


def test_too_long_an_id_and_a_senseless_window(bench, broker):
    with pytest.raises(QueueError, match="dedup id is too long"):
        bench.engine.publisher.publish([once("x" * 513)])
    with pytest.raises(QueueError, match="once id is too long"):
        bench.engine.publisher.publish([row("x" * 513)])
    with pytest.raises(InvalidArgument, match="dedup_window"):
        broker.queue("q").put("a", dedup_id="d", dedup_window=0)
