"""Each command through click: what it does to the store, shows, and exits with."""

import dataclasses
import json
import pickle
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery
from kit.left import Trap
from kombu import Connection

from celery_fdb.cli import HOMES, fdb
from celery_fdb.cli.status import session_table
from celery_fdb.cli.terminal import Invocation
from celery_fdb.inspection.overview import look
from celery_fdb.operations import action, queues
from kombu_fdb.engine import topology
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import NO_SESSION, KeyLimits, SessionFacts


class App:
    """What Celery hands to its sub-commands."""

    no_color = True

    def __init__(self, app):
        self.app = app


@pytest.fixture
def url(tmp_path):
    """No command asks which store it is; those that carry one over, and the metrics, have tests on each."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def app(url, new_app):
    app = new_app(url)
    app.conf.broker_transport_options = {"session_ttl": 60}

    @app.task(name="shop.add", shared=False)
    def add(x, y):
        return x + y

    app.add = add
    return app


# -- looking -----------------------------------------------------------------------------------------------------------


def test_status_tells_what_the_maintenance_set_aside(run, broker):
    assert "set aside" not in run("status").out
    broker._engine.upkeep.set_aside(Aside("promote", "jobs", "too large", 3, 1))
    assert "set aside by duties: 1" in run("status").out
    assert run("status", "--json").json["asides"][0]["error"] == "too large"


def test_status_tells_of_messages_of_a_newer_version(run, broker):
    assert "newer" not in run("status").out
    broker._engine.transactions.write(lambda work: work.effects.change("jobs", "newer", 2))
    broker._engine.transactions.write(lambda work: work.effects.change("jobs.dead", "newer", 1))
    assert "messages of a newer version: 3; upgrade the workers" in run("status").out
    assert [each["newer"] for each in run("status", "--json").json["queues"]] == [2, 1]


def test_a_queue_that_was_never_declared_is_gone_with_its_last_message(run, broker):
    broker.declare("declared")
    for name in ("declared", "undeclared"):
        broker.queue(name).put("x")
    assert [each["name"] for each in run("queues", "--json").json] == ["declared", "undeclared"]
    for name in ("declared", "undeclared"):
        broker.queue(name).take(0).ack()
    assert [each["name"] for each in run("queues", "--json").json] == ["declared"]


def test_queues_shows_how_they_were_declared(run, broker):
    broker.declare("jobs", arguments={"x-max-length": 7})
    broker.queue("jobs").pause()
    (queue,) = run("queues", "--json").json
    assert (queue["name"], queue["arguments"], queue["paused"]) == ("jobs", {"x-max-length": 7}, True)
    assert "x-max-length=7" in run("queues").out


def test_keys_with_their_limits_the_longest_first(run, broker):
    jobs = broker.queue("jobs")
    jobs.put("a", key="short")
    jobs.put_many("bc", key="long")
    jobs.limit("short", max_in_flight=3)
    assert [each["key"] for each in run("keys", "jobs", "--json").json] == ["long", "short"]
    for options, found in ((["--limit", "1"], "long"), (["--prefix", "sh"], "short")):
        assert [each["key"] for each in run("keys", "jobs", *options, "--json").json] == [found]
    assert "max_in_flight=3" in run("keys", "jobs").out


def test_messages_without_a_key_are_called_so(run, broker):
    broker.queue("jobs").put("a", key="x")  # else the queue has no keys at all
    broker.queue("jobs").put("b")
    jobs = [broker.queue("jobs").take(0) for _ in range(2)]
    assert re.search(r"^\(no key\) +1 *$", run("keys", "jobs").out, re.MULTILINE)
    assert re.search(r"^jobs +\(no key\) +1 ", run("top", "--once").out, re.MULTILINE)
    for document in (run("keys", "jobs", "--json").json, look(broker, top_keys=9).as_json()["queues"][0]["keys"]):
        assert [(each["key"], each["ready"], each["leased"]) for each in document] == [("", None, 1), ("x", 0, 1)]
    for job in jobs:
        job.release()


def test_sessions_show_who_holds_what(run, broker):
    broker.queue("jobs").put_many("ab")
    broker.queue("jobs").take_many(2, 0)
    (session,) = run("sessions", "--json").json
    assert (session["leased"], session["open"]) == (2, True)
    shown = run("sessions").out
    assert session["id"][:12] in shown
    assert " s ago" in shown, "when it was heard"
    assert look(broker).sessions[0].held is None, "counted one by one, and only where it is shown"


def test_a_table_of_sessions_hides_queues_that_celery_made_for_itself(broker):
    broker.queue("jobs").put("a")
    broker.queue("jobs").take(0)
    seen = look(broker)
    (session,) = seen.sessions
    consumed = ("jobs", "w@h.celery.pidbox")
    shown = session_table(dataclasses.replace(seen, sessions=[dataclasses.replace(session, consumed=consumed)]))
    assert list(shown.columns[-1].cells) == ["jobs"]


def test_a_session_that_was_not_heard_for_its_ttl_is_silent_everywhere(run, broker, monkeypatch):
    broker.queue("jobs").put("x")
    broker.queue("jobs").take(0)
    assert " alive " in run("sessions").out
    told = broker.inspect.sessions

    def late(**options):
        return [
            dataclasses.replace(each, beat_ms=each.beat_ms - int(each.ttl_s * 1000) - 1000) for each in told(**options)
        ]

    monkeypatch.setattr(type(broker.inspect), "sessions", lambda _, **options: late(**options))
    assert " silent " in run("sessions").out
    assert " silent " in run("top", "--once").out
    seen = look(broker)
    assert [each.state(seen.heard_s(each)) for each in seen.sessions].count("silent") == 1


@pytest.mark.parametrize(("quiet_s", "state"), [(0.0, "alive"), (29.0, "alive"), (31.0, "silent"), (None, "alive")])
def test_a_session_that_was_not_heard_for_its_ttl_is_silent(quiet_s, state):
    session = SessionFacts(NO_SESSION, {}, b"", 30.0, open=True, consumed=["jobs"])
    assert session.state(quiet_s) == state
    assert dataclasses.replace(session, open=False).state(quiet_s) == "ended"


def test_peek_takes_nothing_and_shows_no_body(run, app, broker):
    app.add.apply_async(("secret-argument", 2), task_id="t1")
    (message,) = run("peek", "celery", "--json").json
    assert (message["task"], message["task_id"], message["state"]) == ("shop.add", "t1", "ready")
    assert "secret-argument" not in run("peek", "celery").out + json.dumps(message)
    assert broker.queue("celery").stats().ready == 1


def test_json_has_no_numbers_that_are_none(run, app):
    """RFC 8259, 6: a publisher's header may be infinite, and a strict reader would refuse the whole document."""
    app.send_task("t", headers={"x": float("inf"), "y": [float("nan")]})
    assert json.loads(run("top", "--once", "--json").out, parse_constant=pytest.fail)
    printed = run("peek", "celery", "--body", "--json").out
    assert json.loads(printed, parse_constant=pytest.fail)
    assert '"Infinity"' in printed
    assert '["NaN"]' in printed


