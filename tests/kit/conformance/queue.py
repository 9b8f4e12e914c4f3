"""What the queue must do, over any store: a suite to be run once per driver.

A test module subclasses :class:`QueueConformance` and provides the fixture ``database`` (see ``tests/queue``). Each
test has a namespace of its own, time is a :class:`~kombu_fdb.testing.clock.ManualClock`, and after each test every
counter must equal a full scan (guarantee COUNTS) and every message must be in one place (ONE-PLACE).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kit.conformance.invariants import check_counts, check_whereabouts, leftovers, messages
from kit.duties import SingleDuties, promote_all, trim_all
from kit.faults import FaultyDatabase
from kombu_fdb.engine import topology
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.work import Environment, Work
from kombu_fdb.errors import (
    CapacityExceeded,
    ExchangeNotFound,
    FormatError,
    MessageTooLarge,
    NotEquivalent,
    SessionLost,
)
from kombu_fdb.keyspace.codec import AMOUNT_BYTES, CHUNK_BYTES, INLINE_BYTES, encode_amount
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, Delivery, Publication, QueueCounts, SessionId
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process.duty_cycle import ROLE_TTL_S
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.testing.clock import ManualClock


class Bench:
    """One namespace, several engines on it as if in several processes, and a clock."""

    def __init__(self, database: Database, *, task_ids: bool = False, **options: Any) -> None:
        """``task_ids``: each message that is put is a task's, found by its payload in hexadecimal digits.

        ``options``: those of its processes, as in ``Environment``.
        """
        self.database = database
        self.task_ids = task_ids
        self.clock = ManualClock()
        self.environment = Environment(self.clock, random_id, random.Random(7), call_s=30.0, **options)
        self.namespace = f"test-{random_id().hex()}"
        self.engine = self.another()
        self.engine.check_format()
        self.session = self.engine.sessions.open({"host": "test"})

    def another(self) -> Engine:
        """An engine of another process."""
        return Engine(self.database, self.namespace, replace(self.environment, clock=self.clock, rng=random.Random(7)))

    def during(self, first: Callable[[], object], second: Callable[[], object]) -> object:
        """Run ``second`` once, just before the first writing commit of ``first``."""
        database = self.database
        assert isinstance(database, FaultyDatabase)

        def once() -> None:
            database.before_commit = None
            second()

        database.before_commit = once
        return first()

    def warm_up(self) -> None:
        """The first use reads the queue's declaration, which is then believed for a second."""
        self.put(b"")
        self.engine.queues.purge("q")

    def duties(self, session: SessionId | None = None) -> SingleDuties:
        return SingleDuties(
            self.engine,
            self.clock,
            self.session if session is None else session,
            sweep_interval_s=5.0,
        )

    def beats(self) -> dict[SessionId, bytes]:
        """Each session's last beat."""
        return {session_id: beat for session_id, beat, _ttl_s in self.engine.sessions.beats()}

    def put(self, *payloads: bytes, queue: str = "q", **properties: Any) -> None:
        for payload in payloads:
            if self.task_ids:
                properties["task_id"] = payload[:100].hex()
            self.engine.publisher.publish([Publication("", queue, payload, **properties)])

    def take(self, limit: int = 100, *queues: str, session: SessionId | None = None) -> list[Delivery]:
        return self.engine.messages.claim(session or self.session, queues or ("q",), limit)

    def payloads(self, limit: int = 100, *queues: str) -> list[bytes]:
        return [delivery.payload for delivery in self.take(limit, *queues)]

    def counts(self, queue: str = "q") -> tuple[int, int, int]:
        counts = self.engine.inspect.counts(queue)
        return counts.ready, counts.delayed, counts.leased

    def write(self, verb: Callable[[Transaction], object]) -> None:
        """Do something to the store behind the engine's back."""

        self.engine.transactions.write(lambda work: verb(work.tr))

    def work(self, verb: Callable[[Work], object]) -> None:
        """Run a verb of the engine by itself."""
        self.engine.transactions.write(verb)

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def check(self) -> None:
        check_counts(self.engine)
        check_whereabouts(self.engine)

    def clean(self) -> None:
        keys = self.engine.keys
        self.write(lambda tr: tr.clear_range(*range_of(keys.prefix)))


class OnBench:
    """A suite whose tests run on a bench each, and leave it as they should."""

    #: Whether messages have task ids.
    task_ids = False

    @pytest.fixture
    def bench(self, database: Database) -> Iterator[Bench]:
        bench = Bench(database, task_ids=self.task_ids)
        yield bench
        bench.check()
        bench.clean()


