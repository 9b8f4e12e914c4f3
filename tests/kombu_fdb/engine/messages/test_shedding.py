"""How the oldest of a full queue give way: a publisher tries for a while, and never fails for it. Who is refused."""

from collections import Counter

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import Fault, FaultyDatabase

from kombu_fdb.engine.messages import overflow
from kombu_fdb.errors import CapacityExceeded
from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture
def bench():
    bench = Bench(FaultyDatabase(), task_ids=True)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 2}))
    bench.put(b"a", b"b")
    yield bench
    bench.check()


def shown(bench):
    return [each.payload for each in bench.engine.inspect.peek("q", 1_000)]


@pytest.mark.parametrize("lost", range(overflow.ATTEMPTS))
def test_a_publisher_that_loses_a_race_tries_again(bench, lost):
    bench.database.faults.at_commits(None, *[Fault.CONFLICT] * lost)
    bench.put(b"c")
    assert shown(bench) == [b"b", b"c"]


def test_after_so_many_races_it_is_left_to_the_next_one(bench):
    bench.database.faults.at_commits(None, *[Fault.CONFLICT] * overflow.ATTEMPTS)
    bench.put(b"c")
    assert shown(bench) == [b"a", b"b", b"c"]
    bench.put(b"d")
    assert shown(bench) == [b"c", b"d"]


def test_a_store_that_fails_afterwards_fails_no_publisher(bench):
    """Its message is stored."""
    bench.database.faults.at_commits(None, *[Fault.UNAVAILABLE] * 1_000)
    bench.put(b"c")
    bench.database.faults.stop()
    assert shown(bench) == [b"a", b"b", b"c"]
    assert bench.engine.upkeep.trim_full_part("q") == 1
    assert shown(bench) == [b"b", b"c"]


def test_a_queue_with_room_does_not_hide_a_full_one_of_the_same_batch(bench):
    bench.engine.queues.declare(QueueDeclaration("roomy", arguments={"x-max-length": 9}))
    bench.engine.queues.declare(QueueDeclaration("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"}))
    with pytest.raises(CapacityExceeded):
        bench.engine.publisher.publish([Publication("", "roomy", b"c"), Publication("", "full", b"d")])
    assert (bench.counts("roomy"), bench.counts("full")) == ((0, 0, 0), (0, 0, 0))


def test_all_that_are_over_their_maximum_are_trimmed_and_a_part_at_a_time(bench, monkeypatch):
    monkeypatch.setattr(overflow, "MOST_LEAVING", 4)
    for queue in ("one", "other"):
        bench.put(*(b"%d" % number for number in range(7)), queue=queue)
        bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-max-length": 1}))
    upkeep = bench.engine.upkeep
    assert {queue: upkeep.trim_full_part(queue) for queue in upkeep.limited_queues()} == {"q": 0, "one": 4, "other": 4}
    assert {queue: upkeep.trim_full_part(queue) for queue in upkeep.limited_queues()} == {"q": 0, "one": 2, "other": 2}
    assert [bench.counts(queue)[0] for queue in ("one", "other")] == [1, 1]


def fill(bench, key, number, priority=0):
    bench.engine.publisher.publish(
        [Publication("", "q", f"{key} {place}".encode(), key=key, priority=priority) for place in range(number)]
    )


def ready_by_key(bench):
    return dict(Counter(each.decode().split(" ")[0] for each in shown(bench)))


@pytest.mark.parametrize("noisy", ["acme", "zeta", ""])
def test_the_key_with_the_most_messages_gives_way_whatever_its_name_and_their_priority(bench, noisy):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 100}))
    bench.engine.queues.purge("q")
    fill(bench, noisy, 100, priority=5)
    others = [each for each in ("acme", "globex", "zeta", "") if each != noisy]
    for each in others:
        fill(bench, each, 1, priority=9)
        fill(bench, each, 1)
    assert ready_by_key(bench) == {noisy: 94, **dict.fromkeys(others, 2)}
    fill(bench, noisy, 50)
    assert ready_by_key(bench) == {noisy: 94, **dict.fromkeys(others, 2)}


@pytest.mark.parametrize("noisy", ["a", "m", "z", ""])
def test_who_fills_a_queue_gives_way_among_more_keys_than_are_compared(bench, noisy, monkeypatch):
    monkeypatch.setattr(overflow, "MOST_KEYS", 5)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 50}))
    bench.engine.queues.purge("q")
    others = {f"{letter}{number}": 2 for letter in "cpx" for number in range(5)}
    for each in others:
        fill(bench, each, 2)
    fill(bench, noisy, 20)
    assert ready_by_key(bench) == {noisy: 20, **others}
    for _ in range(5):
        fill(bench, noisy, 2)
    assert ready_by_key(bench) == {noisy: 20, **others}


def test_of_more_keys_than_are_looked_at_together_the_next_largest_give_way(bench):
    """Not those whose names sort last."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1_000}))
    bench.engine.queues.purge("q")
    large = {f"k{number:02}": 3 for number in range(2 * overflow.CANDIDATES)}
    for each, number in {**large, "z": 1, "zz": 2}.items():
        fill(bench, each, number)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 6}))
    assert bench.engine.upkeep.trim_full_part("q") == sum(large.values()) + 3 - 6
    assert ready_by_key(bench) == {"k29": 1, "k30": 1, "k31": 1, "z": 1, "zz": 2}


def test_names_do_not_decide_which_of_many_equal_keys_give_way(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 60}))
    bench.engine.queues.purge("q")
    for number in range(60):
        fill(bench, f"m{number}", 1)
    for number in range(60):
        fill(bench, f"a{number}", 1)
    assert {key[0] for key in ready_by_key(bench)} == {"a"}


def test_of_keys_with_as_many_messages_the_oldest_gives_way(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 3}))
    bench.engine.queues.purge("q")
    for each in ("c", "a", "b", "d"):
        fill(bench, each, 1)
    assert ready_by_key(bench) == {"a": 1, "b": 1, "d": 1}


@pytest.mark.parametrize("keys", [30, 300])
def test_what_it_costs_does_not_grow_with_the_keys(keys):
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    for key in range(keys):
        fill(bench, f"k{key:03}", 2)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 2 * keys - 1}))
    counted.reset()
    assert bench.engine.upkeep.trim_full_part("q") == 1
    assert counted.total().round_trips == 5 + 2 * overflow.CANDIDATES
