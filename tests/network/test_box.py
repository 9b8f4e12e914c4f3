"""Each fault has its effect and no other, and nothing of a box is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kit.processes import DEADLINE_S, Program, until

from . import box as boxes
from .box import CLUSTER_FILE, Box, Machine, Server

pytestmark = [pytest.mark.foundationdb, pytest.mark.process, pytest.mark.xdist_group("box")]

PORT = 7000
#: Prints what arrives, and sends back what asks for it.
LISTENER = f"""
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("", {PORT}))
print("ready", flush=True)
while True:
    content, sender = here.recvfrom(65536)
    print(content.decode(), flush=True)
    if content == b"ping":
        here.sendto(b"pong", sender)
"""
#: How long a round trip to a listener takes, a line each.
PINGER = f"""
import socket, sys, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.connect((sys.argv[1], {PORT}))
for _ in range(int(sys.argv[2])):
    begun = time.perf_counter()
    here.send(b"ping")
    here.recv(16)
    print(time.perf_counter() - begun, flush=True)
"""
CLOCKS = """
import sys, time
print("ready", flush=True)
for _ in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", source, *arguments]


@contextmanager
def talking(machine: Machine, source: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with machine.popen(python(source), **pipes, **options) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


def send(source: Machine, target: Machine, content: str) -> None:
    source.run(["bash", "-c", f"printf {content} > /dev/udp/{target.address}/{PORT}"])


def dropped(machine: Machine) -> int:
    """How many packets its cuts have dropped."""
    found = re.search(r"counter packets (\d+)", machine.run(["nft", "list", "chain", "inet", "box", "input"]))
    assert found
    return int(found[1])


def commits(machine: Machine, timeout_s: int = 60) -> bool:
    command = ["fdbcli", "-C", CLUSTER_FILE, "--no-status", "--timeout", str(timeout_s)]
    try:
        printed = machine.run([*command, "--exec", "writemode on; set k v"])
    except RuntimeError:
        return False
    return "Committed" in printed


@pytest.fixture(scope="session")
def near(box: Box) -> Machine:
    return box.client("near", "a")


@pytest.fixture(scope="session")
def far(box: Box) -> Machine:
    return box.client("far", "b")


@pytest.fixture(autouse=True)
def _healed(box: Box) -> Iterator[None]:
    yield
    box.heal()
    box.link(list(box.machines), list(box.machines), None)
    until(lambda: commits(box.servers[0]))


# -- the network -------------------------------------------------------------------------------------------------------


def test_a_cut_has_one_direction(box: Box, near: Machine, far: Machine) -> None:
    with talking(near, LISTENER) as here, talking(far, LISTENER) as there:
        assert here.stdout is not None
        assert there.stdout is not None
        before = dropped(far)
        box.cut(near, far)
        send(near, far, "lost")
        until(lambda: dropped(far) == before + 1)
        send(far, near, "arrives")
        assert here.stdout.readline() == "arrives\n"
        send(box.servers[0], far, "others-arrive")
        assert there.stdout.readline() == "others-arrive\n"


def test_what_is_rejoined_arrives_again_and_no_other_cut_is_ended(box: Box, near: Machine, far: Machine) -> None:
    """A client that was cut off from a zone that heard nothing rejoined it, and let it hear."""
    server = box.servers[0]
    with talking(far, LISTENER) as there:
        assert there.stdout is not None
        box.partition(far, [near, server])
        box.cut(server, far)
        box.rejoin([near, server], far)
        send(near, far, "arrives")
        assert there.stdout.readline() == "arrives\n"
        for source, target in ((far, near), (far, server), (server, far)):
            before = dropped(target)
            send(source, target, "lost")
            until(lambda target=target, before=before: dropped(target) == before + 1)
        box.rejoin(server, far)
        send(server, far, "arrives")
        assert there.stdout.readline() == "arrives\n"


def test_a_partition_has_both(box: Box, near: Machine, far: Machine) -> None:
    before = dropped(near), dropped(far)
    box.partition("a", far)
    send(near, far, "lost")
    send(far, near, "lost")
    until(lambda: (dropped(near), dropped(far)) == (before[0] + 1, before[1] + 1))


def test_a_delay_is_there_both_ways_and_on_its_link_only(box: Box, near: Machine, far: Machine) -> None:
    with talking(far, LISTENER):
        pings = [float(line) for line in near.run(python(PINGER, far.address, "20")).split()]
        assert min(pings) < 0.01
        box.delay(near, far, 0.005)
        # On a busy machine most take longer; not all do.
        pings = [float(line) for line in near.run(python(PINGER, far.address, "200")).split()]
        assert min(pings) >= 0.01
        assert min(pings) < 0.015
        pings = [float(line) for line in box.servers[0].run(python(PINGER, far.address, "20")).split()]
        assert min(pings) < 0.01


def test_there_is_no_way_out(near: Machine) -> None:
    routes = near.run(["ip", "route"]).strip().splitlines()
    assert [line.split(" src ")[0] for line in routes] == ["10.77.0.0/16 dev box0 proto kernel scope link"]
    with pytest.raises(RuntimeError, match="Network is unreachable"):
        near.run(["bash", "-c", "printf x > /dev/udp/192.0.2.1/9"])


# -- the cluster -------------------------------------------------------------------------------------------------------


def test_a_zone_that_is_cut_off_does_without_the_cluster_and_the_cluster_without_it(
    box: Box, near: Machine, far: Machine
) -> None:
    box.partition("a", box.others("a"))
    assert not commits(near, 2)
    until(lambda: commits(far))
    box.heal()
    until(lambda: commits(near))


def test_a_client_that_reaches_one_process_only(box: Box, near: Machine, far: Machine) -> None:
    box.partition(near, box.servers[:-1])
    assert not commits(near, 2)
    assert commits(far)


def test_a_server_that_is_killed_is_replaced_and_comes_back(box: Box, near: Machine) -> None:
    victim = box.servers[0]
    victim.kill()
    assert victim.process.poll() == -signal.SIGKILL
    until(lambda: commits(near))
    box.heal()
    assert victim.process.poll() is None
    until(lambda: victim.address in {each["address"].split(":")[0] for each in processes(box)})


def processes(box: Box) -> list[dict[str, Any]]:
    return list(box.status()["cluster"].get("processes", {}).values())


def test_coordinators_move_and_clients_follow(box: Box, near: Machine) -> None:
    before = {each.address for each in box.servers[:3]}
    assert coordinators(near) == before
    with near.popen(
        ["fdbcli", "-C", CLUSTER_FILE, "--no-status"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as cli:
        assert cli.stdin is not None
        box.move_coordinators(box.servers[2:])
        cli.communicate(b"writemode on\nset k v\n")
    assert coordinators(near) == {each.address for each in box.servers[2:]}
    box.move_coordinators(box.servers[:3])


def coordinators(machine: Machine) -> set[str]:
    connection = (machine.disk / "fdb.cluster").read_text().split("@")[-1]
    return set(re.findall(r"([\d.]+):4500", connection))


def test_a_locked_database_refuses_all(box: Box, near: Machine) -> None:
    with box.locked(), pytest.raises(RuntimeError, match="locked"):
        near.run(["fdbcli", "-C", CLUSTER_FILE, "--no-status", "--exec", "writemode on; set k v"])
    assert commits(near)


@pytest.mark.night
def test_a_full_disk_ends_its_server_and_no_other(box: Box, near: Machine) -> None:
    until(lambda: logs(box))
    victim = logs(box)[0]
    victim.fill_disk()
    assert [each for each in box.servers if os.statvfs(each.disk).f_bavail == 0] == [victim]
    value = "x" * 90_000
    write = ["fdbcli", "-C", CLUSTER_FILE, "--no-status", "--exec", f"writemode on; set k {value}"]

    def ended() -> bool:
        with suppress(RuntimeError):  # the answer is lost
            near.run(write)
        return victim.process.poll() is not None

    until(ended)
    until(lambda: commits(near))
    assert [each for each in box.servers if each.process.poll() is not None] == [victim]
    box.heal()
    assert victim.process.poll() is None
    assert os.statvfs(victim.disk).f_bavail > 0


def logs(box: Box) -> list[Server]:
    """Those who write whatever is committed."""
    found = {each["address"] for each in processes(box) if "log" in {role["role"] for role in each["roles"]}}
    return [each for each in box.servers if f"{each.address}:4500" in found]


def test_a_disk_has_room_for_a_workload(box: Box) -> None:
    """Else the cluster lets no transaction begin after the first megabytes."""
    until(lambda: free_bytes(box))
    assert min(free_bytes(box)) > 20 * boxes.LEAST_FREE_BYTES


def free_bytes(box: Box) -> list[int]:
    roles = [role for each in processes(box) for role in each["roles"]]
    return [role["kvstore_available_bytes"] for role in roles if role.get("kvstore_available_bytes")]


def test_a_disk_is_filled_but_for_what_is_left(near: Machine) -> None:
    near.fill_disk(leave_mb=10)
    assert 9 << 20 < os.statvfs(near.disk).f_bavail * 4096 <= 10 << 20


# -- machines ----------------------------------------------------------------------------------------------------------


def test_a_machine_is_killed_and_no_other_is(near: Machine, far: Machine) -> None:
    with sleeping(near) as ended, sleeping(far) as going:
        near.kill()
        assert ended.wait(DEADLINE_S) == -signal.SIGKILL
        assert going.poll() is None
    near.kill()  # nothing runs on it


@contextmanager
def sleeping(machine: Machine) -> Iterator[subprocess.Popen[Any]]:
    with machine.popen(["sleep", "600"]) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_clock_is_ahead_and_jumps_and_is_its_own(near: Machine, far: Machine) -> None:
    with talking(near, CLOCKS, clock=3600) as ahead, talking(far, CLOCKS) as right:
        assert 3500 < clocks(ahead)[0] - time.time() < 3700
        assert -100 < clocks(right)[0] - time.time() < 100
        monotonic = clocks(ahead)[1]
        near.set_clock(-7200)
        assert -7300 < clocks(ahead)[0] - time.time() < -7100
        assert 0 <= clocks(ahead)[1] - monotonic < 100
        assert -100 < clocks(right)[0] - time.time() < 100


def clocks(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("now\n")
    wall, monotonic = process.stdout.readline().split()
    return float(wall), float(monotonic)


def test_machines_see_nothing_of_each_other(near: Machine, far: Machine, tmp_path: Path) -> None:
    assert [near.run(["hostname"]).strip(), far.run(["hostname"]).strip()] == ["near", "far"]
    with sleeping(near):
        until(lambda: "sleep 600" in commands(near))
        assert "sleep infinity" in commands(far)
        assert "sleep 600" not in commands(far)
    (near.disk / "mine").touch()
    assert "mine" not in far.run(["ls", "/mnt"]).split()
    # A process starts where its caller is, or where it is told to.
    assert near.run(["pwd"]).strip() == str(Path.cwd())
    assert near.run(["pwd"], cwd=tmp_path).strip() == str(tmp_path)


def commands(machine: Machine) -> str:
    """Of all processes that it sees."""
    return machine.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])


def test_a_name_is_one_machine_or_one_zone(box: Box, near: Machine, far: Machine) -> None:
    assert near in box.select("a")
    assert box.select(["near", "far"]) == [near, far]
    assert near not in box.others("a")
    for taken in ("near", "a"):
        with pytest.raises(ValueError, match="already"):
            box.client(taken)
    with pytest.raises(ValueError, match="no machine and no zone"):
        box.cut("nowhere", near)


# -- the end of a box --------------------------------------------------------------------------------------------------

# SIGINT is ignored in what a shell has started in the background, and in its children.
DRIVER = """
import json, os, signal, sys
from network.box import Box

signal.signal(signal.SIGINT, signal.default_int_handler)
with Box(servers=1, mode="single memory", longest_s=600) as box:
    client = box.client("client")
    client.popen(["sleep", "600"], clock=5)
    box.delay("client", box.servers, 0.001)
    paths = [f"/proc/{each._process}/ns/{kind}" for each in box.machines.values() for kind in ("net", "mnt")]
    held = [os.readlink(path) for path in paths]
    print(json.dumps(held), flush=True)
    sys.stdin.read()
"""


def holders(namespaces: list[str]) -> list[str]:
    """Processes that are in any of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            if str(path.readlink()) in namespaces:
                found.append(path.parts[2])
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize("end", ["killed", "left", "interrupted"])
def test_nothing_is_left(end: str, tmp_path: Path) -> None:
    with Program(DRIVER, env={"TMPDIR": str(tmp_path)}) as driver:
        held = json.loads(driver.hear())
        assert len(set(held)) == 6
        assert len(set(holders(held))) > 6
        if end == "killed":
            driver.process.kill()
        elif end == "interrupted":
            driver.process.send_signal(signal.SIGINT)
        else:
            driver._input.close()
        driver.end()
        until(lambda: not holders(held))
        assert not list(tmp_path.iterdir())
        assert " - tmpfs box " not in Path("/proc/self/mountinfo").read_text()


def test_its_time_is_bounded() -> None:
    with boxes._Hold(longest_s=2) as hold:
        machine = hold.machine("machine", "10.77.0.1", 1)
        sleeper = hold.popen(machine, ["sleep", "600"])
        network = str(Path(f"/proc/{machine}/ns/net").readlink())
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
        until(lambda: not holders([network]))


def test_where_none_can_be_made_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        assert boxes.box_unavailable_reason.__wrapped__() == "a network in a box takes root"
    with monkeypatch.context() as patched:
        patched.setattr(boxes, "FAKETIME", Path("/nowhere/libfaketime.so.1"))
        assert boxes.box_unavailable_reason.__wrapped__() == "there is no /nowhere/libfaketime.so.1"
    with monkeypatch.context() as patched:
        patched.setattr(boxes, "_UNSHARE", ("unshare", "--time", "--no-such-option"))
        assert "no network in a box can be made here: unshare: " in boxes.box_unavailable_reason.__wrapped__()
    with monkeypatch.context() as patched:
        patched.setattr(boxes, "_TUN", ("/dev/net/no-tun", 0, 0))
        assert "/dev/net/no-tun" in boxes.box_unavailable_reason.__wrapped__()
