"""What the command line and the dashboard show: pages, lives, trees, numbers by task, metrics."""

import json
import os
import pickle
import re
import uuid
from contextlib import closing
from dataclasses import asdict

import pytest
from celery import Celery, chain, chord, group
from celery.states import FAILURE, PENDING, RETRY, STARTED, SUCCESS
from kit.left import Trap
from prometheus_client import CollectorRegistry, generate_latest

from celery_fdb import install
from celery_fdb.cli.doctor import check_history
from celery_fdb.history import reading
from celery_fdb.history.layout import ERROR
from celery_fdb.history.options import History
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import FAILED, LOST, PUBLISHED
from celery_fdb.history.store import HistoryStore
from celery_fdb.history.views import metrics, workflows
from celery_fdb.history.views.metrics import TaskCollector
from celery_fdb.history.views.runs import (
    DAY_S,
    HOUR_S,
    HistoryOff,
    active_runs,
    look_at_series,
    look_at_tasks,
    page_of_runs,
)
from celery_fdb.history.views.timeline import TaskUnknown, timeline_of
from celery_fdb.history.views.workflows import NOT_RUN, page_of_workflows, workflow_of
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.keyspace.codec import headers_of
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.stores import MemoryStores


@pytest.fixture
def any_store():
    """What the store keeps is tested on each in ``test_store.py``."""
    with MemoryStores():
        yield f"fdb+memory://{os.urandom(6).hex()}"


@pytest.fixture(autouse=True)
def on(store):
    store.set_settings(History())


@pytest.fixture
def app(any_store, new_app):
    app = new_app(any_store, backend="cache+memory://")
    app.conf.task_default_queue = "q"
    return app


# -- pages -------------------------------------------------------------------------------------------------------------


def test_what_is_wanted_is_checked(broker):
    with pytest.raises(InvalidArgument, match="SUCCESS"):
        page_of_runs(broker, Wanted(state="DONE"))
    with pytest.raises(InvalidArgument, match="cursor"):
        page_of_runs(broker, cursor="x")


def test_history_is_off(broker, store):
    store._write(lambda tr: tr.clear(store.keys.settings))
    for ask in (page_of_runs, active_runs, look_at_tasks):
        with pytest.raises(HistoryOff, match=r"install\(app, history=True\)"):
            ask(broker)


def test_active_runs_and_whether_their_worker_lives(broker, store, run):
    broker.queue("q").put("x")
    with broker.queue("q").take(timeout=0):
        (session,) = broker.inspect.sessions()
        active = {name: run(name, state=STARTED, end_ms=0, runtime_s=None) for name in ("here", "gone")}
        store.activity(bytes(session.session_id), {1: active["here"]})
        store.activity(b"another", {1: active["gone"]})
        found = {each.id: each.alive for each in active_runs(broker)}
    assert found == {"here": True, "gone": False}
    assert [each.id for each in active_runs(broker, Wanted(task="unknown"))] == []


def test_a_page_of_the_active_state_is_the_active_runs(broker, store, keep, run):
    keep(run("ended"))
    active = {
        number: run(name, task=task, state=STARTED, ago_s=ago_s, end_ms=0, runtime_s=None)
        for number, (name, task, ago_s) in enumerate([("new", "a", 1), ("old", "a", 9), ("other", "b", 5)])
    }
    store.activity(b"session", active)
    assert [each.id for each in page_of_runs(broker).runs] == ["ended"]
    found = page_of_runs(broker, Wanted(state=STARTED), limit=1)
    assert ([each.id for each in found.runs], found.cursor) == (["old", "other", "new"], None)
    assert found.runs == active_runs(broker)
    assert [each.id for each in page_of_runs(broker, Wanted("b", STARTED)).runs] == ["other"]
    with pytest.raises(InvalidArgument, match="cursor"):
        page_of_runs(broker, Wanted(state=STARTED), cursor="x")


