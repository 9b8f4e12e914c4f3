"""What distance costs: ``make bench-network``, as root on Linux with ``fdbserver``.

Five servers in three zones and a client, each in a network namespace of its own (``tests/network/box.py``). A round
trip between the client and each server takes so many milliseconds more than none. Shown are the medians of each verb,
and how many round trips it makes: as they are counted below the engine, and as the slope over the distance of its
fastest calls, which other programs on the machine disturb least. Then throughput and latency of whole programs, 16
threads that publish beside one, a worker whose tasks sleep, and up to 200 consumers of one queue, beside a model of
them (``scaling.py``).

With ``--zones`` the distance is that between two zones, in one of which the client is.

Client, servers and the switch between them share this machine: rates are what it gives, slopes are what distance costs.
On a busy one, ``chrt -r 1 make bench-network`` lets them go first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from contention import WINDOW, Tally, median
from network.box import ZONES, Box, Client, box_unavailable_reason
from rich.console import Console
from rich.table import Table
from scaling import READS, Costs, at_distance, rate

HERE = Path(__file__).parent
URL = "fdb:///"
#: Milliseconds of a round trip.
DISTANCES = (0.0, 0.5, 2.0, 5.0)
#: Messages of each measurement; latency: tasks one after the other.
COUNTS = {"publish": 300, "batch": 5000, "consume": 3000, "tasks": 1000, "latency": 60}
FIGURES = {
    "publish": "publish/s",
    "batch": "batch/s",
    "consume": "consume+ack/s",
    "tasks": "tasks/s",
    "p50_ms": "send to start, p50 ms",
    "p99_ms": "p99 ms",
}
KEYED = {"1,000 keys": ", 1,000 keys"}
THREADS = (1, 16)
#: Where threads, and where workers with tasks of 50 ms, are compared.
THREADS_MS, NAPS_MS = 2.0, (0.0, 5.0)
COMPETITORS, COMPETITORS_S = (1, 8, 50, 200), 8.0
#: Of the cluster for which the model is asked: its round trips and commits, and its workers.
CLUSTER_MS, WORKERS = [(0.5, 3.0), (1.0, 5.0), (5.0, 15.0)], (10, 50, 100, 500, 1_000, 5_000)
#: Of each server: what consumers leave in the logs has to fit.
DISK_MB = 4096
MEASUREMENT_S = 300.0

WHAT = ["verbs", "programs", "threads", "naps", "competitors"]
Figures = dict[str, dict[float, list[float]]]


class Bench:
    """One box, and what was measured in it: by name, then by distance."""

    def __init__(self, box: Box, scale: float, zones: bool) -> None:
        self._box, self._scale, self._zones = box, scale, zones
        self._client: Client = box.client("client", zone=ZONES[0] if zones else "")
        self.verbs: Figures = defaultdict(lambda: defaultdict(list))
        self.counted: dict[str, float] = {}
        self.figures: Figures = defaultdict(lambda: defaultdict(list))
        #: By keys, number of consumers, and distance.
        self.competitors: dict[tuple[str, int, float], list[Tally]] = defaultdict(list)
        #: Seconds of a round trip, by distance: the switch between client and servers takes some, too.
        self.trips: dict[float, list[float]] = defaultdict(list)

    def go_away(self, round_trip_ms: float) -> None:
        pairs = combinations(ZONES, 2) if self._zones else [(self._client, self._box.servers)]
        for one, other in pairs:
            self._box.delay(one, other, round_trip_ms / 2000)

    def measure_verbs(self, distance: float) -> None:
        measured = self._run("verbs.py", "verbs", count=self._many(60))
        for name, verb in measured.items():
            self.verbs[name][distance] += verb["seconds"]
            self.counted[name] = verb["trips"]

    def measure_programs(self, distance: float) -> None:
        for keys, (workload, count) in product(READS, COUNTS.items()):
            options = json.dumps({"fair_key": "workloads:key"} if keys in KEYED else {})
            for name, value in self._run(
                "workloads.py", workload, "--options", options, count=self._many(count)
            ).items():
                if (name := workload if name == "rate" else name) in FIGURES:
                    self.figures[name + KEYED.get(keys, "")][distance].append(value)

    def measure_threads(self, distance: float) -> None:
        for number in THREADS:
            measured = self._run("verbs.py", "threads", "--threads", str(number), count=self._many(200))
            self.figures[f"{number} threads"][distance].append(measured["rate"])

    def measure_naps(self, distance: float) -> None:
        measured = self._run("workloads.py", "naps", count=self._many(400))
        self.figures["naps"][distance].append(measured["rate"])

    def measure_competitors(self, distance: float) -> None:
        self.trips[distance].append(self._run("verbs.py", "trip", count=self._many(100))["seconds"])
        for keys in READS:
            for number in COMPETITORS:
                asked = ["--keys", keys, "--consumers", str(number), "--seconds", str(COMPETITORS_S)]
                told = self._python("contention.py", "--cluster", self._box.cluster_file, *asked)
                self.competitors[keys, number, distance].append(Tally(**told))

    def _many(self, count: int) -> int:
        return max(20, int(count * self._scale))

    def _run(self, script: str, what: str, *arguments: str, count: int) -> dict[str, Any]:
        return self._python(script, what, f"{URL}{self._box.cluster_file}", *arguments, "--count", str(count))

    def _python(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, str(HERE / arguments[0]), *arguments[1:]]
        printed = self._client.run(command, MEASUREMENT_S, env={**os.environ, "PYTHONPATH": str(HERE.parent / "tests")})
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found


def slope(points: Mapping[float, float]) -> float:
    """Of the line through them that has the least squares."""
    x, y = list(points), list(points.values())
    return statistics.linear_regression(x, y).slope


def verbs(bench: Bench, distances: Sequence[float]) -> Table:
    shown = Table(title="a verb, p50 (p99) in ms, and its round trips")
    shown.add_column("")
    for distance in distances:
        shown.add_column(f"{distance:g} ms", justify="right")
    shown.add_column("slope", justify="right")
    shown.add_column("counted", justify="right")
    for name, verb in bench.verbs.items():
        cells = [f"{ms(verb[each], 0.5)} ({ms(verb[each], 0.99)})" for each in distances]
        measured = f"{slope({each: 1000 * min(verb[each]) for each in distances}):.2f}" if len(distances) > 1 else "-"
        shown.add_row(name, *cells, measured, f"{bench.counted[name]:g}")
    return shown


def ms(seconds: Sequence[float], share: float) -> str:
    """What so large a share of the calls does not exceed."""
    return f"{1000 * sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]:.1f}"


def programs(bench: Bench, distances: Sequence[float]) -> Table:
    shown = Table(title="programs: kombu; a Celery worker with 2 children; send to start on an idle one")
    shown.add_column("")
    for distance in distances:
        shown.add_column(f"{distance:g} ms", justify="right")
    titles = {name + keys: title + keys for keys in ("", *KEYED.values()) for name, title in FIGURES.items()}
    titles |= {f"{number} threads": f"publish/s by {number} threads" for number in THREADS}
    titles["naps"] = "tasks of 50 ms/s by 4 children"
    for name, title in titles.items():
        cells = [statistics.median(found) if (found := bench.figures[name].get(each)) else None for each in distances]
        if any(cell is not None for cell in cells):
            shown.add_row(title, *("" if cell is None else f"{cell:,.1f}" for cell in cells))
    return shown


def competitors(
    points: Mapping[tuple[str, int, float], Sequence[Tally]], trips: Mapping[float, Sequence[float]]
) -> Table:
    """What was measured, and the model over it, which is fed with the first distance."""
    distances = list(trips)
    further = {distance: min(trips[distance]) - min(trips[distances[0]]) for distance in distances[1:]}
    shown = Table(title="consumers of one queue, messages/s (model / measured)")
    shown.add_column("keys")
    for title in ("consumers", *(f"{distance:g} ms" for distance in distances)):
        shown.add_column(title, justify="right")
    for keys, number in dict.fromkeys(each[:2] for each in points):
        first, *others = (median(points[keys, number, distance]) for distance in distances)
        here, messages = first.messages / COMPETITORS_S, WINDOW * first.claims / max(1, first.services or first.claims)
        cells = [f"{here:,.0f}"]
        for trip, found in zip(further.values(), others, strict=True):
            there = at_distance(here, messages, keys, number, trip)
            cells.append(f"{found.messages / COMPETITORS_S:,.0f} ({there * COMPETITORS_S / found.messages:.2f})")
        shown.add_row(keys, str(number), *cells)
    return shown


def curves(points: Mapping[tuple[str, int, float], Sequence[Tally]], distance: float) -> Table:
    """The model of a cluster whose workers have a core each; what a message costs is that of this machine."""
    shown = Table(title="one queue on a cluster by the model, messages/s")
    for title in ("keys", "round trip, commit", *(f"{number:,} workers" for number in WORKERS)):
        shown.add_column(title, justify="right")
    for keys in READS:
        alone, many = (median(points[keys, number, distance]) for number in (COMPETITORS[0], COMPETITORS[2]))
        serving = alone.cpu_s / alone.messages / 2  # the other half is its acks
        own = max(0.0, many.cpu_s / many.messages - serving)
        for round_trip, commit in CLUSTER_MS:
            costs = Costs(round_trip / 1e3, commit / 1e3, serving, own)
            cells = [f"{rate(costs, number, keys):,.0f}" for number in WORKERS]
            shown.add_row(keys, f"{round_trip:g} ms, {commit:g} ms", *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of calls and messages")
    parser.add_argument("--distance", type=float, action="append", metavar="MS", help="of a round trip")
    parser.add_argument("--only", action="append", choices=WHAT)
    parser.add_argument("--zones", action="store_true", help="the distance lies between the zones")
    given = parser.parse_args()
    if reason := box_unavailable_reason():
        raise SystemExit(reason)
    distances = given.distance or list(DISTANCES)
    wanted = given.only or WHAT
    where = {**dict.fromkeys(WHAT, distances), "threads": [THREADS_MS], "naps": list(NAPS_MS)}
    console, began = Console(width=None if sys.stdout.isatty() else 140), time.monotonic()
    with Box(disk_mb=DISK_MB, longest_s=3600) as box:
        bench = Bench(box, given.scale, given.zones)
        # Rounds are interleaved: a slow minute of the machine hits all distances alike.
        for _ in range(given.rounds):
            for distance in sorted({each for name in wanted for each in where[name]}):
                bench.go_away(distance)
                for name in wanted:
                    if distance in where[name]:
                        getattr(bench, f"measure_{name}")(distance)
    load = os.getloadavg()[1] / (os.cpu_count() or 1)
    console.print(f"took {(time.monotonic() - began) / 60:.0f} minutes; load {load:.1f} per core in the last five")
    if bench.verbs:
        console.print(verbs(bench, distances))
    if bench.figures:
        console.print(programs(bench, sorted({each for name in wanted for each in where[name]})))
    if bench.competitors:
        console.print(competitors(bench.competitors, bench.trips))
        console.print(curves(bench.competitors, distances[0]))


if __name__ == "__main__":
    main()
