"""A broker in a file, one in FoundationDB, and what their pages read, counted."""

import pytest
from kit.costs import CountingDatabase


@pytest.fixture
def counted(broker):
    retry = broker._engine.transactions.retry
    database = retry.database = CountingDatabase(retry.database)
    yield database
    retry.database = database.inner


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept):
    """In each test here."""
