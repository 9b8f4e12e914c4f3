"""The acceptance tests' application in a worker whose child has a part of its first task, and has stopped reading.

Then the worker is told to stop, or loses its connection. The child goes on, or is killed as the rest is written.
"""

import os
import signal
from functools import partial

from acceptance_app import app
from celery import bootsteps
from celery.worker import state

from kombu_fdb.errors import StoreUnavailable

children = []


class HalfWritten(bootsteps.StartStopStep):
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer):
        if not children:
            consumer.hub.on_tick.add(partial(look, consumer.pool._pool))


def look(processes, *_hub):
    if not children and processes.outbound_buffer and processes._all_inqueues:
        children.append(processes._pool[0].pid)
        os.kill(children[0], signal.SIGSTOP)
    elif processes._active_writers and len(children) == 1:
        children.append(0)
        if os.environ.get("HALF_WRITTEN_KILLS"):
            processes._flush_writer = partial(kill_and, processes._flush_writer)
        else:
            os.kill(children[0], signal.SIGCONT)
        if os.environ.get("HALF_WRITTEN_LOSES"):
            raise StoreUnavailable("the test has cut the connection")
        if os.environ.get("HALF_WRITTEN_QUITS"):
            os.kill(os.getpid(), signal.SIGQUIT)
            return
        state.should_stop = 0
        state.maybe_shutdown()


def kill_and(write, child, writer):
    os.kill(child.pid, signal.SIGKILL)
    write(child, writer)


app.steps["consumer"].add(HalfWritten)