def test_a_run_says_its_error_in_one_line(broker, keep, run):
    keep(run("short", error_class="shop.Broken", error="no\n  card"), run("long", error="x" * 500), run("fine"))
    said = {each.id: each.said for each in page_of_runs(broker).runs}
    assert said == {"short": "Broken: no card", "long": "x" * 99 + "…", "fine": ""}


# -- lives -------------------------------------------------------------------------------------------------------------


def test_a_life_never_loads_a_pickle(broker, tmp_path):
    """Also of an application that accepts them: the process that shows a page is no worker."""
    app = Celery("tests", backend=f"file://{tmp_path}", set_as_current=False)
    app.conf.result_serializer = "pickle"
    app.conf.result_accept_content = ["json", "pickle"]
    app.backend.set(app.backend.get_key_for_task("t"), pickle.dumps(Trap(tmp_path / "sprung")))
    assert timeline_of(broker, "t", app).state == "unknown: ContentDisallowed"
    assert not (tmp_path / "sprung").exists()
    careful = Celery("tests", backend=f"file://{tmp_path}", set_as_current=False)
    careful.backend.store_result("j", 1, "SUCCESS")
    assert timeline_of(broker, "j", careful).state == "SUCCESS"


def test_a_life_of_messages_and_runs(broker, app, keep, run):
    task_id = app.send_task("shop.pay", countdown=600).id
    keep(run(task_id, state=RETRY, ago_s=5, error_class="E", error="no"), run("other"))
    life = timeline_of(broker, task_id)
    assert [event.what for event in life.events if event.what in {"started", "retried"}] == ["started", "retried"]
    assert {event.what for event in life.events} == {"started", "retried", "published", "due"}
    assert (life.state, life.task, life.history) == ("delayed", "shop.pay", True)
    json.dumps(asdict(life))


def test_a_dead_letter_was_published_to_the_queue_in_which_it_died(broker, app):
    task_id = app.send_task("shop.pay").id
    (sent,) = broker.spots(task_id)
    for job in broker.queue(sent.message.queue).consume(limit=1):
        job.bury()
    published, died = timeline_of(broker, task_id).events
    assert (published.what, published.about) == ("published", f"in {sent.message.queue}")
    assert died.about == f"in {sent.message.queue}: rejected"


def test_a_life_that_ended(broker, keep, run, store):
    keep(run("t", state=RETRY, ago_s=5), run("t", retries=1, redeliveries=1, ago_s=1))
    life = timeline_of(broker, "t")
    assert life.state == SUCCESS
    assert [event.what for event in life.events] == ["started", "retried", "started", "succeeded"]
    assert "attempt 2, delivered 2 times, by w@h from celery" in life.events[2].about
    assert life.events[3].about == "after 500 ms"
    store.activity(b"s", {1: run("t", state=STARTED, end_ms=0, runtime_s=None)})
    assert timeline_of(broker, "t").state == STARTED


def test_a_life_that_ended_begins_with_its_publication(broker, keep, run):
    """Each attempt has a message of its own; one that was delivered twice was published once."""
    sent_ms = run().end_ms - 60_000
    first = {"published_ms": sent_ms, "due_ms": sent_ms + 40_000, "key": "acme"}
    keep(run("t", state="LOST", ago_s=15, **first), run("t", state=RETRY, ago_s=10, redeliveries=1, **first))
    keep(run("t", retries=1, published_ms=sent_ms + 50_000, due_ms=sent_ms + 55_000))
    life = timeline_of(broker, "t")
    assert [event.what for event in life.events] == [
        *("published", "due", "started", "ended with its worker", "started", "retried"),
        *("published", "due", "started", "succeeded"),
    ]
    assert life.events[0].about == "in celery, key acme"


