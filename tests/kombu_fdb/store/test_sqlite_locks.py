"""SQLite's own locks on the database stand as long as a process has it open, whatever else the process does.

They are POSIX locks, which a process loses with the first descriptor of the file that it closes
(https://www.sqlite.org/howtocorrupt.html, 2.2). The next process that closes the database then believes to be the last,
and deletes the log with all that was committed since.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.states import SUCCESS
from click.testing import CliRunner
from kit.conformance.store import TIMEOUT_S, arm, commit, read
from kit.processes import Program, in_child
from kit.sqlite_apart import open_apart

from celery_fdb.cli import fdb
from celery_fdb.history.options import History
from celery_fdb.history.views.runs import history_of, page_of_runs
from celery_fdb.operations.transfer import broker_source, export_to, file_source, import_from
from kombu_fdb import doctor
from kombu_fdb.api.broker import Broker
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process.client import close_clients
from kombu_fdb.process.connect import open_store
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.store.sqlite.database import SqliteDatabase

#: Where SQLite locks (https://www.sqlite.org/fileformat2.html#the_lock_byte_page, src/os_unix.c): a byte of ``-shm``
#: that says "in use", and the shared bytes of the file.
IN_USE = 128
SHARED = 0x40000002

needs_proc = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's /proc/locks")


def locks(path):
    """The first bytes of this process's POSIX locks on a file."""
    status = Path(path).stat()
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        _, kind, _, _, pid, inode, start, *_ = line.replace("-> ", "").split()
        if kind == "POSIX" and int(pid) == os.getpid() and inode == file:
            found.add(int(start))
    return found


def assert_locked(path):
    """A lock that is lost stays so. One that stands may be missing in a list whose lines change while it is read."""
    for file, byte in ((f"{path}-shm", IN_USE), (path, SHARED)):
        assert any(byte in locks(file) for _ in range(50))


@pytest.fixture
def database(path):
    database = SqliteDatabase.open(path)
    yield database
    database.close()
    close_clients()


def second_handle(database):
    SqliteDatabase.open(database.path)


def second_handle_with_other_options(database):
    with contextlib.closing(SqliteDatabase.open(database.path, synchronous="full")) as other:
        assert_locked(database.path)
        commit(other, lambda tr: tr.set(b"full", b"1"))


def second_handle_closed(database):
    SqliteDatabase.open(database.path).close()


def relative_path(database):
    SqliteDatabase.open(os.path.relpath(database.path)).close()


def symbolic_link(database):
    link = Path(f"{database.path}-link")
    link.symlink_to(database.path)
    SqliteDatabase.open(str(link)).close()


def hard_link(database):
    second = Path(f"{database.path}-2")
    second.hardlink_to(database.path)
    with pytest.raises(StoreUnavailable, match="more than one name"):
        SqliteDatabase.open(str(second))
    second.unlink()


def write(database):
    commit(database, lambda tr: tr.set(b"a", b"1"))


def write_and_cancel(database):
    tr = database.begin(timeout_s=TIMEOUT_S)
    tr.set(b"a", b"1")
    tr.get_range(b"a", b"b")
    tr.cancel()


def read_a_value(database):
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    tr.get(b"a")
    tr.commit()


def watch(database):
    watch, fired = arm(database, b"bell")
    assert_locked(database.path)
    commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert fired.wait(TIMEOUT_S)
    watch.cancel()


def fork(database):
    def child():
        own = SqliteDatabase.open(database.path)
        assert_locked(database.path)
        SqliteDatabase.open(database.path).close()
        assert_locked(database.path)
        own.close()

    in_child(child)
    read(database, b"a")  # opens it again


def examine(database):
    found = list(doctor.examine(f"fdb+sqlite:///{database.path}", {}, {}))
    assert not [finding for finding in found if finding.level == "fail"]


def opened_as_a_client_does(database):
    options = parse_options()
    open_store(locate(parse_url(f"fdb+sqlite:///{database.path}"), options, {}), options, timeout_s=5).database.close()


def brokers_with_different_options(database):
    url = f"fdb+sqlite:///{database.path}"
    with Broker.open(url) as broker:
        broker.queue("q").put(b"1")
        assert_locked(database.path)
        with Broker.open(url, synchronous="full", namespace="other") as other:
            other.queue("q").put(b"1")
            assert_locked(database.path)
        assert_locked(database.path)


def exported_and_imported(database):
    url, file = f"fdb+sqlite:///{database.path}", Path(f"{database.path}.export")
    with Broker.open(url) as broker, Broker.open(url, namespace="copy", synchronous="full") as copy:
        broker.queue("q").put(b"1")
        export_to(file, broker_source(broker), lambda _: None)
        assert_locked(database.path)
        assert import_from(file_source(file), copy, lambda _: None)[0] == 1
        assert_locked(database.path)


