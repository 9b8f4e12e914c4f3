"""The outbox of a Django project: in its transactions, and with processes that die."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from celery import chain
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import TestCase

from celery_fdb import install
from celery_fdb.contrib import outbox as module
from celery_fdb.contrib.outbox import MOST_ATTEMPTS, django
from celery_fdb.contrib.published import BrokerInTest
from kombu_fdb.engine.messages.publish import Publisher

ROOT = Path(__file__).parents[4]


@pytest.fixture
def app(url, new_app, monkeypatch):
    app = install(new_app(url, backend="cache+memory://"))
    app.conf.broker_connection_timeout = 2.0
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: app)
    return app


@pytest.fixture
def charge(app):
    from celery_fdb.contrib.outbox.django.models import OutboxRow

    @app.task(name="charge", shared=False, fair_key="customer")
    def charge(order, customer=""):
        pass

    yield app.tasks["charge"]
    OutboxRow.objects.all().delete()


@pytest.fixture
def sent(url):
    return BrokerInTest(url).published


def rows():
    from celery_fdb.contrib.outbox.django.models import OutboxRow

    return OutboxRow.objects.count()


def test_the_relay_publishes_a_row_of_a_transaction_that_the_program_manages(charge, sent):
    transaction.set_autocommit(False)
    try:
        django.delay(charge, 6)
        transaction.rollback()
        assert rows() == 0
        result = django.delay(charge, 7)
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert (rows(), sent()) == (1, [])
    call_command("fdb_relay", "--once")
    assert [each.headers["id"] for each in sent()] == [result.id]


def test_a_commit_publishes_exactly_one(charge, sent):
    with transaction.atomic():
        result = django.delay(charge, 7, customer="acme")
        assert rows() == 1
        assert sent() == []
    (message,) = sent()
    assert (message.headers["id"], message.args, message.key) == (result.id, [7], "acme")
    assert rows() == 0
    call_command("fdb_relay", "--once")
    assert len(sent()) == 1


def test_a_rollback_leaves_no_row_and_no_message(charge, sent):
    with pytest.raises(LookupError), transaction.atomic():
        django.delay(charge, 7)
        raise LookupError
    assert rows() == 0
    assert sent() == []


def test_a_savepoint_that_is_rolled_back_takes_only_its_own_along(charge, sent):
    with transaction.atomic():
        with pytest.raises(LookupError), transaction.atomic():
            django.delay(charge, 1)
            raise LookupError
        django.delay(charge, 2)
    assert [message.args for message in sent()] == [[2]]
    assert rows() == 0


def test_all_tasks_of_a_transaction_are_one_transaction_of_the_broker(charge, sent, monkeypatch):
    sizes = []
    publish = Publisher.publish
    monkeypatch.setattr(
        Publisher, "publish", lambda self, some, **kw: sizes.append(len(some)) or publish(self, some, **kw)
    )
    with transaction.atomic():
        for number in range(5):
            django.delay(charge, number)
        django.add(chain(charge.si(5), charge.si(6)))
    assert sizes == [6]
    assert len(sent()) == 6


def test_outside_of_a_transaction_it_is_published_at_once(charge, sent):
    django.delay(charge, 7)
    assert len(sent()) == 1


def test_in_djangos_test_case_callbacks_are_run_by_its_capture(charge, sent, database):
    with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
        django.delay(charge, 7)
    assert len(callbacks) == 1
    assert len(sent()) == 1


def test_eager_tasks_run_once_after_the_commit_beside_one_that_fails(app, database):
    ran = []

    @app.task(name="eager", shared=False)
    def eager(number):
        ran.append(number)
        if number == 8:
            raise LookupError(number)

    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    with TestCase.captureOnCommitCallbacks(execute=True):
        for number in (7, 8, 9):
            django.delay(app.tasks["eager"], number)
        assert ran == []
    assert sorted(ran) == [7, 8, 9]  # rows of one millisecond have no order
    assert rows() == 1


def test_a_countdown_counts_from_the_call(charge, sent, monkeypatch):
    monkeypatch.setattr("celery_fdb.contrib.outbox.django.database.DjangoOutbox.publish_committed", lambda _: None)
    before = datetime.now(UTC).timestamp()
    django.apply_async(charge, (7,), countdown=60)
    after = datetime.now(UTC).timestamp()
    monkeypatch.setattr("celery_fdb.contrib.outbox.Outbox.now_ms", lambda _: int((before + 30) * 1000))
    call_command("fdb_relay", "--once")
    (message,) = sent()
    assert before + 59.9 <= message.eta.timestamp() <= after + 60


def test_a_broker_that_does_not_answer_leaves_the_rows_to_the_relay(charge, sent, monkeypatch):
    """And is not asked again by the next request."""
    asked = []

    def send(*_):
        asked.append(1)
        raise ConnectionError("away") from charge.app.connection_for_write().recoverable_connection_errors[0]("away")

    monkeypatch.setattr(module, "send", send)
    for number in range(3):
        django.delay(charge, number)
    assert (len(asked), rows()) == (1, 3)
    monkeypatch.undo()
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: charge.app)
    call_command("fdb_relay", "--once")
    assert len(sent()) == 3


def test_poison_is_an_exit_code_and_tried_again_when_asked(charge, sent):
    from celery_fdb.contrib.outbox.django.models import OutboxRow

    django.add(charge.s())
    with pytest.raises(CommandError, match="exit code 1"):
        call_command("fdb_relay", "--once")
    OutboxRow.objects.update(due_ms=None, attempts=MOST_ATTEMPTS)
    row = OutboxRow.objects.get()
    assert row.task == "charge"
    assert "TypeError" in str(row.error)
    row.signature = row.signature.replace('"args": []', '"args": [7]')
    row.save()
    call_command("fdb_relay", "--once", "--retry-poison")
    assert len(sent()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--limit", "0"), ("--interval", "0"), ("--interval", "1e10"), ("--interval", "nan"), ("--database", "nosuch")],
)
def test_wrong_usage_of_the_relay(option, value):
    with pytest.raises(CommandError, match=option):
        call_command("fdb_relay", option, value)


def test_the_check_tells_of_a_missing_table():
    def found():
        every = checks.run_checks(include_deployment_checks=True)
        return [each for each in every if each.id == "celery_outbox.E001"]

    assert found() == []
    call_command("migrate", "celery_outbox", "zero", verbosity=0)
    (error,) = found()
    assert "migrate" in error.hint
    call_command("migrate", "celery_outbox", verbosity=0)
    assert found() == []


def test_the_migration_is_that_of_the_model():
    call_command("makemigrations", "celery_outbox", check=True, dry_run=True)


def test_the_admin_shows_rows_and_changes_none(charge, database):
    from django.contrib.auth.models import User
    from django.test import Client

    django.delay(charge, "secret argument")
    with connection.cursor() as cursor:
        error = "TypeError('password=hunter2')"
        cursor.execute("UPDATE celery_outbox SET due_ms = NULL, attempts = 10, error = %s", [error])
    User.objects.create_superuser("root", password="x")
    client = Client()
    client.login(username="root", password="x")
    page = client.get("/admin/celery_outbox/outboxrow/").content.decode()
    assert "charge" in page
    assert "failed for good" in page
    assert "TypeError(" in page
    assert "hunter2" not in page, "an earlier version stored it as it was"
    assert "secret argument" not in page
    assert client.get("/admin/celery_outbox/outboxrow/add/").status_code == 403
    for lookup in ("signature__contains", "signature__startswith", "error__contains"):
        assert client.get("/admin/celery_outbox/outboxrow/", {lookup: "secret"}).status_code == 400
    assert client.get("/admin/celery_outbox/outboxrow/", {"attempts__gt": 5}).status_code == 200


@pytest.mark.parametrize("use_tz", [True, False])
def test_the_admin_shows_moments_in_djangos_time_zone(configure, use_tz):
    from django.contrib.admin.utils import display_for_value

    from celery_fdb.contrib.outbox.django.admin import _moment

    configure(USE_TZ=use_tz, TIME_ZONE="America/New_York")
    assert display_for_value(_moment(0), "") == "Dec. 31, 1969, 7 p.m."


# -- processes that die ------------------------------------------------------------------------------------------------

PROJECT = """
import os, sys
from celery import Celery
from django.conf import settings
settings.configure(
    SECRET_KEY="x", USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["celery_fdb.contrib.outbox.django"],
    DATABASES={"default": {"ENGINE": os.environ["ENGINE"], "NAME": os.environ["NAME"], "HOST": os.environ["HOST"],
                           "USER": "shop"}},
)
import django
django.setup()
app = Celery("shop", broker=os.environ["BROKER"])