def test_json_may_be_as_deep_as_what_was_read(capsys):
    text = "[" * 600 + "]" * 600
    Invocation.print_json(json.loads(text))
    assert capsys.readouterr().out == f"{text}\n"


def test_a_pickled_body_is_never_opened(run, url, broker, tmp_path):
    with Connection(url) as connection:
        connection.Producer().publish(
            pickle.dumps(Trap(tmp_path / "sprung")),
            routing_key="jobs",
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )
    (message,) = run("peek", "jobs", "--body", "--json").json
    assert message["content"]["body"].endswith("bytes of application/x-python-serialize>")
    assert not (tmp_path / "sprung").exists()


def test_peek_at_delayed_and_leased_ones(run, broker):
    jobs = broker.queue("jobs")
    jobs.put("later", delay=100, key="k")
    jobs.put("now")
    jobs.take(0)
    (delayed,) = run("peek", "jobs", "--state", "delayed", "--json").json
    assert 90 < delayed["due_in_s"] <= 100
    (leased,) = run("peek", "jobs", "--state", "leased", "--json").json
    assert f"held by session {leased['owner'][:12]}" in run("peek", "jobs", "--state", "leased").out
    assert leased["owner"] == broker._client.session().session_id.hex()
    assert run("peek", "jobs", "--state", "delayed", "--key", "other", "--json").json == []


def test_a_message_that_was_never_taken_was_never_redelivered(run, broker):
    broker.queue("jobs").put("a")
    heading, row = run("peek", "jobs").out.splitlines()[:2]
    assert row[: heading.index("redelivered") + len("redelivered")].split()[-1] == "0"


