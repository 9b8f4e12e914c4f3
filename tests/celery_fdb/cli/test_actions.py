"""The commands for what the pages do: found, due at another moment, edited, published, deleted."""

import os
import subprocess
import sys

import pytest
from kit.left import bury

from celery_fdb.cli.actions import asked
from celery_fdb.inspection import filters as search_module
from kombu_fdb import Broker


@pytest.fixture
def url(tmp_path):
    """Each action is done to each store in ``tests/celery_fdb/operations``."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def app(url, new_app):
    return new_app(url)


def test_search(run, app, broker, monkeypatch):
    monkeypatch.setattr(search_module, "PART", 2)
    monkeypatch.setattr(search_module, "MOST_LOOKED_AT", 4)
    ids = [app.send_task("shop.pay" if number % 10 == 9 else "shop.mail").id for number in range(40)]
    found = run("search", "celery", "--task", "shop.pay", "--json").json
    assert [each["task_id"] for each in found] == ids[9::10]
    assert found[0]["size"] == run("find", ids[9], "--json").json[0]["size"]
    newest = run("search", "celery", "--task", "shop.*", "--newest", "--limit", "1", "--json").json
    assert newest[0]["task_id"] == ids[39]
    assert "looked through 40 messages, all there are" in run("search", "celery", "--task", "nobody").out
    assert "looked through 5 messages\n" in run("search", "celery", "--task", "nobody", "--most", "5").out
    shown = run("search", "celery", "--text", ids[3][:13], "--body", "--json").json
    assert [each["content"]["body"][0] for each in shown] == [[]]
    assert "\n  body: [[], {}," in run("search", "celery", "--text", ids[3][:13], "--body").out
    assert run("search", "celery", "--until", "2001-01-01", "--json").json == []
    assert len(run("search", "celery", "--since", "1h", "--limit", "9", "--json").json) == 9
    assert run("search", "celery", "--until", "1h", "--json").json == []
    assert run("search", "celery", "--since", "yesterday").code == 2
    assert run("search", "nowhere").code == 1


def test_a_task_runs_now_and_later(run, app, broker):
    task_id = app.send_task("shop.pay", countdown=3600).id
    assert run("reschedule", task_id, "2h", "--json").json == {"task_id": task_id, "changed": 1}
    assert 7000 < run("find", task_id, "--json").json[0]["due_in_s"] < 7300
    assert "Made 1 message of celery ready" in run("run-now", task_id).out
    assert broker.queue("celery").count() == 1
    result = run("run-now", task_id)
    assert (result.code, "no delayed message" in result.err) == (1, True)
    assert run("reschedule", task_id, "2001-01-01").code == 2
    assert run("reschedule", task_id, "2031-12-31T23:59").code == 0
    assert broker.queue("celery").stats().delayed == 1
    assert run("reschedule", "nobody", "2h").code == 1


def test_exit_code_1_means_that_no_message_of_the_task_was_changed(run, broker):
    queue = broker.queue("celery")
    queue.put("stays", task_id="t", delay=60)
    queue.put("expires", task_id="t", delay=60, ttl=600)
    result = run("reschedule", "t", "2h", "--json")
    assert (result.code, result.json["changed"]) == (0, 1)
    assert "Left as it is: the message expires before it is due" in result.err
    assert [each.payload for each in queue.peek(2, state="delayed")] == [b"expires", b"stays"]
    assert queue.delete(queue.page(state="delayed").messages[1].spot)
    result = run("reschedule", "t", "2h")
    assert (result.code, result.out) == (1, "")
    assert "Choose an earlier moment" in result.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_gone_changes_no_exit_code(tmp_path, options):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Broker.open(url) as broker:
        broker.queue("jobs").put("a")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "purge", "jobs", "--yes", *options]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    with Broker.open(url) as broker:
        assert broker.queue("jobs").count() == 0


def test_a_task_that_was_replayed_runs_now_and_later_and_a_dead_letter_does_not(run, app, broker):
    task_id = app.send_task("shop.pay").id
    queue = broker.queue("celery")
    queue.take(0).bury()
    for command in (["run-now", task_id], ["reschedule", task_id, "2h"]):
        assert run(*command).code == 1
    assert queue.dead_letters.replay() == 1
    assert run("reschedule", task_id, "2h", "--json").json["changed"] == 1
    assert run("run-now", task_id, "--json").json["changed"] == 1
    assert queue.count() == 1


@pytest.mark.parametrize("by", ["task", "message"])
def test_dead_edit(run, app, broker, by):
    task_id = app.send_task("shop.pay", (1,), {"a": 2}).id
    bury(broker, "celery")
    (letter,) = broker.queue("celery.dead").each()
    letter_id = task_id if by == "task" else letter.message_id.hex()
    assert run("dead", "edit", "celery", letter_id).code == 2
    assert run("dead", "edit", "celery", letter_id, "--args", "{}").code == 2
    assert run("dead", "edit", "celery", "00" * 16, "--args", "[3]").code == 1
    assert run("dead", "edit", "celery", letter_id, "--args", "[3]", "--json").json["replayed"] == 1
    assert run("peek", "celery", "--body", "--json").json[0]["content"]["body"][:2] == [[3], {"a": 2}]
    assert broker.queue("celery.dead").count() == 0


def test_dead_causes(run, app, broker):
    for task, error in (("shop.pay", "KeyError"), ("shop.pay", "KeyError"), ("shop.mail", "")):
        app.send_task(task)
        bury(broker, "celery", error_class=error)
    found = run("dead", "causes", "celery", "--json").json
    assert [(each["task"], each["error"], each["count"]) for each in found["causes"]] == [
        ("shop.pay", "KeyError", 2),
        ("shop.mail", "", 1),
    ]
    assert "counted 1 of 3 dead letters" in run("dead", "causes", "celery.dead", "--most", "1").out


def test_publish_tells_the_id_of_a_task_whose_name_has_spaces(run, broker):
    broker.declare("my jobs")
    task_id = run("publish", "my jobs", "pay the bill", "--json").json["task_id"]
    assert [each.queue for each in broker.find(task_id)] == ["my jobs"]


def test_publish_and_delete(run, broker):
    broker.declare("celery")
    published = run("publish", "celery", "shop.pay", "--args", "[1]", "--key", "acme", "--json").json
    (found,) = run("find", published["task_id"], "--body", "--json").json
    assert (found["key"], found["task"], found["content"]["body"][0]) == ("acme", "shop.pay", [1])
    assert run("publish", "nowhere", "shop.pay").code == 1
    assert run("publish", "celery", "shop.pay", "--kwargs", "[]").code == 2
    assert run("delete", "celery", given="n\n").code == 1
    assert run("delete", "celery", "--yes", "--json").json == {"queue": "celery", "deleted": 1}
    assert run("delete", "celery", "--yes").code == 1


# -- while a person is asked -------------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """What happens before the answer, which is yes. Returns the questions."""

    def meanwhile(happens):
        questions = []
        monkeypatch.setattr("click.confirm", lambda question, **_: (questions.append(question), happens()))
        return questions

    return meanwhile


def test_a_queue_that_fills_while_a_person_is_asked_is_not_deleted(run, broker, meanwhile):
    broker.declare("jobs").put("shown")
    meanwhile(lambda: broker.queue("jobs").put("late"))
    refused = run("delete", "jobs")
    assert refused.code == 1
    assert "not the messages that you were asked about" in refused.err
    assert broker.queue("jobs").count() == 2


@pytest.mark.usefixtures("a_second_later")
@pytest.mark.parametrize("given", [("--all",), ("--reason", "rejected"), ("--older-than", "0")])
def test_dead_letters_that_come_while_a_person_is_asked_stay(run, broker, meanwhile, given):
    def die(*payloads):
        broker.queue("jobs").put_many(payloads)
        bury(broker, "jobs")

    die(b"shown", b"shown")
    questions = meanwhile(lambda: die(b"late"))
    assert "Discarded 2 dead letters of jobs.dead" in run("dead", "discard", "jobs", *given).out
    (question,) = questions
    assert question.startswith("Delete 2 dead letters of jobs.dead ")
    assert [each.payload for each in broker.queue("jobs").dead_letters.list()] == [b"late"]


def test_a_dead_letter_that_comes_where_there_was_none_to_ask_about_stays(run, broker, monkeypatch):
    def then_one_dies(*given, **options):
        request = asked(*given, **options)
        jobs.put("late")
        jobs.take(0).bury()
        return request

    jobs = broker.declare("jobs")
    monkeypatch.setattr("celery_fdb.cli.actions.asked", then_one_dies)
    assert run("dead", "discard", "jobs", "--all", "--json").json["discarded"] == 0
    assert jobs.dead_letters.count().total() == 1


def test_a_person_is_asked_about_matches_behind_those_that_were_looked_at(run, app, broker, monkeypatch):
    for name in ("often", "often", "rare"):
        app.send_task(name)
        bury(broker, "celery")
    monkeypatch.setattr("celery_fdb.operations.action.MOST_LOOKED_AT", 2)
    refused = run("dead", "discard", "celery", "--task", "rare", given="n\n")
    assert refused.err.startswith("Delete at least 0 dead letters of celery.dead that match task=rare for good?")
    assert broker.queue("celery.dead").count() == 3
    assert run("dead", "discard", "celery", "--task", "rare", "--json", given="y\n").json["discarded"] == 1


def test_the_question_names_the_conditions_that_were_given(run, app, broker, meanwhile):
    app.send_task("shop.pay")
    bury(broker, "celery")
    questions = meanwhile(lambda: None)
    run("dead", "discard", "celery", "--reason", "rejected")
    assert questions == ["Delete 1 dead letter of celery.dead that match reason=failed or rejected for good?"]


def test_a_dead_letter_that_moves_while_a_person_is_asked_is_left_alone(run, app, broker, meanwhile):
    for name in ("stays", "goes"):
        app.send_task("shop.pay", task_id=name)
        bury(broker, "celery")
    questions = meanwhile(lambda: broker.queue("celery").dead_letters.replay(1))
    result = run("dead", "discard", "celery", "goes", "goes", "stays")
    assert questions == ["Delete 2 messages of celery.dead for good?"], "an id that is given twice is one"
    assert "Discarded 1 dead letter of celery.dead" in result.out
    assert "Left alone: 1 message that had moved" in result.out
    assert broker.queue("celery").count() == 1


def test_dead_letters_that_come_while_a_person_is_asked_are_not_replayed(run, broker, meanwhile, monkeypatch):
    monkeypatch.setattr("celery_fdb.cli.dead._is_terminal", lambda: True)
    jobs = broker.queue("jobs")
    jobs.put("shown")
    jobs.take(0).bury()

    def die():
        jobs.put("late", priority=9)
        jobs.take(0).bury()

    meanwhile(die)
    assert "replayed 1 message" in run("dead", "replay", "jobs").out
    assert [each.payload for each in jobs.dead_letters.list()] == [b"late"]
    assert [each.payload for each in jobs.peek(9)] == [b"shown"]


@pytest.mark.usefixtures("a_second_later")
@pytest.mark.parametrize(
    "command", [("discard", "jobs", "--all"), ("discard", "jobs", "--older-than", "0"), ("replay", "jobs")]
)
def test_nothing_is_done_to_the_rest_of_dead_letters_that_were_asked_about(
    run, broker, meanwhile, monkeypatch, command
):
    monkeypatch.setattr("celery_fdb.cli.dead._is_terminal", lambda: True)
    jobs = broker.queue("jobs")
    jobs.put_many([b"a", b"b"])
    bury(broker, "jobs")
    meanwhile(lambda: jobs.dead_letters.replay(1))
    refused = run("dead", *command)
    assert refused.code == 1
    assert "not the messages that you were asked about" in refused.err
    assert jobs.dead_letters.count().total() == 1
