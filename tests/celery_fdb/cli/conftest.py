"""Brokers by their URL, as the command line gets them: on SQLite, and on a real FoundationDB."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from celery_fdb.cli import fdb
from kombu_fdb import Broker
from kombu_fdb.process.client import Client
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options


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


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(url: str) -> Callable[..., Result]:
    """The command line in this process, on the test's broker unless another is named."""

    def run(*arguments: str, broker: str | None = url, given: str | None = None, obj: Any = None) -> Result:
        where = [] if broker is None else ["--broker", broker]
        result = CliRunner().invoke(fdb, [*where, *arguments], input=given, obj=obj)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
