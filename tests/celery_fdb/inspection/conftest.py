"""A broker in a file, one in FoundationDB, and what their pages read, counted."""

from __future__ import annotations

from typing import Any

import pytest
from kit.costs import CountingDatabase

from kombu_fdb import Broker


@pytest.fixture
def counted(broker: Broker) -> Any:
    retry = broker._engine.transactions.retry
    database = retry.database = CountingDatabase(retry.database)
    yield database
    retry.database = database.inner


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