def test_an_app_with_a_history_tells_when_it_publishes(broker, app):
    """And others do not: what waits is then shown as the store knows it."""
    install(app, history=True)
    sent_ms = Clock().wall_ms()
    app.send_task("shop.pay", task_id="t", countdown=600)
    published, due = timeline_of(broker, "t").events
    assert (published.what, due.what) == ("published", "due")
    assert sent_ms <= published.moment * 1000 < due.moment * 1000
    (message,) = broker.spots("t")
    assert headers_of(message.message.payload)[PUBLISHED] == published.moment * 1000
    other = Celery("other", set_as_current=False)
    assert PUBLISHED not in other.amqp.as_task_v2("t", "shop.pay").headers


def test_an_unknown_task(broker, store):
    with pytest.raises(TaskUnknown, match="Check the id"):
        timeline_of(broker, "nobody")
    store._write(lambda tr: tr.clear(store.keys.settings))
    with pytest.raises(TaskUnknown, match="history=True"):
        timeline_of(broker, "nobody")


# -- trees -------------------------------------------------------------------------------------------------------------


def shape(nodes):
    return [(each.task or each.kind, each.state, shape(each.children)) for each in nodes]


def test_a_chain_half_done(broker, app, keep, run):
    ids = [str(uuid.uuid4()) for _ in range(3)]
    keep(run(ids[0], task="a", followers=((ids[1], "b"), (ids[2], "c")), queue="q"))
    app.send_task("b", task_id=ids[1], root_id=ids[0], parent_id=ids[0])
    expected = [("chain", STARTED, [("a", SUCCESS, []), ("b", "ready", []), ("c", PENDING, [])])]
    for each in ids[:2]:  # from any of its tasks that has been published
        assert shape(workflow_of(broker, each).roots) == expected
    found = workflow_of(broker, ids[0])
    assert (found.tasks, found.complete) == (3, True)


def test_what_follows_a_failure_is_not_pending(broker, keep, run):
    keep(run("a", task="a", followers=(("b", "b"), ("c", "c")), state=FAILURE, queue="q"))
    parts = [("a", FAILURE, []), ("b", NOT_RUN, []), ("c", NOT_RUN, [])]
    assert shape(workflow_of(broker, "a").roots) == [("chain", FAILURE, parts)]


def test_a_long_queue_does_not_make_a_workflow_large(broker, keep, run):
    """Its groups are no tasks, either."""
    broker.queue("q").put_many(["x"] * 300)
    keep(*[run(each, task=each, root="a", group="g", queue="q") for each in ("pack", "mail")])
    found = workflow_of(broker, "pack")
    assert (found.tasks, found.complete, found.saw_all_that_waits) == (2, True, False)


def test_a_chord_half_done(broker, app, keep, run):
    body = (("body", "sum"),)
    keep(run("m1", task="part", group="g", followers=body, queue="q"))
    keep(run("m2", task="part", group="g", followers=body, queue="q", state=FAILURE))
    app.send_task("part", task_id="m3", group_id="g")
    members = [("part", SUCCESS, []), ("part", FAILURE, []), ("part", "ready", [])]
    for each in ("m1", "m3"):
        ((kind, state, (group, body)),) = shape(workflow_of(broker, each).roots)
        assert (kind, state, group[:2], body) == ("chain", FAILURE, ("group", FAILURE), ("sum", NOT_RUN, []))
        assert sorted(group[2]) == sorted(members)


def drawn(node):
    if node.kind == "task":
        return node.task + (f"({','.join(map(drawn, node.children))})" if node.children else "")
    parts = " ".join(sorted(map(drawn, node.children)) if node.kind == "group" else map(drawn, node.children))
    return f"[{parts}]" if node.kind == "chain" else f"{{{parts}}}"


