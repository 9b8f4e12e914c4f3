"""The queue's conformance suite over the memory store."""

from __future__ import annotations

import pytest
from kit.conformance.duties import DutiesConformance
from kit.conformance.limits import LimitsConformance
from kit.conformance.lines import LineConformance
from kit.conformance.newer import NewerConformance
from kit.conformance.operators import OperatorsConformance
from kit.conformance.queue import QueueConformance
from kit.conformance.turns import TurnsConformance

from kombu_fdb.store.protocol import Database
from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture
def database() -> Database:
    return MemoryDatabase()


class TestMemory(QueueConformance):
    pass


class TestMemoryLimits(LimitsConformance):
    pass


class TestMemoryDuties(DutiesConformance):
    pass


class TestMemoryNewer(NewerConformance):
    pass


class TestMemoryTurns(TurnsConformance):
    pass


class TestMemoryLines(LineConformance):
    pass


class TestMemoryOperators(OperatorsConformance):
    pass
