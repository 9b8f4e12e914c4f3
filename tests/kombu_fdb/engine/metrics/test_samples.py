"""Samples: what a chart of the last hour or day is drawn from, in a bounded number of rows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.conformance.newer import make_newer
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase, cost
from kit.faults import FaultyDatabase

from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics import samples
from kombu_fdb.engine.metrics.samples import EVENTS, QUEUES_SAMPLED, SERIES, QueueSample, Sample
from kombu_fdb.engine.metrics.totals import OTHERS
from kombu_fdb.keyspace.codec import encode_json
from kombu_fdb.model import Lease
from kombu_fdb.process.duties import SAMPLING
from kombu_fdb.routing.tables import QueueDeclaration

HOUR, DAY = SERIES["hour"], SERIES["day"]

#: FoundationDB's limit of a value.
LARGEST_VALUE = 100_000


@pytest.fixture
def bench(database):
    bench = Bench(database)
    bench.later(7)  # not at the beginning of a step
    yield bench
    bench.check()
    bench.clean()


def run_duties(bench, seconds, duties=None):
    """As they would run, though not in each second; the session beats."""
    duties = duties or bench.duties()
    until = bench.clock.monotonic() + seconds
    while bench.clock.monotonic() < until:
        duties.run_once()
        bench.engine.sessions.beat(bench.session)
        bench.later(3)


def test_a_sample_tells_what_waits_and_what_was_done(bench):
    bench.put(b"1", b"2", b"3")
    bench.put(b"later", due_ms=bench.clock.wall_ms() + 60_000)
    (delivery,) = bench.take(1)
    bench.engine.messages.ack([delivery.lease])
    bench.take(1)
    bench.engine.upkeep.flush_totals()
    bench.later(2.5)
    bench.engine.upkeep.sample([HOUR])
    (sample,) = bench.engine.inspect.samples(HOUR)
    assert sample == Sample(
        bench.clock.wall_ms(),
        {"q": QueueSample(1, 1, 1, 2_500, {"published": 4, "claimed": 2, "acked": 1, "returned": 0, "dead": 0})},
    )
    assert sample.queues["q"].backlog == 3
    assert bench.engine.inspect.samples(DAY) == []


def test_a_sample_tells_what_was_done_in_a_queue_that_is_gone_while_it_is_empty(bench):
    bench.put(b"1")
    bench.engine.messages.ack([each.lease for each in bench.take(1)])
    bench.engine.messages.ack([Lease(bench.session, 1)])  # too late: counted for no queue
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.queues() == {}
    bench.engine.upkeep.sample([HOUR])
    (sample,) = bench.engine.inspect.samples(HOUR)
    done = {"published": 1, "claimed": 1, "acked": 1, "returned": 0, "dead": 0}
    assert sample.queues == {"q": QueueSample(0, 0, 0, None, done)}


def test_the_duties_sample_each_quarter_of_a_minute_and_five_minutes(bench):
    bench.put(b"1")
    run_duties(bench, 660)
    hour, day = bench.engine.inspect.samples(HOUR), bench.engine.inspect.samples(DAY)
    steps = [HOUR.moment(each.taken_ms) for each in hour]
    assert steps == list(range(steps[0], steps[0] + len(hour)))
    assert len(hour) == 1 + 660 // HOUR.step_s, "at once, and with each step"
    assert len(day) == 3, "at once, and twice after five minutes"
    assert all(each.queues["q"].ready == 1 for each in hour + day)


def test_only_who_has_the_role_samples(bench):
    other = bench.engine.sessions.open({})
    first, second = bench.duties(), bench.duties(other)
    run_duties(bench, 60, first)
    before = bench.engine.inspect.samples(HOUR)
    second.run_once()
    bench.later(1)
    second.run_once()
    assert bench.engine.inspect.samples(HOUR) == before


def test_slots_are_used_again(bench):
    for step in range(HOUR.slots + 3):
        bench.put(b"%d" % step)
        bench.engine.upkeep.sample([HOUR])
        bench.later(HOUR.step_s)
    found = bench.engine.inspect.samples(HOUR)
    assert [each.queues["q"].ready for each in found] == list(range(5, HOUR.slots + 4))
    begin, end = bench.engine.keys.samples(HOUR.step_s, 0, HOUR.slots + 1)
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(begin, end))
    assert len(rows) == HOUR.slots


def test_what_is_too_old_or_ahead_is_not_believed(bench):
    bench.engine.upkeep.sample([HOUR])
    bench.clock.jump_wall(-60)
    assert bench.engine.inspect.samples(HOUR) == [], "taken by a clock that was ahead"
    bench.clock.jump_wall(60 + HOUR.span_ms / 1000)
    assert bench.engine.inspect.samples(HOUR) == []
    bench.clock.jump_wall(-1)
    assert len(bench.engine.inspect.samples(HOUR)) == 1


NO_SAMPLES = [
    *(b"", b"{", b"[]", b"5", b"[1]", b'[1,{"q":[]}]', b'[1,{"q":5}]', b'["1",{}]', b"[1,[]]"),
    b'[1,{"q":[1,1,1,null,1]}]',
    *(encode_json([1, {"q": [number, 0, 0, None, *[0] * len(EVENTS)]}]) for number in (True, 1.0, 2**63, "1")),
]


def test_a_row_that_cannot_be_read_is_no_sample(bench):
    bench.engine.upkeep.sample([HOUR])
    slot = HOUR.moment(bench.clock.wall_ms()) % HOUR.slots
    for value in NO_SAMPLES:
        bench.write(lambda tr, value=value: tr.set(bench.engine.keys.sample(HOUR.step_s, slot), value))
        assert bench.engine.inspect.samples(HOUR) == [], value


def test_the_busiest_queues_have_names(bench):
    for number in range(QUEUES_SAMPLED + 2):
        bench.engine.queues.declare(QueueDeclaration(f"{number:02}"))
    bench.put(b"a", b"b", queue="51")
    bench.put(b"a", queue="50")
    bench.engine.upkeep.sample([HOUR])
    ((_, queues),) = [(each.taken_ms, each.queues) for each in bench.engine.inspect.samples(HOUR)]
    assert len(queues) == QUEUES_SAMPLED + 1
    assert (queues["51"].ready, queues["50"].ready) == (2, 1)
    assert queues[OTHERS] == QueueSample(0, 0, 0, None, dict.fromkeys(EVENTS, 0))


def test_who_was_busy_lately_is_busier_than_who_ever_was():
    def did(number):
        return QueueSample(0, 0, 0, None, {"acked": number})

    before = Sample(0, {f"old-{number}": did(1_000) for number in range(QUEUES_SAMPLED)})
    found = samples.busiest({**before.queues, "new": did(1)}, before)
    assert "new" in found
    assert found[OTHERS] == QueueSample(0, 0, 0, None, {event: 1_000 * (event == "acked") for event in EVENTS})


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=63), unique=True, max_size=80),
    st.integers(0, 2**62),
)
def test_a_sample_of_any_queues_comes_back(names, number):
    one = QueueSample(number, number, number, number, dict.fromkeys(EVENTS, number))
    queues = {name: one for name in names if name != OTHERS}
    sample = Sample(number, samples.busiest(queues, None))
    if len(queues) <= QUEUES_SAMPLED + 1:  # else the sum of the others may be out of range
        assert samples._decode(samples._encode(sample)) == sample


def test_a_damaged_counter_spoils_no_sample():
    wild = QueueSample(2**70, -(2**70), 1, None, {"acked": 2**70})
    found = samples._decode(samples._encode(Sample(0, {"wild": wild, "q": QueueSample(1, 0, 0, None, {})})))
    assert found is not None
    assert found.queues["q"].ready == 1
    assert found.queues["wild"].ready == 2**63 - 1


def test_a_row_holds_the_longest_names():
    one = QueueSample(*[2**62] * 4, dict.fromkeys(EVENTS, 2**62))
    names = [f"{number:02}" + "\0" * 253 + DEAD_SUFFIX for number in range(QUEUES_SAMPLED)]
    found = samples.busiest(dict.fromkeys(names, one), None)
    assert found.keys() == set(names)
    assert len(samples._encode(Sample(2**62, found))) < LARGEST_VALUE


def test_what_a_sample_costs():
    """Counters and totals of all queues, the heads of those that wait; one row for each series."""
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    bench.put(b"1")
    bench.engine.upkeep.flush_totals()
    paid = cost(counted, lambda: bench.engine.upkeep.sample([HOUR, DAY]))
    assert (paid.sets, paid.atomics, paid.stamps, paid.clears) == (2 + 1, 0, 0, 0), "two rows, and the commit token"
    assert (paid.commits, paid.conflict_ranges) == (1, 0)
    taken = bench.take()
    bench.engine.messages.ack([each.lease for each in taken])
    bench.engine.upkeep.flush_totals()
    idle = cost(counted, lambda: bench.engine.upkeep.sample([HOUR]))
    assert (idle.point_reads, idle.range_reads, idle.sets) == (0, 3, 1 + 1), "no message waits, so no head is read"


def test_where_there_are_very_many_queues_samples_are_rarer(bench, monkeypatch):
    """Sampling takes one fiftieth of the time, at most."""
    sample = bench.engine.upkeep.sample

    def slow(series):
        bench.later(2)
        sample(series)

    monkeypatch.setattr(bench.engine.upkeep, "sample", slow)
    run_duties(bench, 350)
    times = [each.taken_ms for each in bench.engine.inspect.samples(HOUR)]
    gaps = [(b - a) / 1000 for a, b in pairwise(times)]
    assert gaps
    assert min(gaps) >= 2 / SAMPLING


@pytest.mark.parametrize(
    ("ages", "oldest"), [((5, 7), 7), ((7, 5), 7), ((None, 5), 5), ((5, None), 5), ((None, None), None)]
)
def test_queues_together_are_the_sum_of_each_and_as_old_as_the_oldest(ages, oldest):
    some = QueueSample(1, 20, 300, ages[0], {"published": 1, "claimed": 20})
    others = QueueSample(4, 50, 600, ages[1], {"published": 3, "acked": 7})
    together = some + others
    assert (together.ready, together.delayed, together.leased, together.oldest_ms) == (5, 70, 900, oldest)
    assert together.totals == dict.fromkeys(EVENTS, 0) | {"published": 4, "claimed": 20, "acked": 7}
    assert together.backlog == 975


@pytest.mark.parametrize(("number", "is_one"), [(1 - 2**63, True), (2**63 - 1, True), (-(2**63), False)])
def test_numbers_are_those_that_a_counter_can_have(bench, number, is_one):
    row = encode_json([1, {"q": [number, 0, 0, None, *[0] * len(EVENTS)]}])
    assert (samples._decode(row) is not None) == is_one


def test_a_sample_tells_how_old_the_oldest_ready_message_is(bench):
    bench.put(b"1", queue="old")
    bench.put(b"2", queue="delayed", due_ms=2**41)
    bench.later(5)
    bench.put(b"3", queue="new")
    bench.engine.upkeep.sample([HOUR])
    (sample,) = bench.engine.inspect.samples(HOUR)
    assert {name: queue.oldest_ms for name, queue in sample.queues.items()} == {"old": 5_000, "new": 0, "delayed": None}


def test_what_is_settled_too_late_is_counted(bench):
    """Of no queue: its queue is no longer known."""
    bench.put(b"1")
    (held,) = bench.take()
    bench.engine.messages.ack([held.lease])
    bench.engine.messages.ack([held.lease])
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.totals()[""]["late"] == 1


def test_a_newer_versions_message_that_a_dead_session_held_is_counted_as_lost(bench):
    bench.put(b"1", key="k")
    dead = bench.engine.sessions.open({})
    bench.take(session=dead)
    make_newer(bench, leases=True)
    bench.engine.sessions.fence(dead, bench.beats()[dead])
    assert bench.engine.sessions.release(dead) == 1
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.totals()["q"]["lost"] == 1
    assert bench.engine.inspect.key_totals()["q"]["k"]["lost"] == 1