#: What Celery's workers told of them: id, root, parent, group, and what follows, in the order in which they ended.
SHAPES = {
    "[{a b} c]": "a1 - - 1 c; b3 - - 1 c; c b3 b3 1 -",
    "[a {b c}]": "a - - - celery.group:1; b2 a a 1 -; c3 a a 1 -",
    "[a {b c} d]": "a - - - celery.chord:1; b2 a a 1 d; c4 a a 1 d; d a c4 1 -",
    "[a {b c} d e]": "a - - - celery.chord:1 e; b2 a a 1 d; c4 a a 1 d; d a c4 1 e; e a d - -",
    "{[a b] [c d]}": "a0 - - - b1; b1 a0 a0 2 -; c3 - - - d4; d4 c3 c3 2 -",
    "[{[a b] [a c]} d a]": "a0 - - - b1; a2 - - - c3; b1 a0 a0 4 celery.chain:5; c3 a2 a2 4 celery.chain:5; "
    "d6 a2 c3 - a:5; a:5 a2 d6 4 -",
    "[{[{a b} c] a} d]": "a0 - - 1 c2; b3 - - 1 c2; a4 - - 5 d6; c2 b3 b3 5 d6; d6 b3 c2 5 -",
    "[{a b} {c d} a]": "a0 - - 1 celery.chord:2; b3 - - 1 celery.chord:2; c4 b3 b3 2 a5; d6 b3 b3 2 a5; a5 b3 c4 1 -",
    "[a {[b c] d} {a b} c]": "a0 - - - celery.chord:1; b2 a0 a0 - c3; d4 a0 a0 1 celery.chord:5; "
    "c3 a0 b2 1 celery.chord:5; b6 a0 c3 5 c7; a8 a0 c3 5 c7; c7 a0 a8 1 -",
    "a(b,b)": "b1 a0 a0 - -; a0 - - - -; b2 a0 a0 - -",
}


def told(text, run):
    runs = []
    for number, line in enumerate(text.split("; ")):
        ids = ["" if each == "-" else each for each in line.split()]
        names = [(each.partition(":")[2] or each, re.sub(r":?\d+$", "", each)) for each in ids]
        (id_, task), (root, _), (parent, _), (group, _) = names[:4]
        followers = tuple(each for each in names[4:] if each[0])
        facts = {"root": root, "parent": parent, "group": group, "followers": followers}
        runs.append(run(id_, task=task, start_ms=number + 1, **facts))
    return runs


@pytest.mark.parametrize("shape", SHAPES)
def test_a_workflow_has_its_shape(broker, keep, run, shape):
    """From each of its tasks, however it nests; and the list shows it once, on whatever page."""
    runs = told(SHAPES[shape], run)
    keep(*runs)
    for each in runs:
        found = workflow_of(broker, each.id)
        assert [drawn(root) for root in found.roots] == [shape]
        assert (found.state, found.tasks, found.done, found.failed) == (SUCCESS, len(runs), len(runs), 0)
    keep(run("x", task="x", ago_s=-1, followers=(("y", "y"),), state=FAILURE))
    assert [each.name for each in all_pages(broker, limit=1)] == ["x", runs[0].task]


def test_a_body_that_waits_stands_before_what_follows_its_chord(broker, keep, run):
    """The chain's first task tells of what follows the chord, and not of the chord's body."""
    keep(*told(SHAPES["[a {b c} d e]"], run)[:3])
    assert [drawn(root) for root in workflow_of(broker, "a").roots] == ["[a {b c} d e]"]


def all_pages(broker, wanted=None, limit=25):
    found, cursor = [], None
    while True:
        more, cursor = page_of_workflows(broker, wanted, limit=limit, cursor=cursor)
        found += more
        if cursor is None:
            return found


