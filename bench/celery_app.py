"""The worker that is measured."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_URL"])
app.conf.update(
    broker_transport_options=json.loads(os.environ.get("BENCH_OPTIONS", "{}")),
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
)
if os.environ.get("BENCH_HISTORY"):
    from celery_fdb import install

    install(app, history=os.environ["BENCH_HISTORY"] == "with")

_files: dict[int, int] = {}


@app.task(name="bench.noop")
def noop(sent: float) -> None:
    """Note when it was sent and when it started."""
    pid = os.getpid()
    if pid not in _files:
        path = Path(os.environ["BENCH_OUT"], f"{pid}.stamps")
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_files[pid], struct.pack("<dd", sent, time.time()))


@app.task(name="bench.nap")
def nap(sent: float) -> None:
    """Note the same, and keep a child busy for 50 ms."""
    noop(sent)
    time.sleep(0.05)
