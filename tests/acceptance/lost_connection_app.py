"""The acceptance tests' application in a worker that loses its connection while a task waits in Celery's timer."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from acceptance_app import app
from celery.worker import strategy
from kombu.asynchronous import timer

from kombu_fdb.errors import StoreUnavailable

schedule, calls = strategy.task_scheduled, count()


def lose(request: Any) -> None:
    """Between the receipt of the first task with an ETA and its time."""
    schedule(request)
    if not next(calls):
        timer._time = time.time
        raise StoreUnavailable("the test has cut the connection")


strategy.task_scheduled = lose
timer._time = lambda: time.time() - 3600  # until then its clock is an hour behind that by which the message was due

__all__ = ["app"]
