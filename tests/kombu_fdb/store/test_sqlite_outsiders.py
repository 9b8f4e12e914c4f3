"""What others do to the file with their own tools, beside a busy broker: it goes on, and its plans stay what they are.

Statistics (``ANALYZE``, ``PRAGMA optimize``) that were made when the broker held little, its normal state, stay in the
file: a plan that the planner may choose by them can be a scan of the table for good.
"""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit.conformance.queue import Bench
from kit.duties import replay
from kit.processes import in_child

from kombu_fdb import Broker
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, Publication, View
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.sqlite import open_file
from kombu_fdb.store.sqlite.database import SqliteDatabase

#: Of files that are made today, and of before.
SCHEMAS = [
    open_file.SCHEMA.split(";")[0],
    "CREATE TABLE kv (k BLOB NOT NULL PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID",
]
#: Literals in what SQLite tells of a statement.
LITERALS = re.compile(r"[xX]'[0-9A-Fa-f]*'|\b\d+\b|-1")


def live(bench):
    """Messages of each kind come, wait, move and go; everything is looked at, and the duties run."""
    engine = bench.engine
    engine.queues.declare_exchange(Exchange("x", "topic"))
    engine.queues.declare(QueueDeclaration("full", arguments={"x-max-length": 1, "x-message-ttl": 1}))
    engine.queues.bind("q", "x", "#")
    engine.queues.limit("fair", "a", KeyLimits(max_in_flight=1, rate=1))
    due_ms = bench.clock.wall_ms() + 1
    batch = [Publication("x", "k", b"a", task_id="t", dedup_id="d", dedup_window_ms=1)]
    batch += [Publication("", queue, b"b", key=key) for queue in ("fair", "full") for key in ("", "a", "b")] * 20
    engine.publisher.publish([*batch, Publication("", "q", b"c", due_ms=due_ms), Publication("", "q", b"d" * 300_000)])
    held = [each.lease for each in bench.take(100, "q", "fair")]
    engine.messages.reject(held[:1])
    engine.messages.release(held[1:2])
    engine.messages.ack(held[2:])
    bench.later(1)
    duties = bench.duties()
    while duties.run_once() == 0:
        pass
    for state in ("ready", "delayed", "leased"):
        engine.inspect.page("fair", View(state, reverse=True), 10)
    engine.inspect.peek("fair", 10)
    engine.messages.cancel("t")
    replay(engine, "q", 10)
    engine.messages.move("fair", "q")
    engine.queues.purge("q")
    engine.queues.delete("full")
    engine.sessions.close(bench.session)


def prepared(database, verb):
    """Each statement on the table, with parameters for its values."""
    told = set()
    for connection in database.file.connections():
        connection.set_trace_callback(lambda sql: told.add(LITERALS.sub("?", sql)))
    try:
        verb()
    finally:
        for connection in database.file.connections():
            connection.set_trace_callback(None)
    return {each for each in told if re.search(r"\bkv\b", each)}


@pytest.fixture
def statements(path):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.payloads()  # both of its connections are there
        yield prepared(database, lambda: live(bench)) | {open_file.MEND_VERSION}


