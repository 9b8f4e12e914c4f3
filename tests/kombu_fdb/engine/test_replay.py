"""What a dead letter is when it is back: as good as new, but for what it has been through."""

import pytest
from kit import duties

from kombu_fdb.engine import dead_letters
from kombu_fdb.engine.dead_letters import replay_row
from kombu_fdb.errors import QueueError
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.routing.tables import QueueDeclaration


def die(bench, *payloads, key=""):
    bench.put(*payloads, key=key)
    bench.engine.messages.reject([each.lease for each in bench.take() if each.lease])


def replay(bench, limit=100):
    return duties.replay(bench.engine, "q", limit)


def test_it_waits_among_the_messages_of_its_key(bench):
    """So the keys take turns again."""
    die(bench, b"a1", b"a2", key="a")
    bench.put(b"b1", b"b2", key="b")
    assert replay(bench) == 2
    assert {name: counts.ready for name, counts in bench.engine.inspect.keys_of("q").items()} == {"a": 2, "b": 2}
    assert bench.payloads() == [b"b1", b"a1", b"b2", b"a2"]


def test_its_redeliveries_count_from_zero_again(bench):
    """Those of the dead letter, too."""
    die(bench, b"x")
    bench.engine.messages.release([each.lease for each in bench.take(1, "q.dead") if each.lease])
    assert [letter.redeliveries for letter in bench.engine.inspect.peek("q.dead", 1)] == [1]
    assert replay(bench) == 1
    assert [taken.redeliveries for taken in bench.take()] == [0]


def test_its_priority_is_that_of_its_place_again(bench):
    bench.put(b"x", priority=7)
    bench.engine.messages.reject([each.lease for each in bench.take() if each.lease])
    assert replay(bench) == 1
    (message,) = bench.engine.transfer.dump("q")
    assert (message.priority, message.priority_before) == (7, 0)


def test_it_lives_as_long_as_its_queue_says_from_now_on(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": 60_000}))
    die(bench, b"x")
    bench.later(3_600)
    assert replay(bench) == 1
    bench.later(59)
    assert bench.engine.inspect.peek("q", 1)[0].expires_ms == bench.clock.wall_ms() + 1_000
    bench.later(1)
    assert bench.payloads() == []


def test_without_a_time_to_live_it_lives_for_ever(bench):
    die(bench, b"x")
    assert replay(bench) == 1
    assert bench.engine.inspect.peek("q", 1)[0].expires_ms == 0


def test_one_that_has_outlived_its_time_is_gone_and_not_counted(bench):
    """At that very moment, too."""
    die(bench, b"x")
    bench.later(bench.environment.dead_ttl_ms / 1000)
    assert replay(bench) == 0
    assert bench.counts() == bench.counts("q.dead") == (0, 0, 0)
    assert bench.engine.inspect.find_task(b"x".hex()) == []


def test_one_alone_that_has_outlived_its_time_is_refused(bench):
    die(bench, b"x")
    (row,) = bench.engine.upkeep.rows(range_of(bench.engine.keys.ready("q.dead")))
    bench.later(bench.environment.dead_ttl_ms / 1000)
    with pytest.raises(QueueError, match="expired"):
        bench.work(lambda work: replay_row(work, "q.dead", row))
    assert bench.counts() == (0, 0, 0)


@pytest.mark.parametrize("limit", [1, 3, 4, 6])
def test_a_limit_holds_over_all_parts(bench, monkeypatch, limit):
    monkeypatch.setattr(dead_letters, "LETTERS_PER_TRANSACTION", 2)
    die(bench, *(b"%d" % number for number in range(6)))
    assert replay(bench, limit) == limit
    assert bench.counts()[0] == limit
    assert bench.counts("q.dead")[0] == 6 - limit
