"""One broker, however it is looked at: header, tables, doctor, metrics and dashboard say the same numbers."""

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from celery_fdb.inspection.metrics import make_collector
from celery_fdb.web import dashboard

STATES = ("ready", "delayed", "leased", "dead")
#: Of the application's queues; Celery's own count in none of them, and a dead letter is not ready. The sessions are the
#: one that has a job, and not the one that reads replies.
EXPECTED = {"ready": 8, "delayed": 2, "leased": 1, "dead": 1, "sessions": 1}


@pytest.fixture(autouse=True)
def filled(broker):
    for name, number in (("jobs", 7), ("mails", 3)):
        broker.queue(name).put_many(["x"] * number)
        broker.queue(name).put("later", delay=3600)
    for name in ("w@h.celery.pidbox", "celeryev.1"):
        broker.queue(name).put_many("abc")
    broker.queue("jobs").take(0).bury()
    job = broker.queue("jobs").take(0)
    dashboard = broker._engine.sessions.open({"host": "dashboard"})
    broker._engine.sessions.beat(dashboard, consumed=["a-b.reply.celery.pidbox"])
    yield
    assert job is not None


def of_header(text):
    found = re.search(r"(\d+) ready, (\d+) delayed, (\d+) leased, (\d+) dead; 2 queues, (\d+) session", text)
    assert found is not None, text
    return dict(zip(EXPECTED, map(int, found.groups()), strict=True))


def test_all_say_the_same(run, url):
    for command in (["status"], ["top", "--once"]):
        assert of_header(run(*command).out) == EXPECTED
        assert "celery" not in run(*command).out, "as many rows as the line above says"
    assert run("status", "--json").json["totals"] == {state: EXPECTED[state] for state in STATES}
    rows = run("queues", "--json").json
    counted = {state: sum(each[state] for each in rows) for state in STATES}
    assert {"celeryev.1", "jobs"} < {each["name"] for each in run("queues", "--all", "--json").json}
    assert counted | {"sessions": len(run("sessions", "--json").json)} == EXPECTED
    (content,) = (line for line in run("doctor").out.splitlines() if re.match(r"\w+ +content ", line))
    assert re.search(r"2 queues: 8 messages ready, 2 delayed, 1 leased, 1 dead; 1 session *$", content), content
    assert of_metrics(url) == EXPECTED
    assert of_dashboard(url) == (EXPECTED, EXPECTED)


def of_metrics(url):
    collector = make_collector(url)
    registry = CollectorRegistry()
    registry.register(collector)
    found = dict.fromkeys(EXPECTED, 0)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for each in family.samples:
            if each.name == "celery_fdb_queue_messages" and each.labels["queue"] in {"jobs", "mails"}:
                found[each.labels["state"]] += int(each.value)
            if each.name == "celery_fdb_sessions":
                found["sessions"] += int(each.value)
    collector.close()
    return found


def of_dashboard(url):
    """Its tiles, and its tables."""
    with TestClient(dashboard(url, anonymous=True, hosts=["testserver"])) as viewer:
        page, sessions = viewer.get("/").text, viewer.get("/sessions").text
    tiles = {state: int(re.search(rf'data-summary="{state}"[^>]*>(\d+)<', page)[1]) for state in EXPECTED}
    rows = {state: sum(map(int, re.findall(rf'<td [^>]*data-field="{state}">(\d+)<', page))) for state in STATES}
    return tiles, rows | {"sessions": sessions.count("alive</span>")}
