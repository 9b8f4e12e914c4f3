"""The store's conformance suite over SQLite, in one process with two handles."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from kit.conformance.store import TIMEOUT_S, Capability, StoreConformance, commit, lacks, read
from kit.sqlite_apart import open_apart

from kombu_fdb.errors import LimitExceeded, StoreError
from kombu_fdb.store.protocol import KEY_BYTES, TRANSACTION_BYTES
from kombu_fdb.store.sqlite import open_file as sqlite_file
from kombu_fdb.store.sqlite import wakeups as sqlite_bell
from kombu_fdb.store.sqlite.database import SqliteDatabase


class TestSqlite(StoreConformance):
    @pytest.fixture(autouse=True)
    def no_second_chance(self, monkeypatch):
        """The comparison that makes good a killed writer's lost news would hide what else gets lost."""
        monkeypatch.setattr(sqlite_bell, "CHECK_S", 3600)

    optimistic: ClassVar[Capability] = lacks("SQLite lets one writer in at a time, so no other can come in between")
    hides_stamps: ClassVar[Capability] = lacks("the version is taken at its first use, when no other process can write")
    ages: ClassVar[Capability] = lacks("a snapshot is kept as long as it is open")

    @pytest.fixture
    def second_handle(self, database, path):
        other = SqliteDatabase.open(path)
        yield other
        other.close()

    def aged(self, database, key):
        tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        tr.get(key)
        return tr


class TestSqliteOfAnotherProcess(TestSqlite):
    @pytest.fixture
    def second_handle(self, database, path):
        other = open_apart(path)
        yield other
        other.close()


def test_messages_of_the_size_of_celerys_share_pages(path):
    messages, size = 200, 1500

    write(path, {number.to_bytes(2, "big"): bytes(size) for number in range(messages)})

    assert Path(path).stat().st_size < 2 * messages * size


def test_what_is_added_between_other_rows_writes_few_pages(path):
    """A queue grows in the middle of all keys. What a commit costs is above all what it writes to the log."""
    commits = 400
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        commit(database, lambda tr: [tr.set(b"z%d" % number, bytes(100)) for number in range(commits)])
        before = Path(f"{path}-wal").stat().st_size
        for number in range(commits):
            commit(database, lambda tr, key=b"m%06d" % number: tr.set(key, bytes(900)))
        written = Path(f"{path}-wal").stat().st_size - before

    assert written / commits < MOST_WRITTEN_BYTES


#: By a commit with one message: 2.6 pages of 4 KiB. With rows that are sorted it is 15,000, in larger pages 22,000.
MOST_WRITTEN_BYTES = 12_000
#: Of files that older versions have made.
SCHEMA_BEFORE = """
CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID;
INSERT INTO kv VALUES (0, 0);
"""


def test_a_file_with_other_pages_and_another_table_serves_on(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "PAGE_BYTES", 8192)
        patch.setattr(sqlite_file, "SCHEMA", SCHEMA_BEFORE)
        write(path, {b"old": b"1"})

    write(path, {b"new": b"2"})

    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (8192,)
        assert connection.execute("SELECT k, v FROM kv WHERE typeof(k) = 'blob' ORDER BY k").fetchall() == [
            (b"new", b"2"),
            (b"old", b"1"),
        ]


def write(path, values):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        tr = database.begin(timeout_s=TIMEOUT_S)
        for key, value in values.items():
            tr.set(key, value)
        tr.commit()


def test_the_row_of_the_version_is_in_no_range_of_keys(path):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        write = database.begin(timeout_s=TIMEOUT_S)
        write.clear_range(b"", b"\xff")
        write.set_versionstamped_value(b"stamp")
        write.commit()
        read = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        assert [key for key, _ in read.get_range(b"", b"\xff")] == [b"stamp"]
        assert read.get(b"") is None
        read.cancel()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT v FROM kv WHERE k = 0").fetchone() == (1,)


def test_a_limit_of_any_size_is_one(path):
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        commit(database, lambda tr: tr.set(b"a", b"1"))
        assert commit(database, lambda tr: tr.get_range(b"a", b"b", limit=sys.maxsize)) == [(b"a", b"1")]


def test_what_was_saved_of_a_damaged_file_without_its_version(path):
    """Without a version all of these would be stored under one key, and all but the last be lost."""
    with contextlib.closing(SqliteDatabase.open(path)) as database:
        commit(database, lambda tr: tr.set_versionstamped_key(b"m", b"", b"a"))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("DELETE FROM kv WHERE k = 0").rowcount == 1
        connection.commit()

    with contextlib.closing(SqliteDatabase.open(path)) as database:
        for name in (b"b", b"c"):
            commit(database, lambda tr, name=name: tr.set_versionstamped_key(b"m", b"", name))
        rows = commit(database, lambda tr: tr.get_range(b"m", b"n"))

    assert [value for _, value in rows] == [b"a", b"b", b"c"]


def test_a_copy_that_is_not_in_wal_mode(tmp_path):
    """VACUUM INTO leaves one; in it, a reader would stop every writer."""
    path, copy = str(tmp_path / "broker.db"), str(tmp_path / "copy.db")
    first = SqliteDatabase.open(path)
    commit(first, lambda tr: tr.set(b"a", b"1"))
    first.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (copy,))
    database = SqliteDatabase.open(copy)
    reader = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    assert reader.get(b"a") == b"1"
    commit(database, lambda tr: tr.set(b"a", b"2"))
    reader.cancel()
    assert read(database, b"a") == b"2"
    database.close()


def test_a_run_that_is_too_large_is_refused(path):
    database = SqliteDatabase.open(path)
    with pytest.raises(LimitExceeded):
        commit(database, lambda tr: tr.clear_run([b"a", bytes(KEY_BYTES + 1)]))
    many = [b"%09d" % number + bytes(4_000) for number in range(TRANSACTION_BYTES // 12_000)]
    with pytest.raises(LimitExceeded):
        commit(database, lambda tr: tr.clear_run(many))
    with pytest.raises(StoreError, match="read-only"):
        database.begin(timeout_s=TIMEOUT_S, read_only=True).clear_run([b"a"])
    database.close()
