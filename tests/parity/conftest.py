"""Stores for the seeds' tests: ``broker`` through the public API and in real time, over each store."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kombu_fdb import Broker
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.transactions import Environment
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.process.client import Client
from kombu_fdb.settings.location import Location, SqliteLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.testing.memory import MemoryDatabase

#: No consumer is served by its safety look: what wakes one in these tests is a watch.
OPTIONS = {"poll_interval": 3600.0, "session_ttl": 60.0}


class SharedMemory(MemoryDatabase):
    """Several brokers as if in several processes: one that closes must not close it for the others."""

    def close(self) -> None:
        pass


class Store:
    """Where the brokers of one test are."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.memory = SharedMemory() if url is None else None

    @property
    def location(self) -> Location:
        if self.url is None:
            return SqliteLocation(Path("/memory"))
        return locate(parse_url(self.url), parse_options())

    def broker(self, **options: Any) -> Broker:
        """With a session of its own, as of another process."""
        options = {**OPTIONS, **options}
        if self.memory is None:
            return Broker(Client(self.location, parse_options(options)))
        engine = Engine(self.memory, "default", Environment(SystemClock(), random_id, random.Random(1)))
        return Broker.on(self.location, engine, **options)


@pytest.fixture(params=["memory", "sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store(None)
    if request.param == "sqlite":
        return Store(f"fdb+sqlite:///{tmp_path}/broker.db")
    cluster = request.getfixturevalue("cluster")
    return Store(f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}")


@pytest.fixture
def another(store: Store) -> Iterator[Callable[..., Broker]]:
    """Opens brokers, each as if in a process of its own."""
    opened: list[Broker] = []

    def another(**options: Any) -> Broker:
        opened.append(store.broker(**options))
        return opened[-1]

    yield another
    for broker in opened:
        broker.close()


@pytest.fixture
def broker(another: Callable[..., Broker]) -> Broker:
    return another()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def asleep() -> Callable[[Broker], threading.Event]:
    """Tells when a take has found nothing and armed its watches: what comes later, it can learn from them only."""

    def asleep(broker: Broker) -> threading.Event:
        event, arm = threading.Event(), broker._engine.messages.arm

        def arm_and_tell(*arguments: Any) -> Any:
            watches = arm(*arguments)
            if watches is not None:
                event.set()
            return watches

        broker._engine.messages.arm = arm_and_tell  # type: ignore[method-assign]
        return event

    return asleep


@pytest.fixture
def sweep() -> Callable[[Broker, Broker], None]:
    """What the sweep of ``observer`` does to ``silent`` when it was silent for ``session_ttl``."""

    def sweep(observer: Broker, silent: Broker) -> None:
        session_id = silent._client.session().session_id
        last_beat = {each: beat for each, beat, _ in observer._engine.sessions.beats()}[session_id]
        assert observer._engine.sessions.fence(session_id, last_beat)
        observer._engine.sessions.release(session_id)

    return sweep


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
