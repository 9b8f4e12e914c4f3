"""Each action on both stores: what it does to the messages, and what it refuses."""

import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from kit.left import bury
from kombu import Consumer

from celery_fdb.inspection.filters import Cause, Filter, dead_queues, group, letters_in
from celery_fdb.inspection.message import MessageView
from celery_fdb.inspection.overview import look
from celery_fdb.operations import action as action_module
from celery_fdb.operations import queues
from celery_fdb.operations.action import Asked, AskedAnew, Request, log_audit
from celery_fdb.operations.catalogue import ACTIONS
from kombu_fdb import InvalidArgument, QueueError, QueueNotFound
from kombu_fdb.model import QueueControl
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.routing.tables import Exchange


def filled(broker, name, number, payload=b"x", **options):
    """With what the action is done to. Its queue."""
    broker.declare("other")
    broker.queue("q").put_many([payload] * number, **options)
    if not name.startswith(("replay", "discard")):
        return "q"
    bury(broker, "q")
    return "q.dead"


def receive(app, queue):
    """A message as a worker gets it."""
    received = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        consumer = Consumer(channel, [app.amqp.queues.new_missing(queue)], accept=["json"])
        consumer.register_callback(lambda _body, message: received.append(message) or message.ack())
        with consumer:
            while not received:
                connection.drain_events(timeout=30)
    return received[0]


def headers(broker, spot, queue="q"):
    listed = broker.queue(queue).at(spot)
    assert listed is not None
    row = MessageView.of(listed, 0)
    return row.envelope.headers


