from __future__ import annotations

from collections.abc import Iterator

import pytest

from kombu_fdb.client import close_clients
from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason


@pytest.fixture(scope="session")
def cluster() -> Iterator[SingleNodeCluster]:
    """A real FoundationDB, one per run; skips where there is none."""
    reason = fdb_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with SingleNodeCluster() as cluster:
        yield cluster
        close_clients()  # or each would wait at the exit for a store that is gone
