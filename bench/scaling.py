"""How dispatch scales to thousands of workers, by a model that is fed with measured costs: ``make bench-scaling``.

Model. ``n`` workers want windows of ``w`` messages from one queue that never runs empty. They stand in a line
(``kombu_fdb/engine/scheduling/line.py``). One service of ``b`` workers takes

    service(b) = look (2 r) + read version, states, messages (k r) + commit + b w s

with the round trip ``r``, the ``k`` reads of a claim, the latency of a commit, and the processor time ``s`` that the
server spends on each message. A worker that was served is away from the line for

    away = wake-up (r) + look (2 r) + w c + join (2 r) + commit

with the processor time ``c`` that it spends on each message of its own (its looks, its acks). In equilibrium the part
of the workers that stands in the line is the part of its cycle that a worker spends there, and a service takes at most
512 messages of them: b = min(n service / (service + away), 512 / w). The throughput is b w / service(b). If all clients
share a few cores, as in the measurement, it is at most cores / (s + c).

The measurement gives ``s``, ``c`` and the latencies of this machine, and the throughput of a few numbers of consumers:
the model has to be near those before the rest is believed. Then it is asked about a cluster whose round trips and
commits are given, and whose workers have a core each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from contention import KEYS, WINDOW, Tally, open_engine, throughput
from rich.console import Console
from rich.table import Table

from kombu_fdb.engine.messages.claim import MOST_MESSAGES
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

#: Reads of a claim in one service, the read version among them.
READS = {"no keys": 3, "1,000 keys": 7}
MEASURED = [8, 50]
SAMPLES = 200


class Costs(NamedTuple):
    """All in seconds."""

    round_trip: float
    commit: float
    serving: float
    own: float


def served(costs: Costs, workers: float, reads: int, window: int) -> tuple[float, float]:
    """How many workers a service has in equilibrium, and how long it takes."""
    away = 5 * costs.round_trip + costs.commit + window * costs.own

    def service(size: float) -> float:
        return (2 + reads) * costs.round_trip + costs.commit + size * window * costs.serving

    most = MOST_MESSAGES / window
    low, high = 1.0, max(1.0, min(float(workers), most))
    for _ in range(60):  # the equilibrium's size grows slower than the size it is computed from
        size = (low + high) / 2
        if workers * service(size) / (service(size) + away) > size:
            low = size
        else:
            high = size
    return high, service(high)


def rate(costs: Costs, workers: int, reads: int, *, window: int = WINDOW, cores: float = float("inf")) -> float:
    """Messages per second."""
    size, seconds = served(costs, workers, reads, window)
    return min(size * window / seconds, cores / (costs.serving + costs.own))


# -- measured ----------------------------------------------------------------------------------------------------------


def latency(act: Callable[[], object]) -> float:
    """Of one call, the median of many."""
    taken = []
    for _ in range(SAMPLES):
        began_s = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def costs_of(cluster_file: str, alone: Tally, together: Tally) -> Costs:
    """``alone``, ``together``: of one consumer, and of many, whose server does what the one does for all."""
    engine = open_engine(cluster_file, random_id().hex())
    read_s = latency(lambda: engine.inspect.counts("q")) / 2  # the read version, and one read
    write_s = latency(lambda: engine.publisher.publish([Publication("", "q", b"x")]))
    serving = alone.cpu_s / alone.messages / 2  # the other half is its acks
    own = together.cpu_s / together.messages - serving
    return Costs(read_s, max(0.0005, write_s - read_s), serving, own)


def check(console: Console, costs: Costs, reads: int, points: dict[int, Tally], seconds: float) -> None:
    shown = Table(title="the model beside this machine, messages/s")
    for name in ("consumers", "measured", "model", "model / measured", "bound by"):
        shown.add_column(name, justify="right")
    cores = (os.cpu_count() or 1) * 0.75  # the server has the rest
    for consumers, done in points.items():
        measured, modelled = done.messages / seconds, rate(costs, consumers, reads, cores=cores)
        bound = "processors" if modelled < rate(costs, consumers, reads) else "latency"
        shown.add_row(
            str(consumers), f"{measured:,.0f}", f"{modelled:,.0f}", f"{modelled / measured:.2f}", f"clients' {bound}"
        )
    console.print(shown)


def curve(console: Console, costs: Costs, reads: int, given: argparse.Namespace) -> None:
    workers = [10, 50, 100, 500, 1_000, 5_000]
    shown = Table(title=f"one queue on a cluster, round trips of {given.round_trip_ms:g} ms, messages/s by the model")
    shown.add_column("commit, ms", justify="right")
    for number in workers:
        shown.add_column(f"{number:,} workers", justify="right")
    for commit_ms in given.commit_ms:
        there = costs._replace(round_trip=given.round_trip_ms / 1e3, commit=commit_ms / 1e3)
        shown.add_row(f"{commit_ms:g}", *[f"{rate(there, number, reads):,.0f}" for number in workers])
    console.print(shown)
    own = f"{1e6 * costs.serving:.0f} us to serve a message, {1e6 * costs.own:.0f} us to receive and ack it"
    console.print(
        f"measured here: {own}, {1e3 * costs.round_trip:.2f} ms a round trip, {1e3 * costs.commit:.2f} ms a commit. "
        "From the first column in which a row stops growing, one server's processor is the bound: another queue has "
        "another one."
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--keys", choices=[*READS], default="1,000 keys")
    parser.add_argument("--round-trip-ms", type=float, default=1.0)
    parser.add_argument("--commit-ms", type=float, nargs="*", default=[3.0, 5.0, 10.0])
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    reason = fdb_unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    console = Console(width=120)
    with Cluster() as cluster:
        file = str(cluster.cluster_file)
        points = {number: throughput(file, KEYS[given.keys], number, given.seconds) for number in [1, *MEASURED]}
        costs = costs_of(file, points[1], points[MEASURED[-1]])
        del points[1]
        check(console, costs, READS[given.keys], points, given.seconds)
        curve(console, costs, READS[given.keys], given)


if __name__ == "__main__":
    main()
