"""Under any prefix, in FastAPI, Starlette and Django: every link leads to a page, every form is taken."""

import html
import re
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from celery import Celery
from kit.dashboard import Person
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from celery_fdb import brokers
from celery_fdb.web import application, dashboard

TOKEN = "a token of enough letters"


def starlette(inner):
    return Starlette(routes=[Mount("/ops/fdb", inner), Route("/", lambda _: PlainTextResponse("the site's own"))])


def fastapi(inner):
    module = pytest.importorskip("fastapi", reason="FastAPI is not installed")
    made = module.FastAPI(openapi_url=None)
    made.mount("/ops/fdb", inner)
    made.get("/")(lambda: PlainTextResponse("the site's own"))
    return made


def django(inner):
    pytest.importorskip("django", reason="Django is not installed")
    return Starlette(routes=[Mount("/ops/fdb", inner), Mount("/", django_site())])


def behind_a_proxy(inner):
    """As uvicorn --root-path makes it of a request whose prefix a proxy has removed."""

    async def served(scope, receive, send):
        if scope["type"] == "http":
            assert scope["path"].startswith("/ops/fdb") or scope["path"] == "/"
            if scope["path"] == "/":
                await PlainTextResponse("the site's own")(scope, receive, send)
                return
            scope = {**scope, "root_path": "/ops/fdb"}
        await inner(scope, receive, send)

    return served


def django_site():
    from django.core.asgi import get_asgi_application

    return get_asgi_application()


if find_spec("django") is not None:
    # Django is set up once per process, for all tests in the same way.
    _HERE = Path(__file__).parents[1] / "contrib" / "django" / "conftest.py"
    _spec = spec_from_file_location("django_conftest", _HERE)
    _shared = module_from_spec(_spec)
    _spec.loader.exec_module(_shared)
    _django = _shared._django


@pytest.fixture(params=[starlette, fastapi, behind_a_proxy, django], ids=lambda made: made.__name__)
def mounted(request, url, broker):
    broker.queue("jobs").put("x", key="k")
    broker.queue("jobs").take(0).bury()
    broker.queue("jobs").put("x", key="k")
    make = request.param
    with Person(make(dashboard(url, token=TOKEN, read_only=False)), raise_server_exceptions=True) as person:
        yield person


def links(page):
    return {html.unescape(each) for each in re.findall(r'(?:href|src)="([^"#]+)"', page)}


def targets(page):
    """Of forms and scripts."""
    return set(re.findall(r'(?:action|hx-get|data-events|data-trend-source)="([^"]+)"', page))


def test_every_link_leads_to_a_page_under_the_prefix(mounted):
    assert mounted.get("/ops/fdb/", headers={"accept": "text/html"}).url.path == "/ops/fdb/login"
    token = mounted.kept("celery_fdb_form")
    fields = {"form_token": token, "token": TOKEN, "next": "/ops/fdb/queues"}
    page = mounted.post("/ops/fdb/login", data=fields, headers=mounted.origin())
    assert page.url.path == "/ops/fdb/queues"
    assert all(each.path == "/ops/fdb/" for each in mounted.cookies.jar)
    seen = set()
    forms = set()
    todo = {"/ops/fdb/"}
    while todo:
        address = todo.pop()
        seen.add(address)
        answer = mounted.get(address, headers={"accept": "text/html"})
        assert answer.status_code == 200, address
        if "text/html" in answer.headers["content-type"]:
            todo |= links(answer.text) - seen
            forms |= targets(answer.text)
    assert all(each.startswith("/ops/fdb/") for each in seen | forms)
    found = {each.split("?")[0].rsplit("/", 1)[-1] for each in seen | forms}
    assert {"queue", "messages", "message", "dead", "keys", "sessions", "act", "events", "logout"} <= found


def test_an_action_leads_back_under_the_prefix(mounted, broker):
    mounted.get("/ops/fdb/login")
    fields = {"form_token": mounted.kept("celery_fdb_form")}
    mounted.post("/ops/fdb/login", data={**fields, "token": TOKEN}, headers=mounted.origin())
    action = {**fields, "action": "pause", "queue": "jobs", "back": "/ops/fdb/queue?queue=jobs"}
    assert "Paused jobs." in mounted.post("/ops/fdb/act", data=action, headers=mounted.origin()).text
    assert broker.queue("jobs").control().paused


def test_djangos_own_pages_stay_as_they_are(url):
    with Person(django(dashboard(url, anonymous=True))) as person:
        answer = person.get("/admin/", headers={"host": "localhost"}, follow_redirects=False)
        assert answer.headers["location"] == "/admin/login/?next=/admin/"
        assert "default-src 'none'" not in answer.headers.get("content-security-policy", "")
        assert person.get("/ops/fdb/login", headers={"host": "localhost"}).status_code == 200


@pytest.mark.parametrize("mounted", [starlette, fastapi, behind_a_proxy], indirect=True, ids=lambda made: made.__name__)
def test_the_site_around_it_stays_as_it_is(mounted):
    answer = mounted.get("/")
    assert answer.text == "the site's own"
    assert "content-security-policy" not in answer.headers


def test_pages_do_not_wait_for_the_store_as_workers_do(monkeypatch):
    app = Celery(broker="fdb+sqlite:////nowhere/broker.db", set_as_current=False)
    app.conf.broker_transport_options = {"connect_timeout": 30}
    asked = []
    monkeypatch.setattr(brokers, "open_existing", lambda _, **options: asked.append(options["connect_timeout"]))
    opened = []
    opening = application.opening
    monkeypatch.setattr(application, "opening", lambda settings: opened.append(opening(settings)) or opened[-1])
    for further in ({}, {"connect_timeout_s": 2}, {"options": {"connect_timeout": 1}}):
        dashboard(app, token=TOKEN, **further)
        opened[-1].broker()
    assert asked == [3.0, 2, 1]
