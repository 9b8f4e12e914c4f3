"""``python -m tests.storms.forker COUNT CHILDREN SEED``: publishes and consumes in threads, and forks meanwhile.

It forks at any moment: after the n-th further confirmed message, with its threads in the middle of whatever they do.
A child publishes, takes or does nothing, with a broker of its own or through the Celery app it has inherited. It ends
with or without closing; what it has taken it has acknowledged. A child that does not end is told of as "hung".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from random import Random
from typing import Any

from kit.processes import DEADLINE_S, fork

from kombu_fdb import Broker
from kombu_fdb.errors import FormatError
from kombu_fdb.transport.envelope import open_payload

from .app import WHO, app, step, tell

URL, OPTIONS = os.environ["STORM_BROKER"], json.loads(os.environ["STORM_OPTIONS"])
QUEUE = "storm"
THREADS = 2


class Progress:
    """How many messages this process has confirmed."""

    def __init__(self) -> None:
        self._number, self._news = 0, threading.Condition()

    def add(self) -> None:
        with self._news:
            self._number += 1
            self._news.notify_all()

    def wait(self, more: int, publishers: list[threading.Thread]) -> None:
        with self._news:
            target = self._number + more
            while self._number < target and any(each.is_alive() for each in publishers):
                self._news.wait(1.0)  # the last publisher's end is no news


def main(count: int, children: int, seed: int) -> None:
    stop, progress, rng = threading.Event(), Progress(), Random(seed)
    # Waited for below. As a handler it would not run while this thread waits, if another thread gets the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with Broker.open(URL, **OPTIONS) as broker:
        step.apply_async(task_id=f"{WHO}-first")  # a pool with a connection, for children to inherit
        publishers = threads(lambda number: publish(broker, f"{WHO}-{number}", count, progress.add))
        consumers = threads(lambda number: consume(broker, stop))
        forked = [forked_child(rng, number, progress, publishers) for number in range(children)]
        for each in publishers:
            each.join()
        for child in forked:
            reap(child)
        tell("published", WHO)
        signal.sigwait([signal.SIGTERM])
        stop.set()
        for each in consumers:
            each.join()


def threads(work: Callable[[int], None]) -> list[threading.Thread]:
    started = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for each in started:
        each.start()
    return started


def publish(broker: Broker, prefix: str, count: int, confirmed: Callable[[], None]) -> None:
    queue = broker.queue(QUEUE)
    for number in range(count):
        name, started = f"{prefix}-{number}", time.monotonic()
        queue.put(name, task_id=name)
        tell("confirmed", name, time.monotonic() - started)
        confirmed()


def consume(broker: Broker, stop: threading.Event) -> None:
    queue = broker.queue(QUEUE)
    while not stop.is_set():
        take_one(queue, 1.0)


def take_one(queue: Any, timeout_s: float) -> None:
    job = queue.take(timeout_s)
    if job is not None:
        name = name_of(job.payload)
        tell("begun", name)
        job.ack()
        tell("ended", name)


def name_of(payload: bytes) -> str:
    """Of a job, or of a task that a child has published."""
    try:
        return str(open_payload(payload).headers["id"])
    except FormatError:
        return payload.decode()


def forked_child(rng: Random, number: int, progress: Progress, publishers: list[threading.Thread]) -> ForkProcess:
    progress.wait(rng.randint(1, 40), publishers)
    what = rng.choice([nothing, broker_of_its_own, left_open, inherited_app])
    return fork(lambda: what(f"{WHO}-child{number}"))


def nothing(prefix: str) -> None:
    """Not even a call of ours."""


def broker_of_its_own(prefix: str) -> None:
    with Broker.open(URL, **OPTIONS) as broker:
        publish(broker, prefix, 2, lambda: None)
        take_one(broker.queue(QUEUE), 0)


def left_open(prefix: str) -> None:
    broker = Broker.open(URL, **OPTIONS)
    publish(broker, prefix, 2, lambda: None)
    take_one(broker.queue(QUEUE), 0)
    os._exit(0)


def inherited_app(prefix: str) -> None:
    started = time.monotonic()
    step.apply_async(task_id=prefix)
    tell("confirmed", prefix, time.monotonic() - started)


def reap(child: ForkProcess) -> None:
    child.join(DEADLINE_S)
    if child.exitcode != 0:
        tell("hung" if child.exitcode is None else "failed", str(child.pid))
        child.kill()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    app.pool.force_close_all()
