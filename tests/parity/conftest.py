"""Stores for the seeds' tests: ``broker`` through the public API and in real time, over each store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kombu_fdb import Broker


@pytest.fixture
def url(any_store: str) -> str:
    return any_store


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
