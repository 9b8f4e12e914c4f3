"""docs/how-to/operate-cluster.md, as it stands: its commands in their order, while a Celery worker runs tasks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from kit.processes import until
from test_pages import ROOT, commands_of, matches

from kombu_fdb import Broker
from kombu_fdb.testing.fdbserver import Cluster

from .box import CLUSTER_FILE, Box, Client, Server, box_unavailable_reason

pytestmark = [pytest.mark.night, pytest.mark.foundationdb, pytest.mark.process, pytest.mark.xdist_group("box")]

PAGE = (ROOT / "docs" / "how-to" / "operate-cluster.md").read_text()
BACKUP = PAGE.partition("## Back up and restore")[2].partition("\n## ")[0]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: The server that is upgraded: of an earlier version of the same series, where one is given.
EARLIER = os.environ.get("EARLIER_FDBSERVER", Server.program)
#: It takes the cluster most of a minute to see that all copies are there.
PATIENCE_S = 300.0
UPGRADE = "fdbcli --exec 'kill; kill all; status'"
FIELD = re.compile(r"^\| `((?:client|cluster)\.[\w.]+)` \|", re.MULTILINE)
TRIPLE = """
...Redundancy mode        - triple
...Coordinators           - 5
...Fault Tolerance        - 2 zones
...Replication health     - Healthy...
"""
#: The fleet: a worker, and a program that sends it a task for each line and says how that went.
FLEET = """
import sys

from celery import Celery
from celery.exceptions import TimeoutError
from kombu.exceptions import OperationalError

from celery_fdb import install
from kombu_fdb.errors import KombuFDBError

url, role = sys.argv[1:]
app = install(Celery("fleet", broker=url, backend=url))
app.conf.broker_connection_max_retries = None


@app.task(name="echo")
def echo(line: str) -> str:
    return line


if role == "worker":
    app.worker_main(["worker", "--pool", "prefork", "--concurrency", "2"])
else:
    echo.delay("").get(timeout=60)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print("served" if echo.apply_async([line], retry=False).get(timeout=30) == line else "", flush=True)
        except (OperationalError, KombuFDBError, TimeoutError) as error:
            print(repr(error.__cause__ or error), flush=True)
"""


PUT = f"""
import sys
from kombu_fdb import Broker

with Broker.open("fdb:///{CLUSTER_FILE}") as broker:
    for payload in sys.argv[1:]:
        broker.queue("kept").put(payload)
"""
TAKE = f"""
from kombu_fdb import Broker

with Broker.open("fdb:///{CLUSTER_FILE}") as broker:
    while job := broker.queue("kept").take(timeout=5):
        print(job.payload.decode())
        job.ack()