def commands(database):
    broker, file = ["--broker", f"fdb+sqlite:///{database.path}"], f"{database.path}.export"
    for command in (["export", file], ["import", file, "--again"], ["status"], ["doctor"]):
        assert CliRunner().invoke(fdb, [*broker, *command], catch_exceptions=False).exit_code == 0
        assert_locked(database.path)


def results(database):
    url = f"fdb+sqlite:///{database.path}"
    app = Celery("locks", broker=url, backend=url, set_as_current=False)
    app.backend.store_result("t", 5, SUCCESS)
    assert app.AsyncResult("t").get(timeout=TIMEOUT_S) == 5
    assert_locked(database.path)
    app.backend._client.detach(app.backend)
    app.close()


def history(database):
    with Broker.open(f"fdb+sqlite:///{database.path}") as broker:
        history_of(broker).set_settings(History(runs=100))
        assert_locked(database.path)
        assert page_of_runs(broker).runs == []
        assert_locked(database.path)


def web_pages(database):
    pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")
    from starlette.testclient import TestClient

    from celery_fdb.web import dashboard

    with TestClient(dashboard(f"fdb+sqlite:///{database.path}", anonymous=True), base_url="http://localhost") as person:
        for page in ("/login", "/", "/queues", "/schedules", "/workers"):
            assert person.get(page).status_code == 200, page
            assert_locked(database.path)


OPERATIONS = [
    second_handle,
    second_handle_with_other_options,
    second_handle_closed,
    relative_path,
    symbolic_link,
    hard_link,
    write,
    write_and_cancel,
    read_a_value,
    watch,
    fork,
    examine,
    opened_as_a_client_does,
    brokers_with_different_options,
    exported_and_imported,
    commands,
    results,
    history,
    web_pages,
]


@needs_proc
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_sqlites_locks_stand(database, operation, monkeypatch):
    monkeypatch.chdir(Path(database.path).parent)
    write(database)
    assert_locked(database.path)
    operation(database)
    assert_locked(database.path)


@needs_proc
def test_the_last_handle_gives_the_locks_back(path):
    handles = [SqliteDatabase.open(path) for _ in range(3)]
    for handle in handles:
        assert_locked(path)
        handle.close()
    assert locks(path) == set()


@pytest.mark.process
def test_what_was_confirmed_after_another_handle_closed_is_there_for_the_next_process(path):
    """The review's case: two handles, one other process that opens and closes, a hundred publishes."""
    database = SqliteDatabase.open(path)
    SqliteDatabase.open(path, synchronous="full").close()
    with Program(
        """
        import sys
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        SqliteDatabase.open(sys.argv[1]).close()
        """,
        path,
    ) as other:
        assert other.end() == 0
    for number in range(100):
        commit(database, lambda tr: tr.set(b"%d" % number, b""))  # noqa: B023
    with Program(
        """
        import sys
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        database = SqliteDatabase.open(sys.argv[1])
        print(len(database.begin(timeout_s=5).get_range(b"", bytes([255]))))
        """,
        path,
    ) as other:
        assert other.hear() == "100"
    database.close()


# One file, whatever the way to it


def test_handles_of_one_file_share_it(path, tmp_path):
    (tmp_path / "link.db").symlink_to(path)
    handles = [SqliteDatabase.open(each) for each in (path, tmp_path / "link.db", f"{tmp_path}/./broker.db")]
    assert len({id(handle.file) for handle in handles}) == 1
    handles[0].close()
    with pytest.raises(StoreUnavailable, match="closed"):
        handles[0].begin(timeout_s=1)
    commit(handles[1], lambda tr: tr.set(b"a", b"1"))
    assert read(handles[2], b"a") == b"1"
    for handle in handles[1:]:
        handle.close()
    again = SqliteDatabase.open(path)
    assert again.file is not handles[0].file
    again.close()


def test_what_stands_beside_the_file_is_shared_through_a_link(path, tmp_path):
    SqliteDatabase.open(path).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.db").symlink_to(path)
    SqliteDatabase.open(str(tmp_path / "other" / "link.db")).close()
    assert [each.name for each in (tmp_path / "other").iterdir()] == ["link.db"]


def test_durability_belongs_to_the_handle(path):
    normal = SqliteDatabase.open(path)
    full = SqliteDatabase.open(path, synchronous="full")
    for database, expected in ((normal, 1), (full, 2), (normal, 1)):
        commit(database, lambda tr: tr.set(b"a", b"1"))
        assert database.file._writer is not None
        assert database.file._writer.execute("PRAGMA synchronous").fetchone() == (expected,)
    normal.close()
    full.close()


