from __future__ import annotations

import pytest
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.store.protocol import Database
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture(params=["memory", "sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def database(request, tmp_path):
    """Each store."""
    database: Database
    if request.param == "memory":
        database = FaultyDatabase(clock=ManualClock())  # no transaction is too old on a busy machine
    elif request.param == "sqlite":
        database = SqliteDatabase.open(str(tmp_path / "broker.db"))
    else:
        database = FoundationDatabase.open(request.getfixturevalue("cluster").cluster_file)
    yield database
    database.close()


@pytest.fixture
def counted():
    return CountingDatabase(FaultyDatabase())
