"""What a queue's arguments bound, over any store: a suite like :mod:`~kit.conformance.queue`."""

from __future__ import annotations

from typing import Any

import pytest

from kit.conformance.invariants import leftovers
from kit.conformance.queue import Bench, OnBench, _beat, _wait_until
from kit.duties import active_consumer, promote_all, replay
from kombu_fdb.engine.messages.overflow import MOST_LEAVING
from kombu_fdb.errors import CapacityExceeded, InvalidArgument
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.model import ClaimTerms, KeyLimits, Publication, QueueControl, QueueCounts, SessionId
from kombu_fdb.routing.tables import QueueDeclaration


def declare(bench: Bench, queue: str = "q", **arguments: Any) -> None:
    named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    bench.engine.queues.declare(QueueDeclaration(queue, arguments=named))


class Consumer:
    """One of a queue with ``x-single-active-consumer``."""

    def __init__(self, bench: Bench, tag: str, session: SessionId | None = None) -> None:
        self.engine = bench.another()
        self.session = self.engine.sessions.open({"tag": tag}) if session is None else session
        self.tag = tag

    def take(self, limit: int = 1) -> list[bytes]:
        found = self.engine.messages.claim(self.session, ["q"], limit, terms=ClaimTerms(consumers={"q": self.tag}))
        return [delivery.payload for delivery in found]

    def cancel(self) -> None:
        self.engine.queues.remove_consumer(self.session, "q", self.tag)

    def woken(self) -> list[bool]:
        """Stand by; the list is filled when that may have ended."""
        watches = self.engine.messages.arm(["q"], self.session, {"q": self.tag})
        assert watches is not None, "it has messages for us"
        fired: list[bool] = []
        watches[0].on_fire(lambda: fired.append(True))
        return fired


def _numbers(bench: Bench, limit: int) -> list[int]:
    """What one claim takes."""
    return [int(each.payload) for each in bench.take(limit)]


