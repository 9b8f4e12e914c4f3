"""Whose turn it is where keys are in each other's way, over any store: a suite like ``queue_conformance``."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_fdb.model import KeyLimits, Publication, QueueControl
from kombu_fdb.testing.queue_conformance import Bench, OnBench

__all__ = ["TurnsConformance"]


def put_one_each(bench: Bench, keys: list[str], messages: int = 1, **properties: Any) -> None:
    """So many messages of each key, in one commit; a payload is its key."""
    batch = [Publication("", "q", key.encode(), key=key, **properties) for key in keys]
    bench.engine.publish(batch * messages)


class TurnsConformance(OnBench):
    """Run over every store."""

    # -- rates -----------------------------------------------------------------------------------------------------

    def test_however_many_keys_are_due_at_once_the_promoter_is_told_to_go_on(self, bench: Bench) -> None:
        bench.engine.set_control("q", QueueControl(every_key=KeyLimits(rate=1, burst=1)))
        put_one_each(bench, [f"k{number}" for number in range(450)], messages=2)
        while bench.engine.arm(["q"]) is None:
            bench.take()
        bench.later(2)
        while bench.engine.rows(bench.engine.keys.all_thaws):
            moment = bench.engine.thaw()
            assert moment == bench.clock.wall_ms() or not bench.engine.rows(bench.engine.keys.all_thaws)
        assert bench.engine.thaw() is None
        served = 0
        while found := bench.take():
            served += len(found)
        assert served == 450

    def test_those_that_are_due_between_two_pages_wait_for_no_later_one(self, bench: Bench) -> None:
        """The last ones of all are looked at, too, for wrong clocks' sake: their moment says nothing of the others."""
        bench.engine.set_control("q", QueueControl(every_key=KeyLimits(rate=1, burst=1)))
        bench.engine.limit("q", "slow", KeyLimits(rate=0.01, burst=1))
        put_one_each(bench, ["slow", *[f"k{number}" for number in range(450)]], messages=2)
        while bench.engine.arm(["q"]) is None:
            bench.take()
        bench.later(2)
        assert bench.engine.thaw() == bench.clock.wall_ms()
        moment = bench.engine.thaw()
        assert moment is not None
        assert moment - bench.clock.wall_ms() == pytest.approx(98_000, abs=10)
