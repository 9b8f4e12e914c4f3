"""What workers and publishers of an application leave in its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.run import Run
from celery_fdb.history.store import HistoryStore
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock


def bury(broker: Broker, queue: str, **details: Any) -> None:
    """All that is ready."""
    while jobs := broker.queue(queue).take_many(100, 0):
        broker._engine.messages.reject([each._delivery.lease for each in jobs], **details)


def keep(broker: Broker, *runs: Run, bounds: History | None = None, clock: Clock | None = None) -> HistoryStore:
    """Runs that have ended, in a history that is on. It, to look into and to write to."""
    bounds = bounds or History()
    store = HistoryStore(broker.database, broker.location.namespace, clock=clock or Clock())
    store.set_settings(bounds)
    for unwritten in pack_groups(runs):
        store.write(unwritten, bounds)
    return store


class Trap:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
