"""The queue's conformance suite over the embedded store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here

from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteDatabase]:
    path: Path = tmp_path_factory.mktemp("queue") / "broker.db"
    database = SqliteDatabase.open(str(path))
    yield database
    database.close()
