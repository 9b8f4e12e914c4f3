"""The brokers that are compared: each started here, in a temporary directory, and stopped again.

A broker that is not installed is left out, and the table says so.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kombu import Connection


@dataclass
class Broker:
    """``durability``: what a confirmed publish survives."""

    name: str
    url: str
    version: str
    durability: str
    options: dict[str, Any] = field(default_factory=dict)
    across_processes: bool = True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_connection(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    tick = threading.Event()
    while True:
        try:
            with Connection(url, connect_timeout=2) as connection:
                connection.connect()
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        tick.wait(0.1)


def memory() -> Broker:
    import kombu

    return Broker("memory://", "memory://", f"kombu {kombu.__version__}", "none", across_processes=False)


@contextlib.contextmanager
def sqlite(synchronous: str) -> Iterator[Broker]:
    """On the disk the benchmark runs on, not in memory."""
    survives = {"normal": "kill -9", "full": "power cut"}[synchronous]
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        yield Broker(
            f"fdb+sqlite {synchronous}",
            f"fdb+sqlite:///{folder}/broker.db",
            f"SQLite {sqlite3.sqlite_version}",
            f"synchronous={synchronous} ({survives})",
            {"synchronous": synchronous},
        )


@contextlib.contextmanager
def foundationdb() -> Iterator[Broker]:
    from kombu_fdb.testing.fdbserver import Cluster

    version = subprocess.run(["fdbserver", "--version"], capture_output=True, text=True, check=True).stdout
    with Cluster() as cluster:
        yield Broker(
            "fdb",
            "fdb://",
            version.split("\n")[0].replace("FoundationDB ", ""),
            "1 node, memory engine with log (power cut)",
            {"cluster_file": str(cluster.cluster_file)},
        )


@contextlib.contextmanager
def redis(appendfsync: str) -> Iterator[Broker]:
    port = _free_port()
    version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--loglevel", "warning"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            _await_connection(url, 10)
            yield Broker(
                f"redis {appendfsync}", url, version.split()[2].removeprefix("v="), f"appendfsync {appendfsync}"
            )
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def rabbitmq() -> Iterator[list[Broker]]:
    """One server, with and without publisher confirms."""
    from kit.rabbitmq import Node

    with Node() as node:
        version = _rabbitmq_version(node.url)
        yield [
            Broker("rabbitmq", node.url, version, "durable, unconfirmed"),
            Broker("rabbitmq confirmed", node.url, version, "durable, confirmed", {"confirm_publish": True}),
        ]


def _rabbitmq_version(url: str) -> str:
    with Connection(url) as connection:
        connection.connect()
        return str(connection.connection.server_properties.get("version", "unknown"))


@contextlib.contextmanager
def all_brokers(wanted: list[str]) -> Iterator[tuple[list[Broker], list[str]]]:
    """The brokers that run here, ours first, and a line for each that does not."""
    from kombu_fdb.testing.fdbserver import fdb_unavailable_reason

    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(sqlite("normal")), stack.enter_context(sqlite("full"))]
        reason = fdb_unavailable_reason()
        if reason is None:
            found.append(stack.enter_context(foundationdb()))
        else:
            missing.append(f"fdb: {reason}")
        found.append(memory())
        if shutil.which("redis-server") and (not wanted or any("redis" in name for name in wanted)):
            found += [stack.enter_context(redis("everysec")), stack.enter_context(redis("always"))]
        elif not shutil.which("redis-server"):
            missing.append("redis: no redis-server on PATH")
        if shutil.which("rabbitmq-server") and (not wanted or any("rabbit" in name for name in wanted)):
            try:
                found += stack.enter_context(rabbitmq())
            except Exception as error:
                missing.append(f"rabbitmq: did not start ({error})")
        elif not shutil.which("rabbitmq-server"):
            missing.append("rabbitmq: no rabbitmq-server on PATH")
        yield [broker for broker in found if not wanted or broker.name in wanted], missing
