"""What a wait queue of competitors must do, over any store (``engine/scheduling/wait_queue.py``)."""

from __future__ import annotations

from collections.abc import Collection
from threading import Event

import pytest

from kit.conformance.queue import Bench, OnBench
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.scheduling.wait_queue import ENDED, GRANTED, WAITING, Standing
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import Outrun, SessionLost
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, Delivery, Demand, KeyLimits, Lease
from kombu_fdb.routing.tables import QueueDeclaration

#: For a watch that fires.
PATIENCE_S = 60.0


class Competitor:
    """A consumer of q that stands in the wait queue, in a process and a session of its own."""

    def __init__(self, bench: Bench, want: int = 1, *queues: str) -> None:
        self.engine = bench.another()
        self.session = self.engine.sessions.open({"host": "test"})
        self.queues = queues or ("q",)
        self.want = want
        self.demand = self.join()

    def join(self, *acks: Lease, over: Collection[int] = ()) -> Demand:
        first = self.engine.messages.reserve()
        self.demand = Demand(wait_queue.name(self.queues), self.session, first, self.want)
        self.engine.messages.join(self.demand, acks, queues=self.queues, over=over)
        return self.demand

    def look(self, *, fired: bool = False) -> Standing:
        return self.engine.messages.look(self.demand, fired=fired)[0]

    def collect(self) -> list[Delivery]:
        return self.engine.messages.look(self.demand, fired=True)[1]

    def serve(self, sight: Standing | None = None) -> Served:
        seen = (sight or self.look()).waiting
        return self.engine.messages.serve(self.demand, self.queues, seen)


def payloads(found: list[Delivery]) -> list[bytes]:
    return [each.payload for each in found]


def woken(sight: Standing) -> Event:
    """Set when one of its watches has fired."""
    fired = Event()
    for watch in sight.watches:
        watch.on_fire(fired.set)
    return fired


