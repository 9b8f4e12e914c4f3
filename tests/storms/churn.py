"""Opening and closing of one SQLite file by threads, forks and short-lived processes, while others publish.

Each round a few keepers publish through one long-lived handle. Around them threads open and close handles of other
options, forked children do the same and are killed or end, and short-lived processes open, publish and close. A put
counts as confirmed once its commit has returned and its name was written to a journal. In the end each confirmed name
must be in the store, once, and SQLite must find the file whole.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from kombu_fdb.errors import KombuFDBError
from kombu_fdb.store.sqlite.database import SqliteDatabase

from .ledger import Verdict
from .stage import ROOT, Skipped

TIMEOUT_S = 30.0
KEEPERS = 2
PUTS = 60

VISITOR = """
import sys
sys.path.insert(0, sys.argv[3])
from tests.storms.churn import Journal, publish
from kombu_fdb.store.sqlite.database import SqliteDatabase
database = SqliteDatabase.open(sys.argv[1], timeout_s=30)
publish(database, Journal(sys.argv[2]), 5)
database.close()
"""


@dataclass
class Counts:
    """What came of a storm."""

    confirmed: int = 0
    lost: int = 0
    doubled: int = 0
    slowest_s: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.complaints)


class Journal:
    """Names of confirmed puts, one appended line each: it survives the kill of its writer."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.slowest_s = 0.0

    def confirm(self, name: bytes, seconds: float) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, name + b"\n")
        os.close(descriptor)

    def names(self) -> set[bytes]:
        return set(Path(self._path).read_bytes().split())


def publish(database: SqliteDatabase, journal: Journal, count: int) -> None:
    for _ in range(count):
        name = os.urandom(8).hex().encode()
        begin = time.monotonic()
        tr = database.begin(timeout_s=TIMEOUT_S)
        try:
            tr.set_versionstamped_key(b"q/", b"", name)
            tr.set_versionstamped_value(b"bell")
            tr.commit()
        finally:
            tr.cancel()
        journal.confirm(name, time.monotonic() - begin)


def churn(path: str, journal: Journal, rng: random.Random) -> None:
    """A web process that opens a broker for each request, with the options of each client."""
    for _ in range(20):
        database = SqliteDatabase.open(path, synchronous=rng.choice(["normal", "full"]), timeout_s=TIMEOUT_S)
        publish(database, journal, rng.randrange(3))
        database.close()


def forked(path: str, journal: Journal, rng: random.Random) -> int:
    """A child that opens its own; it may end without closing."""
    closes = rng.random() < 0.5
    pid = os.fork()
    if pid:
        return pid
    try:
        database = SqliteDatabase.open(path, timeout_s=TIMEOUT_S)
        publish(database, journal, 5)
        if closes:
            database.close()
        os._exit(0)
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr)
        os._exit(1)


def one_round(path: str, journal: Journal, rng: random.Random, counts: Counts) -> None:
    keeper = SqliteDatabase.open(path, timeout_s=TIMEOUT_S)

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except KombuFDBError as error:
                counts.complaints.append(f"a thread: {error!r}")

        return run

    works = [lambda: publish(keeper, journal, PUTS)] * KEEPERS
    works += [lambda seed=seed: churn(path, journal, random.Random(seed)) for seed in (rng.random(), rng.random())]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    visitors = [subprocess.Popen([sys.executable, "-c", VISITOR, path, journal._path, str(ROOT)]) for _ in range(2)]
    children = [forked(path, journal, rng) for _ in range(3)]
    doomed = forked(path, journal, rng)
    os.kill(doomed, signal.SIGKILL)
    os.waitpid(doomed, 0)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children) + sum(each.wait() != 0 for each in visitors)
    if failed:
        counts.complaints.append(f"{failed} children and visitors failed")
    for thread in threads:
        thread.join()
    keeper.close()


def check(path: str, journal: Journal, counts: Counts) -> None:
    confirmed = journal.names()
    counts.confirmed, counts.slowest_s = len(confirmed), journal.slowest_s
    try:
        stored = names_in(path)
    except KombuFDBError as error:
        counts.complaints.append(f"the store can't be read: {error!r}")
        return
    counts.lost = len(confirmed - set(stored))
    counts.doubled = len(stored) - len(set(stored))
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("PRAGMA integrity_check").fetchall()
    if found != [("ok",)]:
        counts.complaints.append(f"SQLite finds the file damaged: {found[:3]}")


def names_in(path: str) -> list[bytes]:
    database = SqliteDatabase.open(path, timeout_s=TIMEOUT_S)
    tr = database.begin(timeout_s=TIMEOUT_S)
    try:
        return [value for _, value in tr.get_range(b"q/", b"q0")]
    finally:
        tr.cancel()
        database.close()


def run(rounds: int, seed: int, store: str = "sqlite") -> Verdict:
    """So many rounds on one new file; the first that does harm is the last."""
    if store != "sqlite":
        raise Skipped("only SQLite has a file that processes open and close")
    counts, rng, started = Counts(), random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-churn-") as directory:
        path, journal = f"{directory}/broker.db", Journal(f"{directory}/journal")
        for _ in range(rounds):
            one_round(path, journal, rng, counts)
            check(path, journal, counts)
            if not counts.is_good:
                break
    return Verdict(
        storm="churn",
        store="fdb+sqlite",
        seed=seed,
        confirmed=counts.confirmed,
        lost=counts.lost,
        doubled=counts.doubled,
        again=0,
        unfinished=0,
        slowest_s=counts.slowest_s,
        took_s=time.monotonic() - started,
        complaints=tuple(counts.complaints),
    )
