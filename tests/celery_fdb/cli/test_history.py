"""``history`` and ``task``."""

import pytest
from celery import Celery
from celery.states import FAILURE, STARTED, SUCCESS
from kit import left

from celery_fdb.history.run import Run
from kombu_fdb.primitives.clock import Clock


@pytest.fixture
def url(tmp_path):
    """The history has tests on each store."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def history(broker):
    return left.keep(broker)


@pytest.fixture
def keep(broker):
    def keep(id_, ago_s=0, **fields):
        end_ms = Clock().wall_ms() - int(ago_s * 1000)
        told = {"queue": "q", "worker": "w@h", "state": SUCCESS, "start_ms": end_ms - 10, "end_ms": end_ms, **fields}
        left.keep(broker, Run(id_, **{"task": "shop.pay", "runtime_s": 0.0125, **told}))

    return keep


def test_the_newest_first_with_filters_and_a_cursor(run, history, keep):
    keep("t1", 7200, key="acme")
    keep("t2", 60, state=FAILURE, error_class="shop.Broken", error="no \x1b[31mred", worker="other@h")
    keep("t3", 1, task="shop.pack")
    ids = lambda *options: [each["id"] for each in run("history", *options, "--json").json["runs"]]  # noqa: E731 - short
    assert ids() == ["t3", "t2", "t1"]
    assert ids("--task", "shop.pay") == ["t2", "t1"]
    assert ids("--state", FAILURE) == ids("--state", "failure") == ids("--worker", "other@h") == ["t2"]
    assert ids("--key", "acme") == ids("--until", "1h") == ["t1"]
    assert ids("--since", "1h") == ["t3", "t2"]
    assert ids("--queue", "unknown") == []
    first = run("history", "--limit", "2", "--json").json
    assert ids("--limit", "2", "--after", first["cursor"]) == ["t1"]
    shown = run("history", "--limit", "2")
    assert "12.5 ms" in shown.out
    assert "Broken: no" in shown.out
    assert "\x1b" not in shown.out
    assert f"--after {first['cursor']}" in shown.out


def test_what_runs_now(run, history, keep):
    history.activity(b"s", {1: Run("t", "shop.pay", start_ms=Clock().wall_ms() - 5000)})
    result = run("history", "--state", STARTED)
    assert "STARTED (its worker is gone)" in result.out
    assert run("history", "--state", STARTED, "--json").json["runs"][0]["alive"] is False


def test_a_limit_counts_the_active_runs_that_are_wanted(run, history, keep):
    """It limited the rows that were read before they were filtered."""
    now_ms = Clock().wall_ms()
    begun = {number: Run(f"t{number}", f"shop.{number % 2}", start_ms=now_ms - 1000 * number) for number in range(4)}
    history.activity(b"s", begun)
    for options, expected in (((), "t3"), (("--task", "shop.0"), "t2")):
        found = run("history", "--state", STARTED, "--limit", "1", *options, "--json").json["runs"]
        assert [each["id"] for each in found] == [expected]


def test_a_cursor_that_is_none(run, history, keep):
    result = run("history", "--after", "x")
    assert (result.code, "cursor" in result.err) == (2, True)


def test_a_life(run, history, keep):
    keep("t", 5, state="RETRY", error_class="E", error="no", traceback="line 1\nline 2", args="(1,)")
    keep("t", 1, retries=1, args="(1,)", traceback="")
    shown = run("task", "t").out
    for said in ("shop.pay t: SUCCESS", "attempt 1, by w@h from q", "retried", "attempt 2", "succeeded", "args: (1,)"):
        assert said in shown
    document = run("task", "t", "--json").json
    assert [each["what"] for each in document["events"]] == ["started", "retried", "started", "succeeded"]


def test_a_life_in_the_broker_alone(run, url, broker):
    broker.queue("q").put("x", task_id="t", delay=600)
    shown = run("task", "t").out
    assert "delayed" in shown
    assert "No worker has kept a history yet" in shown


def test_a_result_is_known_with_an_app(run, url, history):
    app = Celery("cli", broker=url, backend=url, set_as_current=False)
    app.backend.store_result("t", {"token": "x1y2z3", "orders": 5}, SUCCESS)
    obj = type("Context", (), {"app": app, "no_color": True})()
    for command in (["task", "t"], ["task", "t", "--json"]):
        shown = run(*command, broker=None, obj=obj).out
        assert ("SUCCESS" in shown, "'orders': 5" in shown, "x1y2z3" in shown) == (True, True, False)
    assert "result: SUCCESS" in run("task", "t", broker=None, obj=obj).out
    app.backend.client.detach(app.backend)
    app.close()


def test_what_a_history_holds_as_it_is_is_masked_when_it_is_shown(run, history, keep):
    """With ``arguments="full"``, or of a version that masked fewer names."""
    secret = "{'pwd': 'x1y2z3'}"
    keep("t", 5, args=f"({secret},)", kwargs=secret, state=FAILURE, error=secret, traceback=secret)
    for command in ("history", "history --json", "task t", "task t --json", "task t --tree"):
        shown = run(*command.split()).out
        assert ("pwd" in shown, "x1y2z3" in shown) == (True, False)


def test_a_tree(run, history, keep):
    keep("a", 5, followers=(("b", "shop.pack"),))
    lines = run("task", "a", "--tree").out.splitlines()
    assert lines == ["chain STARTED", "  shop.pay a SUCCESS in 12.5 ms", "  shop.pack b PENDING"]
    assert run("task", "b", "--tree", "--json").code == 1, "it was never published"


@pytest.mark.parametrize("options", [[], ["--tree"]])
def test_an_unknown_task(run, history, keep, options):
    result = run("task", "nobody", *options)
    assert (result.code, "Check the id" in result.err) == (1, True)
