"""Tasks of an application that keeps a history."""

import os
import signal
import time

from acceptance_app import app, mark
from celery.exceptions import Ignore, Reject


@app.task
def add(x, y, **_):
    return x + y


@app.task
def fail(token):
    raise ValueError(f"no password={token}")


@app.task(bind=True, max_retries=1)
def again(self):
    if self.request.retries == 0:
        raise self.retry(countdown=0, exc=KeyError("again"))


@app.task
def refuse():
    raise Reject("no", requeue=False)


@app.task
def ignore():
    raise Ignore


@app.task(time_limit=1)
def too_slow():
    time.sleep(60)


@app.task
def total(parts):
    return sum(each or 0 for each in parts)


@app.task
def die(name):
    mark("run", name)
    os.kill(os.getpid(), signal.SIGKILL)
