"""The dashboard as Django's pages: its users, permissions, CSRF, messages and log; at the admin and at other addresses.

What the pages show and do is tested in ``tests/celery_fdb/web``.
"""

import html
import json
import logging
import re
from contextlib import suppress
from functools import partial
from io import BytesIO

import pytest
from celery import Celery
from django.contrib.auth import get_user

from celery_fdb import brokers
from celery_fdb.contrib.django import conf
from celery_fdb.operations.catalogue import ACTIONS

pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")
pytestmark = pytest.mark.usefixtures("database")

ADMIN, OWN = "/admin/celery_fdb/queue/", "/ops/fdb/"
mounts = pytest.mark.parametrize("root", [ADMIN, OWN], ids=["admin", "own"])
SECRET = "4111-2222-3333"
PAGES = (
    *("", "queues", "queue?queue=q", "keys?queue=q", "messages?queue=q", "messages?queue=q.dead", "dead"),
    *("dead?queue=q.dead", "causes", "tasks", "runs", "task?id=t", "workflows", "schedules", "sessions", "workers"),
    "events",
)


def see(client, address, status=200):
    answer = client.get(address)
    assert answer.status_code == status, answer.content.decode()[-2000:]
    return str(html.unescape(answer.content.decode()))


def act(client, root, **fields):
    """A form of a page, sent with the token that the page has."""
    client.get(f"{root}queue?queue=q")
    token, back = client.cookies["csrftoken"].value, f"{root}queue?queue=q"
    return client.post(f"{root}act", {"csrfmiddlewaretoken": token, "queue": "q", "back": back, **fields}, follow=True)


def confirm(client, root, **fields):
    """Asks, sees the question, says yes, and sees the page after it."""
    before = log()
    question = act(client, root, **fields).content.decode()
    assert 'name="confirmed"' in question
    assert log() == before, "nothing happens before the answer"
    asked = re.findall(r'name="asked" value="([^"]*)"', question)
    return str(act(client, root, confirmed="yes", **fields, **({"asked": asked[0]} if asked else {})).content.decode())


def log():
    from django.contrib.admin.models import LogEntry

    return [(each.object_id, each.change_message) for each in LogEntry.objects.order_by("pk")]


@pytest.fixture
def jobs(broker):
    """A queue with a message in the queue and one that died."""
    broker.queue("q").put("x", key="k")
    broker.queue("q").take(0).bury(error=ValueError("no such order"))
    broker.queue("q").put("x", key="k")
    return broker.queue("q")


def selected(client, root, queue="q"):
    return re.findall(r'name="selected" value="([^"]+)"', see(client, f"{root}messages?queue={queue}"))


# -- what is shown -----------------------------------------------------------------------------------------------------


@mounts
def test_every_link_leads_to_a_page_under_the_prefix(jobs, operator, root):
    seen = set()
    todo = {root, f"{root}events"}
    while todo:
        address = todo.pop()
        seen.add(address)
        answer = operator.get(address)
        assert answer.status_code == 200, address
        content = b"".join(answer.streaming_content) if answer.streaming else answer.content
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        if "text/html" in answer.headers["content-type"]:
            assert answer.headers["cache-control"] == "no-store"
            found = {html.unescape(each) for each in re.findall(r'(?:href|src)="([^"#]+)"', content.decode())}
            todo |= {each for each in found if "/history/" not in each and each != "/admin/"} - seen
    assert all(each.startswith(root) for each in seen)
    assert {each.split("?")[0].rsplit("/", 1)[-1] for each in seen} >= {"queue", "message", "dead", "live.js", "keys"}


@mounts
def test_numbers_are_polled(jobs, viewer, root):
    page = see(viewer, root)
    assert f'data-events="{root}events" data-every="5.0"' in page
    told = json.loads(see(viewer, f"{root}events"))
    assert set(told) == {"at", "alerts", "queues", "summary"}
    assert told["queues"].keys() == {"q", "q.dead"}


def test_pages_that_poll_share_one_look(jobs, viewer, monkeypatch):
    """And none waits for another's: a store that hangs holds one thread of the server."""
    from celery_fdb.contrib.django.pages import VIEWS, poll
    from celery_fdb.web.live import LiveStats
    from celery_fdb.web.page import Shared

    told = Shared(waits=False)
    monkeypatch.setitem(VIEWS, "/events", partial(poll, LiveStats(), told))
    looks = []
    look = LiveStats.look_at
    monkeypatch.setattr(LiveStats, "look_at", lambda *given: looks.append(look(*given)) or looks[-1])
    for _ in range(3):
        see(viewer, f"{ADMIN}events")
    assert len(looks) == 1
    told._until_s = 0.0
    with told._lock:
        assert json.loads(see(viewer, f"{ADMIN}events")) == looks[0]
    assert len(looks) == 1
    see(viewer, f"{ADMIN}events")
    assert len(looks) == 2