class QueueConformance(OnBench):
    """Run over every store."""

    task_ids = True

    # -- order -----------------------------------------------------------------------------------------------------

    def test_queue_order_is_commit_order(self, bench: Bench) -> None:
        other = bench.another()
        for number in range(10):
            (bench.engine, other)[number % 2].publisher.publish([Publication("", "q", b"%d" % number)])
        assert bench.payloads() == [b"%d" % number for number in range(10)]

    def test_a_batch_keeps_its_order(self, bench: Bench) -> None:
        bench.engine.publisher.publish([Publication("", "q", b"%d" % number) for number in range(300)])
        assert bench.payloads(1000) == [b"%d" % number for number in range(300)]

    def test_priority_is_strict_and_fifo_inside(self, bench: Bench) -> None:
        for number in range(20):
            bench.put(b"%d" % number, priority=number % 10)
        expected = [b"%d" % (tens + priority) for priority in range(9, -1, -1) for tens in (0, 10)]
        assert bench.payloads() == expected

    def test_windows_follow_each_other(self, bench: Bench) -> None:
        bench.put(b"a", b"b", b"c", b"d", b"e")
        assert [bench.payloads(2) for _ in range(4)] == [[b"a", b"b"], [b"c", b"d"], [b"e"], []]

    def test_a_claim_takes_from_several_queues_in_turn(self, bench: Bench) -> None:
        bench.put(b"a", b"b", queue="one")
        bench.put(b"c", b"d", queue="two")
        assert bench.payloads(3, "one", "two") == [b"a", b"b", b"c"]
        assert bench.payloads(3, "two", "one") == [b"d"]

    def test_a_released_message_returns_to_its_place(self, bench: Bench) -> None:
        bench.put(b"a", b"b", b"c")
        first = bench.take(2)
        bench.put(b"d")
        bench.engine.messages.release([delivery.lease for delivery in reversed(first)])
        assert bench.payloads() == [b"a", b"b", b"c", b"d"]

    # -- payloads --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17, 8 * 2**20]
    )
    def test_payloads_of_any_size_come_back_whole(self, bench: Bench, size: int) -> None:
        payload = bytes(random.Random(size).randbytes(size))
        bench.put(payload)
        (delivery,) = bench.take()
        assert delivery.payload == payload
        assert bench.engine.messages.release([delivery.lease]) == [True]
        (delivery,) = bench.take()
        assert delivery.payload == payload
        assert bench.engine.messages.ack([delivery.lease]) == [True]
        assert leftovers(bench.engine) == []

    def test_a_payload_over_the_maximum_is_refused_and_nothing_stored(self, bench: Bench) -> None:
        with pytest.raises(MessageTooLarge, match="max_message_size"):
            bench.engine.publisher.publish([Publication("", "q", b"ok"), Publication("", "q", bytes(8 * 2**20 + 1))])
        assert bench.counts() == (0, 0, 0)

    # -- leases ----------------------------------------------------------------------------------------------------

    def test_a_message_is_delivered_to_one_consumer(self, bench: Bench) -> None:
        bench.put(b"a", b"b", b"c")
        other = bench.engine.sessions.open({})
        assert [d.payload for d in bench.take(2)] == [b"a", b"b"]
        assert [d.payload for d in bench.take(2, session=other)] == [b"c"]
        assert bench.counts() == (0, 0, 3)

    def test_ack_deletes_once(self, bench: Bench) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        assert bench.engine.messages.ack([delivery.lease, delivery.lease]) == [True, False]
        assert bench.engine.messages.ack([delivery.lease]) == [False]
        assert bench.counts() == (0, 0, 0)
        assert leftovers(bench.engine) == []

    def test_acks_may_travel_with_a_claim(self, bench: Bench) -> None:
        bench.put(b"a", b"b")
        (first,) = bench.take(1)
        (second,) = bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(acks=[first.lease]))
        assert second.payload == b"b"
        assert bench.counts() == (0, 0, 1)

    def test_a_lost_lease_changes_nothing(self, bench: Bench) -> None:
        bench.put(b"a")
        (stale,) = bench.take()
        bench.engine.sessions.fence(bench.session, _beat(bench, bench.session))
        bench.engine.sessions.release(bench.session)
        other = bench.engine.sessions.open({})
        (fresh,) = bench.take(session=other)
        assert bench.engine.messages.ack([stale.lease]) == [False]
        assert bench.engine.messages.release([stale.lease]) == [False]
        assert bench.engine.messages.reject([stale.lease]) == [False]
        assert bench.counts() == (0, 0, 1)
        assert bench.engine.messages.ack([fresh.lease]) == [True]

    def test_a_no_ack_queue_takes_without_a_lease(self, bench: Bench) -> None:
        bench.put(b"a", bytes(INLINE_BYTES + 1))
        taken = bench.engine.messages.claim(bench.session, ["q"], 5, terms=ClaimTerms(no_ack={"q"}))
        assert [len(delivery.payload) for delivery in taken] == [1, INLINE_BYTES + 1]
        assert bench.counts() == (0, 0, 0)
        assert leftovers(bench.engine) == []

    def test_what_comes_back_counts(self, bench: Bench) -> None:
        bench.put(b"a")
        for expected in (0, 1, 2):
            (delivery,) = bench.take()
            assert delivery.redeliveries == expected
            bench.engine.messages.release([delivery.lease])

    def test_an_unstarted_message_is_handed_back_uncounted(self, bench: Bench) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        bench.engine.messages.release([delivery.lease], counted=False)
        (delivery,) = bench.take()
        assert delivery.redeliveries == 0

    def test_recover_releases_what_one_claim_has_leased(self, bench: Bench) -> None:
        bench.put(*[b"%d" % number for number in range(300)])
        (known,) = bench.take(1)
        first = bench.engine.messages.reserve()
        bench.engine.messages.claim(bench.session, ["q"], 250, terms=ClaimTerms(first=first))
        (later,) = bench.take(1)
        assert bench.engine.sessions.recover(bench.session, first) == 250
        assert bench.engine.sessions.recover(bench.session, first) == 0
        assert bench.engine.messages.holds([known.lease, later.lease]) == [True, True]
        assert [(each.payload, each.redeliveries) for each in bench.take(2)] == [(b"1", 0), (b"2", 0)]

    def test_an_ended_session_recovers_nothing(self, bench: Bench) -> None:
        bench.engine.sessions.close(bench.session)
        with pytest.raises(SessionLost):
            bench.engine.sessions.recover(bench.session, bench.engine.messages.reserve())

    # -- delays ----------------------------------------------------------------------------------------------------

    def test_a_delayed_message_is_not_early(self, bench: Bench) -> None:
        due = bench.clock.wall_ms() + 10_000
        bench.put(b"later", due_ms=due)
        bench.put(b"now")
        assert promote_all(bench.engine) == (0, due)
        assert bench.payloads() == [b"now"]
        assert bench.counts() == (0, 1, 1)
        bench.later(9.999)
        assert promote_all(bench.engine) == (0, due)
        bench.later(0.001)
        assert promote_all(bench.engine) == (1, None)
        assert bench.payloads() == [b"later"]

    def test_promotion_is_in_order_of_due_time_and_keeps_priority(self, bench: Bench) -> None:
        now = bench.clock.wall_ms()
        for number in (3, 1, 2):
            bench.put(b"%d" % number, due_ms=now + number * 1000)
        bench.put(b"urgent", due_ms=now + 3000, priority=9)
        bench.later(3)
        assert promote_all(bench.engine)[0] == 4
        assert bench.payloads() == [b"urgent", b"1", b"2", b"3"]

    def test_more_than_one_transaction_of_due_messages(self, bench: Bench) -> None:
        due = bench.clock.wall_ms() + 1
        bench.engine.publisher.publish([Publication("", "q", b"%d" % n, due_ms=due) for n in range(450)])
        bench.later(1)
        assert promote_all(bench.engine) == (450, None)
        assert bench.payloads(1000) == [b"%d" % n for n in range(450)]

    def test_release_with_delay(self, bench: Bench) -> None:
        bench.put(b"a", b"b")
        (delivery,) = bench.take(1)
        bench.engine.messages.release([delivery.lease], due_ms=bench.clock.wall_ms() + 1000)
        assert bench.payloads() == [b"b"]
        bench.later(1)
        promote_all(bench.engine)
        (delivery,) = bench.take()
        assert (delivery.payload, delivery.redeliveries) == (b"a", 1)

    def test_the_alarm_rings_for_the_promoter(self, bench: Bench) -> None:
        fired: list[bool] = []
        bench.engine.sessions.watch_alarm().on_fire(lambda: fired.append(True))
        bench.put(b"a")
        assert not fired
        bench.another().publisher.publish([Publication("", "q", b"b", due_ms=bench.clock.wall_ms() + 1000)])
        _wait_until(lambda: bool(fired))

    # -- expiry ----------------------------------------------------------------------------------------------------

    def test_an_expired_message_is_never_delivered(self, bench: Bench) -> None:
        bench.put(b"short", ttl_ms=1000)
        bench.put(b"long", ttl_ms=3000)
        bench.later(1)
        assert bench.payloads() == [b"long"]
        assert bench.counts() == (0, 0, 1)

    def test_the_shorter_of_message_and_queue_ttl_counts(self, bench: Bench) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": 2000}))
        bench.put(b"a", ttl_ms=5000)
        bench.put(b"b", ttl_ms=500)
        bench.later(1)
        bench.put(b"c")
        bench.later(1)
        assert bench.payloads() == [b"c"]

    def test_a_delay_extends_ttl_but_not_expires(self, bench: Bench) -> None:
        due = bench.clock.wall_ms() + 60_000
        bench.put(b"ttl", due_ms=due, ttl_ms=1000)
        bench.put(b"expires", due_ms=due, expires_ms=due - 1)
        bench.later(60)
        promote_all(bench.engine)
        assert bench.payloads() == [b"ttl"]

    def test_expired_messages_go_to_a_dead_letter_exchange_if_one_is_set(self, bench: Bench) -> None:
        """Else they are deleted."""
        bench.put(b"gone", ttl_ms=1)
        bench.later(1)
        assert bench.payloads() == []
        assert bench.counts("q.dead") == (0, 0, 0)
        bench.engine.queues.declare(
            QueueDeclaration("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graveyard"})
        )
        bench.put(b"a", ttl_ms=1)
        bench.later(1)
        assert bench.payloads() == []
        (delivery,) = bench.take(5, "graveyard")
        assert delivery.payload == b"a"
        assert [(death.queue, death.reason, death.count) for death in delivery.deaths] == [("q", "expired", 1)]

    # -- dead letters ----------------------------------------------------------------------------------------------

    def test_a_rejected_message_goes_to_the_dead_queue(self, bench: Bench) -> None:
        bench.put(b"a" * (INLINE_BYTES + 1))
        (delivery,) = bench.take()
        assert bench.engine.messages.reject([delivery.lease], error="ValueError") == [True]
        (dead,) = bench.take(5, "q.dead")
        assert dead.payload == b"a" * (INLINE_BYTES + 1)
        (death,) = dead.deaths
        assert (death.queue, death.reason, death.details) == ("q", "rejected", {"error": "ValueError"})

    def test_a_message_rejected_by_the_dead_queue_is_gone(self, bench: Bench) -> None:
        bench.put(b"a")
        bench.engine.messages.reject([bench.take()[0].lease])
        bench.engine.messages.reject([bench.take(1, "q.dead")[0].lease])
        assert leftovers(bench.engine) == []

    def test_poison_ends(self, bench: Bench) -> None:
        """POISON-ENDS."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-delivery-limit": 2}))
        bench.put(b"poison")
        deliveries = 0
        while taken := bench.take():
            deliveries += 1
            bench.engine.messages.release([taken[0].lease])
        assert deliveries == 3
        (dead,) = bench.take(1, "q.dead")
        assert dead.deaths[0].reason == "delivery_limit"

    def test_dead_letters_reach_every_bound_queue_with_a_copy_each(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
        for target in ("one", "two"):
            bench.engine.queues.bind(target, "dlx", "")
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx"}))
        payload = b"x" * (CHUNK_BYTES + 1)
        bench.put(payload)
        bench.engine.messages.reject([bench.take()[0].lease])
        (one,) = bench.take(5, "one")
        (two,) = bench.take(5, "two")
        assert one.payload == two.payload == payload
        bench.engine.messages.ack([one.lease])
        assert bench.engine.messages.release([two.lease]) == [True]
        assert bench.payloads(5, "two") == [payload]

    @pytest.mark.parametrize("exchange", ["nowhere", "amq.direct"])
    def test_a_dead_letter_exchange_that_reaches_no_queue_loses_nothing(self, bench: Bench, exchange: str) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": exchange}))
        bench.put(b"a")
        bench.engine.messages.reject([bench.take()[0].lease])
        assert bench.payloads(5, "q.dead") == [b"a"]

    @pytest.mark.parametrize("rejected", [False, True])
    def test_a_message_does_not_expire_in_circles(self, bench: Bench, rejected: bool) -> None:
        """Nor does one that was rejected before it came to the circle."""
        for one, other in (("q", "r"), ("r", "q"), ("before", "q")):
            arguments = {"x-message-ttl": 10, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": other}
            bench.engine.queues.declare(QueueDeclaration(one, arguments=arguments))
        bench.put(b"a", queue="before" if rejected else "q")
        if rejected:
            bench.engine.messages.reject([delivery.lease for delivery in bench.take(1, "before")])
        for queue in "qr":
            bench.later(1)
            assert bench.payloads(5, queue) == []
        assert leftovers(bench.engine) == []

    def test_a_message_does_not_expire_into_its_own_queue(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("all", "fanout"))
        bench.engine.queues.declare(
            QueueDeclaration("q", arguments={"x-message-ttl": 10, "x-dead-letter-exchange": "all"})
        )
        for queue in "qr":
            bench.engine.queues.bind(queue, "all", "")
        bench.put(b"a")
        bench.later(1)
        assert bench.payloads(5, "q") == []
        assert bench.counts("q") == (0, 0, 0)
        assert bench.payloads(5, "r") == [b"a"]

    def test_rejected_messages_may_go_in_circles(self, bench: Bench) -> None:
        for one, other in (("q", "r"), ("r", "q")):
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": other}
            bench.engine.queues.declare(QueueDeclaration(one, arguments=arguments))
        bench.put(b"a")
        for queue in "qrqr":
            (delivery,) = bench.take(1, queue)
            bench.engine.messages.reject([delivery.lease])
        (delivery,) = bench.take(1, "q")
        assert [(death.queue, death.count) for death in delivery.deaths] == [("r", 2), ("q", 2)]

    def test_the_dead_queue_is_bounded_in_length_and_time(self, database: Database) -> None:
        default = Bench(database).environment
        assert (default.dead_length, default.dead_ttl_ms) == (10_000, 14 * 86_400_000), "as the docs say"
        bench = Bench(database, dead_length=3, dead_ttl_ms=1000)
        bench.put(*[b"%d" % number for number in range(8)])
        bench.engine.messages.reject([delivery.lease for delivery in bench.take(5)])
        assert trim_all(bench.engine) == 2
        bench.later(0.5)
        bench.engine.messages.reject([bench.take(1)[0].lease])
        assert trim_all(bench.engine) == 1
        assert bench.counts("q.dead") == (3, 0, 0)
        bench.later(0.5)
        assert trim_all(bench.engine) == 2
        assert bench.payloads(5, "q.dead") == [b"5"]
        bench.check()
        bench.clean()

    def test_unreadable_bytes_are_dead_lettered_and_the_rest_delivered(self, bench: Bench) -> None:
        keys = bench.engine.keys
        bench.put(b"good")
        place = keys.rank(9) + b"\x33" + bytes(12)

        def poison(tr: Transaction) -> None:
            tr.set(keys.ready("q") + place, b"\xffnot a record")
            tr.add(keys.count("q", "ready"), encode_amount(1, len(b"\xffnot a record")), width=AMOUNT_BYTES)

        bench.write(poison)
        assert bench.payloads() == [b"good"]
        (dead,) = bench.take(5, "q.dead")
        assert dead.payload == b"\xffnot a record"
        assert dead.deaths[0].reason == "malformed"

    def test_a_lost_payload_is_dead_lettered(self, bench: Bench) -> None:
        bench.put(b"x" * (INLINE_BYTES + 1), b"good")
        bench.write(lambda tr: tr.clear_range(*range_of(bench.engine.keys._key("body"))))
        assert bench.payloads() == [b"good"]
        assert bench.counts("q.dead") == (1, 0, 0)

    # -- overflow --------------------------------------------------------------------------------------------------

    def full(self, bench: Bench, overflow: str | None, **more: str) -> None:
        """A queue of at most three, which are there."""
        mode = {} if overflow is None else {"x-overflow": overflow}
        arguments = {"x-max-length": 3, **mode, **{name.replace("_", "-"): value for name, value in more.items()}}
        bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))
        bench.put(b"a", b"b", b"c" * (INLINE_BYTES + 1))

    def test_drop_head(self, bench: Bench) -> None:
        self.full(bench, None)
        bench.put(b"d", b"e")
        assert [payload[:1] for payload in bench.payloads()] == [b"c", b"d", b"e"]

    def test_a_row_that_stands_nowhere_gives_way_first(self, bench: Bench) -> None:
        """One unreadable row neither stops publishers nor takes room for ever."""
        self.full(bench, None)
        keys, value = bench.engine.keys, b"\xffodd"

        def misplace(tr: Transaction) -> None:
            for place in (b"\x1f\x01", b"\x1f\x02"):
                tr.set(keys.ready("q") + place, value)
                tr.add(keys.count("q", "ready"), encode_amount(1, len(value)), width=AMOUNT_BYTES)

        bench.write(misplace)
        bench.put(b"d")
        assert [payload[:1] for payload in bench.payloads()] == [b"b", b"c", b"d"]

    def test_drop_head_spares_the_urgent(self, bench: Bench) -> None:
        self.full(bench, "drop-head")
        bench.put(b"d", b"e", priority=9)
        assert [payload[:1] for payload in bench.payloads()] == [b"d", b"e", b"c"]

    def test_drop_head_in_a_fair_queue(self, bench: Bench) -> None:
        self.full(bench, "drop-head")
        bench.put(b"d", b"e", b"f", b"g", key="k")
        assert len(bench.payloads()) == 3

    def test_dropped_messages_go_to_the_dead_letter_exchange(self, bench: Bench) -> None:
        self.full(bench, "drop-head", x_dead_letter_exchange="", x_dead_letter_routing_key="graveyard")
        bench.put(b"d")
        (dead,) = bench.take(5, "graveyard")
        assert (dead.payload, dead.deaths[0].reason) == (b"a", "maxlen")

    def test_reject_publish(self, bench: Bench) -> None:
        self.full(bench, "reject-publish")
        with pytest.raises(CapacityExceeded) as caught:
            bench.put(b"d")
        assert (caught.value.queue, caught.value.current_size, caught.value.capacity) == ("q", 3, 3)
        assert "raise the queue's x-max-length." in caught.value.fix
        bench.engine.messages.ack([bench.take(1)[0].lease])
        bench.put(b"e")
        assert bench.counts() == (3, 0, 0)

    def test_reject_publish_dlx(self, bench: Bench) -> None:
        self.full(bench, "reject-publish-dlx", x_dead_letter_exchange="", x_dead_letter_routing_key="graveyard")
        bench.put(b"d" * (INLINE_BYTES + 1))
        assert bench.counts() == (3, 0, 0)
        (dead,) = bench.take(5, "graveyard")
        assert (dead.payload[:1], dead.deaths[0].reason) == (b"d", "maxlen")

    def test_a_full_queue_may_overflow_into_another_of_the_same_batch(self, bench: Bench) -> None:
        self.full(bench, "drop-head", x_dead_letter_exchange="", x_dead_letter_routing_key="graveyard")
        bench.engine.queues.declare(QueueDeclaration("graveyard", arguments={"x-max-length": 1}))
        bench.put(b"x", queue="graveyard")
        bench.engine.publisher.publish([Publication("", "q", b"d"), Publication("", "graveyard", b"y")])
        assert bench.counts() == (3, 0, 0)
        (last,) = bench.take(5, "graveyard")
        assert last.deaths[0].reason == "maxlen", "the dead letter came last"

    # -- sessions --------------------------------------------------------------------------------------------------

    def test_a_closed_session_hands_everything_back_at_once(self, bench: Bench) -> None:
        bench.put(b"a", b"b", b"c")
        session = bench.engine.sessions.open({})
        bench.take(2, session=session)
        assert bench.engine.sessions.close(session) == 2
        assert [(d.payload, d.redeliveries) for d in bench.take()] == [(b"a", 0), (b"b", 0), (b"c", 0)]
        with pytest.raises(SessionLost):
            bench.take(session=session)
        assert not bench.engine.sessions.beat(session)

    def test_a_dead_session_is_swept_within_its_ttl_and_one_sweep(self, bench: Bench) -> None:
        bench.put(*[b"%d" % number for number in range(450)])
        dead = bench.engine.sessions.open({})
        assert len(bench.take(1000, session=dead)) == 450
        duties = bench.duties()
        died_at = bench.clock.monotonic()
        while not duties.sweep():
            bench.later(5)
            assert bench.engine.sessions.beat(bench.session)
        assert bench.clock.monotonic() - died_at <= 30 + 5
        assert bench.counts() == (450, 0, 0)
        assert [d.redeliveries for d in bench.take(1)] == [1]
        assert dead not in bench.beats()

    def test_a_live_session_is_never_swept_whatever_the_wall_clock_does(self, bench: Bench) -> None:
        bench.put(b"a")
        other = bench.engine.sessions.open({})
        bench.take(session=other)
        duties = bench.duties()
        for _ in range(50):
            bench.later(5)
            bench.clock.jump_wall(86_400)
            assert bench.engine.sessions.beat(other)
            assert duties.sweep() == 0
        assert bench.counts() == (0, 0, 1)

    def test_an_outage_makes_no_session_look_dead(self, bench: Bench) -> None:
        other = bench.engine.sessions.open({})
        duties = bench.duties()
        duties.sweep()
        bench.later(3600)  # no sweeper could look, and no session could beat
        assert duties.sweep() == 0
        assert bench.engine.sessions.beat(other)

    def test_a_beat_between_look_and_fence_saves_the_session(self, bench: Bench) -> None:
        stale = _beat(bench, bench.session)
        bench.engine.sessions.beat(bench.session)
        assert not bench.engine.sessions.fence(bench.session, stale)
        assert bench.take() == []

    def test_two_sweepers_at_once(self, bench: Bench) -> None:
        bench.put(b"a", b"b")
        dead = bench.engine.sessions.open({})
        bench.take(session=dead)
        beat = _beat(bench, dead)
        assert bench.engine.sessions.fence(dead, beat)
        assert bench.engine.sessions.fence(dead, beat)
        assert bench.engine.sessions.release(dead) == 2
        assert bench.another().sessions.release(dead) == 0
        assert bench.counts() == (2, 0, 0)

    def test_the_promoter_is_replaced_when_it_leaves_and_when_it_dies(self, bench: Bench) -> None:
        first, second, third = (bench.duties(bench.engine.sessions.open({})) for _ in range(3))

        def holders() -> list[bool]:
            return [duties._role.hold() for duties in (first, second, third)]

        assert holders() == [True, False, False]
        first.stop()
        bench.later(1)
        assert [second._role.hold(), first._role.hold()] == [True, False]
        died_at = bench.clock.monotonic()
        while not third._role.hold():
            bench.later(1)
        assert bench.clock.monotonic() - died_at <= ROLE_TTL_S + 1

    def test_an_unreadable_lease_does_not_stop_the_sweep(self, bench: Bench) -> None:
        bench.put(b"a")
        session = bench.engine.sessions.open({})
        (delivery,) = bench.take(session=session)
        bad = bench.engine.keys.lease(session, delivery.lease.number + 1)
        bench.write(lambda tr: tr.set(bad, b"garbage"))
        assert bench.engine.sessions.close(session) == 2
        assert bench.payloads() == [b"a"]
        assert bench.payloads(1, "unreadable.dead") == [b"garbage"]

    # -- waking ----------------------------------------------------------------------------------------------------

    def test_arm_finds_what_is_there(self, bench: Bench) -> None:
        bench.put(b"a")
        assert bench.engine.messages.arm(["empty", "q"]) is None

    def test_arm_fires_when_a_message_becomes_ready(self, bench: Bench) -> None:
        fired: list[str] = []
        watches = bench.engine.messages.arm(["one", "two"])
        assert watches is not None
        for name, watch in zip(("one", "two"), watches, strict=True):
            watch.on_fire(lambda name=name: fired.append(name))  # type: ignore[misc]  # mypy: default in lambda
        bench.another().publisher.publish([Publication("", "two", b"a")])
        _wait_until(lambda: bool(fired))
        assert fired == ["two"]
        for watch in watches:
            watch.cancel()

    def test_arm_fires_for_released_and_promoted_messages(self, bench: Bench) -> None:
        bench.put(b"a")
        (delivery,) = bench.take()
        for ready in (
            lambda: bench.engine.messages.release([delivery.lease], due_ms=bench.clock.wall_ms() + 1),
            lambda: promote_all(bench.engine),
        ):
            watches = bench.engine.messages.arm(["q"])
            assert watches is not None
            fired: list[bool] = []
            watches[0].on_fire(lambda fired=fired: fired.append(True))  # type: ignore[misc]  # mypy infers no default
            ready()
            bench.later(1)
        _wait_until(lambda: bool(fired))

    # -- routing ---------------------------------------------------------------------------------------------------

    def test_exchanges_route_by_their_type(self, bench: Bench) -> None:
        for kind, key in (("direct", "a.b"), ("topic", "a.*"), ("fanout", "")):
            bench.engine.queues.declare_exchange(Exchange(kind, kind))
            bench.engine.queues.bind(f"{kind}-q", kind, key)
        assert bench.engine.inspect.route("direct", "a.b") == ["direct-q"]
        assert bench.engine.inspect.route("direct", "a.c") == []
        assert bench.engine.inspect.route("topic", "a.c") == ["topic-q"]
        assert bench.engine.inspect.route("topic", "a.b.c") == []
        assert bench.engine.inspect.route("fanout", "anything") == ["fanout-q"]
        assert bench.engine.inspect.route("", "some-queue") == ["some-queue"]

    def test_a_message_reaches_a_queue_once_however_often_it_is_bound(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("t", "topic"))
        for key in ("#", "a.*", "a.b"):
            bench.engine.queues.bind("q", "t", key)
        assert bench.engine.publisher.publish([Publication("t", "a.b", b"x")]) == [["q"]]
        assert bench.payloads() == [b"x"]

    def test_a_binding_of_another_process_counts_from_its_commit(self, bench: Bench) -> None:
        other = bench.another()
        other.queues.declare_exchange(Exchange("x", "fanout"))
        assert bench.engine.publisher.publish([Publication("x", "", b"1")]) == [[]]
        other.queues.bind("q", "x", "")
        assert bench.engine.publisher.publish([Publication("x", "", b"2")]) == [["q"]]
        other.queues.unbind("q", "x", "")
        assert bench.engine.publisher.publish([Publication("x", "", b"3")]) == [[]]
        assert bench.payloads() == [b"2"]

    def test_unknown_and_contradictory_exchanges(self, bench: Bench) -> None:
        with pytest.raises(ExchangeNotFound):
            bench.engine.publisher.publish([Publication("nowhere", "", b"")])
        with pytest.raises(ExchangeNotFound):
            bench.engine.queues.bind("q", "nowhere", "")
        bench.engine.queues.declare_exchange(Exchange("x", "fanout"))
        bench.engine.queues.declare_exchange(Exchange("x", "fanout"))
        with pytest.raises(NotEquivalent):
            bench.engine.queues.declare_exchange(Exchange("x", "topic"))
        with pytest.raises(NotEquivalent):
            bench.engine.queues.declare_exchange(Exchange("amq.topic", "direct"))

    def test_deleting_an_exchange_takes_its_bindings_along(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("x", "direct"))
        bench.engine.queues.bind("q", "x", "k")
        assert not bench.engine.queues.delete_exchange("x", if_unused=True)
        assert bench.engine.queues.delete_exchange("x")
        assert bench.engine.inspect.exchange("x") is None
        assert bench.engine.inspect.bindings() == []
        bench.engine.queues.delete("q")

    # -- queues ----------------------------------------------------------------------------------------------------

    def test_declare_is_idempotent_and_updates_arguments(self, bench: Bench) -> None:
        assert bench.engine.inspect.queue("q") is None
        bench.engine.queues.declare(QueueDeclaration("q"))
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": 5}))
        assert bench.engine.inspect.queue("q") == QueueDeclaration("q", arguments={"x-message-ttl": 5})
        assert bench.engine.inspect.queues() == {"q": QueueCounts()}

    def test_purge_deletes_ready_and_delayed_and_leaves_leased(self, bench: Bench) -> None:
        bench.put(*[b"x" * (INLINE_BYTES + 1)] * 3)
        bench.take(1)
        bench.engine.publisher.publish(
            [Publication("", "q", b"%d" % n, due_ms=bench.clock.wall_ms() + 9) for n in range(600)]
        )
        assert bench.engine.queues.purge("q") == 602
        assert bench.counts() == (0, 0, 1)
        assert bench.engine.queues.purge("q") == 0

    def test_delete_leaves_nothing(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("x", "fanout"))
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 1000}))
        bench.engine.queues.bind("q", "x", "k")
        bench.engine.queues.add_consumer(bench.session, "q", "tag")
        bench.put(b"a", b"x" * 3000)
        assert bench.engine.queues.delete("q", if_empty=True) is None
        assert bench.engine.queues.delete("q", if_unused=True) is None
        assert bench.engine.queues.delete("q") == 2
        assert bench.engine.inspect.queue("q") is None
        assert bench.engine.inspect.queues() == {}
        assert bench.engine.inspect.bindings() == []
        assert leftovers(bench.engine) == []

    def test_an_auto_delete_queue_goes_with_its_last_consumer(self, bench: Bench) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
        bench.engine.queues.add_consumer(bench.session, "q", "one")
        bench.engine.queues.add_consumer(bench.session, "q", "two")
        bench.engine.queues.remove_consumer(bench.session, "q", "one")
        assert bench.engine.inspect.queue("q") is not None
        bench.engine.queues.remove_consumer(bench.session, "q", "two")
        assert bench.engine.inspect.queue("q") is None

    @pytest.mark.parametrize("due_ms", [0, 2**41])
    def test_what_was_held_when_its_queue_ended_is_gone_when_released(self, bench: Bench, due_ms: int) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
        bench.engine.queues.add_consumer(bench.session, "q", "one")
        bench.put(b"a", b"b")
        held = [delivery.lease for delivery in bench.take()]
        bench.engine.queues.remove_consumer(bench.session, "q", "one")
        bench.engine.queues.declare(QueueDeclaration("q"))
        bench.put(b"later")
        assert bench.engine.messages.release(held, counted=True, due_ms=due_ms) == [True, True]
        assert bench.payloads() == [b"later"]

    def test_what_was_sent_after_a_deletion_comes_back_while_older_messages_are_held(self, bench: Bench) -> None:
        """Also what was moved there: it may be older than the deletion, but not in the queue that was deleted."""
        bench.put(b"moved", queue="other")
        bench.engine.queues.declare(QueueDeclaration("q"))
        bench.put(b"held")
        bench.take()
        bench.engine.queues.delete("q")
        bench.engine.queues.declare(QueueDeclaration("q"))
        bench.put(b"new")
        bench.engine.messages.move("other", "q")
        bench.engine.messages.release([delivery.lease for delivery in bench.take()], counted=True)
        assert bench.payloads() == [b"new", b"moved"]

    def test_what_is_held_of_a_queue_without_declaration_comes_back(self, bench: Bench) -> None:
        bench.put(b"a")
        bench.engine.messages.release([delivery.lease for delivery in bench.take()], counted=False)
        assert bench.payloads() == [b"a"]

    def test_an_auto_delete_queue_goes_with_its_dead_consumer(self, bench: Bench) -> None:
        other = bench.engine.sessions.open({})
        bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
        bench.engine.queues.add_consumer(other, "q", "one")
        bench.engine.sessions.close(other)
        assert bench.engine.inspect.queue("q") is None
        assert leftovers(bench.engine) == []

    def test_who_can_not_beat_does_not_judge(self, bench: Bench) -> None:
        """A store that answers reads and takes no commits makes every session look silent."""
        other = bench.engine.sessions.open({})
        bench.put(b"a")
        bench.take(session=other)
        duties = bench.duties()
        for _ in range(40):
            duties.sweep()
            bench.later(5)
        assert bench.engine.sessions.beat(other)
        for _ in range(40):
            bench.engine.sessions.beat(bench.session)
            duties.sweep()
            bench.later(5)
        assert not bench.engine.sessions.beat(other), "dead, by all that is known"

    def test_a_dead_session_is_swept_when_its_time_is_over(self, bench: Bench) -> None:
        """BACK-SOON: not at the next look, which may be a whole interval later."""
        dead = bench.engine.sessions.open({}, ttl_s=21.0)
        bench.put(b"a")
        bench.take(session=dead)
        duties = bench.duties()
        begin = bench.clock.monotonic()
        while bench.counts() != (1, 0, 0):
            bench.engine.sessions.beat(bench.session)
            bench.later(max(0.01, min(duties.run_once(), 1.0)))
        assert bench.clock.monotonic() - begin <= 21.0 + 1.0

    def test_a_sweeper_that_dies_over_dead_consumers_is_followed_by_another(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = bench.engine.sessions.open({})
        bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
        bench.engine.queues.add_consumer(other, "q", "one")
        bench.engine.sessions.fence(other, bench.beats()[other])
        with monkeypatch.context() as dying:
            dying.setattr(topology, "drop_consumers", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                bench.engine.sessions.release(other)
        assert other in bench.beats(), "the next sweep finds it"
        bench.engine.sessions.release(other)
        assert bench.engine.inspect.queue("q") is None
        assert other not in bench.beats()

    def test_an_unused_expiring_queue_is_deleted_and_a_used_one_kept(self, bench: Bench) -> None:
        for name in ("unused", "touched", "consumed"):
            bench.engine.queues.declare(QueueDeclaration(name, arguments={"x-expires": 60_000}))
        bench.put(b"a", queue="unused")
        bench.engine.queues.add_consumer(bench.session, "consumed", "tag")
        duties = bench.duties()
        for _ in range(12):
            duties.expire_queues()
            assert bench.engine.inspect.queue("unused") is not None, "its time is not over"
            bench.later(5)
            bench.engine.queues.touch("touched")
        duties.expire_queues()
        bench.later(5)
        duties.expire_queues()
        assert sorted(bench.engine.inspect.queues()) == ["consumed", "touched"]
        assert messages(bench.engine) == {}

    def test_a_queue_is_unused_from_its_last_consumers_end_on(self, bench: Bench) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 60_000}))
        ((_, declared, _),) = bench.engine.queues.expiring()
        bench.engine.queues.add_consumer(bench.session, "q", "tag")
        bench.engine.queues.remove_consumer(bench.session, "q", "another")
        assert bench.engine.queues.expiring() == []
        assert not bench.engine.queues.expire("q", declared), "it has a consumer"
        bench.engine.queues.remove_consumer(bench.session, "q", "tag")
        ((_, last_use, expires_ms),) = bench.engine.queues.expiring()
        assert expires_ms == 60_000
        assert last_use > declared
        assert not bench.engine.queues.expire("q", declared), "it was used since"
        assert bench.engine.queues.expire("q", last_use)

    @pytest.mark.parametrize("arguments", [{}, {"x-expires": None}])
    def test_a_queue_declared_again_without_an_expiry_stays(self, bench: Bench, arguments: dict[str, Any]) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 1_000}))
        bench.put(b"a")
        ((_, last_use, _),) = bench.engine.queues.expiring()
        bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))
        assert bench.engine.queues.expiring() == []
        assert not bench.engine.queues.expire("q", last_use)
        bench.write(lambda tr: tr.set(bench.engine.keys.expiring("q"), last_use))  # as an older version leaves it
        assert bench.engine.queues.expiring() == []
        duties = bench.duties()
        for _ in range(12):
            duties.expire_queues()
            bench.later(5)
        assert len(messages(bench.engine)) == 1

    def test_what_is_left_of_an_expiring_queue_that_is_gone_goes_at_once(self, bench: Bench) -> None:
        bench.write(lambda tr: tr.set(bench.engine.keys.expiring("gone"), bytes(10)))
        assert bench.engine.queues.expiring() == [("gone", bytes(10), 0)]
        bench.put(b"a", queue="gone")
        assert not bench.engine.queues.expire("gone", bytes(10))
        assert bench.engine.queues.expiring() == []
        assert len(messages(bench.engine)) == 1, "it came after the deletion"

    def test_delete_counts_what_it_purges_in_however_many_parts(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leased messages stay, and don't keep the queue."""
        monkeypatch.setattr(topology, "MESSAGES_PER_PURGE", 2)
        bench.put(b"held", b"a", b"b", b"c", key="k")
        bench.put(b"d", due_ms=bench.clock.wall_ms() + 60_000)
        (held,) = bench.take(1)
        assert bench.engine.queues.delete("q") == 4
        assert bench.counts() == (0, 0, 1)
        assert bench.engine.messages.ack([held.lease]) == [True]

    def test_a_delayed_message_waits_among_the_messages_of_its_key(self, bench: Bench) -> None:
        bench.put(b"a1", b"a2", key="a", due_ms=bench.clock.wall_ms() + 1)
        bench.later(1)
        promote_all(bench.engine)
        bench.put(b"b1", b"b2", key="b")
        assert {name: counts.ready for name, counts in bench.engine.inspect.keys_of("q").items()} == {"a": 2, "b": 2}
        assert bench.payloads() == [b"a1", b"b1", b"a2", b"b2"]

    # -- the rest --------------------------------------------------------------------------------------------------

    def test_dead_letters_that_wait_among_the_messages_of_their_key_are_trimmed_too(self, database: Database) -> None:
        """A letter that was taken, and released with a delay, is no longer in the order of the deaths."""
        bench = Bench(database, dead_length=2, task_ids=True)
        for number in range(3):
            bench.put(b"%d" % number, key="k")
        bench.engine.messages.reject([each.lease for each in bench.take()])
        letters = bench.take(3, "q.dead")
        bench.engine.messages.release([each.lease for each in letters], due_ms=bench.clock.wall_ms() + 1)
        bench.later(1)
        promote_all(bench.engine)
        assert trim_all(bench.engine) == 1
        bench.check()
        bench.later(bench.environment.dead_ttl_ms / 1000)
        assert trim_all(bench.engine) == 2
        bench.check()
        bench.clean()

    def test_a_newer_format_is_refused(self, bench: Bench) -> None:
        bench.write(lambda tr: tr.set(bench.engine.keys.format, b"999"))
        with pytest.raises(FormatError, match="Upgrade celery-fdb"):
            bench.another().check_format()

    def test_commit_tokens_of_gone_processes_are_cleared(self, bench: Bench) -> None:
        key = bench.engine.keys.token(b"gone", 1)
        bench.write(lambda tr: tr.set(key, b"old"))
        duties = bench.duties()
        for _ in range(6):
            duties.clear_leftovers()
            bench.later(200)
            bench.put(b"our own token stays in use")
        assert key not in [token for token, _ in bench.engine.upkeep.rows(bench.engine.keys.all_tokens)]
        bench.engine.queues.purge("q")


def _beat(bench: Bench, session: SessionId) -> bytes:
    return bench.beats()[session]


def _wait_until(condition: Callable[[], bool]) -> None:
    """Watches may fire from another thread; wait for the event, with a deadline that only a bug reaches."""
    import threading
    import time

    tick = threading.Event()
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the event did not happen"
        tick.wait(0.001)
