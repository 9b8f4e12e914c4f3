from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_fdb import install
from celery_fdb.tasks.task import _known
from kombu_fdb import Broker


@pytest.fixture(params=["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A broker of its own for each test."""
    if request.param == "sqlite":
        return f"fdb+sqlite:///{tmp_path}/broker.db"
    cluster = request.getfixturevalue("cluster")
    return f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}"


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = install(Celery("tasks", broker=url, backend="cache+memory://", set_as_current=False))
    app.conf.update(task_default_queue="q", broker_connection_timeout=2.0)
    _known.clear()
    yield app
    app.pool.force_close_all()
    app.close()


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with Broker.open(url) as broker:
        yield broker


@pytest.fixture
def sent(app: Celery) -> Any:
    """The messages that wait, as ``(task, args, kwargs, headers)``, taken off the queue."""

    def sent(queue: str = "q") -> list[tuple[str, Any, Any, dict[str, Any]]]:
        found = []
        with app.connection_for_read() as connection:
            channel = connection.channel()
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                args, kwargs, _ = message.decode()
                found.append((message.headers["task"], args, kwargs, message.headers))
        return found

    return sent
