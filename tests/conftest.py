from __future__ import annotations

import logging
from collections.abc import Iterator

import celery.app.builtins  # registers Celery's own tasks, which every app of a test needs
import pytest
from celery import _state

from kombu_fdb.client import close_clients
from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason

assert celery.app.builtins


@pytest.fixture(scope="session")
def cluster() -> Iterator[SingleNodeCluster]:
    """A real FoundationDB, one per run; skips where there is none."""
    reason = fdb_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with SingleNodeCluster() as cluster:
        yield cluster
        close_clients()  # or each would wait at the exit for a store that is gone


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """What Celery does to the whole process ends with the test.

    It gives the tasks of an app to every app that is made later, and a worker sets the level of the root logger.
    """
    shared, level = set(_state._on_app_finalizers), logging.getLogger().level
    yield
    _state._on_app_finalizers &= shared
    logging.getLogger().setLevel(level)
