import pytest

from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture
def path(tmp_path):
    """Where a database can be made."""
    return str(tmp_path / "broker.db")


@pytest.fixture
def database(path):
    database = SqliteDatabase.open(path)
    yield database
    database.close()
