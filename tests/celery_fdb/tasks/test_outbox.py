"""The outbox on an SQL database: SQLite's, as an application has it."""

import os
import signal
import sqlite3
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from celery import chain, chord, group
from celery.app.trace import build_tracer
from kit.processes import fork
from kombu.exceptions import OperationalError

from celery_fdb.contrib import outbox as module
from celery_fdb.contrib.outbox import DDL, INDEX_DDL, Outbox, OutboxTable, clock_of, in_transaction
from celery_fdb.contrib.published import BrokerInTest
from kombu_fdb import InvalidArgument
from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.engine.messages.publish import Publisher
from kombu_fdb.errors import CommitUnknown, StoreUnavailable


@pytest.fixture
def connect(tmp_path):
    return lambda: sqlite3.connect(tmp_path / "shop.db")


@pytest.fixture
def database(connect):
    with closing(connect()) as connection:
        connection.execute(DDL)
        connection.execute(INDEX_DDL)
        yield connection


@pytest.fixture
def box(app, connect, database):
    @app.task(name="add", shared=False)
    def add(one, two):
        pass

    return Outbox(app, connect)


@pytest.fixture
def task(box):
    return box.app.tasks["add"]


def add(box, database, signature=None, commit=True):
    result = box.add(database.cursor(), signature or box.app.tasks["add"].s(1, 2))
    (database.commit if commit else database.rollback)()
    return result


def close_(*_):
    pass


def rows(database, columns="attempts, error, due_ms"):
    return database.execute(f"SELECT {columns} FROM celery_outbox").fetchall()


@pytest.fixture
def hurry(monkeypatch):
    """What waits for a moment is due at once."""
    monkeypatch.setattr(module, "LEASE_S", 0)
    monkeypatch.setattr(module, "BACKOFF", "0s")


def test_no_other_program_writes_within_a_claim(box, connect, database):
    """As Django begins a transaction, SQLite would end one that has read before another program wrote."""

    @contextmanager
    def begun():
        database.execute("BEGIN")
        with in_transaction(database) as cursor:
            yield cursor

    class Table(OutboxTable):
        def _move(self, *claimed):
            with closing(connect()) as other, pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("PRAGMA busy_timeout = 0")
                other.execute("UPDATE celery_outbox SET attempts = 9")
            return super()._move(*claimed)

    add(box, database)
    assert len(Table(begun, "?", clock_of(database)).claim(1, 1000)) == 1


def test_a_rolled_back_one_is_not(box, database):
    add(box, database, commit=False)
    assert box.relay() == 0


def killed(work):
    """In a child, by itself. One that was forked while another thread was inside of SQLite waits for it for ever."""
    while (child := fork(work)).join(20) or child.exitcode is None:
        child.kill()
    assert child.exitcode == -signal.SIGKILL


def test_a_web_process_killed_after_its_commit_loses_nothing(box, database, connect, sent):
    def die():
        connection = connect()
        box.add(connection.cursor(), box.app.tasks["add"].s(1, 2))
        connection.commit()
        os.kill(os.getpid(), signal.SIGKILL)

    killed(die)
    assert box.relay() == 1
    assert len(sent()) == 1


def test_a_tasks_own_dedup_id_makes_two_rows_one_message(box, database, sent, task):
    for _ in range(2):
        add(box, database, task.s(1, 2).set(dedup_id="order-1"))
    assert [box.relay(1), box.relay(1)] == [1, 1]
    assert len(sent()) == 1


def test_the_rows_id_holds_though_the_window_of_the_tasks_own_is_over(box, database, sent, task, hurry, monkeypatch):
    add(box, database, task.s(1, 2).set(dedup_id="order-1", dedup_window=0.001))
    with monkeypatch.context() as killed:
        killed.setattr("celery_fdb.contrib.outbox.OutboxTable.delete", lambda *_: None)
        assert [box.relay(), box.relay()] == [1, 1]
    assert len(sent()) == 1


# -- moments -----------------------------------------------------------------------------------------------------------


def test_a_countdown_counts_from_the_call(box, database, url, task, monkeypatch):
    early = datetime.now(UTC) - timedelta(hours=1)
    monkeypatch.setattr(box, "now_ms", lambda: int(early.timestamp() * 1000))
    add(box, database, task.s(1, 2).set(countdown=3500, expires=3700))
    monkeypatch.undo()
    box.relay()
    (message,) = BrokerInTest(url).published("q")
    eta, expires = (datetime.fromisoformat(message.headers[name]) for name in ("eta", "expires"))
    assert abs(eta - early - timedelta(seconds=3500)) < timedelta(seconds=1)
    assert abs(expires - early - timedelta(seconds=3700)) < timedelta(seconds=1)


