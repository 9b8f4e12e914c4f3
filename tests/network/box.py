"""A network in a box: machines with addresses, zones and clocks of their own on this one, and a cluster among them.

The model: a *machine* is a set of Linux namespaces (network, processes, mounts, host name) with one address, a small
disk (a tmpfs) below ``/mnt`` and a copy of the cluster file on it. Servers are machines with one ``fdbserver`` each;
clients are machines with whatever is started there. All packets between machines pass through ``switch.py``, which
delays them; nftables in the machine that receives them drops those of a partition. There is no way out: no address but
those of the box can be reached from inside.

Everything lives in one process namespace, whose first process ends when this process does, or when the box's time is
up. The kernel then kills all processes in it, and with them go namespaces, mounts and disks; no code has to clean up.

::

    with Box() as box:
        shop = box.client("shop", zone="a")
        worker = shop.popen(["celery", "-A", "shop", "worker"], clock=3600)
        box.partition("a", ["b", "c"])
        box.heal()

Wherever a method takes machines, it takes a machine, its name, the name of a zone, or several of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeAlias, TypeVar

from kombu_fdb.testing.fdbserver import LITTLE_MEMORY, fdb_unavailable_reason

from .switch import Link

__all__ = ["CLUSTER_FILE", "Box", "Client", "Link", "Machine", "Server", "box_unavailable_reason"]

#: The same path on each machine, and a file of its own on each.
CLUSTER_FILE = "/mnt/fdb.cluster"
ZONES = ("a", "b", "c")
PORT = 4500
START_S = 60.0
#: After that a box ends, whatever is in it.
LONGEST_S = 900.0
DISK_MB = 1024
#: A server that has less free space than that lets no transaction begin. The 100 MB of its default are too much of a
#: small disk: the memory engine counts a quarter of what is free.
LEAST_FREE_BYTES = 10_000_000
PROGRAMS = ("unshare", "nsenter", "ip", "nft", "mount", "timeout")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

#: Where a method takes machines.
Where: TypeAlias = "Machine | str | Iterable[Machine | str]"

_AnyMachine = TypeVar("_AnyMachine", bound="Machine")
_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
#: The first process of a machine: it adopts what others leave, and reaps it.
_MACHINE = """
set -e
hostname "$1"
mount -t tmpfs -o size="$3"m,mode=755 box /mnt
ip link set lo up
ip tuntap add dev box0 mode tun
ip address add "$2/16" dev box0
ip link set box0 up mtu 9000
nft -f - <<END
table inet box {
    set cut { type ipv4_addr; }
    chain input { type filter hook input priority 0; ip saddr @cut counter drop; }
}
END
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""
_TUN = ("/dev/net/tun", 0x400454CA, 0x0001 | 0x1000)  # TUNSETIFF; IFF_TUN, IFF_NO_PI


@lru_cache(maxsize=1)
def box_unavailable_reason() -> str | None:
    """Why no box can be made here, in one line; None if it can."""
    if not sys.platform.startswith("linux"):
        return "a network in a box takes Linux"
    if os.geteuid() != 0:
        return "a network in a box takes root"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not on PATH"
    if not FAKETIME.exists():
        return f"there is no {FAKETIME}"
    if reason := fdb_unavailable_reason():
        return reason
    try:
        with ExitStack() as stack:
            stack.enter_context(_Hold(START_S)).machine("probe", "10.77.0.1", 1)
    except (OSError, _Refused) as error:
        return f"no network in a box can be made here: {error}"
    return None


class _Refused(Exception):
    """This machine does not permit what a box takes."""


@contextmanager
def _within(process: int, kind: str) -> Iterator[None]:
    """This thread's next sockets, devices or processes are of another one's namespace."""
    child = f"{kind}_for_children" if kind == "pid" else kind
    own = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(f"/proc/{process}/ns/{child}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(other)
        finally:
            os.close(other)
        try:
            yield
        finally:
            _setns(own)
    finally:
        os.close(own)


def _setns(namespace: int) -> None:
    # Python has it from 3.12 on.
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "setns")


