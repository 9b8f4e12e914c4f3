"""The acceptance tests' application in a worker that loses its connection while a task waits in Celery's timer."""

from __future__ import annotations

from itertools import count
from typing import Any

from acceptance_app import app
from celery.worker import strategy

from kombu_fdb.errors import StoreUnavailable

schedule, calls = strategy.task_scheduled, count()


def lose(request: Any) -> None:
    """Between the receipt of the first task with an ETA and its time, which has come."""
    schedule(request)
    if not next(calls):
        raise StoreUnavailable("the test has cut the connection")


strategy.task_scheduled = lose

__all__ = ["app"]
