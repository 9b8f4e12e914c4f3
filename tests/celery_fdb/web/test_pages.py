"""Each page over a store, whatever the store holds and the address says."""

import hashlib
import html
import re
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlencode

import pytest
from kit.processes import run_python

from celery_fdb import brokers
from celery_fdb.inspection import overview
from celery_fdb.operations.action import Action
from celery_fdb.web.pages import actions, messages, queues, workers
from celery_fdb.web.request_context import NOTHING, PATHS
from celery_fdb.web.settings import DashboardSettings
from kombu_fdb import Broker
from kombu_fdb.errors import LimitExceeded, StoreUnavailable
from kombu_fdb.testing.clock import ManualClock

NAMES = ["q", "", ".", "..", "/", "a/b?c#%2F&x=1", "\u00fc\x00\n", "<b>x</b>", "n" * 255, "\u202e", "%00"]
#: Of what is not ours, as the npm package htmx.org 2.0.11 has it.
VENDORED = {
    "htmx-2.0.11.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
}
SHOWN = [name for name in PATHS if name not in {"events", "login", "logout", "static"}]


def test_an_empty_broker_says_what_to_do_next(viewer):
    assert "The first worker declares its queues" in viewer.see("/")
    assert "The first worker declares its queues" in viewer.see("/queues")
    assert "celery -A proj worker" in viewer.see("/sessions")


def test_the_overview_tells_what_needs_attention(viewer, broker):
    jobs = broker.queue("jobs")
    jobs.put_many("abc")
    jobs.take(0).bury()
    broker.queue("idle").put("x")
    broker.queue("idle").pause()
    page = viewer.see("/")
    assert "1 dead letter of jobs" in page
    assert "idle is paused with 1 message" in page
    assert 'data-summary="ready" data-kind="number">3<' in page


def test_a_page_is_live_or_says_when_it_was_read(visit):
    person = visit(clock=ManualClock())
    read = re.compile(r'read at <time data-form="second" datetime="[^"]+\+00:00">\d\d:\d\d:\d\d UTC</time>')
    for name in SHOWN:
        page = person.get(PATHS[name], params={"queue": "jobs"}, headers={"accept": "text/html"})
        if "text/html" in page.headers["content-type"] and page.status_code == 200:
            assert ('id="live"' in page.text) is (name in {"overview", "queues", "queue"}), name
            assert ('id="live"' in page.text) != ('id="read"' in page.text), name
            assert read.search(page.text), name
            assert ('data-events="/events"' in page.text) is ('id="live"' in page.text), name


def test_queues_are_found_by_a_part_of_their_name(viewer, broker):
    for name in ("orders", "mails", "w1.celery.pidbox"):
        broker.queue(name).put("x")
    assert {name for name in ("orders", "mails", "pidbox") if name in viewer.see("/queues")} == {"orders", "mails"}
    assert "orders" not in viewer.see("/queues", q="MAIL")
    assert "pidbox" in viewer.see("/queues", all="1")
    assert "No such queue" in viewer.see("/queues", q="<script>")


def test_very_many_queues_are_found_by_name(viewer, broker, monkeypatch):
    monkeypatch.setattr(queues, "MOST_SHOWN", 2)
    for number in range(5):
        broker.queue(f"jobs{number}").put("x")
    page = viewer.see("/queues")
    assert page.count("<tr data-queue") == 2
    assert "The first 2 of 5 queues" in page
    assert "jobs4" in viewer.see("/queues", q="s4")


def test_no_table_and_no_list_of_choices_shows_everything(operator, broker, monkeypatch):
    for page in (messages, actions, workers):
        monkeypatch.setattr(page, "MOST_SHOWN", 2)
    for number in range(3):
        session = broker._engine.sessions.open({"host": f"host{number}"})
        broker._engine.sessions.beat(session, consumed=[f"jobs{number}"])
        broker.queue(f"jobs{number}").put("x")
        broker.queue(f"jobs{number}").take(0).bury()
    page = operator.see("/dead")
    assert page.count("each letter</a>") == 2
    assert "The first 2 of 3 queues, the longest first." in page
    page = operator.see("/sessions")
    assert page.count("alive</span>") == 2
    assert "The first 2 of 3 sessions, silent ones first." in page
    page = operator.submit("/act", action="move", queue="jobs0", back="/")
    assert page.count("<option value=") == 2


def test_a_queues_page_has_its_keys_limits_and_arguments(viewer, broker):
    broker.declare("jobs", arguments={"x-max-length": 77, "x-password": "hidden"})
    jobs = broker.queue("jobs")
    jobs.put("a", key="acme")
    jobs.limit("acme", rate=2.5, max_in_flight=3)
    page = viewer.see("/queue", queue="jobs")
    for text in ("acme", "rate ≤ 2.5/s", "in flight ≤ 3", "77"):
        assert text in page
    assert "hidden</code>" not in page


