"""What no honest publisher stores and no link of ours asks for: the pages answer below 500, and say what is wrong."""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery

from kombu_fdb import Broker
from kombu_fdb.model import Publication
from kombu_fdb.primitives.headers import HEAD, VERSION
from kombu_fdb.routing.tables import QueueDeclaration

pytestmark = pytest.mark.usefixtures("database")

#: A lone surrogate and NUL, as JSON may hold them: UTF-8 can't write the one, PostgreSQL stores no other.
HOSTILE = "shop.\ud800\x00charge"


def at(view: str, *arguments: str) -> str:
    from django.urls import reverse

    return reverse(f"admin:celery_fdb_{view}", args=arguments)


def envelope(headers: Any = None, properties: Any = None, body: bytes = b"[[], {}, {}]") -> bytes:
    """A payload that no publisher of ours would make."""
    meta = json.dumps(["application/json", "utf-8", headers or {}, properties or {}, "", "q"]).encode()
    return HEAD.pack(VERSION, len(meta)) + meta + body


def publish(broker: Broker, payload: bytes = b"x", **options: Any) -> None:
    broker._engine.publisher.publish([Publication("", "q", payload, **options)])


def ok(client: Any, url: str, **query: str) -> str:
    answer = client.get(url, query)
    assert answer.status_code == 200, answer.content.decode()[-1000:]
    return html.unescape(answer.content.decode())


def links(client: Any, url: str) -> list[str]:
    """The messages that a page links to."""
    return [html.unescape(each) for each in re.findall(r'href="([^"]+/message/[^"]+)"', ok(client, url))]


def act(client: Any, queue: str, **fields: Any) -> Any:
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', ok(client, at("queue_change", queue)))
    assert token is not None
    fields = {"csrfmiddlewaretoken": token[1], "confirmed": "yes", **fields}
    return client.post(at("queue_action", queue), fields, follow=True)


def selected(client: Any, queue: str) -> list[str]:
    return re.findall(r'name="selected" value="([^"]+)"', ok(client, at("queue_messages", queue)))


def entries() -> list[Any]:
    from django.contrib.admin.models import LogEntry

    return list(LogEntry.objects.order_by("pk"))


def audit() -> list[str]:
    return [each.change_message for each in entries()]


def first_links(page: str) -> list[str]:
    """Of the rows of a list; older versions of Django have others beside it, in the menu."""
    return re.findall(r'<th scope="row"><a href="([^"]+)"', page[page.index('id="content-start"') :])


def test_a_queue_without_a_name(broker: Broker, operator: Any) -> None:
    """A message without a routing key makes it."""
    broker._engine.publisher.publish([Publication("", "", envelope({"task": "shop.charge"}))])
    page = ok(operator, at("queue_changelist"))
    (url,) = first_links(page)
    for view in ("change", "keys", "messages", "history"):
        ok(operator, url.replace("/change/", f"/{view}/"))
    (message,) = links(operator, url.replace("/change/", "/messages/"))
    assert "shop.charge" in ok(operator, message)


@pytest.mark.parametrize("name", ["_", "__", "_2F", ".", ".."])
def test_a_queue_whose_name_looks_like_a_part_of_an_address(broker: Broker, operator: Any, name: str) -> None:
    broker.queue(name).put(b"x")
    (url,) = first_links(ok(operator, at("queue_changelist")))
    assert "/../" not in url
    assert "/./" not in url
    assert f"<title>{name} |" in ok(operator, url)


def test_text_that_neither_utf8_nor_postgresql_can_hold(broker: Broker, operator: Any) -> None:
    headers = {"task": HOSTILE, "id": HOSTILE, HOSTILE: [HOSTILE], "argsrepr": HOSTILE}
    publish(broker, envelope(headers, {"reply_to": HOSTILE}), task_id="t")
    (message,) = links(operator, at("queue_messages", "q"))
    assert "shop.\ufffd" in ok(operator, message, body="1")
    ok(operator, at("queue_find"), id="t")
    answer = act(operator, "q", action="cancel", selected=selected(operator, "q"))
    assert answer.status_code == 200
    assert broker.queue("q").count() == 0
    (told,) = audit()
    assert told.startswith("Cancelled 1 message of q: shop.\ufffd\ufffdcharge")


def test_a_queue_with_nul_in_its_name_is_in_the_audit(broker: Broker, operator: Any) -> None:
    broker.queue("a\x00b").put(b"x")
    (url,) = first_links(ok(operator, at("queue_changelist")))
    answer = act(operator, "a\x00b", action="pause")
    assert answer.status_code == 200
    (entry,) = entries()
    assert "\x00" not in entry.change_message + entry.object_id + entry.object_repr
    assert "Paused a" in ok(operator, url.replace("/change/", "/history/"))


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/Los_Angeles"])
@pytest.mark.parametrize("has_zone", [True, False])
def test_the_last_moment_that_the_store_holds(
    broker: Broker, operator: Any, configure: Any, zone: str, has_zone: bool
) -> None:
    configure(TIME_ZONE=zone, USE_TZ=has_zone)
    last = 253_402_300_799_999
    publish(broker, due_ms=last)
    publish(broker, expires_ms=last)
    for state in ("ready", "delayed"):
        (message,) = links(operator, at("queue_messages", "q") + f"?state={state}")
        assert "9999-12-" in ok(operator, message)


@pytest.mark.parametrize("name", ["items", "keys", "count", "0"])
def test_a_queue_argument_of_any_name(broker: Broker, operator: Any, name: str) -> None:
    broker.declare("q", arguments={name: 5, "x-max-length": 7}).put(b"x")
    page = ok(operator, at("queue_change", "q"))
    assert f"<code>{name}=5</code>" in page
    assert "<code>x-max-length=7</code>" in page