def test_looking_makes_no_session(broker, operator):
    for page in PAGES:
        operator.get(ADMIN + page)
    assert broker.inspect.sessions() == []


def test_the_entries_of_the_admin_lead_to_their_pages(jobs, viewer):
    page = see(viewer, "/admin/")
    for address, leads_to in (("queue", None), ("deadletter", "dead"), ("session", "sessions")):
        assert f'href="/admin/celery_fdb/{address}/"' in page
        answer = viewer.get(f"/admin/celery_fdb/{address}/")
        assert answer.headers.get("location") == (None if leads_to is None else ADMIN + leads_to)
    assert "Django administration" in see(viewer, ADMIN)


@pytest.mark.parametrize(
    ("view", "given", "query", "leads_to"),
    [
        ("queue_change", ["q"], "", "queue?queue=q"),
        ("queue_change", ["a_2Fb"], "", "queue?queue=a%2Fb"),
        ("queue_change", ["_"], "", "queue?queue="),
        ("queue_keys", ["_._."], "?prefix=a", "keys?prefix=a&queue=.."),
        ("queue_messages", ["q"], "?state=delayed", "messages?state=delayed&queue=q"),
        ("queue_groups", ["q.dead"], "", "dead?queue=q.dead"),
        ("queue_message", ["q", "ready.00.00"], "", "message?queue=q&spot=ready.00.00"),
        ("queue_find", [], "?id=t", "task?id=t"),
        ("deadletter_causes", [], "", "causes"),
    ],
)
def test_addresses_of_before_lead_to_the_pages(broker, viewer, view, given, query, leads_to):
    from django.urls import reverse

    address = reverse(f"admin:celery_fdb_{view}", args=given)
    assert viewer.get(address + query).headers["location"] == ADMIN + leads_to


def test_moments_are_those_of_djangos_time_zone(jobs, viewer, configure):
    configure(TIME_ZONE="Asia/Kolkata")
    page = see(viewer, f"{ADMIN}messages?queue=q&since=2030-01-02T03:04")
    assert "Since, <span data-zone>Asia/Kolkata</span>" in page
    assert 'name="since" value="2030-01-02T03:04" data-moment="2030-01-02T03:04:00+05:30"' in page
    assert "since=2030-01-01T21" in page


def test_bodies_and_arguments_only_for_those_who_may_and_ask(app, url, configure, viewer, operator):
    configure(CELERY_FDB={"BROKER_URL": url})
    app.send_task("shop.charge", (SECRET,), {"card": SECRET}, queue="q")
    (spot,) = selected(operator, ADMIN)
    address = f"{ADMIN}message?queue=q&spot={spot}&body=1"
    assert SECRET in see(operator, address)
    assert SECRET not in see(operator, address.removesuffix("&body=1"))
    assert SECRET not in see(viewer, address)
    configure(CELERY_FDB={"BROKER_URL": url, "SHOW_BODIES": False})
    assert SECRET not in see(operator, address)


