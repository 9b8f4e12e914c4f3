"""What a wait queue of competitors must do, over any store (``engine/scheduling/wait_queue.py``).

The protocol is a state machine (``kit/waiters.py``). The examples beside it are what its messages and rows are not:
queues, limits, payloads, and rows that can't be read.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kit.conformance.queue import Bench, OnBench
from kit.faults import FaultyDatabase
from kit.machines import run
from kit.waiters import WaitQueue
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.scheduling.wait_queue import ENDED, WAITING, Standing
from kombu_fdb.errors import Outrun
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, Delivery, Demand, KeyLimits, Lease
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.protocol import Database
from kombu_fdb.testing.clock import ManualClock


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


class WaitQueueConformance(OnBench):
    """Run over every store."""

    def test_every_history(self, database: Database) -> None:
        """ONE-OWNER, BOUNDED, BACK-SOON."""
        in_memory = isinstance(database, FaultyDatabase)
        if in_memory:
            database = FaultyDatabase(clock=ManualClock())  # no transaction is too old on a busy machine
        run(WaitQueue, database, examples=36 if in_memory else 3, derandomize=True)

    # -- who is served -------------------------------------------------------------------------------------------------

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

    # -- who does not wait any more ----------------------------------------------------------------------------------

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


def _numbers(bench: Bench) -> list[int]:
    keys = bench.engine.keys
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(*range_of(keys.leases(bench.session))))
    return [number for (_, number), _ in keys.read(rows, bytes, int)]
