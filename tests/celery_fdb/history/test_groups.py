"""Values: what is written is read back, whatever it was; sizes; bytes that our encoder never writes."""

import json
import math

import pytest
from celery.states import FAILURE, SUCCESS
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_fdb.history import layout
from celery_fdb.history.layout import (
    ERROR,
    GROUP_RUNS,
    GROUP_SPAN_MS,
    LONGEST_S,
    SHORTEST_S,
    Counters,
    RunGroup,
    delta_of,
    pack_groups,
)
from celery_fdb.history.run import ACTIVE, STATES, Run, bounded
from kombu_fdb.errors import FormatError

LIMIT_OF_A_VALUE = 100_000
texts = st.text(max_size=300).map(bounded)
moments = st.integers(0, 2**50)
runs = st.builds(
    Run,
    id=texts,
    task=texts,
    queue=texts,
    worker=texts,
    state=st.sampled_from(STATES),
    start_ms=moments,
    end_ms=moments,
    runtime_s=st.none() | st.floats(0, 1e9),
    args=texts,
    kwargs=texts,
    published_ms=st.just(0) | moments,
    due_ms=st.just(0) | moments,
    key=texts,
    retries=st.integers(0, 2**40),
    redeliveries=st.integers(0, 9),
    root=texts,
    parent=texts,
    error_class=texts,
    error=texts,
    traceback=texts,
    group=texts,
    followers=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
).map(lambda run: run._replace(end_ms=0 if run.state == ACTIVE else run.end_ms + 1))


@settings(max_examples=200)
@given(st.lists(runs, max_size=20))
def test_a_round_trip(given_runs):
    groups = pack_groups(given_runs)
    assert [run for group in groups for run in RunGroup.decode(group.value)] == sorted(
        given_runs, key=lambda run: run.end_ms
    )
    assert [group.runs for group in groups] == [RunGroup.decode(group.value) for group in groups]
    for group in groups:
        assert group.runs[-1].end_ms - group.runs[0].end_ms <= GROUP_SPAN_MS
        assert len(group.value) < LIMIT_OF_A_VALUE


def test_what_the_first_version_wrote_is_read():
    """Nothing was known of publications."""
    rows = b'["t0","shop.pay","q","w@h","SUCCESS"],[["a",1,2,3,4,5,6,0.5,"(1,)","{}","acme",1],["b",1,2,3,4,5,7]]'
    found = RunGroup.decode(b"\x01[" + rows + b"]")
    told = {"queue": "q", "worker": "w@h", "state": "SUCCESS", "start_ms": 5}
    assert found == [
        Run("a", "shop.pay", **told, end_ms=6, runtime_s=0.5, args="(1,)", kwargs="{}", key="acme", retries=1),
        Run("b", "shop.pay", **told, end_ms=7),
    ]


@pytest.mark.parametrize("character", ["x", "\x00", "é", "\U0001f4a5", '"'])
def test_a_group_fits_into_a_value_whatever_its_texts(run, character):
    longest = {"error": 2_000, "traceback": 4_096, "args": 1_024, "kwargs": 1_024}
    fields = {name: character * length for name, length in longest.items()}
    names = dict.fromkeys(("task", "queue", "worker", "key", "root", "parent", "error_class", "group"), character * 200)
    many = [
        run(
            character * 200,
            **{**names, "task": character * 190 + str(number)},
            **fields,
            followers=((character * 200,) * 2,) * 20,
        )
        for number in range(50)
    ]
    groups = pack_groups(many)
    assert sum(len(group.runs) for group in groups) == 50
    assert max(len(group.value) for group in groups) < LIMIT_OF_A_VALUE


