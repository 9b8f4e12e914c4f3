"""A real RabbitMQ: a node of our own on the loopback, and what it does to a program."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from amqp.exceptions import MessageNacked
from kombu.connection import Connection
from kombu.messaging import Producer

from kit.parity.broker import SHORT_LIVED, Broker
from kit.parity.program import EXCHANGES, QUEUES

__all__ = ["Node", "RabbitMQ", "rabbitmq_unavailable_reason"]

START_S = 120.0
#: Debian's wrapper on PATH changes the user and drops the environment.
PLAIN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
#: Looks in a row at which nothing has changed. A message passes from queue to queue between two looks.
CALM_LOOKS = 2


def rabbitmq_unavailable_reason() -> str | None:
    """Why no node can be started here, in one line; None if it can."""
    return None if shutil.which("rabbitmq-server") else "rabbitmq-server is not on PATH"


class Node:
    """``with Node() as node: Connection(node.url)``. Ports, folders and the register of names are its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="celery-fdb-rabbitmq-"))
        self._port, self._names_port = _free_port(), str(_free_port())
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self._port}//"

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "RABBITMQ_NODENAME": f"parity{self._port}@localhost",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.directory),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "ERL_EPMD_PORT": self._names_port,
            "HOME": str(self.directory),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",  # does not spin
        }
        with (self.directory / "start.log").open("wb") as log:
            self._server = subprocess.Popen(
                [str(PLAIN) if PLAIN.exists() else "rabbitmq-server"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _await(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with Connection(self.url, connect_timeout=2) as connection:
                    connection.connect()
                    return
            except Exception as error:
                if time.monotonic() > deadline or self._server is None or self._server.poll() is not None:
                    log = (self.directory / "start.log").read_text(errors="replace")
                    raise RuntimeError(f"rabbitmq-server did not start: {log[-500:]}") from error
            time.sleep(0.1)

    def close(self) -> None:
        """Stop it, and remove what it has left. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["epmd", "-port", self._names_port, "-kill"], stdout=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)


class RabbitMQ(Broker):
    """Confirms are on, so a publish that returned has come to its queues."""

    name = "RabbitMQ"

    def __init__(self, node: Node, *, patience_s: float) -> None:
        super().__init__(node.url, {"confirm_publish": True}, patience_s=patience_s)
        self._sweep()

    def has_closed(self, channel: str, error: Exception) -> bool:
        # What the client opens again at once (py-amqp does) is another channel.
        is_closing = isinstance(error, self.observer().connection.channel_errors)
        return is_closing and not isinstance(error, MessageNacked)

    def settle(self) -> None:
        """All channels and queues have answered, several times, and nothing has changed meanwhile."""
        calm = 0

        def is_calm() -> bool:
            nonlocal calm
            before = len(self._arrived), self.standing
            self.standing = self.look()
            for opened in self.opened.values():
                opened.channel.exchange_declare("amq.direct", "direct", passive=True)  # also reads what was delivered
            moving = any(self.is_moving(queue, found[0]) for queue, found in self.standing.items() if found)
            calm = 0 if moving or before != (len(self._arrived), self.standing) else calm + 1
            return calm >= CALM_LOOKS

        self.until(is_calm)

    def is_gone(self, queue: str) -> bool:
        returned: list[Any] = []
        asking = Producer(self.observer(), auto_declare=False, on_return=lambda *given: returned.append(given))
        asking.publish("is it there?", exchange="", routing_key=queue, mandatory=True)
        return bool(returned)

    def close(self) -> None:
        super().close()
        self._sweep()
        super().close()

    def _sweep(self) -> None:
        """Nothing of a program may stay for the next one."""
        for name in [*self.connections]:
            if name != "observer":
                self._close_connection(name)
        channel = self.observer()
        for queue in (*QUEUES, SHORT_LIVED):
            channel.queue_delete(queue)
        for exchange in EXCHANGES:
            channel.exchange_delete(exchange)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
