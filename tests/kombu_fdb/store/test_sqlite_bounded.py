"""Guarantee BOUNDED at the level of the store: whatever happens to the file, each call ends by its deadline."""

import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from kit.processes import Program, in_child
from kit.sqlite_apart import HOLDER, open_apart

from kombu_fdb.errors import KombuFDBError, StoreUnavailable
from kombu_fdb.process.connect import open_store, verify
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.store.sqlite import files as sqlite_files
from kombu_fdb.store.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.process

TIMEOUT_S = 0.3
#: For a call with that timeout, on a machine with much to do. A call without a deadline takes the whole minute.
GRACE_S = 6.0

OUTSIDER = """
    import sqlite3, sys
    other = sqlite3.connect(sys.argv[1], isolation_level=None)
    other.execute(sys.argv[2])
    other.execute("BEGIN EXCLUSIVE")
    print("locked")
    sys.stdin.readline()
"""


@pytest.fixture
def path():
    folder = Path(tempfile.mkdtemp())
    yield str(folder / "sub" / "b.db")
    shutil.rmtree(folder)


@contextmanager
def nothing(path):
    yield


@contextmanager
def an_outsiders_lock(path):
    with Program(OUTSIDER, path, "PRAGMA cache_size") as outsider:
        assert outsider.hear() == "locked"
        yield


@contextmanager
def a_stopped_writer(path):
    with Program(HOLDER, path) as holder:
        assert holder.hear() == "holding"
        holder.process.send_signal(signal.SIGSTOP)
        yield


@contextmanager
def a_deleted_file(path):
    Path(path).unlink()
    yield


@contextmanager
def a_deleted_directory(path):
    shutil.rmtree(Path(path).parent)
    yield


@contextmanager
def no_permission(path):
    Path(path).chmod(0)
    yield


@contextmanager
def no_permission_for_the_directory(path):
    Path(path).parent.chmod(0)
    yield
    Path(path).parent.chmod(0o700)


TROUBLES = [
    nothing,
    an_outsiders_lock,
    a_stopped_writer,
    a_deleted_file,
    a_deleted_directory,
    no_permission,
    no_permission_for_the_directory,
]


def opening(database):
    SqliteDatabase.open(database.path, timeout_s=TIMEOUT_S).close()


def opening_in_another_process(database):
    open_apart(database.path).close()


def run(database, body, *, read_only=False):
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=read_only)
    try:
        body(tr)
        tr.commit()
    finally:
        tr.cancel()


def writing(database):
    run(database, lambda tr: (tr.set(b"a", b"1"), tr.set_versionstamped_value(b"bell")))


def reading(database):
    run(database, lambda tr: tr.get(b"a"), read_only=True)


def arming(database):
    run(database, lambda tr: tr.watch(b"bell"), read_only=True)


def verifying(database):
    location = locate(parse_url(f"fdb+sqlite:///{database.path}"), parse_options(), {})
    verify(database, location, timeout_s=TIMEOUT_S)
    open_store(location, parse_options(), timeout_s=TIMEOUT_S).database.close()


OPERATIONS = [opening, opening_in_another_process, writing, reading, arming, verifying]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.__name__)
def test_every_call_ends_by_its_deadline(path, trouble):
    def work():
        Path(path).parent.mkdir()
        database = SqliteDatabase.open(path)
        arming(database)
        with trouble(path):
            for operation in OPERATIONS:
                begin = time.monotonic()
                with suppress(*([] if trouble is nothing else [KombuFDBError])):
                    operation(database)
                assert time.monotonic() - begin < GRACE_S, operation.__name__
            begin = time.monotonic()
            database.close()
            assert time.monotonic() - begin < GRACE_S, "closing"

    if os.geteuid() or not trouble.__name__.startswith("no_permission"):
        work()
        return
    # Root may do everything.
    os.chown(Path(path).parents[1], 54321, 54321)

    def as_user():
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        work()

    in_child(as_user)


def test_closing_while_another_thread_waits_for_a_stopped_writer(path):
    Path(path).parent.mkdir()
    database = SqliteDatabase.open(path)
    with a_stopped_writer(path):
        entered = threading.Event()
        failures = []

        def wait():
            tr = database.begin(timeout_s=3.0)
            entered.set()
            try:
                tr.get(b"a")
            except StoreUnavailable as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        entered.wait()
        begin = time.monotonic()
        database.close()
        assert time.monotonic() - begin < GRACE_S
        thread.join(GRACE_S)
        assert len(failures) == 1


def test_an_outsider_who_keeps_everybody_out(path):
    """``PRAGMA locking_mode=EXCLUSIVE`` excludes readers too. The error says how to find the culprit."""
    Path(path).parent.mkdir()
    SqliteDatabase.open(path).close()
    with Program(OUTSIDER, path, "PRAGMA locking_mode=EXCLUSIVE") as outsider:
        assert outsider.hear() == "locked"
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match=rf"another program locks.*fuser {path}"):
            SqliteDatabase.open(path, timeout_s=TIMEOUT_S)
        assert time.monotonic() - begin < GRACE_S
        outsider.tell()
        assert outsider.end() == 0
    with closing(SqliteDatabase.open(path)) as database:
        writing(database)


def test_a_library_that_is_too_old(path, monkeypatch):
    monkeypatch.setattr(sqlite_files.sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(StoreUnavailable, match=r"too old.*at least 3\.35\.0"):
        SqliteDatabase.open(path)