def test_top_looks_as_often_as_told(run, broker):
    broker.queue("jobs").put("a", key="alice")
    broker._engine.upkeep.flush_totals()
    lines = run("top", "--iterations", "2", "--interval", "0.1", "--json").out.splitlines()
    first, second = map(json.loads, lines)
    assert first["rates"] == {}
    assert second["rates"]["jobs"]["growth"] == 0
    assert second["queues"][0]["keys"][0]["key"] == "alice"
    assert second["key_rates"] == {"jobs": {"alice": {"published": 0}}}


def test_top_shows_queues_keys_and_sessions(run, broker):
    broker.queue("jobs").put_many("ab", key="alice")
    broker.queue("jobs").take(0)
    result = run("top", "--once")
    assert result.code == 0
    for text in ("1 ready, 0 delayed, 1 leased", "jobs", "alice", "alive"):
        assert text in result.out
    assert result.out.endswith("\n"), "a prompt or the next output begins on a line of its own"
    assert "0/s" not in result.out, "one look knows no rate"
    assert "+0/s" in run("top", "--iterations", "2", "--interval", "0.1").out


def test_a_rate_is_shown_as_it_was_written(run, broker):
    broker.queue("jobs").put("a", key="alice")
    assert "100/m" in run("limit", "jobs", "alice", "--rate", "100/m").out
    assert "rate=100/m" in run("keys", "jobs").out


# -- changing ----------------------------------------------------------------------------------------------------------


def test_cancel_takes_a_task_out_of_the_store(run, app, broker):
    app.add.apply_async((1, 2), task_id="t1", countdown=1000)
    assert run("cancel", "t1", "--json").json == {"task_id": "t1", "cancelled": 1, "revoked": False}
    assert broker.find("t1") == []


def test_cancel_by_the_url_says_that_the_result_is_not_updated(run, app):
    app.add.apply_async((1, 2), task_id="t1")
    assert "not updated: that needs the app" in run("cancel", "t1").out


def test_cancel_with_the_app_marks_the_result(run, url, new_app, tmp_path):
    app = new_app(url, backend=f"file://{tmp_path}")
    app.send_task("shop.add", task_id="t1", countdown=1000)
    assert "is REVOKED" in run("cancel", "t1", broker=None, obj=App(app)).out
    assert app.AsyncResult("t1").state == "REVOKED"


def test_cancel_while_the_result_backend_is_away_says_what_to_do(run, url, new_app, monkeypatch):
    app = new_app(url, backend="cache+memory://")
    app.send_task("shop.add", task_id="t1")
    monkeypatch.setattr(app.backend, "store_result", lambda *_, **__: 1 / 0)
    result = run("cancel", "t1", broker=None, obj=App(app))
    assert result.code == 1
    assert "could not be marked as REVOKED" in result.err
    assert "mark_as_revoked" in result.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_secrets_are_masked_wherever_they_stand(run, app, broker, options):
    hidden = "hunter2"
    headers = {
        "context": {"password": hidden},
        "kwargsrepr": f"{{'api_key': '{hidden}'}}",
        "url": f"amqp://a:{hidden}@h",
    }
    app.send_task("shop.add", headers=headers, task_id="t1", reply_to=f"redis://:{hidden}@h")
    shown = [run("peek", "celery", "--body", *options).out, run("find", "t1", "--body", *options).out]
    shown.append(run("search", "celery", "--body", *options).out)
    (lease,) = (each._delivery.lease for each in broker.queue("celery").take_many(1, 10))
    broker._engine.messages.reject([lease], error=f"token={hidden}", traceback=f"connect('amqp://a:{hidden}@h')")
    shown += [run("dead", "show", "celery", "t1", *options).out, run("dead", "list", "celery", "--body", *options).out]
    broker.declare("q", arguments={"x-token": hidden}).put("")
    shown.append(run("queues", *options).out)
    assert not [each for each in shown if hidden in each]
    assert all("•" in each or "\\u2022" in each for each in shown)


def test_a_task_that_a_worker_holds_is_not_cancelled(run, app, broker):
    app.add.apply_async((1, 2), task_id="t1")
    job = broker.queue("celery").take(0)
    result = run("cancel", "t1")
    assert (result.code, result.out) == (1, "")
    assert "a worker holds this task" in result.err
    job.ack()


