"""A real RabbitMQ: a node of our own on the loopback, which never outlives the process that has started it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kombu.connection import Connection

START_S = 120.0
#: Below those of ``net.ipv4.ip_local_port_range``.
PORTS = (15_000, 32_000)
#: Debian's wrapper on PATH changes the user and drops the environment.
PLAIN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
#: Between us and the node. At the end of its input, which comes even if we are killed, it kills the node; with the node
#: ends the register of names, which would be a daemon if we did not start it first, and the folder.
GUARD = """
directory=$1; names_port=$2; shift 2
exec 3<&0
epmd -port "$names_port" & names=$!
until epmd -port "$names_port" -names || ! kill -0 $names; do sleep 0.05; done
"$@" & node=$!
(read _ <&3; kill -9 $node) & watch=$!
wait $node
kill -9 $names $watch
rm -rf "$directory"
"""


def rabbitmq_unavailable_reason() -> str | None:
    """Why no node can be started here, in one line; None if it can."""
    return None if shutil.which("rabbitmq-server") else "rabbitmq-server is not on PATH"


class Node:
    """``with Node() as node: Connection(node.url)``. Ports, folders and the register of names are its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="celery-fdb-rabbitmq-"))
        self.port = _free_port()
        self.guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def __enter__(self) -> Self:
        names_port = str(_free_port())
        environment = {
            **os.environ,
            "RABBITMQ_NODENAME": f"parity{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.directory),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "ERL_EPMD_PORT": names_port,
            "HOME": str(self.directory),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",  # does not spin
            "RUNNING_UNDER_SYSTEMD": "1",  # the node is the process that is started, not its child
        }
        server = str(PLAIN) if PLAIN.exists() else "rabbitmq-server"
        with tempfile.TemporaryFile() as log:
            self.guard = subprocess.Popen(
                ["sh", "-c", GUARD, "guard", str(self.directory), names_port, server],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is not for the guard
            )
            try:
                self._await(log)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _await(self, log: IO[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with Connection(self.url, connect_timeout=2) as connection:
                    connection.connect()
                    return
            except Exception as error:
                if time.monotonic() > deadline or self.guard is None or self.guard.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"rabbitmq-server did not start: {log.read().decode()[-500:]}") from error
            time.sleep(0.1)

    def close(self) -> None:
        """Kill it, and remove what it has left. Idempotent."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.communicate(b"stop\n")


def _free_port() -> int:
    """One that the system gives to no socket by itself: such a port may be taken before the node binds it."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
