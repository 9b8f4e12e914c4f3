"""The admin's pages by Django's test client: what they show, who may do what, and what is left in the log."""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from kombu_fdb import Broker
from kombu_fdb.model import Publication

pytestmark = pytest.mark.usefixtures("database")

SECRET = "4111-2222-3333"


def at(view: str, *arguments: str) -> str:
    from django.urls import reverse

    return reverse(f"admin:celery_fdb_{view}", args=arguments)


def text_of(answer: Any) -> str:
    """What a reader sees, nearly."""
    page = answer.content.decode()
    assert "INVALID-" not in page, re.findall(r".{80}INVALID-.{30}", page, re.DOTALL)
    body = re.sub(r"<(script|style|svg).*?</\1>", " ", page[page.index('id="content-start"') :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def get(client: Any, url: str, status: int = 200, **query: str) -> str:
    answer = client.get(url, query)
    assert answer.status_code == status, answer.content.decode()[-2000:]
    return text_of(answer)


def csrf(client: Any, url: str) -> str:
    found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', client.get(url).content.decode())
    assert found is not None
    return found[1]


def post(client: Any, queue: str, **fields: Any) -> Any:
    token = csrf(client, at("queue_changelist"))
    return client.post(at("queue_action", queue), {"csrfmiddlewaretoken": token, **fields}, follow=True)


def spots(client: Any, queue: str, **query: str) -> list[str]:
    page = client.get(at("queue_messages", queue), query).content.decode()
    return re.findall(r'name="selected" value="([^"]+)"', page)


def message_url(client: Any, queue: str, **query: str) -> str:
    page = client.get(at("queue_messages", queue), query).content.decode()
    found = re.search(r'href="([^"]+/message/[^"]+)"', page)
    assert found is not None
    return html.unescape(found[1])


def log() -> list[tuple[str, str]]:
    from django.contrib.admin.models import LogEntry

    return [(each.object_id, each.change_message) for each in LogEntry.objects.order_by("pk")]


def send(app: Celery, number: int = 1, queue: str = "celery", **options: Any) -> None:
    for _ in range(number):
        app.send_task("shop.charge", (SECRET,), {"card": SECRET}, queue=queue, **options)


def bury(broker: Broker, queue: str = "celery") -> None:
    while job := broker.queue(queue).take(timeout=0):
        job.bury(error="the card was declined")


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_queues_with_their_counters(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app, 3, headers={"fair_key": "acme"})
    send(app, 2, countdown=3600)
    send(app, 1, "other")
    broker.queue("celery").take(timeout=10)
    broker.queue("other").take(timeout=10).bury()
    broker.queue("x.celery.pidbox").put(b"")
    page = get(viewer, at("queue_changelist"))
    assert re.search(r"celery 2 2 1 0 [\d.]+ \w+", page), page
    assert re.search(r"other 0 0 0 1 \S", page), page
    assert "pidbox" not in page
    assert "Show 1 more" in page
    assert "x.celery.pidbox" in get(viewer, at("queue_changelist"), all="1")
    counts = viewer.get(at("queue_changelist"), {"format": "json"}).json()
    assert re.fullmatch(r"[\d.]+ \w+", counts["queues"]["celery"].pop("oldest"))
    assert counts == {
        "queues": {
            "celery": {"ready": 2, "delayed": 2, "leased": 1, "dead": 0},
            "other": {"ready": 0, "delayed": 0, "leased": 0, "dead": 1, "oldest": ""},
        },
        "sessions": 1,
    }


def test_a_queues_page_with_its_keys_and_limits(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app, 2, headers={"fair_key": "acme"})
    broker.queue("celery").limit("acme", max_in_flight=1, rate=2.5)
    broker.queue("celery").pause()
    page = get(viewer, at("queue_change", "celery"))
    assert "2 ready 0 delayed 0 leased 0 dead" in page
    assert "State paused" in page
    assert "acme 2 0 at most 1 in flight · 2.5/s, burst 1 · weight 1" in page


def test_keys_in_pages(broker: Broker, viewer: Any) -> None:
    for number in range(12):
        broker.queue("q").put(b"", key=f"k{number:02}")
    seen, query = [], {}
    for _ in range(4):
        page = viewer.get(at("queue_keys", "q"), query).content.decode()
        seen += re.findall(r"\?key=(k\d\d)", page)
        found = re.search(r'href="\?after=(\w+)" class="next"', page)
        if found is None:
            break
        query = {"after": found[1]}
    assert seen == [f"k{number:02}" for number in range(12)]


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_messages_in_pages_each_once_in_order(app: Celery, broker: Broker, operator: Any, order: str) -> None:
    ids = [app.send_task("shop.charge", (number,)).id for number in range(12)]
    seen: list[str] = []
    url = at("queue_messages", "celery") + f"?order={order}"
    while url:
        page = operator.get(url).content.decode()
        seen += re.findall(r'<code title="([\w-]{36})"', page)
        found = re.search(r'href="(\?[^"]*after=[^"]*)" class="next"', page)
        url = at("queue_messages", "celery") + html.unescape(found[1]) if found else ""
    assert seen == (ids if order == "oldest" else ids[::-1])


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_a_message_in_each_state(app: Celery, broker: Broker, viewer: Any, state: str) -> None:
    options = {"countdown": 3600} if state == "delayed" else {}
    send(app, headers={"fair_key": "acme", "api-token": SECRET}, **options)
    if state == "leased":
        broker.queue("celery").take(timeout=10)
    page = get(viewer, message_url(viewer, "celery", state=state))
    assert "shop.charge" in page
    assert f"celery , {state}" in page
    assert "Key acme" in page
    assert {"delayed": "Due", "leased": "by session"}.get(state, "") in page
    assert "content_type application/json" in page
    assert SECRET not in page


@pytest.mark.parametrize("seed", range(3))
def test_every_place_has_an_address(seed: int) -> None:
    """Its bytes are anything; the admin takes "_2f" in an address for a slash."""
    from django.contrib.admin.utils import unquote

    from kombu_fdb import Spot

    spot = Spot("leased", bytes(range(256)) + random.Random(seed).randbytes(512), b"\xfc" * 16)
    assert Spot.parse(unquote(str(spot))) == spot


def test_bodies_and_arguments_only_for_those_who_may_and_ask(
    app: Celery, broker: Broker, viewer: Any, operator: Any
) -> None:
    send(app)
    url = message_url(viewer, "celery")
    for client, query, shown in ((viewer, {}, 0), (viewer, {"body": "1"}, 0), (operator, {}, 0)):
        assert get(client, url, **query).count(SECRET) == shown
    assert "Show body" in get(operator, url)
    assert "Show body" not in get(viewer, url)
    page = get(operator, url, body="1")
    assert page.count(SECRET) == 4, "positional and by name, in the body and in two headers"
    assert '"callbacks": null' in page, "pretty JSON"


def test_bodies_may_be_hidden_from_all(app: Celery, url: str, configure: Any, operator: Any) -> None:
    configure(CELERY_FDB={"BROKER_URL": url, "SHOW_BODIES": False})
    send(app)
    assert SECRET not in get(operator, message_url(operator, "celery"), body="1")


def test_pickle_is_never_loaded(app: Celery, broker: Broker, operator: Any, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    app.conf.accept_content = ["pickle"]
    app.send_task("shop.charge", (Trap(),), serializer="pickle")
    page = get(operator, message_url(operator, "celery"), body="1")
    assert "pickle is never loaded" in page
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("payload", [b"\xff\x00 no envelope", b"", b"{}"])
def test_what_others_put_into_the_queue_is_shown_too(broker: Broker, operator: Any, payload: bytes) -> None:
    broker.queue("q").put(payload)
    page = get(operator, message_url(operator, "q"), body="1")
    assert "not published through Kombu" in page


def test_markup_in_a_message_is_text(app: Celery, broker: Broker, operator: Any) -> None:
    app.send_task("<script>alert(1)</script>", ("<b>",), headers={"fair_key": "<i>k</i>"})
    for url in (at("queue_messages", "celery"), message_url(operator, "celery") + "?body=1"):
        page = operator.get(url).content.decode()
        assert "<script>alert" not in page
        assert "<i>k" not in page
        assert "<b>" not in page


def test_a_queue_of_any_name_has_its_pages(broker: Broker, operator: Any) -> None:
    name = 'a/b?c=ü "d".dead#%2F'
    broker.queue(name).put(b"x", key="k/&?")
    page = operator.get(at("queue_changelist")).content.decode()
    url = html.unescape(re.findall(r'<th scope="row"><a href="([^"]+)"', page[page.index('id="content-start"') :])[0])
    assert name in get(operator, url)
    assert "k/&?" in get(operator, url.replace("/change/", "/keys/"))
    assert "not published through Kombu" in get(operator, url.replace("/change/", "/messages/"), key="k/&?")


def test_a_task_is_found_by_its_id(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app, 2)
    task_id = app.send_task("shop.charge", countdown=3600, headers={"fair_key": "acme"}).id
    page = get(viewer, at("queue_find"), id=f" {task_id} ")
    assert re.search(r"shop\.charge celery delayed acme [\d.]+ \w+ ago", page), page
    assert "no message of this task" in get(viewer, at("queue_find"), id="nobody's")
    assert "no message of this task" in get(viewer, at("queue_find"))


def test_sessions(broker: Broker, viewer: Any) -> None:
    import os

    broker.queue("q").put(b"a")
    assert "No process consumes" in get(viewer, at("session_changelist"))
    broker.queue("q").take(timeout=10)
    page = get(viewer, at("session_changelist"))
    assert re.search(rf"{os.getpid()} \S+ [\d.]+ \w+ ago \S+ 30 s 1 ", page), page


def test_dead_letters_with_their_history(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app)
    bury(broker)
    assert re.search(r"celery 1 [\d.]+ \w+ celery\.dead", get(viewer, at("deadletter_changelist")))
    assert re.search(r"rejected [\d.]+ \w+ ago", get(viewer, at("queue_messages", "celery.dead")))
    page = get(viewer, message_url(viewer, "celery.dead"))
    assert re.search(r"in celery rejected 1 time Error the card was declined", page), page


def test_a_failed_tasks_attempts_are_told_in_the_time_of_the_page(
    app: Celery, broker: Broker, viewer: Any, configure: Any
) -> None:
    configure(TIME_ZONE="Asia/Kolkata")
    send(app)
    (lease,) = (each._delivery.lease for each in broker.queue("celery").take_many(1, 10))
    attempts = [
        {"time": "2026-01-02T20:00:00.5+00:00", "error": "KeyError: 'card'"},
        {"time": "yesterday", "error": "gone"},
        "no attempt",
    ]
    told = {"error": "no card", "error_class": "shop.NoCard", "attempts": attempts, "worker": "w@h", "traceback": "..."}
    broker._engine.messages.reject([lease], **told)
    page = get(viewer, message_url(viewer, "celery.dead"))
    assert "Error shop.NoCard: no card Attempts 01:30:00 KeyError: 'card' gone Worker w@h Traceback Show ..." in page
    assert re.search(r"rejected NoCard [\d.]+ \w+ ago", get(viewer, at("queue_messages", "celery.dead")))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "arguments", "query"),
    [
        ("queue_messages", ["q"], {"state": "nonsense"}),
        ("queue_messages", ["q"], {"after": "nonsense"}),
        ("queue_message", ["q", "nonsense"], {}),
        ("queue_message", ["q", "ready.!!.!!"], {}),
        ("queue_message", ["q", "dead.00.00"], {}),
    ],
)
def test_an_address_nobody_gave_out_is_not_found(
    broker: Broker, viewer: Any, view: str, arguments: list[str], query: dict[str, str]
) -> None:
    assert viewer.get(at(view, *arguments), query).status_code == 404


def test_a_queue_that_is_gone_leads_back_to_the_others(broker: Broker, viewer: Any) -> None:
    answer = viewer.get(at("queue_change", "gone"), follow=True)
    assert answer.redirect_chain == [(at("queue_changelist"), 302)]
    assert "There is no queue “gone”" in text_of(answer)


def test_a_message_that_moved_says_so(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app)
    url = message_url(viewer, "celery")
    broker.queue("celery").take(timeout=10)
    assert "no longer here" in get(viewer, url, 404)


@pytest.mark.parametrize(
    ("settings", "says", "next_step"),
    [
        ({"BROKER_URL": "fdb+sqlite:////nowhere/broker.db"}, "not available", "mkdir"),
        pytest.param(
            {"BROKER_URL": "fdb://a:b@127.0.0.1:1/x", "CONNECT_TIMEOUT": 0.5},
            "not available",
            "fdbcli",
            marks=pytest.mark.foundationdb,
        ),
        ({"BROKER_URL": "redis://:hidden@localhost"}, "not a celery-fdb broker", "Set the app's broker_url"),
        ({"BROKER_URL": "fdb://", "OPTIONS": {"sesion_ttl": 3}}, "unknown option", "session_ttl"),
        ({"PAGESIZE": 3}, "unknown key", "PAGE_SIZE"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_page_with_the_next_step(
    configure: Any, operator: Any, settings: dict[str, Any], says: str, next_step: str
) -> None:
    configure(CELERY_FDB=settings)
    for url in (at("queue_changelist"), at("session_changelist"), at("queue_messages", "celery")):
        page = get(operator, url, 503)
        assert says in page.lower() or says in page
        assert next_step in page
        assert "Try again" in page
        assert "hidden" not in page


def test_a_store_of_a_newer_version_is_a_page_too(broker: Broker, viewer: Any) -> None:
    from celery_fdb.contrib.django.pages import store

    engine = broker._engine
    engine.transactions.write(lambda work: work.tr.set(engine.keys.format, b"999"))
    store.forget()
    assert "Upgrade celery-fdb" in get(viewer, at("queue_changelist"), 503)


def test_a_store_that_comes_back_is_shown_again(configure: Any, viewer: Any, tmp_path: Path) -> None:
    configure(CELERY_FDB={"BROKER_URL": f"fdb+sqlite:///{tmp_path}/later/broker.db"})
    get(viewer, at("queue_changelist"), 503)
    (tmp_path / "later").mkdir()
    assert "no queues yet" in get(viewer, at("queue_changelist"))


# -- who may -----------------------------------------------------------------------------------------------------------

PAGES = [
    ("queue_changelist",),
    ("deadletter_changelist",),
    ("session_changelist",),
    ("queue_change", "celery"),
    ("queue_keys", "celery"),
    ("queue_messages", "celery"),
    ("queue_messages", "celery.dead"),
]


def test_staff_without_permission_sees_nothing_and_gets_403(app: Celery, broker: Broker, login: Any) -> None:
    send(app)
    client = login()
    for page in PAGES:
        assert client.get(at(*page)).status_code == 403
    assert "Queues" not in get(client, "/admin/")
    assert client.post(at("queue_action", "celery"), {"action": "pause"}).status_code == 403


def test_who_is_not_staff_is_asked_to_log_in(broker: Broker, login: Any) -> None:
    client = login("view_queue", "manage_queue", staff=False)
    for page in PAGES:
        assert client.get(at(*page)).status_code == 302


def test_a_viewer_sees_no_buttons_and_may_not_act(app: Celery, broker: Broker, viewer: Any) -> None:
    from celery_fdb.operations.catalogue import DEEDS

    send(app, headers={"fair_key": "acme"})
    send(app, queue="q")
    bury(broker, "q")
    for page in [*PAGES[3:], ("queue_messages", "q.dead")]:
        content = viewer.get(at(*page)).content.decode()
        assert 'name="action"' not in content
        assert 'name="selected"' not in content
    token = csrf(viewer, at("queue_changelist"))
    for action in DEEDS:
        for confirmed in ({}, {"confirmed": "yes"}):
            fields = {"csrfmiddlewaretoken": token, "action": action, "selected": "ready.00.00", **confirmed}
            assert viewer.post(at("queue_action", "celery"), fields).status_code == 403
    assert log() == []
    assert not broker.queue("celery").control().paused


def test_actions_need_post_and_a_csrf_token(app: Celery, broker: Broker, operator: Any) -> None:
    send(app)
    fields = {"action": "pause", "confirmed": "yes"}
    assert operator.get(at("queue_action", "celery"), fields).status_code == 405
    assert operator.post(at("queue_action", "celery"), fields).status_code == 403
    assert not broker.queue("celery").control().paused
    assert log() == []


def test_the_entries_stand_in_the_admins_index(broker: Broker, viewer: Any) -> None:
    page = get(viewer, "/admin/")
    for name in ("Celery broker", "Queues", "Dead letters", "Sessions"):
        assert name in page


# -- actions -----------------------------------------------------------------------------------------------------------


def confirm(client: Any, queue: str, **fields: Any) -> str:
    """Asks, sees the question, says yes, and sees the page after it."""
    before = log()
    question = post(client, queue, **fields)
    assert "Are you sure?" in text_of(question)
    assert log() == before, "nothing happens before the answer"
    asked = re.findall(r'name="asked" value="([^"]*)"', question.content.decode())
    answer = post(client, queue, confirmed="yes", **fields, **({"asked": asked[0]} if asked else {}))
    assert answer.redirect_chain, text_of(answer)
    return text_of(answer)


def test_pause_and_resume_a_queue_and_a_key(app: Celery, broker: Broker, operator: Any) -> None:
    send(app, headers={"fair_key": "acme"})
    queue = broker.queue("celery")
    for key, paused in (
        ({}, lambda: queue.control().paused),
        ({"key": "acme"}, lambda: queue.keys()["acme"].limits.paused),
    ):
        assert "Paused" in confirm(operator, "celery", action="pause", **key)
        assert paused()
        assert queue.take(timeout=0) is None
        assert "Resumed" in confirm(operator, "celery", action="resume", **key)
        assert not paused()
    assert log() == [
        ("celery", "Paused celery."),
        ("celery", "Resumed celery."),
        ("celery", "Paused key 'acme' of celery."),
        ("celery", "Resumed key 'acme' of celery."),
    ]
    assert "Paused key 'acme' of celery." in get(operator, at("queue_history", "celery"))


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_cancel_what_is_selected(app: Celery, broker: Broker, operator: Any, state: str) -> None:
    options = {"countdown": 3600} if state == "delayed" else {}
    ids = [app.send_task("shop.charge", **options).id for _ in range(3)]
    if state == "leased":
        broker.queue("celery").take_many(3)
    chosen = spots(operator, "celery", state=state)[:2]
    page = confirm(operator, "celery", action="cancel", selected=chosen)
    assert "Cancelled 2 messages of celery" in page
    assert getattr(broker.queue("celery").stats(), state) == 1
    (entry,) = log()
    assert sum(f"shop.charge {each}" in entry[1] for each in ids) == 2


def test_replay_and_discard_dead_letters(app: Celery, broker: Broker, operator: Any) -> None:
    send(app, 3)
    bury(broker)
    first, second, _third = spots(operator, "celery.dead")
    assert "Replayed 1 dead letter to celery: shop.charge" in confirm(
        operator, "celery.dead", action="replay", selected=[second]
    )
    assert "Discarded 1 dead letter of celery.dead" in confirm(
        operator, "celery.dead", action="discard", selected=[first]
    )
    assert (broker.queue("celery").count(), broker.queue("celery.dead").count()) == (1, 1)
    assert "Replayed 1 dead letter of celery.dead" in confirm(operator, "celery.dead", action="replay_all")
    assert (broker.queue("celery").count(), broker.queue("celery.dead").count()) == (2, 0)
    bury(broker)
    assert "Discarded 2 dead letters of celery.dead" in confirm(operator, "celery.dead", action="discard_all")
    assert (broker.queue("celery").count(), broker.queue("celery.dead").count()) == (0, 0)
    assert [queue for queue, _ in log()] == ["celery.dead"] * 4


def test_dead_letters_of_an_exchange_are_found_and_replayed(app: Celery, broker: Broker, operator: Any) -> None:
    send(app, 2)  # declares its queue
    broker.declare("celery", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graves"})
    broker.declare("lost", arguments={"x-dead-letter-exchange": "nowhere"})
    bury(broker)
    assert re.search(r"celery 2 [\d.]+ \w+ graves", get(operator, at("deadletter_changelist")))
    first, _second = spots(operator, "graves")
    assert "Replayed 1 dead letter to celery" in confirm(operator, "graves", action="replay", selected=[first])
    assert (broker.queue("celery").count(), broker.queue("graves").count()) == (1, 1)


def test_a_replay_into_a_deleted_queue_is_refused_and_nothing_is_lost(
    app: Celery, broker: Broker, operator: Any
) -> None:
    send(app)
    bury(broker)
    chosen = spots(operator, "celery.dead")
    broker.queue("celery").drop()
    assert "does not exist" in confirm(operator, "celery.dead", action="replay", selected=chosen)
    assert broker.queue("celery.dead").count() == 1
    assert "failed" in log()[0][1]


def test_what_moved_meanwhile_is_left_alone_and_told(app: Celery, broker: Broker, operator: Any) -> None:
    send(app, 2)
    chosen = spots(operator, "celery")
    broker.queue("celery").take(timeout=10)
    page = confirm(operator, "celery", action="cancel", selected=chosen)
    assert "Cancelled 1 message of celery" in page
    assert "Left alone: 1 message that had moved meanwhile" in page
    assert (broker.queue("celery").stats().ready, broker.queue("celery").stats().leased) == (0, 1)


@pytest.mark.parametrize(
    "fields", [{"action": "cancel"}, {"action": "nonsense", "confirmed": "yes"}, {}, {"selected": "ready.00.00"}]
)
def test_an_action_without_what_it_needs_changes_nothing(
    app: Celery, broker: Broker, operator: Any, fields: dict[str, str]
) -> None:
    send(app)
    assert "Nothing was changed" in text_of(post(operator, "celery", **fields))
    assert log() == []


def test_replaying_what_is_no_dead_letter_is_refused_and_logged(app: Celery, broker: Broker, operator: Any) -> None:
    send(app)
    page = confirm(operator, "celery", action="replay", selected=spots(operator, "celery"))
    assert "Not a dead letter" in page
    assert broker.queue("celery").count() == 1
    assert "failed, not a dead letter" in log()[0][1]


def test_a_store_that_fails_during_an_action_is_in_the_log(
    app: Celery, broker: Broker, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kombu_fdb.engine.facade.queues import Queues
    from kombu_fdb.errors import StoreUnavailable

    def fail(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("it went away")

    send(app)
    monkeypatch.setattr(Queues, "change_control", fail)
    answer = post(operator, "celery", action="pause", confirmed="yes")
    assert answer.status_code == 503
    assert "may have been carried out" in text_of(answer)
    assert log() == [("celery", "Pause (celery): failed, it went away")]


@pytest.mark.parametrize("back", ["https://evil.example/", "//evil.example/", "javascript:alert(1)", "evil"])
def test_the_way_back_stays_on_this_site(app: Celery, broker: Broker, operator: Any, back: str) -> None:
    send(app)
    answer = post(operator, "celery", action="pause", confirmed="yes", back=back)
    assert answer.redirect_chain == [(at("queue_messages", "celery"), 302)]


def test_json_carries_no_bodies(app: Celery, broker: Broker, viewer: Any) -> None:
    send(app)
    assert SECRET not in json.dumps(viewer.get(at("queue_changelist"), {"format": "json"}).json())


def test_a_page_costs_the_same_in_a_queue_of_any_length(broker: Broker, viewer: Any) -> None:
    """The verbs behind it are counted in ``engine/inspection/test_pages.py``; here, that the page uses no other."""
    from kit.costs import CountingDatabase

    retry = broker._engine.transactions.retry
    counted = retry.database = CountingDatabase(retry.database)
    costs = []
    for number in (100, 20_000):
        while (missing := number - broker.queue("q").count()) > 0:
            broker._engine.publisher.publish([Publication("", "q", b"x", key="k")] * min(missing, 2_000))
        broker._engine.metrics.flush()  # rows that come about a second later otherwise
        costs.append(min(_cost(counted, viewer) for _ in range(10)))  # a read that was repeated counts twice
    assert costs[0] == costs[1]


def _cost(counted: Any, viewer: Any) -> tuple[int, int, int]:
    counted.reset()
    get(viewer, at("queue_messages", "q"))
    get(viewer, at("queue_messages", "q"), order="newest")
    get(viewer, at("queue_changelist"))
    get(viewer, at("queue_change", "q"))
    return counted.total().rows, counted.total().point_reads, len(counted.transactions)