class _Hold:
    """The process namespace in which everything is, and the switch."""

    def __init__(self, longest_s: float) -> None:
        # Its first process reads what this one never writes: it ends when this one does, and so does all in it.
        command = [*_UNSHARE, "timeout", "--signal=KILL", f"{longest_s:g}", "cat"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._switch, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[Any]] = []
        self._pipes: list[IO[bytes]] = []
        try:
            assert self._process.stdin is not None
            self._pipes.append(self._process.stdin)
            with suppress(BrokenPipeError):  # it has ended, and says below why
                os.write(self._process.stdin.fileno(), b"ready\n")
            self._await_ready(self._process)
            command = [sys.executable, "-S", str(Path(__file__).with_name("switch.py")), str(control.fileno())]
            self.popen(self._process.pid, command, pass_fds=[control.fileno()])
        except BaseException:
            self.close()
            raise
        finally:
            control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and wait until all that was in it is gone."""
        self._process.kill()
        for each in (*self._children, self._process):
            each.wait()
        for stream in self._pipes:
            stream.close()
        self._switch.close()

    def popen(self, process: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A child of this process, in another one's namespaces."""
        # A process that enters a mount namespace stands at its root.
        entering = ["nsenter", f"--target={process}", "--mount", "--uts", "--net", "--"]
        folder = Path(options.pop("cwd", ".")).resolve()
        with _within(process, "pid"):
            child = subprocess.Popen(
                [*entering, "env", f"--chdir={folder}", *command], **{"start_new_session": True, **options}
            )
        self._children.append(child)
        return child

    def machine(self, name: str, address: str, disk_mb: int) -> int:
        """A process that holds the namespaces of a new machine."""
        command = [*_UNSHARE, "--uts", "--net", "sh", "-c", _MACHINE, "machine", name, address, str(disk_mb)]
        child = self.popen(self._process.pid, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._await_ready(child)
        path, request, flags = _TUN
        with _within(child.pid, "net"):
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, request, struct.pack("16sH22x", b"box0", flags))
            self.tell({"attach": address}, [device])
        finally:
            os.close(device)
        return child.pid

    def tell(self, message: Mapping[str, object], devices: Sequence[int] = ()) -> None:
        """Tell the switch, and wait until it has obeyed."""
        with self._lock:
            socket.send_fds(self._switch, [json.dumps(message).encode()], devices)
            if self._switch.recv(16) != b"done":
                raise RuntimeError("the switch of the box has ended")

    def _await_ready(self, child: subprocess.Popen[Any]) -> None:
        assert child.stdout is not None
        assert child.stderr is not None
        self._pipes += [child.stdout, child.stderr]
        if child.stdout.readline() != b"ready\n":
            child.kill()
            said = " ".join(child.stderr.read().decode(errors="replace").split())
            raise _Refused(said or f"exit code {child.wait()}")