def test_workflows_are_found_in_all_of_the_history(broker, store, keep, run, clock):
    """By the name of any of their tasks, by state, and by when they ended; however much ran since."""
    for number in range(7):
        last, at = (f"z{number}", f"shop.last{number % 2}"), {"ago_s": -20.0 * number}
        state = FAILURE if number == 2 else SUCCESS
        keep(
            run(f"a{number}", task="shop.first", followers=(last,), **at),
            run(last[0], task=last[1], root=f"a{number}", parent=f"a{number}", state=state, **at),
        )
        clock.advance(20)
        keep(*(run(task="shop.other", **at) for _ in range(250)), bounds=History(runs=1_000_000, max_age=100))
    assert len(store.segments()) > 1
    assert [each.id for each in all_pages(broker, limit=2)] == [f"a{number}" for number in reversed(range(7))]
    by_name = all_pages(broker, Wanted(task="shop.last1"))
    assert [each.id for each in by_name] == ["a5", "a3", "a1"]
    assert [each.id for each in all_pages(broker, Wanted(state=FAILURE))] == ["a2"]
    succeeded = [each.id for each in all_pages(broker, Wanted(state=SUCCESS), limit=1)]
    assert succeeded == [f"a{number}" for number in (6, 5, 4, 3, 1, 0)]
    assert all_pages(broker, Wanted(task="shop.other")) == []
    since_ms = run().end_ms + 90_000
    assert [each.id for each in all_pages(broker, Wanted(since_ms=since_ms))] == ["a6", "a5"]
    assert [each.id for each in all_pages(broker, Wanted(until_ms=since_ms))] == ["a4", "a3", "a2", "a1", "a0"]
    with pytest.raises(InvalidArgument):
        page_of_workflows(broker, cursor="nothing")


def test_a_page_of_workflows_ends_behind_the_segment_that_fills_its_bound(broker, store, keep, run, clock, monkeypatch):
    """However many segments there are: the next page goes on there, and reads none of them again."""
    for number in range(4):
        keep(run(f"a{number}", task="shop.first", ago_s=-20.0 * number, followers=((f"z{number}", "shop.z"),)))
        clock.advance(20)
        keep(run(ago_s=-20.0 * number), bounds=History(runs=100, max_age=100))
    numbers = store.segments()
    assert len(numbers) > 3
    monkeypatch.setattr(workflows, "MOST_ROWS", 1)
    read = []
    inside = HistoryStore.workflows_in

    def workflows_in(self, number, wanted):
        read.append(number)
        return inside(self, number, wanted)

    monkeypatch.setattr(HistoryStore, "workflows_in", workflows_in)
    for wanted in (Wanted(), Wanted(task="shop.first")):
        read.clear()
        found, cursor, pages = [], None, 0
        while pages == 0 or cursor is not None:
            before = len(read)
            page, cursor = page_of_workflows(broker, wanted, cursor=cursor)
            found += [each.id for each in page]
            pages += 1
            assert len([number for number in read[before:] if inside(store, number, wanted)[1]]) <= 1
        assert found == [f"a{number}" for number in reversed(range(4))]
        assert read == numbers, "each once"


def test_a_workflow_that_goes_on_stands_first(broker, store, keep, run):
    keep(run("a", task="a", followers=(("b", "b"),)), run("other", task="o", followers=(("p", "p"),)))
    store.activity(b"s", {1: run("b", task="b", root="a", state=STARTED, end_ms=0, runtime_s=None)})
    assert [(each.id, each.state) for each in all_pages(broker, limit=1)] == [("a", STARTED), ("other", STARTED)]
    assert [each.ended for each in all_pages(broker)] == [None, None], "what follows is still to come"


def test_what_a_task_called_waits_below_it(broker, app, keep, run):
    keep(run("caller", task="a", queue="q"))
    app.send_task("called", task_id="x", root_id="caller", parent_id="caller")
    app.send_task("stranger")
    assert shape(workflow_of(broker, "caller").roots) == [("a", SUCCESS, [("called", "ready", [])])]


def test_a_run_that_is_found_in_two_ways_counts_once(broker, keep, run):
    keep(run("root"), run("child", state=RETRY, root="root", parent="root", ago_s=5))
    keep(run("child", root="root", parent="root", retries=1))
    (root,) = workflow_of(broker, "child").roots
    (child,) = root.children
    assert (root.runs, child.runs, child.state) == (1, 2, SUCCESS)


def test_parents_in_a_circle_end_the_search(broker, keep, run):
    keep(run("x", task="x", root="y", parent="y"), run("y", task="y", root="x", parent="x"))
    found = workflow_of(broker, "x")
    assert found.tasks == 2
    assert sum(1 + len(each.children) for each in found.roots) == 2


