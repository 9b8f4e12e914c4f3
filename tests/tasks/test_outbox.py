"""The outbox on an SQL database: SQLite's, as an application has it."""

from __future__ import annotations

import os
import signal
import sqlite3

import pytest
from celery import group

from celery_fdb import outbox as module
from celery_fdb.outbox import DDL, Outbox
from kombu_fdb.testing.processes import fork


@pytest.fixture
def connect(tmp_path):
    return lambda: sqlite3.connect(tmp_path / "shop.db")


@pytest.fixture
def database(connect):
    connection = connect()
    connection.execute(DDL)
    yield connection
    connection.close()


@pytest.fixture
def box(app, connect, database):
    @app.task(name="add", shared=False)
    def add(one, two):
        pass

    return Outbox(app, connect)


def add(box, database, signature=None, commit=True):
    result = box.add(database.cursor(), signature or box.app.tasks["add"].s(1, 2))
    (database.commit if commit else database.rollback)()
    return result


def test_a_committed_task_is_published_once(box, database, sent):
    result = add(box, database)
    assert [box.relay(), box.relay()] == [1, 0]
    ((name, args, _, headers),) = sent()
    assert (name, args, headers["id"]) == ("add", [1, 2], result.id)


def test_a_rolled_back_one_is_not(box, database):
    add(box, database, commit=False)
    assert box.relay() == 0


def test_a_web_process_killed_after_its_commit_loses_nothing(box, database, connect, sent):
    def die():
        connection = connect()
        box.add(connection.cursor(), box.app.tasks["add"].s(1, 2))
        connection.commit()
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(die)
    child.join(20)
    assert child.exitcode == -signal.SIGKILL
    assert box.relay() == 1
    assert len(sent()) == 1


def test_a_relay_killed_between_publish_and_delete_publishes_once(box, database, sent, monkeypatch):
    add(box, database, group(box.app.tasks["add"].s(n, n) for n in range(3)))
    monkeypatch.setattr(module, "LEASE_S", 0)

    def die():
        send = box._send

        def kill(*args):
            send(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        box._send = kill
        box.relay()

    child = fork(die)
    child.join(20)
    assert child.exitcode == -signal.SIGKILL
    assert box.relay() == 1
    assert len(sent()) == 3


def test_a_poison_row_is_kept_with_its_error_and_stops_no_other(box, database, sent, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 0)
    add(box, database, box.app.tasks["add"].s(1))
    add(box, database)
    for _ in range(module.MOST_ATTEMPTS + 1):
        box.relay()
    ((attempts, error, due),) = database.execute("SELECT attempts, error, due FROM celery_outbox").fetchall()
    assert (attempts, due) == (module.MOST_ATTEMPTS, None)
    assert "TypeError" in error
    assert len(sent()) == 1