class Machine:
    """See the module."""

    def __init__(self, hold: _Hold, name: str, zone: str, address: str, disk_mb: int) -> None:
        self.name, self.zone, self.address = name, zone, address
        self._hold = hold
        self._process = hold.machine(name, address, disk_mb)
        #: How many cuts there are between the address of each other machine and here.
        self.cuts = Counter[str]()
        #: Its disk, as this process sees it.
        self.disk = Path(f"/proc/{self._process}/root/mnt")

    def __repr__(self) -> str:
        return f"{self.name} in zone {self.zone}"

    def popen(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        clock: float | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process here: a child of this one, so ``kill``, ``wait`` and exit codes are as everywhere.

        ``clock``: how many seconds its wall clock is ahead; :meth:`set_clock` changes it later, for all here that were
        started with one. Other ``options`` are those of ``subprocess.Popen``.
        """
        given = dict(os.environ if env is None else env)
        if clock is not None:
            self.set_clock(clock)
            given |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": "/mnt/clock",
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        return self._hold.popen(self._process, command, env=given, **options)

    def run(self, command: Sequence[str], timeout_s: float = START_S, **options: Any) -> str:
        """Run a command here, and return what it printed. Raises ``RuntimeError`` if it fails."""
        child = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        try:
            printed, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            raise RuntimeError(f"{command} on {self!r} took more than {timeout_s:g} s: {printed!r}") from None
        if child.returncode:
            raise RuntimeError(f"{command} on {self!r} ended with {child.returncode}: {printed!r}")
        return str(printed.decode(errors="replace"))

    def set_clock(self, ahead_s: float) -> None:
        """Let the wall clocks of processes that were started with one jump."""
        written = self.disk / "clock.new"
        written.write_text(f"{ahead_s:+.3f}\n")
        written.replace(self.disk / "clock")

    def kill(self) -> None:
        """All its processes end at once."""
        # That there is none to hear it, as after a kill, is an error for kill and not for us.
        self.run(["sh", "-c", "kill -KILL -1 || true"])

    def fill_disk(self, leave_mb: int = 0) -> None:
        """But for so much. A server that finds no room for what it has to write ends, as it does everywhere."""
        with (self.disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while leave_mb == 0 or os.statvfs(self.disk).f_bavail * 4096 > leave_mb << 20:
                file.write(bytes(1 << 16))

    def empty_disk(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)

    def heal(self) -> None:
        """End what was done to it, here and on its way here: cuts, a full disk."""
        self.cuts.clear()
        self.apply_cuts()
        self.empty_disk()

    def apply_cuts(self) -> None:
        cut = ", ".join(address for address, number in self.cuts.items() if number > 0)
        self.run(["nft", "flush set inet box cut;" + (f"add element inet box cut {{ {cut} }}" if cut else "")])


class Client(Machine):
    """A machine on which nothing runs but what is started there."""


class Server(Machine):
    """A machine with one ``fdbserver``; ``program`` is what starts it."""

    program = "fdbserver"
    process: subprocess.Popen[Any]

    def heal(self) -> None:
        super().heal()
        self.revive()

    def revive(self) -> None:
        """Start it, if it has ended."""
        if self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        super().kill()
        self.process.wait()

    def start(self) -> None:
        """Start it, again after :meth:`kill`; it answers when its cluster does."""
        for folder in ("data", "logs"):
            (self.disk / folder).mkdir(exist_ok=True)
        self.process = self.popen(
            [
                *(self.program, "--public-address", f"{self.address}:{PORT}", "--cluster-file", CLUSTER_FILE),
                *("--datadir", "/mnt/data", "--logdir", "/mnt/logs", "--logsize", "1MiB", "--maxlogssize", "8MiB"),
                *(f"--locality-zoneid={self.zone}", f"--locality-machineid={self.name}", *LITTLE_MEMORY),
                f"--knob_min_available_space={LEAST_FREE_BYTES}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class Box:
    """See the module."""

    def __init__(
        self,
        *,
        servers: int = 5,
        mode: str = "double memory",
        disk_mb: int = DISK_MB,
        longest_s: float = LONGEST_S,
        program: str = Server.program,
    ) -> None:
        """``mode``: redundancy and engine, as ``fdbcli configure`` takes them. ``program``: what the servers run."""
        self._servers_wanted, self._mode, self._disk_mb = servers, mode, disk_mb
        self._longest_s = longest_s
        self._program = program
        self.cluster_file = CLUSTER_FILE
        self.machines: dict[str, Machine] = {}
        self._stack = ExitStack()
        self._lock = threading.Lock()  # faults begin and are healed in several threads
        self._connection_string = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._hold = stack.enter_context(_Hold(self._longest_s))
            self._operator = self._add(Client, "operator", "")
            servers = [
                self._add(Server, f"fdb{number + 1}", ZONES[number % len(ZONES)])
                for number in range(self._servers_wanted)
            ]
            firsts = servers[: len(ZONES)] if len(servers) >= len(ZONES) else servers[:1]
            self._connection_string = f"box:{secrets.token_hex(4)}@{_addresses(firsts)}"
            for each in self.machines.values():
                self._write_cluster_file(each)
            for each in servers:
                each.program = self._program
                each.start()
            self.cli(f"configure new {self._mode}; waitopen")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- machines ------------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> list[Server]:
        return [each for each in self.machines.values() if isinstance(each, Server)]

    @property
    def clients(self) -> list[Client]:
        return [each for each in self.machines.values() if isinstance(each, Client) and each is not self._operator]

    def client(self, name: str, zone: str = "") -> Client:
        """A new machine; without a zone it is in none."""
        client = self._add(Client, name, zone)
        self._write_cluster_file(client)
        return client

    def server(self, name: str, zone: str) -> Server:
        """A new one, which joins the cluster."""
        server = self._add(Server, name, zone)
        server.program = self._program
        self._write_cluster_file(server)
        server.start()
        return server

    def select(self, where: Where) -> list[Machine]:
        """The machines that are meant."""
        if isinstance(where, Machine):
            return [where]
        if not isinstance(where, str):
            return [machine for each in where for machine in self.select(each)]
        if where in self.machines:
            return [self.machines[where]]
        found = [each for each in self.machines.values() if each.zone == where != ""]
        if not found:
            raise ValueError(f"no machine and no zone is named {where!r}; there are {', '.join(self.machines)}")
        return found

    def others(self, where: Where) -> list[Machine]:
        """All but these."""
        left_out = self.select(where)
        return [each for each in self.machines.values() if each not in left_out]

    def cli(self, commands: str, timeout_s: float = START_S) -> str:
        """What ``fdbcli`` prints, on a machine that is in no zone."""
        command = ["fdbcli", "-C", CLUSTER_FILE, "--no-status", "--timeout", f"{timeout_s:.0f}", "--exec", commands]
        return self._operator.run(command, timeout_s + 5)

    def status(self) -> dict[str, Any]:
        """``status json`` of the cluster."""
        printed = self.cli("status json")
        status: dict[str, Any] = json.loads(printed[printed.index("{") :])
        return status

    # -- the network ---------------------------------------------------------------------------------------------------

    def cut(self, source: Where, target: Where) -> None:
        """What machines of ``source`` send to those of ``target`` does not arrive; the other way it does."""
        self._count_cuts(source, target, 1)

    def partition(self, left: Where, right: Where) -> None:
        """Nothing arrives, in either direction."""
        self.cut(left, right)
        self.cut(right, left)

    def rejoin(self, source: Where, target: Where) -> None:
        """End one cut. What was cut twice, as by two faults, is rejoined twice."""
        self._count_cuts(source, target, -1)

    def _count_cuts(self, source: Where, target: Where, more: int) -> None:
        sources = self.select(source)
        with self._lock:
            for machine in self.select(target):
                machine.cuts.update({each.address: more for each in sources if each is not machine})
                machine.apply_cuts()

    def heal(self) -> None:
        """End all faults of all machines, and start the servers that have ended; links stay as they are."""
        for each in self.machines.values():
            each.heal()

    def link(self, source: Where, target: Where, link: Link | None) -> None:
        """What lies between them in this direction; None for nothing."""
        told = None if link is None else asdict(link)
        pairs = [(one, other) for one in self.select(source) for other in self.select(target) if one is not other]
        links = [[one.address, other.address, told] for one, other in pairs]
        for first in range(0, len(links), 500):
            self._hold.tell({"links": links[first : first + 500]})

    def delay(self, left: Where, right: Where, delay_s: float, jitter_s: float = 0.0) -> None:
        """In both directions, so a round trip takes twice as long."""
        link = Link(delay_s, jitter_s) if delay_s or jitter_s else None
        self.link(left, right, link)
        self.link(right, left, link)

    # -- the cluster ---------------------------------------------------------------------------------------------------

    def move_coordinators(self, servers: Where) -> None:
        """To these servers."""
        moved = " ".join(f"{each.address}:{PORT}" for each in self.select(servers))
        self.cli(f"coordinators {moved}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The database is locked meanwhile: it refuses all clients."""
        printed = self.cli("lock")
        lock = printed.split("UID: ")[1].split()[0]
        try:
            yield
        finally:
            self.unlock(lock)

    def unlock(self, lock: str) -> None:
        """``lock``: the id that ``fdbcli``'s lock has printed."""
        # It asks for the repetition of a word that it says.
        command = ["fdbcli", "-C", CLUSTER_FILE, "--no-status", "--exec", f"unlock {lock}"]
        with self._operator.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            try:
                child.communicate(child.stdout.readline(), timeout=START_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
        if child.returncode:
            raise RuntimeError("the database is not unlocked")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _add(self, kind: type[_AnyMachine], name: str, zone: str) -> _AnyMachine:
        if name in self.machines or name in ZONES:
            raise ValueError(f"there is a machine or a zone named {name} already")
        number = len(self.machines) + 1
        machine = kind(self._hold, name, zone, f"10.77.{number // 250}.{number % 250 + 1}", self._disk_mb)
        self.machines[name] = machine
        return machine

    def _write_cluster_file(self, machine: Machine) -> None:
        (machine.disk / Path(CLUSTER_FILE).name).write_text(self._connection_string + "\n")


def _addresses(servers: Iterable[Machine]) -> str:
    return ",".join(f"{each.address}:{PORT}" for each in servers)