class LimitsConformance(OnBench):
    """Run over every store."""

    # -- bytes -----------------------------------------------------------------------------------------------------

    def test_ready_bytes_are_counted_wherever_a_message_goes(self, bench: Bench) -> None:
        """COUNTS: after each step the fixture's scan would find the same; here the numbers themselves."""
        due_ms = bench.clock.wall_ms() + 1000
        bench.put(b"a" * 10, b"b" * (INLINE_BYTES + 1), key="k")
        bench.put(b"c" * 100, due_ms=due_ms)
        assert bench.engine.inspect.counts("q").ready_bytes == 10 + INLINE_BYTES + 1
        one, two = bench.take()
        assert bench.engine.inspect.counts("q").ready_bytes == 0
        bench.engine.messages.release([one.lease])
        assert bench.engine.inspect.counts("q").ready_bytes == len(one.payload)
        bench.engine.messages.reject([two.lease])
        assert bench.engine.inspect.counts("q.dead").ready_bytes == len(two.payload)
        bench.later(1)
        promote_all(bench.engine)
        assert bench.engine.inspect.counts("q").ready_bytes == len(one.payload) + 100
        replay(bench.engine, "q", 5)
        assert bench.engine.inspect.counts("q").ready_bytes == 10 + INLINE_BYTES + 1 + 100
        bench.check()
        bench.engine.messages.delete("q", one.message_id)
        bench.check()
        bench.engine.queues.purge("q")
        assert bench.engine.inspect.counts("q") == QueueCounts()

    def test_drop_head_by_bytes(self, bench: Bench) -> None:
        declare(bench, max_length_bytes=100)
        bench.put(*[b"%d" % number * 30 for number in range(3)])
        bench.put(b"x" * 65)
        assert [payload[:1] for payload in bench.payloads()] == [b"2", b"x"]

    def test_drop_head_by_messages_and_bytes(self, bench: Bench) -> None:
        declare(bench, max_length=3, max_length_bytes=100)
        bench.put(*[b"%d" % number for number in range(5)])
        assert bench.counts() == (3, 0, 0)
        bench.put(b"x" * 100)
        assert bench.payloads() == [b"x" * 100]

    def test_drop_head_by_bytes_spares_the_urgent_and_reaches_over_ranks_and_keys(self, bench: Bench) -> None:
        declare(bench, max_length_bytes=100)
        bench.put(b"a" * 20, priority=9)
        bench.put(b"b" * 20)
        bench.put(b"c" * 20, key="k")
        bench.put(b"d" * 20, key="k", priority=5)
        bench.put(b"e" * 20)
        bench.put(b"x" * 50, priority=9)
        assert sorted(payload[:1] for payload in bench.payloads()) == [b"c", b"d", b"x"]

    def test_what_is_dropped_for_its_bytes_goes_to_the_dead_letter_exchange(self, bench: Bench) -> None:
        declare(bench, max_length_bytes=10, dead_letter_exchange="", dead_letter_routing_key="graveyard")
        bench.put(b"a" * 8)
        bench.put(b"b" * 8)
        (dead,) = bench.take(5, "graveyard")
        assert (dead.payload, dead.deaths[0].reason) == (b"a" * 8, "maxlen")

    def test_reject_publish_by_bytes(self, bench: Bench) -> None:
        declare(bench, max_length_bytes=10, overflow="reject-publish")
        bench.put(b"a" * 8)
        with pytest.raises(CapacityExceeded) as caught:
            bench.put(b"b" * 3)
        assert (caught.value.current_size, caught.value.capacity, caught.value.unit) == (8, 10, "bytes")
        assert caught.value.queue == "q"
        assert "raise the queue's x-max-length-bytes." in caught.value.fix
        bench.put(b"c" * 2)
        assert bench.counts() == (2, 0, 0)

    def test_reject_publish_dlx_by_bytes(self, bench: Bench) -> None:
        declare(
            bench,
            max_length_bytes=10,
            overflow="reject-publish-dlx",
            dead_letter_exchange="",
            dead_letter_routing_key="graveyard",
        )
        bench.put(b"a" * 8)
        bench.put(b"b" * (INLINE_BYTES + 1))
        assert bench.payloads() == [b"a" * 8]
        assert bench.payloads(5, "graveyard") == [b"b" * (INLINE_BYTES + 1)]
        bench.engine.upkeep.flush_totals()
        totals = bench.engine.inspect.totals()["q"]
        assert (totals["published"], totals["dead"]) == (2, 1), "the refused one was published, too"

    @pytest.mark.parametrize("limit", [{"max_length": 3}, {"max_length_bytes": 3}])
    def test_reject_publish_dlx_stores_as_much_of_a_batch_as_fits(self, bench: Bench, limit: dict[str, Any]) -> None:
        declare(bench, overflow="reject-publish-dlx", dead_letter_exchange="", dead_letter_routing_key="grave", **limit)
        bench.put(b"a")
        due_ms = bench.clock.wall_ms() + 60_000
        batch = [Publication("", "q", b"bcde"[at : at + 1], due_ms=due_ms if at == 1 else 0) for at in range(4)]
        bench.engine.publisher.publish(batch)
        assert bench.counts() == (3, 1, 0)
        assert bench.payloads() == [b"a", b"b", b"d"]
        (letter,) = bench.take(5, "grave")
        assert (letter.payload, letter.deaths[0].reason) == (b"e", "maxlen")

    def test_an_argument_that_comes_later_finds_the_right_number(self, bench: Bench) -> None:
        """The bytes were counted all the time."""
        bench.put(b"a" * 60, b"b" * 60)
        bench.another().queues.declare(QueueDeclaration("q", arguments={"x-max-length-bytes": 100}))
        bench.later(1)  # so long may another process believe the old declaration
        bench.put(b"c" * 30)
        assert [payload[:1] for payload in bench.payloads()] == [b"b", b"c"]

    def test_a_queue_that_is_far_too_long_shrinks_by_parts(self, bench: Bench) -> None:
        bench.engine.publisher.publish([Publication("", "q", b"%d" % number) for number in range(350)])
        declare(bench, max_length=10)
        for expected in (350 - MOST_LEAVING, 350 - 2 * MOST_LEAVING, 350 - 3 * MOST_LEAVING, 10, 10):
            bench.put(b"x")
            assert bench.counts() == (expected, 0, 0)

    def test_one_transaction_stays_together_and_gives_way_to_the_next(self, bench: Bench) -> None:
        declare(bench, max_length_bytes=10)
        bench.put(b"a")
        bench.engine.publisher.publish([Publication("", "q", b"b" * 8), Publication("", "q", b"c" * 8)])
        assert bench.engine.inspect.counts("q").ready_bytes == 16
        bench.put(b"d" * 8)
        assert bench.payloads() == [b"d" * 8]

    def test_a_delayed_message_needs_no_room(self, bench: Bench) -> None:
        declare(bench, max_length=1, overflow="reject-publish")
        bench.put(b"a")
        bench.put(b"retry", due_ms=bench.clock.wall_ms() + 1000)
        assert bench.counts() == (1, 1, 0)
        bench.later(1)
        promote_all(bench.engine)
        assert bench.counts() == (2, 0, 0)

    def test_dead_letters_fill_no_queue_for_ever(self, bench: Bench) -> None:
        """BOUNDED: the duties of any consumer process let the oldest go."""
        declare(bench, dead_letter_exchange="", dead_letter_routing_key="grave")
        declare(bench, "grave", max_length=5)
        bench.put(*[b"%d" % number for number in range(2 * MOST_LEAVING)])
        bench.engine.messages.reject([delivery.lease for delivery in bench.take(2 * MOST_LEAVING)])
        duties = bench.duties()
        bench.later(200)
        duties.run_once()
        assert bench.payloads(10, "grave") == [
            b"%d" % number for number in range(2 * MOST_LEAVING - 5, 2 * MOST_LEAVING)
        ]
        duties.stop()

    def test_where_publishers_are_refused_nothing_is_dropped_afterwards(self, bench: Bench) -> None:
        declare(bench, max_length=1, overflow="reject-publish")
        bench.put(b"a")
        bench.put(b"retry", due_ms=bench.clock.wall_ms() + 1000)
        bench.later(1)
        promote_all(bench.engine)
        assert bench.engine.upkeep.trim_full_part("q") == 0
        assert bench.payloads() == [b"a", b"retry"]

    # -- priorities ------------------------------------------------------------------------------------------------

    def test_a_priority_above_the_maximum_is_the_maximum(self, bench: Bench) -> None:
        declare(bench, max_priority=5)
        bench.put(b"five", priority=5)
        bench.put(b"nine", priority=9)
        bench.put(b"four", priority=4)
        assert bench.payloads() == [b"five", b"nine", b"four"]

    def test_ageing(self, bench: Bench) -> None:
        declare(bench, fair_ageing=1000)
        bench.put(b"low", priority=0)
        bench.put(b"low too", priority=0)
        bench.later(4)
        bench.put(b"five", priority=5)
        bench.put(b"four", priority=4)
        assert [peeked.payload for peeked in bench.engine.inspect.peek("q", 2)] == [b"five", b"low"]
        assert bench.payloads(1) == [b"five"], "four steps of waiting are worth a priority of four"
        bench.put(b"five again", priority=5)
        assert bench.payloads(2) == [b"five again", b"low"]
        assert bench.payloads() == [b"low too", b"four"]

    def test_without_ageing_priority_is_strict_however_long_it_takes(self, bench: Bench) -> None:
        bench.put(b"low")
        bench.later(10**6)
        bench.put(b"high", priority=1)
        assert bench.payloads() == [b"high", b"low"]

    def test_no_message_starves_with_ageing(self, bench: Bench) -> None:
        """Under a flood of urgent messages the least urgent one is served after nine steps."""
        bench.engine.queues.set_control("q", QueueControl(ageing=1.0))
        bench.put(b"low")
        served = []
        while b"low" not in served:
            bench.put(b"flood", b"flood", priority=9)
            served += bench.payloads(1)
            bench.later(1)
        assert len(served) == 1 + 9

    def test_ageing_keeps_the_order_of_commits_inside_a_priority(self, bench: Bench) -> None:
        """Whatever the publishers' clocks say."""
        bench.engine.queues.set_control("q", QueueControl(ageing=1.0))
        bench.put(b"first")
        bench.clock.jump_wall(-3600)
        bench.put(b"second")
        bench.clock.jump_wall(3600)
        assert bench.payloads() == [b"first", b"second"]

    def test_waiting_begins_when_the_delay_ends(self, bench: Bench) -> None:
        bench.engine.queues.set_control("q", QueueControl(ageing=1.0))
        bench.put(b"late", due_ms=bench.clock.wall_ms() + 60_000)
        bench.later(60)
        promote_all(bench.engine)
        bench.put(b"urgent", priority=1)
        assert bench.payloads() == [b"urgent", b"late"]

    def test_ageing_of_keys(self, bench: Bench) -> None:
        """In a fair queue it is the turn that ages with its next message."""
        declare(bench, fair_ageing=1000)
        bench.put(b"a0", b"a1", key="a")
        bench.later(5)
        bench.put(b"b0", key="b", priority=4)
        bench.put(b"c0", key="c", priority=6)
        assert bench.payloads(1) == [b"c0"]
        assert bench.payloads() == [b"a0", b"a1", b"b0"]

    def test_competitors_and_ageing_take_each_message_once(self, bench: Bench) -> None:
        declare(bench, fair_ageing=1000)
        for number in range(40):
            bench.put(b"%d" % number, priority=number % 10, key="" if number % 3 else f"k{number % 4}")
            bench.later(0.5)
        seen: list[bytes] = []
        while found := bench.payloads(3):
            seen += found
        assert sorted(seen) == sorted(b"%d" % number for number in range(40))

    # -- keys that may not be served -------------------------------------------------------------------------------

    def test_a_paused_key_at_the_head_hides_no_newcomer(self, bench: Bench) -> None:
        """Its turn is all that the claim's window holds; the other key has none before this claim."""
        bench.put(b"1", b"2", key="a")
        assert _numbers(bench, 1) == [1]
        bench.engine.queues.limit("q", "a", KeyLimits(paused=True))
        bench.put(b"3", key="b")
        assert _numbers(bench, 1) == [3]

    @pytest.mark.parametrize("want", [1, 2, 3, 5])
    def test_paused_keys_leave_no_gap_in_a_claim(self, bench: Bench, want: int) -> None:
        """Those behind them move up, in their order, before any key has a second turn."""
        for key in "abcdefghijkl":
            bench.put(b"%d" % ord(key), b"%d" % (ord(key) + 100), key=key)
        assert len(_numbers(bench, 12)) == 12
        for key in "bcdefg":
            bench.engine.queues.limit("q", key, KeyLimits(paused=True))
        served: list[int] = []
        while len(served) < 6:
            served += (found := _numbers(bench, min(want, 6 - len(served))))
            assert len(found) == want or len(served) == 6
        assert served == [ord(key) + 100 for key in "ahijkl"]

    def test_full_keys_leave_no_gap_in_a_claim(self, bench: Bench) -> None:
        bench.put(b"1", b"2", key="a")
        assert _numbers(bench, 1) == [1]
        bench.put(b"3")
        bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(max_in_flight=1)))
        assert _numbers(bench, 1) == [3]

    def test_with_ageing_no_gap_either(self, bench: Bench) -> None:
        bench.engine.queues.set_control("q", QueueControl(ageing=60.0))
        for key in "abcd":
            bench.put(b"%d" % ord(key), b"%d" % (ord(key) + 100), key=key, priority=3)
        assert len(_numbers(bench, 4)) == 4
        for key in "abc":
            bench.engine.queues.limit("q", key, KeyLimits(paused=True))
        assert _numbers(bench, 1) == [ord("d") + 100]

    # -- times to run ----------------------------------------------------------------------------------------------

    def test_the_shorter_of_the_queues_timeout_and_the_messages_time_to_run_counts(self, bench: Bench) -> None:
        bench.put(b"none")
        bench.put(b"short", ttr_ms=1000)
        bench.put(b"long", ttr_ms=9000)
        declare(bench, consumer_timeout=5000)
        assert [delivery.ttr_ms for delivery in bench.take()] == [5000, 1000, 5000]
        declare(bench)
        bench.put(b"none")
        assert [delivery.ttr_ms for delivery in bench.take()] == [0]

    # -- arguments -------------------------------------------------------------------------------------------------

    def test_arguments_of_others_pass(self, bench: Bench) -> None:
        arguments = {"x-queue-type": "quorum", "x-max-priority": 10, "x-message-ttl": None, "x-delivery-limit": -1}
        bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))

    def test_what_arguments_set_and_what_a_person_sets_live_side_by_side(self, bench: Bench) -> None:
        bench.engine.queues.change_control("q", paused=True, newcomer="first")
        declare(bench, single_active_consumer=True, consumer_timeout=5000)
        assert bench.engine.inspect.control("q") == QueueControl(
            paused=True, newcomer="first", single_active=True, consumer_timeout_ms=5000
        )
        bench.engine.queues.set_control("q", QueueControl(ageing=2.0))
        declare(bench, single_active_consumer=True)
        assert bench.engine.inspect.control("q") == QueueControl(single_active=True, ageing=2.0)
        with pytest.raises(InvalidArgument, match="not set here"):
            bench.engine.queues.change_control("q", single_active=False)
        with pytest.raises(InvalidArgument, match="ageing"):
            bench.engine.queues.change_control("q", ageing=0)
        declare(bench)
        assert bench.engine.inspect.control("q") == QueueControl(ageing=2.0)

    # -- one active consumer ---------------------------------------------------------------------------------------

    @pytest.fixture
    def single(self, bench: Bench) -> Bench:
        declare(bench, single_active_consumer=True)
        return bench

    def test_only_the_first_consumer_is_served(self, single: Bench) -> None:
        """ONE-ACTIVE."""
        one, two = Consumer(single, "one"), Consumer(single, "two")
        assert one.take() == [], "it is active even of an empty queue"
        single.put(b"a", b"b")
        assert two.take() == []
        assert active_consumer(single.engine, "q") == (one.session, "one")
        assert [one.take(), two.take(), one.take()] == [[b"a"], [], [b"b"]]

    def test_two_consumers_of_one_session_are_two(self, single: Bench) -> None:
        one = Consumer(single, "one")
        two = Consumer(single, "two", one.session)
        single.put(b"a", b"b")
        assert [one.take(), two.take()] == [[b"a"], []]
        one.cancel()
        assert [two.take(), one.take()] == [[b"b"], []]

    def test_other_queues_of_the_same_claim_are_served(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        one.take()
        single.put(b"a")
        single.put(b"b", queue="r")
        found = two.engine.messages.claim(two.session, ["q", "r"], 5, terms=ClaimTerms(consumers={"q": "two"}))
        assert [delivery.payload for delivery in found] == [b"b"]

    def test_a_cancelled_consumer_hands_over_and_the_next_is_woken(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        one.take()
        woken = two.woken()
        single.put(b"a")
        one.cancel()
        _wait_until(lambda: bool(woken))
        assert two.take() == [b"a"]

    def test_who_stands_by_is_not_woken_by_messages(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        one.take()
        for_one, for_two = one.woken(), two.woken()
        single.put(b"a")
        _wait_until(lambda: bool(for_one))
        assert not for_two
        assert one.engine.messages.arm(["q"], one.session, {"q": "one"}) is None
        assert two.engine.messages.arm(["q"], two.session, {"q": "two"}) is not None, "nor does it look in vain"

    def test_a_late_cancel_takes_nothing_from_the_next(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        one.take()
        one.cancel()
        two.take()
        one.cancel()
        one.engine.sessions.close(one.session)
        assert active_consumer(single.engine, "q") == (two.session, "two")

    def test_a_closed_session_hands_over_after_its_messages(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        single.put(b"a", b"b", b"c")
        assert one.take(2) == [b"a", b"b"]
        woken = two.woken()
        one.engine.sessions.close(one.session)
        _wait_until(lambda: bool(woken))
        assert two.take(3) == [b"a", b"b", b"c"]

    def test_no_consumer_overtakes_the_messages_of_a_dead_one(self, single: Bench) -> None:
        """Between the end of its session and the return of its messages, no consumer is served."""
        one, two = Consumer(single, "one"), Consumer(single, "two")
        single.put(b"a", b"b")
        assert one.take() == [b"a"]
        single.engine.sessions.fence(one.session, _beat(single, one.session))
        assert two.take() == []
        single.engine.sessions.release(one.session)
        assert two.take(2) == [b"a", b"b"]

    def test_a_dead_consumer_is_replaced_within_its_ttl_and_one_sweep(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        single.put(b"a")
        assert one.take() == [b"a"]
        duties = single.duties()
        died_at = single.clock.monotonic()
        while not (found := two.take()):
            single.later(5)
            assert single.engine.sessions.beat(single.session)
            assert single.engine.sessions.beat(two.session)
            duties.sweep()
        assert single.clock.monotonic() - died_at <= 30 + 5
        assert found == [b"a"]

    def test_a_single_get_is_served_only_without_an_active_consumer(self, single: Bench) -> None:
        single.put(b"a", b"b", b"c")
        assert single.payloads(1) == [b"a"]
        assert active_consumer(single.engine, "q") is None
        one = Consumer(single, "one")
        assert one.take() == [b"b"]
        assert single.payloads(1) == []
        one.engine.queues.leave(one.session, ["one"])
        assert single.payloads(1) == [b"c"]

    def test_the_argument_may_be_taken_away(self, single: Bench) -> None:
        one, two = Consumer(single, "one"), Consumer(single, "two")
        one.take()
        woken = two.woken()
        single.put(b"a")
        declare(single)
        _wait_until(lambda: bool(woken))
        assert two.take() == [b"a"]
        declare(single, single_active_consumer=True)
        single.put(b"b")
        assert two.take() == [b"b"]
        assert one.take() == []

    def test_a_deleted_queue_leaves_no_active_consumer(self, single: Bench) -> None:
        Consumer(single, "one").take()
        single.engine.queues.delete("q")
        assert leftovers(single.engine) == []