class WaitQueueConformance(OnBench):
    """Run over every store."""

    # -- who is served -------------------------------------------------------------------------------------------------

    def test_who_came_first_is_the_first(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        assert one.look().is_first
        assert not two.look().is_first
        assert one.look().stands == two.look().stands == WAITING

    def test_the_first_one_serves_all(self, bench: Bench) -> None:
        competitors = [Competitor(bench, 2) for _ in range(3)]
        bench.put(*[b"%d" % number for number in range(6)])
        served = competitors[0].serve()
        assert payloads(served.deliveries) == [b"0", b"3"]
        assert served.others == 2
        assert [payloads(each.collect()) for each in competitors[1:]] == [[b"1", b"4"], [b"2", b"5"]]
        assert [each.look().stands for each in competitors] == [GRANTED] * 3
        assert bench.counts() == (0, 0, 6)

    def test_who_comes_along_stands_in_the_wait_queue_as_well(self, bench: Bench) -> None:
        """Its claim finds the wait queue before it finds any message, and leaves all as it is."""
        bench.put(b"a", b"b", b"held")
        (held,) = bench.take(1)
        competitor = Competitor(bench)
        terms = ClaimTerms(acks=[held.lease], gives_way=True)
        if bench.engine.writers_take_turns:  # there is no wait queue
            assert payloads(bench.engine.messages.claim(bench.session, ["q"], 1, terms=terms)) == [b"b"]
            return
        with pytest.raises(Outrun):
            bench.engine.messages.claim(bench.session, ["q"], 1, terms=terms)
        assert bench.counts() == (2, 0, 1), "nor is anything settled"
        competitor.engine.messages.leave(competitor.demand)
        assert payloads(bench.engine.messages.claim(bench.session, ["q"], 1, terms=terms)) == [b"b"]
        assert bench.counts() == (1, 0, 1)

    def test_a_line_for_other_queues_is_not_in_the_way(self, bench: Bench) -> None:
        bench.put(b"a")
        Competitor(bench, 1, "q", "other")
        found = bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(gives_way=True))
        assert payloads(found) == [b"a"]

    def test_where_one_consumer_is_active_a_wait_queue_is_not_in_the_way(self, bench: Bench) -> None:
        """It would be served for that one only."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
        bench.put(b"a")
        Competitor(bench)
        terms = ClaimTerms(consumers={"q": "tag"}, gives_way=True)
        assert payloads(bench.engine.messages.claim(bench.session, ["q"], 1, terms=terms)) == [b"a"]

    def test_they_own_what_they_were_granted(self, bench: Bench) -> None:
        """ONE-OWNER: each acks its own."""
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a", b"b")
        mine = one.serve().deliveries
        theirs = two.collect()
        assert {each.lease.session for each in mine} == {one.session}
        assert {each.lease.session for each in theirs} == {two.session}
        assert {each.ttr_ms for each in mine + theirs} == {0}, "for as long as they like"
        assert two.engine.messages.ack([each.lease for each in theirs]) == [True]
        assert one.engine.messages.ack([each.lease for each in mine]) == [True]

    def test_a_window_that_is_full_gets_no_more(self, bench: Bench) -> None:
        one, two, three = Competitor(bench, 1), Competitor(bench, 3), Competitor(bench, 1)
        bench.put(*[b"%d" % number for number in range(9)])
        assert payloads(one.serve().deliveries) == [b"0"]
        assert payloads(two.collect()) == [b"1", b"3", b"4"]
        assert payloads(three.collect()) == [b"2"]

    def test_who_gets_nothing_stays_and_the_next_one_is_first(self, bench: Bench) -> None:
        competitors = [Competitor(bench) for _ in range(5)]
        two, three, four, five = (woken(each.look()) for each in competitors[1:])
        bench.put(b"a")
        assert payloads(competitors[0].serve().deliveries) == [b"a"]
        assert competitors[1].look().is_first
        assert two.wait(PATIENCE_S), "its turn has come"
        assert three.wait(PATIENCE_S), "it is the next one now"
        assert competitors[2].look().is_next
        assert four.wait(PATIENCE_S), "it is the third now"
        assert not five.is_set(), "nothing has changed for it"

    def test_an_empty_queue_changes_nothing(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        assert one.serve() == Served([], 0)
        assert one.look().is_first
        assert not two.look().is_first

    def test_everybody_who_was_served_wakes_up(self, bench: Bench) -> None:
        competitors = [Competitor(bench) for _ in range(4)]
        rung = [woken(each.look()) for each in competitors[1:]]
        bench.put(*[b"m"] * 4)
        competitors[0].serve()
        assert all(each.wait(PATIENCE_S) for each in rung)

    def test_a_served_consumer_wakes_up_though_none_before_it_was_served(self, bench: Bench) -> None:
        one, _two, three = Competitor(bench), Competitor(bench), Competitor(bench)
        rung = woken(three.look())
        sight = one.look()
        bench.put(b"a", b"b")
        first, _, third = sight.waiting.items()
        one.serve(sight._replace(waiting=dict([first, third])))
        assert rung.wait(PATIENCE_S)
        assert payloads(three.collect()) == [b"b"]

    def test_a_row_of_a_consumer_that_waits_elsewhere_counts_for_nothing(self, bench: Bench) -> None:
        """Nor does a second row of the same consumer."""
        one, two = Competitor(bench, 1), Competitor(bench, 1, "q", "r")
        own, elsewhere = next(iter(one.look().waiting)), next(iter(two.look().waiting))
        behind = own[:-4] + b"\xff" * 4

        def copy(work: Work) -> None:
            for source, target in ((elsewhere, behind), (own, behind[:-1] + b"\xfe")):
                value = work.tr.get(source)
                assert value is not None
                work.tr.set(target, value)

        bench.work(copy)
        bench.put(b"a", b"b")
        sight = one.look()
        assert len(sight.waiting) == 3
        assert payloads(one.serve(sight).deliveries) == [b"a"]
        assert two.look().is_first
        assert bench.counts() == (1, 0, 1)

    def test_who_joins_while_the_wait_queue_is_served_is_told_that_he_is_first(self, bench: Bench) -> None:
        """The first one has not seen it, so no other consumer would tell it."""
        one = Competitor(bench)
        seen = one.look()
        late = Competitor(bench)
        rung = woken(late.look())
        bench.put(b"a", b"b")
        assert payloads(one.serve(seen).deliveries) == [b"a"]
        assert rung.wait(PATIENCE_S)
        assert late.look().is_first

    def test_a_service_is_bounded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        competitors = [Competitor(bench, 3) for _ in range(4)]
        bench.put(*[b"%d" % number for number in range(12)])
        monkeypatch.setattr(competitors[0].engine.messages._services, "size", 5)
        assert payloads(competitors[0].serve().deliveries) == [b"0", b"2", b"4"]
        assert payloads(competitors[1].collect()) == [b"1", b"3"]
        assert competitors[2].look().is_first

    def test_the_order_is_that_of_one_consumer(self, bench: Bench) -> None:
        """FAIR, for any number of consumers."""
        for key in "abc":
            bench.put(*[f"{key}{number}".encode() for number in range(4)], key=key)
        alone = bench.payloads(12)
        bench.engine.messages.release([Lease(bench.session, number) for number in _numbers(bench)], counted=False)
        competitors = [Competitor(bench, 2) for _ in range(6)]
        mine = competitors[0].serve().deliveries
        dealt = [mine, *[each.collect() for each in competitors[1:]]]
        assert payloads([each[turn] for turn in range(2) for each in dealt]) == alone

    def test_limits_hold_over_all(self, bench: Bench) -> None:
        """KEY-LIMIT."""
        bench.put(*[b"%d" % number for number in range(4)], key="a")
        bench.engine.queues.limit("q", "a", KeyLimits(max_in_flight=2))
        competitors = [Competitor(bench) for _ in range(4)]
        competitors[0].serve()
        assert bench.counts() == (2, 0, 2)
        assert competitors[2].look().stands == WAITING

    def test_queues_in_turn(self, bench: Bench) -> None:
        one, two = Competitor(bench, 1, "q", "r"), Competitor(bench, 1, "r", "q")
        bench.put(b"a", queue="r")
        bench.put(b"b")
        assert [each.queue for each in [*one.serve().deliveries, *two.collect()]] == ["q", "r"]

    def test_other_queues_are_another_wait_queue(self, bench: Bench) -> None:
        one, two = Competitor(bench, 1, "q"), Competitor(bench, 1, "q", "r")
        assert one.look().is_first
        assert two.look().is_first

    def test_where_one_consumer_is_active_none_is_served(self, bench: Bench) -> None:
        """ONE-ACTIVE: each claims for itself, with its tag. The argument may come while they wait."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a", b"b")
        assert one.serve() == Served([], 0, single=["q"])
        one.engine.messages.leave(one.demand)
        assert two.look().is_first

    # -- what is granted ---------------------------------------------------------------------------------------------

    def test_large_payloads_and_times_to_run_arrive(self, bench: Bench) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-consumer-timeout": 60_000}))
        one, two = Competitor(bench), Competitor(bench)
        large = b"x" * (INLINE_BYTES + 1)
        bench.put(b"a")
        bench.put(large, ttr_ms=90_000)
        one.serve()
        (granted,) = two.collect()
        assert (granted.payload, granted.ttr_ms) == (large, 60_000)

    def test_who_serves_has_the_whole_of_its_own(self, bench: Bench) -> None:
        """Of the others it reads the records only."""
        one, two = Competitor(bench, 2), Competitor(bench)
        large = b"x" * (INLINE_BYTES + 1)
        bench.put(large, b"theirs", b"mine")
        assert payloads(one.serve().deliveries) == [large, b"mine"]
        assert payloads(two.collect()) == [b"theirs"]

    def test_an_unreadable_message_is_dead_lettered_by_the_serving_consumer(self, bench: Bench) -> None:
        """POISON-ENDS: whichever consumer's turn it is."""
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a", b"b", b"c")
        begin, end = range_of(bench.engine.keys.ready("q"))
        rows: list[bytes] = []
        bench.write(lambda tr: rows.extend(key for key, _ in tr.get_range(begin, end)))
        bench.write(lambda tr: tr.set(rows[1], b"?"))
        assert payloads(one.serve().deliveries) == [b"a"]
        assert payloads(two.collect()) == []
        assert bench.counts("q.dead") == (1, 0, 0)
        assert two.look().is_first

    def test_any_number_of_queues_may_have_times_to_run(self, bench: Bench) -> None:
        """How a demand stands is one value, which has a limit."""
        queues = [f"{number:03}".ljust(255, "x") for number in range(400)]
        for queue in queues:
            bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-consumer-timeout": 60_000}))
        one, two = Competitor(bench, 1, *queues), Competitor(bench, 2, *queues)
        for queue in queues[-3:]:
            bench.put(b"a", queue=queue)
        one.serve()
        assert [(each.queue, each.ttr_ms) for each in two.collect()] == [(each, 60_000) for each in queues[-2:]]

    def test_a_payload_that_is_gone_is_dead_lettered_by_who_gets_it(self, bench: Bench) -> None:
        """POISON-ENDS."""
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a")
        bench.put(b"x" * (INLINE_BYTES + 1))
        bench.write(lambda tr: tr.clear_range(*range_of(bench.engine.keys._key("body"))))
        one.serve()
        assert two.collect() == []
        assert bench.counts("q.dead") == (1, 0, 0)

    def test_a_lease_that_cannot_be_read_is_left_for_the_sweep(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench, 2)
        bench.put(b"a", b"b")
        one.serve()
        lease = bench.engine.keys.lease(two.session, two.demand.first + 1)
        bench.write(lambda tr: tr.set(lease, b"garbage"))
        assert payloads(two.collect()) == [b"b"]
        bench.write(lambda tr: tr.clear(lease))

    def test_an_expired_message_is_never_granted(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"old", ttl_ms=1000)
        bench.later(2)
        bench.put(b"new")
        served = one.serve()
        assert served.deliveries == []
        assert payloads(two.collect()) == [b"new"]
        assert one.look().is_first, "it got nothing, and waits"

    # -- who does not wait any more ----------------------------------------------------------------------------------

    def test_who_has_left_is_granted_nothing(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        seen = one.look()
        assert two.engine.messages.leave(two.demand) is False
        bench.put(b"a", b"b")
        assert one.serve(seen).others == 0
        assert bench.counts() == (1, 0, 1)
        assert two.look().stands == ENDED

    def test_who_leaves_too_late_has_it(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a", b"b")
        one.serve()
        assert two.engine.messages.leave(two.demand) is True
        assert payloads(two.collect()) == [b"b"]

    def test_who_waits_behind_one_that_leaves_wakes_up(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        rung = woken(two.look())
        one.engine.messages.leave(one.demand)
        assert rung.wait(PATIENCE_S)
        assert two.look().is_first

    def test_a_first_one_that_does_not_serve_is_deposed(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        two.engine.messages.evict(two.demand, two.look().first)
        assert one.look().stands == ENDED
        assert two.look().is_first
        two.engine.messages.evict(two.demand, two.look().first + b"nobody")
        bench.put(b"a")
        assert one.engine.messages.serve(one.demand, ["q"], {}).ended
        assert payloads(two.serve().deliveries) == [b"a"]

    def test_who_was_deposed_joins_again(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        two.engine.messages.evict(two.demand, two.look().first)
        one.join(over=[one.demand.first])
        assert two.look().is_first
        assert one.look().stands == WAITING

    def test_a_malformed_row_is_evicted_too(self, bench: Bench) -> None:
        garbage = bench.engine.keys.wait_queue(wait_queue.name(["q"])) + b"\x00" * 12
        bench.write(lambda tr: tr.set(garbage, b"garbage"))
        one = Competitor(bench)
        sight = one.look()
        assert not sight.is_first
        assert sight.first == garbage
        one.engine.messages.evict(one.demand, sight.first)
        assert one.look().is_first

    def test_who_waits_and_has_no_row_any_more_waits_in_vain(self, bench: Bench) -> None:
        """An older version could not read its row, and evicted it."""
        one, two = Competitor(bench), Competitor(bench)
        row = one.look().first
        bench.write(lambda tr: tr.clear(row))
        assert one.look().stands == ENDED
        assert two.look().is_first
        one.join(over=[one.demand.first])
        assert one.look().stands == WAITING

    # -- sessions ------------------------------------------------------------------------------------------------------

    def test_a_fenced_session_is_granted_nothing(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        seen = one.look()
        bench.engine.sessions.fence(two.session, bench.beats()[two.session])
        bench.put(b"a", b"b")
        assert one.serve(seen).others == 0
        assert bench.counts() == (1, 0, 1)

    def test_a_fenced_session_neither_serves_nor_joins(self, bench: Bench) -> None:
        one = Competitor(bench)
        seen = one.look()
        bench.put(b"a")
        bench.engine.sessions.fence(one.session, bench.beats()[one.session])
        with pytest.raises(SessionLost):
            one.serve(seen)
        with pytest.raises(SessionLost):
            one.join()
        assert bench.counts() == (1, 0, 0)

    def test_the_end_of_a_session_ends_its_demands(self, bench: Bench) -> None:
        one, two = Competitor(bench), Competitor(bench)
        one.join()
        one.engine.sessions.close(one.session)
        assert two.look().is_first

    def test_a_dead_sessions_grants_come_back(self, bench: Bench) -> None:
        """BACK-SOON."""
        one, two = Competitor(bench), Competitor(bench)
        bench.put(b"a", b"b")
        one.serve()
        two.engine.sessions.close(two.session)
        assert bench.counts() == (1, 0, 1)

    def test_recovery_ends_a_demand(self, bench: Bench) -> None:
        """One of which it is unknown whether it was made, or granted."""
        one, two = Competitor(bench), Competitor(bench)
        two.engine.sessions.recover(two.session, two.demand.first)
        assert two.look().stands == ENDED
        two.join()
        bench.put(b"a", b"b")
        one.serve()
        assert two.engine.sessions.recover(two.session, two.demand.first) == 1
        assert bench.counts() == (1, 0, 1)

    # -- what is left ------------------------------------------------------------------------------------------------

    def test_joining_settles_acks_and_clears_the_last_demand(self, bench: Bench) -> None:
        one = Competitor(bench)
        bench.put(b"a", b"b")
        (first,) = one.serve().deliveries
        before = one.demand
        one.join(first.lease, over=[before.first])
        assert bench.counts() == (1, 0, 0)
        assert one.engine.messages.look(before)[0].stands == ENDED
        assert payloads(one.serve().deliveries) == [b"b"]

    def test_nothing_is_left_of_sessions_that_ended(self, bench: Bench) -> None:
        one, two, three = Competitor(bench), Competitor(bench), Competitor(bench)
        bench.put(b"a")
        one.serve()
        three.engine.messages.leave(three.demand)
        for each in (one, two, three):
            each.engine.sessions.close(each.session)
        keys = bench.engine.keys
        wholes = [(*keys.all_wait_queues, 0), (*keys.all_demands, 0), (*keys.all_served, 0)]
        assert bench.engine.transactions.read(lambda work: work.tr.get_ranges(wholes)) == [[], [], []]


def _numbers(bench: Bench) -> list[int]:
    keys = bench.engine.keys
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(*range_of(keys.leases(bench.session))))
    return [number for (_, number), _ in keys.read(rows, bytes, int)]
