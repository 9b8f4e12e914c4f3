"""docs/how-to/operate-cluster.md, as it stands: its commands in their order, while a client works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
from kit.processes import until
from test_pages import ROOT, commands_of, matches

from .box import CLUSTER_FILE, Box, Client, box_unavailable_reason

pytestmark = [pytest.mark.night, pytest.mark.foundationdb, pytest.mark.process, pytest.mark.xdist_group("box")]

PAGE = (ROOT / "docs" / "how-to" / "operate-cluster.md").read_text()
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: It takes the cluster most of a minute to see that all copies are there.
PATIENCE_S = 300.0
FIELD = re.compile(r"^\| `((?:client|cluster)\.[\w.]+)` \|", re.MULTILINE)
TRIPLE = """
...Redundancy mode        - triple
...Coordinators           - 5
...Fault Tolerance        - 2 zones
...Replication health     - Healthy...
"""
#: Publishes and takes one message for each line, and says how that went.
CLIENT = """
import sys
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError

with Broker.open(sys.argv[1], connect_timeout=60.0) as broker:
    jobs = broker.queue("jobs")
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            jobs.put(line)
            job = jobs.take(timeout=30)
            if job is not None:
                job.ack()
            print("nothing" if job is None else "served", flush=True)
        except KombuFDBError as error:
            print(repr(error), flush=True)
"""


class Operator:
    """Types what the page shows."""

    def __init__(self, box: Box, machine: Client) -> None:
        self.box, self.machine = box, machine
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "FDB_CLUSTER_FILE": CLUSTER_FILE}
        self._lock = ""

    def type(self, command: str, printed: str) -> None:
        """Until it prints that, as a person would who waits for it."""
        if "unlock UID" in command:
            self.box.unlock(self._lock)
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


@pytest.fixture
def operator() -> Iterator[Operator]:
    if reason := box_unavailable_reason():
        pytest.skip(reason)
    with Box(servers=3, mode="single ssd") as box:
        yield Operator(box, box.client("client"))


def test_what_the_page_shows_is_what_happens_and_a_client_goes_on(operator: Operator) -> None:
    box = operator.box
    third = box.servers[2]

    def add_one() -> None:
        box.heal()
        box.server("fdb4", third.zone)

    before: dict[str, Callable[[], object]] = {
        "fdbcli --exec 'status minimal'": third.kill,
        "fdbcli --exec 'exclude 10.0.0.3:4500'": add_one,
        "fdbcli --exec 'include 10.0.0.3:4500'": third.kill,
    }
    after: dict[str, Callable[[], object]] = {
        "fdbcli --exec status": lambda: until(lambda: not missing_fields(box.status())),
        "fdbcli --exec 'kill; kill all; status'": lambda: restart(box),
    }
    with working(operator) as says:
        for block in BLOCK.findall(PAGE):
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
    """How it goes for a client that publishes and takes another message."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    program = [sys.executable, "-c", CLIENT, f"fdb:///{CLUSTER_FILE}"]
    with operator.machine.popen(program, operator.environ, **pipes) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"

        def says() -> str:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write("job\n")
            return client.stdout.readline().strip()

        yield says
        client.stdin.close()
        assert client.wait(60) == 0


def restart(box: Box) -> None:
    """As fdbmonitor would. The one that was taken away stays so."""
    for each in box.servers:
        if each is not box.servers[2]:
            each.process.wait(PATIENCE_S)
            each.start()


def missing_fields(status: dict[str, Any]) -> list[str]:
    """Of those that the page tells to watch."""
    fields = FIELD.findall(PAGE)
    assert fields
    nothing: dict[str, Any] = {}
    return [each for each in fields if reduce(lambda at, name: at.get(name, nothing), each.split("."), status) == {}]
