"""The queue's conformance suite over a real FoundationDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here

from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.testing.fdbserver import Cluster

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def database(cluster: Cluster) -> Iterator[FoundationDatabase]:
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()
