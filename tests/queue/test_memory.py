"""The queue's conformance suite over the memory store."""

from __future__ import annotations

import pytest

from kombu_fdb.store.protocol import Database
from kombu_fdb.testing.duties_conformance import DutiesConformance
from kombu_fdb.testing.limits_conformance import LimitsConformance
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.newer_conformance import NewerConformance
from kombu_fdb.testing.queue_conformance import QueueConformance
from kombu_fdb.testing.turns_conformance import TurnsConformance


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
