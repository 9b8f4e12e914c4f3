"""The acceptance tests' application in a worker that loses its connection while a task waits in Celery's timer."""

import time
from itertools import count

from acceptance_app import app
from celery import bootsteps
from celery.worker import strategy
from kombu.asynchronous import timer

from kombu_fdb.errors import StoreUnavailable

calls = count()


def losing(schedule):
    """Wrap it to lose the connection between the receipt of the first task with an ETA and its time."""

    def lose(*args, **options):
        entry = schedule(*args, **options)
        if not next(calls):
            timer._time = time.time
            raise StoreUnavailable("the test has cut the connection")
        return entry

    return lose


class Losing(bootsteps.Step):
    """With Celery before 5.7, where nothing follows on the timer's call."""

    def __init__(self, consumer, **_):
        consumer.timer.call_at = losing(consumer.timer.call_at)


if hasattr(strategy, "task_scheduled"):
    strategy.task_scheduled = losing(strategy.task_scheduled)
else:
    app.steps["consumer"].add(Losing)
timer._time = lambda: time.time() - 3600  # until then its clock is an hour behind that by which the message was due

__all__ = ["app"]
