"""A FoundationDB cluster of one process in a temporary directory, for tests and demos."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

from kombu_fdb.errors import StoreUnavailable

__all__ = ["SingleNodeCluster", "fdb_unavailable_reason"]

START_S = 30
STOP_S = 10
#: Another process may take the port between our choosing and the server's binding it.
ATTEMPTS = 3
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
    from kombu_fdb.store.foundationdb_binding import binding

    for program in ("fdbserver", "fdbcli"):
        if shutil.which(program) is None:
            return f"{program} is not on PATH"
    try:
        binding()
    except StoreUnavailable as error:
        return str(error)
    return None


class SingleNodeCluster:
    """``with SingleNodeCluster() as cluster: FoundationDatabase.open(cluster.cluster_file)``.

    The memory engine logs to disk, so what was committed survives :meth:`stop` and :meth:`start`.
    """

    def __init__(self, directory: str | None = None, *, tls: Mapping[str, str] | None = None) -> None:
        """``tls``: paths by name, as ``certificate_file``, ``key_file``, ``ca_file``; then it speaks TLS only."""
        # Not a TemporaryDirectory: a forked child would remove it at its exit.
        self.directory = Path(directory or tempfile.mkdtemp(prefix="celery-fdb-cluster-"))
        self._temporary = directory is None
        self._pid = 0
        self.cluster_file = str(self.directory / "fdb.cluster")
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._tls = [f"--tls_{name}={path}" for name, path in (tls or {}).items()]

    @property
    def connection_string(self) -> str:
        return Path(self.cluster_file).read_text(encoding="utf-8").strip()

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._port}{':tls' if self._tls else ''}"

    @property
    def pid(self) -> int:
        """The server's process, for tests that stop or kill it."""
        return self._pid

    def __enter__(self) -> Self:
        for attempt in range(ATTEMPTS):
            self._port = _free_port()
            Path(self.cluster_file).write_text(f"test:{secrets.token_hex(4)}@{self._address}\n", encoding="utf-8")
            try:
                self._spawn()
                self._cli("configure new single memory; waitopen")
            except RuntimeError:
                self.stop()
                if attempt == ATTEMPTS - 1:
                    self.close()
                    raise
            else:
                return self
        raise AssertionError("unreachable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        """Start it again on the same data and port, and wait until it answers."""
        self._spawn()
        self._cli("waitopen")

    def stop(self) -> None:
        """Kill the server; its data stays. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            with guard:  # closes the pipes, and waits
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                guard.communicate(b"stop\n", STOP_S)

    def _spawn(self) -> None:
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / "stderr").open("ab") as output:
            self._guard = subprocess.Popen(
                [
                    *("sh", "-c", GUARD, "guard", str(self.directory) if self._temporary else ""),
                    *("fdbserver", "--public-address", self._address, *self._tls),
                    *("--cluster-file", self.cluster_file),
                    *("--datadir", str(self.directory / "data")),
                    *("--logdir", str(logs)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self._guard.stdout is not None
        self._pid = int(self._guard.stdout.readline())

    def _cli(self, commands: str) -> None:
        arguments = ["fdbcli", "-C", self.cluster_file, "--no-status", *self._tls, "--exec", commands]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(arguments, capture_output=True, timeout=START_S, text=True, check=False)
            if done.returncode == 0:
                return
        raise RuntimeError(f"fdbserver on port {self._port} did not start; see {self.directory}/logs")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