class Late(Clock):
    """Half of an action's time passes each time this clock is read."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += Request("").seconds / 2
        return self.now


# -- due at another moment ---------------------------------------------------------------------------------------------


def test_run_now_is_now_for_the_worker_too(app, broker, do, spots):
    sent = app.send_task("shop.charge", (1,), queue="q", countdown=3600, headers={"fair_key": "acme"})
    app.send_task("shop.charge", queue="q", countdown=3600)
    outcome = do("run_now", spots=spots("delayed")[:1], names={})
    assert (outcome.missed, broker.queue("q").stats().ready, broker.queue("q").stats().delayed) == (0, 1, 1)
    assert "Made 1 message of q ready" in outcome.text
    message = receive(app, "q")
    assert message.headers["id"] == sent.id
    assert message.headers["eta"] is None, "else the worker would hold it for an hour"
    assert message.payload[0] == [1]


@pytest.mark.parametrize("due", ["2h", "2031-05-06T07:08", "2031-05-06T07:08:00+02:00"])
def test_reschedule(app, broker, do, spots, due):
    app.send_task("shop.charge", queue="q", countdown=3600)
    broker.queue("q").put(b"no task", delay=3600)
    before = datetime.now(UTC)
    zone = timezone(timedelta(hours=-3))
    outcome = do("reschedule", spots=spots("delayed"), fields={"due": due}, zone=zone)
    assert outcome.text.startswith("Rescheduled 2 messages of q to 20")
    expected = {"2031-05-06T07:08": "2031-05-06T10:08+00:00", "2031-05-06T07:08:00+02:00": "2031-05-06T05:08+00:00"}
    for listed in broker.queue("q").page(state="delayed").messages:
        at = datetime.fromtimestamp(listed.due_ms / 1000, UTC)
        wanted = datetime.fromisoformat(expected[due]) if due in expected else before + timedelta(hours=2)
        assert abs((at - wanted).total_seconds()) < 60
    of_task = next(each for each in spots("delayed") if MessageView.of(broker.queue("q").at(each), 0).envelope)
    assert abs((datetime.fromisoformat(headers(broker, of_task)["eta"]) - at).total_seconds()) < 60


def test_what_has_moved_is_missed(broker, do, spots):
    broker.queue("q").put_many([b"a", b"b"], delay=3600)
    chosen = spots("delayed")
    broker.queue("q").delete(chosen[0])
    outcome = do("run_now", spots=chosen)
    assert (outcome.missed, broker.queue("q").count()) == (1, 1)
    assert "had moved" in outcome.text
    for name in ("edit",):
        assert do(name, spots=chosen[:1], fields={}).missed == 1


# -- edited and replayed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 200_000])
def test_edit_and_replay(app, broker, do, spots, size):
    sent = app.send_task("shop.charge", ("x" * size,), {"at": datetime(2026, 1, 2, tzinfo=UTC)}, queue="q", link=None)
    bury(broker, "q")
    (spot,) = spots(queue="q.dead")
    assert headers(broker, spot, "q.dead")["argsrepr"].startswith("('xxx" if size > 1 else "('x'")
    form = ACTIONS["edit"].form(broker, Request("q.dead", spots=[spot]))
    shown = {each.name: json.loads(each.value) for each in form}
    assert shown["args"] == ["x" * size]
    assert shown["kwargs"]["at"]["__type__"] == "datetime"
    kwargs = {**shown["kwargs"], "amount": 5}
    fields = {"args": '[42, "ü"]', "kwargs": json.dumps(kwargs)}
    outcome = do("edit", "q.dead", spots=[spot], fields=fields)
    assert outcome.text.startswith("Replayed 1 dead letter to q with other arguments")
    assert (broker.queue("q.dead").count(), broker.queue("q").count()) == (0, 1)
    message = receive(app, "q")
    assert message.headers["id"] == sent.id
    assert message.headers["argsrepr"] == "(42, 'ü')"
    assert "'amount': 5" in message.headers["kwargsrepr"]
    args, kwargs, embedded = message.payload
    assert (args, kwargs) == ([42, "ü"], {"at": datetime(2026, 1, 2, tzinfo=UTC), "amount": 5})
    assert "callbacks" in embedded


def test_what_a_publisher_hides_stays_hidden(app, broker, do, spots):
    app.send_task("shop.charge", (1,), {"card": "4111"}, queue="q", argsrepr="(card of ann)", kwargsrepr="{...}")
    bury(broker, "q")
    do("edit", "q.dead", spots=spots(queue="q.dead"), fields={"args": "[2]", "kwargs": '{"card": "4222"}'})
    found = headers(broker, *spots())
    assert (found["argsrepr"], found["kwargsrepr"]) == ("(edited)", "(edited)")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": "zlib"}, "compressed"),
        ({"serializer": "pickle"}, "python-serialize"),
        ({"serializer": "yaml"}, "yaml"),
    ],
)
def test_what_can_not_be_read_is_refused_with_the_next_step(app, broker, do, spots, options, reason):
    pytest.importorskip("yaml")
    app.send_task("shop.charge", (1,), queue="q", **options)
    bury(broker, "q")
    chosen = spots(queue="q.dead")
    for attempt in (
        lambda: do("edit", "q.dead", spots=chosen, fields={"args": "[2]"}),
        lambda: ACTIONS["edit"].form(broker, Request("q.dead", spots=chosen)),
    ):
        with pytest.raises(QueueError, match=reason) as caught:
            attempt()
        assert "Replay it as it is" in str(caught.value)
    assert broker.queue("q.dead").count() == 1


def test_strangers_are_not_edited(broker, do, spots):
    broker.queue("q").put_many([b"", b"\xff", b"{}"])
    bury(broker, "q")
    for spot in spots(queue="q.dead"):
        with pytest.raises(QueueError, match="not published through Kombu"):
            do("edit", "q.dead", spots=[spot], fields={})


def test_arguments_that_are_none_change_nothing(app, broker, do, spots):
    app.send_task("shop.charge", (1,), queue="q")
    bury(broker, "q")
    odd = [("args", each) for each in ("{}", "[1", "", "[" * 9_000)] + [("kwargs", each) for each in ("[]", "nothing")]
    for field in odd:
        with pytest.raises(InvalidArgument, match="JSON"):
            do("edit", "q.dead", spots=spots(queue="q.dead"), fields=dict([field]))
        assert broker.queue("q.dead").count() == 1, field


# -- many at once ------------------------------------------------------------------------------------------------------


def causes(app, broker):
    """Dead letters of two tasks and two errors."""
    for task, error, number in (("shop.pay", "shop.Declined", 3), ("shop.pay", "KeyError", 2), ("shop.mail", None, 4)):
        for _ in range(number):
            app.send_task(task, queue="q")
        bury(broker, "q", **({} if error is None else {"error_class": error}))


def test_a_group_is_replayed_and_nothing_else(app, broker, do):
    causes(app, broker)
    wanted = group(broker, ["q.dead"])[0][1].filter
    assert wanted == Filter(cause=Cause("shop.pay", "shop.Declined", "rejected"))
    assert Filter.of(wanted.fields()) == wanted
    action = ACTIONS["replay_all"]
    question = action.question(action.ask(broker, Request("q.dead", fields=wanted.fields())))
    assert (
        "Replay 3 dead letters of q.dead that match task='shop.pay', error='shop.Declined', reason='failed'" in question
    )
    outcome = do("replay_all", "q.dead", fields=wanted.fields())
    assert outcome.text.startswith("Replayed 3 dead letters of q.dead (task='shop.pay'")
    assert (broker.queue("q").count(), broker.queue("q.dead").count()) == (3, 6)
    assert {MessageView.of(each, 0).title for each in broker.queue("q").page().messages} == {"shop.pay"}


HOSTILE = ("shop.pay ", "shop.pay\u00a0", "shop.*", "*", "-", "pay", 'a", "b', "", "shop.pay\r\n")


@pytest.mark.parametrize("action", ["discard_all", "discard_everywhere"])
def test_a_cause_is_no_pattern_whatever_its_task_is_called(app, broker, do, action):
    """The publisher of a message chooses the name of its task, and could so destroy the letters of others."""
    left = {"shop.pay": 5, "shop.refund": 3, **dict.fromkeys(HOSTILE, 1)}
    for task, number in left.items():
        for _ in range(number):
            app.send_task(task, queue="q")
    bury(broker, "q", error_class="KeyError")
    for name in HOSTILE:
        (hostile,) = [each for each in group(broker, ["q.dead"])[0] if each.task == name]
        sent = hostile.filter.fields()
        assert do(action, "q.dead", fields=sent).text.split()[1] == "1"
        del left[name]
        assert {each.task: each.count for each in group(broker, ["q.dead"])[0]} == left, name


@pytest.mark.parametrize("name", ["replay_all", "replay_everywhere"])
def test_exactly_the_letters_that_the_question_was_about(app, broker, name):
    """What has died meanwhile of the same cause is left; if some are gone, nothing is done and what changed is told."""
    causes(app, broker)
    action, letters = ACTIONS[name], broker.dead_letters("q.dead")
    fields = group(broker, ["q.dead"])[0][1].filter.fields()
    asked = action.ask(broker, Request("q.dead", fields=fields))
    assert "3 dead letters of" in action.question(asked)
    causes(app, broker)
    assert letters.replay(1, error="shop.Declined") == 1
    with pytest.raises(AskedAnew, match=r"nothing was changed \(asked: 3, gone: 1, still there: 2\)"):
        action.perform(broker, asked, log_audit("ann"))
    assert letters.count(error="shop.Declined").total() == 5
    asked = action.ask(broker, Request("q.dead", fields=fields))
    assert "5 dead letters of" in action.question(asked)
    causes(app, broker)
    assert action.perform(broker, asked, log_audit("ann")).text.split()[1] == "5"
    assert letters.count(error="shop.Declined").total() == 4, "those of the last deaths, and the one that was back"


def test_what_a_worker_has_taken_meanwhile_does_not_stop_a_cancel(broker):
    broker.queue("q").put_many([b"x"] * 3)
    action = ACTIONS["cancel_all"]
    asked = action.ask(broker, Request("q"))
    broker.queue("q").take(0).ack()
    broker.queue("q").put(b"late")
    assert action.perform(broker, asked, log_audit("ann")).text.startswith("Cancelled 2 ready messages")
    assert broker.queue("q").count() == 1


def test_a_cause_that_a_page_did_not_send_is_refused():
    for cause in ("[", "{}", "[1, 2, 3]", '["a", "b"]', '["a", "b", "c", "d"]', "null", "3", '"abc"'):
        with pytest.raises(InvalidArgument, match="cause"):
            Filter.of({"cause": cause})


def review(broker):
    """A queue with messages of its own, to which another one's dead letters go."""
    broker.declare("review")
    broker.declare("r", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "review"})
    broker.queue("review").put_many([b"mine"] * 2)


