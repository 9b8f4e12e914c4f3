"""The Celery application of a run, in its workers and its producers; configured by its environment."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from pathlib import Path
from typing import NoReturn

from celery import Celery, Task
from celery.exceptions import Reject
from kit.history.record import Recorder
from kombu import Queue
from kombu.exceptions import OperationalError

import kombu_fdb.transport
from celery_fdb import install
from celery_fdb.contrib import outbox
from kombu_fdb.errors import KombuFDBError

URL = os.environ["RUN_BROKER"]
OPTIONS = json.loads(os.environ["RUN_OPTIONS"])
#: The shop's SQL database, which has the outbox.
DATABASE = os.environ["RUN_DATABASE"]
#: Between two of beat's.
TICK_S = 1.0
recorder = Recorder(os.environ["RUN_HISTORY"], os.environ["RUN_WHO"])
recorder.note("code", folder=str(Path(kombu_fdb.transport.__file__).parents[2]))

outbox.LEASE_S = 1.0
app = install(Celery("run", broker=URL, set_as_current=False))
app.conf.update(
    broker_transport_options=OPTIONS,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_connection_timeout=2.0,
    task_queues=[Queue("tasks"), Queue("keyed")],
    task_default_queue="tasks",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    result_backend=URL,
    beat_schedule={"tick": {"task": "plain", "schedule": TICK_S}},
    beat_schedule_filename=f"{DATABASE}.{recorder.who.partition('.')[0]}",
    control_queue_ttl=5.0,  # of answers to pages that were cut off
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_hijack_root_logger=False,
)


def connect() -> sqlite3.Connection:
    return sqlite3.connect(DATABASE, timeout=60)


def name_of(task: Task) -> str:
    """Each retry is a message of its own, with the same task id."""
    request = task.request
    return f"{request.id}#{request.retries}" if request.retries else str(request.id)


@app.task(name="plain", bind=True)
def plain(self: Task, seconds: float = 0.0) -> None:
    name = name_of(self)
    recorder.note("start", message=name)
    threading.Event().wait(seconds)
    recorder.note("end", message=name, how="done")


@app.task(name="counted", bind=True, ignore_result=False)
def counted(self: Task, *_: object) -> None:
    """One of a chord, which needs its results."""
    plain.run.__func__(self)


@app.task(name="retried", bind=True, max_retries=1)
def retried(self: Task) -> None:
    if self.request.retries:
        plain.run.__func__(self)
        return
    name = name_of(self)
    recorder.note("start", message=name)
    answer = recorder.call(
        "publish",
        lambda: self.retry(countdown=1, throw=False),
        doubts=(Reject, OperationalError, KombuFDBError, OSError),
        message=f"{name}#1",
        queue="tasks",
        delay=1,
    )
    recorder.note("end", message=name, how="retried" if answer.kind == "ok" else "buried")
    raise answer.value


@app.task(name="failing", bind=True, dead_letter=True)
def failing(self: Task) -> NoReturn:
    name = name_of(self)
    recorder.note("start", message=name)
    recorder.note("end", message=name, how="buried")
    raise ValueError(name)
