"""Rows that are taken together: what they conflict with, and what they leave."""

import pytest
from kit.faults import FaultyDatabase

from kombu_fdb.engine.stored import parts
from kombu_fdb.errors import Conflict

ROWS = [b"b", b"c", b"d"]


def taken_while(written, run):
    """What is left of all rows. Raises ``Conflict``."""
    database = FaultyDatabase()
    before, taking, meanwhile, after = (database.begin(timeout_s=1) for _ in range(4))
    for key in (b"a", *ROWS, b"e"):
        before.set(key, b"")
    before.commit()
    taking.get_range(b"", b"z", snapshot=True)
    meanwhile.set(written, b"new")
    meanwhile.commit()
    parts.take_run(taking, run)
    taking.commit()
    return [key for key, _ in after.get_range(b"", b"z")]


@pytest.mark.parametrize("written", [b"b", b"bb", b"c", b"d"])
def test_a_write_to_a_row_of_a_run_or_between_them_conflicts(written):
    with pytest.raises(Conflict):
        taken_while(written, ROWS)


@pytest.mark.parametrize("written", [b"a", b"aa", b"d\x00", b"e"])
def test_a_write_beside_a_run_does_not_conflict(written):
    assert taken_while(written, ROWS) == sorted({b"a", b"e", written})


def test_a_run_of_one_row_is_that_row(subtests):
    with pytest.raises(Conflict):
        taken_while(b"c", [b"c"])
    for written in (b"b", b"bb", b"c\x00", b"d"):
        with subtests.test(written=written):
            assert taken_while(written, [b"c"]) == sorted({b"a", b"b", b"d", b"e", written})


def test_runs_end_at_what_is_not_taken():
    rows = [b"1", b"2", b"3", b"4", b"5"]
    assert parts.runs_of(rows, {b"1", b"2", b"4", b"elsewhere"}) == [[b"1", b"2"], [b"4"]]
    assert parts.runs_of(rows, set()) == []
