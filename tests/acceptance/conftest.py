"""Real processes: Celery workers, publishers and beat in processes of their own, watched through files.

A task tells what it does by appending a line to one file (see ``acceptance_app.py``); a test waits for lines with a
deadline. Nothing sleeps to let something happen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kit.processes import DEADLINE_S, until
from kit.starter import Forked, Starter

from kombu_fdb.testing.fdbserver import Cluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Pools that patch the standard library, and so have to be there first.
GREENLETS = {"gevent", "eventlet"}

pytestmark = pytest.mark.process


class Mark(NamedTuple):
    """One line a task has written."""

    kind: str
    name: str
    pid: int
    time: float


@dataclass
class Broker:
    """Where the processes of one test meet."""

    url: str
    directory: Path
    cluster: Cluster | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"session_ttl": 2.0, "sweep_interval": 0.3})
    #: Of the default queue; to be set before anything starts.
    queue_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def env(self):
        return {
            **os.environ,
            "ACCEPTANCE_BROKER": self.url,
            "ACCEPTANCE_DIRECTORY": str(self.directory),
            "ACCEPTANCE_OPTIONS": json.dumps(self.options),
            "ACCEPTANCE_QUEUE_ARGUMENTS": json.dumps(self.queue_arguments),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)]),
            "PYTHONUNBUFFERED": "1",
        }

    def marks(self, kind=None, name=None):
        """What was written so far."""
        try:
            lines = (self.directory / "marks").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [Mark(kind_, name_, int(pid), float(at)) for kind_, name_, pid, at in map(str.split, lines)]
        return [mark for mark in found if kind in {None, mark.kind} and name in {None, mark.name}]

    def count(self, kind):
        return Counter(mark.name for mark in self.marks(kind))

    def allow(self, name):
        """Let a ``hold`` task end."""
        (self.directory / f"allow-{name}").touch()


class Worker:
    """A process group of one Celery program."""

    def __init__(self, starter, broker, name, arguments):
        """Without a starter it is a Python of its own."""
        self.name = name
        self.log = broker.directory / f"{name}.log"
        self.process: Forked | subprocess.Popen[bytes]
        with self.log.open("w") as output:
            if starter:
                self.process = starter.start(arguments, broker.env, broker.directory, output)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kit.celery_program", *arguments],
                env=broker.env,
                cwd=broker.directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, text):
        return text in self.log.read_text()

    def wait_ready(self):
        until(lambda: self.said("ready.") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def kill(self):
        """kill -9 of the whole group: master and children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self):
        """Warm shutdown."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_end()

    def wait_end(self):
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end:\n{self.log.read_text()}") from None


@pytest.fixture(params=["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def broker(request, tmp_path):
    """An empty broker; on FoundationDB in the run's cluster, or in one that the test may stop."""
    if request.param == "sqlite":
        yield Broker(f"fdb+sqlite:///{tmp_path}/broker.db", tmp_path)
        return
    if request.node.get_closest_marker("own_cluster") is None:
        cluster = request.getfixturevalue("cluster")
        yield Broker(f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}", tmp_path, cluster)
        return
    (tmp_path / "cluster").mkdir()
    with Cluster(str(tmp_path / "cluster")) as cluster:
        yield Broker(f"fdb://{cluster.connection_string}/acceptance", tmp_path, cluster)


@pytest.fixture(scope="session")
def starter():
    with Starter() as starter:
        yield starter


@pytest.fixture
def start(broker, starter):
    """Starts workers; kills what is left of them after the test."""
    workers = []

    def start(
        *arguments,
        name=None,
        pool="prefork",
        wait=True,
        mingle=False,  # a second, in which the others may answer
        app="acceptance_app",
        at=broker,
    ):
        name = name or f"w{len(workers)}"
        quick = [] if mingle else ["--without-mingle"]
        given = ["-A", app, "worker", "-n", f"{name}@test", "-P", pool, "-l", "INFO", *quick, *arguments]
        worker = Worker(None if pool in GREENLETS else starter, at, name, given)
        workers.append(worker)
        if wait:
            worker.wait_ready()
        return worker

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture
def launch(broker, starter):
    """Starts other programs of Celery, by their command line."""
    programs = []

    def launch(name, *arguments):
        programs.append(Worker(starter, broker, name, ["-A", "acceptance_app", *arguments, "-l", "INFO"]))
        return programs[-1]

    yield launch
    for program in programs:
        program.kill()


@pytest.fixture
def fresh():
    """Imports a module that is configured by the environment."""

    def fresh(name):
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return fresh


@pytest.fixture(params=["prefork", "solo", "threads", "gevent", "eventlet"])
def pool(request, broker):
    """Each that this machine has, and that works on the store."""
    name = request.param
    if name in GREENLETS and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "eventlet" and broker.cluster is not None:
        pytest.skip("eventlet works on SQLite only")
    return name


@pytest.fixture
def app(broker, fresh, monkeypatch):
    """The application as a publisher, in this process."""
    for name in (name for name in broker.env if name.startswith("ACCEPTANCE_")):
        monkeypatch.setenv(name, broker.env[name])
    monkeypatch.syspath_prepend(str(HERE))
    acceptance_app = fresh("acceptance_app")
    yield acceptance_app
    acceptance_app.app.pool.force_close_all()
    acceptance_app.app.close()


@pytest.fixture
def engine(app):
    """To look into the store."""
    with app.app.connection_for_read() as connection:
        yield connection.default_channel.engine


@pytest.fixture
def tasks(app, fresh):
    """The application with results, as a client in this process."""
    results_app = fresh("results_app")
    yield results_app
    backend = results_app.app.backend
    results_app.app.pool.force_close_all()
    if backend._client is not None:
        backend._client.detach(backend)
    results_app.app.close()


@pytest.fixture
def work(start):
    """Starts workers of the application with results."""

    def work(*arguments, pool="prefork"):
        return start("-c", "2", *arguments, pool=pool, app="results_app")

    return work