def test_limit_changes_what_is_named_and_shows_it_all(run, broker):
    jobs = broker.queue("jobs")
    jobs.put("a", key="alice")
    run("limit", "jobs", "alice", "--rate", "120/m", "--max-in-flight", "2", "--weight", "3")
    assert run("limit", "jobs", "alice", "--json").json["limits"] == {
        "paused": False,
        "weight": 3,
        "max_in_flight": 2,
        "rate": 2.0,
        "burst": 1,
        "capacity": None,
        "priority": None,
    }
    run("limit", "jobs", "alice", "--max-in-flight", "none")
    assert broker._engine.inspect.limits("jobs", "alice") == KeyLimits(weight=3, rate=2.0)
    out = run("limit", "jobs", "alice", "--remove").out
    assert re.search(r"^paused +no *$", out, re.MULTILINE)
    assert "weight" in out
    assert broker._engine.inspect.limits("jobs", "alice") == KeyLimits()


def test_the_limits_of_a_paused_key_are_not_removed(run, broker):
    """Its pause is one of them; the pages refuse it, too."""
    broker.queue("jobs").put("a", key="alice")
    run("limit", "jobs", "alice", "--weight", "3")
    run("pause", "jobs", "alice")
    result = run("limit", "jobs", "alice", "--remove")
    assert (result.code, "Resume it first" in result.err) == (1, True)
    assert broker.queue("jobs").limits("alice") == KeyLimits(weight=3, paused=True)
    run("resume", "jobs", "alice")
    assert run("limit", "jobs", "alice", "--remove").code == 0


@pytest.mark.parametrize(
    "given", [["--weight", "0"], ["--rate", "fast"], ["--priority", "12"], ["--capacity", " "], ["--remove"]]
)
def test_a_senseless_limit_is_wrong_usage(run, broker, given):
    broker.queue("jobs").put("a")
    result = run("limit", "jobs", *given)
    assert result.code == 2
    assert broker._engine.inspect.control("jobs").every_key == KeyLimits()


def test_purge_asks_first(run, broker):
    jobs = broker.queue("jobs")
    jobs.put_many("ab")
    jobs.put("c", delay=100)
    result = run("purge", "jobs", given="n\n")
    assert (result.code, jobs.stats().ready) == (1, 2)
    assert "Delete 3 waiting messages of jobs for good?" in result.err
    assert run("purge", "jobs", "--yes", "--json").json == {"queue": "jobs", "deleted": 3}
    assert jobs.stats().ready + jobs.stats().delayed == 0


@pytest.mark.parametrize("bound", [{"x-max-length": 2}, {"x-max-length-bytes": 10}])
def test_move_into_a_queue_that_would_drop_messages_is_refused(run, broker, bound):
    broker.queue("jobs").put_many("abc")
    broker.declare("small", arguments=bound)
    for allowed in ([], ["--new"]):
        result = run("move", "jobs", "small", *allowed)
        assert (result.code, broker.queue("jobs").count()) == (1, 3)
        assert "--limit" in result.err


def test_a_move_in_parts_asks_for_room_once(run, broker, monkeypatch):
    """The second part found that the target had too little room for all of them: it had the first part's by then."""
    monkeypatch.setattr(queues, "MOVED_AT_ONCE", 2)
    monkeypatch.setattr(action, "MOST_PARTS", 1)
    broker.queue("jobs").put_many("abc")
    broker.declare("other", arguments={"x-max-length": 4})
    assert run("move", "jobs", "other", "--json").json["moved"] == 3


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        ("move jobs other --new", [450, 200, 400, 450]),
        ("move jobs other --new --key alice", [250, 200, 250]),
        ("move jobs other --new --limit 300", [300, 200, 300]),
        ("purge jobs --yes", [450, 200, 400, 450]),
    ],
)
def test_a_bar_moves_while_a_queue_is_moved_or_purged(run, broker, monkeypatch, command, seen):
    """Both took as long as the queue was full, and said nothing meanwhile."""
    told = []

    @contextmanager
    def bar(_run, _what, total):
        told.append(total)
        yield told.append

    monkeypatch.setattr(Invocation, "bar", bar)
    monkeypatch.setattr(queues, "MOVED_AT_ONCE", 200)
    monkeypatch.setattr(topology, "MESSAGES_PER_PURGE", 200)
    monkeypatch.setattr(action, "MOST_PARTS", 1)
    broker.queue("jobs").put_many([str(number) for number in range(250)], key="alice")
    broker.queue("jobs").put_many([str(number) for number in range(200)])
    assert run(*command.split()).code == 0
    assert broker.queue("jobs").stats().ready == 450 - seen[0]
    assert told == seen


