"""Every store, with a namespace that is not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.store.protocol import Database
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture(params=["memory", "sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    database: Database
    if request.param == "memory":
        database = MemoryDatabase()
    elif request.param == "sqlite":
        database = SqliteDatabase.open(str(tmp_path / "broker.db"))
    else:
        database = FoundationDatabase.open(request.getfixturevalue("cluster").cluster_file)
    yield database
    database.close()
