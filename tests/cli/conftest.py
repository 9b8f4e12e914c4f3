"""Brokers by their URL, as the command line gets them: on SQLite, and on a real FoundationDB."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kombu_fdb import Broker
from kombu_fdb.client import Client
from kombu_fdb.location import locate, parse_url
from kombu_fdb.options import parse_options


@pytest.fixture(params=["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"fdb+sqlite:///{tmp_path}/broker.db"
    cluster = request.getfixturevalue("cluster")
    return f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}"


@pytest.fixture
def another(url: str) -> Iterator[Callable[..., Broker]]:
    """Opens brokers, each as if in a process of its own; of the test's URL, or of another one."""
    opened: list[Broker] = []

    def another(other: str = url, **options: object) -> Broker:
        parsed = parse_options({"poll_interval": 3600.0, **options})
        opened.append(Broker(Client(locate(parse_url(other), parsed), parsed)))
        return opened[-1]

    yield another
    for broker in opened:
        broker.close()


@pytest.fixture
def broker(another: Callable[..., Broker]) -> Broker:
    return another()
