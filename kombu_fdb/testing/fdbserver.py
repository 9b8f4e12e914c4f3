"""A FoundationDB cluster of one or several processes on this machine, in a temporary directory: for tests and demos.

With three processes, each is a coordinator and a machine of its own (its zone), so any one of them may die: the data is
in two, and two coordinators are a majority.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

from kombu_fdb.errors import StoreUnavailable

START_S = 30
#: Characters of what a server said before it ended.
LAST_WORDS = 500
STOP_S = 10
#: Another process may take the port between our choosing and the server's binding it, which then says so.
ATTEMPTS = 3
PORT_TAKEN = "address in use"
#: The memory of each of several processes: by default each would take gigabytes.
LITTLE_MEMORY = ("--memory=2GiB", "--cache-memory=64MiB")
#: Between us and the server, so that it never outlives us, even if we are killed: then ``read`` meets the end of input.
GUARD = """
temporary=$1; shift
"$@" &
echo $!
if read _; then temporary=; fi
kill -9 $!; wait
test -z "$temporary" || rm -rf "$temporary"
"""


@lru_cache(maxsize=1)
def fdb_unavailable_reason() -> str | None:
    """Why no cluster can be started here, in one line; None if it can."""
    from kombu_fdb.store.foundationdb.binding import binding

    for program in ("fdbserver", "fdbcli"):
        if shutil.which(program) is None:
            return f"{program} is not on PATH"
    try:
        binding()
    except StoreUnavailable as error:
        return str(error)
    return None


class Server:
    """One ``fdbserver``, which may be killed and started again on the same data and port."""

    def __init__(self, address: str, directory: Path, arguments: Sequence[str] = (), temporary: str = "") -> None:
        """``temporary``: what its guard removes if this process dies before it."""
        self.address, self.directory = address, directory
        self.pid = 0
        self._arguments, self._temporary = arguments, temporary
        self._guard: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start it; it answers when its cluster does."""
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "stderr").open("ab") as output:
            self._guard = subprocess.Popen(
                [
                    *("sh", "-c", GUARD, "guard", self._temporary),
                    *("fdbserver", "--public-address", self.address, *self._arguments),
                    *("--datadir", str(self.directory / "data")),
                    *("--logdir", str(self.directory)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())

    def last_words(self) -> str:
        """The server's last output, if it has ended by itself; "" if it runs, or there is no ``/proc`` to tell."""
        try:
            if ") Z" not in Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8"):
                return ""
        except OSError:
            if not Path("/proc/self").exists():
                return ""
        said = (self.directory / "stderr").read_text(encoding="utf-8", errors="replace")
        return " ".join(said.split())[:LAST_WORDS] or "it ended, and said nothing"

    def stop(self) -> None:
        """Kill it; its data stays. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            with guard:  # closes the pipes, and waits
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                guard.communicate(b"stop\n", STOP_S)


class Cluster:
    """``with Cluster() as cluster: FoundationDatabase.open(cluster.cluster_file)``.

    Both storage engines log to disk, so what was committed survives :meth:`stop` and :meth:`start`.
    """

    def __init__(
        self, directory: str | None = None, *, processes: int = 1, tls: Mapping[str, str] | None = None
    ) -> None:
        """With one process, or with three and more.

        ``tls``: paths by name, as ``certificate_file``, ``key_file``, ``ca_file``; then it speaks TLS only.
        """
        # Not a TemporaryDirectory: a forked child would remove it at its exit.
        self.directory = Path(directory or tempfile.mkdtemp(prefix="celery-fdb-cluster-"))
        self._temporary = directory is None
        self.cluster_file = str(self.directory / "fdb.cluster")
        self.servers: list[Server] = []
        self._processes = processes
        self._tls = [f"--tls_{name}={path}" for name, path in (tls or {}).items()]

    @property
    def pid(self) -> int:
        """The first server's process, for tests that stop or kill it."""
        return self.servers[0].pid

    @property
    def connection_string(self) -> str:
        return Path(self.cluster_file).read_text(encoding="utf-8").strip()

    def __enter__(self) -> Self:
        for attempt in range(ATTEMPTS):
            self.servers = [self._server(number) for number in range(self._processes)]
            coordinators = ",".join(each.address for each in self.servers)
            Path(self.cluster_file).write_text(f"test:{secrets.token_hex(4)}@{coordinators}\n", encoding="utf-8")
            try:
                for each in self.servers:
                    each.spawn()
                kind = "single memory" if self._processes == 1 else "double ssd"
                self._cli(f"configure new {kind}; waitopen")
            except RuntimeError as error:
                self.stop()
                if PORT_TAKEN not in str(error) or attempt == ATTEMPTS - 1:
                    self.close()
                    raise
            else:
                return self
        raise AssertionError("unreachable")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        """Start it again on the same data and ports, and wait until it answers."""
        for each in self.servers:
            each.spawn()
        self._cli("waitopen")

    def stop(self) -> None:
        """Kill all its processes; their data stays. Idempotent."""
        for each in self.servers:
            each.stop()

    def _server(self, number: int) -> Server:
        address = f"127.0.0.1:{_free_port()}{':tls' if self._tls else ''}"
        arguments = ["--cluster-file", self.cluster_file, *self._tls]
        if self._processes > 1:
            arguments += [f"--locality-machineid=m{number}", f"--locality-zoneid=z{number}", *LITTLE_MEMORY]
        temporary = str(self.directory) if self._temporary else ""
        return Server(address, self.directory / f"server{number}", arguments, temporary)

    def _cli(self, commands: str) -> None:
        arguments = ["fdbcli", "-C", self.cluster_file, "--no-status", *self._tls, "--exec", commands]
        ends = time.monotonic() + START_S
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
            while client.poll() is None and time.monotonic() < ends and not any(map(Server.last_words, self.servers)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(0.05)
            done = client.poll()
            client.kill()
            said = client.stdout.read() if client.stdout else ""
        if done != 0:
            words = [each for server in self.servers if (each := server.last_words())] or [said.strip()[-LAST_WORDS:]]
            raise RuntimeError(f"fdbserver did not start: {' '.join(words) or f'no answer within {START_S} s'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
