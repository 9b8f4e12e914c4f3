"""The queue's conformance suite over a real FoundationDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kombu_fdb.store.foundationdb import FoundationDatabase
from kombu_fdb.testing.duties_conformance import DutiesConformance
from kombu_fdb.testing.fdbserver import SingleNodeCluster
from kombu_fdb.testing.limits_conformance import LimitsConformance
from kombu_fdb.testing.newer_conformance import NewerConformance
from kombu_fdb.testing.queue_conformance import QueueConformance
from kombu_fdb.testing.turns_conformance import TurnsConformance

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def module_database(cluster: SingleNodeCluster) -> Iterator[FoundationDatabase]:
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()


class TestFoundationDB(QueueConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database


class TestFoundationDBLimits(LimitsConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database


class TestFoundationDBDuties(DutiesConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database


class TestFoundationDBNewer(NewerConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database


class TestFoundationDBTurns(TurnsConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database
