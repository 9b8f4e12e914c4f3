"""What ran: by task, run by run, one task's life, and workflows as trees."""

import html
import re
import time
from functools import partial

import pytest
from celery.states import FAILURE, RETRY, SUCCESS
from kit import left

from celery_fdb.history.run import ACTIVE, Run
from celery_fdb.history.views import workflows
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def store(broker):
    return left.keep(broker)


@pytest.fixture
def keep(broker):
    """Writes runs as a worker does."""
    return partial(left.keep, broker)


def run(id_, task="shop.pay", state=SUCCESS, **fields):
    now_ms = time.time_ns() // 1_000_000
    told = {"queue": "jobs", "worker": "w@h", "start_ms": now_ms - 250, "end_ms": now_ms, "runtime_s": 0.25, **fields}
    return Run(id_, task, state=state, **told)


def test_runs_are_found_by_time_and_by_arguments_if_those_may_be_seen(visit, keep):
    at_ms = 1_767_225_600_000  # 2026-01-01
    ends = {f"r{hours}": at_ms + hours * 3_600_000 for hours in range(4)}
    keep(*(run(id_, end_ms=ms, args="('Acme',)" if id_ == "r2" else "", kwargs="{}") for id_, ms in ends.items()))
    person, blind = visit(show_bodies=True), visit()

    def found(**asked):
        return re.findall(r"<code>(r\d)</code>", person.see("/runs", **asked))

    assert found(since="2026-01-01T01:00", until="2026-01-01T02:30") == ["r2", "r1"]
    assert found(until="0001-01-01T00:00") == [], "a moment before all is a bound, too"
    assert found(arguments="acme") == ["r2"]
    assert "must be a date" in person.see("/runs", 422, since="yesterday")
    assert "hidden" in blind.see("/runs", 404, arguments="acme")
    assert "Acme" in person.see("/runs")
    assert not {"Arguments", "Acme"} & set(re.findall(r"\w+", blind.see("/runs")))


def test_the_list_of_runs_masks_secrets_in_arguments(visit, keep):
    keep(run("r", args="()", kwargs="{'order': 7, 'password': 's3cret'}"))
    page = visit(show_bodies=True).see("/runs")
    assert "order" in page
    assert "s3cret" not in page


@pytest.mark.parametrize("page", ["/tasks", "/runs", "/workflows"])
def test_without_a_history_the_page_says_how_to_keep_one(viewer, page):
    assert "celery_fdb.install(app, history=True)" in viewer.see(page)


def test_numbers_by_task(viewer, keep):
    keep(run("a"), run("b"), run("c", state=FAILURE, error_class="Declined"), run("d", "shop.mail"))
    page = viewer.see("/tasks", period="hour")
    assert page.index("shop.pay") < page.index("shop.mail"), "the busiest first"
    assert "33.3 %" in page
    assert "at most 5 % off" in page
    assert "success 2" in page
    assert "shop.pay" in viewer.see("/tasks", period="day")


def test_runs_are_filtered_and_paged(visit, keep, store):
    keep(*(run(f"r{number}", "shop.pay" if number % 2 else "shop.mail") for number in range(6)))
    store.activity(b"s" * 16, {1: run("r9", state=ACTIVE, end_ms=0, runtime_s=None)})
    person = visit(page_size=2)
    seen = []
    address = "/runs?task=shop.pay"
    while address:
        page = person.see(address)
        seen += re.findall(r"<code>(r\d)</code>", page)
        following = re.search(r'href="([^"]*cursor=[^"]*)">(?:Older|Look)', page)
        address = html.unescape(following[1]) if following else ""
    assert sorted(seen) == ["r1", "r3", "r5"]
    assert {"shop.mail", "shop.pay"} <= {*re.findall('<option value="([^"]+)">', person.see("/runs"))}
    active = person.see("/runs", state=ACTIVE)
    assert "r9" in active
    assert "worker gone" in active
    assert "No matching runs" in person.see("/runs", task="nobody")
    keep(run("r7", "shop.one", key="acme", queue="fast", worker="other@h"))
    for name, wanted in (("key", "acme"), ("queue", "fast"), ("worker", "other@h")):
        assert re.findall(r"<code>(r\d)</code>", person.see("/runs", **{name: wanted})) == ["r7"], name
    assert "not a state" in person.see("/runs", 422, state="BAD")


def test_a_tasks_life_with_its_arguments_only_for_those_who_may(visit, keep, app, broker):
    app.send_task("shop.pay", queue="jobs", task_id="t")
    told = {
        "args": "('acme',)",
        "error_class": "Declined",
        "error": "password='x1y2'",
        "traceback": "line\nToken: abc9",
    }
    keep(run("t", state=FAILURE, **told))
    page = visit().see("/task", id="t")
    for text in ("published", "failed", "Declined", "Traceback"):
        assert text in page
    for secret in ("acme", "x1y2", "abc9"):
        assert secret not in page
    assert "acme" in visit(show_bodies=True).see("/task", id="t")


def test_a_failed_run_without_a_message_says_why_it_has_no_replay(visit, keep, app):
    keep(run("t", state=FAILURE), run("u"))
    said = "be replayed, because its message is gone"
    person = visit(read_only=False)
    assert said in person.see("/task", id="t")
    for other, id_ in ((person, "u"), (visit(), "t")):
        assert said not in other.see("/task", id=id_)
    app.send_task("shop.pay", queue="jobs", task_id="t")
    assert said not in person.see("/task", id="t")


