"""Fair scheduling: limits, two levels, costs. The order is test_fair_order.py's, races and crashes the simulation's."""

from collections import Counter

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from kombu_fdb.errors import CapacityExceeded, InvalidArgument, QueueError
from kombu_fdb.model import KeyLimits, Publication, QueueControl


def keyed(delivery):
    return delivery.key, int(delivery.payload)


def put(bench, key, *items, **properties):
    bench.put(*[b"%d" % item for item in items], key=key, **properties)


def take(bench, limit=100):
    return [keyed(delivery) for delivery in bench.take(limit)]


def test_a_flood_of_one_key_delays_another_by_one_turn(bench):
    bench.engine.publisher.publish([Publication("", "q", b"%d" % n, key="noisy") for n in range(1000)])
    assert take(bench, 5) == [("noisy", n) for n in range(5)]
    put(bench, "quiet", 0)
    assert ("quiet", 0) in take(bench, 2)


def test_two_levels(bench):
    """A tenant with 500 users gets as many turns as one with one."""
    bench.engine.publisher.publish([Publication("", "q", b"%d" % n, key=f"big/{n}") for n in range(500)])
    put(bench, "small/1", *range(50))
    served = Counter(key.split("/")[0] for _ in range(10) for key, _ in take(bench, 20))
    assert served["small"] == 50, "all of them in 200 services, although 500 keys came before"
    bench.engine.queues.purge("q")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_crash_frees_the_slots(bench):
    """KEY-LIMIT."""
    bench.engine.queues.limit("q", "a", KeyLimits(max_in_flight=1))
    put(bench, "a", 1, 2)
    dead = bench.engine.sessions.open({})
    assert len(bench.take(session=dead)) == 1
    assert take(bench) == []
    bench.engine.sessions.close(dead)
    assert take(bench) == [("a", 1)]


@pytest.mark.parametrize("key", ["", "a"])
def test_pause_and_resume(bench, key):
    bench.engine.queues.limit("q", key, KeyLimits(paused=True))
    put(bench, key, 1)
    put(bench, "b", 2)
    assert take(bench) == [("b", 2)]
    watches = bench.engine.messages.arm(["q"])
    assert watches is not None
    fired = []
    watches[0].on_fire(lambda: fired.append(True))
    bench.engine.queues.limit("q", key, None)
    assert fired
    assert take(bench) == [(key, 1)]


@pytest.mark.parametrize(
    "limits", [{"weight": 0}, {"max_in_flight": 0}, {"rate": 0}, {"priority": 10}, {"capacity": -1}, {"burst": 0}]
)
def test_senseless_limits(bench, limits):
    with pytest.raises(InvalidArgument):
        bench.engine.queues.limit("q", "a", KeyLimits(**limits))


def test_keys_are_counted(bench):
    put(bench, "a", 1, 2)
    put(bench, "b", 3)
    bench.take(1)
    bench.engine.queues.limit("q", "c", KeyLimits(paused=True))
    found = bench.engine.inspect.keys_of("q")
    assert {key: (counts.ready, counts.leased) for key, counts in found.items()} == {
        "a": (1, 1),
        "b": (1, 0),
        "c": (0, 0),
    }
    assert found["c"].limits == KeyLimits(paused=True)


# -- costs -------------------------------------------------------------------------------------------------------------


def paid(counted, verb):
    counted.reset()
    verb()
    return counted.total().round_trips


