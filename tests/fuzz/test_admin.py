"""Any request, and any bytes in the store: no page of the admin answers over 499, and each action leaves its audit.

The store's rows are mutated in value, among them those that a codec would never write; requests name queues, spots,
keys, states and actions that exist and that don't.
"""

from __future__ import annotations

import html
import importlib.util
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from celery_fdb.inspection.filters import FIELDS
from celery_fdb.operations.catalogue import DEEDS
from kombu_fdb import Broker, KombuFDBError
from kombu_fdb.model import Publication
from kombu_fdb.primitives.headers import HEAD, VERSION

pytest.importorskip("django", reason="Django is not installed")

_DJANGO = Path(__file__).parents[1] / "celery_fdb" / "contrib" / "django"
_spec = importlib.util.spec_from_file_location("django_conftest", _DJANGO / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
_django, database, login, configure = _shared._django, _shared.database, _shared.login, _shared.configure

pytestmark = [pytest.mark.usefixtures("database"), pytest.mark.timeout(0)]

NAMES = ["q", "q.dead", "", ".", "..", "_", "_2F", "a/b?c#%2F", "ü\x00\n", "x.celery.pidbox", "\u202e<b>", "n" * 3000]
ODD = [
    *(None, True, 0, -1, 2**63, 2**200, -1e308, 1e400, float("nan"), "", "\ud800", "\x00", "\x1b[2J", "<script>"),
    *([], {}, [[]], {"": None}, {"__type__": "uuid", "__value__": {"hex": 5}}, {"__type__": "datetime"}, "9" * 5000),
    *("2026-13-45T99:99:99", "9999-12-31T23:59:59+14:00", "0001-01-01T00:00:00-14:00", {"password": {"a": [1]}}),
]
HEADERS = ["task", "id", "eta", "expires", "argsrepr", "kwargsrepr", "retries", "x-death", "compression", "\ud800", ""]
ADDRESSES = [*NAMES, "%ff%00", "_00", "%ED%A0%80"]
LISTS = [
    f"/admin/celery_fdb/{each}" for each in ("queue/?all", "queue/", "deadletter/", "session/", "queue/find/?id=t")
]
STATES = ["ready", "delayed", "leased"]
ACTIONS = [*DEEDS, "cancel", "run_now", "edit", "nonsense"]
VIEWS = ["change", "keys", "messages", "groups", "history", "action", "message"]


@pytest.fixture
def broker(tmp_path: Path, configure: Callable[..., None]) -> Any:
    from celery_fdb.contrib.django.pages import store

    configure(CELERY_FDB={"BROKER_URL": f"fdb+sqlite:///{tmp_path}/broker.db", "PAGE_SIZE": 3})
    return store.broker()


@pytest.fixture
def operator(login: Callable[..., Any]) -> Iterator[Any]:
    client = login("view_queue", "manage_queue", "view_body")
    client.handler.enforce_csrf_checks = False
    client.raise_request_exception = False
    return client


def value(chance: random.Random, depth: int = 3) -> Any:
    """Something JSON holds, rarely something sensible."""
    kind = chance.randrange(4) if depth else 0
    if kind == 1:
        return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
    if kind == 2:
        return {str(value(chance, 0))[:50]: value(chance, depth - 1) for _ in range(chance.randrange(3))}
    return chance.choice(ODD)


def payload(chance: random.Random) -> bytes:
    headers = {chance.choice(HEADERS): value(chance) for _ in range(chance.randrange(6))}
    properties = {str(value(chance, 0))[:50]: value(chance) for _ in range(chance.randrange(3))}
    kind = chance.choice(["application/json", "text/plain", "application/x-python-serialize", None, 5, [], "\ud800"])
    meta = json.dumps([kind, "utf-8", headers, properties, value(chance), value(chance)]).encode()
    body = chance.choice([b"[[], {}, {}]", b"\xff\x00", b"[" * 5_000, b'"\\ud800"', b"1" + b"0" * 9_000, b""])
    return mutated(chance, HEAD.pack(VERSION, len(meta)) + meta + body, often=4)


def mutated(chance: random.Random, data: bytes, often: int = 1) -> bytes:
    """One time in ``often``."""
    if chance.randrange(often):
        return data
    cut = chance.randrange(len(data) + 1)
    return chance.choice(
        [
            data[:cut],
            data[:cut] + chance.randbytes(chance.randrange(1, 9)) + data[cut:],
            data[:cut] + bytes([chance.randrange(256)]) + data[cut + 1 :],
            chance.randbytes(chance.randrange(40)),
            json.dumps(value(chance)).encode(),
        ]
    )


def fill(broker: Broker, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 6)):
        last = 253_402_300_799_999
        options: dict[str, Any] = {"due_ms": chance.choice([0, 0, last]), "expires_ms": chance.choice([0, 0, last])}
        options |= {"key": chance.choice(["", "k", "\x00<b>"]), "task_id": chance.choice(["", "t"])}
        with suppress(KombuFDBError):  # names that are too long
            broker._engine.publisher.publish([Publication("", chance.choice(NAMES), payload(chance), **options)])
    if chance.randrange(2):
        for job in broker.queue("q").take_many(2, 0):
            chance.choice([lambda job: None, lambda job: job.bury(error="\ud7ff<b>"), lambda job: job.release()])(job)
    if not chance.randrange(3):
        spoil(broker, chance)