def plan(connection, statement):
    values = [b"1"] * statement.count("?")
    if "LIMIT" in statement:
        values[-1] = 1
    return [step[-1] for step in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


def scans(connection, statements):
    """Plans that do not find their rows by the keys, or sort what they have found."""
    plans = {each: plan(connection, each) for each in statements}
    return {each: found for each, found in plans.items() if not all(map(_is_of_keys, found))}


def _is_of_keys(step):
    return bool(
        re.match(
            r"SEARCH kv USING ((COVERING )?INDEX sqlite_autoindex_kv_1|PRIMARY KEY) \(k|SCAN CONSTANT ROW|SCALAR SUB",
            step,
        )
    )


@pytest.mark.parametrize("schema", SCHEMAS, ids=["rowid", "without rowid"])
@pytest.mark.parametrize("rows", [3, 30, 300, 30_000])
def test_no_statement_scans_whatever_was_analyzed(statements, schema, rows):
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(schema)
        connection.executemany("INSERT INTO kv VALUES (?, ?)", ((b"%d" % number, b"") for number in range(rows)))
        for outsider in ("ANALYZE", "PRAGMA optimize=0x10002", "VACUUM"):
            connection.execute(outsider).fetchall()
            assert scans(connection, statements) == {}


def test_the_broker_has_said_all_that_it_says(statements):
    """Reads by key, by some keys and by range in both directions; stores, clears by key and by range."""
    kinds = {re.sub(r"\?(,\?)+", "?,...", each) for each in statements}
    assert len(kinds) >= 8, kinds


def test_a_scan_is_noticed():
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(SCHEMAS[0])
        for scan in ("SELECT v FROM kv WHERE v=?", "SELECT k FROM kv", "SELECT k FROM kv WHERE k>? ORDER BY v"):
            assert scans(connection, {scan})


def analyze(connection, _copy):
    connection.execute("ANALYZE")


def optimize(connection, _copy):
    connection.execute("PRAGMA optimize=0x10002").fetchall()


def vacuum(connection, _copy):
    connection.execute("VACUUM")


def backup(connection, copy):
    with contextlib.closing(sqlite3.connect(copy)) as target:
        connection.backup(target)


OUTSIDERS = [analyze, optimize, vacuum, backup]
TIMES = 5


@pytest.mark.parametrize("outsider", OUTSIDERS)
def test_a_busy_broker_goes_on(path, tmp_path, outsider):
    done, failed, copy = threading.Event(), list[BaseException](), tmp_path / "copy.db"

    def interfere():
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
                for _ in range(TIMES):
                    outsider(connection, copy)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.put(*[b"first"] * 50)
        thread = threading.Thread(target=interfere)
        thread.start()
        while not done.is_set():
            bench.put(b"a", b"b", key="k")
            bench.engine.messages.ack([each.lease for each in bench.take(2)])
        thread.join()
        assert failed == []
        assert bench.counts() == (50, 0, 0)
        bench.check()
        said = prepared(database, lambda: live(bench))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert scans(connection, said) == {}
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    if outsider is backup:
        with contextlib.closing(SqliteDatabase.open(str(copy))) as restored:
            bench.database = restored
            bench.engine = bench.another()
            bench.check()
            assert 50 <= bench.counts()[0] <= 52


def outside(path, sql):
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.executescript(sql)


@pytest.mark.parametrize("value", ["'text'", "12", "1.5", "NULL", "CAST(v AS TEXT)"])
def test_a_value_that_is_no_bytes_any_more_hinders_no_other(path, value):
    """A flipped bit makes text of bytes: to claim from such a queue was a TypeError, for good."""
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.put(*[b"%d" % number for number in range(12)])
        keys = bench.engine.keys
        outside(
            path, "PRAGMA writable_schema=1; UPDATE sqlite_master SET sql=replace(sql, 'v BLOB NOT NULL', 'v BLOB')"
        )
        outside(path, f"UPDATE kv SET v={value} WHERE k>=x'{keys.ready('q').hex()}' AND k<x'{keys.ready('r').hex()}'")
        tr = database.begin(timeout_s=60)
        rows = tr.get_range(*range_of(keys.ready("q")))
        assert rows == tr.get_range(*range_of(keys.ready("q")), reverse=True)[::-1]
        found = [each for _, each in rows]
        names = [each for each, _ in rows]
        assert found == tr.get_many(names) == tr.get_many(names[:2]) + [tr.get(each) for each in names[2:]]
        assert len(found) == 12
        assert all(isinstance(each, bytes) for each in found)
        tr.cancel()
        bench.put(b"good")
        assert bench.payloads()[-1:] == [b"good"]
        assert bench.counts() == (0, 0, 1 if value[0] != "C" else 13)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(1, b"", b""), (0, b"\x02q\x00", b"\x02p\x00"), (0, b"\x15\t3\x00", b"\x15\t3\x01")],
    ids=["text", "another queue's", "a later one"],
)
def test_a_key_out_of_its_order_in_the_index_is_called_damage(path, kind, before, after):
    """A scan shows it and nothing deletes it: its message was delivered for ever, and an export began anew for ever.

    Where it was text, each claim was a TypeError, and where text was passed over, messages beside it were lost.
    """
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.put(*[b"%d" % number for number in range(12)])
        begin, end = range_of(bench.engine.keys.ready("q"))
        tr = database.begin(timeout_s=60)
        key = tr.get_range(begin, end)[5][0]
        tr.cancel()
    length, file = (12 + 2 * len(key)) % 128, Path(path)  # https://www.sqlite.org/fileformat2.html#record_format
    entry = re.compile(re.escape(bytes([length])) + rb"([\x01\x02\x08\x09])" + re.escape(key), re.DOTALL)
    other = key.replace(before, after, 1)
    damaged, number = entry.subn(lambda found: bytes([length + kind]) + found[1] + other, file.read_bytes())
    assert number == 1
    file.write_bytes(damaged)
    is_damaged = pytest.raises(StoreUnavailable, match=r"damaged.*SQLITE_CORRUPT_INDEX.* restore a backup")
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        for limit in (0, 6):
            tr = database.begin(timeout_s=60, read_only=True)
            with is_damaged:
                tr.get_range(begin, end, limit=limit)
        bench.database = database
        bench.engine = bench.another()
        bench.session = bench.engine.sessions.open({})
        with is_damaged:
            for _ in range(12):
                bench.take(1, "q")


