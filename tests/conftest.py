from __future__ import annotations

from collections.abc import Iterator

import pytest

from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason


@pytest.fixture(scope="session")
def cluster() -> Iterator[SingleNodeCluster]:
    """A real FoundationDB, one per run; skips where there is none."""
    reason = fdb_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with SingleNodeCluster() as cluster:
        yield cluster
