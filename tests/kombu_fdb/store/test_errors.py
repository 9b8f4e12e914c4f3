"""What is wrong with a store's place is said in one line that names the fix."""

import os
import pickle
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.processes import Program, run_python

from kombu_fdb import doctor
from kombu_fdb.errors import ClientUnusable, OptionError, StoreUnavailable
from kombu_fdb.store.foundationdb import binding
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.transport.errors import CONNECTION_ERRORS


def open_and_fail(path, match):
    with pytest.raises(StoreUnavailable, match=match) as caught:
        SqliteDatabase.open(str(path), timeout_s=0.2)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_directory(tmp_path):
    open_and_fail(tmp_path / "no" / "broker.db", f"mkdir -p {tmp_path}/no")


def test_what_an_error_says_to_run_can_be_pasted_into_a_shell(tmp_path):
    path = str(tmp_path / "Bob's store" / "broker.db")
    with pytest.raises(StoreUnavailable) as caught:
        SqliteDatabase.open(path)
    subprocess.run(str(caught.value).split("`")[1], shell=True, check=True)
    SqliteDatabase.open(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        open_and_fail(path, re.escape(f"`fuser {shlex.quote(path)}`"))


def test_a_directory(tmp_path):
    open_and_fail(tmp_path, "path of a file")


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_no_file_at_all(path):
    open_and_fail(path, "Give the path")


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"dear diary, " * 1000)
    open_and_fail(tmp_path / "notes.txt", "not a SQLite database.*another path")
    assert (tmp_path / "notes.txt").read_bytes() == b"dear diary, " * 1000


def test_an_applications_own_database(tmp_path):
    with sqlite3.connect(tmp_path / "db.sqlite3") as connection:
        connection.execute("CREATE TABLE auth_user (id INTEGER)")
    connection.close()
    open_and_fail(tmp_path / "db.sqlite3", "belongs to another program.*its own file")


def test_a_damaged_database(tmp_path):
    path = tmp_path / "broker.db"
    database = SqliteDatabase.open(str(path))
    tr = database.begin(timeout_s=5)
    for i in range(200):
        tr.set(b"%d" % i, bytes(1000))
    tr.commit()
    database.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    with (
        pytest.raises(StoreUnavailable, match=r"damaged.*recover"),
        closing(SqliteDatabase.open(str(path))) as database,
    ):
        tr = database.begin(timeout_s=5)
        tr.get_range(b"", b"\xff")


def test_an_unknown_durability(tmp_path):
    with pytest.raises(OptionError):
        SqliteDatabase.open(str(tmp_path / "broker.db"), synchronous="off")


def test_a_closed_database(tmp_path):
    database = SqliteDatabase.open(str(tmp_path / "broker.db"))
    database.close()
    with pytest.raises(StoreUnavailable):
        database.begin(timeout_s=1)


# FoundationDB

OPEN = """
    import sys
    from kombu_fdb.errors import ClientUnusable, StoreUnavailable
    from kombu_fdb.store.foundationdb.database import FoundationDatabase
    try:
        FoundationDatabase.open(sys.argv[1], timeout_s=0.3)
    except (ClientUnusable, StoreUnavailable) as error:
        print(type(error).__name__, error)
"""


def opened_with(packages, cluster_file):
    env = {"PYTHONPATH": os.pathsep.join([*([str(packages)] if packages else []), str(Path.cwd())])}
    with Program(OPEN, cluster_file, env=env) as program:
        return program.hear()


@pytest.fixture
def copied_binding(tmp_path):
    """The installed binding, copied to where a test may break it."""
    fdb = pytest.importorskip("fdb", reason="the FoundationDB binding is not installed")
    shutil.copytree(Path(fdb.__file__).parent, tmp_path / "packages" / "fdb")
    return tmp_path / "packages"


def test_a_library_that_can_not_be_loaded(copied_binding):
    name = "libfdb_c.dylib" if sys.platform == "darwin" else "libfdb_c.so"
    (copied_binding / "fdb" / name).write_bytes(b"no library")
    line = opened_with(copied_binding, "/nowhere")
    assert "client library can't be loaded" in line
    assert "foundationdb-clients" in line