def test_of_a_canvas_what_is_published_with_it_counts_from_the_call(box, database, task):
    later = task.s(1, 2).set(countdown=60)
    add(box, database, chain(later, later))
    add(box, database, group(later, later))
    add(box, database, chord([later, later], later))
    texts = [text for (text,) in rows(database, "signature")]
    assert [text.count('"eta"') for text in texts] == [1, 2, 2]
    assert [text.count('"countdown": 60') for text in texts[:2]] == [1, 0]


def test_arguments_are_those_of_the_call(box, database, sent, task):
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    add(box, database, task.s(moment, b"bytes"))
    box.relay()
    ((_, args, *_),) = sent()
    assert args == [moment, b"bytes"]


def test_what_is_no_json_is_refused_at_the_call(box, database, task):
    with pytest.raises(TypeError):
        add(box, database, task.s(object(), 1))
    assert rows(database) == []


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_relay_killed_between_publish_and_delete_publishes_once(box, database, sent, task, hurry, monkeypatch):
    add(box, database, group(task.s(n, n) for n in range(3)))

    def die():
        def kill(*args):
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr("celery_fdb.contrib.outbox.OutboxTable.delete", kill)
        box.relay()

    killed(die)
    assert box.relay() == 1
    assert len(sent()) == 3


def test_a_chord_that_is_published_again_keeps_the_parts_that_have_returned(box, connect, url, task, hurry):
    """The store drops the messages of its header, so those parts don't return again."""
    app = box.app
    app.conf.result_backend = url
    result = box.add((database := connect()).cursor(), chord([task.si(1, 1), task.si(2, 2)], task.s(0)))
    database.commit()

    def work(number):
        for _ in range(number):
            message = channel.basic_get("q")
            args, kwargs, embed = message.decode()
            fields = {**message.headers, **embed, "delivery_info": {"redelivered": False}, "is_eager": False}
            build_tracer("add", task, app=app)(message.headers["id"], args, kwargs, fields)
            message.ack()
        return message.headers["id"]

    with app.connection_for_read() as connection, box.opened() as table:
        channel = connection.channel()
        module.send(app, table.claim(1, 0))  # a relay that is killed before it deletes the row
        work(1)
        assert box.relay() == 1
        assert work(2) == result.id
        assert channel.basic_get("q") is None
    database.close()


def test_a_poison_row_is_kept_with_its_error_and_stops_no_other(box, database, sent, task, hurry):
    add(box, database, task.s(1))
    add(box, database)
    for _ in range(module.MOST_ATTEMPTS + 1):
        box.relay()
    ((attempts, error, due),) = rows(database)
    assert (attempts, due) == (module.MOST_ATTEMPTS, None)
    assert "TypeError" in error
    assert len(sent()) == 1


class Validation(ValueError):
    """One that quotes its input."""

    def __repr__(self):
        return "\0" * 10 + "password=hunter2 " + "x" * 100_000


def test_an_error_that_the_database_does_not_take_stops_no_other(box, database, sent, task, monkeypatch):
    """It is cut, and without NUL; if it can't be stored all the same, the attempt counts without it."""
    real, told = OutboxTable.fail, []

    def fail(self, row, error, pause_ms):
        told.append(error)
        if len(told) == 1:
            raise ValueError("no room")
        real(self, row, error, pause_ms)

    monkeypatch.setattr(OutboxTable, "fail", fail)
    send = module.send

    def refuse(app, claimed):
        if any('"bad"' in each.signature for each in claimed):  # in quotes: an id may contain the three letters
            raise Validation
        return send(app, claimed)

    monkeypatch.setattr(module, "send", refuse)
    add(box, database, task.s("bad", 1))
    add(box, database, task.s("bad", 2))
    add(box, database)
    assert box.relay() == 1
    assert [each for each in told if each != module.UNTOLD] == [told[0], told[-1]]
    assert all(len(each) <= module.ERROR_LENGTH + 50 and "\0" not in each and "hunter2" not in each for each in told)
    with box.opened() as table:
        assert table.count_failed() == 2


def test_a_failed_row_waits_before_its_next_attempt(box, database, task):
    add(box, database, task.s(1))
    before = box.now_ms()
    assert [box.relay(), box.relay()] == [0, 0]
    ((attempts, _, due),) = rows(database)
    assert attempts == 1
    assert before + 1000 <= due <= box.now_ms() + 1000


def test_a_poison_row_can_be_tried_again(box, database, sent, task, hurry):
    add(box, database, task.s(1))
    for _ in range(module.MOST_ATTEMPTS):
        box.relay()
    with box.opened() as table:
        assert table.retry_poison() == 1

    @box.app.task(name="later", shared=False)
    def later(one):
        pass

    database.execute("UPDATE celery_outbox SET signature = replace(signature, '\"add\"', '\"later\"')")
    database.commit()
    assert box.relay() == 1
    assert len(sent()) == 1


