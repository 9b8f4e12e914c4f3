"""Hostile names, headers, errors and arguments in a real browser: none runs, and none breaks a page at 390 px."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.browser import NARROW, Window
from kit.left import bury, keep
from kit.processes import until

from celery_fdb.history.run import Run
from celery_fdb.inspection.schedules import EntryReport, schedule_of
from kombu_fdb import Broker
from kombu_fdb.keyspace.codec import PAYLOAD_HEAD, PAYLOAD_VERSION
from kombu_fdb.primitives.clock import Clock

ROOT = Path(__file__).parents[3]
#: In each of them a script that would say so.
SCRIPTS = (
    "javascript:window.ran=1//",
    "<script>window.ran=1</script>",
    "\"'><img src=x onerror=window.ran=1><svg onload=window.ran=1>",
    "</textarea></title></template><iframe srcdoc='<script>top.ran=1</script>'>",
    "{{7*7}}${window.ran=1}<a href='javascript:window.ran=1'>x</a>",
)
#: Turned around, NUL, ESC, and what no line is broken in.
ODD = "\u202eevil\u2066 \x00\x1b[2J\x1b]0;x\x07 " + "W" * 120
NAME = "".join(SCRIPTS)[:120] + ODD[:100]
ERROR = " ".join((*SCRIPTS, ODD, "W" * 2_000))

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def payload():
    headers = {"task": ERROR[:600], "id": "t" + SCRIPTS[1], "argsrepr": ERROR, SCRIPTS[2]: ERROR, "odd": "\ud800" + ODD}
    meta = json.dumps(["application/json", "utf-8", headers, {"reply_to": ERROR}, NAME, NAME]).encode()
    return PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(meta)) + meta + json.dumps([[ERROR], {NAME: ERROR}, {}]).encode()


def fill(broker):
    """Everything that a page shows of what others write."""
    broker.declare(NAME, arguments={"x-password": ERROR})
    queue = broker.queue(NAME)
    for number in range(2):
        queue.put(payload(), key=NAME, task_id=f"t{number}{SCRIPTS[0]}")
    told = {"error_class": ERROR[:300], "error": ERROR, "traceback": ERROR}
    bury(broker, NAME, **told, attempts=[{"time": ERROR, "error": ERROR}])
    queue.put(payload(), key=NAME)
    queue.limit(NAME, rate=2.0)
    queue.pause()
    now_ms = Clock().wall_ms()
    texts = {"queue": NAME, "worker": ERROR, "key": NAME, "error_class": ERROR, "error": ERROR, "traceback": ERROR}
    run = Run("r1", ERROR[:200], state="FAILURE", start_ms=now_ms, end_ms=now_ms, args=ERROR, kwargs=ERROR, **texts)
    child = run._replace(id="r2", root="r1", parent="r1", group=SCRIPTS[1], followers=(("r3", ERROR[:200]),))
    keep(broker, run, child)
    entry = EntryReport(NAME, ERROR[:400], ERROR[:400], NAME, now_ms, now_ms, 1, now_ms, 60.0)
    schedule_of(broker).report([entry, entry._replace(name=SCRIPTS[1], reported_ms=1)])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    url = f"fdb+sqlite:///{tmp_path_factory.mktemp('hostile')}/broker.db"
    options = ("web", "--port", "0", "--write", "--show-bodies")
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, *options]
    with Broker.open(url) as broker:
        fill(broker)
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            yield broker, found[0]
            process.kill()


@pytest.fixture
def window(chromium, served):
    window = Window(chromium, served[1])
    window.look(NARROW)
    window.complaints()
    return window


LOOK = """
const outside = [...document.querySelectorAll('a[href], form[action]')]
  .map((each) => new URL(each.getAttribute('href') ?? each.getAttribute('action'), location).href)
  .filter((each) => !each.startsWith(location.origin + '/'));
const made = document.querySelectorAll('main :is(script, img, iframe, svg[onload], [onerror], [onload])').length;
return [window.ran ?? 0, outside, made, document.documentElement.scrollWidth, document.title];
"""


def check(window, page):
    ran, outside, made, width, title = window.run(LOOK)
    assert (ran, outside, made) == (0, [], 0), page
    assert width <= NARROW[0], (page, width)
    assert title.endswith("celery-fdb"), page


def pages(broker):
    dead = f"{NAME}.dead"
    (ready, *_), (letter, *_) = (broker.queue(each).page(5).messages for each in (NAME, dead))
    return [
        ("/queues", {"q": "script"}),
        ("/queues", {"q": NAME[:200] + "nothing"}),
        ("/queue", {"queue": NAME}),
        ("/keys", {"queue": NAME}),
        ("/messages", {"queue": NAME}),
        ("/messages", {"queue": NAME, "task": ERROR, "key": ERROR, "text": NAME}),
        ("/message", {"queue": NAME, "spot": str(ready.spot), "body": "1"}),
        ("/dead", {}),
        ("/dead", {"queue": dead}),
        ("/causes", {}),
        ("/messages", {"queue": dead}),
        ("/message", {"queue": dead, "spot": str(letter.spot), "body": "1"}),
        ("/tasks", {}),
        ("/runs", {"worker": ERROR[:200]}),
        ("/task", {"id": "r2"}),
        ("/task", {"id": ERROR}),
        ("/workflows", {}),
        ("/workflow", {"id": "r2"}),
        ("/schedules", {}),
        ("/sessions", {}),
    ]


def test_nothing_of_it_runs_and_no_page_breaks(window, served):
    broker, _ = served
    for path, query in pages(broker):
        window.open(path, **query)
        check(window, f"{path} {[*query]}")
    window.open("/")
    window.wait_for("#live", "^live$")
    broker.queue(NAME).put("one more")
    until(lambda: "is paused with 2 messages" in window.text("#alerts"), say=lambda: window.text("#alerts"))
    check(window, "the live overview")
    assert not window.complaints()


def test_a_question_and_its_answer_are_text(window, served):
    window.open("/messages", queue=f"{NAME}.dead")
    window.find("input[name=selected]").click()
    window.find("button[value=edit]").click()
    window.wait_for("main h1", "Edit and replay")
    check(window, "the question")
    window.find("button[value=edit]").click()
    window.wait_for(".notice", "Replayed 1 dead letter")
    check(window, "the answer")
    assert not window.complaints()