def test_move_to_a_queue_that_is_not_there_is_refused_unless_it_is_meant(run, broker):
    broker.queue("jobs").put("a")
    result = run("move", "jobs", "typo")
    assert (result.code, broker.queue("jobs").count()) == (1, 1)
    assert "--new" in result.err
    assert run("move", "jobs", "jobs").code == 1
    assert run("move", "jobs", "typo", "--new").code == 0


def test_move_with_a_limit_takes_what_a_consumer_would_get_first(run, broker):
    jobs = broker.queue("jobs")
    jobs.put("later", delay=100)
    jobs.put_many(["first", "second"])
    assert run("move", "jobs", "other", "--new", "--limit", "1", "--json").json["moved"] == 1
    assert [each.payload for each in broker.queue("other").peek()] == [b"first"]
    assert run("move", "jobs", "other", "--limit", "9", "--json").json["moved"] == 2


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def graves(app, broker):
    """Three dead tasks, t0 to t2."""
    for number in range(3):
        app.add.apply_async((number, 1), task_id=f"t{number}")
        broker.queue("celery").take(0).bury(error=f"boom {number}")
    return broker.queue("celery.dead")


@pytest.mark.parametrize("by", ["task_id", "id"])
def test_dead_show_tells_the_history(run, graves, by):
    wanted = run("dead", "list", "celery", "--json").json[1][by]
    shown = run("dead", "show", "celery", wanted, "--json").json
    assert shown["deaths"][0]["details"] == {"error": "boom 1"}
    assert "\n  error: boom 1\n" in run("dead", "show", "celery", wanted).out


def test_dead_show_keeps_a_traceback_readable_and_harmless(run, broker):
    broker.queue("jobs").put("a", task_id="t")
    job = broker.queue("jobs").take(0)
    broker._engine.messages.reject(
        [job._delivery.lease], error="\x1b[2Jboom", traceback="Traceback\n  line 1\n  line 2"
    )
    shown = run("dead", "show", "jobs", "t").out
    assert "  error: \\x1b[2Jboom\n  traceback: Traceback\n      line 1\n      line 2\n" in shown


def test_dead_show_tells_each_attempt_in_a_line(run, broker):
    broker.queue("jobs").put("a", task_id="t")
    job = broker.queue("jobs").take(0)
    attempts = [{"error": "E: \x1b[2Jdown\nside", "time": "2031-01-01T00:00+00:00"}, {"error": "E: up"}, "odd"]
    broker._engine.messages.reject([job._delivery.lease], attempts=attempts)
    shown = run("dead", "show", "jobs", "t").out
    lines = shown.partition("  attempts:\n")[2].splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["2031-01-01T00:00+00:00", "E:", "\\x1b[2Jdown\\nside"],
        ["E:", "up"],
        ["odd"],
    ]


def test_dead_replay_of_certain_ones(run, graves, broker):
    first = run("dead", "list", "celery", "--json").json[0]["id"]
    assert run("dead", "replay", "celery", first, "t2", "--json").json["replayed"] == 2
    assert [each.task_id for each in graves.peek(10)] == ["t1"]
    assert run("dead", "replay", "celery", "nosuch").code == 1
    assert run("dead", "replay", "celery", "--reason", "expired", "--json").json["replayed"] == 0
    assert run("dead", "replay", "celery", "--task", "shop.add", "--json").json["replayed"] == 1


def test_dead_replay_of_certain_ones_up_to_a_limit(run, graves):
    assert run("dead", "replay", "celery", "t1", "t0", "--limit", "1", "--json").json["replayed"] == 1
    assert [each.task_id for each in graves.peek(10)] == ["t0", "t2"]


def test_dead_replay_to_another_queue_at_a_rate(run, graves, broker):
    broker.declare("calm", durable=True)
    assert run("dead", "replay", "celery", "--to", "calm", "--rate", "50", "--json").json["replayed"] == 3
    assert broker.queue("calm").count() == 3


def test_dead_replay_that_is_refused_on_the_way_says_how_many_are_back(run, broker):
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graveyard"}
    for name in ("stays", "goes"):
        broker.declare(name, arguments=arguments).put("a", task_id=name)
        broker.queue(name).take(0).bury()
    broker._engine.queues.delete("goes")
    result = run("dead", "replay", "graveyard", "--in", "stays", "goes")
    assert (result.code, broker.queue("stays").count(), broker.queue("graveyard").count()) == (1, 1, 1)
    assert "replayed: 1" in result.err


