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


class TestMemory(QueueConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryLimits(LimitsConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryDuties(DutiesConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryNewer(NewerConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryTurns(TurnsConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryLines(LineConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()


class TestMemoryOperators(OperatorsConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase()