@pytest.mark.parametrize("exchange", [5, ["a"], {"a": 1}, "nowhere", "\x00", None])
def test_a_dead_letter_exchange_of_any_kind(broker: Broker, operator: Any, exchange: Any) -> None:
    publish(broker)
    arguments = {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": exchange}
    row = QueueDeclaration("q", arguments=arguments).encode()
    broker._engine.transactions.write(lambda work: work.tr.set(broker._engine.keys.queue("q"), row))
    ok(operator, at("deadletter_changelist"))


def test_what_is_too_long_for_a_key_of_the_store(broker: Broker, viewer: Any) -> None:
    for view in ("queue_change", "queue_keys", "queue_messages"):
        assert viewer.get(at(view, "x" * 200_000)).status_code < 500
    assert viewer.get(at("queue_find"), {"id": "x" * 200_000}).status_code < 500


def test_rows_that_nobody_can_read_are_a_page_that_says_so(broker: Broker, viewer: Any) -> None:
    publish(broker)
    engine = broker._engine
    engine.transactions.write(lambda work: work.tr.set(engine.keys.control("q"), b"\xff"))
    answer = viewer.get(at("queue_change", "q"))
    assert 400 <= answer.status_code < 500
    assert "be read" in answer.content.decode()


def test_what_could_not_be_read_is_shown_without_its_secrets(
    broker: Broker, viewer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``UnicodeDecodeError`` holds the bytes."""

    def fail(*_: Any, **__: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"password=hunter2 \xff", 17, 18, "invalid start byte")

    publish(broker)
    monkeypatch.setattr("celery_fdb.inspection.overview.look", fail)
    answer = viewer.get(at("queue_changelist"))
    assert answer.status_code == 422
    assert "hunter2" not in answer.content.decode()
    assert "password=" in answer.content.decode()


# -- the audit ---------------------------------------------------------------------------------------------------------


class Bug(BaseException):
    """Anything at all."""


@pytest.mark.parametrize("error", [RuntimeError("a bug \ud800\x00"), KeyError(), MemoryError(), Bug("gone")])
def test_an_entry_of_the_audit_always_ends(
    broker: Broker, operator: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    publish(broker)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # xdist can't hand on what is not UTF-8
    monkeypatch.setattr(type(broker._engine.queues), "change_control", fail)
    with suppress(type(error)):
        act(operator, "q", action="pause")
    (told,) = audit()
    assert told.startswith(f"Pause (q): failed, {type(error).__name__}")


# -- cancel ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(url: str, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Celery app of a project, with results."""
    app = Celery("project", broker=url, backend="cache+memory://", set_as_current=False)
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: app)
    configure(CELERY_FDB={"APP": "project.celery:app"})
    yield app
    app.pool.force_close_all()
    app.close()


def test_a_cancelled_task_is_revoked(project: Celery, operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(project.backend, "on_chord_part_return", lambda request, state, _: told.append(request.group))
    sent = project.send_task("shop.charge", queue="q", group_id="g", chord={"task": "shop.sum", "args": []})
    other = project.send_task("shop.charge", queue="q")
    answer = act(operator, "q", action="cancel", selected=selected(operator, "q"))
    assert (sent.state, other.state) == ("REVOKED", "REVOKED")
    assert told == ["g"]
    assert "became REVOKED" in answer.content.decode()
    assert "became REVOKED" in audit()[0]


def test_a_result_backend_that_is_away_is_told_of(
    project: Celery, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = project.send_task("shop.charge", queue="q")
    monkeypatch.setattr(project.backend, "store_result", lambda *_, **__: 1 / 0)
    answer = act(operator, "q", action="cancel", selected=selected(operator, "q"))
    assert "could not be marked as REVOKED" in answer.content.decode()
    assert sent.id in audit()[0]
    assert "could not be marked as REVOKED" in audit()[0]


def test_without_an_app_the_page_says_who_is_not_told(app: Celery, broker: Broker, operator: Any) -> None:
    app.send_task("shop.charge", queue="q")
    chosen = selected(operator, "q")
    assert "Set CELERY_FDB" in act(operator, "q", action="cancel", selected=chosen).content.decode()
    assert "Set CELERY_FDB" in audit()[0]


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secrets_are_masked_wherever_they_stand(broker: Broker, operator: Any) -> None:
    hidden = "hunter2"
    headers = {
        "task": "shop.charge",
        "context": {"user": {"password": hidden}, "urls": [f"redis://:{hidden}@host"]},
        "kwargsrepr": f"{{'api_key': '{hidden}'}}",
        "Authorization": f"Bearer {hidden}",
    }
    publish(broker, envelope(headers, {"reply_to": f"amqp://a:{hidden}@host"}))
    (message,) = links(operator, at("queue_messages", "q"))
    assert hidden not in ok(operator, message, body="1")
    error = {"error": f"token={hidden}", "traceback": f"connect('amqp://a:{hidden}@h')", "env": {"secret": hidden}}
    (lease,) = (each._delivery.lease for each in broker.queue("q").take_many(1, 10))
    broker._engine.messages.reject([lease], **error, attempts=[{"time": "", "error": f"password: {hidden}"}])
    (message,) = links(operator, at("queue_messages", "q.dead"))
    assert hidden not in ok(operator, message, body="1")
    assert "token=" in ok(operator, message)


def test_secrets_in_queue_arguments_are_masked(broker: Broker, viewer: Any) -> None:
    broker.declare("q", arguments={"x-token": "hunter2", "x-url": "http://a:hunter2@b"}).put(b"")
    assert "hunter2" not in ok(viewer, at("queue_change", "q"))
