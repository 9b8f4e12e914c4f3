from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a database can be made."""
    return str(tmp_path / "broker.db")


@pytest.fixture
def database(path: str) -> Iterator[SqliteDatabase]:
    database = SqliteDatabase.open(path)
    yield database
    database.close()
