"""Charts: of what is in the store, with gaps where nothing was written."""

import re

import pytest
from celery.states import FAILURE, SUCCESS
from kit import left

from celery_fdb.history.run import Run
from celery_fdb.inspection.formats import moment
from celery_fdb.inspection.overview import Overview, QueueView
from celery_fdb.web.charts import HEIGHT, SERIES, WIDTH, charts_of, rounded_up
from celery_fdb.web.request_context import FORMS
from kombu_fdb.engine.metrics.samples import QueueSample, Sample, write
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def clock():
    """Some minutes behind, at the beginning of a slot."""
    clock = ManualClock()
    now_s = Clock().wall_ms() // 1000
    clock.advance(now_s - now_s % 300 - 300 - clock.wall_ms() / 1000)
    return clock


def keep(broker, clock, span, *at):
    """Samples, by how many seconds ago; of each queue how many wait, and how many were acked."""
    for ago_s, queues in at:
        found = {
            name: QueueSample(ready, 0, 0, 1_000 * ready, {"acked": acked, "published": 0})
            for name, (ready, acked) in queues.items()
        }
        sample = Sample(clock.wall_ms() - int(ago_s * 1000), found)
        broker._engine.transactions.write(lambda work, one=sample: write(work, [SERIES[span]], one))


def drawn_of(broker, clock, span="hour", queue=None):
    """The page sees what the sample of now has, if there is one."""
    last = next(iter(broker.inspect.samples(span)[-1:]), None)
    queues = last.queues if last is not None and last.taken_ms == clock.wall_ms() else {}
    return charts_of(broker, span, clock, seen(clock, queues), queue=queue)


def seen(clock, queues):
    views = [
        QueueView(name, each.ready, each.delayed, each.leased, oldest_age_s=each.ready, totals=dict(each.totals))
        for name, each in queues.items()
    ]
    return Overview(clock.wall_ms(), "", views, [])


def charts(broker, clock, span="hour", queue=None):
    return {each["title"].split()[0].rstrip(":"): each for each in drawn_of(broker, clock, span, queue)["charts"]}


def lines(chart):
    """The pieces of each curve: where its points stand, as shares of the period and of the scale."""
    found = {}
    for line in chart["lines"]:
        pieces = [re.findall(r"([\d.]+) ([\d.]+)", each) for each in line["path"].split("M")[1:]]
        found[line["label"]] = [
            [(round(float(x) / WIDTH, 3), round((1 - float(y) / HEIGHT) * chart["top"], 6)) for x, y in each]
            for each in pieces
        ]
    return found


@pytest.mark.parametrize("span", SERIES)
def test_a_gap_is_a_gap(broker, clock, span):
    """While no process consumed there was no sample: there is neither a zero nor a line across."""
    step_s, seconds = SERIES[span].step_s, 101 * SERIES[span].step_s
    keep(broker, clock, span, *((each * step_s, {"q": (each, 500 - each * step_s)}) for each in (100, 99, 51, 50, 3)))
    found = charts(broker, clock, span)
    pieces = lines(found["Backlog"])["q"]
    assert [[ready for _, ready in each] for each in pieces] == [[100, 99], [51, 50], [3]]
    places = [round(1 - each * step_s / seconds, 3) for each in (100, 99, 51, 50, 3)]
    assert [x for each in pieces for x, _ in each] == places
    rates = [[(places[at], 1.0), (places[at + 1], 1.0)] for at in (0, 2)]
    assert lines(found["Messages"])["done"] == rates, "one between two samples holds for the time between them"
    assert found["Backlog"]["lines"][0]["latest"] is None, "it is too old"
    assert found["Backlog"]["lines"][0]["most"] == 100


