"""Tasks of an application that keeps a history."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from acceptance_app import app, mark
from celery import Task
from celery.exceptions import Ignore, Reject


@app.task
def add(x: int, y: int, **_: Any) -> int:
    return x + y


@app.task
def fail(token: str) -> None:
    raise ValueError(f"no password={token}")


@app.task(bind=True, max_retries=1)
def again(self: Task) -> None:
    if self.request.retries == 0:
        raise self.retry(countdown=0, exc=KeyError("again"))


@app.task
def refuse() -> None:
    raise Reject("no", requeue=False)


@app.task
def ignore() -> None:
    raise Ignore


@app.task(time_limit=1)
def too_slow() -> None:
    time.sleep(60)


@app.task
def total(parts: list[int | None]) -> int:
    return sum(each or 0 for each in parts)


@app.task
def die(name: str) -> None:
    mark("run", name)
    os.kill(os.getpid(), signal.SIGKILL)