def test_dead_list_counts_by_what_they_have_in_common(run, graves):
    assert run("dead", "list", "celery", "--by", "reason", "--json").json == {"rejected": 3}
    assert run("dead", "list", "celery", "--by", "task", "--json").json == {"shop.add": 3}
    for hour in ("3600", "3600s", "60m", "1h"):
        assert run("dead", "list", "celery", "--older-than", hour, "--json").json == []
        assert len(run("dead", "list", "celery", "--younger-than", hour, "--json").json) == 3
    wrong = run("dead", "list", "celery", "--older-than", "1 week")
    assert wrong.code == 2
    assert "10m, 12h or 7d" in wrong.err


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_reason_that_there_is_not_is_an_error_that_names_those_there_are(run, graves, verb):
    result = run("dead", verb, "celery", "--reason", "nonsense", "--yes")
    assert result.code == 1
    assert "There are: rejected." in result.err
    for reason in ("expired", "-"):
        assert run("dead", verb, "celery", "--reason", reason, "--yes").code == 0, "there may be some tomorrow"
    assert graves.count() == 3


def test_dead_discard_some_or_all(run, graves):
    assert run("dead", "discard", "celery", "t1", "--yes", "--json").json["discarded"] == 1
    assert [each.task_id for each in graves.peek(10)] == ["t0", "t2"]
    assert run("dead", "discard", "celery").code == 2
    assert run("dead", "discard", "celery", "--reason", "expired", "--yes", "--json").json["discarded"] == 0
    result = run("dead", "discard", "celery", "--all", given="n\n")
    assert result.code == 1
    assert "Delete 2 dead letters of celery.dead for good?" in result.err
    assert graves.count() == 2
    assert run("dead", "discard", "celery", "--all", "--yes").code == 0
    assert graves.count() == 0


@pytest.mark.parametrize(("answer", "given"), [("y\n", ()), (None, ("--yes",))])
def test_an_unreadable_dead_letter_is_discarded_with_all(run, broker, answer, given):
    jobs = broker.queue("jobs")
    for text in "ab":
        jobs.put(text)
        jobs.take(0).bury()

    def spoil(work):
        (row,) = work.tr.get_range(*range_of(work.keys.ready("jobs.dead")), limit=1)
        work.tr.set(row[0], b"garbage")

    broker._engine.transactions.write(spoil)
    result = run("dead", "discard", "jobs", "--all", *given, "--json", given=answer)
    assert (result.json["discarded"], jobs.dead_letters.count().total()) == (2, 0)
    assert answer is None or "Delete 2 dead letters" in result.err


@pytest.mark.usefixtures("a_second_later")
@pytest.mark.parametrize(
    "given", [("--older-than", "0"), ("--younger-than", "1h"), ("--error", "KeyError"), ("--error", "-")]
)
def test_a_condition_on_a_death_finds_nothing_that_never_died(run, broker, given):
    """A queue that a dead-letter exchange leads to may have messages of its own."""
    broker.declare("graveyard").put("lives")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graveyard"}
    broker.declare("jobs", arguments=arguments).put("dies")
    broker.queue("jobs").take(0).bury(error="no class" if "-" in given else KeyError("a"))
    assert len(run("dead", "list", "graveyard", "--in", *given, "--json").json) == 1
    assert run("dead", "discard", "graveyard", "--in", *given, "--yes", "--json").json["discarded"] == 1
    assert [each.payload for each in broker.queue("graveyard").each()] == [b"lives"]


@pytest.mark.parametrize("name", ["task", "error", "reason"])
def test_an_empty_condition_is_refused(run, graves, name):
    for text in ("", " "):
        assert run("dead", "discard", "celery", f"--{name}", text, "--yes").code == 2
    assert graves.count() == 3


@pytest.mark.parametrize(("task", "number"), [("shop.add", 3), ("shop.*", 3), ("shop", 0), ("-", 0)])
def test_the_tasks_of_dead_letters_are_named_as_on_the_pages(run, graves, task, number):
    assert run("dead", "replay", "celery", "--task", task, "--json").json["replayed"] == number


# -- which broker, and errors ------------------------------------------------------------------------------------------


def test_of_a_failover_list_ours_is_taken(run, url, new_app, broker):
    assert run("status", broker=None, obj=App(new_app(["amqp://nowhere", url]))).code == 0


