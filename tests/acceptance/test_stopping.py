"""A worker that is told to stop does so within 15 seconds, whatever its store does (store/retry.py)."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from kombu_fdb.model import QueueCounts

pytestmark = pytest.mark.process

#: Of which a machine with nothing else to do takes 6 to 11. What used to go wrong took more than 30.
LONGEST_S = 15.0
#: Between two looks at how a worker does.
LOOK_S = 0.05


@contextmanager
def locked(path):
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


def begin(start, tasks, broker, until, *arguments, **how):
    """``how``: its pool, and the application it loads."""
    worker = start("-c", "2", *arguments, **how)
    for _ in range(6):
        tasks.hold.delay("x")
    until(lambda: broker.marks("start"))
    return worker


class Stopwatch:
    """Seconds that a worker takes, without those in which it could go on and the machine had no CPU for it.

    So the bound is the same on a machine with too much to do. A thread that waits for a deadline is not one that waits
    for a CPU: what it takes counts, however busy the machine is. Where the kernel does not tell, all of it counts.
    """

    def __init__(self, pid):
        self._processes = {each for each in map(int, _numbers(Path("/proc"))) if _group(each) == pid}
        self._delays = {}
        self._look()
        self._before = sum(self._delays.values())
        self._began = time.monotonic()

    def seconds_to_end(self, worker):
        deadline = self._began + 240
        while time.monotonic() < deadline:
            self._look()
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(LOOK_S)
                break
        worker.wait_end()
        return time.monotonic() - self._began - (sum(self._delays.values()) - self._before) / 1e9

    def _look(self):
        """A thread that has ended since keeps what it had at the last look."""
        for process in self._processes:
            for thread in _numbers(Path(f"/proc/{process}/task")):
                path = Path(f"/proc/{process}/task/{thread}/schedstat")
                with suppress(OSError):
                    self._delays[path] = int(path.read_text().split()[1])


def _numbers(folder):
    try:
        return [each.name for each in folder.iterdir() if each.name.isdigit()]
    except OSError:  # it has ended; or there is no such thing on this system
        return []


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def seconds_to_stop(worker, broker):
    broker.allow("x")
    watch = Stopwatch(worker.process.pid)
    worker.process.send_signal(signal.SIGTERM)
    return watch.seconds_to_end(worker)


@pytest.fixture
def file(broker):
    if not broker.url.startswith("fdb+sqlite"):
        pytest.skip("not a file")
    return broker.directory / "broker.db"


@pytest.mark.parametrize("pool", ["gevent", "eventlet"], indirect=True)
def test_a_cold_shutdown_ends_a_worker_of_greenlets(broker, app, start, until, pool):
    """Its signal handler runs in the event loop, where nothing may wait."""
    worker = begin(start, app, broker, until, pool=pool)
    watch = Stopwatch(worker.process.pid)
    worker.process.send_signal(signal.SIGQUIT)
    # Once more: Python ignores what a signal handler raises out of a finalizer.
    again = threading.Timer(LONGEST_S / 2, worker.process.send_signal, [signal.SIGQUIT])
    again.start()
    try:
        assert watch.seconds_to_end(worker) < LONGEST_S
    finally:
        again.cancel()
        again.join()


@pytest.mark.parametrize("events", [(), ("-E",)], ids=["quiet", "events"])
@pytest.mark.parametrize("pool", ["solo", "threads", "prefork"])
def test_a_file_locked_by_others(broker, file, app, start, until, pool, events):
    worker = begin(start, app, broker, until, *events, pool=pool)
    with locked(file):
        assert seconds_to_stop(worker, broker) < LONGEST_S


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_file_locked_for_so_long_that_the_worker_connects_again(broker, file, app, start, until, pool):
    worker = begin(start, app, broker, until, "-E", pool=pool)
    with locked(file):
        until(lambda: worker.said("heartbeat to the store failed"))
        assert seconds_to_stop(worker, broker) < LONGEST_S


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"], indirect=True)
def test_a_file_that_is_gone(broker, file, app, start, until, pool, busy):
    """It refuses at once, so nothing is waited for in vain but for kombu's pauses."""
    worker = begin(start, app, broker, until, pool=pool)
    for each in file.parent.glob("broker.db*"):
        if each.is_file():
            each.unlink()
    if not busy:  # and its heartbeat connects again and again
        broker.allow("x")
        until(lambda: worker.said("was deleted or replaced"))
    assert seconds_to_stop(worker, broker) < LONGEST_S


def test_a_task_whose_start_the_worker_has_not_read(broker, app, start, until, engine):
    """Its child waits up to 30 s for the worker to read its result (transport/worker.py): seed 4016 ran two again."""
    app.note.delay("x")
    worker = start("-c", "1", app="held_up_app", wait=False)
    until(lambda: broker.marks("run"))
    assert Stopwatch(worker.process.pid).seconds_to_end(worker) < LONGEST_S
    assert engine.inspect.counts("celery") == QueueCounts()


@pytest.mark.parametrize(("how", "ran"), [("STOPS", {1}), ("QUITS", {0, 1}), ("KILLS", {0})])
def test_a_task_of_which_its_child_has_a_part(broker, app, start, engine, monkeypatch, how, ran):
    """The child would wait for the rest, and the worker for the child: in a warm and in a cold shutdown.

    And where the child ends, as after ``worker_max_tasks_per_child``, the order to end would wait for room in its pipe.
    """
    monkeypatch.setenv(f"HALF_WRITTEN_{how}", "1")
    app.note.apply_async(("x",), headers={"more": "than a pipe holds" * 20_000})
    start("-c", "1", app="half_written_app", wait=False).wait_end()
    number, counts = len(broker.marks("run", "x")), engine.inspect.counts("celery")
    assert number in ran
    assert number + counts.ready == 1
    assert how != "STOPS" or counts == QueueCounts()


@pytest.mark.skipif(sys.platform != "linux", reason="root gives up what it may do with files on Linux only")
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_file_whose_permissions_are_taken_away(broker, file, app, start, until, pool):
    """Nor anything beside it. A worker goes on with what it has open; a child that has not opened it can't."""
    worker = begin(start, app, broker, until, "-E", pool=pool, app="powerless_app")
    for each in file.parent.glob("broker.db*"):
        each.chmod(0)
    app.spread.delay("s", 1)
    broker.allow("x")
    until(lambda: worker.said("Permission denied") if pool == "prefork" else broker.marks("run", "s"))
    assert seconds_to_stop(worker, broker) < LONGEST_S


@pytest.mark.foundationdb
@pytest.mark.own_cluster
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "killed"])
@pytest.mark.parametrize("pool", ["threads", "prefork", "gevent"])
def test_a_cluster_that_is_away(broker, app, start, until, pool, how):
    if broker.cluster is None:
        pytest.skip("of a cluster only")
    worker = begin(start, app, broker, until, "-E", pool=pool)
    os.kill(broker.cluster.pid, how)
    try:
        if pool == "gevent":  # Celery's heartbeat has a greenlet of its own, and a lock: seed 4014 of the box
            until(lambda: worker.said("heartbeat to the store failed"))
        assert seconds_to_stop(worker, broker) < LONGEST_S
    finally:
        if how == signal.SIGSTOP:  # one that was killed has gone
            os.kill(broker.cluster.pid, signal.SIGCONT)
