"""Pytest fixtures for projects that use celery-fdb. They are installed with it, as a pytest entry point.

============================ ===============================================================================
``fdb_broker``               a store in memory, for code that publishes; takes milliseconds
``fdb_published``            what was published to it: a list of :class:`~celery_fdb.contrib.published.Published`
``fdb_sqlite_broker``        a temporary SQLite file, for workers with or without child processes
``fdb_session_broker``       the same for the whole run, for ``celery_session_worker``
``fdb_cluster_broker``       an empty namespace on a real FoundationDB; skips without FoundationDB
``fdb_cluster``              that FoundationDB: a single node, started for this run
============================ ===============================================================================

Each broker is a :class:`~celery_fdb.contrib.published.BrokerInTest`. This module is imported by every pytest that runs
where celery-fdb is installed, so at its top it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_fdb.contrib.published import BrokerInTest, Published
    from kombu_fdb.testing.fdbserver import Cluster
    from kombu_fdb.testing.stores import MemoryStores


@pytest.fixture(scope="session")
def fdb_memory_stores() -> Iterator[MemoryStores]:
    """Makes ``fdb+memory://name`` URLs known."""
    try:
        from kombu_fdb.testing.stores import MemoryStores
    except ModuleNotFoundError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    with MemoryStores() as stores:
        yield stores
        _close_clients()


@pytest.fixture
def fdb_broker(fdb_memory_stores: MemoryStores, request: pytest.FixtureRequest) -> Iterator[BrokerInTest]:
    """An empty broker in memory: ``with fdb_broker.use(app): ...``, or ``broker_url=fdb_broker.url``."""
    name = f"test{id(request.node):x}"
    yield _broker(f"fdb+memory://{name}")
    fdb_memory_stores.drop(name)


@pytest.fixture
def fdb_published(fdb_broker: BrokerInTest) -> Callable[..., list[Published]]:
    """``fdb_published()`` or ``fdb_published("queue")``: the messages in ``fdb_broker``."""
    return fdb_broker.published


@pytest.fixture
def fdb_sqlite_broker(tmp_path: Path) -> BrokerInTest:
    """An empty broker in a file of this test's temporary folder."""
    return _broker(f"fdb+sqlite:///{tmp_path}/broker.db")


@pytest.fixture(scope="session")
def fdb_session_broker(tmp_path_factory: pytest.TempPathFactory) -> BrokerInTest:
    """One broker for the whole run, in a temporary file. Not emptied between tests."""
    return _broker(f"fdb+sqlite:///{tmp_path_factory.mktemp('fdb_session_broker')}/broker.db")


@pytest.fixture(scope="session")
def fdb_cluster() -> Iterator[Cluster]:
    """A FoundationDB node, started for this run. Skips with the reason if the server or its client is missing."""
    from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

    reason = fdb_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster
        _close_clients()


@pytest.fixture
def fdb_cluster_broker(fdb_cluster: Cluster, request: pytest.FixtureRequest) -> BrokerInTest:
    """An empty broker on ``fdb_cluster``."""
    import hashlib

    namespace = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    return _broker(f"fdb://{fdb_cluster.connection_string}/{namespace}")


def _close_clients() -> None:
    """Close the clients that tests have left open: they must not wait for a store that is gone."""
    from kombu_fdb.process.client import close_clients

    close_clients()


def _broker(url: str) -> BrokerInTest:
    from celery_fdb.contrib.published import BrokerInTest

    return BrokerInTest(url)
