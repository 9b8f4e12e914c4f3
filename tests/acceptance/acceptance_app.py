"""The Celery application of the acceptance tests. Configured by the environment, because workers are processes."""

import json
import mmap
import os
import sys
import time
from pathlib import Path

from celery import Celery
from kombu import Queue

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point
from celery_fdb import History, install

DIRECTORY = Path(os.environ["ACCEPTANCE_DIRECTORY"])

app = Celery("acceptance", broker=os.environ["ACCEPTANCE_BROKER"], set_as_current=False)
app.conf.update(
    broker_transport_options=json.loads(os.environ["ACCEPTANCE_OPTIONS"]),
    broker_connection_retry_on_startup=True,
    broker_connection_timeout=2.0,
    task_queues=[Queue("celery", queue_arguments=json.loads(os.environ.get("ACCEPTANCE_QUEUE_ARGUMENTS", "{}")))],
    task_acks_late=not os.environ.get("ACCEPTANCE_EARLY"),
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    worker_pool_restarts=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    beat_schedule_filename=str(DIRECTORY / "beat"),
    beat_schedule={"tick": {"task": "acceptance_app.note", "schedule": 0.5, "args": ("tick",)}},
)
if os.environ.get("ACCEPTANCE_RESULTS"):
    app.conf.update(result_backend=os.environ["ACCEPTANCE_RESULTS"], task_ignore_result=False)
if os.environ.get("ACCEPTANCE_FREE_SLOTS"):
    install(app, claim_free_slots_only=True)
if os.environ.get("ACCEPTANCE_HISTORY"):
    install(app, history=History(runs=1_000, max_age=86_400))


def mark(kind, name):
    """Append one line; a single small write, so lines of several processes don't mix."""
    descriptor = os.open(DIRECTORY / "marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{kind} {name} {os.getpid()} {time.time()}\n".encode())
    finally:
        os.close(descriptor)


def wait_for_permission(name, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (DIRECTORY / f"allow-{name}").exists():
        time.sleep(0.005)


@app.task
def note(name):
    mark("run", name)


@app.task
def hold(name, seconds=60):
    """Runs until the test allows it to end."""
    mark("start", name)
    wait_for_permission(name, seconds)
    mark("end", name)


@app.task
def compute(name):
    """Runs until the test allows it to end. Meanwhile no other thread or greenlet runs, as in one call of C."""
    mark("start", name)
    with (DIRECTORY / "computing").open("r+b") as shared, mmap.mmap(shared.fileno(), 1) as allowed:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        while not allowed[0]:
            pass
        sys.setswitchinterval(interval_s)
    mark("end", name)


@app.task
def spread(name, number):
    """Publishes from inside the child."""
    for each in range(number):
        note.delay(f"{name}-{each}")
    mark("run", name)


@app.task(bind=True, max_retries=3)
def flaky(self, name):
    mark("run", name)
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)
    mark("done", name)


@app.task
def answer(value):
    return value