def test_a_row_that_is_no_signature_is_poison(box, database, hurry):
    database.execute("INSERT INTO celery_outbox VALUES ('x', '{', 0, 0, 0, NULL)")
    database.commit()
    box.relay()
    assert rows(database, "attempts") == [(1,)]


def test_a_broker_that_does_not_answer_counts_against_no_row_and_they_are_given_back(
    box, database, sent, task, tmp_path
):
    url = box.app.conf.broker_url
    add(box, database)
    before = rows(database)
    box.app.conf.broker_url = f"fdb+sqlite:///{tmp_path}/nowhere/broker.db"
    box.app._pool = box.app.amqp._producer_pool = None
    with pytest.raises(OperationalError):
        box.relay()
    assert rows(database) == before
    box.app.conf.broker_url = url
    box.app._pool = box.app.amqp._producer_pool = None
    assert box.relay() == 1
    assert len(sent()) == 1


@pytest.mark.parametrize("error", [StoreUnavailable, CommitUnknown])
def test_nor_does_one_that_fails_in_the_middle(box, database, sent, monkeypatch, error):
    add(box, database)
    before = rows(database)
    publish = Publisher.publish

    def fail(*args, **options):
        publish(*args, **options)
        raise error

    with monkeypatch.context() as outage:
        outage.setattr(Publisher, "publish", fail)
        with pytest.raises(OperationalError):
            box.relay()
    assert rows(database) == before
    assert box.relay() == 1
    assert len(sent()) == 1, "it was stored before"


def test_nor_does_one_that_does_not_answer_while_a_queue_is_declared(box, database, sent, task, monkeypatch):
    """Kombu's repetition would get another channel, which does not have the batch: an error that counts."""
    box.app.conf.task_publish_retry_policy = {"max_retries": 3, "interval_start": 0}
    add(box, database)
    add(box, database, task.s(3, 4).set(queue="refused"))
    before = rows(database)
    declare, refusals = Queues.declare, [StoreUnavailable("it does not answer")]

    def refuse(self, declaration, **options):
        if declaration.name == "refused" and refusals:
            raise refusals.pop()
        return declare(self, declaration, **options)

    monkeypatch.setattr(Queues, "declare", refuse)
    with pytest.raises(OperationalError):
        box.relay()
    assert rows(database) == before
    assert sent() == []
    assert box.relay() == 2
    assert [len(sent()), len(sent("refused"))] == [1, 1]


def test_a_relay_whose_lease_is_over_takes_nothing_from_the_next(box, database, hurry):
    add(box, database)
    with box.opened() as table:
        (first,) = table.claim(1, 0)
        (second,) = table.claim(1, 60_000)
        assert second.lease_ms > first.lease_ms
        table.release([first])
        table.fail(first, "late", None)
    assert rows(database) == [(0, None, second.lease_ms)]


@pytest.mark.parametrize("skew_s", [-3600, 3600])
@pytest.mark.parametrize("who", ["writer", "relay"])
def test_clocks_that_differ_neither_delay_a_row_nor_end_a_lease(box, database, monkeypatch, skew_s, who):
    """The database's clock decides, whatever the hosts of writers and relays believe."""

    def skewed(self):
        return int((time.time() + skew_s) * 1000)

    with monkeypatch.context() as skew:
        if who == "writer":
            skew.setattr("kombu_fdb.primitives.clock.Clock.wall_ms", skewed)
        add(box, database)
    if who == "relay":
        monkeypatch.setattr("kombu_fdb.primitives.clock.Clock.wall_ms", skewed)
    with box.opened() as table:
        assert table.has_due()
        (row,) = table.claim(1, 60_000)
        monkeypatch.setattr("kombu_fdb.primitives.clock.Clock.wall_ms", lambda _: int((time.time() - skew_s) * 1000))
        assert not table.has_due()
        assert table.claim(1, 60_000) == []
        table.fail(row, "in vain", 60_000)
        assert table.claim(1, 60_000) == []
    ((_, _, due),) = rows(database)
    assert 0 < due - time.time() * 1000 <= 60_000


def test_a_database_without_a_clock_that_is_known(app, database):
    class Cursor:
        def execute(self, query, values=()):
            if "celery_outbox" not in query:
                raise RuntimeError("a syntax error")

        def fetchall(self):
            return []

        def close(self):
            pass

    class Connection:
        cursor, commit, rollback, close = Cursor, close_, close_, close_

    with pytest.raises(InvalidArgument, match="clock="), Outbox(app, Connection, "?").opened():
        pass


def test_a_driver_that_tells_no_placeholder(box):
    class Cursor:
        pass

    with pytest.raises(InvalidArgument, match="mark='%s'"):
        box.add(Cursor(), box.app.tasks["add"].s(1, 2))
