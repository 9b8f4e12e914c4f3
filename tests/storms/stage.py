"""Where a storm plays: the processes it strikes, the store at which they meet, and the ledger they write.

A process leads a group of its own, so that a strike hits a worker's master and its children at once. Whatever is
still alive when the stage is left is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kit.conformance.invariants import check_counts, messages

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point
from kombu_fdb import Broker
from kombu_fdb.process.client import close_clients
from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

from .ledger import Ledger, Verdict

ROOT = Path(__file__).parents[2]
QUEUE = "storm"
OPTIONS = {"session_ttl": 2.0, "sweep_interval": 0.3, "publish_timeout": 10.0}
#: What a worker, or a relay, logs when it has begun.
BEGUN = (" ready.", "relay started")
#: How long nothing may happen before something is wrong.
PATIENCE_S = 120.0


Storm = Callable[..., Verdict]


class Skipped(Exception):
    """This machine, or this store, has not what the storm needs."""


class Actor:
    """One process of a storm, with its children."""

    def __init__(self, who: str, role: str, command: list[str], env: dict[str, str], directory: Path) -> None:
        self.who, self.role = who, role
        self.log = directory / f"{who}.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**env, "STORM_WHO": who},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def end(self) -> str:
        """Ask it to end, and wait; what to complain of, if anything."""
        self.process.terminate()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"{self.who} did not end within {PATIENCE_S:g} s of SIGTERM"
        return "" if code == 0 or (code == -signal.SIGTERM and not self.has_begun) else self.obituary()

    @property
    def has_begun(self) -> bool:
        """Whether it handles signals by now; until then SIGTERM ends it as it ends any program."""
        return any(word in self.log.read_text(errors="replace") for word in BEGUN)

    def obituary(self) -> str:
        last = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        return f"{self.who} ended with {self.process.returncode}: {' | '.join(last)}"


@dataclass
class Stage:
    """See :func:`staged`."""

    storm: str
    url: str
    directory: Path
    rng: Random
    seed: int
    ledger: Ledger
    cluster: Cluster | None = None
    acks: str = "late"
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    actors: list[Actor] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    #: Where a confirmed message may be instead of the store.
    elsewhere: Callable[[], list[str]] = list
    #: How long nothing may move before the storm counts as over.
    patience_s: float = PATIENCE_S
    started: float = field(default_factory=time.monotonic)

    @property
    def logs(self) -> Path:
        return Path(os.environ.get("STORM_LOGS", self.directory))

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "STORM_BROKER": self.url,
            "STORM_LEDGER": self.ledger.path,
            "STORM_OPTIONS": json.dumps(self.options),
            "STORM_ACKS": self.acks,
            "STORM_SHOP": str(self.directory / "shop.db"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "PYTHONUNBUFFERED": "1",
        }

    # -- actors --------------------------------------------------------------------------------------------------------

    def start(self, role: str, *command: str) -> Actor:
        who = f"{role}{sum(each.role == role for each in self.actors)}"
        self.actors.append(Actor(who, role, list(command), self.env, self.logs))
        return self.actors[-1]

    def worker(self, concurrency: int = 2) -> Actor:
        name = f"worker{sum(each.role == 'worker' for each in self.actors)}"
        program = ["-m", "kit.celery_program", "-A", "tests.storms.app", "worker", "-n", f"{name}@storm"]
        options = ["-c", str(concurrency), "--without-mingle", "--without-gossip", "-Q", QUEUE, "-l", "INFO"]
        return self.start("worker", *program, *options)

    def publisher(self, count: int, *, size: int = 0, first: int = 0, queue: str = QUEUE) -> Actor:
        return self.start("publisher", "-m", "tests.storms.publisher", str(first), str(count), str(size), queue)

    def relay(self) -> Actor:
        program = ["-m", "celery_fdb.contrib.outbox", "-A", "tests.storms.app", "--connect", "tests.storms.app:connect"]
        return self.start("relay", *program, "--interval", "0.05", "--limit", "7")

    def alive(self, role: str) -> list[Actor]:
        return [each for each in self.actors if each.role == role and each.is_alive]

    # -- strikes -------------------------------------------------------------------------------------------------------

    def kill(self, victim: Actor) -> None:
        self.strike(victim)
        victim.kill()

    @contextmanager
    def frozen(self, victim: Actor) -> Iterator[None]:
        self.strike(victim)
        victim.send(signal.SIGSTOP)
        try:
            yield
        finally:
            victim.send(signal.SIGCONT)

    def strike(self, victim: Actor) -> None:
        self.ledger.tell("struck", victim.who)
        self.ledger.wait(lambda: victim.who in self.ledger.struck, PATIENCE_S)

    def progress(self, kind: str, number: int, timeout_s: float = PATIENCE_S) -> bool:
        """Wait for ``number`` more steps of a kind."""
        target = self.ledger.counts[kind] + number
        return self.ledger.wait(lambda: self.ledger.counts[kind] >= target, timeout_s)

    def expect(self, kind: str, number: int) -> None:
        """The same, for as long as anything moves; it is a complaint if they do not come, and could.

        They can't when all publishers have ended and all of their messages have.
        """
        target = self.ledger.counts[kind] + number

        def come() -> bool:
            return self.ledger.counts[kind] >= target or (not self.alive("publisher") and self.ledger.is_done())

        if not self.ledger.wait_while_moving(come, PATIENCE_S):
            self.complaints.append(f"{kind}: {target - self.ledger.counts[kind]} are missing, and nothing moves")

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> Verdict:
        """Wait until each confirmed message has ended, end all processes, and look into the store."""
        for each in self.actors:
            if each.role == "publisher":
                self._wait_for(each)
        self.ledger.wait_while_moving(self.ledger.is_done, self.patience_s)
        for each in self.actors:
            if each.who not in self.ledger.struck and not each.is_alive and each.process.returncode:
                self.complaints.append(each.obituary())
        endings = [each.end() for each in self.actors if each.is_alive]
        self.complaints += filter(None, endings)
        found = [*self.look(), *self.elsewhere()]
        return self.ledger.close_books(
            self.storm, self.url.partition(":")[0], self.seed, self.started, found, self.complaints
        )

    def _wait_for(self, publisher: Actor) -> None:
        before = -1
        while publisher.is_alive and before != self.ledger.counts.total():
            before = self.ledger.counts.total()
            with suppress(subprocess.TimeoutExpired):
                publisher.process.wait(PATIENCE_S)
        if publisher.is_alive:
            self.complaints.append(f"{publisher.who} did not end")
            publisher.kill()

    def look(self) -> list[str]:
        """Names of the messages in the store, whose counters are checked on the way."""
        with Broker.open(self.url, connect_timeout=PATIENCE_S, operation_timeout=PATIENCE_S) as broker:
            for check in (check_counts, messages):
                try:
                    check(broker._engine)
                except AssertionError as error:
                    self.complaints.append(str(error))
            return [name for name in self.ledger.confirmed for _ in broker.find(name)]

    def clear(self) -> None:
        for each in self.actors:
            each.kill()


@contextmanager
def staged(
    storm: str,
    seed: int,
    *,
    store: str = "sqlite",
    acks: str = "late",
    processes: int = 1,
    place: Path | None = None,
) -> Iterator[Stage]:
    """An empty store (``sqlite``, in the folder ``place``, or ``fdb`` of so many processes), and a ledger."""
    reason = fdb_unavailable_reason() if store == "fdb" else None
    if reason:
        raise Skipped(reason)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        cluster = stack.enter_context(Cluster(processes=processes)) if store == "fdb" else None
        url = f"fdb+sqlite:///{place or directory}/broker.db" if cluster is None else f"fdb:///{cluster.cluster_file}"
        stack.callback(close_clients)
        ledger = stack.enter_context(Ledger(directory))
        stage = Stage(storm, url, directory, Random(seed), seed, ledger, cluster, acks)
        stack.callback(stage.clear)
        yield stage
