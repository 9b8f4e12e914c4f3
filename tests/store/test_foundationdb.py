"""The store's conformance suite over a real FoundationDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kombu_fdb.store.foundationdb import FoundationDatabase
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.testing.fdbserver import SingleNodeCluster
from kombu_fdb.testing.store_conformance import TIMEOUT_S, StoreConformance

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def database(cluster: SingleNodeCluster) -> Iterator[Database]:
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()


class TestFoundationDB(StoreConformance):
    @pytest.fixture
    def second_handle(self, cluster: SingleNodeCluster) -> Iterator[Database]:
        other = FoundationDatabase.open(connection_string=cluster.connection_string)
        yield other
        other.close()

    def aged(self, database: Database, key: bytes) -> Transaction:
        tr = database.begin(timeout_s=TIMEOUT_S)
        version = tr._tr.get_read_version().wait()
        tr.cancel()
        old = database.begin(timeout_s=TIMEOUT_S)
        old._tr.set_read_version(max(version - 50_000_000, 1))  # 50 s
        return old
