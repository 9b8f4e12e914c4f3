import pytest

from celery_fdb.inspection.formats import age, limit, moment, rate, took
from kombu_fdb.primitives.ranges import rate_of


@pytest.mark.parametrize("ms", [-1, 0, 2**53, 2**63, 10**30, -(10**30), 1e300])
def test_moments_that_no_calendar_has(ms):
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
def test_an_age_has_two_units_at_most(seconds, told):
    assert age(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, ""),
        (0, "0 ms"),
        (0.01254, "12.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (4.214, "4.21 s"),
        (1_234, "20 min 34 s"),
    ],
)
def test_a_runtime_has_three_digits_below_a_minute(seconds, told):
    assert took(seconds) == told


@pytest.mark.parametrize(
    ("per_second", "told"),
    [
        (None, ""),
        (0, "0/s"),
        (1234.5, "1\u202f234/s"),
        (12.345, "12.3/s"),
        (0.2, "12/m"),
        (30 / 3600, "30/h"),
        (1e-5, "0.036/h"),
    ],
)
def test_a_rate_has_a_unit_and_three_digits(per_second, told):
    assert rate(per_second) == told


@pytest.mark.parametrize("written", ["10/s", "2.5/s", "100/m", "10/m", "1000/h", "1/h", "0.0001/s", "12345.67/s"])
def test_a_limit_is_shown_as_it_was_written(written):
    per_second = rate_of(written)
    assert per_second is not None
    assert limit(per_second) == written
