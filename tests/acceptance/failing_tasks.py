"""Tasks that fail, in the application of the other acceptance tests."""

import os
import signal
import time

from acceptance_app import app, mark
from celery import Task
from celery.exceptions import Reject
from kombu import Queue

from celery_fdb.tasks import failures
from celery_fdb.tasks.task import Backoff

failures.install(app)
app.conf.task_queues = [
    Queue("celery"),
    Queue("poison", queue_arguments={"x-delivery-limit": 2}),
    Queue("watched", queue_arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graveyard"}),
]


class ScheduledTask(Backoff, Task):
    """A task class with named backoff schedules."""


class Broken(Exception):
    """An error of the application."""


@app.task(dead_letter=True)
def fail(name):
    mark("run", name)
    raise Broken(f"cannot {name}")


@app.task(dead_letter=True, acks_late=False)
def fail_early(name):
    mark("run", name)
    raise Broken(f"cannot {name}")


@app.task
def fail_quietly(name):
    mark("run", name)
    raise Broken(f"cannot {name}")


@app.task(dead_letter=True)
def succeed(name):
    mark("run", name)


@app.task(base=ScheduledTask, bind=True, dead_letter=True, autoretry_for=(Broken,), max_retries=2, backoff="0.1/0.3s")
def stubborn(self, name):
    mark("run", name)
    raise Broken(f"attempt {self.request.retries}")


@app.task
def refuse(name):
    mark("run", name)
    raise Reject(Broken("never again"), requeue=False)


@app.task(dead_letter=True)
def die(name):
    mark("run", name)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(reject_on_worker_lost=True)
def poison(name):
    mark("run", name)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(dead_letter=True, time_limit=1)
def too_slow(name):
    mark("run", name)
    time.sleep(60)
