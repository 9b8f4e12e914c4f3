"""The acceptance tests' application in a worker whose event loop is held up while its children work.

As by a store that does not answer. Before it has read that a task was begun, it is told to stop, or loses its
connection.
"""

import os
import time
from itertools import count

from acceptance_app import DIRECTORY, app
from celery import bootsteps
from celery.worker import state

from kombu_fdb.errors import StoreUnavailable

#: For a child that has been given its task; the turn before, this is waited in vain.
PAUSE_S = 2.0
losses = count()


class HeldUp(bootsteps.StartStopStep):
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer):
        consumer.hub.on_tick.add(hold_up)


def hold_up(*_hub):
    if state.reserved_requests and has_run(PAUSE_S):
        if os.environ.get("HELD_UP_LOSES"):
            if next(losses):
                return
            raise StoreUnavailable("the test has cut the connection")
        state.should_stop = 0
        state.maybe_shutdown()


def has_run(timeout_s):
    deadline = time.monotonic() + timeout_s
    marks = DIRECTORY / "marks"
    while not (marks.exists() and marks.read_text()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


app.steps["consumer"].add(HeldUp)
