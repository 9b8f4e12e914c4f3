"""What Celery takes for granted of a task's time limits (transport/encoding/tasks.py)."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_fdb.transport.encoding.tasks import is_timelimit


@pytest.mark.parametrize("limits", [None, [None, None], [1, None], (0.5, 300), [10**300, 1e308]])
def test_limits_that_a_timer_takes(limits: Any) -> None:
    assert is_timelimit(limits)


@pytest.mark.parametrize(
    "odd", [10**400, -(10**400), float("inf"), float("nan"), -1, "5", {}], ids=lambda odd: f"{odd!r:.8}"
)
def test_a_number_that_no_timer_can_add_to_the_time_is_none(odd: Any) -> None:
    assert not is_timelimit([odd, None])
    assert not is_timelimit([None, odd])
