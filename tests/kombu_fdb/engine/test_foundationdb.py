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
from kombu_fdb.testing.fdbserver import Cluster

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def database(cluster: Cluster) -> Iterator[FoundationDatabase]:
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()


class TestFoundationDB(QueueConformance):
    pass


class TestFoundationDBLimits(LimitsConformance):
    pass


class TestFoundationDBDuties(DutiesConformance):
    pass


class TestFoundationDBNewer(NewerConformance):
    pass


class TestFoundationDBTurns(TurnsConformance):
    pass


class TestFoundationDBLines(LineConformance):
    pass


class TestFoundationDBOperators(OperatorsConformance):
    pass