@app.task(name="charge")
def charge(order): ...

if __name__ == "__main__":
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""
DIES = """
import os, signal
from project import charge
from django.db import transaction
from celery_fdb.contrib.outbox.django import delay
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    delay(charge, 7)
"""


@pytest.fixture(params=["sqlite3", "postgresql"])
def env(request, url, tmp_path):
    """Of a project with a real database."""
    (tmp_path / "project.py").write_text(PROJECT)
    given = {"ENGINE": f"django.db.backends.{request.param}", "NAME": "shop.db", "HOST": ""}
    if request.param == "postgresql":
        dsn = dict(each.split("=") for each in request.getfixturevalue("postgresql").split())
        given |= {"NAME": dsn["dbname"], "HOST": dsn["host"]}
    return {**os.environ, "PYTHONPATH": str(ROOT), "BROKER": url, **given}


@pytest.mark.process
def test_a_web_process_killed_between_commit_and_publish_loses_nothing(env, sent, tmp_path):
    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, check=False, timeout=60).returncode

    assert run("project.py", "migrate", "--verbosity=0") == 0
    assert run("-c", DIES) == -signal.SIGKILL
    assert sent() == []
    assert run("project.py", "fdb_relay", "--once") == 0
    assert [message.args for message in sent()] == [[7]]
    assert run("project.py", "fdb_relay", "--once") == 0
    assert len(sent()) == 1


@pytest.mark.process
@pytest.mark.parametrize("env", ["sqlite3"], indirect=True)
def test_the_relay_ends_when_told(env, tmp_path):
    given = [sys.executable, "project.py"]
    subprocess.run([*given, "migrate", "--verbosity=0"], cwd=tmp_path, env=env, check=True, timeout=60)
    with subprocess.Popen([*given, "fdb_relay"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as relay:
        try:
            assert "relay started" in relay.stderr.readline()
            relay.send_signal(signal.SIGTERM)
            assert relay.wait(30) == 0
            assert "relay stopped" in relay.stderr.read()
        finally:
            relay.kill()
