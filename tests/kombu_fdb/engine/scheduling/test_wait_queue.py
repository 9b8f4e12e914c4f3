"""What stands in the rows of a wait queue, at its edges; what it does is in ``kit/waiters.py``."""

import struct

import pytest
from kit.conformance.wait_queues import Competitor

from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.session import LEASES_PER_CLAIM
from kombu_fdb.model import Demand, SessionId


def write(bench, session, first, want):
    """A row before all others. Returns its key."""
    key = bench.engine.keys.wait_queue(wait_queue.name(["q"])) + bytes(12)
    bench.write(lambda tr: tr.set(key, struct.pack(">16sQI", session, first, want)))
    return key


@pytest.mark.parametrize(
    ("first", "want", "readable"),
    [
        (0, 1, True),
        (wait_queue.MOST_LEASES, 1, True),
        (wait_queue.MOST_LEASES + 1, 1, False),
        (1, 0, False),
        (1, LEASES_PER_CLAIM, True),
        (1, LEASES_PER_CLAIM + 1, False),
    ],
)
def test_a_demand_asks_for_what_a_claim_may_have(bench, first, want, readable):
    write(bench, b"s" * 16, first, want)
    ((_, value),) = bench.engine.upkeep.rows(bench.engine.keys.all_wait_queues)
    name = wait_queue.name(["q"])
    demand = Demand(name, SessionId(b"s" * 16), first, want)
    assert wait_queue.waiting_in(name, [(b"key", value)]) == ({b"key": demand} if readable else {})


def test_the_first_one_sees_the_first_of_many(bench, monkeypatch):
    monkeypatch.setattr(wait_queue, "SEEN", 3)
    competitors = [Competitor(bench) for _ in range(5)]
    assert [*competitors[0].look().waiting.values()] == [each.demand for each in competitors[:3]]


def test_who_served_and_how_long_the_others_are_patient_stands_in_the_wait_queue(bench):
    one, two, three = Competitor(bench), Competitor(bench), Competitor(bench)
    assert (two.look().server, two.look().patience_s) == (b"", 0.0)
    bench.put(b"a")
    bench.engine.messages.serve(one.demand, ["q"], one.look().waiting, patience=lambda: 0.375)
    assert (three.look().server, three.look().patience_s) == (one.session, 0.375)
    three.engine.messages.evict(three.demand, three.look().first, 1.5)
    assert three.look().is_first
    assert (three.look().server, three.look().patience_s) == (one.session, 1.5), "who served last is the same"


def test_a_service_that_is_damaged_says_nothing_of_patience(bench):
    one = Competitor(bench)
    key = bench.engine.keys.served(one.demand.wait_queue)
    bench.write(lambda tr: tr.set(key, b"s" * 16 + b"\x00" * 5))
    assert (one.look().server, one.look().patience_s) == (b"s" * 16, 0.0)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"", None),
        (b"W", None),
        (b"G" + bytes(10), {}),
        (b"G" + bytes(10) + b'{"q": 5}', {"q": 5}),
        (b"G" + bytes(10) + b'{"q": 5, "r": "x"}', {"q": 5}),
        (b"G" + bytes(10) + b"[5]", {}),
        (b"G" + bytes(10) + b"{", {}),
    ],
)
def test_the_timeouts_of_what_was_granted(value, found):
    assert wait_queue.granted(value) == found


def test_the_name_of_a_wait_queue_is_that_of_its_queues_in_any_order():
    assert wait_queue.name(["a", "b"]) == wait_queue.name(["b", "a"])
    names = [wait_queue.name(each) for each in ([], ["a"], ["a", "b"], ["ab"], ["a", "a"], ["b"])]
    assert len(set(names)) == len(names)
    assert {len(each) for each in names} == {16}