def test_a_missing_library(copied_binding):
    impl = copied_binding / "fdb" / "impl.py"
    impl.write_text(re.sub(r"""(["'])(lib)?fdb_c\b""", r"\1\2fdb_absent", impl.read_text()))
    line = opened_with(copied_binding, "/nowhere")
    assert "Unable to locate" in line
    assert "foundationdb-clients" in line


@pytest.fixture
def no_binding(tmp_path):
    (tmp_path / "fdb").mkdir()
    (tmp_path / "fdb" / "__init__.py").write_text("raise ImportError('No module named fdb')")
    return tmp_path


def test_a_missing_binding_is_no_connection_error(no_binding):
    """A worker connects again after those, a hundred times; only an installation mends it."""
    line = opened_with(no_binding, "/nowhere")
    assert line.startswith("ClientUnusable ")
    assert "pip install 'foundationdb==7.3.*'" in line
    assert not issubclass(ClientUnusable, CONNECTION_ERRORS)


WORKER = """
    import sys
    from celery import Celery
    import kombu_fdb.transport
    app = Celery(broker="fdb://test:1234@127.0.0.1:4500")
    worker = app.Worker(pool="solo")
    worker.start()
    sys.exit(worker.exitcode)
"""


def test_a_worker_that_can_not_use_its_binding_ends_at_once_and_says_what_to_install(no_binding):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(no_binding), str(Path.cwd())])}
    ended = run_python("-c", textwrap.dedent(WORKER), env=env, exit_code=None)
    assert "pip install 'foundationdb==7.3.*'" in ended.stderr
    assert "Trying again" not in ended.stderr
    assert ended.returncode


@pytest.mark.foundationdb
def test_a_binding_newer_than_the_library(copied_binding):
    says = copied_binding / "fdb" / "apiversion.py"
    if says.exists():
        says.write_text("LATEST_API_VERSION = 99900\n")
    else:  # before 7.3
        says = copied_binding / "fdb" / "__init__.py"
        says.write_text(re.sub(r"header_version = \d+", "header_version = 99900", says.read_text()))
    line = opened_with(copied_binding, "/nowhere")
    assert "don't match" in line
    assert "pip install 'foundationdb==7." in line


@pytest.mark.parametrize(("newest", "selected"), [(720, 720), (710, 710), (700, 700), (630, 630)])
def test_a_binding_that_does_not_say_which_it_is_gets_its_newest(newest, selected):
    """7.2 and older."""
    asked = []

    class Binding:
        def api_version(self, version):
            asked.append(version)
            if version > newest:
                raise RuntimeError(f"Latest known FDB API version is {newest}")

    assert binding._select_newest(Binding()) == selected
    assert asked == [each for each in (720, 710, 700, 630) if each >= selected]


def test_the_binding_here_fits_the_library_here_or_the_error_names_one_that_does():
    pytest.importorskip("fdb", reason="the FoundationDB binding is not installed")
    try:
        newest = doctor._load_library().fdb_get_max_api_version()
    except OSError:
        pytest.skip("there is no libfdb_c here")
    major, minor, *_ = map(int, version("foundationdb").split("."))
    line = opened_with(None, "/nowhere")
    if major * 100 + minor * 10 > newest:
        assert "don't match" in line
        assert f"pip install 'foundationdb=={newest // 100}.{newest // 10 % 10}.*'" in line
    else:
        assert "there is no cluster file" in line


@pytest.mark.foundationdb
def test_a_missing_cluster_file(tmp_path):
    assert "there is no cluster file" in opened_with(None, str(tmp_path / "fdb.cluster"))


@pytest.mark.foundationdb
def test_a_malformed_cluster_file(tmp_path):
    (tmp_path / "fdb.cluster").write_text("http://10.0.0.1\n")
    assert "description:id@host:port" in opened_with(None, str(tmp_path / "fdb.cluster"))


@pytest.mark.foundationdb
def test_a_cluster_that_does_not_answer(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        (tmp_path / "fdb.cluster").write_text(f"test:test@127.0.0.1:{silent.getsockname()[1]}\n")
        line = opened_with(None, str(tmp_path / "fdb.cluster"))
    assert "does not answer" in line
    assert f"fdbcli -C {tmp_path}/fdb.cluster --exec status" in line
