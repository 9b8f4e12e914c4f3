"""Brokers by their URL, as the command line gets them: on SQLite, and on a real FoundationDB."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from celery_fdb.cli import fdb
from kombu_fdb.primitives.clock import Clock


@pytest.fixture
def broker(another):
    return another()


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(url):
    """The command line in this process, on the test's broker unless another is named."""

    def run(*arguments, broker=url, given=None, obj=None):
        where = [] if broker is None else ["--broker", broker]
        result = CliRunner().invoke(fdb, [*where, *arguments], input=given, obj=obj)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def a_second_later(monkeypatch):
    """For options such as ``--older-than 0``, what has just happened is past."""
    now_ms = Clock().wall_ms
    monkeypatch.setattr("celery_fdb.cli.terminal.Clock", lambda: SimpleNamespace(wall_ms=lambda: now_ms() + 1_000))


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept):
    """In each test here."""
