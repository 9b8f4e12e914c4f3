"""What Celery takes for granted of a task's headers (transport/envelope.py)."""

import pytest

from kombu_fdb.transport import envelope as tasks
from kombu_fdb.transport.envelope import fault_of, is_timelimit


@pytest.mark.parametrize("limits", [None, [None, None], [1, None], (0.5, 300), [10**300, 1e308]])
def test_limits_that_a_timer_takes(limits):
    assert is_timelimit(limits)


@pytest.mark.parametrize(
    "odd", [10**400, -(10**400), float("inf"), float("nan"), -1, "5", {}], ids=lambda odd: f"{odd!r:.8}"
)
def test_a_number_that_no_timer_can_add_to_the_time_is_none(odd):
    assert not is_timelimit([odd, None])
    assert not is_timelimit([None, odd])


GOOD = {"task": "t", "id": "1", "retries": 0, "timelimit": [None, None], "stamped_headers": ["a"]}


@pytest.mark.parametrize(
    "odd", [{"retries": "0"}, {"id": 1}, {"timelimit": [-1, None]}, {"stamped_headers": [1]}, {"stamps": []}], ids=str
)
def test_headers_that_look_like_good_ones_are_looked_at_all_the_same(odd):
    assert fault_of(GOOD) is None
    assert fault_of({**GOOD, **odd}) is not None
    assert fault_of(GOOD) is None


def test_few_good_ones_are_remembered(monkeypatch):
    monkeypatch.setattr(tasks, "MOST_GOOD", 3)
    monkeypatch.setattr(tasks, "_good", set())
    for number in range(10):
        assert fault_of({**GOOD, f"header-{number}": 1}) is None
        assert len(tasks._good) <= 3