@pytest.mark.parametrize("path", ["/queue", "/keys"])
def test_messages_without_a_key_have_no_number_that_nothing_counts(viewer, broker, path):
    jobs = broker.queue("jobs")
    jobs.limit_every_key(max_in_flight=1)
    jobs.put_many("abc")
    with jobs.take(0):
        row = re.search(r">\(no key\)<.*", viewer.see(path, queue="jobs"))
        assert re.findall(r'class="n[^"]*">([^<]*)<', row[0]) == [NOTHING, "1"]


def test_a_session_is_found_by_what_is_shown_of_it(viewer, broker):
    """Whole on the pages, where it leads there; and by its beginning, as the command line shows it."""
    broker.queue("jobs").put("a")
    with broker.queue("jobs").take(0):
        (session,) = broker.inspect.sessions()
        id_ = session.session_id.hex()
        leads_to = f"/sessions#{id_}"
        page = viewer.see("/messages", queue="jobs", state="leased")
        for each in (page, viewer.see(html.unescape(re.search(r'href="(/message\?[^"]+)"', page)[1]))):
            assert f'<a href="{leads_to}"><code>{id_}</code></a>' in each
        assert f'<tr id="{id_}">' in viewer.see("/sessions")
        for asked in (id_, id_[:12]):
            answer = viewer.get("/task", params={"id": asked}, follow_redirects=False)
            assert answer.headers["location"] == leads_to
        assert "Nothing is known" in viewer.see("/task", id=id_[:11])


def test_sessions_show_how_old_the_last_heartbeat_is(viewer, url, monkeypatch):
    """It grows from look to look until it is longer than the session lives without one."""
    with Broker.open(url, session_ttl=3_000.0) as broker:  # the next heartbeat is minutes away
        broker.queue("jobs").put("a")
        job = broker.queue("jobs").take(0)
        (session,) = broker.inspect.sessions()
        clock = ManualClock(wall_ms=session.beat_ms)
        monkeypatch.setattr(overview, "Clock", lambda: clock)
        for seconds, age, state in (
            (2.5, "2.5 s ago", "alive"),
            (42.5, "45 s ago", "alive"),
            (2_900, "49 min 5 s ago", "alive"),
            (56, "50 min 1 s ago", "silent"),
        ):
            clock.advance(seconds)
            row = re.search(r"<tbody>.+?</tbody>", viewer.see("/sessions"), re.DOTALL)
            assert f'<td class="n">{age}</td>' in row[0]
            assert 'class="n strong">1<' in row[0], "what it holds"
            assert f">{state}</span>" in row[0]
        job.ack()


def test_a_queue_of_any_name_has_its_page(viewer, broker):
    for name in NAMES:
        broker.queue(name).put("x", key=name)
    listed = viewer.see("/queues")
    for name in NAMES:
        address = f"/queue?{urlencode({'queue': name})}"
        assert html.escape(address) in listed
        assert viewer.get(address).status_code == 200, name


@pytest.mark.parametrize("page", SHOWN)
def test_a_made_up_address_is_a_page_too(viewer, page):
    expected = {403} if page == "act" else {200, 303, 404, 422}
    for name in [*NAMES, "\ud800", "n" * 5_000]:
        fields = ["queue", "key", "q", "after", "state", "id", "cursor", "task", "period"]
        query = urlencode(dict.fromkeys(fields, name), errors="replace")
        assert viewer.get(f"{PATHS[page]}?{query}%ff%ED%A0%80").status_code in expected, name


@pytest.mark.parametrize("method", ["put", "delete", "patch", "options", "trace"])
def test_what_no_page_takes_is_told_with_what_it_takes(viewer, method):
    for path, allow in (("/queues", "GET, HEAD"), ("/act", "GET, HEAD, POST"), ("/login", "GET, HEAD, POST")):
        answer = viewer.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert viewer.request(method, "/static/live.js").headers["allow"] == "GET, HEAD"
    assert viewer.request(method, "/nowhere").status_code == 404


def test_a_static_file_that_is_not_there_leads_to_the_pages(viewer):
    answer = viewer.get("/static/nothing.js")
    assert answer.status_code == 404
    assert f'href="{PATHS["queues"]}"' in answer.text


def test_every_page_over_a_store(any_store, visit):
    with Broker.open(any_store) as broker:
        jobs = broker.queue("jobs")
        jobs.put_many("abc", key="k")
        jobs.take(0).bury()
        person = visit(any_store, read_only=False)
        seen, todo = set(), {"/"}
        while todo:
            address = todo.pop()
            seen.add(address)
            answer = person.get(address, headers={"accept": "text/html"})
            assert answer.status_code == 200, address
            if "text/html" in answer.headers["content-type"]:
                todo |= {html.unescape(each) for each in re.findall(r'href="(/[^"#]*)"', answer.text)} - seen
        assert len({each.partition("?")[0] for each in seen} & set(PATHS.values())) >= 12
        assert "Paused" in person.submit("/act", action="pause", queue="jobs", back="/queue?queue=jobs")
        assert jobs.control().paused


