"""Who may open the dashboard, from where, and what a browser is told to allow."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
from kit.dashboard import Person
from kit.processes import DEADLINE_S
from starlette.requests import Request

import celery_fdb.web
from celery_fdb.inspection.overview import LOOPBACK
from celery_fdb.operations.action import log_audit
from celery_fdb.web import User, authentication, dashboard
from celery_fdb.web.authentication import AGAIN_S, FREE, MOST, Authentication, address_of
from celery_fdb.web.request_context import PATHS, RequestContext, cookie_name
from celery_fdb.web.settings import DashboardSettings
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.clock import ManualClock

TOKEN = "a token of enough letters"
FORMS = ["/logout"]


# -- the token ---------------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_shown(visit):
    stranger = visit(token=TOKEN)
    for name, path in PATHS.items():
        if name in {"login", "logout", "static"}:
            continue
        answer = stranger.get(path, headers={"accept": "text/html"}, follow_redirects=False)
        expected = 401 if name == "events" else 303
        assert answer.status_code == expected, name
    assert stranger.get("/queues", headers={"hx-request": "true", "accept": "text/html"}).status_code == 401
    assert stranger.get("/no-such-page").status_code == 401, "nor which addresses there are"
    assert stranger.put("/queues").status_code == 401


def test_the_token_opens_the_page_that_was_asked_for(visit, broker):
    broker.queue("jobs").put("a")
    person = visit(token=TOKEN)
    asked = person.get("/queue?queue=jobs", headers={"accept": "text/html"})
    assert asked.url.path == "/login"
    target = re.search(r'name="next" value="([^"]*)"', asked.text)
    page = person.submit("/login", token=f" {TOKEN}\n", next=target[1])
    assert "<h1>jobs</h1>" in page
    cookie = next(each for each in person.cookies.jar if each.name.startswith("celery_fdb_session"))
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "strict"
    person.submit("/logout")
    assert person.get("/", headers={"accept": "text/html"}).url.path == "/login"


def test_a_wrong_token_is_refused_and_told_in_the_audit(visit, caplog):
    person = visit(token=TOKEN)
    with caplog.at_level(logging.INFO, "celery_fdb.audit"):
        for given in ("", "x" * len(TOKEN), TOKEN + "x", "\ud7ff"):
            assert "That is not the token" in person.submit("/login", status=403, token=given)
    assert sum("wrong token" in each for each in caplog.messages) == 4
    assert person.get("/", headers={"accept": "text/html"}).url.path == "/login"


def test_a_form_of_a_page_that_was_left_open_for_a_day_changes_nothing_and_asks_to_log_in(visit, broker):
    clock = ManualClock()
    person = visit(token=TOKEN, clock=clock, read_only=False)
    person.submit("/login", token=TOKEN)
    broker.queue("jobs").put("a")
    clock.advance(86_400)
    page = person.submit("/act", status=401, action="purge", queue="jobs", confirmed="yes")
    assert "You are logged out. Nothing was changed." in page
    assert broker.queue("jobs").count() == 1
    assert "<h1>Overview" in person.submit("/login", token=TOKEN), "the form that it shows"
    question = person.submit("/act", action="purge", queue="jobs")
    asked = re.search(r'name="asked" value="([^"]+)"', question)
    assert "Deleted 1 message" in person.submit("/act", action="purge", queue="jobs", confirmed="yes", asked=asked[1])


def test_guessing_is_slowed_down_and_the_rightful_user_gets_in(visit):
    clock = ManualClock()
    rightful = visit(token=TOKEN, clock=clock)
    rightful.submit("/login", token=TOKEN)
    rightful.submit("/logout")
    application = rightful.app
    guesser = Person(application)
    for _ in range(FREE):
        guesser.submit("/login", status=403, token="x" * 20)
    for _ in range(3):  # which do not prolong it
        refused = guesser.post(
            "/login", data={"token": TOKEN, "form_token": guesser.form_token()}, headers=guesser.origin()
        )
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "Too many attempts. Wait 5 s." in refused.text
    assert "<h1>Overview" in rightful.submit("/login", token=TOKEN), "at the same address"
    clock.advance(AGAIN_S)
    guesser.submit("/login", status=403, token="x")
    guesser.submit("/login", status=429, token="x")
    clock.advance(AGAIN_S)
    assert "<h1>Overview" in guesser.submit("/login", token=TOKEN), "who has waited is looked at"


def test_a_forged_cookie_has_no_attempts_of_its_own(visit):
    person = visit(token=TOKEN, clock=ManualClock())
    for number in range(FREE + 1):
        person.cookies.set(cookie_name(authentication.KNOWN_COOKIE, TOKEN), f"9999999999999.{number}")
        person.submit("/login", status=403 if number < FREE else 429, token="x")
    opens_nothing = visit(token=TOKEN)
    known = authentication.new_ticket(TOKEN, Clock().wall_ms(), known=True)
    opens_nothing.cookies.set(cookie_name(authentication.COOKIE, TOKEN), known)
    assert opens_nothing.get("/", headers={"accept": "text/html"}).url.path == "/login"


def test_attempts_are_remembered_in_bounds():
    clock = ManualClock()
    login = Authentication(DashboardSettings("", token=TOKEN, clock=clock))
    for _ in range(FREE):
        assert login.take_attempt("one") == 0
    assert login.take_attempt("one") == AGAIN_S
    clock.advance(AGAIN_S / 2)
    assert login.take_attempt("one") == pytest.approx(AGAIN_S / 2)
    for number in range(3 * MOST):
        assert login.take_attempt(f"other {number}") == 0
    assert len(login._full_s) == MOST


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("testclient", "testclient"),
        ("x" * 9_000, "x" * 100),
    ],
)
def test_whose_attempt_it_is(host, address):
    assert address_of(host) == address


@pytest.mark.parametrize("cookie", ["", ".", "..", "9999999999999.x.", "9999999999999.x.AAAA", "x.y.z", "1.\u00e9"])
def test_a_forged_cookie_is_refused(cookie):
    assert not authentication.holds(TOKEN, cookie, 0)


def test_the_cookie_is_of_this_token_and_ends():
    ticket = authentication.new_ticket(TOKEN, 1_000)
    assert authentication.holds(TOKEN, ticket, 1_000)
    assert authentication.holds(TOKEN, ticket, authentication.HOLDS_S * 1000)
    assert not authentication.holds(TOKEN, ticket, 1_000 + authentication.HOLDS_S * 1000)
    assert not authentication.holds("another token of letters", ticket, 1_000)


def test_logging_out_ends_copies_of_the_cookie_too(visit):
    """Another program on this host is sent it, whatever its port, when the browser goes there."""
    person = visit(token=TOKEN)
    person.submit("/login", token=TOKEN)
    thief = Person(person.app, cookies=dict(person.cookies))
    other = Person(person.app)
    other.submit("/login", token=TOKEN)
    assert thief.get("/queues").status_code == 200
    person.submit("/logout")
    assert thief.get("/queues").status_code == 401
    assert other.get("/queues").status_code == 200
    assert "<h1>Overview" in person.submit("/login", token=TOKEN)


def test_too_many_that_were_logged_out_end_all_that_were_given_before(monkeypatch):
    monkeypatch.setattr(authentication, "MOST_ENDED", 10)
    clock = ManualClock()
    now_ms = clock.wall_ms()
    known = authentication.Authentication(DashboardSettings("", token=TOKEN, clock=clock))
    given = [authentication.new_ticket(TOKEN, now_ms - before_ms) for before_ms in range(authentication.MOST_ENDED + 2)]
    for each in given[:-1]:
        assert not known.has_ended(each)
        known.end(each)
    assert len(known._ended) == 1
    assert all(known.has_ended(each) for each in given)
    assert not known.has_ended(authentication.new_ticket(TOKEN, now_ms + 1))
    clock.advance(authentication.HOLDS_S * 2)
    known.end(given[0])
    assert known._ended == {given[0]}, "what is over by itself is not kept"


def test_dashboards_at_the_ports_of_one_host_leave_each_other_logged_in(url, broker):
    at = {number: dashboard(url, token=f"{TOKEN} {number}") for number in (1, 2)}

    async def host(scope, receive, send):
        await at[scope["server"][1]](scope, receive, send)

    browser = Person(host)
    for number in (1, 2):
        browser.base_url = f"http://testserver:{number}"
        browser.see("/login")
        form_token = browser.cookies[cookie_name("celery_fdb_form", f"{TOKEN} {number}")]
        browser.post("/login", data={"token": f"{TOKEN} {number}", "form_token": form_token}, headers=browser.origin())
    for number in (1, 2):
        assert browser.get(f"http://testserver:{number}/queues").status_code == 200


def test_a_notice_of_another_program_on_this_host_is_not_shown(visit, broker):
    person = visit(token=TOKEN)
    person.submit("/login", token=TOKEN)
    for value in ("UGF5IG1lLg==", "UGF5IG1lLg==.", "UGF5IG1lLg==.x", "x.y"):
        person.cookies.set(cookie_name("celery_fdb_notice", TOKEN), value)
        assert "Pay me" not in person.see("/queues")


def way_back(root, target):
    request = Request({"type": "http", "root_path": root, "headers": []})
    return RequestContext(request, DashboardSettings("", anonymous=True), User(""), log_audit("")).way_back(target)


@pytest.mark.parametrize("target", ["//evil", "https://evil/", "/\\evil", "/..//evil", "/x/../../y", "x", "", "/a\nb"])
def test_the_login_page_leads_to_this_site_only(target):
    assert way_back("", target) == "/"
    assert way_back("/fdb", target) == "/fdb/"


@pytest.mark.parametrize(
    "path", ["../admin/logout/", "%2e%2e/admin/logout/", ".%2E/admin", "x/%2e./%2e%2e/admin", "%2e"]
)
def test_the_way_back_does_not_lead_out_of_the_prefix(path):
    assert way_back("/fdb", f"/fdb/{path}") == "/fdb/"


# -- other ways to log in ----------------------------------------------------------------------------------------------


def test_a_hook_says_who_asks(visit):
    async def user(request):
        name = request.headers.get("x-user")
        return User(name, may_act=False) if name == "viewer" else name

    stranger = visit(user=user, login_url="/sso", read_only=False)
    answer = stranger.get("/", headers={"accept": "text/html"}, follow_redirects=False)
    assert answer.headers["location"] == "/sso"
    assert stranger.get("/", headers={"x-user": "viewer"}).status_code == 200
    without = visit(user=lambda _: None)
    assert "You are not logged in" in without.see("/", 403)


@pytest.mark.parametrize("nameless", ["", False, User(""), None])
def test_a_hook_that_returns_a_nameless_user_is_answered_401(visit, nameless):
    """As the name of Django's AnonymousUser, and of Starlette's UnauthenticatedUser."""
    assert visit(user=lambda _: nameless, read_only=False).get("/queues").status_code == 401


@pytest.mark.parametrize("wrong", [True, 7, object(), ["alice"]])
def test_a_hook_that_returns_no_user_is_a_mistake(visit, wrong):
    with pytest.raises(TypeError, match="User, a name, or None"):
        visit(user=lambda _: wrong, read_only=False).get("/queues")


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({}, "who may open"),
        ({"token": TOKEN, "anonymous": True}, "more than one way"),
        ({"token": "short"}, "fewer than 16"),
        ({"anonymous": True, "page_size": 0}, "page_size"),
        ({"anonymous": True, "page_size": "50"}, "Use 1 to 500 rows"),
        ({"anonymous": True, "threads": 1.5}, "threads"),
        ({"anonymous": True, "hosts": 5}, r'Use a list of names, such as \["tools.example.com"\]'),
        ({"anonymous": True, "hosts": "tools.example.com"}, r'Use a list of names, such as \["tools.example.com"\]'),
        ({"anonymous": True, "show_bodies": "False"}, "show_bodies"),
        ({"anonymous": True, "read_only": None}, "read_only"),
        ({"token": TOKEN.encode()}, "token"),
        ({"user": "alice"}, "user"),
        ({"anonymous": True, "colour": "red"}, "colour"),
    ],
)
def test_a_mistake_is_told_when_the_dashboard_is_made(url, given, about):
    with pytest.raises(OptionError, match=about):
        dashboard(url, **given)


# -- hosts, headers, forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9810", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("localhost.evil.example:9810", 421),
        ("", 421),
        ("localhost:evil", 421),
    ],
)
def test_another_sites_name_is_refused(visit, url, host, status):
    """DNS rebinding: the browser still sends the name of the page that asks. It is the default of one for everybody."""
    assert visit(hosts=LOOPBACK).get("/", headers={"host": host}).status_code == status
    with Person(dashboard(url, anonymous=True, read_only=False)) as person:
        assert person.get("/workers", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/workers", "/events", "/login", "/static/live.js"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_loads_nothing_from_here(visit, broker, path, site):
    """An ``<img>``, a ``<script>``, a ``fetch`` or an ``<iframe>`` there; a person may follow a link."""
    person = visit()
    for mode, dest in (("no-cors", "image"), ("cors", "empty"), ("no-cors", "script"), ("navigate", "iframe")):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        assert person.get(path, headers=headers).status_code == 403
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert path == "/events" or person.get(path, headers=link).status_code == 200
    assert path == "/events" or person.get(path, headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/queues", "/nowhere", "/static/live.js", "/events?x", "/login"])
def test_each_answer_tells_the_browser_what_to_allow(visit, path):
    answer = visit(token=TOKEN).get(path) if path.startswith("/events") else visit().get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == ("no-store" if "static" not in path else answer.headers["cache-control"])


def test_no_template_has_a_script_or_a_style_in_it():
    """The policy forbids them, so they would not run."""
    for path in (Path(celery_fdb.web.__file__).parent / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|hx-on|javascript:", text), path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://testserver.evil.example"},
        {"origin": "http://[bad"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(visit, headers):
    person = visit(token=TOKEN)
    fields = {"form_token": person.form_token(), "token": TOKEN}
    assert person.post("/login", data=fields, headers=headers).status_code == 403
    assert person.post("/login", data=fields, follow_redirects=False).status_code == 303, "the form itself was right"


@pytest.mark.parametrize("form_token", [None, "", "x" * 43, "\ud7ff"])
def test_a_form_without_its_token_is_refused(visit, form_token):
    person = visit(token=TOKEN)
    person.form_token()
    fields = {"token": TOKEN} | ({} if form_token is None else {"form_token": form_token})
    assert person.post("/login", data=fields, headers=person.origin()).status_code == 403


def test_a_form_with_an_empty_cookie_and_an_empty_field_is_refused(visit):
    answer = visit(token=TOKEN).post(
        "/login",
        data={"token": TOKEN, "form_token": ""},
        headers={"cookie": f"{cookie_name('celery_fdb_form', TOKEN)}="},
    )
    assert answer.status_code == 403


@pytest.mark.parametrize(("size", "status"), [(9_000, 403), (11_000, 413)])
def test_a_form_of_an_unknown_visitor_is_short(visit, size, status):
    """A token is; else each of many connections could hold as much memory as an edited message may need."""
    visit(token=TOKEN).submit("/login", status=status, token="x" * size)


def test_a_form_that_never_comes_is_not_waited_for(visit, monkeypatch):
    monkeypatch.setattr("celery_fdb.web.page.FORM_S", 0.05)
    application = visit(token=TOKEN).app
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/login",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"testserver"), (b"content-length", b"9000")],
        "client": ("10.0.0.7", 1),
    }
    begun = [{"type": "http.request", "body": b"token=", "more_body": True}]
    sent = []

    async def receive():
        return begun.pop() if begun else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def scenario():
        async with asyncio.timeout(DEADLINE_S):
            await application(scope, receive, send)

    asyncio.run(scenario())
    assert sent[0]["status"] == 413


def test_a_form_of_any_length_is_answered(visit):
    person = visit(token=TOKEN)
    for body in (b"x" * 2_000_000, b"&".join([b"a=1"] * 5_000), b"\xff\x00=%ff&%zz"):
        answer = person.post("/login", content=body, headers=person.origin())
        assert answer.status_code in {403, 413}
