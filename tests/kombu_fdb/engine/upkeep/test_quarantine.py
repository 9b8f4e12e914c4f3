"""What a duty has set aside: how it is reported, and what is reported of an unreadable row."""

import pytest

from kombu_fdb.engine.upkeep.quarantine import LONGEST_ERROR, Aside
from kombu_fdb.keyspace.codec import encode_json

ASIDE = Aside("promote", "jobs", "too large", 3, 1_700_000_000_000)


def test_all_of_it_is_kept(bench):
    bench.engine.upkeep.set_aside(ASIDE)
    assert bench.engine.upkeep.asides() == [ASIDE]


def test_an_error_is_cut(bench):
    bench.engine.upkeep.set_aside(ASIDE._replace(error="x" * LONGEST_ERROR + "y"))
    assert bench.engine.upkeep.asides()[0].error == "x" * LONGEST_ERROR


def test_an_error_is_told_without_its_secrets_and_on_one_line(bench):
    """A repr may hold what a publisher has written, and a terminal does what that says."""
    bench.engine.upkeep.set_aside(ASIDE._replace(error="token=abc amqp://u:hunter2@h\x1b[2J\nall well"))
    (told,) = bench.engine.upkeep.asides()
    assert "abc" not in told.error
    assert "hunter2" not in told.error
    assert told.error.isprintable()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        encode_json({"error": "e", "times": 1}),
        encode_json({"error": "e", "times": None, "since_ms": 1}),
        encode_json({"error": "e", "times": "many", "since_ms": 1}),
    ],
)
def test_an_unreadable_row_says_so(bench, value):
    bench.write(lambda tr: tr.set(bench.engine.keys.aside("promote", "jobs"), value))
    assert bench.engine.upkeep.asides() == [Aside("", "", "unreadable", 0, 0)]


def test_an_unreadable_key_says_so(bench):
    begin, _end = bench.engine.keys.all_asides
    bench.write(lambda tr: tr.set(begin + b"\xfe", b"{}"))
    assert bench.engine.upkeep.asides() == [Aside("", "", "unreadable", 0, 0)]


@pytest.mark.parametrize(
    ("aside", "text"),
    [(ASIDE, "promote of 'jobs', 3 times: too large"), (Aside("sweep", "", "e", 1, 0), "sweep, 1 times: e")],
)
def test_a_line_of_it(aside, text):
    assert str(aside) == text
