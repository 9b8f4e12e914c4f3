"""The queue's conformance suite over the memory store."""

from __future__ import annotations

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here

from kombu_fdb.store.protocol import Database
from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture
def database() -> Database:
    return MemoryDatabase()