@pytest.mark.parametrize("damage", ["DELETE FROM kv", *(f"UPDATE kv SET v={each}" for each in ("'a'", "-5", 1 << 62))])
def test_without_a_count_of_commits_nothing_is_lost_silently(path, damage):
    """A message was confirmed, and stored where no consumer found it."""
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.put(b"first")
        outside(path, f"{damage} WHERE k=0")
        with pytest.raises(StoreUnavailable, match=r"lost count of its commits.*doctor"):
            bench.put(b"refused")
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench.database = database
        bench.engine = bench.another()
        bench.put(b"second")
        bench.session = bench.engine.sessions.open({})
        assert bench.payloads() == [b"first", b"second"]


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE kv",
        "ALTER TABLE kv ADD COLUMN more",
        "CREATE TRIGGER t BEFORE INSERT ON kv BEGIN SELECT RAISE(ABORT, 'mine'); END",
    ],
)
def test_a_changed_schema_is_named_with_its_fix(path, change):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        outside(path, change)
        with pytest.raises(
            StoreUnavailable, match=r"(no such table: kv|2 values|mine).*\.schema.* restore a backup"
        ) as told:
            bench.put(b"refused")
        assert "fix" in told.value.attributes
        assert ".schema" not in told.value.diagnosis


def test_what_was_dropped_and_then_restored_tells_to_restart(path, tmp_path):
    """Who had restored a backup, as the error had said, was told for ever that there was no such table."""
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        bench = Bench(database)
        bench.put(b"first")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            backup(connection, tmp_path / "copy.db")
        outside(path, "DROP TABLE kv")
        with pytest.raises(StoreUnavailable, match=r"no such table: kv.*restore a backup"):
            bench.put(b"refused")
        (tmp_path / "copy.db").replace(path)
        with pytest.raises(StoreUnavailable, match=r"was deleted or replaced .*restart every process"):
            bench.put(b"refused")


def test_a_damaged_schema_is_explained_where_synchronous_changes(path):
    """To change to the other's ``synchronous``, SQLite reads the schema again: that was a ``sqlite3.DatabaseError``."""
    with contextlib.ExitStack() as handles:
        opened = [SqliteDatabase.open(path, synchronous=each) for each in ("normal", "full")]
        for database in opened:
            handles.callback(database.close)
        outside(path, "PRAGMA writable_schema=1; UPDATE sqlite_master SET sql='rubbish'; PRAGMA schema_version=99")
        for database in opened * 2:
            tr = database.begin(timeout_s=60)
            tr.set(b"k", b"v")
            with pytest.raises(StoreUnavailable, match=r"SQLITE_CORRUPT.*the system's log.* restore a backup"):
                tr.commit()


def test_a_database_that_was_deleted_while_in_use_is_not_called_a_bad_disk(path):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        Bench(database).put(b"first")
        Path(path).unlink()
        doctor = [sys.executable, "-m", "kombu_fdb.doctor", f"fdb+sqlite:///{path}"]
        said = subprocess.run(doctor, capture_output=True, text=True, check=False).stdout
    assert re.search(r"was deleted.*SHORT_READ.*\n.*Restart every process", said), said


def test_a_file_that_is_cut_short_ends_no_process(path):
    """As a bad sector would: where SQLite maps the file into memory, the system ends whatever reads there (SIGBUS)."""

    def read():
        with contextlib.closing(SqliteDatabase.open(path)) as database:
            bench = Bench(database)
            for _ in range(100):
                bench.put(b"x" * 3000)
            outside(path, "PRAGMA wal_checkpoint(TRUNCATE)")
            bench.put(b"x")  # what was cached is read again
            os.truncate(path, 65_536)
            with pytest.raises(StoreUnavailable, match="restore a backup"):
                bench.take(101, "q")

    in_child(read)


def test_no_tracer_that_wraps_connect_sees_a_statement(tmp_path, monkeypatch):
    """As ddtrace and opentelemetry-instrumentation-sqlite3 do: each statement would be a span."""
    for module in (sqlite3, sqlite3.dbapi2):
        monkeypatch.setattr(module, "connect", None)
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        broker.queue("q").put(b"x")
        job = broker.queue("q").take(0)
        assert job is not None
        job.ack()
