"""Brokers by their URL, as the command line gets them: on SQLite, and on a real FoundationDB."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from celery_fdb.cli import fdb
from kombu_fdb import Broker


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
