"""What SECURITY.md promises: no pickle, no secrets in what is written, no other user reads the file, TLS."""

import ast
import json
import logging
import os
import pickle
import stat
import subprocess
from pathlib import Path

import pytest
from celery import Celery
from kit.left import Trap
from kit.processes import Program, run_python
from kombu import Connection
from kombu.exceptions import ContentDisallowed, OperationalError

from kombu_fdb import Broker, doctor
from kombu_fdb.errors import ClientUnusable, KombuFDBError
from kombu_fdb.process.client import client_for
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import Options
from kombu_fdb.store.foundationdb.database import FoundationDatabase

ROOT = Path(__file__).parents[1]
SECRET = "hunter2"
SHIPPED = [*ROOT.glob("kombu_fdb/**/*.py"), *ROOT.glob("celery_fdb/**/*.py"), ROOT / "_kombu_fdb_autoload.py"]

# -- code in messages --------------------------------------------------------------------------------------------------

#: What runs code that stands in its input.
DANGEROUS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}


#: Those that import by name. None of the names comes out of a message: they stand in our code, in options, in settings
#: and on command lines.
IMPORTERS = {
    *("kombu_fdb/__init__.py", "celery_fdb/__init__.py", "celery_fdb/cli/__init__.py"),
    *("kombu_fdb/primitives/interruption.py", "kombu_fdb/process/session_threads.py", "kombu_fdb/transport/fairkey.py"),
    *("kombu_fdb/store/foundationdb/binding.py", "celery_fdb/contrib/outbox/__main__.py"),
    *("celery_fdb/contrib/django/conf.py", "celery_fdb/contrib/django/backend.py"),
}


def dangers(source):
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in DANGEROUS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in DANGEROUS:
                yield module
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield name
            case ast.Call(func=ast.Attribute(attr="unsafe_load" | "enable_insecure_serializers" as name)):
                yield name
            case ast.keyword(arg="force", value=ast.Constant(value=True)):
                yield "force=True"


def importers(source):
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.alias(name="import_string" | "import_module" | "importlib" | "__import__" as name):
                yield name
            case ast.Name(id="__import__" as name):
                yield name


def test_nothing_else_imports_by_name():
    found = {path.relative_to(ROOT).as_posix() for path in SHIPPED if list(importers(path.read_text()))}
    assert found == IMPORTERS