def test_neither_a_deleted_queue_nor_a_new_one_makes_a_peak(broker, clock):
    keep(
        *(broker, clock, "hour"),
        (45, {"q": (5, 10), "gone": (1, 0)}),
        (30, {"q": (7, 40), "gone": (1, 0)}),
        (15, {"q": (7, 5), "gone": (1, 0), "new": (2, 100)}),
        (0, {"q": (7, 5)}),
    )
    found = charts(broker, clock)
    assert [[rate for _, rate in each] for each in lines(found["Messages"])["done"]] == [[2.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    assert {name: len(pieces[0]) for name, pieces in lines(found["Backlog"]).items()} == {"q": 4, "gone": 3, "new": 1}


def test_dead_letters_and_celerys_own_are_no_backlog(broker, clock):
    keep(broker, clock, "hour", (0, {"q": (1, 0), "q.dead": (50, 0), "w.celery.pidbox": (9, 0), "": (4, 0)}))
    assert lines(charts(broker, clock)["Backlog"]) == {"q": [[(1.0, 1)]], "others": [[(1.0, 4)]]}


def test_the_longest_queues_have_a_line_of_their_own(broker, clock):
    keep(broker, clock, "hour", (0, {f"q{each}": (each, 0) for each in range(8)}))
    assert [(each["label"], each["latest"]) for each in charts(broker, clock)["Backlog"]["lines"]] == [
        *[(f"q{each}", each) for each in (7, 6, 5, 4, 3)],
        ("others", 3),
    ]


def test_a_queue_has_charts_of_its_own(broker, clock):
    keep(broker, clock, "day", (300, {"q": (3, 0), "r": (9, 0)}), (0, {"q": (5, 600), "r": (9, 900)}))
    found = charts(broker, clock, "day", "q")
    assert [rate for _, rate in lines(found["Messages"])["done"][0]] == [2.0, 2.0]
    assert [ready for _, ready in lines(found["Held"])["ready"][0]] == [3.0, 5.0]
    assert [age for _, age in lines(found["Age"])["oldest"][0]] == [3.0, 5.0]
    assert charts(broker, clock, "day", "s")["Age"]["is_empty"], "nothing is known of it"


def test_runs_are_drawn_from_the_slots(broker, clock):
    """A slot in which nothing ended is a zero if a worker was there then, else nothing is known of it."""
    end_ms = clock.wall_ms() - 1_800_000
    run = Run("a", "t", state=SUCCESS, start_ms=end_ms - 2_000, end_ms=end_ms, runtime_s=2.0)
    ran = run._replace(published_ms=end_ms - 10_000), run._replace(id="b", state=FAILURE)
    left.keep(broker, *ran, clock=clock)
    keep(broker, clock, "hour", (1_500, {"q": (0, 0)}), (600, {"q": (0, 0)}))
    found = charts(broker, clock)
    for label, counted in (("ended", [[2, 2, 0, 0], [0, 0]]), ("failed", [[1, 1, 0, 0], [0, 0]])):
        assert [[round(rate * 300) for _, rate in each] for each in lines(found["Runs"])[label]] == counted
    for chart, seconds in (("Latency", 8.0), ("Runtime", 2.0)):
        for pieces in lines(found[chart]).values():
            assert [value for each in pieces for _, value in each] == 2 * [pytest.approx(seconds, rel=0.06)]


def test_the_first_minute_fills_its_charts(broker, clock):
    """Of an hour of which only the end is known, that is drawn; a rate is of the seconds since then."""
    clock.advance(200)  # in the middle of a slot
    end_ms = clock.wall_ms() - 10_000
    run = Run("a", "t", state=SUCCESS, start_ms=end_ms - 2_000, end_ms=end_ms, runtime_s=2.0)
    left.keep(broker, *(run._replace(id=str(number)) for number in range(9)), clock=clock)
    keep(broker, clock, "hour", *((ago_s, {"q": (1, 60 - ago_s)}) for ago_s in (60, 45, 30, 15, 0)))
    drawn = drawn_of(broker, clock)
    assert drawn["ticks"][0] == pytest.approx(clock.wall_ms() / 1000 - 75)
    assert len({moment(each * 1000).strftime(FORMS[drawn["tick_form"]]) for each in drawn["ticks"]}) == len(
        drawn["ticks"]
    )
    found = charts(broker, clock)
    assert [x for x, _ in lines(found["Backlog"])["q"][0]] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert lines(found["Runs"])["ended"] == [[(0.0, pytest.approx(9 / 75)), (1.0, pytest.approx(9 / 75))]]
    assert [x for x, _ in lines(found["Runtime"])["median"][0]] == [0.0, 1.0]


def test_a_chart_ends_with_what_the_page_shows(broker, clock):
    """And not with a sample of half a minute ago; the queues that the samples add up are added up there, too."""
    keep(broker, clock, "hour", (39, {"q": (10, 0), "": (7, 0)}), (24, {"q": (20, 30), "": (7, 0)}))
    now = {
        "q": QueueSample(8, 0, 0, 8_000, {"acked": 78}),
        "a": QueueSample(2, 0, 0, None, {}),
        "b": QueueSample(3, 0, 0, None, {}),
    }
    found = {each["title"].split()[0]: each for each in charts_of(broker, "hour", clock, seen(clock, now))["charts"]}
    assert [(each["label"], each["latest"]) for each in found["Backlog"]["lines"]] == [("q", 8), ("others", 5)]
    done = next(each for each in found["Messages"]["lines"] if each["label"] == "done")
    assert done["latest"] == 2.0, "48 in the 24 seconds since the last sample"
    clock.advance(1)
    keep(broker, clock, "hour", (0, {"q": (8, 78), "": (5, 0)}))
    clock.advance(1)
    found = {each["title"].split()[0]: each for each in charts_of(broker, "hour", clock, seen(clock, now))["charts"]}
    done = next(each for each in found["Messages"]["lines"] if each["label"] == "done")
    assert done["latest"] == pytest.approx(48 / 26), (
        "a second says too little, so it is of the time since the one before"
    )


def test_an_axis_is_no_shorter_than_some_samples_and_no_longer_than_its_period(broker, clock):
    now = clock.wall_ms() / 1000
    assert drawn_of(broker, clock)["ticks"][0] == pytest.approx(now - 3_600), "nothing is known"
    keep(broker, clock, "hour", (0, {"q": (1, 0)}))
    assert drawn_of(broker, clock)["ticks"][0] == pytest.approx(now - 75)
    keep(broker, clock, "hour", (3_595, {"q": (1, 0)}))
    assert drawn_of(broker, clock)["ticks"][0] == pytest.approx(now - 3_600)


def test_without_a_history_the_page_says_what_is_missing(viewer, broker):
    assert "celery_fdb.install(app, history=True)" in viewer.see("/")
    left.keep(broker)
    assert "celery_fdb.install(app, history=True)" not in viewer.see("/")


@pytest.mark.parametrize("span", ["hour", "day", "week", "", "year"])
def test_a_page_has_each_period(viewer, broker, span):
    broker.queue("q").put("x")
    for page in ("/", "/queue"):
        text = viewer.get(page, params={"span": span, "queue": "q"}).text
        assert "Nothing is kept of this period" in text
        assert re.search(r'span=(\w+)[^>]* aria-current="page"', text)[1] == (span if span in SERIES else "hour")


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.003, 0.005), (1, 1), (1.1, 2), (2.5, 5), (7, 10), (1e9, 1e9), (float("nan"), 1)]
)
def test_a_scale_ends_at_a_round_number(value, top):
    assert rounded_up(value) == pytest.approx(top)