def test_one_cause_is_counted_and_replayed_in_all_queues(app, broker, do):
    for queue in ("q", "r", "s"):
        for task in ("shop.pay", "shop.pay", "shop.mail"):
            app.send_task(task, queue=queue)
    review(broker)
    for queue in ("q", "r", "s"):
        bury(broker, queue, error_class="shop.Declined")
    queues = sorted(dead_queues(broker, look(broker)))
    assert queues == ["q.dead", "review", "s.dead"]
    groups, counted, is_whole = group(broker, queues, only_dead=True)
    assert [(each.task, each.count, each.queues) for each in groups] == [
        ("shop.pay", 6, {"q.dead": 2, "review": 2, "s.dead": 2}),
        ("shop.mail", 3, {"q.dead": 1, "review": 1, "s.dead": 1}),
    ]
    assert (counted, letters_in(broker, queues), is_whole) == (11, 11, True)
    wanted = groups[0].filter.fields()
    request = Request(ACTIONS["replay_everywhere"].target("whatever"), fields=wanted)
    action = ACTIONS["replay_everywhere"]
    asked = "Replay 6 dead letters of all queues that match task='shop.pay'"
    assert asked in action.question(action.ask(broker, request))
    outcome = do("replay_everywhere", fields=wanted)
    assert outcome.text.startswith("Replayed 6 dead letters")
    assert [broker.queue(each).count() for each in ("q", "r", "s")] == [2, 2, 2]
    assert broker.queue("review").count() == 3, "its own, and a letter of another cause"
    assert do("discard_everywhere").text.startswith("Discarded 3 dead letters")
    assert [each.payload for each in broker.queue("review").each()] == [b"mine"] * 2