@pytest.mark.parametrize("others", [0, 3000])
def test_round_trips_do_not_grow_with_keys_or_messages(others):
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.engine.publisher.publish([Publication("", "q", b"0", key=f"k{number % 1500}") for number in range(others)])
    for _ in range(others // 200):
        bench.engine.messages.release([each.lease for each in bench.take(1)])
    put(bench, "a", 1, 2)
    assert paid(counted, lambda: put(bench, "a", 3)) == 1
    bench.take(1)
    assert paid(counted, lambda: bench.take(8)) <= 7


def test_a_claim_in_a_queue_with_keys_costs_one_round_trip_more(bench):
    """And none where only messages without a key wait. The first claim of a process finds out that there are keys."""
    bench.database = counted = CountingDatabase(bench.database)
    engine = bench.another()

    def claim():
        return paid(counted, lambda: engine.messages.claim(bench.session, ["q"], 2))

    plain = 3
    bench.put(*[b"1"] * 5)
    assert claim() == plain
    put(bench, "a", *range(9))
    put(bench, "b", *range(9))
    claim()
    claim()
    assert claim() == plain + 1
    bench.engine.queues.purge("q")
    bench.put(*[b"1"] * 9)
    claim()
    claim()
    assert claim() == plain
    engine.transactions.fair_queues.clear()
    assert claim() == plain + 2


def test_a_claim_does_not_care_when_another_thread_finds_out_that_a_queue_is_fair(bench):
    class Changing(set[str]):
        """Another thread has changed it whenever it is asked."""

        def __contains__(self, queue):
            self.is_known = not getattr(self, "is_known", True)
            return self.is_known

    bench.engine.transactions.fair_queues = Changing()
    put(bench, "a", *range(5))
    put(bench, "b", *range(5))
    taken = [pair for _ in range(10) for pair in take(bench, 1)]
    assert taken == [(key, number) for number in range(5) for key in "ab"]


def test_a_claim_may_name_a_queue_twice(bench):
    put(bench, "a", 1, queue="other")
    put(bench, "a", 2, 3, 4)
    assert [bench.payloads(1, "q", "q", "other") for _ in range(4)] == [[b"2"], [b"3"], [b"4"], [b"1"]]


def test_a_rank_behind_the_head_has_its_turns_where_the_key_has_a_priority_of_its_own(bench):
    """Those of both ranks are equally urgent, so they take turns."""
    bench.engine.queues.limit("q", "", KeyLimits(priority=5))
    bench.put(*[b"1"] * 9, priority=9)
    bench.put(*[b"2"] * 9)
    put(bench, "a", 3, priority=5)
    taken = [bench.take(2) for _ in range(4)]
    assert Counter(each.payload for part in taken for each in part)[b"2"] >= 3


def test_a_parked_key_costs_nothing(bench):
    counted = CountingDatabase(bench.database)
    bench.database = counted
    engine = bench.another()
    engine.queues.set_control("q", QueueControl(every_key=KeyLimits(max_in_flight=1)))
    for key in range(50):
        put(bench, f"k{key}", 1, 2)
    while engine.messages.claim(bench.session, ["q"], 100):
        pass
    counted.reset()
    assert engine.messages.claim(bench.session, ["q"], 100) == []
    assert counted.total().rows <= 1


def test_capacity(bench):
    """A full key refuses; the others don't notice; a paused one accepts up to its capacity."""
    bench.engine.queues.limit("q", "a", KeyLimits(capacity=2, paused=True))
    put(bench, "a", 1, 2)
    with pytest.raises(CapacityExceeded) as caught:
        put(bench, "a", 3)
    assert (caught.value.current_size, caught.value.capacity) == (2, 2)
    assert "raise the key's capacity" in str(caught.value)
    with pytest.raises(CapacityExceeded):
        bench.engine.publisher.publish([Publication("", "q", b"4", key="b"), Publication("", "q", b"5", key="a")])
    put(bench, "b", 6)
    assert take(bench) == [("b", 6)]


def test_a_key_has_a_longest_length(bench):
    put(bench, "k" * 512, 1)
    with pytest.raises(QueueError, match="too long"):
        put(bench, "k" * 513, 2)
    assert take(bench) == [("k" * 512, 1)]


def test_a_blocked_keys_large_message_takes_no_room_in_a_claim(bench):
    for key in "axpb":
        bench.put(*[b"p" * 8_000_000] if key == "p" else [b"1", b"2"], key=key)
    bench.take(1)
    bench.engine.queues.limit("q", "p", KeyLimits(paused=True))
    assert "".join(each.key for each in bench.take(5)) == "xbaxb"


def test_what_a_batch_brings_counts_against_the_capacity_of_its_key(bench):
    bench.engine.queues.limit("q", "k", KeyLimits(capacity=3))
    bench.put(b"1", key="k")
    batch = [Publication("", "q", b"", key=key) for key in ("k", "other", "k", "other", "k")]
    with pytest.raises(CapacityExceeded) as caught:
        bench.engine.publisher.publish(batch)
    assert caught.value.attributes["current_size"] == 3
    assert bench.counts()[0] == 1
    bench.engine.publisher.publish(batch[:4])
    assert bench.counts()[0] == 5
