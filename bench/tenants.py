"""One noisy tenant among a hundred, with 8 Celery worker processes on a real FoundationDB: ``make bench-tenants``.

The noisy tenant has 10,000 tasks waiting. Each of 99 others sends one task, and the next one when that has started. A
*round* is the time in which every tenant is served once: 100 tasks at the rate that is measured. Shown are how many
rounds the quiet tasks waited from before their publish to their start, and the rate, beside that without keys. There
the quiet tasks stand behind the noisy ones, so a tenant sends the next one when any task has started: then both runs
pay for about as many publishes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from rich.console import Console
from rich.table import Table

from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

TENANTS = 100
NOISY = 10_000
URL, FOLDER = "BENCH_BROKER_URL", "BENCH_FOLDER"

app = Celery("tenants", broker=os.environ.get(URL), task_ignore_result=True, worker_prefetch_multiplier=4)
app.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True)


@app.task
def note(tenant: str, sent_s: float) -> None:
    """Write down when it starts."""
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.log", "a", encoding="utf-8") as log:  # noqa: PTH123
        log.write(f"{tenant} {sent_s} {time.time()}\n")


class Start(NamedTuple):
    tenant: str
    sent_s: float
    started_s: float


class Starts:
    """What the workers have written down."""

    def __init__(self, folder: Path) -> None:
        self.all: list[Start] = []
        self._folder = folder
        self._read: dict[Path, int] = {}

    def more(self) -> list[Start]:
        """What has been written since the last call."""
        found = []
        for path in self._folder.glob("*.log"):
            data = path.read_bytes()[self._read.get(path, 0) :]
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for tenant, sent_s, started_s in map(str.split, whole.decode().splitlines()):
                found.append(Start(tenant, float(sent_s), float(started_s)))
        self.all += found
        return found


@contextmanager
def workers(url: str, folder: Path, number: int, queue: str) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tenants", "worker", "-P", "solo", "-l", "ERROR", "-Q", queue]
    environment = {**os.environ, URL: url, FOLDER: str(folder)}
    running = [
        subprocess.Popen(
            [*command, "-n", f"w{each}@bench"],
            cwd=Path(__file__).parent,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in range(number)
    ]
    try:
        yield
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait()


def queue_of(*, keys: bool) -> str:
    return "keys" if keys else "no-keys"


def send(tenant: str, *, keys: bool) -> None:
    headers = {"fair_key": tenant} if keys else {}
    note.apply_async((tenant, time.time()), queue=queue_of(keys=keys), headers=headers)


def measure(url: str, number: int, seconds: float, *, keys: bool) -> tuple[float, list[float]]:
    """Tasks per second, and the quiet tenants' waits in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = Starts(folder)
        for _ in range(NOISY):
            send("noisy", keys=keys)
        with workers(url, folder, number, queue_of(keys=keys)):
            while len(list(folder.glob("*.log"))) < number:
                time.sleep(0.2)  # until all workers are there
            starts.more()
            began_s = time.time()
            send_quiet(starts, began_s + seconds, keys=keys)
            ended_s = time.time()
        starts.more()
    counted = [each for each in starts.all if began_s <= each.started_s <= ended_s]
    waits = [each.started_s - each.sent_s for each in counted if each.tenant != "noisy"]
    return len(counted) / (ended_s - began_s), sorted(waits)


def send_quiet(starts: Starts, until_s: float, *, keys: bool) -> None:
    """Each quiet tenant has one task at a time."""
    due = tenants = [f"quiet-{each}" for each in range(TENANTS - 1)]
    while time.time() < until_s:
        for tenant in due:
            send(tenant, keys=keys)
        threading.Event().wait(0.05)
        started = starts.more()
        due = [each.tenant for each in started if each.tenant != "noisy"] if keys else tenants[: len(started)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    reason = fdb_unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    shown = Table(title=f"{given.workers} Celery workers, {TENANTS} tenants, one with {NOISY:,} tasks")
    for name in ("", "tasks/s", "of those without", "quiet p50, rounds", "quiet p99, rounds"):
        shown.add_column(name, justify="right")
    before = 0.0
    with Cluster() as cluster:
        app.conf.broker_url = url = f"fdb:///{cluster.cluster_file}"
        for keys in (False, True):
            rate, waits = measure(url, given.workers, given.seconds, keys=keys)
            shown.add_row(queue_of(keys=keys), f"{rate:,.0f}", *_row(rate, before, waits, keys=keys))
            before = rate
    Console(width=100).print(shown)


def _row(rate: float, before: float, waits: list[float], *, keys: bool) -> list[Any]:
    round_s = TENANTS / rate
    if not waits:
        return [f"{rate / before:.2f}" if keys else "", "none started", "none started"]
    p99 = waits[int(0.99 * (len(waits) - 1))]
    return [
        f"{rate / before:.2f}" if keys else "",
        *(f"{each / round_s:.2f}" for each in (statistics.median(waits), p99)),
    ]


if __name__ == "__main__":
    main()
