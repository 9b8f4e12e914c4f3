"""Any request, and any bytes in the store: no page of the admin answers over 499, and each action leaves its audit.

The store's rows are mutated in value, among them those that a codec would never write; requests name queues, spots,
keys, states and actions that exist and that don't.
"""

from __future__ import annotations

import html
import importlib.util
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from store_messages import NAMES, clear, fill

from celery_fdb.inspection.filters import FIELDS
from celery_fdb.operations.catalogue import DEEDS
from kombu_fdb import Broker

pytest.importorskip("django", reason="Django is not installed")

_DJANGO = Path(__file__).parents[1] / "celery_fdb" / "contrib" / "django"
_spec = importlib.util.spec_from_file_location("django_conftest", _DJANGO / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
_django, database, login, configure = _shared._django, _shared.database, _shared.login, _shared.configure

pytestmark = [pytest.mark.usefixtures("database"), pytest.mark.timeout(0)]

#: A page takes long to make.
ROUNDS = 30
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
