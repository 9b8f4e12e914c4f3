"""Speed beside the peers, in one run: ``make bench`` or ``tox -e bench -- --rounds 3 --only fdb+sqlite --only redis``.

Rounds are interleaved (every broker once, then all again), and medians are shown, so that a slow minute of the machine
hits all alike; ratios are made within each round. Behind the figures come ratios to each peer, what many publishers,
idle consumers and workers of several kinds do, and at the end what was to be reached. Control-C ends it with what is
measured by then. ``--save RELEASE`` keeps all of it in ``bench/history``; ``compare.py`` sets two of them side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
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
    "publish": 3000,
    "named": 3000,
    "batch": 10_000,
    "consume": 5000,
    "tasks": 2000,
    "latency": 100,
}
#: Measured in the first round only, and of each server as it is used most.
ONCE = {
    "publish4": 3000,
    "publish16": 3000,
    "idle1": 10,
    "idle50": 10,
    "workers1": 2000,
    "workers2": 2000,
    "workers4": 2000,
    "solo": 2000,
    "threads": 2000,
    "gevent": 2000,
}
ACROSS_PROCESSES = {"tasks", "latency", *ONCE}
VARIANTS = {"fdb+sqlite full", "redis always", "rabbitmq confirmed"}

Results = dict[str, dict[str, list[float]]]


class MeasurementError(Exception):
    """One of many; the others are worth something without it."""


def measure(broker: Broker, workload: str, count: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "workloads.py"), workload, broker.url]
    command += ["--options", json.dumps(broker.options), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise MeasurementError(f"{broker.name}: {workload} failed\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measured(broker: Broker, workload: str, number: int) -> bool:
    """In this round."""
    if workload in ONCE and (number or broker.name in VARIANTS):
        return False
    return broker.across_processes or workload not in ACROSS_PROCESSES


def run(found: list[Broker], workloads: list[str], rounds: int, scale: float) -> tuple[Results, list[str]]:
    results: Results = {broker.name: defaultdict(list) for broker in found}
    jobs = [
        (broker, workload)
        for number in range(rounds)
        for workload in workloads
        for broker in found
        if _measured(broker, workload, number)
    ]
    counts = {**COUNTS, **ONCE}
    failed: list[str] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(jobs))
        for broker, workload in jobs:
            progress.update(bar, description=f"{broker.name}: {workload}")
            least = 5 if workload.startswith("idle") else 50
            try:
                measured = measure(broker, workload, max(least, int(counts[workload] * scale)))
            except (MeasurementError, subprocess.TimeoutExpired) as error:
                failed.append(str(error))
            except KeyboardInterrupt:
                failed.append(f"interrupted at {broker.name}: {workload}")
                break
            else:
                for name, value in measured.items():
                    results[broker.name][workload if name == "rate" else name].append(value)
            progress.advance(bar)
    return results, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of messages")
    parser.add_argument("--only", action="append", default=[], metavar="BROKER", help="by its name in the table")
    parser.add_argument("--workload", action="append", choices=[*COUNTS, *ONCE], default=[])
    parser.add_argument("--save", metavar="RELEASE", help="keep the figures in bench/history/RELEASE.json")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine, began = compare.machine(), time.monotonic()
    with all_brokers(given.only) as (found, missing):
        results, failed = run(found, given.workload or [*COUNTS, *ONCE], given.rounds, given.scale)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    console.print(f"took {(time.monotonic() - began) / 60:.0f} minutes")
    for line in missing:
        console.print(f"not measured: {line}")
    for table in tables.all_of(found, results, given.rounds):
        console.print(table)
    if given.save:
        console.print(f"kept in {compare.save(given.save, machine, results)}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
