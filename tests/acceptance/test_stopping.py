"""A worker that is told to stop does so within 15 seconds, whatever its store does (store/patience.py)."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kombu_fdb.testing.fdbserver import fdb_unavailable_reason

pytestmark = pytest.mark.process

#: The 15 seconds, 6 to 11 of which a machine with nothing else to do takes; and 10 for one with too much to do. What
#: used to go wrong took more than 30.
LONGEST_S = 25.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """By a program that is none of ours."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as outsider:
        for _ in range(1000):
            try:
                outsider.execute("BEGIN EXCLUSIVE")
                break
            except sqlite3.OperationalError:  # a worker is just writing
                continue
        assert outsider.in_transaction
        yield
        outsider.execute("ROLLBACK")


def begin(start: Any, app: Any, broker: Any, until: Any, *arguments: str, pool: str) -> Any:
    worker = start("-c", "2", *arguments, pool=pool)
    for _ in range(6):
        app.hold.delay("x")
    until(lambda: broker.marks("start"))
    return worker


def seconds_to_stop(worker: Any, broker: Any) -> float:
    broker.allow("x")
    worker.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    worker.wait_end()
    return time.monotonic() - began


@pytest.fixture
def file(broker: Any) -> Path:
    if not broker.url.startswith("fdb+sqlite"):
        pytest.skip("not a file")
    return broker.directory / "broker.db"


@pytest.mark.parametrize("events", [(), ("-E",)], ids=["quiet", "events"])
@pytest.mark.parametrize("pool", ["solo", "threads", "prefork"])
def test_a_file_locked_by_others(
    broker: Any, file: Path, app: Any, start: Any, until: Any, pool: str, events: tuple[str, ...]
) -> None:
    worker = begin(start, app, broker, until, *events, pool=pool)
    with locked(file):
        assert seconds_to_stop(worker, broker) < LONGEST_S


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_file_locked_for_so_long_that_the_worker_connects_again(
    broker: Any, file: Path, app: Any, start: Any, until: Any, pool: str
) -> None:
    worker = begin(start, app, broker, until, "-E", pool=pool)
    with locked(file):
        until(lambda: worker.said("heartbeat to the store failed"))
        assert seconds_to_stop(worker, broker) < LONGEST_S


def test_a_file_that_is_gone(broker: Any, file: Path, app: Any, start: Any, until: Any) -> None:
    worker = begin(start, app, broker, until, pool="prefork")
    for each in file.parent.glob("broker.db*"):
        if each.is_file():
            each.unlink()
    assert seconds_to_stop(worker, broker) < LONGEST_S


def test_a_task_whose_start_the_worker_has_not_read(broker: Any, file: Path, app: Any, start: Any, until: Any) -> None:
    """Its child waits 30 s for its result to be read, if nobody does (transport/worker/joining.py)."""
    app.note.delay("x")
    worker = start("-c", "1", app="held_up_app", wait=False)
    until(lambda: broker.marks("run"))
    began = time.monotonic()
    worker.wait_end()
    assert time.monotonic() - began < LONGEST_S


@pytest.mark.foundationdb
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_cluster_that_hangs(broker: Any, app: Any, start: Any, until: Any, pool: str) -> None:
    if broker.cluster is None:
        pytest.skip(fdb_unavailable_reason() or "of a cluster only")
    worker = begin(start, app, broker, until, "-E", pool=pool)
    os.kill(broker.cluster.pid, signal.SIGSTOP)
    try:
        assert seconds_to_stop(worker, broker) < LONGEST_S
    finally:
        os.kill(broker.cluster.pid, signal.SIGCONT)
