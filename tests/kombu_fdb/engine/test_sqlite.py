"""The queue's conformance suite over the embedded store."""

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here

from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("queue") / "broker.db"
    database = SqliteDatabase.open(str(path))
    yield database
    database.close()