def test_a_tasks_result_and_its_messages_with_what_can_be_done(visit, app, url):
    app.conf.update(result_backend=url, task_ignore_result=False)
    app.send_task("shop.pay", queue="jobs", task_id="t")
    app.backend.store_result("t", {"paid": 5, "password": "x1y2"}, SUCCESS)
    page = visit(app=app, show_bodies=True, read_only=False).see("/task", id="t")
    assert "&#39;paid&#39;: 5" in page
    assert "x1y2" not in page
    assert "Cancel" in page
    page = visit(app=app).see("/task", id="t")
    assert "&#39;paid&#39;" not in page
    assert "Cancel" not in page


def test_an_active_run_shows_how_long_it_runs(visit, store):
    clock = ManualClock()
    store.activity(b"s", {1: Run("t", "shop.pay", start_ms=clock.wall_ms() - 65_000)})
    page = visit(clock=clock).see("/runs", state="STARTED")
    assert "1 min 5 s so far" in page
    assert "<code>t</code>" in page


def test_a_run_that_waits_for_its_retry_is_run_now_on_its_page(operator, broker, app, keep):
    keep(run("t", state=RETRY))
    app.send_task("shop.pay", task_id="t", queue="jobs", countdown=3_600)
    page = operator.see("/task", id="t")
    form = next(each for each in page.split("<form")[1:] if ">Run now</button>" in each)
    given = dict(re.findall(r'name="(queue|back|selected)" value="([^"]+)"', form))
    given = {name: html.unescape(value) for name, value in given.items()}
    assert "ready now, instead of waiting until due" in operator.submit("/act", action="run_now", **given)
    assert "Made 1 message of jobs ready" in operator.submit("/act", action="run_now", confirmed="yes", **given)
    assert broker.queue("jobs").stats().ready == 1


def test_a_chord_is_a_tree(viewer, keep):
    root = run("g0", "shop.start", followers=(("b0", "shop.bind"),))  # made first, so that it ends first
    header = [run(f"h{number}", "shop.render", group="g", root="g0") for number in range(2)]
    keep(root, *header, run("b0", "shop.bind", state=FAILURE, root="g0", parent="g0", error="torn"))
    page = viewer.see("/workflow", id="h0")
    for text in ("shop.start", "shop.render", "shop.bind", "group", "torn"):
        assert text in page
    assert page.count('class="tree"') >= 2
    assert "g0" in viewer.see("/workflows")
    assert "Nothing is known" in viewer.see("/workflow", 404, id="nobody")


def test_many_parts_are_folded_and_what_failed_is_not(viewer, keep):
    parts = [
        run(f"p{number}", "shop.render", group="g", state=FAILURE if number == 7 else SUCCESS) for number in range(40)
    ]
    keep(*parts)
    page = viewer.get("/workflow", params={"id": "p0"}).text
    before, _, folded = page.partition("<details")
    assert "39 of 40 tasks done" in page
    assert (before.count('class="step'), folded.count('class="step')) == (2, 39)
    assert "id=p7" in before
    assert page.count("<rect class=") == 41, "each has its place on the line of time"


def test_what_failed_is_drawn_of_a_workflow_that_is_not_drawn_whole(viewer, keep):
    """Whichever branch it is in."""
    of = {"root": "r"}
    keep(run("r", "shop.start", end_ms=1), *(run(f"a{at}", parent="r", **of) for at in range(600)))
    keep(*(run(f"b{at}", parent="a7", state=FAILURE if at == 550 else SUCCESS, **of) for at in range(600)))
    page = viewer.see("/workflow", id="r")
    assert "1\u202f200 of 1\u202f201 tasks done" in page
    assert "701 are not drawn" in page
    assert page.count('class="step') == 500
    before, _, _ = page.partition("<details")
    assert "id=a7" in before
    assert "id=b550" in before


def test_of_a_workflow_that_is_too_large_a_page_says_at_least(viewer, keep, monkeypatch):
    monkeypatch.setattr(workflows, "MOST_RUNS", 10)
    keep(*(run(f"p{at}", group="g") for at in range(20)))
    for page in (viewer.see("/workflow", id="p0"), viewer.see("/workflows")):
        assert re.search(r"at least 1[01] of 1[01]\b", page)
        assert "not known" in page


def test_workflows_are_asked_for_by_name_and_state(viewer, keep):
    keep(run("a", "shop.start", followers=(("b", "shop.bind"),)), run("b", "shop.bind", root="a", parent="a"))
    for asked, is_there in (
        ({"task": "shop.bind"}, True),
        ({"task": "shop.other"}, False),
        ({"state": "SUCCESS"}, True),
        ({"state": "FAILURE"}, False),
        ({"since": "2100-01-01T00:00"}, False),
        ({"until": "2100-01-01T00:00"}, True),
    ):
        assert ("shop.start" in viewer.get("/workflows", params=asked).text) is is_there
    assert '<datalist id="known-task"><option value="shop.start">' in viewer.see("/workflows")


def test_a_long_chain_is_cut_and_no_error(viewer, keep):
    names = [f"c{number}" for number in range(300)]
    keep(*(run(name, parent=names[at - 1] if at else "", root="c0" if at else "") for at, name in enumerate(names)))
    assert viewer.get("/workflow", params={"id": "c0"}).status_code == 200
