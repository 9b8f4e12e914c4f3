"""The relay as a process: ``python -m celery_fdb.contrib.outbox``, with SQLite and, where it is, a real PostgreSQL."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from celery import Celery
from kit.processes import DEADLINE_S, until

from celery_fdb.contrib.outbox import DDL, INDEX_DDL, Outbox, clock_of, has_skip_locked, mark_of
from celery_fdb.contrib.outbox.relay import Relay, is_about_the_table
from celery_fdb.contrib.published import BrokerInTest

ROOT = Path(__file__).parents[3]
SHOP = """
import os, signal, sqlite3
from celery import Celery
from celery_fdb import install

from celery_fdb.contrib import outbox

outbox.LEASE_S = 1.0
outbox.BACKOFF = "0.1s"
app = install(Celery("shop", broker=os.environ["BROKER"], set_as_current=False))
app.conf.update(task_default_queue="q", broker_connection_timeout=2.0)

@app.task(name="add")
def add(one, two): ...

def connect():
    if "DATABASE" in os.environ:
        import psycopg
        return psycopg.connect(os.environ["DATABASE"])
    return sqlite3.connect("shop.db", timeout=30)

class Killed(sqlite3.Cursor):
    def execute(self, statement, *values):
        if statement.startswith("DELETE"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(statement, *values)

class Killing(sqlite3.Connection):
    def cursor(self, factory=Killed):
        return super().cursor(factory)

def connect_and_die():
    return sqlite3.connect("shop.db", timeout=30, factory=Killing)

no_function = 3
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(params=["sqlite", "postgresql"])
def connect(request, tmp_path, monkeypatch):
    if request.param == "sqlite":
        return lambda: sqlite3.connect(tmp_path / "shop.db", timeout=30)
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    dsn = request.getfixturevalue("postgresql")
    monkeypatch.setenv("DATABASE", dsn)
    return lambda: psycopg.connect(dsn)


@pytest.fixture
def database(connect):
    with closing(connect()) as connection:
        connection.execute(DDL)
        connection.execute(INDEX_DDL)
        connection.commit()
        yield connection


@pytest.fixture
def url(tmp_path):
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def box(connect, database):
    return Outbox(Celery("shop", set_as_current=False), connect)


@pytest.fixture
def relay(tmp_path, url):
    (tmp_path / "shop.py").write_text(SHOP)
    started = []

    def relay(*arguments, connect="connect", broker=url):
        log = (tmp_path / f"relay{len(started)}.log").open("wb")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "BROKER": broker}
        given = ["-A", "shop", "--connect", f"shop:{connect}", "--interval", "0.05"]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "celery_fdb.contrib.outbox", *given, *arguments],
            cwd=tmp_path,
            env=env,
            stderr=log,
        )
        log.close()
        process.log = Path(log.name)
        started.append(process)
        return process

    yield relay
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


def start(relay, *arguments):
    """Three relays that are at work, and end with 0 at a SIGTERM: one that is still starting dies of it."""
    processes = [relay(*arguments) for _ in range(3)]
    until(lambda: all("relay started" in each.log.read_text() for each in processes))
    return processes


def add(box, database, number=1, args=(1, 2)):
    cursor = database.cursor()
    ids = [box.add(cursor, box.app.signature("add", args)).id for _ in range(number)]
    database.commit()
    return ids


def left(database):
    cursor = database.cursor()
    cursor.execute("SELECT COUNT(*) FROM celery_outbox")
    (number,) = cursor.fetchone()
    database.commit()
    return number


def published(url):
    """Ids of the tasks in the store."""
    return [message.headers["id"] for message in BrokerInTest(url).published()]


