"""LinkedBlockingMultiQueue, feature by feature (seeds/linked-blocking-multi-queue.txt).

Its sub-queues are the keys of one queue here; where a reader blocks on several queues, they are queues.
"""

from __future__ import annotations

import pytest

from kombu_fdb.errors import CapacityExceeded, InvalidArgument, StoreUnavailable

PATIENCE_S = 60.0


def drain(queue):
    return [job.payload.decode() for job in queue.take_many(100, 0)]


def test_the_documented_example(broker):
    queue = broker.queue("q")
    queue.limit("1", priority=5)
    queue.limit("2", priority=5, capacity=10_000)
    queue.put("x1", key="1")
    assert drain(queue) == ["x1"]
    queue.put("x2", key="2")
    assert drain(queue) == ["x2"]


def test_sub_queues_with_priorities(broker):
    queue = broker.queue("q")
    queue.limit("low", priority=1)
    queue.limit("high", priority=7)
    for number in range(2):
        queue.put(f"low{number}", key="low")
        queue.put(f"high{number}", key="high")
    assert drain(queue) == ["high0", "high1", "low0", "low1"]


def test_round_robin_inside_one_priority(broker):
    queue = broker.queue("q")
    for key in "abc":
        queue.limit(key, priority=3)
        queue.put_many([f"{key}{number}" for number in range(2)], key=key)
    queue.limit("urgent", priority=4)
    queue.put("first", key="urgent")
    assert drain(queue) == ["first", "a0", "b0", "c0", "a1", "b1", "c1"]


def test_capacity_per_sub_queue(broker):
    queue = broker.queue("q")
    queue.limit("small", capacity=2)
    queue.put_many("ab", key="small")
    with pytest.raises(CapacityExceeded) as caught:
        queue.put("c", key="small")
    assert (caught.value.key, caught.value.current_size, caught.value.item) == ("small", 2, "c")
    with pytest.raises(CapacityExceeded):
        queue.put_many("de", key="small")
    queue.put("d", key="other")
    assert sorted(drain(queue)) == ["a", "b", "d"]
    queue.put("c", key="small")
    assert drain(queue) == ["c"]


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


def test_a_disabled_one_accepts_up_to_its_capacity(broker):
    queue = broker.queue("q")
    queue.limit("a", capacity=2)
    queue.pause("a")
    queue.put_many("12", key="a")
    with pytest.raises(CapacityExceeded):
        queue.put("3", key="a")
    assert drain(queue) == []
    queue.resume("a")
    assert drain(queue) == ["1", "2"]


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


def test_add_a_sub_queue_while_running(broker, threads, asleep):
    queue = broker.queue("q")
    waiting = asleep(broker)
    taken = threads.submit(queue.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    queue.limit("new", priority=9)
    queue.put("1", key="new")
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


def test_an_unknown_limit_is_an_error(broker):
    with pytest.raises(InvalidArgument):
        broker.queue("q").limit("a", capcity=3)


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


def test_several_queues_in_order(broker):
    urgent, usual = broker.queue("urgent"), broker.queue("usual")
    usual.put_many("12")
    urgent.put_many("ab")
    taken = [broker.take([urgent, usual], 0, in_order=True).payload for _ in range(4)]
    assert taken == [b"a", b"b", b"1", b"2"]


def test_disable_one_of_several_queues(broker):
    one, two = broker.queue("one"), broker.queue("two")
    one.put("1")
    two.put("2")
    one.pause()
    assert broker.take([one, two], 0).queue == "two"
    assert broker.take([one, two], 0) is None
    one.resume()
    assert broker.take([one, two], 0).queue == "one"


def test_closing_ends_a_blocking_take(broker, threads, asleep):
    waiting = asleep(broker)
    taken = threads.submit(broker.take, ["one", "two"])
    assert waiting.wait(PATIENCE_S)
    broker.close()
    with pytest.raises(StoreUnavailable):
        taken.result(PATIENCE_S)