def test_a_closed_handles_watches_never_fire(path):
    stays, goes = SqliteDatabase.open(path), SqliteDatabase.open(path)
    _, fired = arm(stays, b"bell")
    _, silent = arm(goes, b"bell")
    goes.close()
    assert stays.armed_watches == 1
    commit(stays, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert fired.wait(TIMEOUT_S)
    assert not silent.is_set()
    stays.close()


def test_a_handle_that_closes_during_a_comparison_fires_no_watch(path, monkeypatch):
    stays, goes = SqliteDatabase.open(path), SqliteDatabase.open(path)
    watch, silent = arm(goes, b"bell")
    listener = stays.file.listener

    def read_values(keys):
        goes.close()
        return [b"changed" for _ in keys]

    monkeypatch.setattr(listener, "_read_values", read_values)
    listener.compare([watch])
    assert not silent.is_set()
    stays.close()


def test_a_handle_that_closes_again_leaves_no_watch_whose_cancel_was_interrupted(path):
    stays, goes = SqliteDatabase.open(path), SqliteDatabase.open(path)
    watch, _ = arm(goes, b"bell")

    def interrupted(_):
        raise SoftTimeLimitExceeded

    watch._release = interrupted
    with pytest.raises(SoftTimeLimitExceeded):
        goes.close()
    goes.close()
    assert stays.armed_watches == 0
    stays.close()


# Files that go away while they are open


@pytest.mark.parametrize("victim", ["broker.db", "broker.db-wal"])
def test_a_commit_into_a_file_that_lost_its_name_is_refused(database, victim):
    write(database)
    lost = Path(database.path).with_name(victim)
    lost.rename(lost.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable, match=rf"deleted or replaced.*{victim}\).*Put it back"):
        commit(database, lambda tr: tr.set(b"b", b"1"))
    lost.with_name("elsewhere").rename(lost)
    commit(database, lambda tr: tr.set(b"c", b"1"))
    assert read(database, b"b") is None


def test_a_file_that_was_replaced_is_another_one(database):
    write(database)
    for each in Path(database.path).parent.glob("broker.db*"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    with contextlib.closing(SqliteDatabase.open(database.path)) as other:
        commit(other, lambda tr: tr.set(b"new", b"1"))
        for work in (write, read_a_value):
            with pytest.raises(StoreUnavailable, match="deleted or replaced"):
                work(database)
        assert read(other, b"new") == b"1"
        assert read(other, b"a") is None


def test_the_number_of_a_deleted_file_may_be_anothers(database):
    """As long as a connection keeps the file, it may not: then this is the same file by another name."""
    write(database)
    moved = str(Path(database.path).rename(Path(database.path).with_name("moved.db")))
    with contextlib.closing(SqliteDatabase.open(moved)) as same, pytest.raises(StoreUnavailable, match="deleted or"):
        write(same)
    database.file.close_connections()
    with contextlib.closing(SqliteDatabase.open(moved)) as other:
        write(other)


def test_the_directory_goes(tmp_path):
    (tmp_path / "gone").mkdir()
    database = SqliteDatabase.open(str(tmp_path / "gone" / "broker.db"))
    write(database)
    shutil.rmtree(tmp_path / "gone")
    for work in (write, read_a_value):
        with pytest.raises(StoreUnavailable, match="deleted or replaced"):
            work(database)
    database.close()


def test_a_pipe_is_not_a_database(path):
    os.mkfifo(path)
    with pytest.raises(StoreUnavailable, match="not a regular file"):
        SqliteDatabase.open(path, timeout_s=1)


def test_nothing_in_the_package_opens_the_database_but_sqlite():
    """A change that adds an ``open`` to the driver has to say here that it does not open the database."""
    root = Path(__file__).parents[3] / "kombu_fdb" / "store" / "sqlite"
    opens = {
        (path.name, line.strip())
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if any(call in line for call in (" open(", "os.open(", "sqlite3.Connection(", ".read_bytes(", "shutil."))
        and not line.strip().startswith(("def ", "#"))
    }
    assert opens == {
        ("open_file.py", "connection = sqlite3.Connection("),
        (
            "files.py",
            "os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # not open anywhere",
        ),
        ("files.py", "return os.open(name, flags, dir_fd=directory)"),
        ("files.py", "return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)"),
        ("files.py", "descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)"),
        ("files.py", "descriptor = os.open(name, flags | _SAFELY, dir_fd=directory)"),
        (
            "files.py",
            "descriptor = os.open(name, os.O_PATH | _SAFELY)  # opens nothing, so closing it cancels no lock",
        ),
    }


@pytest.mark.process
def test_openings_apart_do_not_harm_each_other(path):
    """What the tests do to play another process; SQLite itself keeps count of its openings."""
    database = SqliteDatabase.open(path)
    other = open_apart(path)
    commit(other, lambda tr: tr.set(b"a", b"1"))
    other.close()
    assert read(database, b"a") == b"1"
    database.close()