def test_a_large_workflow_is_counted_whole(broker, keep, run):
    """On its page and in the list; and it is found by what failed first, in an older segment than its newest run."""
    small = History(runs=100)
    keep(run("r", ago_s=9), run(root="r", parent="r", state=FAILURE, ago_s=9), bounds=small)
    keep(*[run(root="r", parent="r", ago_s=at // 250) for at in range(700)], bounds=small)
    for found in (workflow_of(broker, "r"), *all_pages(broker), *all_pages(broker, Wanted(state=FAILURE))):
        assert (found.state, found.tasks, found.done, found.failed, found.complete) == (FAILURE, 702, 701, 1, True)
    assert len(all_pages(broker, Wanted(state=FAILURE))) == len(all_pages(broker)) == 1


def test_of_a_workflow_that_is_too_large_there_is_at_least_what_was_found(broker, keep, run, monkeypatch):
    monkeypatch.setattr(workflows, "MOST_RUNS", 600)
    keep(run("r", ago_s=9), run(root="r", parent="r", state=FAILURE, ago_s=9))
    keep(*[run(root="r", parent="r") for _ in range(700)])
    found = workflow_of(broker, "r")
    assert (found.state, found.tasks, found.complete) == ("", 601, False), "whether one failed is not known"
    keep(run(root="r", parent="r", state=FAILURE, ago_s=-1))
    assert workflow_of(broker, "r").state == FAILURE


def test_a_group_of_many_chains_is_counted_whole(broker, keep, run):
    """What follows in each of them is found by the root, and not looked for by its id."""
    for number in range(150):
        last, of = (f"z{number}", "z"), {"root": "r", "group": "g"}
        keep(run(f"a{number}", followers=(last,), **of), run(last[0], parent=f"a{number}", **of))
    found = workflow_of(broker, "r")
    assert (found.state, found.tasks, found.done, found.complete) == (SUCCESS, 300, 300, True)


@pytest.mark.parametrize("state", sorted(FAILED))
def test_what_failed_is_found_by_however_it_did(broker, keep, run, state):
    keep(run("a", ago_s=9, root="r"), run("b", ago_s=5, root="r", state=state))
    assert [each.state for each in all_pages(broker, Wanted(state=FAILURE))] == [FAILURE]


def test_a_workflow_of_many_groups_is_counted_whole(broker, keep, run, monkeypatch):
    """What was read of a root and of a group counts once."""
    monkeypatch.setattr(workflows, "MOST_RUNS", 500)
    keep(run("r", ago_s=9), *[run(root="r", parent="r", group=f"g{at // 3}") for at in range(450)])
    for found in (workflow_of(broker, "r"), *all_pages(broker)):
        assert (found.state, found.tasks, found.complete) == (SUCCESS, 451, True)


def test_a_long_chain_that_waits_is_counted_whole(broker, keep, run):
    keep(run("c", followers=tuple((f"c{at}", "t") for at in range(150))))
    found = workflow_of(broker, "c")
    assert (found.state, found.tasks, found.complete) == (STARTED, 151, True)


def test_a_success_is_not_claimed_where_not_all_active_runs_are_known(broker, store, keep, run, monkeypatch):
    monkeypatch.setattr(workflows, "MOST_ACTIVE", 2)
    keep(run("a", root="r"), run("b", root="r"))
    active = {number: run(state=STARTED, end_ms=0, runtime_s=None) for number in range(2)}
    store.activity(b"s", {**active, 2: run(state=STARTED, end_ms=0, runtime_s=None, root="r")})
    found = workflow_of(broker, "a")
    assert (found.state, found.complete) == ("", False)


def test_a_workflow_has_not_ended_while_a_task_is_to_be_retried(broker, keep, run):
    keep(run("a", root="r", state=FAILURE), run("b", root="r", state=RETRY))
    found = workflow_of(broker, "a")
    assert (found.state, found.ended) == (FAILURE, None)


def test_a_run_that_ends_while_one_looks_is_one(broker, store, keep, run):
    ended = run("a", root="r")
    keep(ended)
    store.activity(b"s", {1: ended._replace(state=STARTED, end_ms=0, runtime_s=None)})
    found = workflow_of(broker, "a")
    assert (found.state, [each.runs for each in found.roots]) == (SUCCESS, [1])


def test_a_page_of_workflows_ends_when_it_has_read_so_many_runs(broker, keep, run, monkeypatch):
    monkeypatch.setattr(workflows, "MOST_ROWS", 300)
    for number in range(4):
        keep(*[run(group=f"g{number}", ago_s=number) for _ in range(200)], bounds=History())
    page, cursor = page_of_workflows(broker)
    assert [each.tasks for each in page] == [200, 200]
    assert [each.tasks for each in page_of_workflows(broker, cursor=cursor)[0]] == [200, 200]


@pytest.mark.parametrize("deep", [90, 300])
def test_what_is_very_deep_stands_below_the_last_level(broker, keep, run, deep):
    names = [f"n{number}" for number in range(deep)]
    keep(*(run(name, parent=names[at - 1] if at else "", root="n0" if at else "") for at, name in enumerate(names)))
    (node,) = workflow_of(broker, "n0").roots
    levels = [1]
    while node.children:
        levels.append(len(node.children))
        node = node.children[0]
    assert (sum(levels), len(levels)) == (deep, min(deep, workflows.MOST_DEPTH + 1))


def test_a_large_group_takes_one_place_of_the_list(broker, keep, run):
    """As a client sends a chord: no member has another root, and each is followed by the body."""
    keep(run("before", followers=(("after", "shop.after"),), ago_s=9))
    keep(*[run(group="g", followers=(("body", "shop.body"),)) for _ in range(700)])
    page, cursor = page_of_workflows(broker)
    assert [(each.tasks, each.complete) for each in page] == [(701, True), (2, True)]
    assert cursor is None


def test_a_dead_workers_run_does_not_hide_the_one_after_it(broker, keep, run):
    """It is noticed, and so ends, when the task has long run elsewhere."""
    keep(run("t", task="a", root="r", state=LOST, start_ms=run(ago_s=60).start_ms, ago_s=1))
    keep(run("t", task="a", root="r", redeliveries=1, ago_s=30), run("r", task="r"))
    found = workflow_of(broker, "t")
    assert (found.state, found.done, found.failed) == (SUCCESS, 2, 0)


def test_an_unknown_workflow(broker):
    with pytest.raises(TaskUnknown):
        workflow_of(broker, "nobody")


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period_s", [HOUR_S, DAY_S])
def test_numbers_by_task(broker, keep, run, clock, period_s):
    for ago in (2 * period_s, period_s // 2, period_s // 2 - 1, 1):
        keep(run(task="a", ago_s=ago, runtime_s=0.08, state=FAILURE if ago == 1 else SUCCESS))
    keep(run(task="b", ago_s=1, runtime_s=20.0))
    found = look_at_tasks(broker, period_s=period_s, clock=clock)
    assert [(each.task, each.runs, each.failures) for each in found.tasks] == [("a", 3, 1), ("b", 1, 0)]
    busiest = found.tasks[0]
    assert busiest.p50_s is not None
    assert busiest.p95_s is not None
    assert busiest.p50_s == busiest.p95_s == pytest.approx(0.08, rel=ERROR)
    assert busiest.mean_s == pytest.approx(0.08)
    assert busiest.per_second == pytest.approx(3 / found.seconds)
    assert [each.task for each in look_at_tasks(broker, task="b", clock=clock).tasks] == ["b"]


@pytest.mark.parametrize("period_s", [HOUR_S, DAY_S, 7 * DAY_S])
def test_a_series_of_all_tasks(broker, keep, run, clock, period_s):
    """Slot by slot; where nothing ended there is none, and the last one is as long as it has lasted."""
    keep(run(task="a", ago_s=period_s // 2, runtime_s=2.0), run(task="b", ago_s=period_s // 2, state=FAILURE))
    keep(run(task="a", ago_s=9 * 86_400))
    found = look_at_series(broker, period_s=period_s, clock=clock)
    now_s = clock.wall_ms() / 1000
    assert found[0][0] <= now_s - period_s
    assert found[-1][1] == now_s
    assert {end - begin for begin, end, _ in found[:-1]} == {300 if period_s == HOUR_S else 3_600}
    (counted,) = (each for _, _, each in found if each)
    assert (counted.runs, counted.failed) == (2, 1)


def test_no_slot_is_left_out_however_many_tasks_there_are(broker, keep, run, clock, monkeypatch):
    monkeypatch.setattr(reading, "MOST_COUNTERS", 3)
    keep(*(run(task=f"t{number}", ago_s=1) for number in range(10)))
    assert len(look_at_tasks(broker, clock=clock).tasks) == 10


@pytest.fixture
def exposed(any_store):
    """What the collector of the tasks exposes."""

    def exposed():
        with closing(TaskCollector(lambda: Broker.open(any_store))) as collector:
            registry = CollectorRegistry()
            registry.register(collector)
            return generate_latest(registry).decode()

    return exposed


def test_metrics(keep, run, exposed, monkeypatch):
    monkeypatch.setattr(metrics, "TASKS", 1)
    keep(run(task="a", runtime_s=0.08), run(task="a", state=FAILURE, runtime_s=0.2), run(task="b"), run(task="c"))
    text = exposed()
    assert 'celery_fdb_task_runs_total{state="FAILURE",task="a"} 1.0' in text
    assert 'celery_fdb_task_runs_total{state="SUCCESS",task="(other)"} 2.0' in text
    assert 'celery_fdb_task_runtime_seconds_bucket{le="0.1",task="a"} 1.0' in text
    assert 'celery_fdb_task_runtime_seconds_bucket{le="+Inf",task="a"} 2.0' in text
    assert 'celery_fdb_task_runtime_seconds_sum{task="a"} 0.28' in text
    assert "celery_fdb_history_dropped_total 0.0" in text
    assert 'task="b"' not in text


def test_a_task_has_its_own_series_while_its_first_run_lasts(store, run, exposed):
    store.activity(b"s", {1: run(task="report", state=STARTED, end_ms=0, runtime_s=None)})
    assert 'celery_fdb_task_active{task="report"} 1.0' in exposed()


def test_no_metrics_without_a_history(store, exposed):
    store._write(lambda tr: tr.clear(store.keys.settings))
    assert exposed() == ""


def test_what_doctor_says(broker, store, keep, run):
    keep(run())
    found = check_history(broker)
    assert (found.level, found.found) == ("ok", "1 run of at most 100000; 0 runs dropped so far")
    store.activity(b"s", {}, dropped=2)
    found = check_history(broker)
    assert (found.level, "2 runs dropped" in found.found) == ("warn", True)
    assert "celery_fdb_history_dropped_total" in found.fix
    store._write(lambda tr: tr.clear(store.keys.settings))
    assert "history=True" in check_history(broker).found


def test_a_real_canvas_has_ids_of_what_follows(app):
    """What ``recorder.py`` reads from a message: the rest of a chain and the body of a chord."""
    from celery_fdb.history.recorder import _followers

    def nothing():
        pass

    a = app.task(name="a")(nothing)
    for canvas in (chain(a.si(), a.si(), a.si()), chord(group([a.si(), a.si()]), a.si())):
        canvas.apply_async()
        with app.connection_for_read() as connection:
            message = connection.default_channel.basic_get("q", no_ack=True)
            payload = message.decode()
        holder = type("Request", (), {"_payload": payload})
        found = _followers(holder)
        assert found
        assert {each[1] for each in found} == {"a"}
