"""The store's conformance suite over the memory store, and what only that one can do."""

from __future__ import annotations

import pytest

from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.store_conformance import TIMEOUT_S, StoreConformance


class TestMemory(StoreConformance):
    @pytest.fixture
    def database(self) -> Database:
        return MemoryDatabase(clock=ManualClock())

    def aged(self, database: Database, key: bytes) -> Transaction:
        assert isinstance(database, MemoryDatabase)
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.get(key)
        database.clock.sleep(5.1)
        return tr