# -- a store that fails ------------------------------------------------------------------------------------------------


def test_a_store_that_is_away_is_a_page_with_the_next_step(visit, tmp_path):
    assert "<h1>The store is away" in visit(f"fdb+sqlite:///{tmp_path}/missing/broker.db").see("/", 503)
    person = visit(f"fdb+sqlite:///{tmp_path}/nowhere.db")
    page = person.see("/", 503)
    assert "<h1>Nothing here yet" in page
    assert f"<p>There is no broker yet at {tmp_path}/nowhere.db</p>" in page
    assert "Check the path." in page
    assert not (tmp_path / "nowhere.db").exists()
    Broker.open(f"fdb+sqlite:///{tmp_path}/nowhere.db").close()
    assert "No queues yet" in person.see("/"), "it is opened anew"


def test_a_store_that_may_be_there_is_away(visit, tmp_path):
    """On a disk that is not mounted, or where something is in the way of looking."""
    (tmp_path / "unmounted.db").symlink_to(tmp_path / "disk" / "broker.db")
    (tmp_path / "circle.db").symlink_to(tmp_path / "circle.db")
    for name in ("unmounted.db", "circle.db", f"{300 * 'n'}.db"):
        assert "<h1>The store is away" in visit(f"fdb+sqlite:///{tmp_path}/{name}").see("/", 503), name
    (tmp_path / "disk").mkdir()
    assert "<h1>Nothing here yet" in visit(f"fdb+sqlite:///{tmp_path}/unmounted.db").see("/", 503)
    assert not (tmp_path / "disk" / "broker.db").exists()


def test_the_default_file_is_not_made_by_a_look(visit, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert "<h1>Nothing here yet" in visit("fdb+sqlite://").see("/", 503)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_hangs_is_told_in_time(visit, monkeypatch):
    import threading

    from celery_fdb.web.pages import queues as module

    end = threading.Event()
    monkeypatch.setattr(module, "look", lambda *_, **__: end.wait(60))
    usual = DashboardSettings("")
    assert (usual.timeout_s, usual.threads) == (10, 8), "as the docs say"
    person = visit(timeout_s=0.1, threads=2)
    try:
        for _ in range(2):
            assert "did not answer in time" in person.see("/queues", 503)
        for _ in range(2):  # more than there are threads
            assert "all threads are busy" in person.see("/queues", 503)
    finally:
        end.set()


FORKS = """
import asyncio, os
from celery_fdb.web.page import ThreadPool

threads = ThreadPool(1, 30.0)
assert asyncio.run(threads.run(os.getpid)) == os.getpid()
child = os.fork()
if not child:
    os._exit(0 if asyncio.run(threads.run(os.getpid)) == os.getpid() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(("error", "status"), [(StoreUnavailable, 503), (LimitExceeded, 422)])
def test_what_is_away_is_opened_anew_and_what_refuses_is_not(visit, monkeypatch, error, status):
    opened = []

    def open_existing(url, **options):
        opened.append(Broker.open(url, **options))
        return opened[-1]

    monkeypatch.setattr(brokers, "open_existing", open_existing)
    person = visit(read_only=False)
    person.see("/queues")
    with monkeypatch.context() as patched:
        for owner, verb in ((queues, "look"), (Action, "perform")):
            patched.setattr(owner, verb, Mock(side_effect=error()))
        page = person.submit("/act", status=status, action="pause", queue="jobs")
        assert ("not known whether this was done" in page, "It was refused" in page) == (status == 503, status == 422)
        assert not re.search("not known whether|It was refused", person.see("/queues", status))
    before = len(opened)
    person.see("/queues")
    assert len(opened) - before == (status == 503)
    for each in opened:
        each.close()


def test_a_forked_process_has_threads_of_its_own():
    """As of a server that loads the application, answers, and then forks."""
    run_python("-W", "ignore::DeprecationWarning", "-c", FORKS)


def test_what_cannot_be_read_is_a_page(viewer, broker, monkeypatch):
    from celery_fdb.web.pages import queues as module

    secret = ValueError("password='x1y2z3'")
    for error in (KeyError("row"), RecursionError(), UnicodeDecodeError("utf-8", b"\xffx1y2z3", 0, 1, "bad"), secret):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(module, "look", fail)
        page = viewer.see("/queues", 422)
        assert ("be shown" in page, "x1y2z3" in page) == (True, False)


def test_what_is_not_ours_is_as_its_authors_published_it():
    folder = Path(overview.__file__).parents[1] / "web" / "static" / "vendor"
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    assert {name: digest for name, digest in found.items() if not name.endswith(".LICENSE")} == VENDORED
