from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase

from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture
def bench() -> Iterator[Bench]:
    """On a memory store; what a test leaves is counted, and is in one place."""
    bench = Bench(MemoryDatabase(), task_ids=True)
    yield bench
    bench.check()


@pytest.fixture
def counted() -> CountingDatabase:
    return CountingDatabase(MemoryDatabase())
