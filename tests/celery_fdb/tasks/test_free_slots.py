"""How many tasks a worker claims that claims only what it can run (celery_fdb/tasks/free_slots.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_fdb.tasks import free_slots


class Channel:
    def __init__(self) -> None:
        self.limited: list[int] = []

    def limit_slots(self, free: int) -> None:
        self.limited.append(free)


def consumer(processes: int, autoscaler: Any = None) -> Any:
    controller = SimpleNamespace(max_concurrency=2, autoscaler=autoscaler)
    return SimpleNamespace(controller=controller, pool=SimpleNamespace(num_processes=processes))


def test_slots_are_the_processes_that_there_are_or_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote control changes both: ``pool_grow`` the pool's, ``autoscale`` the autoscaler's."""
    monkeypatch.setattr(state, "reserved_requests", {"one that runs"})
    channel, autoscaler = Channel(), SimpleNamespace(max_concurrency=2)
    free_slots._count(consumer(4), channel)
    free_slots._count(consumer(1, autoscaler), channel)
    autoscaler.max_concurrency = 6
    free_slots._count(consumer(1, autoscaler), channel)
    assert channel.limited == [3, 1, 5]
