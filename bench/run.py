"""Speed beside the peers, in one run: ``make bench`` or ``tox -e bench -- --rounds 3 --only fdb+sqlite --only redis``.

Rounds are interleaved (every broker once, then all again), and medians are shown, so that a slow minute of the machine
hits all alike. Behind the figures come ratios to each peer, what many publishers and idle consumers cost, and the CPU
of a publish beside that of SQLite's own transactions. ``--save RELEASE`` keeps all of it in ``bench/history``;
``compare.py`` sets two of them side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import compare
import tables
from brokers import Broker, all_brokers
from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).parent
#: Messages per round; latency: tasks one after the other; idle: seconds.
COUNTS = {
    "publish": 4000,
    "batch": 20_000,
    "consume": 10_000,
    "tasks": 4000,
    "latency": 200,
    "raw": 4000,
    "publish4": 4000,
    "publish16": 4000,
    "idle1": 20,
    "idle50": 20,
}
ACROSS_PROCESSES = {"tasks", "latency", "publish4", "publish16", "idle1", "idle50"}
OF_SQLITE = {"raw"}

Results = dict[str, dict[str, list[float]]]


def measure(broker: Broker, workload: str, count: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "workloads.py"), workload, broker.url]
    command += ["--options", json.dumps(broker.options), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{broker.name}: {workload} failed\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(found: list[Broker], workloads: list[str], rounds: int, scale: float) -> Results:
    results: Results = {broker.name: defaultdict(list) for broker in found}
    jobs = [
        (broker, workload)
        for _ in range(rounds)
        for workload in workloads
        for broker in found
        if broker.across_processes or workload not in ACROSS_PROCESSES
        if broker.name.startswith("fdb+sqlite") or workload not in OF_SQLITE
    ]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(jobs))
        for broker, workload in jobs:
            progress.update(bar, description=f"{broker.name}: {workload}")
            least = 5 if workload.startswith("idle") else 50
            for name, value in measure(broker, workload, max(least, int(COUNTS[workload] * scale))).items():
                results[broker.name][workload if name == "rate" else name].append(value)
            progress.advance(bar)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of messages")
    parser.add_argument("--only", action="append", default=[], metavar="BROKER", help="by its name in the table")
    parser.add_argument("--workload", action="append", choices=list(COUNTS), default=[])
    parser.add_argument("--save", metavar="RELEASE", help="keep the figures in bench/history/RELEASE.json")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    with all_brokers(given.only) as (found, missing):
        results = run(found, given.workload or list(COUNTS), given.rounds, given.scale)
    for table in tables.all_of(found, results, given.rounds):
        console.print(table)
    machine = compare.machine()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for line in missing:
        console.print(f"not measured: {line}")
    if given.save:
        console.print(f"kept in {compare.save(given.save, machine, results)}")


if __name__ == "__main__":
    main()
