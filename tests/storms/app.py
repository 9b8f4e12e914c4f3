"""The Celery application of the storms, in workers, publishers and relays. Configured by its environment."""

from __future__ import annotations

import json
import os
import signal
import sqlite3

from celery import Celery, Task
from kit.processes import until
from kombu import Queue

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point
from celery_fdb import install
from celery_fdb.contrib import outbox
from kombu_fdb import Broker

from .ledger import teller

WHO = os.environ["STORM_WHO"]
tell = teller(os.environ["STORM_LEDGER"], WHO)

#: Messages are acknowledged before they run, and one kills its worker: how a storm is shown to notice what is lost.
EARLY = os.environ["STORM_ACKS"] == "early"

outbox.LEASE_S = 1.0
outbox.BACKOFF = "0.1s"
app = install(Celery("storms", broker=os.environ["STORM_BROKER"], set_as_current=False))
app.conf.update(
    broker_transport_options=json.loads(os.environ["STORM_OPTIONS"]),
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_connection_timeout=2.0,
    task_queues=[Queue("storm")],
    task_default_queue="storm",
    task_acks_late=not EARLY,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_hijack_root_logger=False,
)


@app.task(name="step", bind=True)
def step(self: Task, padding: str = "") -> None:
    """A message's name is its task's id."""
    name = self.request.id
    tell("begun", name)
    if EARLY and name == "publisher0-0":
        die_when_acknowledged(name)
    tell("ended", name)


def die_when_acknowledged(name: str) -> None:
    with Broker.open(os.environ["STORM_BROKER"]) as broker:
        until(lambda: not broker.find(name))
    os.killpg(0, signal.SIGKILL)


def connect() -> sqlite3.Connection:
    """The shop's database, for the outbox."""
    return sqlite3.connect(os.environ["STORM_SHOP"], timeout=60)
