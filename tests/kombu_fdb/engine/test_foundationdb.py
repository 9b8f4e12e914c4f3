"""The queue's conformance suite over a real FoundationDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.conformance.duties import DutiesConformance
from kit.conformance.limits import LimitsConformance
from kit.conformance.lines import LineConformance
from kit.conformance.newer import NewerConformance
from kit.conformance.operators import OperatorsConformance
from kit.conformance.queue import QueueConformance
from kit.conformance.turns import TurnsConformance

from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.testing.fdbserver import SingleNodeCluster

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


class TestFoundationDBLines(LineConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database


class TestFoundationDBOperators(OperatorsConformance):
    @pytest.fixture
    def database(self, module_database: FoundationDatabase) -> FoundationDatabase:
        return module_database
