"""Whose turn it is where keys are in each other's way, over any store: a suite like :mod:`~kit.conformance.queue`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kit.conformance.queue import Bench, OnBench
from kombu_fdb.engine.scheduling.fair import ARRIVALS, MOST_LOOKS
from kombu_fdb.model import KeyLimits, Publication, QueueControl


def put_one_each(bench: Bench, keys: list[str], messages: int = 1, **properties: Any) -> None:
    """So many messages of each key, in one commit; a payload is its key."""
    batch = [Publication("", "q", key.encode(), key=key, **properties) for key in keys]
    bench.engine.publisher.publish(batch * messages)


def block(bench: Bench, number: int, **control: Any) -> None:
    """So many keys stand in the ring and are paused then; behind them stands "z", which is not."""
    for key in "az":
        bench.engine.queues.limit("q", key, KeyLimits())
    put_one_each(bench, [f"k{each}" for each in range(number)], messages=number // ARRIVALS + 4)
    for _ in range(number // ARRIVALS + 2):  # each admits some, and serves one
        assert len(bench.take(1)) == 1
    put_one_each(bench, ["z"], messages=9)
    assert [each.key for each in bench.take(1)] != ["z"]
    bench.engine.queues.change_control("q", every_key={"paused": True}, **control)


Change = Callable[[Bench, list[str]], None]


def raise_one_by_one(bench: Bench, keys: list[str]) -> None:
    for key in keys:
        bench.engine.queues.limit("q", key, KeyLimits(priority=9))


def raise_every_key(bench: Bench, keys: list[str]) -> None:
    del keys
    bench.engine.queues.limit("q", "other", KeyLimits(priority=0))
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(priority=9)))


class TurnsConformance(OnBench):
    """Run over every store."""

    # -- rates -----------------------------------------------------------------------------------------------------

    def test_however_many_keys_are_due_at_once_the_promoter_is_told_to_go_on(self, bench: Bench) -> None:
        bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(rate=1, burst=1)))
        put_one_each(bench, [f"k{number}" for number in range(450)], messages=2)
        while bench.engine.messages.arm(["q"]) is None:
            bench.take()
        bench.later(2)
        while bench.engine.upkeep.rows(bench.engine.keys.all_unparks):
            moment = bench.engine.upkeep.unpark()
            assert moment == bench.clock.wall_ms() or not bench.engine.upkeep.rows(bench.engine.keys.all_unparks)
        assert bench.engine.upkeep.unpark() is None
        served = 0
        while found := bench.take():
            served += len(found)
        assert served == 450

    def test_those_that_are_due_between_two_pages_wait_for_no_later_one(self, bench: Bench) -> None:
        """The last ones of all are looked at, too, for wrong clocks' sake: their moment says nothing of the others."""
        bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(rate=1, burst=1)))
        bench.engine.queues.limit("q", "slow", KeyLimits(rate=0.01, burst=1))
        put_one_each(bench, ["slow", *[f"k{number}" for number in range(450)]], messages=2)
        while bench.engine.messages.arm(["q"]) is None:
            bench.take()
        bench.later(2)
        assert bench.engine.upkeep.unpark() == bench.clock.wall_ms()
        moment = bench.engine.upkeep.unpark()
        assert moment is not None
        assert moment - bench.clock.wall_ms() == pytest.approx(98_000, abs=10)

    # -- priorities of keys ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("tenant", ["", "big/"])
    @pytest.mark.parametrize("change", [raise_one_by_one, raise_every_key])
    def test_keys_of_a_new_priority_take_turns_there_at_once(self, bench: Bench, change: Change, tenant: str) -> None:
        """None of them is served alone until it has no messages left, because the turns of the others are elsewhere."""
        names = [f"{tenant}{name}" for name in "abc"]
        put_one_each(bench, [*names, "other"], messages=6)
        assert len(bench.take(4)) == 4
        change(bench, [*names])
        served = [each.key for _ in range(15) for each in bench.take(1)]
        assert "other" not in served
        for start in range(0, 15, 3):
            assert sorted(served[start : start + 3]) == names

    def test_a_key_of_a_lower_priority_leaves_the_urgent_ones_at_once(self, bench: Bench) -> None:
        bench.engine.queues.limit("q", "a", KeyLimits(priority=9))
        put_one_each(bench, ["a", "b"], messages=2)
        assert [each.key for each in bench.take(1)] == ["a"]
        bench.engine.queues.limit("q", "a", None)
        assert [each.key for each in bench.take(1)] == ["b"]

    def test_a_tenant_has_one_turn_a_round_where_its_key_goes(self, bench: Bench, monkeypatch: Any) -> None:
        """Also if the key is served before its turn could be taken out of the ring."""
        names = [f"big/{number}" for number in range(8)]
        put_one_each(bench, names)
        put_one_each(bench, ["big/late"], messages=3, priority=9)
        assert [each.key for each in bench.take(1)] == ["big/late"]
        monkeypatch.setattr(bench.engine.queues, "follow_limits", lambda _queue: None)
        bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(priority=0)))
        assert [each.key for each in bench.take(1)] == ["big/late"]
        put_one_each(bench, ["a"] * 9)
        assert [each.key for _ in range(18) for each in bench.take(1)].index("big/late") >= 2 * len(names)

    def test_priorities_change_although_the_process_dies_before_the_walk(self, bench: Bench, monkeypatch: Any) -> None:
        put_one_each(bench, ["a", "b", "c"], messages=4)
        assert len(bench.take(3)) == 3
        monkeypatch.setattr(bench.engine.queues, "follow_limits", lambda _queue: None)
        for key in "ab":
            bench.engine.queues.limit("q", key, KeyLimits(priority=9))
        monkeypatch.undo()
        bench.duties().run_once()
        assert sorted(each.key for _ in range(4) for each in bench.take(1)) == ["a", "a", "b", "b"]

    # -- rows of keys that may not be served -----------------------------------------------------------------------

    def test_by_age_a_turn_far_behind_may_be_the_next(self, bench: Bench) -> None:
        """Those at the head of their rank are blocked, and have waited less long than one that stands behind them."""
        put_one_each(bench, ["old"], messages=4)
        assert [each.key for each in bench.take(1)] == ["old"]
        bench.later(600)
        bench.engine.queues.set_control("q", QueueControl(ageing=60.0, newcomer="first"))
        put_one_each(bench, ["a", "b", "c"])
        assert [each.key for each in bench.take(1)] == ["old"]
        for key in "abc":
            bench.engine.queues.limit("q", key, KeyLimits(paused=True))
        assert [each.key for each in bench.take(1)] == ["old"]

    @pytest.mark.parametrize("ageing", [None, 60.0])
    def test_a_long_row_of_blocked_keys_hides_no_other_key(self, bench: Bench, ageing: float | None) -> None:
        """As long as a claim has found nothing it looks on."""
        block(bench, ARRIVALS + 50, ageing=ageing)
        assert [each.key for each in bench.take(1)] == ["z"]

    def test_a_longer_one_is_passed_by_several_claims(self, bench: Bench) -> None:
        block(bench, MOST_LOOKS * ARRIVALS + 50)
        assert bench.take(1) == []
        assert bench.engine.messages.arm(["q"]) is None
        assert [each.key for each in bench.take(1)] == ["z"]

    def test_no_key_has_a_second_turn_before_the_first_of_those_behind_the_blocked(self, bench: Bench) -> None:
        block(bench, ARRIVALS + 50, newcomer="first")
        put_one_each(bench, ["a"], messages=9)
        served = [each.key for _ in range(3) for each in bench.take(5)]
        assert served[:2] == ["a", "z"]

    def test_a_claim_admits_as_many_newcomers_as_it_wants_messages(self, bench: Bench) -> None:
        put_one_each(bench, [f"k{number}" for number in range(3 * ARRIVALS)])
        assert len({each.key for each in bench.take(2 * ARRIVALS)}) == 2 * ARRIVALS

    def test_of_more_newcomers_than_a_claim_admits_none_has_a_third_turn_before_each_had_one(
        self, bench: Bench
    ) -> None:
        names = [f"k{number}" for number in range(2 * ARRIVALS + 50)]
        put_one_each(bench, names, messages=3)
        turns: Counter[str] = Counter()
        while len(turns) < len(names):
            turns.update(each.key for each in bench.take(40))
        assert max(turns.values()) <= 2
