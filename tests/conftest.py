import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import celery.app.builtins  # registers Celery's own tasks, which every app of a test needs
import pytest
from celery import _state
from hypothesis import HealthCheck, settings
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.order import spread
from kit.processes import until

from kombu_fdb import Broker
from kombu_fdb.api.job import Job
from kombu_fdb.process.client import Client, close_clients
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason
from kombu_fdb.testing.stores import MemoryStores

assert celery.app.builtins

# On a busy machine an example takes long, and so does making one: neither is a mistake of the code.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


def pytest_addoption(parser):
    parser.addoption("--scale", action="store_true", help="also what needs a store of a million messages, as CI does")


def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests with real workers mostly wait. Each has a FoundationDB, so not very many."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 5) + 1


def pytest_collection_modifyitems(config, items):
    _skip_long(config, items)
    if hasattr(config, "workerinput"):  # of xdist; one process alone keeps the order
        items.sort(key=lambda item: item.get_closest_marker("scale") is None)  # the longest one is not begun at the end
        items[:] = spread(items, lambda item: item.get_closest_marker("process") is not None, lambda item: item.path)


def _skip_long(config, items):
    """A person who runs the tests is told what runs beside them, and where."""
    reasons = {
        "scale": "takes a minute to fill its store; CI runs it, and so does --scale",
        "replay": "plays for minutes; make parity runs it",
        "night": "waits for minutes in a network in a box; .ci/nightly runs it",
    }
    if config.getoption("--scale"):
        del reasons["scale"]
    for item in items:
        for marker in reasons.keys() - set(config.getoption("-m").split()):
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reasons[marker]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The only place that skips what needs FoundationDB: a machine without it skips all that is marked, and no more."""
    if item.get_closest_marker("foundationdb") is not None:
        reason = fdb_unavailable_reason()
        if reason is not None:
            pytest.skip(reason)
    elif "cluster" in getattr(item, "fixturenames", ()):
        pytest.fail("it asks for the cluster: mark it `foundationdb`, or it fails on a machine that has none")


def pytest_terminal_summary(terminalreporter):
    """What this machine could not test: one line for each reason, with its count."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")


@pytest.fixture(scope="session")
def cluster():
    """A real FoundationDB, one per run. The test that asks for it has the mark ``foundationdb``."""
    with Cluster() as cluster:
        yield cluster
        close_clients()  # or each would wait at the exit for a store that is gone


@pytest.fixture
def bench():
    """On a memory store; what a test leaves is counted, and is in one place."""
    bench = Bench(FaultyDatabase(), task_ids=True)
    yield bench
    bench.check()


FDB = pytest.param("fdb", marks=pytest.mark.foundationdb)


def _url(request, tmp_path):
    if request.param == "sqlite":
        return f"fdb+sqlite:///{tmp_path}/broker.db"
    cluster = request.getfixturevalue("cluster")
    return f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}"


@pytest.fixture(params=["sqlite", FDB])
def url(request, tmp_path):
    """The URL of an empty store that other processes can open, of each kind."""
    return _url(request, tmp_path)


@pytest.fixture(params=["memory", "sqlite", FDB])
def any_store(request, tmp_path):
    """The URL of an empty store, of each kind."""
    if request.param != "memory":
        yield _url(request, tmp_path)
        return
    with MemoryStores():
        yield f"fdb+memory://{os.urandom(6).hex()}"


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def broker(url):
    with Broker.open(url) as broker:
        yield broker


@pytest.fixture
def another(url):
    """Opens brokers, each as if in a process of its own; of the test's URL, or of another one.

    No consumer is served by its safety look: what wakes one is a watch.
    """
    opened = []

    def another(other=url, **options):
        parsed = parse_options({"poll_interval": 3600.0, **options})
        opened.append(Broker(Client(locate(parse_url(other), parsed), parsed)))
        return opened[-1]

    yield another
    for broker in opened:
        broker.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def asleep(monkeypatch):
    """Tells when a take has found nothing and armed its watches: what comes later, it can learn from them only."""

    def asleep(broker):
        event, arm = threading.Event(), broker._engine.messages.arm

        def arm_and_tell(*arguments):
            watches = arm(*arguments)
            if watches is not None:
                event.set()
            return watches

        monkeypatch.setattr(broker._engine.messages, "arm", arm_and_tell)
        return event

    return asleep


@pytest.fixture(scope="session")
def postgresql_server():
    """A real PostgreSQL, reached by a socket; skips where there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    programs = Path(shutil.which("initdb") or next(Path("/usr/lib/postgresql").glob("*/bin/initdb"), "nowhere")).parent
    if not (programs / "initdb").exists():
        pytest.skip("no PostgreSQL server here")
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a socket's path is short, and its server is not root
    user = {"user": "nobody"} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(folder, "nobody")
    run = partial(subprocess.run, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user)
    run([programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "shop", "-N"])
    control = [programs / "pg_ctl", "-D", folder / "data", "-w"]
    run([*control, "-l", folder / "log", "-o", f"-h '' -k {folder} -F", "start"])
    yield f"host={folder} user=shop"
    run([*control, "-m", "immediate", "stop"])
    shutil.rmtree(folder)


@pytest.fixture
def postgresql(postgresql_server):
    """An empty database of its own for each test, as psycopg is told it."""
    import psycopg

    name = f"shop{os.urandom(6).hex()}"
    with psycopg.connect(f"{postgresql_server} dbname=postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    connection.close()
    return f"{postgresql_server} dbname={name}"


@pytest.fixture(autouse=True)
def _nothing_stays():
    """What Celery does to the whole process ends with the test.

    It gives the tasks of an app to every app that is made later, and a worker sets the level of the root logger.
    """
    shared, level = set(_state._on_app_finalizers), logging.getLogger().level
    yield
    _state._on_app_finalizers &= shared
    logging.getLogger().setLevel(level)


@pytest.fixture
def jobs_are_kept(monkeypatch):
    """A job without references is released at once (``api/job.py``): that would hit tests that only look at one."""
    kept = []
    begin = Job.__init__

    def begin_and_keep(job, *arguments):
        kept.append(job)
        begin(job, *arguments)

    monkeypatch.setattr(Job, "__init__", begin_and_keep)
    yield
    kept.clear()
