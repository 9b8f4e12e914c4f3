"""What keeping a history costs: ``make bench-history``, with ``ARGS="--rounds 6 --url fdb://"`` for another store.

A real prefork worker, 2 children, works off empty tasks, once with a history and once without, in turns; the order of
the two changes with each round. Measured are tasks per second from the end of the first tenth to the last task, and the
CPU of the worker with its children, from the first task until a while after the last one, when everything is flushed.
Empty tasks are the worst case: a task that does something costs more, and its history the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import workloads
from rich.console import Console
from rich.table import Table

from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

HERE = Path(__file__).parent
MODES = ("without", "with")
#: Longer than a flush waits.
REST_S = 2.5

Figures = dict[str, float]


def one(url: str, count: int) -> Figures:
    """One worker, in this process's environment."""
    with tempfile.TemporaryDirectory() as out:
        app = workloads.app_of(url, {}, out)
        workloads.preload(app, count)
        worker = workloads.Worker(out)
        with worker:
            workloads.await_stamps(out, count // 10)
            began = worker.cpu_s
            stamps = workloads.await_stamps(out, count)
            time.sleep(REST_S)
            spent = worker.cpu_s - began
    starts = sorted(started for _, started in stamps)
    steady = starts[count // 10 :]
    return {"rate": (len(steady) - 1) / (steady[-1] - steady[0]), "cpu_us": 1e6 * spent / len(steady)}


def measure(url: str, count: int, mode: str) -> Figures:
    command = [sys.executable, __file__, "--one", "--url", url, "--count", str(count)]
    env = {**os.environ, "BENCH_HISTORY": mode}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{mode} a history: failed\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def stores(url: str | None) -> Iterator[Callable[[str], str]]:
    """The URL of an empty store by its name. On a cluster that is not named: on a node that is started for it."""
    if url is None:
        with tempfile.TemporaryDirectory() as directory:
            yield lambda name: f"fdb+sqlite:///{directory}/{name}.db"
    elif url == "fdb://":
        if reason := fdb_unavailable_reason():
            raise SystemExit(f"FoundationDB is skipped: {reason}")
        with Cluster() as cluster:
            yield lambda name: f"fdb://{cluster.connection_string}/{name}"
    else:
        yield lambda _: url


def run(url: str | None, count: int, rounds: int) -> list[dict[str, Figures]]:
    found = []
    with stores(url) as store:
        for number in range(rounds):
            order = MODES if number % 2 else MODES[::-1]
            found.append({mode: measure(store(f"{mode}-{number}"), count, mode) for mode in order})
            Console(stderr=True).print(f"round {number + 1}: {found[-1]}")
    return found


def show(found: list[dict[str, Figures]]) -> Table:
    table = Table("", "tasks/s", "CPU us/task", box=None)
    for mode in MODES:
        rates, cpus = ([each[mode][name] for each in found] for name in ("rate", "cpu_us"))
        table.add_row(f"{mode} a history", f"{statistics.median(rates):,.0f}", f"{statistics.median(cpus):,.0f}")
    ratios = [[each["with"][name] / each["without"][name] for each in found] for name in ("rate", "cpu_us")]
    table.add_row("ratio, median", *(f"{statistics.median(each):.3f}" for each in ratios))
    table.add_row("ratio, least to most", *(f"{min(each):.3f} to {max(each):.3f}" for each in ratios))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--url", help="of an empty broker, or fdb:// for a node of its own; default: an SQLite file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.url, given.count)))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(show(run(given.url, given.count, given.rounds)))


if __name__ == "__main__":
    main()
