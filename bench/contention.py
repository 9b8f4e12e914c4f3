"""Rival consumers on a real FoundationDB: ``make bench-contention``.

Consumers are threads of 4 processes, each claiming and acknowledging windows of 10 from one queue that never runs
empty: without keys, with one hot key, and with 1,000 keys. Shown are messages and claims per second and lost races per
claim.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kombu_fdb.engine.facade.engine import Engine, Environment, Timeouts
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import ClaimTerms, Publication
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason

WINDOW = 10
PROCESSES = 4
KEYS = {"no keys": [""], "one key": ["hot"], "1,000 keys": [f"key-{number}" for number in range(1000)]}


class Tally(NamedTuple):
    claims: int
    messages: int
    lost: int


def open_engine(cluster_file: str, namespace: str) -> Engine:
    database = FoundationDatabase.open(cluster_file)
    return Engine(
        database, namespace, Environment(SystemClock(), random_id, random.Random()), timeouts=Timeouts(call_s=30)
    )


def fill(engine: Engine, keys: list[str], messages: int) -> None:
    chosen = random.Random(0)
    for _ in range(messages // 1000):
        engine.publisher.publish([Publication("", "q", b"x" * 500, key=chosen.choice(keys)) for _ in range(1000)])


def consume(engine: Engine, until: float, tallies: list[Tally]) -> None:
    """One consumer: its own session, and its own view of its rivals."""
    session, claims, messages, lost, acks = engine.sessions.open({}), 0, 0, 0, []
    while time.monotonic() < until:
        before = engine.messages.lost_races
        try:
            taken = engine.messages.claim(session, ["q"], WINDOW, terms=ClaimTerms(acks=acks))
        except StoreUnavailable:
            break
        acks = [delivery.lease for delivery in taken]
        claims, messages, lost = claims + 1, messages + len(taken), lost + engine.messages.lost_races - before
    tallies.append(Tally(claims, messages, lost))


def run_process(cluster_file: str, namespace: str, consumers: int, seconds: float, results: Any) -> None:
    tallies: list[Tally] = []
    engines = [open_engine(cluster_file, namespace) for _ in range(consumers)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=consume, args=(engine, until, tallies)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(tallies)


def measure(cluster_file: str, keys: list[str], consumers: int, seconds: float) -> Tally:
    namespace = random_id().hex()
    fill(open_engine(cluster_file, namespace), keys, 60_000)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shares = [consumers // PROCESSES + (number < consumers % PROCESSES) for number in range(PROCESSES)]
    processes = [
        context.Process(target=run_process, args=(cluster_file, namespace, share, seconds, results))
        for share in shares
        if share
    ]
    for process in processes:
        process.start()
    tallies = [tally for _ in processes for tally in results.get()]
    for process in processes:
        process.join()
    return Tally(*(sum(column) for column in zip(*tallies, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--consumers", type=int, nargs="*", default=[1, 8, 50])
    given = parser.parse_args()
    reason = fdb_unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    shown = Table(title=f"one queue, windows of {WINDOW}, single-node FoundationDB")
    for name in ("keys", "consumers", "messages/s", "claims/s", "lost races per claim"):
        shown.add_column(name, justify="left" if name == "keys" else "right")
    with SingleNodeCluster() as cluster:
        for name, keys in KEYS.items():
            for consumers in given.consumers:
                done = measure(str(cluster.cluster_file), keys, consumers, given.seconds)
                rates = (f"{done.messages / given.seconds:,.0f}", f"{done.claims / given.seconds:,.0f}")
                shown.add_row(name, str(consumers), *rates, f"{done.lost / max(1, done.claims):.2f}")
            shown.add_section()
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