"""


class Operator:
    """Types what the page shows."""

    def __init__(self, box: Box, machine: Client) -> None:
        self.box, self.machine = box, machine
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "FDB_CLUSTER_FILE": CLUSTER_FILE}
        self._lock = ""
        #: What stands here for what the page shows.
        self.here = {"/etc/foundationdb/fdb.cluster": CLUSTER_FILE, "/var/backups": "/mnt"}

    def type(self, command: str, printed: str) -> None:
        """Until it prints that, as a person would who waits for it."""
        if "unlock UID" in command:
            self.box.unlock(self._lock)
            return
        for shown, here in self.here.items():
            command, printed = command.replace(shown, here), printed.replace(shown, here)
        if command.endswith(" &"):
            self.machine.popen(command.split()[:-1], self.environ)
            return
        for number, server in enumerate(self.box.servers, 1):
            command, printed = (text.replace(f"10.0.0.{number}:", f"{server.address}:") for text in (command, printed))
        command = re.sub("^python ", f"{sys.executable} ", command)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                said = self.machine.run(["sh", "-c", command], 120, env=self.environ)
                if matches(printed, said):
                    break
            except RuntimeError as error:
                said = str(error)
            assert time.monotonic() < deadline, f"$ {command}\nexpected:\n{printed}\ngot:\n{said}"
        if found := re.search(r"lockUID: (\w+)", said):
            self._lock = found[1]
        if found := re.search(r"/backup-[\d.-]+", said):
            self.here["/backup-..."] = found[0]


with_agent = pytest.mark.skipif(shutil.which("backup_agent") is None, reason="backup_agent is not on PATH")


@pytest.fixture
def operator() -> Iterator[Operator]:
    if reason := box_unavailable_reason():
        pytest.skip(reason)
    with Box(servers=3, mode="single ssd", program=EARLIER) as box:
        yield Operator(box, box.client("client"))


def test_what_the_page_shows_is_what_happens_and_the_fleet_goes_on(operator: Operator) -> None:
    box = operator.box
    third = box.servers[2]

    def add_one() -> None:
        box.heal()
        box.server("fdb4", third.zone)

    before: dict[str, Callable[[], object]] = {
        "fdbcli --exec 'status minimal'": third.kill,
        "fdbcli --exec 'exclude 10.0.0.3:4500'": add_one,
        "fdbcli --exec 'include 10.0.0.3:4500'": third.kill,
        UPGRADE: lambda: until(lambda: versions(box) == {version_of(EARLIER)}),
    }
    after: dict[str, Callable[[], object]] = {
        "fdbcli --exec status": lambda: until(lambda: not missing_fields(box.status())),
        UPGRADE: lambda: install(box),
    }
    with working(operator) as says:
        for block in BLOCK.findall(PAGE.replace(BACKUP, "")):
            for command, printed in commands_of(block):
                before.pop(command, lambda: None)()
                operator.type(command, printed)
                after.pop(command, lambda: None)()
                if command == "fdbcli --exec lock":
                    assert says().startswith("StoreUnavailable")
                else:
                    until(lambda: says() == "served")
    assert not before
    assert not after


@with_agent
def test_a_backup_of_a_fleet_at_work_is_restored(operator: Operator) -> None:
    """What was published before it is there, once, and comes before what is published after the restore."""
    during, restore = (commands_of(block) for block in BLOCK.findall(BACKUP))
    operator.machine.run([sys.executable, "-c", PUT, *"abc"], env=operator.environ)
    with working(operator) as says, ThreadPoolExecutor(1) as pool:
        for command, printed in during:
            typed = pool.submit(operator.type, command, printed)
            while not typed.done():
                assert says() == "served"
            typed.result()
    operator.machine.run([sys.executable, "-c", PUT, "lost"], env=operator.environ)
    for command, printed in restore:
        operator.type(command, printed)
    operator.machine.run([sys.executable, "-c", PUT, "new"], env=operator.environ)
    assert operator.machine.run([sys.executable, "-c", TAKE], env=operator.environ).split() == [*"abc", "new"]


@with_agent
def test_a_backup_is_restored_into_a_younger_cluster(tmp_path: Path) -> None:
    """docs/how-to/backup.md: its versions are lower, and what is published there comes behind what was restored."""
    folder = f"file://{tmp_path}"
    with ExitStack() as stack:
        old, young = (stack.enter_context(Cluster()) for _ in range(2))
        for cluster, payload in (old, "restored"), (young, ""):
            with Broker.open(f"fdb:///{cluster.cluster_file}") as broker:
                broker.queue("jobs").put(payload)
            agent = stack.enter_context(subprocess.Popen(["backup_agent", "-C", cluster.cluster_file]))
            stack.callback(agent.kill)
        run("fdbbackup", "start", "-C", old.cluster_file, "-d", folder, "-w")
        backup = run("fdbbackup", "list", "-b", folder).split()[-1]
        run("fdbcli", "-C", young.cluster_file, "--exec", r'writemode on; clearrange "" \xff')
        run("fdbrestore", "start", "-r", backup, "-w", "--dest-cluster-file", young.cluster_file)
        with Broker.open(f"fdb:///{young.cluster_file}") as broker:
            jobs = broker.queue("jobs")
            jobs.put("new")
            assert [each.payload for each in jobs.peek(limit=10)] == [b"restored", b"new"]


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def test_triple_works_without_two_of_five_zones(operator: Operator) -> None:
    """The page's table says how many coordinators it has, and how many zones it needs."""
    for number, zone in ((4, "d"), (5, "e")):
        operator.box.server(f"fdb{number}", zone)
    operator.type("fdbcli --exec 'configure triple'", "Configuration changed")
    operator.type("fdbcli --exec 'coordinators auto'", "")
    operator.type("fdbcli --exec status", TRIPLE)
    with working(operator) as says:
        for each in operator.box.servers[:2]:
            each.kill()
        until(lambda: says() == "served")


@contextmanager
def working(operator: Operator) -> Iterator[Callable[[], str]]:
    """How it goes for a program that sends one task more, which a worker runs."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    program = [sys.executable, "-c", FLEET, f"fdb:///{CLUSTER_FILE}"]
    with (
        operator.machine.popen([*program, "worker"], operator.environ) as worker,
        operator.machine.popen([*program, "sender"], operator.environ, **pipes) as sender,
    ):
        assert sender.stdin is not None
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"

        def says() -> str:
            assert sender.stdin is not None
            assert sender.stdout is not None
            sender.stdin.write("job\n")
            return sender.stdout.readline().strip()

        yield says
        sender.stdin.close()
        assert sender.wait(60) == 0
        worker.terminate()
        assert worker.wait(60) == 0


def install(box: Box) -> None:
    """Start the version that is on PATH, as fdbmonitor would. The server that was taken away stays so."""
    for each in box.servers:
        if each is not box.servers[2]:
            each.process.wait(PATIENCE_S)
            each.program = Server.program
            each.start()
    until(lambda: versions(box) == {version_of(Server.program)})


def versions(box: Box) -> set[str]:
    """Of the servers that the cluster knows."""
    return {each.get("version") for each in box.status()["cluster"]["processes"].values()}


def version_of(program: str) -> str:
    """As ``fdbserver --version`` tells it."""
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"\(v([\d.]+)\)", said)
    assert found
    return found[1]


def missing_fields(status: dict[str, Any]) -> list[str]:
    """Of those that the page tells to watch."""
    fields = FIELD.findall(PAGE)
    assert fields
    nothing: dict[str, Any] = {}
    return [each for each in fields if reduce(lambda at, name: at.get(name, nothing), each.split("."), status) == {}]
