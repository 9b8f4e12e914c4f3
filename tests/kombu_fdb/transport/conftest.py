from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.processes import until
from kombu import Connection

from kombu_fdb.process import duty_cycle

DEADLINE_S = 60.0


@pytest.fixture(params=["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A broker of its own for each test."""
    if request.param == "sqlite":
        return f"fdb+sqlite:///{tmp_path}/broker.db"
    cluster = request.getfixturevalue("cluster")
    return f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection stands for a process of its own, so the test's own process speaks for none that is silent."""
    monkeypatch.setattr(duty_cycle, "see", lambda _pid: None)


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., Connection]]:
    """Opens connections that are closed after the test."""
    opened: list[Connection] = []

    def connect(**options: Any) -> Connection:
        connection = Connection(url, transport_options={"session_ttl": 5.0, "sweep_interval": 0.5, **options})
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()


@pytest.fixture
def channel(connection: Connection) -> Any:
    return connection.default_channel


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture
def drain() -> Callable[[Connection, list[Any], int], list[Any]]:
    """Drain until so many messages were received; then assert that no other comes along."""

    def drain(connection: Connection, received: list[Any], number: int) -> list[Any]:
        deadline = time.monotonic() + DEADLINE_S
        while len(received) < number:
            connection.drain_events(timeout=max(0.01, deadline - time.monotonic()))
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0)
        assert len(received) == number
        return received

    return drain