def test_nothing_shipped_loads_code_from_data():
    assert {str(path): list(dangers(path.read_text())) for path in SHIPPED if list(dangers(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source", ["import pickle", "from marshal import loads", "eval('1')", "yaml.unsafe_load(x)", "loads(x, force=True)"]
)
def test_a_danger_would_be_found(source):
    assert list(dangers(source))


def test_a_pickled_body_is_refused_by_consumers_that_did_not_ask_for_it(tmp_path):
    sprung = tmp_path / "sprung"
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        queue = connection.SimpleQueue("q")
        connection.Producer().publish(
            pickle.dumps(Trap(sprung)),
            routing_key="q",
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )
        with pytest.raises(ContentDisallowed):
            queue.get(timeout=10)
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        assert broker.queue("q").stats().ready == 1, "refused, not lost"
    assert not sprung.exists()


# -- secrets -----------------------------------------------------------------------------------------------------------

URLS = [
    f"fdb://shop:{SECRET}@127.0.0.1:1/orders",
    f"fdb://shop:{SECRET}@127.0.0.1:1:tls/orders",
    f"fdb://shop:{SECRET}@127.0.0.1/orders",
    f"fdb://shop:{SECRET}@127.0.0.1:1,127.0.0.1:2/orders",
    f"fdb://sh op:{SECRET}@127.0.0.1:1/orders",
    f"fdb://shop:{SECRET}@127.0.0.1:1/orders?password={SECRET}",
    f"fdb+sqlite://user:{SECRET}@host/broker.db",
    f"shop:{SECRET}@127.0.0.1:4500",
    f"redis://shop:{SECRET}@127.0.0.1:1/0",
]


def told(url):
    """All that a user could come to see of ``url``."""
    options = Options(connect_timeout=0.2)
    try:
        parts = parse_url(url)
        yield repr(parts)
        location = locate(parts, options)
        yield f"{location} {location!r} {client_for(location, options)!r}"
        with Broker.open(url, connect_timeout=0.2) as broker:
            yield repr(broker)
    except KombuFDBError as error:
        for each in (error, error.__cause__, error.__context__):
            yield f"{each} {each!r} {getattr(each, 'attributes', '')}"
    lines = []
    doctor.main([url, "--options", '{"connect_timeout": 0.2}'], lines.append)
    yield "\n".join(lines)


@pytest.mark.parametrize("url", URLS)
def test_no_secret_in_what_we_say(url):
    assert [text for text in told(url) if SECRET in text] == []


@pytest.mark.parametrize("url", URLS[:1])
def test_no_secret_in_what_kombu_and_celery_say_of_us(url, caplog):
    caplog.set_level(logging.DEBUG)
    unreached = (OperationalError, ClientUnusable)  # the latter on a machine without FoundationDB's client
    options = {"connect_timeout": 0.2, "operation_timeout": 0.2}
    app = Celery("shop", broker=url, backend=url, broker_transport_options=options, set_as_current=False)
    with app.connection_for_write() as connection:
        said = [repr(connection), connection.as_uri(), str(connection.clone()), app.bugreport()]
        with pytest.raises(unreached) as caught:
            connection.ensure_connection(max_retries=1, interval_start=0.01)
    with pytest.raises(unreached) as published:
        app.send_task("charge", retry=False)
    with pytest.raises(KombuFDBError) as read:
        _ = app.AsyncResult("x").state
    said += [str(caught.value), repr(published.value), repr(read.value), str(read.value), caplog.text]
    said += [repr(app.backend), app.backend.as_uri(), repr(app.AsyncResult("x"))]
    assert [text for text in said if SECRET in text] == []
    app.close()


def holders(url):
    """What has the URL in a field or an argument, as a tracker of errors finds it among the locals of a traceback."""
    pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")
    pytest.importorskip("django")
    from celery_fdb.cli.terminal import Invocation
    from celery_fdb.contrib.django.conf import DjangoSettings
    from celery_fdb.web.application import opening
    from celery_fdb.web.settings import DashboardSettings
    from kombu_fdb import aio

    settings = DashboardSettings.of(url, anonymous=True, options={"cluster_file": url})
    invocation = Invocation(url=url, options={"prefix": url})
    django = DjangoSettings(broker_url=url, options={"prefix": url})
    opened = opening(settings)._open, aio.Broker.open(url, prefix=url)._open
    return [settings, invocation, invocation.open, django, *opened]


def test_nothing_that_holds_the_url_shows_it():
    assert [shown for each in holders(URLS[0]) if SECRET in (shown := repr(each))] == []


# -- the file ----------------------------------------------------------------------------------------------------------


def modes(folder):
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink()
    }


#: As careless as a umask can be.
USE = """
import os
os.umask(0)
from kombu_fdb import Broker
broker = Broker.open("fdb+sqlite://{path}")
queue = broker.queue("q")
queue.put(b"x" * 200_000)
job = queue.take(timeout=10)
queue.take(timeout=0.1)
print("ready")
input()
"""


@pytest.mark.process
@pytest.mark.parametrize("path", ["", "/{home}/celery-fdb/broker.db"])
def test_no_other_user_can_read_or_write_the_store(tmp_path, path):
    folder = tmp_path / "celery-fdb"
    if path:
        folder.mkdir(0o700)
    source = USE.format(path=path.format(home=tmp_path))
    with Program(source, env={"XDG_DATA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}) as program:
        assert program.hear() == "ready"
        found = modes(folder)
    assert {"broker.db", "broker.db-wal", "broker.db-shm", "broker.db-lock", "broker.db-gate"} <= set(found)
    assert any(name.endswith(".bell") for name in found)
    assert {name: mode for name, mode in found.items() if int(mode, 8) & 0o077} == {}


def test_a_file_that_was_opened_to_a_group_stays_so_with_all_beside_it(tmp_path):
    (tmp_path / "broker.db").touch(0o600)
    (tmp_path / "broker.db").chmod(0o660)
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        broker.queue("q").put(b"x")
        found = modes(tmp_path)
    assert {name: found[name] for name in found if name.startswith("broker.db-") and "bells" not in name} == {
        f"broker.db-{name}": "0o660" for name in ("gate", "lock", "shm", "wal")
    }


def test_the_doctor_sees_a_file_that_everybody_may_read(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Broker.open(url):
        pass
    lines = []
    doctor.main([url], lines.append)
    assert "open to every user" not in "\n".join(lines)
    (tmp_path / "broker.db").chmod(0o644)
    doctor.main([url], lines.append)
    assert f"chmod o= {tmp_path}/broker.db" in "\n".join(lines)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and one certificate of its for server and client."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    for name in ("ours", "theirs"):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for key in folder.glob("*.key"):
        key.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def tls_cluster(certificates, tmp_path_factory):
    from kombu_fdb.testing.fdbserver import Cluster

    tls = {"certificate_file": "ours.pem", "key_file": "ours.key", "ca_file": "ours.pem"}
    with Cluster(
        str(tmp_path_factory.mktemp("cluster")), tls={name: str(certificates / file) for name, file in tls.items()}
    ) as cluster:
        yield cluster


#: One process each: the client library reads its TLS options once.
TALK = """
import os, sys, json
from kombu_fdb import Broker, KombuFDBError
def talk(who):
    try:
        with Broker.open("fdb://", connect_timeout=float(sys.argv[2]), **json.loads(sys.argv[1])) as broker:
            broker.queue("q").put(b"hello")
            assert broker.queue("q").take(timeout=10).payload == b"hello"
            print(who, "ok", flush=True)
    except KombuFDBError as error:
        print(who, error, flush=True)
talk("parent")
if os.fork() == 0:
    talk("child")
    os._exit(0)
os.wait()
"""


def talk(cluster, options, timeout_s=5.0, **environ):
    given = json.dumps({"cluster_file": cluster.cluster_file, **options})
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return run_python("-c", TALK, given, timeout_s, env=environ, exit_code=None).stdout


@pytest.mark.foundationdb
@pytest.mark.process
def test_tls_by_options_and_by_environment_also_after_a_fork(tls_cluster, certificates):
    files = {
        "certificate_file": f"{certificates}/ours.pem",
        "key_file": f"{certificates}/ours.key",
        "ca_file": f"{certificates}/ours.pem",
    }
    assert ":tls" in tls_cluster.connection_string
    both = "parent ok\nchild ok\n"
    assert talk(tls_cluster, {f"tls_{name}": path for name, path in files.items()}) == both
    assert talk(tls_cluster, {}, **{f"FDB_TLS_{name.upper()}": path for name, path in files.items()}) == both


@pytest.mark.foundationdb
@pytest.mark.process
def test_a_stranger_is_not_let_in(tls_cluster, certificates):
    theirs = {"tls_certificate_file": f"{certificates}/theirs.pem", "tls_key_file": f"{certificates}/theirs.key"}
    said = talk(tls_cluster, {**theirs, "tls_ca_file": f"{certificates}/ours.pem"}, timeout_s=1.0)
    assert "ok" not in said
    assert "parent the FoundationDB cluster does not answer" in said


@pytest.mark.foundationdb
def test_one_set_of_tls_files_for_a_process(cluster, tls_cluster, certificates):
    FoundationDatabase.open(cluster.cluster_file).close()
    with pytest.raises(KombuFDBError, match="other TLS settings"):
        FoundationDatabase.open(tls_cluster.cluster_file, tls={"ca_file": f"{certificates}/ours.pem"})


@pytest.mark.foundationdb
def test_a_tls_file_that_is_not_there_is_named(cluster, tmp_path):
    with pytest.raises(KombuFDBError, match=r"option: tls_key_file, path: /nowhere/key.pem"):
        FoundationDatabase.open(cluster.cluster_file, tls={"key_file": "/nowhere/key.pem"})


def findings(cluster_file, options, environ=None):
    from kombu_fdb.settings.location import ClusterLocation

    found = doctor.check_cluster(ClusterLocation(cluster_file=cluster_file), Options(**options), environ or {})
    return {each.what: each for each in found if each.what.startswith("TLS")}


def test_the_doctor_on_tls(tmp_path):
    path = tmp_path / "fdb.cluster"
    path.write_text("shop:id@127.0.0.1:1\n")
    assert findings(path, {})["TLS"].found.startswith("off")
    assert findings(path, {"tls_ca_file": "/ca.pem"})["TLS"].level == "warn"
    path.write_text("shop:id@127.0.0.1:1:tls\n")
    key = tmp_path / "key.pem"
    key.touch(0o644)
    found = findings(path, {"tls_key_file": str(key)}, {"FDB_TLS_CA_FILE": "/nowhere"})
    assert {what: each.level for what, each in found.items()} == {
        "TLS certificate": "ok",
        "TLS key": "warn",
        "TLS ca": "fail",
    }
    key.chmod(0o600)
    assert findings(path, {"tls_key_file": str(key)})["TLS key"].level == "ok"
