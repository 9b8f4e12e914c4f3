from __future__ import annotations

import pytest

from celery_fdb.inspection.moments import age, moment


@pytest.mark.parametrize("ms", [-1, 0, 2**53, 2**63, 10**30, -(10**30), 1e300])
def test_moments_that_no_calendar_has(ms: float) -> None:
    assert 1970 <= moment(ms).year <= 9999
    assert age(ms)


@pytest.mark.parametrize(
    ("ms", "told"),
    [(0, "0 s"), (59_999, "59 s"), (60_000, "1 min"), (7_500_000, "2 h 5 min"), (349_200_000, "4 d 1 h"), (-5, "0 s")],
)
def test_an_age_has_two_units_at_most(ms: float, told: str) -> None:
    assert age(ms) == told
