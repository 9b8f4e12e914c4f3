from __future__ import annotations

import pytest

from celery_fdb.inspection.moments import age, moment


@pytest.mark.parametrize("ms", [-1, 0, 2**53, 2**63, 10**30, -(10**30), 1e300])
def test_moments_that_no_calendar_has(ms: float) -> None:
    assert 1970 <= moment(ms).year <= 9999
    assert age(ms)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, ""),
        (-5, "0.0 s"),
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (9.96, "9 s"),
        (59.999, "59 s"),
        (60, "1 min"),
        (185, "3 min 5 s"),
        (7_500, "2 h 5 min"),
        (86_399, "23 h 59 min"),
        (349_200, "4 d 1 h"),
    ],
)
def test_an_age_has_two_units_at_most(seconds: float | None, told: str) -> None:
    assert age(seconds) == told