def test_the_broker_may_be_named_behind_the_command(run, url, broker):
    """There it counts more than before it, or in the environment; each of the two options by itself."""
    broker.queue("jobs").put("a")
    elsewhere, patience = "fdb+sqlite:////nosuch/folder/broker.db", '{"connect_timeout": 5.0}'
    for named in (None, elsewhere):
        found = run("queues", "--json", "--broker", url, "--broker-options", patience, broker=named)
        assert [each["name"] for each in found.json] == ["jobs"]
    assert run("--broker-options", '{"session_tll": 3}', "status", "--broker-options", patience).code == 0
    assert run("--broker-options", '{"session_tll": 3}', "status", "--broker", url, broker=None).code == 2
    assert run("status", "--broker", elsewhere).code == 3
    assert run("dead", "list", "--broker", url, broker=None).code == 0


@pytest.mark.parametrize(
    "url", ["amqp://me:secret@nowhere", "", Path("/var/lib/shop/broker.db"), [Path("/var/lib/shop/broker.db")]]
)
def test_an_app_with_another_broker_or_none_is_wrong_usage(run, url):
    app = Celery("cli", set_as_current=False)
    app.conf.broker_url = url
    result = run("status", broker=None, obj=App(app))
    assert (result.code, result.out, "secret" in result.err) == (2, "", False)
    assert "CELERY_BROKER_URL" in result.err
    assert "--broker" in result.err
    app.close()


