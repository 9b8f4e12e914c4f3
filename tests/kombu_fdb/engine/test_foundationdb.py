"""The queue's conformance suite over a real FoundationDB."""

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here

from kombu_fdb.store.foundationdb.database import FoundationDatabase

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def database(cluster):
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()
