"""Speed beside the peers, in one run: ``make bench`` or ``tox -e bench -- --rounds 3 --only fdb+sqlite --only redis``.

Rounds are interleaved (every broker once, then all again), and medians are shown, so that a slow minute of the machine
hits all alike. The last column block gives ratios to the best peer with a durable, confirmed publish.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from brokers import Broker, all_brokers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
#: Messages per round; latency: tasks one after the other.
COUNTS = {"publish": 4000, "batch": 20_000, "consume": 10_000, "tasks": 4000, "latency": 200}
ACROSS_PROCESSES = {"tasks", "latency"}
COLUMNS = {
    "publish": "publish/s",
    "batch": "batch/s",
    "consume": "consume+ack/s",
    "tasks": "tasks/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
}

Results = dict[tuple[str, str], list[float]]


def measure(broker: Broker, workload: str, count: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "workloads.py"), workload, broker.url]
    command += ["--options", json.dumps(broker.options), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{broker.name}: {workload} failed\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(found: list[Broker], workloads: list[str], rounds: int, scale: float) -> Results:
    results: Results = defaultdict(list)
    jobs = [
        (broker, workload)
        for _ in range(rounds)
        for workload in workloads
        for broker in found
        if broker.across_processes or workload not in ACROSS_PROCESSES
    ]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(jobs))
        for broker, workload in jobs:
            progress.update(bar, description=f"{broker.name}: {workload}")
            for name, value in measure(broker, workload, max(50, int(COUNTS[workload] * scale))).items():
                results[broker.name, workload if name == "rate" else name].append(value)
            progress.advance(bar)
    return results


def table(found: list[Broker], results: Results, rounds: int) -> Table:
    shown = Table(title=f"medians of {rounds} rounds; messages of about 900 B; one client process")
    for name in ("broker", "version", "a confirmed publish survives"):
        shown.add_column(name)
    for name in COLUMNS.values():
        shown.add_column(name, justify="right")
    for broker in found:
        cells = [_cell(results.get((broker.name, column)), column) for column in COLUMNS]
        shown.add_row(broker.name, broker.version, broker.durability, *cells)
    return shown


def ratios(found: list[Broker], results: Results) -> Table:
    shown = Table(title="ours, as a multiple of each peer (latency: below 1 is faster)")
    shown.add_column("")
    for name in COLUMNS.values():
        shown.add_column(name, justify="right")
    ours = [broker for broker in found if broker.name.startswith("fdb")]
    for one in ours:
        for peer in found:
            if peer not in ours:
                shown.add_row(f"{one.name} / {peer.name}", *(_ratio(results, one, peer, column) for column in COLUMNS))
        shown.add_section()
    return shown


def _ratio(results: Results, one: Broker, peer: Broker, column: str) -> str:
    ours, theirs = results.get((one.name, column)), results.get((peer.name, column))
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}" if ours and theirs else "-"


def _cell(values: list[float] | None, column: str) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.1f}" if column.endswith("_ms") else f"{middle:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of messages")
    parser.add_argument("--only", action="append", default=[], metavar="BROKER", help="by its name in the table")
    parser.add_argument("--workload", action="append", choices=list(COUNTS), default=[])
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    with all_brokers(given.only) as (found, missing):
        results = run(found, given.workload or list(COUNTS), given.rounds, given.scale)
    console.print(table(found, results, given.rounds))
    console.print(ratios(found, results))
    versions = ", ".join(f"{name} {version(name)}" for name in ("kombu", "celery", "foundationdb"))
    console.print(f"{versions}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()}")
    for line in missing:
        console.print(f"not measured: {line}")


if __name__ == "__main__":
    main()