def clear(broker: Broker) -> None:
    keys = broker._engine.keys

    def body(work: Any) -> None:
        work.tr.clear_range(keys.prefix, keys.format)
        work.tr.clear_range(keys.format + b"\x00", keys.prefix + b"\xff")

    broker._engine.transactions.write(body)


def spoil(broker: Broker, chance: random.Random) -> None:
    """Other bytes in some rows, but for the one by which everybody else would refuse the whole store."""
    engine = broker._engine
    begin, end = engine.keys.prefix, engine.keys.prefix + b"\xff"
    rows = [
        row
        for row in engine.transactions.read(lambda work: work.tr.get_range(begin, end))
        if row[0] != engine.keys.format
    ]
    changes = [(key, mutated(chance, old)) for key, old in chance.sample(rows, min(3, len(rows)))]

    def change(work: Any) -> None:
        for key, new in changes:
            work.tr.set(key, new)

    engine.transactions.write(change)


def links(page: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r'href="(/admin/celery_fdb/[^"]+)"', page)]


class Known(NamedTuple):
    """What the pages themselves link to, and the messages that they let select, by their queue's action."""

    urls: list[str]
    spots: dict[str, list[str]]


def look(client: Any, chance: random.Random) -> Known:
    urls = [each for url in LISTS for each in links(text(client.get(url)))]
    spots: dict[str, list[str]] = {}
    lists = {re.sub("/[a-z]+/$", "/messages/", each) for each in urls if each.endswith(("/change/", "/messages/"))}
    for url in chance.sample(sorted(lists), min(2, len(lists))):
        page = text(client.get(url, {"state": chance.choice(STATES)}))
        urls += links(page)
        spots[url.replace("/messages/", "/action/")] = re.findall(r'name="selected" value="([^"]+)"', page)
    return Known([each for each in urls if "/logout" not in each], spots)


def text(answer: Any) -> str:
    assert answer.status_code < 500, answer.exc_info
    return str(answer.content.decode())


def request(chance: random.Random, known: Known) -> tuple[str, str, dict[str, Any]]:
    """Method, URL, fields."""
    texts = ["", "q", "newest", *STATES, "00ff", "\x00", "\ud7ff", "k", "t", "x" * 9_000, "json", "1"]
    texts += ["[]", "{}", "[1]", "2031-01-02T03:04", "9999-12-31T23:59:59-14:00", "1h", "-", "shop.*", "10/m", "3.00"]
    names = [
        "id",
        "state",
        "key",
        "after",
        "order",
        "all",
        "format",
        "body",
        "e",
        "p",
        "filter",
        "prefix",
        "more",
        "mark",
    ]
    names += [*FIELDS, *(field.name for deed in DEEDS.values() for field in deed.fields)]
    fields: dict[str, Any] = {each: chance.choice(texts) for each in chance.sample(names, 4)}
    url = f"/admin/celery_fdb/queue/{quote(chance.choice(ADDRESSES), safe='%')}/{chance.choice(VIEWS)}/"
    if url.endswith("/message/"):
        url += f"{chance.choice([*STATES, 'x'])}.{chance.randbytes(5).hex()}.{'00' * 16}/"
    if known.urls and chance.randrange(3):
        url = chance.choice([*LISTS, *known.urls])
        fields = chance.choice([{}, {"body": "1"}, fields])
    elif known.spots:
        url, spots = chance.choice(sorted(known.spots.items()))
        fields |= {"selected": chance.sample(spots, chance.randrange(len(spots) + 1)) or ["ready.00.00"]}
    fields |= {"action": chance.choice(ACTIONS), "back": chance.choice(["/admin/", "//x", *texts])}
    fields |= chance.choice([{}, {"confirmed": "yes"}])
    method = "post" if "/action/" in url else chance.choice(["get", "get", "get", "post", "head", "put"])
    return method, url, fields


def test_no_page_answers_over_499(broker: Broker, operator: Any, fuzz: Callable[..., None]) -> None:
    from django.contrib.admin.models import LogEntry

    def target(chance: random.Random) -> None:
        clear(broker)
        fill(broker, chance)
        known = look(operator, chance)
        for _ in range(6):
            method, url, fields = request(chance, known)
            answer = getattr(operator, method)(url, fields if method != "put" else b"")
            assert answer.status_code < 500, (method, url, fields, answer.content[-2_000:], answer.exc_info)
        unfinished = LogEntry.objects.filter(change_message__endswith="begun.")
        assert not unfinished.exists()

    fuzz(target)
