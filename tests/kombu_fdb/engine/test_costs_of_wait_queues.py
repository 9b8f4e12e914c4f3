"""What standing in a wait queue costs, exactly: each step, and a window of messages in all. As ``test_costs.py``."""

import pytest
from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Competitor
from kit.costs import cost

from kombu_fdb.errors import Outrun
from kombu_fdb.model import ClaimTerms, KeyLimits

TOKEN = 1
WINDOW = 10


@pytest.fixture
def bench(counted):
    bench = Bench(counted)
    bench.warm_up()
    return bench


@pytest.mark.parametrize("key", ["", "k"])
def test_who_is_alone_looks_for_competitors_in_the_round_trip_that_it_makes_anyway(bench, counted, key):
    bench.put(*[b"a"] * 4, key=key)
    bench.take(1)
    regardless = cost(counted, lambda: bench.take(1))
    terms = ClaimTerms(gives_way=True)
    watchful = cost(counted, lambda: bench.engine.messages.claim(bench.session, ["q"], 1, terms=terms))
    assert watchful.range_reads == regardless.range_reads + 1
    assert watchful.round_trips == regardless.round_trips


def test_who_finds_competitors_has_done_nothing_else(bench, counted):
    Competitor(bench)

    def claim():
        with pytest.raises(Outrun):
            bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(gives_way=True))

    paid = cost(counted, claim)
    assert (paid.round_trips, paid.commits, paid.writes) == (2, 0, 0)


def test_joining_conflicts_only_with_the_end_of_its_session(bench, counted):
    one = Competitor(bench)
    paid = cost(counted, lambda: one.join(over=[one.demand.first]))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.conflict_ranges) == (1, 0, 1 + TOKEN, 0)
    assert (paid.stamps, paid.clears, paid.sets, paid.atomics) == (2, 1, TOKEN, 0)
    assert paid.round_trips == 3


def test_its_acks_cost_what_they_cost_alone(bench, counted):
    one = Competitor(bench, WINDOW)
    bench.put(*[b"a"] * WINDOW)
    leases = [each.lease for each in one.serve().deliveries]
    paid = cost(counted, lambda: one.join(*leases))
    # and whether a parked key waits for them: whether keys of the queue have limits
    assert (paid.point_reads, paid.rows, paid.stamps, paid.round_trips) == (1 + 1, WINDOW, 2, 3)
    assert (paid.clears, paid.clear_ranges) == (0, 1)


def test_acks_of_many_queues_do_not_read_them(bench, counted):
    one = Competitor(bench, 1, "q", *map(str, range(500)))
    bench.put(b"a")
    (held,) = one.serve().deliveries
    paid = cost(counted, lambda: one.join(held.lease))
    assert (paid.point_reads, paid.conflict_keys) == (1 + 1, 1 + 1 + TOKEN)


@pytest.mark.parametrize("limited", [False, True])
def test_where_no_key_has_limits_an_ack_costs_the_claims_nothing(bench, counted, *, limited):
    """Else each claim reads the marks of the keys whose leases have ended."""
    bench.put(*[b"a"] * 20, key="k")
    if limited:
        bench.engine.queues.limit("q", "other", KeyLimits(weight=2))
    bench.take(1)  # admits the key
    settled = ClaimTerms(acks=[each.lease for each in bench.take(5)])
    first = cost(counted, lambda: bench.engine.messages.claim(bench.session, ["q"], 5, terms=settled))
    then = cost(counted, lambda: bench.take(5))
    leases = 1
    assert (first.stamps, then.range_reads - first.range_reads + leases) == ((1, 1) if limited else (0, 0))


@pytest.mark.parametrize("others", [1, 100])
def test_a_look_does_not_grow_with_the_wait_queue(bench, counted, others):
    first, *_, last = [Competitor(bench) for _ in range(others + 1)]
    paid = cost(counted, last.look)
    near = min(3, others)  # those right before it
    assert (paid.range_reads, paid.rows, paid.writes, paid.round_trips) == (4, 3 + near, 0, 3)
    assert paid.watches == 1 + near
    paid = cost(counted, first.look)
    assert (paid.range_reads, paid.rows, paid.writes, paid.round_trips) == (4, 2 + min(64, others + 1), 0, 3)


def test_who_was_granted_something_has_it_in_one_round_trip(bench, counted):
    one, two = Competitor(bench, WINDOW), Competitor(bench, WINDOW)
    bench.put(*[b"a"] * (2 * WINDOW))
    one.serve()
    paid = cost(counted, two.collect)
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.writes) == (0, 2, 1 + WINDOW, 0)
    assert paid.round_trips == 2  # the read version, and all else


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize("competitors", [1, 10, 50])
def test_a_service_costs_as_many_round_trips_as_one_claim(bench, counted, competitors, key):
    waiters = [Competitor(bench, WINDOW) for _ in range(competitors)]
    bench.put(*[b"a"] * (competitors * WINDOW), key=key)
    sight = waiters[0].look()
    served = []
    paid = cost(counted, lambda: served.append(waiters[0].serve(sight)))
    assert served[0].others == competitors - 1
    assert paid.stamps == competitors  # how each demand stands now
    assert paid.round_trips == (6 if key else 3)
