"""A walk through several ranges, in parts of any size."""

from functools import partial

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.stored.parts import rows_from


def store(key, value, tr):
    tr.set(key, value)


RANGES = [(b"~a", b"~b"), (b"~c", b"~d"), (b"~e", b"~f")]
ROWS = [(b"~%c%d" % (letter, number), b"%d" % number) for letter in b"ac" for number in range(4)]


@pytest.mark.parametrize("most", range(1, 10))
def test_each_row_comes_once_and_in_order(most):
    bench = Bench(FaultyDatabase())
    for key, value in [*ROWS, (b"~b", b"between"), (b"~f", b"behind")]:
        bench.write(partial(store, key, value))
    found = []
    parts, cursor = 0, b""
    while parts == 0 or cursor:
        rows, cursor = bench.engine.transactions.read(lambda work: rows_from(work.tr, RANGES, cursor, most))  # noqa: B023
        assert len(rows) == most if cursor else len(rows) < most
        found, parts = found + rows, parts + 1
    assert found == ROWS
    assert parts == len(ROWS) // most + 1
