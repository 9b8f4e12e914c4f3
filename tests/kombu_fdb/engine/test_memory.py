"""The queue's conformance suite over the memory store."""

import pytest
from kit.conformance.engine import *  # noqa: F403 - pytest runs its suites here
from kit.faults import FaultyDatabase


@pytest.fixture
def database():
    return FaultyDatabase()
