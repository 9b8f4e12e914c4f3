"""A change of limits counts what is in flight and frees who may go on, at a cost that no number of keys changes."""

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from kombu_fdb.engine.scheduling import limit_changes
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, Publication, QueueControl

ONE = KeyLimits(max_in_flight=1)


def limit_every_key(bench):
    bench.engine.queues.set_control("q", QueueControl(every_key=ONE))


def limit_no_key(bench):
    bench.engine.queues.limit("q", "", ONE)


# -- KEY-LIMIT ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [limit_every_key, limit_no_key])
def test_what_was_leased_from_a_plain_queue_counts(bench, limit):
    bench.put(*[b"%d" % number for number in range(20)])
    held = bench.take(10)
    limit(bench)
    assert bench.take() == [], "ten are in flight at a limit of one"
    assert bench.engine.inspect.keys_of("q")[""].leased == 10
    for each in held[:-1]:
        bench.engine.messages.ack([each.lease])
        assert bench.take() == []
    bench.engine.messages.release([held[-1].lease])
    assert len(bench.take()) == 1


def test_a_crash_frees_the_slots_of_what_was_leased_before_the_limit(bench):
    bench.put(b"1", b"2")
    dead = bench.engine.sessions.open({})
    assert len(bench.take(1, session=dead)) == 1
    limit_every_key(bench)
    assert bench.take() == []
    bench.engine.sessions.close(dead)
    assert [each.payload for each in bench.take()] == [b"1"]


def test_leases_of_other_queues_and_of_keys_are_counted_once(bench):
    bench.put(b"1", b"2", queue="other")
    bench.put(b"3", b"4", key="a")
    bench.put(b"5", b"6")
    held = bench.take(3) + bench.take(2, "other")
    limit_every_key(bench)
    found = bench.engine.inspect.keys_of("q")
    assert {key: counts.leased for key, counts in found.items()} == {
        key: sum(each.queue == "q" and each.key == key for each in held) for key in ("", "a")
    }
    bench.engine.messages.ack([each.lease for each in held])
    assert all(counts.leased == 0 for counts in bench.engine.inspect.keys_of("q").values())
    assert bench.engine.inspect.keys_of("other").get("") is None


def test_a_claim_that_began_before_the_limit_does_not_pass_it(bench):
    """It conflicts with the change, and runs again under the limit."""
    bench.put(b"1", b"2", b"3")
    bench.take(1)
    seen = []
    other = bench.another()
    session, original = other.sessions.open({}), other.transactions.retry

    class Once:
        """Lets the limit be set between the first try's reads and its commit."""

        def __init__(self):
            self.tries = 0

        def __call__(self, body, **given):
            def tried(tr):
                self.tries += 1
                result = body(tr)
                if self.tries == 1:
                    limit_every_key(bench)
                return result

            return original(tried, **given)

    other.transactions.retry = once = Once()
    seen.append(other.messages.claim(session, ["q"], 1))
    assert once.tries == 2
    assert seen == [[]]


def test_a_caller_that_dies_leaves_the_rest_to_the_duties(bench, monkeypatch):
    """Until it is known what is in flight, nothing more is."""
    bench.put(b"1", b"2")
    (held,) = bench.take(1)
    monkeypatch.setattr(bench.engine.queues, "follow_limits", lambda _queue: None)
    limit_every_key(bench)
    monkeypatch.undo()
    assert bench.take() == []
    bench.engine.messages.ack([held.lease])
    assert bench.take() == [], "one was leased from the plain queue: it is not known whether more were"
    bench.duties().run_once()
    assert [each.payload for each in bench.take()] == [b"2"]


def test_in_parts_as_in_one(bench, monkeypatch):
    monkeypatch.setattr(limit_changes, "LEASES_PER_PART", 3)
    monkeypatch.setattr(limit_changes, "MARKS_PER_PART", 2)
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(paused=True)))
    for key in "abcdefg":
        bench.put(b"1", key=key)
    assert bench.take() == []
    bench.put(*[b"%d" % number for number in range(20)], queue="r")
    bench.take(10, "r")
    bench.engine.queues.limit("r", "", ONE)
    assert bench.engine.inspect.keys_of("r")[""].leased == 10
    bench.engine.queues.set_control("q", QueueControl())
    assert sorted(each.key for each in bench.take()) == list("abcdefg")


# -- any number of keys ------------------------------------------------------------------------------------------------


def parked(keys):
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(paused=True)))
    for start in range(0, keys, 1000):
        batch = [Publication("", "q", b"", key=f"k{number}") for number in range(start, min(start + 1000, keys))]
        bench.engine.publisher.publish(batch)
    while bench.engine.messages.arm(["q"]) is None:
        assert bench.take() == []
    return bench, counted


def test_limiting_every_key_is_one_small_transaction_however_many_there_are():
    paid = []
    for keys in (0, 3_000):
        bench, counted = parked(keys)
        bench.engine.queues.follow_limits = lambda _queue: None
        counted.reset()
        bench.engine.queues.set_control("q", QueueControl(every_key=ONE))
        paid.append(counted.total())
        paid[-1].bytes_written = 0  # ids have other digits
    assert paid[0] == paid[1]
    assert (paid[0].rows, paid[0].conflict_ranges, paid[0].writes) == (0, 0, paid[0].writes)
    assert paid[0].writes <= 5


def test_all_parked_keys_go_on():
    bench, counted = parked(3_000)
    counted.reset()
    bench.engine.queues.set_control("q", QueueControl())
    assert counted.worst().rows <= limit_changes.MARKS_PER_PART + 1
    served = []
    while found := bench.take(100):
        served += found
    assert len({each.key for each in served}) == 3_000


def test_it_conflicts_with_no_work_of_the_keys():
    """Claims, publishes and acks of busy keys don't make it start again."""
    bench, counted = parked(2_000)
    counted.reset()
    bench.engine.queues.set_control("q", QueueControl(every_key=ONE))
    assert counted.total().conflict_ranges == 0
    assert counted.total().conflict_keys <= 3 * counted.total().commits


def test_nothing_is_left_of_it(bench):
    bench.put(b"1")
    bench.take()
    limit_every_key(bench)
    assert bench.engine.transactions.read(lambda work: work.tr.get_range(*bench.engine.keys.all_relimits)) == []


def test_every_turn_is_ranked_anew_in_however_many_parts(bench, monkeypatch):
    monkeypatch.setattr(limit_changes, "TURNS_PER_PART", 2)
    monkeypatch.setattr(limit_changes, "MARKS_PER_PART", 2)
    for key in "abcde":
        bench.put(b"1", b"2", key=key)
    assert len(bench.take(5)) == 5
    ring = range_of(bench.engine.keys.ring("q"))
    assert len(bench.engine.upkeep.rows(ring)) == 5
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(priority=1)))
    assert bench.engine.upkeep.rows(ring) == [], "each comes in again, where it belongs"
    assert sorted(each.key for each in bench.take()) == [*"abcde"]