# -- what fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says", "next_step"),
    [
        ({"BROKER_URL": "fdb+sqlite:////nowhere/broker.db"}, "away", "mkdir"),
        ({"BROKER_URL": "fdb+sqlite:////tmp/nowhere.db"}, "no broker yet", "first worker or message"),
        pytest.param(
            {"BROKER_URL": "fdb://a:b@127.0.0.1:1/x", "CONNECT_TIMEOUT": 0.5},
            "away",
            "fdbcli",
            marks=pytest.mark.foundationdb,
        ),
        ({"BROKER_URL": "redis://:sesame@localhost"}, "not a celery-fdb broker", "Set the app's broker_url"),
        ({"BROKER_URL": "fdb://", "OPTIONS": {"sesion_ttl": 3}}, "unknown option", "session_ttl"),
        ({"PAGESIZE": 3}, "unknown key", "PAGE_SIZE"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_page_with_the_next_step(configure, operator, settings, says, next_step):
    configure(CELERY_FDB=settings)
    for address in ("", "sessions", "messages?queue=q"):
        page = see(operator, ADMIN + address, 503)
        assert says in page
        assert next_step in page
        assert "sesame" not in page


@pytest.mark.parametrize(
    ("settings", "waits_s"), [({}, 3.0), ({"CONNECT_TIMEOUT": 2}, 2), ({"OPTIONS": {"connect_timeout": 1}}, 1)]
)
def test_a_page_does_not_wait_for_the_store_as_workers_do(configure, url, monkeypatch, settings, waits_s):
    app = Celery(broker=url, set_as_current=False)
    app.conf.broker_transport_options = {"connect_timeout": 30}
    monkeypatch.setattr(conf, "celery_app", lambda _: app)
    asked = []
    monkeypatch.setattr(brokers, "open_existing", lambda _, **options: asked.append(options["connect_timeout"]))
    configure(CELERY_FDB=settings)
    conf._open()
    assert asked == [waits_s]


# -- who may -----------------------------------------------------------------------------------------------------------


@mounts
def test_who_has_no_permission_sees_nothing(jobs, login, root):
    client = login()
    for page in (*PAGES, "static/live.js", "nothing"):
        assert client.get(root + page).status_code == 403
    assert client.post(f"{root}act", {"action": "pause", "queue": "q"}).status_code == 403
    assert "Queues" not in see(client, "/admin/")


@pytest.mark.parametrize(("root", "status"), [(ADMIN, 302), (OWN, 200)])
def test_who_is_not_staff_does_not_see_the_admins(jobs, login, root, status):
    client = login("view_queue", "manage_queue", staff=False)
    assert {client.get(root + page).status_code for page in PAGES} == {status}


@mounts
def test_strangers_are_led_to_log_in(jobs, configure, root):
    configure(ALLOWED_HOSTS=["testserver"])
    from django.test import Client

    for page in PAGES:
        answer = Client().get(root + page)
        assert answer.status_code == 302
        assert "login" in answer.headers["location"]
    client = Client(enforce_csrf_checks=True)
    assert client.post(f"{root}act", {"action": "pause", "queue": "q"}).status_code in {302, 403}
    assert not jobs.control().paused


@mounts
def test_a_viewer_sees_no_buttons_and_may_not_act(jobs, viewer, root):
    see(viewer, root)
    assert not any('name="action"' in see(viewer, root + page) for page in PAGES)
    for action in ACTIONS:
        for confirmed in ({}, {"confirmed": "yes"}):
            assert act(viewer, root, action=action, selected="ready.00.00", **confirmed).status_code == 403
    assert log() == []
    assert not jobs.control().paused


def test_workers_are_acted_on_by_those_alone_who_have_that_permission(jobs, operator, login):
    fields = {"action": "worker_shutdown", "queue": "worker@host"}
    assert act(operator, ADMIN, **fields, confirmed="yes").status_code == 403
    assert log() == []
    other = login("view_queue", "manage_queue", "manage_worker")
    assert "End worker@host?" in act(other, ADMIN, **fields).content.decode()


@mounts
def test_an_action_needs_post_djangos_token_and_a_page_of_this_site(jobs, operator, root):
    fields = {"action": "pause", "queue": "q"}
    assert "Stop delivering" in see(operator, f"{root}act?action=pause&queue=q&confirmed=yes"), "a question only"
    assert operator.post(root, fields).status_code in {403, 405}
    assert operator.post(f"{root}act", fields).status_code == 403
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    for address in ("workers", "act?action=purge&queue=q"):
        assert operator.get(f"{root}{address}", headers=foreign).status_code == 403
    assert not jobs.control().paused
    assert log() == []


# -- actions and their log ---------------------------------------------------------------------------------------------


@mounts
def test_what_was_done_is_told_and_stands_in_the_admins_log(jobs, operator, root):
    page = act(operator, root, action="pause").content.decode()
    assert "Paused q." in page
    assert "Paused q." not in see(operator, f"{root}queue?queue=q"), "once"
    assert jobs.control().paused
    assert "Discarded 1 dead letter of q.dead." in confirm(operator, root, action="discard_all", queue="q.dead")
    assert log() == [("q", "Paused q."), ("q.dead", "Discarded 1 dead letter of q.dead.")]
    assert "Paused q." in see(operator, f"{ADMIN}q/history/")
    assert f'href="{ADMIN}q/history/"' in see(operator, f"{ADMIN}queue?queue=q")


def test_entries_of_any_name_have_their_history(broker, operator):
    for name in ("", ".", "a\x00b", "a/b"):
        broker.queue(name).put("x")
        act(operator, ADMIN, action="pause", queue=name)
    from django.contrib.admin.models import LogEntry

    for each in LogEntry.objects.all():
        assert "\x00" not in each.change_message + each.object_id + each.object_repr
    for address in ("_", "_.", "a\ufffdb", "a_2Fb"):
        assert "Paused" in see(operator, f"{ADMIN}{address}/history/"), (address, log())


class Bug(BaseException):
    """Anything at all."""


@pytest.mark.parametrize("error", [RuntimeError("a bug \ud800\x00"), KeyError(), MemoryError(), Bug("gone")])
def test_an_entry_of_the_log_always_ends(jobs, broker, operator, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # xdist can't hand on what is not UTF-8
    monkeypatch.setattr(type(broker._engine.queues), "change_control", fail)
    with suppress(type(error)):
        act(operator, ADMIN, action="pause")
    ((_, told),) = log()
    assert told.startswith(f"Pause (q): failed, {type(error).__name__}")


@mounts
def test_an_entry_is_committed_before_its_action_whatever_atomic_requests_says(
    jobs, broker, operator, root, monkeypatch
):
    from django.db import connection

    depths = [len(connection.savepoint_ids)]
    verbs = type(broker._engine.queues)
    change = verbs.change_control

    def changed(*given, **named):
        depths.append(len(connection.savepoint_ids))
        return change(*given, **named)

    monkeypatch.setattr(verbs, "change_control", changed)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert "Paused q." in act(operator, root, action="pause").content.decode()
    assert depths == [depths[0]] * 2


def test_an_admin_site_may_return_the_views_as_they_are():
    from django.contrib.admin import AdminSite

    from celery_fdb.contrib.django.admin import QueueAdmin
    from celery_fdb.contrib.django.models import Queue

    class Open(AdminSite):
        def admin_view(self, view, cacheable=False):
            del cacheable
            return view

    site = Open()
    site.register(Queue, QueueAdmin)
    assert any("celery_fdb/queue/" in str(each.pattern) for each in site.get_urls())


def test_a_cancelled_task_is_revoked(url, new_app, configure, operator, monkeypatch):
    project = new_app(url, backend="cache+memory://")
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: project)
    configure(CELERY_FDB={"APP": "project.celery:app"})
    sent = project.send_task("shop.charge", queue="q")
    assert "became REVOKED" in confirm(operator, ADMIN, action="cancel", selected=selected(operator, ADMIN))
    assert sent.state == "REVOKED"


def test_without_an_app_the_page_says_who_is_not_told(app, broker, operator):
    app.send_task("shop.charge", queue="q")
    page = confirm(operator, ADMIN, action="cancel", selected=selected(operator, ADMIN))
    assert "Set CELERY_FDB['APP']" in html.unescape(page)
    assert "Set CELERY_FDB['APP']" in log()[0][1]


# -- servers -----------------------------------------------------------------------------------------------------------


@mounts
def test_under_asgi_as_under_wsgi(jobs, operator, root):
    from asgiref.sync import async_to_sync
    from django.test import AsyncClient

    client = AsyncClient()
    client.cookies = operator.cookies

    @async_to_sync
    async def visit():
        for page in PAGES:
            assert (await client.get(root + page)).status_code == 200, page
        token = client.cookies["csrftoken"].value
        fields = {"csrfmiddlewaretoken": token, "action": "pause", "queue": "q", "back": root}
        return (await client.post(f"{root}act", fields)).headers["location"]

    assert visit() == root
    assert jobs.control().paused


def test_links_have_the_prefix_of_the_settings_under_asgi(jobs, operator, configure):
    """Where a proxy removes the prefix, Django's own links have it, and ``request.path`` has not."""
    from django.core.handlers.asgi import ASGIRequest
    from django.urls import set_script_prefix

    from celery_fdb.contrib.django.pages import page

    configure(FORCE_SCRIPT_NAME="/shop")
    scope = {"type": "http", "method": "GET", "path": f"{OWN}queues", "query_string": b"", "headers": []}
    request = ASGIRequest(scope, BytesIO())
    request.user, request.session = get_user(operator), operator.session
    set_script_prefix("/shop")
    try:
        seen = page(request, "queues").content.decode()
    finally:
        set_script_prefix("/")
    links = set(re.findall(r'(?:href|src)="(/[^"]*)"', seen))
    assert links, seen
    assert {each for each in links if not each.startswith(f"/shop{OWN}")} == set()
