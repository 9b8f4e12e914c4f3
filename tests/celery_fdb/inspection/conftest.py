"""A broker in a file, one in FoundationDB, and what their pages read, counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.costs import CountingDatabase

from kombu_fdb import Broker


@pytest.fixture(params=["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    if request.param == "fdb":
        url = f"fdb://{request.getfixturevalue('cluster').connection_string}/{os.urandom(6).hex()}"
    with Broker.open(url) as broker:
        yield broker


@pytest.fixture
def counted(broker: Broker) -> Any:
    retry = broker._engine.transactions.retry
    database = retry.database = CountingDatabase(retry.database)
    yield database
    retry.database = database.inner


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