def test_it_publishes_what_comes_and_stops_when_told(box, database, relay, url):
    process = relay()
    until(lambda: "relay started" in process.log.read_text())
    ids = add(box, database, 3)
    until(lambda: left(database) == 0)
    ids += add(box, database)
    until(lambda: left(database) == 0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert "relay stopped, 4 published" in process.log.read_text()
    assert sorted(published(url)) == sorted(ids)


@pytest.mark.parametrize("killed", [0, 1])
def test_several_relays_at_once_publish_each_row_once(box, database, relay, url, killed):
    processes = start(relay, "--limit", "7")
    ids = add(box, database, 300)
    for process in processes[:killed]:
        until(lambda: left(database) < 300)
        process.kill()
    until(lambda: left(database) == 0)
    for process in processes[killed:]:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert sorted(published(url)) == sorted(ids)


def test_relays_that_claim_at_once_take_different_rows(box, database, connect):
    """On PostgreSQL a row that another transaction has locked is passed over, not waited for."""
    add(box, database, 4)
    with closing(connect()) as one, closing(connect()) as two:
        if not has_skip_locked(one):
            pytest.skip("this database has no SKIP LOCKED")
        query = "SELECT id FROM celery_outbox LIMIT 2 FOR UPDATE SKIP LOCKED"
        first, second = one.cursor(), two.cursor()
        first.execute(query)
        second.execute(query)
        assert not {*first.fetchall()} & {*second.fetchall()}
        one.rollback()
        two.rollback()


def test_what_the_drivers_tell(connect, database):
    is_sqlite = isinstance(database, sqlite3.Connection)
    assert mark_of(database) == ("?" if is_sqlite else "%s")
    assert has_skip_locked(database) is not is_sqlite
    assert ("julianday" in clock_of(database)) is is_sqlite


@pytest.mark.parametrize("connect", ["sqlite"], indirect=True)
def test_a_relay_killed_between_publish_and_delete_publishes_once(box, database, relay, url):
    ids = add(box, database, 3)
    process = relay(connect="connect_and_die")
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert left(database) == 3
    assert len(published(url)) == 3, "before it died"
    process = relay()
    until(lambda: left(database) == 0)
    assert sorted(published(url)) == sorted(ids)


def test_once_publishes_what_is_due_and_ends(box, database, relay, url):
    ids = add(box, database, 5)
    process = relay("--once", "--limit", "2")
    assert process.wait(DEADLINE_S) == 0
    assert sorted(published(url)) == sorted(ids)


def test_poison_is_told_by_the_exit_code_and_tried_again_when_asked(box, database, relay, url):
    add(box, database, args=(1,))
    add(box, database)
    assert relay("--once").wait(DEADLINE_S) == 1
    process = relay()
    cursor = database.cursor()

    def is_poison():
        cursor.execute("SELECT attempts, error FROM celery_outbox WHERE due_ms IS NULL")
        found = cursor.fetchall()
        database.commit()
        return found

    ((attempts, error),) = until(is_poison)
    assert (attempts, "TypeError" in error) == (10, True)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
    process = relay("--once", "--retry-poison")
    assert process.wait(DEADLINE_S) == 1
    assert "to be retried: 1 row" in process.log.read_text()
    assert len(published(url)) == 1


@pytest.mark.parametrize(
    "says",
    [
        "no such table: celery_outbox",
        'relation "celery_outbox" does not exist',
        "(1146, \"Table 'shop.celery_outbox' doesn't exist\")",
    ],
)
def test_a_table_that_is_missing_is_not_a_database_that_is_away(says, caplog):
    assert is_about_the_table(RuntimeError(says))
    assert not is_about_the_table(RuntimeError("could not connect to server"))
    Relay(Outbox(Celery(set_as_current=False), lambda: None))._complain(RuntimeError(says))
    assert "has no table celery_outbox: execute celery_fdb.contrib.outbox.DDL" in caplog.text
    assert "does not answer" not in caplog.text


def test_a_broker_that_comes_back(box, database, relay, url, tmp_path):
    ids = add(box, database)
    away = f"fdb+sqlite:///{tmp_path}/later/broker.db"
    process = relay("--once", broker=away)
    assert process.wait(DEADLINE_S) == 3
    process = relay(broker=away)
    until(lambda: "broker does not answer" in process.log.read_text())
    assert left(database) == 1
    (tmp_path / "later").mkdir(mode=0o700)
    until(lambda: left(database) == 0)
    assert published(away) == ids


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--connect", "shop:nothing"], "package.module:function", 2),
        (["--connect", "shop:no_function"], "opens a connection", 2),
        (["-A", "nowhere"], "can't import this Celery app", 2),
    ],
)
@pytest.mark.parametrize("connect", ["sqlite"], indirect=True)
def test_wrong_usage(connect, relay, arguments, says, code):
    process = relay(*arguments)
    assert process.wait(DEADLINE_S) == code
    assert says in process.log.read_text()


@pytest.mark.parametrize("arguments", [[], ["--once"], ["--retry-poison"]])
@pytest.mark.parametrize("connect", ["sqlite"], indirect=True)
def test_without_its_table_it_does_not_start(connect, relay, arguments):
    process = relay(*arguments)
    assert process.wait(DEADLINE_S) == 3
    assert "no such table" in process.log.read_text()
