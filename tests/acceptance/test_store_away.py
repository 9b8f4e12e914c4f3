"""The store is really away: Celery's calls raise kombu's ``OperationalError``, and are not repeated for longer."""

import logging
import shutil
import subprocess
import sys

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult, GroupResult
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid

import celery_fdb
from kombu_fdb.errors import StoreUnavailable

pytestmark = pytest.mark.process

LIMITS = {"operation_timeout": 1, "publish_timeout": 1, "connect_timeout": 1}
LOCK = """
import sqlite3, sys
locking = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
locking.execute("begin immediate")
print("locked", flush=True)
sys.stdin.read()
"""


def make(url):
    app = Celery("away", broker=url, backend=url, set_as_current=False)
    app.conf.broker_transport_options = app.conf.result_backend_transport_options = LIMITS
    celery_fdb.install(app)
    app.task(name="add")(add)
    return app


def add(x, y):
    return x + y


def use(app):
    """So that there are an open connection, channel and backend in the pools."""
    while True:
        try:
            app.control.broadcast("nothing")
            app.tasks["add"].delay(1, 2)
            app.backend.store_result("before", 1, "SUCCESS")
            return
        except OperationalError:  # the machine is busy
            continue


@pytest.fixture
def missing(tmp_path):
    return make(f"fdb+sqlite:///{tmp_path}/missing/broker.db")


@pytest.fixture
def deleted(tmp_path):
    (tmp_path / "folder").mkdir()
    app = make(f"fdb+sqlite:///{tmp_path}/folder/broker.db")
    use(app)
    shutil.rmtree(tmp_path / "folder")
    return app


@pytest.fixture
def locked(tmp_path):
    app = make(f"fdb+sqlite:///{tmp_path}/broker.db")
    use(app)
    command = [sys.executable, "-c", LOCK, str(tmp_path / "broker.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        yield app


@pytest.fixture
def nowhere(tmp_path):
    cluster_file = tmp_path / "fdb.cluster"
    cluster_file.write_text("away:away@127.0.0.1:1\n")
    return make(f"fdb:///{cluster_file}")


@pytest.fixture
def stopped():
    from kombu_fdb.testing.fdbserver import Cluster

    with Cluster() as cluster:
        app = make(f"fdb:///{cluster.cluster_file}")
        use(app)
        cluster.stop()
        yield app


def results(app):
    return app.GroupResult("some group", [app.AsyncResult("some task")])


READS = {
    "state": lambda app: app.AsyncResult("some task").state,
    "ready of a group": lambda app: results(app).ready(),
    "restore a group": lambda app: GroupResult.restore("some group", app=app),
    "does it exist": lambda app: app.backend.task_result_exists("some task"),
}
WRITES = {
    "delay": lambda app: app.tasks["add"].delay(1, 2),
    "chain": lambda app: chain(app.tasks["add"].s(1, 2), app.tasks["add"].s(3)).delay(),
    "chord": lambda app: chord([app.tasks["add"].s(1, 2)] * 2)(app.tasks["add"].si(3, 4)),
    "group with a body": lambda app: (group([app.tasks["add"].s(1, 2)] * 2) | app.tasks["add"].si(3, 4)).delay(),
    "add to a chord": lambda app: app.backend.add_to_chord("some group", AsyncResult("some task", app=app)),
    "store a result": lambda app: app.backend.store_result("some task", 1, "SUCCESS"),
    "save a group": lambda app: results(app).save(),
    "delete a group": lambda app: results(app).delete(),
    "forget": lambda app: app.AsyncResult("before").forget(),
    "broadcast": lambda app: app.control.broadcast("nothing"),
    "ping": lambda app: app.control.ping(),
    "inspect": lambda app: app.control.inspect().active(),
    "cancel": lambda app: app.control.cancel(uuid()),
    "revoke": lambda app: app.control.revoke(uuid()),
    "purge": lambda app: app.control.purge(),
}
FOUNDATIONDB = pytest.mark.foundationdb, pytest.mark.own_cluster
SOME = {
    name: WRITES[name] for name in ("delay", "chord", "save a group", "forget", "ping", "inspect", "revoke", "purge")
}
STORES = [
    ("missing", READS | WRITES),
    ("deleted", READS | WRITES),
    ("locked", SOME),
    pytest.param("nowhere", {"state": READS["state"], "chord": WRITES["chord"]}, marks=FOUNDATIONDB),
    pytest.param("stopped", {"state": READS["state"], **SOME}, marks=FOUNDATIONDB),
]


@pytest.mark.parametrize(("store", "calls"), STORES)
def test_every_call_raises_operational_error(store, calls, request, subtests, caplog):
    app = request.getfixturevalue(store)
    for name, call in calls.items():
        with subtests.test(name):
            caplog.clear()
            with caplog.at_level(logging.WARNING), pytest.raises(OperationalError):
                call(app)
            assert "attempt" not in caplog.text, "what a worker stores is repeated for two minutes, and nothing else"


def test_what_ends_a_task_is_repeated_until_it_is_stored(deleted, caplog):
    """No caller is left who could."""
    deleted.backend.retry_policy.update(max_retries=1, interval_start=0)
    context = deleted.tasks["add"].request_stack.top or deleted.tasks["add"].request
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
        deleted.backend.store_result("some task", 1, "SUCCESS", request=context)
    assert "attempt 2" in caplog.text