def test_groups_are_full_before_the_next_begins(run):
    groups = pack_groups([run() for _ in range(2 * GROUP_RUNS + 1)])
    assert [len(group.runs) for group in groups] == [GROUP_RUNS, GROUP_RUNS, 1]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x03[[],[]]",
        b"\x01",
        b"\x01[]",
        b"\x01{}",
        b"\x01[[],[[]]]",
        b"\x01[[],[1]]",
        b"\x01[[],[{}]]",
        b'\x01[["a"],[["i",0,0,0,0]]]',  # not a state
        b'\x01[["SUCCESS"],[["i",0,0,0,1]]]',
        b'\x01[["SUCCESS"],[["i",0,0,0,0]]]',  # ended, and never
        b'\x01[["STARTED"],[["i",0,0,0,0,5,6]]]',
        b'\x01[["SUCCESS"],[["i",0,0,0,-1]]]',
        b'\x01[["SUCCESS"],[[1,0,0,0,0]]]',
        b'\x01[["SUCCESS"],[["i",0,0,0,0,-1]]]',
        b'\x01[["SUCCESS"],[["i",0,0,0,0,0,0,NaN]]]',
        b'\x01[["SUCCESS"],[["\\ud800",0,0,0,0]]]',
        b"\x01" + b"[" * 100_000,
        b"\x01\xff",
        b"\x01" + json.dumps([["SUCCESS"], [["i", 0, 0, 0, 0, *[0] * 20]]]).encode(),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_values_that_our_encoder_can_not_have_written_are_refused(value):
    versions = (b"\x01", b"\x02") if value[:1] == b"\x01" else (value[:1],)
    for version in versions:
        with pytest.raises(FormatError):
            RunGroup.decode(version + value[1:])


# -- counters ----------------------------------------------------------------------------------------------------------


@given(st.lists(runs.filter(lambda run: run.state != "STARTED"), max_size=10))
def test_counters_add_up(given_runs):
    deltas = [int.from_bytes(delta_of([run]), "little") for run in given_runs]
    assert sum(deltas).to_bytes(layout.ALL_WIDTH, "little") == delta_of(given_runs)
    found = Counters.unpack(delta_of(given_runs))
    assert found.runs == len(given_runs)
    assert sum(found.sketch) == sum(found.buckets)
    assert sum(found.waits) == sum(run.wait_s is not None for run in given_runs)


@given(st.lists(runs.filter(lambda run: run.state != "STARTED"), max_size=10))
def test_a_row_is_read_whatever_version_has_written_it(given_runs):
    """A shorter one has no sketches, and what a longer one has behind them is left out."""
    row = delta_of(given_runs)
    found, nothing = Counters.unpack(row), Counters()
    assert Counters.unpack(row + b"more of a later version") == found
    assert Counters.unpack(row[: layout.SLOT_WIDTH]) == found._replace(waits=nothing.waits)
    assert Counters.unpack(row[: layout.TOTAL_WIDTH]) == found._replace(waits=nothing.waits, sketch=nothing.sketch)


def test_a_wait_ends_when_the_run_begins():
    run = Run("i", "t", start_ms=9_000, published_ms=1_000)
    assert run.wait_s == 8.0
    assert run._replace(due_ms=6_000).wait_s == 3.0, "it was not late before it was due"
    assert run._replace(published_ms=9_500).wait_s == 0.0, "by a clock that is ahead"
    for unknown in ({"published_ms": 0}, {"start_ms": 0}, {"redeliveries": 1}):
        assert run._replace(**unknown).wait_s is None


@given(st.lists(st.floats(SHORTEST_S, LONGEST_S), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_a_percentile_is_as_near_as_it_says(took, share):
    row = delta_of([Run("i", "t", state=SUCCESS, runtime_s=each) for each in took])
    exact = sorted(took)[max(math.ceil(share * len(took)) - 1, 0)]
    assert Counters.unpack(row).quantile_s(share) == pytest.approx(exact, rel=ERROR + 1e-9)


@pytest.mark.parametrize(("runtime_s", "shown"), [(0.0, SHORTEST_S), (1e-9, SHORTEST_S), (1e300, LONGEST_S)])
def test_of_what_is_beyond_the_sketch_its_end_is_shown(runtime_s, shown):
    row = delta_of([Run("i", "t", state=FAILURE, runtime_s=runtime_s)])
    assert Counters.unpack(row).quantile_s(0.95) == pytest.approx(shown, rel=2 * ERROR)


def test_of_nothing_there_is_no_quantile():
    assert Counters().quantile_s(0.5) is None
    with pytest.raises(FormatError):
        Counters.unpack(b"1234")


@pytest.mark.parametrize("given_text", ["x" * 10_000_000, "\ud800" * 300, None, 5, b"\xff", "é" * 300])
def test_a_text_is_bounded_and_has_a_utf8_form(given_text):
    found = bounded(given_text)
    assert len(found) <= 200
    found.encode()
