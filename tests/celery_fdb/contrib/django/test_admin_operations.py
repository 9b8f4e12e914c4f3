"""The admin's pages that search and act: filters, causes of deaths, keys, and each deed with its form.

What the deeds do is tested in ``tests/celery_fdb/operations``, what a filter finds in ``tests/celery_fdb/inspection``;
here, that the pages lead there, ask, show, and let nobody do what they may not.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from celery import Celery

from celery_fdb.inspection import search as search_module
from celery_fdb.operations import parts
from celery_fdb.operations.catalogue import DEEDS
from kombu_fdb import Broker
from kombu_fdb.model import Publication

pytestmark = pytest.mark.usefixtures("database")

SECRET = "4111-2222-3333"
PAGES = "celery_fdb.contrib.django.pages"


def at(view: str, *arguments: str) -> str:
    from django.urls import reverse

    return reverse(f"admin:celery_fdb_{view}", args=arguments)


def text_of(answer: Any) -> str:
    page = answer.content.decode()
    assert "INVALID-" not in page, re.findall(r".{80}INVALID-.{30}", page, re.DOTALL)
    body = re.sub(r"<(script|style|svg).*?</\1>", " ", page[page.index('id="content-start"') :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def get(client: Any, view: str, *arguments: str, **query: str) -> str:
    answer = client.get(at(view, *arguments), query)
    assert answer.status_code == 200, answer.content.decode()[-2000:]
    return text_of(answer)


def post(client: Any, queue: str, **fields: Any) -> Any:
    page = client.get(at("queue_changelist")).content.decode()
    found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    assert found is not None
    return client.post(at("queue_action", queue), {"csrfmiddlewaretoken": found[1], **fields}, follow=True)


def spots(client: Any, queue: str, **query: str) -> list[str]:
    page = client.get(at("queue_messages", queue), query).content.decode()
    return re.findall(r'name="selected" value="([^"]+)"', page)


def log() -> list[str]:
    from django.contrib.admin.models import LogEntry

    return [each.change_message for each in LogEntry.objects.order_by("pk")]


def hidden(part: str) -> dict[str, str]:
    """What the first form of a part of a page would send."""
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', part[: part.index("</form>")])
    return {name: html.unescape(value) for name, value in found if name != "csrfmiddlewaretoken"}


def inputs(answer: Any) -> dict[str, str]:
    """What the form of a question would send."""
    page = answer.content.decode()
    form = page[
        page.index("<form", page.index('id="content-main"')) : page.index("</form>", page.index("content-main"))
    ]
    found = dict(re.findall(r'<textarea name="(\w+)"[^>]*>(.*?)</textarea>', form, re.DOTALL))
    for each in re.findall(r"<input[^>]+>", form):
        name, value = (re.search(rf'{attribute}="([^"]*)"', each) for attribute in ("name", "value"))
        if name is not None and name[1] != "csrfmiddlewaretoken":
            found[name[1]] = value[1] if value is not None else ""
    return {name: html.unescape(value) for name, value in found.items()}


def bury(broker: Broker, queue: str = "q", **details: Any) -> None:
    while jobs := broker.queue(queue).take_many(100, 0):
        broker._engine.messages.reject([each._delivery.lease for each in jobs], **details)


def causes(app: Celery, broker: Broker) -> None:
    for task, error, number in (("shop.pay", "shop.Declined", 3), ("shop.pay", "KeyError", 2), ("shop.mail", "", 4)):
        for _ in range(number):
            app.send_task(task, ({"card": SECRET},), queue="q")
        bury(broker, error_class=error)


# -- filters -----------------------------------------------------------------------------------------------------------


def test_messages_are_filtered(app: Celery, broker: Broker, viewer: Any) -> None:
    for task, key in (("shop.pay", "acme"), ("shop.mail", "acme"), ("news.send", "zoo")):
        app.send_task(task, queue="q", headers={"fair_key": key})
    page = get(viewer, "queue_messages", "q", filter="1", task="shop.*", key="", since="")
    assert "Filter: task=shop.*" in page
    assert page.count("shop.") == 3
    assert "news.send" not in page
    assert "Looked through 3 messages for this page, up to the last one" in page
    assert "news.send" in get(viewer, "queue_messages", "q", key="zoo")
    assert "None of these messages match" in get(viewer, "queue_messages", "q", key="")
    assert "None of these messages match" in get(viewer, "queue_messages", "q", until="2001-01-01")
    assert viewer.get(at("queue_messages", "q"), {"since": "yesterday"}).status_code == 422


def test_a_search_goes_on_where_it_has_stopped(
    app: Celery, broker: Broker, viewer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "PART", 2)
    monkeypatch.setattr(search_module, "MOST_LOOKED_AT", 4)
    for number in range(15):
        app.send_task("shop.rare" if number == 13 else "shop.often", queue="q")
    url, pages = at("queue_messages", "q") + "?task=shop.rare", 0
    while "shop.rare</a>" not in (page := viewer.get(url).content.decode()):
        assert "there are more" in page
        following = re.search(r'href="(\?[^"]*after=[^"]*)" class="next">Search on', page)
        assert following is not None
        url, pages = at("queue_messages", "q") + html.unescape(following[1]), pages + 1
    assert pages == 1


def test_moments_are_those_of_the_pages_time_zone(broker: Broker, viewer: Any, configure: Any) -> None:
    configure(TIME_ZONE="Asia/Kolkata")
    page = viewer.get(at("queue_messages", "q"), {"filter": "1", "since": "2026-01-02T03:04"}).content.decode()
    assert 'name="since" value="2026-01-02T03:04:00"' in page
    assert "since=2026-01-01T21:34:00+00:00" in page


# -- causes ------------------------------------------------------------------------------------------------------------


def test_dead_letters_by_cause(app: Celery, broker: Broker, viewer: Any, operator: Any) -> None:
    causes(app, broker)
    assert "By cause" in get(viewer, "deadletter_changelist")
    page = get(viewer, "queue_groups", "q.dead")
    assert "All 9 messages were counted" in page
    assert re.search(r"shop\.mail \S rejected 4 .* shop\.pay shop\.Declined rejected 3 .* KeyError rejected 2", page)
    assert "Replay all" not in page
    assert "Replay all" in get(operator, "queue_groups", "q.dead")
    assert "shop.mail" not in get(viewer, "queue_groups", "q.dead", filter="1", error="KeyError")
    assert "No dead letters match" in get(viewer, "queue_groups", "q.dead", reason="expired")
    assert "No dead letters" in get(viewer, "queue_groups", "nobody.dead")


def test_a_cause_leads_to_its_letters_and_to_one_of_them(app: Celery, broker: Broker, viewer: Any) -> None:
    causes(app, broker)
    page = viewer.get(at("queue_groups", "q.dead"), {"error": "Declined"}).content.decode()
    page = page[page.index('id="content-start"') :]
    listed = text_of(viewer.get(html.unescape(re.findall(r'<th scope="row"><a href="([^"]+)"', page)[0])))
    assert listed.count("Declined") == 1 + 3, "the filter, and each letter"
    example = re.search(r'href="([^"]+/message/[^"]+)"', page)
    assert example is not None
    assert "shop.Declined" in text_of(viewer.get(html.unescape(example[1])))


def test_the_page_says_among_how_many_it_has_counted(
    app: Celery, broker: Broker, viewer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes(app, broker)
    monkeypatch.setattr(f"{PAGES}.dead_letter_views.MOST_COUNTED", 5)
    page = get(viewer, "queue_groups", "q.dead")
    assert "Counted among the first 5 of 9 messages. Count more of them" in page
    assert "All 9 messages were counted" in get(viewer, "queue_groups", "q.dead", more="1")


def test_a_cause_is_replayed_as_a_whole(app: Celery, broker: Broker, operator: Any) -> None:
    causes(app, broker)
    page = operator.get(at("queue_groups", "q.dead"), {"error": "Declined"}).content.decode()
    fields = hidden(page.split("<tbody>")[1])
    question = post(operator, "q.dead", action="replay_all", **fields)
    assert "that match task='shop.pay', error='shop.Declined', reason='rejected'" in text_of(question)
    answer = post(operator, "q.dead", **inputs(question))
    assert "Replayed 3 dead letters" in text_of(answer)
    assert (broker.queue("q").count(), broker.queue("q.dead").count()) == (3, 6)
    assert log() == ["Replayed 3 dead letters of q.dead (task='shop.pay', error='shop.Declined', reason='rejected')."]


def test_a_cause_is_replayed_in_all_queues(app: Celery, broker: Broker, operator: Any) -> None:
    causes(app, broker)
    broker.queue("other").put(b"x")
    bury(broker, "other", error_class="shop.Declined")
    address = at("deadletter_causes")
    assert address in operator.get(at("deadletter_changelist")).content.decode()
    assert "other.dead" in operator.get(address, {"error": "Declined"}).content.decode()
    page = operator.get(address, {"error": "Declined", "task": "shop.*"}).content.decode()
    fields = hidden(page.split("<tbody>")[1])
    question = post(operator, "_", action="replay_everywhere", **fields)
    assert "Replay 3 dead letters of all queues of dead letters that match task='shop.pay'" in text_of(question)
    assert at("deadletter_causes") in question.content.decode()
    answer = post(operator, "_", **inputs(question))
    assert "Replayed 3 dead letters of all queues of dead letters" in text_of(answer)
    assert (broker.queue("q").count(), broker.queue("other.dead").count()) == (3, 1)


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "a\x00b"])
def test_a_form_leads_to_the_key_that_it_is_about(broker: Broker, operator: Any, key: str) -> None:
    """Browsers write line breaks as CRLF, and NUL not at all."""
    broker.queue("q").put(b"x", key=key)
    page = operator.get(at("queue_keys", "q")).content.decode()
    fields = dict(re.findall(r'<input type="hidden" name="([\w.]+)" value="([^"]*)"', page.split("<tbody>")[1]))
    assert fields["key.quoted"].isprintable()
    question = post(operator, "q", action="pause", **{"key.quoted": fields["key.quoted"]})
    post(operator, "q", **inputs(question))
    assert broker.queue("q").limits(key).paused


def test_all_that_match_are_discarded_and_cancelled(app: Celery, broker: Broker, operator: Any) -> None:
    causes(app, broker)
    page = operator.get(at("queue_messages", "q.dead"), {"error": "-"}).content.decode()
    assert "Discard all that match" in page
    question = post(operator, "q.dead", action="discard_all", error="-", state="ready")
    post(operator, "q.dead", **inputs(question))
    assert broker.queue("q.dead").count() == 5
    for task in ("a", "a", "b"):
        app.send_task(task, queue="q", countdown=3600)
    question = post(operator, "q", action="cancel_all", task="a", state="delayed")
    post(operator, "q", **inputs(question))
    assert broker.queue("q").stats().delayed == 1


def test_many_are_done_in_parts_if_the_user_goes_on(
    broker: Broker, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.in_parts, "__defaults__", (b"", 1))
    broker.queue("q").put_many([b"x"] * 700)
    broker.declare("other")
    question = post(operator, "q", action="move")
    assert "Move 700 waiting messages of q to the end of another queue" in text_of(question)
    first = post(operator, "q", **{**inputs(question), "target": "other"})
    assert "Moved 200 messages of q to other so far; the rest is still to be done." in text_of(first)
    assert "Go on?" in text_of(first)
    sent = inputs(first)
    assert sent["target"] == "other"
    while "so far" in text_of(answer := post(operator, "q", **sent)):
        sent = inputs(answer)
    assert "Moved 700 messages of q to other." in text_of(answer)
    assert broker.queue("other").count() == 700
    assert [each.endswith("to be done.") for each in log()] == [True, True, True, False]


# -- deeds with forms --------------------------------------------------------------------------------------------------


def test_run_now_and_reschedule(app: Celery, broker: Broker, operator: Any) -> None:
    for _ in range(2):
        app.send_task("shop.pay", queue="q", countdown=3600)
    first, second = spots(operator, "q", state="delayed")
    question = post(operator, "q", action="reschedule", selected=[second])
    assert "A date and time" in text_of(question)
    answer = post(operator, "q", **{**inputs(question), "due": "soon"})
    assert (answer.status_code, "no moment to be due at" in text_of(answer)) == (422, True)
    assert inputs(answer)["due"] == "soon"
    assert "Rescheduled 1 message" in text_of(post(operator, "q", **{**inputs(answer), "due": "2h"}))
    assert "Made 1 message" in text_of(post(operator, "q", action="run_now", selected=[first], confirmed="yes"))
    assert (broker.queue("q").stats().ready, broker.queue("q").stats().delayed) == (1, 1)


def test_edit_and_replay(app: Celery, broker: Broker, operator: Any) -> None:
    app.send_task("shop.pay", ({"card": SECRET},), queue="q")
    bury(broker)
    question = post(operator, "q.dead", action="edit", selected=spots(operator, "q.dead"))
    sent = inputs(question)
    assert json.loads(sent["args"]) == [{"card": SECRET}]
    answer = post(operator, "q.dead", **{**sent, "args": "[1"})
    assert (answer.status_code, inputs(answer)["args"]) == (422, "[1")
    answer = post(operator, "q.dead", **{**sent, "args": '[{"card": "<b>"}]'})
    assert "Replayed 1 dead letter to q with other arguments: shop.pay" in text_of(answer)
    (listed,) = broker.queue("q").page().messages
    assert b'[{"card": "<b>"}]' in listed.message.payload
    assert SECRET.encode() not in listed.message.payload
    assert not any(SECRET in each for each in log())


def test_arguments_are_edited_only_by_those_who_may_see_them(
    app: Celery, broker: Broker, login: Any, operator: Any, configure: Any, url: str
) -> None:
    app.send_task("shop.pay", ({"card": SECRET},), queue="q")
    bury(broker)
    manager = login("view_queue", "manage_queue")
    chosen = spots(manager, "q.dead")
    assert "Edit" not in get(manager, "queue_messages", "q.dead")
    assert "Edit and replay selected" in get(operator, "queue_messages", "q.dead")
    for fields in ({}, {"confirmed": "yes", "args": "[]", "kwargs": "{}"}):
        assert post(manager, "q.dead", action="edit", selected=chosen, **fields).status_code == 403
    assert (broker.queue("q.dead").count(), log()) == (1, [])
    configure(CELERY_FDB={"BROKER_URL": url, "SHOW_BODIES": False})
    assert post(operator, "q.dead", action="edit", selected=chosen).status_code == 403


def test_one_message_is_edited_at_a_time(app: Celery, broker: Broker, operator: Any) -> None:
    causes(app, broker)
    chosen = spots(operator, "q.dead")[:2]
    answer = post(operator, "q.dead", action="edit", selected=chosen, confirmed="yes", args="[]", kwargs="{}")
    assert "select one message" in text_of(answer)
    assert broker.queue("q.dead").count() == 9


def test_what_can_not_be_edited_says_why(broker: Broker, operator: Any) -> None:
    broker.queue("q").put(b"\xff")
    bury(broker)
    answer = post(operator, "q.dead", action="edit", selected=spots(operator, "q.dead"))
    assert "not published through Kombu" in text_of(answer)
    assert "Replay it as it is" in text_of(answer)


def test_limits_of_a_key_and_of_every_key(broker: Broker, operator: Any) -> None:
    broker.queue("q").put(b"x", key="acme")
    broker.queue("q").limit("acme", weight=3)
    question = post(operator, "q", action="limit", key="acme")
    sent = inputs(question)
    assert (sent["key"], sent["weight"], sent["rate"]) == ("acme", "3", "")
    answer = post(operator, "q", **{**sent, "rate": "fast"})
    assert (answer.status_code, "is not a rate" in text_of(answer)) == (422, True)
    post(operator, "q", **{**sent, "rate": "120/m", "max_in_flight": "2"})
    limits = broker.queue("q").limits("acme")
    assert (limits.rate, limits.max_in_flight, limits.weight) == (2.0, 2, 3)
    assert "at most 2 in flight · 2.0/s, burst 1 · weight 3" in get(operator, "queue_keys", "q")
    post(operator, "q", action="unlimit", key="acme", confirmed="yes")
    assert broker.queue("q").keys()["acme"].limits is None
    post(operator, "q", **{**inputs(post(operator, "q", action="limit")), "capacity": "9"})
    assert broker.queue("q").control().every_key.capacity == 9


def test_a_queue_is_purged_deleted_and_published_to(broker: Broker, operator: Any) -> None:
    broker.declare("q").put_many([b"x", b"y"])
    question = post(operator, "q", action="publish")
    post(operator, "q", **{**inputs(question), "task": "shop.pay", "args": "[1]"})
    assert broker.queue("q").count() == 3
    assert "shop.pay" in get(operator, "queue_messages", "q")
    assert "Deleted 3 messages of q." in text_of(post(operator, "q", **inputs(post(operator, "q", action="purge"))))
    back = at("queue_change", "q")
    question = post(operator, "q", action="delete_queue", back=back)
    broker.queue("q").put(b"late")
    anew = post(operator, "q", **inputs(question))
    assert "not the messages that you were asked about; nothing was changed (asked=0, there=1)" in text_of(anew)
    broker.queue("q").purge()
    answer = post(operator, "q", **inputs(anew))
    assert "Deleted q with 0 messages." in text_of(answer)
    assert "There is no queue" in text_of(answer)
    assert "q" not in broker.queues()


def test_keys_by_their_beginning(broker: Broker, viewer: Any) -> None:
    for key in [*(f"acme-{number}" for number in range(7)), "zoo"]:
        broker.queue("q").put(b"", key=key)
    first = viewer.get(at("queue_keys", "q"), {"prefix": "acme"}).content.decode()
    following = re.search(r'href="(\?[^"]*after=[^"]*)" class="next"', first)
    assert following is not None
    second = viewer.get(at("queue_keys", "q") + html.unescape(following[1])).content.decode()
    assert re.findall(r"\?key=([\w-]+)", first + second) == [f"acme-{number}" for number in range(7)]
    assert 'class="next"' not in second


def test_every_deed_of_a_page_leads_to_a_question(app: Celery, broker: Broker, operator: Any) -> None:
    """Buttons and choices name deeds that exist, and asking changes nothing."""
    causes(app, broker)
    app.send_task("shop.pay", queue="q", headers={"fair_key": "acme"})
    app.send_task("shop.pay", queue="q", countdown=3600)
    seen = set()
    for view, queue, query in (
        ("queue_change", "q", {}),
        ("queue_keys", "q", {}),
        ("queue_messages", "q", {}),
        ("queue_messages", "q", {"state": "delayed"}),
        ("queue_messages", "q.dead", {}),
        ("queue_groups", "q.dead", {}),
        ("deadletter_causes", "_", {}),
    ):
        address = at(view) if view == "deadletter_causes" else at(view, queue)
        page = operator.get(address, query).content.decode()
        names = set(re.findall(r'name="action" value="(\w+)"', page))
        names |= set(re.findall(r'<option value="(\w+)"', page))
        chosen = re.findall(r'name="selected" value="([^"]+)"', page)[:1]
        for name in names:
            question = post(operator, queue, action=name, selected=chosen, **query)
            assert "Are you sure?" in text_of(question), name
        seen |= names
    broker.queue("q").pause()
    assert "Resume" in get(operator, "queue_change", "q")
    assert seen == DEEDS.keys() - {"resume"}
    assert log() == []


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "query", "rows"),
    [  # and the queue's counter
        ("queue_messages", {"task": "rare"}, 6 + 10 * 201 + 1),
        ("queue_messages", {"key": "k00007"}, 1 + 1 + 1),
        ("queue_keys", {"prefix": "k0000"}, 6),
        ("queue_groups", {}, 501 + 501 + 1),
    ],
)
@pytest.mark.parametrize("number", [2_500, 10_000])
def test_a_page_reads_as_much_in_a_queue_of_any_length(
    request: pytest.FixtureRequest, broker: Broker, viewer: Any, number: int, view: str, query: Any, rows: int
) -> None:
    from kit.costs import CountingDatabase

    request.getfixturevalue("monkeypatch").setattr(f"{PAGES}.dead_letter_views.MOST_COUNTED", 1_000)
    for start in range(0, number, 500):
        batch = [Publication("", "q", b"x", key=f"k{each:05}") for each in range(start, start + 500)]
        broker._engine.publisher.publish(batch)
    broker._engine.metrics.flush()
    retry = broker._engine.transactions.retry
    counted = retry.database = CountingDatabase(retry.database)
    get(viewer, view, "q", **query)
    assert (counted.total().rows, counted.total().commits) == (rows, 0)
