"""Some rows of a store are damaged, in their keys or values: everything else goes on, and no process ends by it."""

import re
from contextlib import ExitStack

import pytest
from damage import damaged, telling
from store_rows import KINDS


@pytest.fixture(params=KINDS)
def store(request):
    with ExitStack() as ends:
        yield KINDS[request.param](ends)


def test_damaged_rows_stop_nothing_else(fuzz, store):
    def target(rng):
        store.fill()
        rows = store.rows()
        rows.pop(("format",), None)  # it is to stop everybody
        changes = []
        for _ in range(rng.choice((1, 4))):
            row = rng.choice([row for row in rows[rng.choice(sorted(rows))] if b"safe" not in row[0] + row[1]])
            changes.append((row, damaged(rng, row, store.prefix)))
            store.replace(*changes[-1], beside=rng.random() < 0.3)
        with telling(changes):
            store.look()
            store.work([row for row, _ in changes])
            store.look()
            store.renew()

    fuzz(target, store.rounds)


def test_each_kind_of_row_is_among_those_that_are_damaged(store):
    store.fill()
    assert set(re.findall(r'^``\("(\w+)",', store.table, re.MULTILINE)) <= {first for first, *_ in store.rows()}
