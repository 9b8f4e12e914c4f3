"""The application of the results' acceptance tests: broker and result backend are one store."""

import json
import os
import signal

from acceptance_app import DIRECTORY, mark, wait_for_permission
from celery import Celery

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point

URL = os.environ["ACCEPTANCE_BROKER"]

app = Celery("results", broker=URL, backend=URL, set_as_current=False)
app.conf.update(
    broker_transport_options=json.loads(os.environ["ACCEPTANCE_OPTIONS"]),
    broker_connection_retry_on_startup=True,
    broker_connection_timeout=2.0,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_track_started=True,
    worker_hijack_root_logger=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    result_backend_transport_options=json.loads(os.environ.get("RESULTS_OPTIONS", "{}")),
)


@app.task
def add(x, y):
    mark("run", f"add-{x}-{y}")
    return x + y


@app.task
def total(numbers):
    mark("run", "total")
    return sum(numbers)


@app.task
def large(size):
    return "x" * size


@app.task
def fail(text):
    raise ValueError(text)


@app.task
def report(task_id):
    mark("run", "report")


@app.task
def wait(name):
    """Runs until the test allows it to end."""
    mark("start", name)
    wait_for_permission(name)
    mark("end", name)
    return name


@app.task(bind=True)
def die_once(self, value):
    """Its process is killed the first time, before it returns."""
    mark("run", f"die-{value}")
    if _first(f"died-{value}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return value


@app.task
def die_before_body(value):
    """Its process is killed the first time after the last part was stored, before the body is published."""
    mark("run", f"die-{value}")
    wait_for_permission("die")
    if _first(f"died-{value}"):
        app.backend.publish_body = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return value


@app.task(bind=True)
def progress(self):
    self.update_state(state="PROGRESS", meta={"done": 1})
    return "done"


@app.task(bind=True)
def spawn(self, number):
    """Publishes, with results, from inside the child."""
    return [add.delay(number, each).id for each in range(number)]


def _first(name):
    try:
        os.close(os.open(DIRECTORY / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
