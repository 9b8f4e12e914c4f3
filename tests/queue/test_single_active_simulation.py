"""Random histories of a queue with one active consumer: deaths, freezes, conflicts, lost answers (ONE-ACTIVE)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kombu_fdb.keyspace.codec import decode_lease
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.queue import claim, single, sweep
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.testing.simulation import Simulation, Violation


class SingleActive(Simulation):
    """Queue "a" serves one process at a time."""

    def run(self) -> Simulation:
        self.faults.stop()
        self.producer.declare_queue(QueueDeclaration("a", arguments={"x-single-active-consumer": True}))
        self.faults.rates = dict(self.rates)
        return super().run()

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.rates = dict(self.faults.rates)
        self.handovers = 0
        self._active: bytes | None = None

    def _start_process(self) -> None:
        super()._start_process()
        engine, tag = self.processes[-1].engine, f"consumer-{len(self.history)}"
        engine.claim = partial(engine.claim, consumers={"a": tag})
        engine.arm = lambda queues: type(engine).arm(engine, queues, self.processes[-1].session, {"a": tag})

    def _check(self) -> None:
        super()._check()
        rows = self.database.items(*self.producer.keys.all_leases)
        owners = {self.producer.keys.unpack(key)[1] for key, value in rows if decode_lease(value)[0] == "a"}
        self._require(len(owners) <= 1, "ONE-ACTIVE", f"messages are with {len(owners)} consumers")
        for owner in owners:
            self.handovers += self._active not in (None, owner)
            self._active = owner


def test_one_consumer_at_a_time() -> None:
    histories = [SingleActive(seed) for seed in range(24)]
    for history in histories:
        history.run()
    assert sum(history.handovers for history in histories) >= 12, "they must have something to show"


@contextmanager
def early_handover() -> Iterator[None]:
    """The end of the session frees the record before its messages are back."""
    careful = sweep.release_part

    def careless(tr: Any, graves: Any, tally: Any, session_id: bytes, now_ms: int, *, counted: bool) -> int:
        held = tr.get_range(*range_of(graves.keys.leases(session_id)), limit=1, snapshot=True)
        if held and tr.get(graves.keys.session(session_id)) is None:
            single.leave_all(tr, graves.keys, session_id)
        return careful(tr, graves, tally, session_id, now_ms, counted=counted)

    original, sweep.LEASES_PER_TRANSACTION = sweep.LEASES_PER_TRANSACTION, 1
    sweep.release_part = careless
    try:
        yield
    finally:
        sweep.release_part, sweep.LEASES_PER_TRANSACTION = careful, original


@contextmanager
def nobody_is_asked() -> Iterator[None]:
    """A claim takes whatever is there."""
    careful = claim._open_to
    claim._open_to = lambda _tr, _keys, queues, _states, _window: list(queues)
    try:
        yield
    finally:
        claim._open_to = careful


@pytest.mark.parametrize("careless", [early_handover, nobody_is_asked])
def test_the_simulation_catches_a_missing_guard(careless: Any) -> None:
    with careless(), pytest.raises(Violation, match="ONE-ACTIVE"):
        for seed in range(200):
            SingleActive(seed).run()