@pytest.mark.parametrize(
    "command",
    [
        *(["keys", "nosuch"], ["peek", "nosuch"], ["pause", "nosuch"], ["resume", "nosuch"], ["limit", "nosuch"]),
        *(["purge", "nosuch", "--yes"], ["move", "nosuch", "jobs"], ["dead", "list", "nosuch"], ["find", "nosuch"]),
        *(["cancel", "nosuch"], ["dead", "show", "nosuch", "x"], ["dead", "show", "jobs", "nosuch"]),
        *(["dead", "discard", "jobs", "00", "--yes"], ["import", "nosuch"]),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_one_line_and_exit_code_1(run, broker, command):
    broker.queue("jobs").put("a")
    result = run(*command)
    assert (result.code, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith("Error: ")
    document = run(*command, "--json").json
    assert document["code"] == 1
    assert document["error"] in line


@pytest.mark.parametrize(
    "url",
    ["fdb+sqlite:////nosuch/folder/broker.db", "fdb://desc:thesecret@127.0.0.1:1/ns"],
)
def test_an_unreachable_store_is_exit_code_3_and_names_the_fix(run, url):
    options = ["--broker-options", '{"connect_timeout": 0.3}']
    result = run(*options, "status")
    assert result.code == 3
    (line,) = result.err.splitlines()
    assert line.startswith("Error: ")
    assert "thesecret" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--broker", "redis://:thesecret@host", "status"],
        ["--broker", "thesecret", "status"],
        ["--broker-options", "[]", "status"],
        ["status", "--broker-options", "[]"],
        ["status", "--broker", "redis://:thesecret@host"],
        ["--broker-options", '{"session_tll": 3}', "status"],
        ["stauts"],
        ["peek"],
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert ":thesecret" not in result.err


@pytest.mark.parametrize(
    "command",
    [
        *(["status"], ["queues"], ["sessions"], ["top", "--once"], ["find", "t"], ["cancel", "t"], ["peek", "q"]),
        *(["keys", "q"], ["dead", "list"], ["purge", "q", "--yes"], ["limit", "q"], ["pause", "q"]),
    ],
    ids=" ".join,
)
def test_no_command_makes_a_store_by_looking_for_one(run, tmp_path, command):
    result = run(*command, broker=f"fdb+sqlite:///{tmp_path}/brokr.db")
    assert result.code == 3
    assert f"{tmp_path}/brokr.db" in result.err
    assert list(tmp_path.glob("brokr*")) == []


@pytest.mark.parametrize(
    ("arguments", "answer", "replayed"),
    [([], "n\n", 0), ([], "y\n", 2), (["--yes"], "", 2), (["--limit", "1"], "", 1), (["--reason", "rejected"], "", 2)],
)
def test_replaying_all_is_asked_for_on_a_terminal(run, broker, monkeypatch, arguments, answer, replayed):
    jobs = broker.queue("jobs")
    for text in "ab":
        jobs.put(text)
        jobs.take(0).bury()
    monkeypatch.setattr("celery_fdb.cli.dead._is_terminal", lambda: True)
    run("dead", "replay", "jobs", *arguments, given=answer)
    assert jobs.stats().ready == replayed


def test_the_question_about_a_replay_names_the_queue_it_goes_to(run, graves, broker, monkeypatch):
    monkeypatch.setattr("celery_fdb.cli.dead._is_terminal", lambda: True)
    broker.declare("{calm}")
    asked = run("dead", "replay", "celery", "--to", "{calm}", given="n\n").err
    assert asked.startswith("Replay 3 dead letters of celery.dead, all to {calm}?")


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_dash_is_no_file(run, broker, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(command, "-").code == 2
    assert not (tmp_path / "-").exists()


@pytest.mark.foundationdb
def test_a_cluster_file_in_disorder_is_shown_how_it_should_be(run, tmp_path):
    (tmp_path / "junk.cluster").write_text("junk\n")
    result = run("status", broker=f"fdb:///{tmp_path}/junk.cluster")
    assert result.code == 3
    assert "description:id@host:port" in result.err


def test_no_broker_at_all_says_how_to_name_one(run):
    result = run("status", broker=None)
    assert result.code == 2
    assert "--broker fdb+sqlite:////path/broker.db" in result.err


def test_doctor_reports_and_fails_with_what_is_to_mend(run, broker):
    assert run("doctor").code == 0
    result = run("doctor", "--json", broker="fdb+sqlite:////nosuch/folder/broker.db")
    assert result.code == 1
    assert [each["what"] for each in result.json if each["level"] == "fail"] == ["file"]


def test_doctor_finds_options_that_have_no_effect(run, url, new_app):
    """Because ``install`` was never called; it looks at the tasks of an app, not at those of a URL."""
    app = new_app(url)

    @app.task(name="shop.charge", fair_key="customer")
    def charge(customer):
        pass

    (found,) = [each for each in run("doctor", "--json", broker=None, obj=App(app)).json if each["what"] == "tasks"]
    assert (found["level"], "shop.charge (fair_key)" in found["found"]) == ("warn", True)
    assert "celery_fdb.install(app)" in found["fix"]


def test_doctor_says_that_tasks_can_not_be_imported(run, url, new_app):
    result = run("doctor", "--json", broker=None, obj=App(new_app(url, include=["no_such_module"])))
    assert result.code == 1
    assert [each["what"] for each in result.json if each["level"] == "fail"] == ["tasks"]


def test_every_command_has_json_and_help_and_names_its_broker(run):
    for name in HOMES:
        command = fdb.get_command(None, name)
        for each in getattr(command, "commands", {name: command}).values():
            assert each.help, name
            options = {option for param in each.params for option in param.opts}
            assert {"--json", "--broker", "--broker-options"} <= options, each.name


# -- words -------------------------------------------------------------------------------------------------------------


# -- stored text never controls the terminal ---------------------------------------------------------------------------

EVIL = "\x1b]0;evil\x07\x1b[2J\x9b31m\r\x00\u202e"


def test_no_control_sequence_reaches_the_terminal(run, url, broker):
    headers = {EVIL: EVIL, "task": EVIL, "id": EVIL, "fair_key": EVIL}
    with Connection(url) as connection:
        for queue in ("jobs", EVIL):
            producer = connection.Producer()
            producer.publish(EVIL, routing_key=queue, headers=headers, content_type="text/plain" + EVIL)
            producer.publish({EVIL: EVIL}, routing_key=queue, headers=headers)
    job = broker.queue("jobs").take(0)
    job.bury(error=EVIL)
    commands = ["status", "queues", "keys jobs", "peek jobs --body", "sessions", "dead list jobs", "dead list"]
    commands += ["metrics --once", "top --once", "metrics --once --keys 5"]
    for command in commands:
        for options in ((), ("--json",)):
            result = run(*command.split(), *options)
            assert not [each for each in result.out if not each.isprintable() and each != "\n"], command
    for arguments in (("find", EVIL), ("dead", "show", "jobs", job.id.hex()), ("peek", EVIL, "--body"), ("keys", EVIL)):
        result = run(*arguments)
        assert not [each for each in result.out if not each.isprintable() and each != "\n"], arguments


def test_deep_json_is_shown_as_text(run, url):
    with Connection(url) as connection:
        for depth in (50, 150, 990, 100_000):
            body = b"[" * depth + b"]" * depth
            connection.Producer().publish(
                body, routing_key="jobs", content_type="application/json", content_encoding="utf-8"
            )
    for options in ((), ("--json",)):
        result = run("peek", "jobs", "--limit", "9", "--body", *options)
        assert result.code == 0, result.out
