"""LinkedBlockingMultiQueue: what of its features the conformance suites do not ask for.

Its sub-queues are the keys of one queue here; where a reader blocks on several queues, they are queues.
"""

from __future__ import annotations

import pytest

PATIENCE_S = 60.0


def drain(queue):
    return [job.payload.decode() for job in queue.take_many(100, 0)]


def test_enable_and_disable(broker):
    queue = broker.queue("q")
    queue.limit("a", capacity=7, priority=5)
    queue.put("1", key="a")
    queue.put("2", key="b")
    queue.pause("a")
    assert drain(queue) == ["2"]
    queue.resume("a")
    assert drain(queue) == ["1"]
    limits = queue.keys()["a"].limits
    assert (limits.capacity, limits.priority, limits.paused) == (7, 5, False), "the switch moves nothing else"


def test_with_all_disabled_a_reader_blocks_as_if_all_were_empty(broker, threads, asleep):
    queue = broker.queue("q")
    for key in "ab":
        queue.put(key, key=key)
        queue.pause(key)
    waiting = asleep(broker)
    taken = threads.submit(queue.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    assert not taken.done()
    queue.resume("b")
    assert taken.result(PATIENCE_S).payload == b"b"


def test_pause_a_whole_queue(broker, threads, asleep):
    queue = broker.queue("q")
    queue.control(newcomer="first")
    queue.put("1")
    queue.pause()
    assert queue.control().newcomer == "first"
    waiting = asleep(broker)
    taken = threads.submit(queue.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    queue.resume()
    assert taken.result(PATIENCE_S).payload == b"1"


def test_remove_a_sub_queue_while_running(broker):
    queue = broker.queue("q")
    queue.limit("old", capacity=2)
    queue.put_many("12", key="old")
    queue.put("3", key="other")
    for each in queue.peek(100, key="old"):
        queue.delete(each)
    queue.unlimit("old")
    assert drain(queue) == ["3"]
    assert "old" not in set(queue.keys())


# -- several queues ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_block_on_several_queues(another, threads, asleep, name):
    reader = another()
    waiting = asleep(reader)
    taken = threads.submit(reader.take, ["one", "two", reader.queue("three")], PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    another().queue(name).put("1")
    assert taken.result(PATIENCE_S).queue == name


def test_several_queues_have_their_turns(broker):
    one, two = broker.queue("one"), broker.queue("two")
    one.put_many("12345")
    two.put_many("ab")
    assert [broker.take([one, two], 0).payload for _ in range(7)] == [b"1", b"a", b"2", b"b", b"3", b"4", b"5"]
    assert broker.take([one, two], 0) is None