def test_what_has_come_back_to_be_tried_again_is_no_dead_letter(broker, do):
    """Its queue's dead letters wait in another one, whose own lead back."""
    for queue, leads_to in (("work", "retry"), ("retry", "work")):
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": leads_to}
        broker.declare(queue, arguments=arguments).put_many([queue.encode()] * 2)
    bury(broker, "work")
    assert broker.queue("retry").count() == 4
    for job in broker.queue("retry").take_many(3, 0):
        job.bury()
    assert [broker.queue(each).count() for each in ("work", "retry")] == [3, 1]
    # One of those in "work" comes from there, and two of "retry" died there: they are dead letters in "work".
    (group_,) = group(broker, sorted(dead_queues(broker, look(broker))), only_dead=True)[0]
    assert group_.queues == {"retry": 1, "work": 2}
    assert do("discard_everywhere").text.startswith("Discarded 3 dead letters")
    assert [each.payload for each in broker.queue("work").each()] == [b"work"]


@pytest.mark.parametrize("routing_key", ["", "graves"])
def test_the_queue_behind_a_dead_letter_exchange_is_found_by_any_routing_key(broker, routing_key):
    broker.topology.declare_exchange(Exchange("dlx"))
    broker.declare("graves")
    broker.topology.bind("graves", "dlx", routing_key)
    arguments = {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": routing_key}
    broker.declare("q", arguments=arguments).put(b"x")
    bury(broker, "q")
    assert broker.queue("graves").count() == 1
    assert dead_queues(broker, look(broker)) == {"graves": {"q"}}


def test_where_the_queue_is_gone_letters_stay_and_all_others_go(broker, do):
    for queue in ("a", "b", "c"):
        broker.queue(queue).put_many([b"x"] * 250)
        bury(broker, queue)
    broker.queue("b").drop()
    mark, texts = "", []
    while True:
        outcome = do("replay_everywhere", mark=mark, clock=Late())
        texts.append(outcome.text)
        if not (mark := outcome.following):
            break
    assert len(texts) >= 2
    assert "Replayed 500 dead letters" in texts[-1]
    assert "Some stay in b.dead: the queue to replay to does not exist" in " ".join(texts)
    assert [broker.queue(each).count() for each in ("a", "b.dead", "c")] == [250, 250, 250]


def test_all_queues_are_counted_at_a_bounded_cost(broker):
    for number in range(6):
        broker.queue(f"q{number}").put_many([b"x"] * 30)
        bury(broker, f"q{number}")
    queues = [f"q{number}.dead" for number in range(6)]
    groups, counted, is_whole = group(broker, queues, most=100, only_dead=True)
    assert (counted, letters_in(broker, queues), is_whole) == (100, 180, False)
    assert list(groups[0].queues.values()) == [30, 30, 30, 10]


@pytest.mark.parametrize("most_named", [10_000, 1])
@pytest.mark.parametrize("name", ["purge", "cancel_all", "replay_all", "replay_everywhere", "discard_everywhere"])
def test_what_comes_while_a_person_is_asked_stays(broker, spots, name, most_named, monkeypatch):
    """Also where there are too many to be named one by one."""
    monkeypatch.setattr("celery_fdb.operations.action.MOST_NAMED", most_named)
    queue, action = filled(broker, name, 3, b"shown"), ACTIONS[name]
    is_dead = queue == "q.dead"
    request = action.ask(broker, Request(action.target(queue)))
    assert re.search(r"(3|at least 2) (waiting messages|ready messages|dead letters)", action.question(request))
    broker.queue("q").put(b"late")
    if is_dead:
        bury(broker, "q")
    action.perform(broker, request, log_audit("ann"))
    assert [each.message.payload for each in broker.queue(queue).page().messages] == [b"late"]
    assert len(spots(queue="q")) == (3 if name.startswith("replay") else 0 if is_dead else 1)


@pytest.mark.parametrize("delay", [0, 3600])
def test_a_queue_is_not_deleted_with_others_than_were_asked(broker, delay):
    """Though they are no more than that."""
    action, jobs = ACTIONS["delete_queue"], broker.declare("q")
    jobs.put_many([b"shown"] * 2)
    request = action.ask(broker, Request("q"))
    for job in jobs.take_many(2, 0):
        job.ack()
    jobs.put(b"late", delay=delay)
    with pytest.raises(AskedAnew, match="asked: 2, there: 1"):
        action.perform(broker, request, log_audit("ann"))
    assert jobs.stats().ready + jobs.stats().delayed == 1


@pytest.mark.parametrize("key", [None, "acme"])
def test_no_more_is_moved_than_was_asked(broker, key):
    action = ACTIONS["move"]
    broker.declare("other")
    broker.queue("q").put_many([b"shown"] * 3, key="acme")
    broker.queue("q").put_many([b"shown"] * 2, key="acme-2")
    request = action.ask(broker, Request("q", key=key, fields={"target": "other"}))
    number = 5 if key is None else 3
    assert action.question(request).startswith(f"Move {number} waiting messages of ")
    broker.queue("q").put_many([b"late"] * 400, key="acme")
    taken = broker.queue("q").take_many(2, 0)  # what comes meanwhile does not stand in for them
    broker.queue("q").put_many([b"late"] * 4, key="acme")
    shown = sum(each.payload == b"shown" for each in broker.queue("q").peek(1000, key=key))
    assert shown + sum(key in (None, each.key) for each in taken) == number
    outcome = action.perform(broker, request, log_audit("ann"))
    assert (outcome.following, outcome.text.split()[1]) == ("", str(shown))
    assert {each.payload for each in broker.queue("other").peek(1000)} == {b"shown"}


@pytest.mark.parametrize("name", [each for each, action in ACTIONS.items() if action.by_filter or action.on_whole])
def test_an_action_on_many_without_its_question_is_not_done(broker, name):
    action = ACTIONS[name]
    broker.declare("other")
    broker.queue("q").put(b"x")
    bury(broker, "q")
    broker.queue("q").put(b"x")
    queue = "q" if action.on_whole or action.on_waiting else "q.dead"
    given = [{}, *({"asked": each} for each in ("", "x", "1", "1.-", "-.-.-", "1.-.xy", "9" * 5_000 + ".-."))]
    for asked in given:
        request = Request(action.target(queue), fields={"target": "other", **asked})
        with pytest.raises(InvalidArgument, match="no question was asked"):
            action.perform(broker, request, log_audit("eve"))
        assert (broker.queue("q").count(), broker.queue("q.dead").count()) == (1, 1), asked


@pytest.mark.parametrize("name", ["replay_all", "purge", "move", "cancel_all"])
def test_many_are_done_in_parts_that_tell_how_far_they_are(broker, do, name, monkeypatch):
    monkeypatch.setattr(action_module, "MOST_PARTS", 1)
    number = 1_050
    queue = filled(broker, name, number)
    broker.queue("other").put(b"there")
    mark, steps = "", 0
    while True:
        outcome = do(name, queue, mark=mark, fields={"target": "other"})
        steps += 1
        if steps == 1:  # what comes now is not among those that were there when it was asked for
            broker.queue(queue).put(b"late")
        if not outcome.following:
            break
        assert "so far" in outcome.text
        mark = outcome.following
        assert int(mark.partition(".")[0]) <= number
    assert steps >= 3
    assert "so far" not in outcome.text
    assert f"{number:,}" in outcome.text
    assert broker.queue(queue).count() == 1


@pytest.mark.parametrize(("name", "number"), [("replay_all", 400), ("purge", 1_000), ("move", 400), ("cancel_all", 2)])
def test_when_the_time_is_over_an_action_tells_how_far_it_is(broker, do, name, number):
    """However long the store takes for each part, the person who asked is still there to read the answer."""
    queue = filled(broker, name, 1_100)
    outcome = do(name, queue, fields={"target": "other"}, clock=Late())
    assert f" {number:,} " in outcome.text
    assert " so far" in outcome.text
    assert broker.queue(queue).count() == 1_100 - number
    while outcome.following:
        outcome = do(name, queue, mark=outcome.following, fields={"target": "other"})
    assert "1,100" in outcome.text
    assert broker.queue(queue).count() == 0


@pytest.mark.parametrize("name", ["replay", "discard", "cancel", "run_now", "reschedule"])
def test_what_was_selected_and_not_reached_in_time_is_left_and_told(broker, do, spots, name):
    is_dead = name in {"replay", "discard"}
    queue, state = filled(broker, name, 5, delay=0 if is_dead else 3600), "ready" if is_dead else "delayed"
    chosen = spots(state, queue)
    broker.queue(queue).delete(chosen[0])
    outcome = do(name, queue, spots=chosen, fields={"due": "2h"}, clock=Late())
    assert outcome.missed == 1
    assert outcome.text.endswith("Not reached in time: 3 messages; select them again to go on.")
    again = do(name, queue, spots=chosen[2:], fields={"due": "3h"})
    assert (again.missed, " 3 " in again.text) == (0, True)


def test_a_part_that_fails_tells_what_was_done_and_loses_nothing(app, broker, do, monkeypatch):
    for queue in ("a", "b"):
        broker.declare(queue, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graves.dead"})
        broker.queue(queue).put_many([b"x"] * 300)
        bury(broker, queue)
    broker.queue("b").drop()
    with pytest.raises(QueueNotFound) as caught:
        do("replay_all", "graves.dead")
    assert caught.value.attributes["done"] == 200
    assert (broker.queue("a").count(), broker.queue("graves.dead").count()) == (200, 400)
    assert do("replay_all", "graves.dead", fields={"home": "a"}).text.startswith("Replayed 100 dead letters")


@pytest.mark.parametrize("name", ["replay_all", "replay_everywhere", "purge", "move"])
def test_an_invented_mark_does_no_harm(broker, do, name):
    broker.queue("other").put(b"mine")
    for mark in ("x", "1", "1.zz", ".", "-.00", "9" * 5_000, "5.00ff", "0." + "ff" * 30):
        broker.queue("q").put(b"x")
        with suppress(InvalidArgument, QueueError):
            do(name, "q", mark=mark, fields={"target": "third"})
        assert (broker.queue("other").count(), broker.queue("third").count()) == (1, 0), mark


@pytest.mark.parametrize("number", ["-100", "1000000"])
@pytest.mark.parametrize("name", ["replay_all", "discard_everywhere", "purge", "move", "cancel_all"])
def test_the_audit_counts_what_this_request_has_done(broker, do, name, number, caplog):
    """The running number comes from the form, and a person who may act could send any number."""
    queue = filled(broker, name, 5)
    begin = f"{number}.{(5).to_bytes(8, 'big').hex() if name == 'move' else ''}"
    with caplog.at_level("INFO", "celery_fdb.audit"), suppress(InvalidArgument):
        do(name, queue, mark=begin, fields={"target": "other"})
    (_begun, ended) = caplog.messages
    assert f"ed {5 - broker.queue(queue).count()} " in ended or "no mark of an action" in ended
    assert "1,000,00" not in ended


@pytest.mark.parametrize("state", ["ready", "delayed"])
def test_cancel_all_that_match_and_tell_their_results(app, broker, do, state):
    countdown = {"countdown": 3600} if state == "delayed" else {}
    gone = [app.send_task("shop.pay", queue="q", **countdown) for _ in range(3)]
    kept = app.send_task("shop.mail", queue="q", **countdown)
    outcome = do("cancel_all", app=app, fields={"task": "shop.pay", "state": state})
    assert outcome.text == f"Cancelled 3 {state} messages of q. Their results, if any, became REVOKED."
    assert {each.state for each in gone} == {"REVOKED"}
    assert (kept.state, getattr(broker.queue("q").stats(), state)) == ("PENDING", 1)


def test_an_action_on_all_refuses_a_key(broker, do):
    """Its question would be about the key, and it would act on the whole queue."""
    for key in ("acme", "other"):
        broker.queue("q").put("a", key=key)
    on_all = [each for each in ACTIONS.values() if not each.takes_key]
    assert on_all
    for action in on_all:
        refusal = f"{action.label} is not for one key"
        with pytest.raises(InvalidArgument, match=refusal):
            action.question(Request("q", key="acme"))
        with pytest.raises(InvalidArgument, match=refusal):
            do(action.name, key="acme")
        assert broker.queue("q").count() == 2, action.name


# -- queues ------------------------------------------------------------------------------------------------------------


def test_nothing_is_trimmed_away_by_a_move(broker, do):
    broker.declare("small", arguments={"x-max-length": 1})
    broker.queue("q").put_many([b"x", b"y"])
    with pytest.raises(QueueError, match="no room"):
        do("move", fields={"target": "small"})
    assert broker.queue("q").count() == 2
    broker.queue("q").put(b"z", key="a")
    do("move", key="a", fields={"target": "small"})
    assert broker.queue("small").count() == 1, "others of its queue need none"


@pytest.mark.parametrize(("asked", "delay"), [(0, 3600), (2, 0)])
def test_what_comes_while_a_queue_is_deleted_stays_with_it(broker, do, monkeypatch, asked, delay):
    broker.declare("q")
    if asked:
        broker.queue("q").put_many([b"x"] * asked)
        broker.queue("elsewhere").put(b"z", delay=3600)
    looked = Asked.includes_all_of

    def look_and_be_late(asked, queue):
        found = looked(asked, queue)
        queue.put(b"late", delay=delay)
        return found

    monkeypatch.setattr(Asked, "includes_all_of", look_and_be_late)
    with pytest.raises(QueueError, match="in use"):
        do("delete_queue")
    counts = broker.queue("q").stats()
    assert (counts.ready + counts.delayed, "q" in broker.queues()) == (asked + 1, True)
    monkeypatch.setattr(Asked, "includes_all_of", lambda *_: bool(broker.queue("elsewhere").put(b"z", delay=3600)))
    assert do("delete_queue").text.startswith("Deleted q with "), "what comes elsewhere is no matter"


def test_delete_a_queue(broker, do, monkeypatch):
    broker.queue("q").put_many([b"x", b"y"])
    monkeypatch.setattr(queues, "MOST_DELETED", 1)
    with pytest.raises(QueueError, match="Purge it first"):
        do("delete_queue")
    monkeypatch.undo()
    job = broker.queue("q").take(0)
    with pytest.raises(QueueError, match="in use"):
        do("delete_queue")
    job.release()
    assert do("delete_queue").text == "Deleted q with 2 messages."
    assert "q" not in broker.queues()


def test_publish_a_task(app, broker, do, spots):
    broker.declare("q")
    fields = {"task": "shop.charge", "args": "[1, 2]", "kwargs": '{"a": "ü"}', "fair_key": "acme", "priority": "7"}
    outcome = do("publish", fields=fields)
    assert outcome.text.startswith("Published shop.charge ")
    (listed,) = broker.queue("q").page().messages
    assert (listed.message.key, listed.priority, listed.message.task_id in outcome.text) == ("acme", 7, True)
    message = receive(app, "q")
    assert message.payload[:2] == [[1, 2], {"a": "ü"}]
    assert (message.headers["task"], message.headers["argsrepr"]) == ("shop.charge", "(1, 2)")
    do("publish", fields={"task": "shop.charge", "delay": "1h"})
    assert broker.queue("q").stats().delayed == 1


@pytest.mark.parametrize(
    ("known", "said"),
    [(["shop.charge [rate_limit=1/s]"], False), (["shop.charge2"], True), (None, False)],
    ids=["known", "unknown", "no worker answers"],
)
def test_a_task_that_no_worker_knows_is_said(app, broker, monkeypatch, known, said):
    answers = None if known is None else {"w@test": ["shop.refund"], "v@test": known}
    monkeypatch.setattr(app.control, "inspect", lambda timeout: SimpleNamespace(registered=lambda: answers))
    broker.declare("q")
    publish, request = ACTIONS["publish"], Request("q", app=app, fields={"task": "shop.charge"})
    if said:
        with pytest.raises(AskedAnew, match="nothing was done yet"):
            publish.perform(broker, request, log_audit("ann"))
        request = publish.ask(broker, request)
        assert "No worker that answered knows a task shop.charge" in publish.question(request)
        with pytest.raises(AskedAnew):
            publish.perform(
                broker, request._replace(fields={**request.fields, "task": "shop.chrage"}), log_audit("ann")
            )
        assert not broker.queue("q").count()
    publish.perform(broker, request, log_audit("ann"))
    assert broker.queue("q").count() == 1


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pause", "resume", "limit", "unlimit"])
def test_what_is_set_on_a_queue_that_another_person_has_deleted_is_refused(broker, do, name):
    """Else the next queue of that name would be paused from its beginning."""
    broker.declare("q").drop()
    for key in (None, "acme"):
        with pytest.raises(QueueNotFound):
            do(name, key=key)
    assert broker.declare("q").control() == QueueControl()


def test_messages_without_a_key_are_counted_and_moved(broker, do):
    broker.queue("q").put_many([b"none"] * 3)
    broker.queue("q").put_many([b"acme"] * 2, key="acme")
    broker.declare("other")
    request = Request("q", key="", fields={"target": "other"})
    question = ACTIONS["move"].question(ACTIONS["move"].ask(broker, request))
    assert question.startswith("Move 3 waiting messages of key '' of q")
    assert do("move", key="", fields={"target": "other"}).text.startswith("Moved 3 messages")
    assert [broker.queue(each).count() for each in ("q", "other")] == [2, 3]


@pytest.mark.parametrize("key", [None, "", "acme"])
def test_limits_as_the_form_has_them(broker, do, key):
    queue = broker.declare("q")
    queue.pause("acme")
    given = {"weight": "3", "max_in_flight": "2", "rate": "90/m", "burst": "", "capacity": "5", "priority": ""}
    if key == "":  # it has none
        given["capacity"] = ""
    outcome = do("limit", key=key, fields=given)
    assert "weight 3, max_in_flight 2, rate 1.5/s, burst 1" in outcome.text
    limits = queue.limits(key)
    assert (limits.weight, limits.max_in_flight, limits.rate, limits.burst) == (3, 2, 1.5, 1)
    assert (limits.capacity, limits.priority, limits.paused) == (None if key == "" else 5, None, key == "acme")
    form = ACTIONS["limit"].form(broker, Request("q", key=key))
    assert {each.name: each.value for each in form} == {**given, "rate": "1.5/s", "burst": "1"}
    do("limit", key=key, fields={each.name: each.value for each in form})
    assert queue.limits(key) == limits
    if key == "acme":
        with pytest.raises(QueueError, match="Resume it first"):
            do("unlimit", key=key)
        queue.resume(key)
    do("unlimit", key=key)
    assert queue.limits(key).max_in_flight is None


def test_an_unedited_form_of_limits_changes_none(broker, do):
    queue = broker.declare("q")
    for rate, shown in ((1_234_567.5, "1234567.5/s"), (10 / 60, "10/m"), (1 / 3, "20/m"), (0.123456789012345, None)):
        queue.limit("acme", rate=rate)
        form = {each.name: each.value for each in ACTIONS["limit"].form(broker, Request("q", key="acme"))}
        assert form["rate"] == (shown or str(rate))
        do("limit", key="acme", fields=form)
        assert queue.limits("acme").rate == rate


def test_unedited_arguments_stay_as_they_are(app, broker, do, spots):
    args = ["\ud800x", "a\r\n\0", "ü", 10**30]
    app.send_task("shop.charge", args, queue="q")
    bury(broker, "q")
    form = ACTIONS["edit"].form(broker, Request("q.dead", spots=spots(queue="q.dead")))
    sent = {each.name: each.value.encode(errors="replace").decode() for each in form}  # as a page can hold it
    do("edit", "q.dead", spots=spots(queue="q.dead"), fields=sent)
    assert receive(app, "q").payload[0] == args


# -- what makes no sense -----------------------------------------------------------------------------------------------

NONSENSE = {
    "reschedule": [("due", each) for each in ("", "soon", "2001-01-01", "-5m", "9" * 50, "9999999999d", "2031-99-01")],
    "publish": [
        ("task", ""),
        ("args", "1"),
        ("kwargs", "[]"),
        ("delay", "soon"),
        ("priority", "11"),
        ("priority", "x"),
    ],
    "limit": [
        *(("weight", "0"), ("weight", "x"), ("rate", "fast"), ("rate", "nan"), ("rate", "1/y"), ("priority", "12")),
        *(("max_in_flight", "-1"), ("capacity", "9" * 20), ("burst", "²")),
    ],
    "cancel_all": [("state", "leased"), ("state", "all")],
    "move": [("target", ""), ("target", "nowhere"), ("target", " q"), ("target", "q")],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_makes_no_sense_is_refused_and_changes_nothing(broker, do, spots, name):
    for delay in (0, 3600):
        broker.declare("q").put(b"x", delay=delay)
    before = broker.queues(), broker.queue("q").limits("k")
    for field, value in NONSENSE[name]:
        error = InvalidArgument if name != "move" else QueueError if value == "q" else QueueNotFound
        fields = {"task": "a", field: value} if name == "publish" else {field: value}
        with pytest.raises(error):
            do(name, key="k" if name == "limit" else None, spots=spots("delayed"), fields=fields)
        assert (broker.queues(), broker.queue("q").limits("k")) == before, (field, value)
