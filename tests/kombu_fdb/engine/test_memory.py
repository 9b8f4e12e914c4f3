"""The queue's conformance suite over the memory store."""

from __future__ import annotations

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here
from kit.faults import FaultyDatabase

from kombu_fdb.store.protocol import Database


@pytest.fixture
def database() -> Database:
    return FaultyDatabase()
