"""Any request, and any bytes in the store: no page of the dashboard answers a 500, and each action leaves its audit.

The store's rows are mutated in value, among them those that a codec would never write; requests name queues, spots,
keys, states and actions that exist and that don't. Django serves the same pages (``celery_fdb.contrib.django.pages``).
"""

import html
import logging
import os
import re
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")

from starlette.testclient import TestClient
from store_messages import NAMES, clear, fill, spoil

from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.run import ENDED, Run
from celery_fdb.history.store import HistoryStore
from celery_fdb.operations.action import AUDIT_LOG
from celery_fdb.operations.catalogue import ACTIONS
from celery_fdb.web import dashboard
from celery_fdb.web.request_context import PATHS
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.testing.stores import MemoryStores

pytestmark = pytest.mark.timeout(0)

PAGES = [path for name, path in PATHS.items() if name not in {"events", "static", "logout", "act"}]
ADDRESSES = [*NAMES, "%ff%00", "_00", "%ED%A0%80"]
STATES = ["ready", "delayed", "leased"]
TEXTS = ["", "q", "newest", *STATES, "00ff", "\x00", "\ud7ff", "k", "t", "x" * 5_000, "1", "-", "shop.*", "hour"]
FIELDS = ["queue", "key", "prefix", "after", "state", "order", "spot", "body", "id", "q", "all"]
FIELDS += ["task", "text", "since"]


@pytest.fixture
def url():
    with MemoryStores():
        yield f"fdb+memory://{os.urandom(6).hex()}"


@pytest.fixture
def person(url):
    application = dashboard(url, anonymous=True, hosts=["testserver"], read_only=False, show_bodies=True, page_size=3)
    with TestClient(application, raise_server_exceptions=True) as client:
        client.get("/login")
        yield client


def links(page):
    return [html.unescape(each) for each in re.findall(r'href="(/[^"]+)"', page) if "/static/" not in each]


def asked(chance, known):
    """A link of the pages, or a made-up address."""
    if known and chance.randrange(3):
        return chance.choice(known)
    fields = {each: chance.choice([*TEXTS, *NAMES]) for each in chance.sample(FIELDS, 4)}
    fields["queue"] = chance.choice([*ADDRESSES, *NAMES])
    return f"{chance.choice(PAGES)}?{urlencode(fields, errors='replace')}"[:60_000]


def action(chance, pages):
    spots = re.findall(r'name="selected" value="([^"]+)"', chance.choice(pages)) if pages else []
    fields = {
        "action": chance.choice([*ACTIONS, "nonsense"]),
        "queue": chance.choice(NAMES),
        "back": chance.choice(["/", "//x", *TEXTS]),
        "selected": chance.sample(spots, chance.randrange(len(spots) + 1)) or ["ready.00.00"],
    }
    for name in chance.sample(
        ["key", "delay", "rate", "target", "args", "kwargs", "due", "by", "mark", "weight", "task", "since"], 5
    ):
        fields[name] = chance.choice([*TEXTS, "[1]", '{"a": 1}', "10m", "3"])
    return fields | chance.choice([{}, {"confirmed": "yes"}])


def remember(broker, chance):
    """A history of runs, some of whose rows are damaged."""
    store = HistoryStore(broker.database, broker.location.namespace, clock=Clock())
    forget(broker, store)
    if chance.randrange(3):
        store.set_settings(History())
    names = ["t", "a", "b", "\x00", "<b>", "n" * 200]
    for _ in range(chance.randrange(4)):
        told = {name: chance.choice(["", *names]) for name in ("root", "parent", "group", "error", "key", "args")}
        run = Run(chance.choice(names), chance.choice(names), state=chance.choice(ENDED), end_ms=2**40, **told)
        for unwritten in pack_groups([run]):
            store.write(unwritten, History())
    if not chance.randrange(3):
        spoil(broker, chance, store.keys.prefix)


def forget(broker, store):
    begin, end = store.keys.prefix, store.keys.prefix + b"\xff"
    broker._engine.transactions.write(lambda work: work.tr.clear_range(begin, end))


def test_no_page_answers_over_499_but_that_the_store_is_away(url, person, fuzz, caplog):
    broker = Broker.open(url)
    caplog.set_level(logging.INFO, AUDIT_LOG)

    def target(chance):
        clear(broker)
        fill(broker, chance)
        remember(broker, chance)
        caplog.clear()
        known, pages = [path for path in PAGES if path != "/login"], []
        for _ in range(12):
            address = asked(chance, known)
            answer = person.request(chance.choice(["get", "get", "get", "head", "post"]), address)
            assert answer.status_code < 500, (address, answer.text[-2_000:])
            known += links(answer.text)
            pages.append(answer.text)
        for _ in range(3):
            fields = action(chance, pages)
            data = {**fields, "form_token": person.cookies["celery_fdb_form"]}
            answer = person.post("/act", data=data, follow_redirects=False)
            assert answer.status_code < 500, (fields, answer.text[-2_000:])
        audited = [each.getMessage() for each in caplog.records if each.name == AUDIT_LOG]
        begun = [each for each in audited if each.endswith("begun.")]
        assert len(audited) == 2 * len(begun), "each action has two lines"

    fuzz(target)
    broker.close()
