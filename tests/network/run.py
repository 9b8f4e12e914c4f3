"""One run: a recorded workload in a box, faults from a seed, and the verdict of the history.

A role is one process on a client of its own; when it starts again, its name counts on, as its session is another one.
After the last fault the producers end, the others work off what is left, and everything ends; then a scan of the store
completes the history. The seed decides which faults come, when, and upon whom; processes and packets are real, so that
it makes a failure likely again and not certain.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import count, permutations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kit.history.events import read
from kit.history.record import Recorder
from kit.history.report import Line, judge

from celery_fdb.contrib.outbox import DDL, INDEX_DDL

from .box import ZONES, Box, Client
from .faults import FAULTS
from .release import ROOT, release_unavailable_reason, unpack
from .switch import Link

OPTIONS = {
    "session_ttl": 10.0,
    "sweep_interval": 1.0,
    "publish_timeout": 10.0,
    "operation_timeout": 5.0,
    "connect_timeout": 5.0,
}
#: How long a worker, a relay or a beat may take to end.
STOP_S = 15.0
PATIENCE_S = 180.0
#: Role, zone; in the order in which docs/how-to/upgrade.md upgrades.
ROLES = {
    "web1": "a",
    "prefork": "a",
    "other": "b",
    "taker1": "b",
    "taker2": "c",
    "relay": "a",
    "beat1": "a",
    "beat2": "c",
    "producer1": "a",
    "producer2": "c",
}
#: They only publish, and end before the others.
PUBLISHERS = ("beat", "producer")
CONSUMERS = ("prefork", "other", "taker")
#: How often, and how much of what a process wrote last, is read to see whether it holds a message.
LOOKS, LOOK_S, LATELY_BYTES = 1000, 0.005, 1 << 15
#: What a program, a worker, a relay, a dashboard or a beat says when it has. (Celery's beat says that it starts before
#: it can be told to end: the handler of the signal makes the scheduler that it is making.)
BEGUN = ("begun", " ready.", "relay started", "serving http", "Scheduler: Sending")
POOLS = ("threads", "solo", "gevent")
CLOCKS, CLOCKS_SHARE = "clocks off", 0.3
UPGRADE, UPGRADE_SHARE = "upgrade", 0.5
#: Below 100 MB of free disk the cluster slows its clients down; a server writes some 100 MB a minute here.
DISK_MB = 2048
MOST_AT_ONCE = 2
#: Between two zones, there and back: one of these for a run. A fifth of it is jitter, and of 1,000 packets one is lost.
DISTANCES_MS, JITTER, LOSS = (0.0, 0.5, 2.0, 5.0), 0.2, 0.001
QUIET_S = (2.0, 5.0)


@dataclass(eq=False)
class Actor:
    """A process of the run."""

    role: str
    who: str
    client: Client
    process: subprocess.Popen[Any]
    log: Path

    def send(self, signal_number: int) -> None:
        """To it and its children. To enter its machine for that takes longer than a taker holds a message."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal_number)


class Result(NamedTuple):
    """``faults``: how often each was begun; ``complaints``: what the history can't tell."""

    seed: int
    faults: Counter[str]
    events: int
    lines: list[Line]
    complaints: list[str]

    @property
    def is_good(self) -> bool:
        return not self.complaints and not any(each.violations for each in self.lines)


class Run:
    """See the module."""

    def __init__(self, box: Box, folder: Path, seed: int, names: Sequence[str]) -> None:
        self.box, self.folder, self.seed, self.rng = box, folder, seed, Random(seed)
        self._names = self._compatible(names)
        self.ttl_s = OPTIONS["session_ttl"]
        self.recorder = Recorder(folder, "runner")
        self.actors: list[Actor] = []
        self.complaints: list[str] = []
        #: How often each was begun.
        self.faults = Counter[str]()
        self._numbers = count(1)
        self._generations = Counter[str]()
        self._pool = self.rng.choice(POOLS)
        #: The release with which all begin, until they are upgraded; it has no dashboard.
        self.released = unpack(folder) if UPGRADE in self._names else None
        self._observer = box.client("observer")
        self._clients = {
            role: box.machines.get(name := _machine(role)) or box.client(name, zone) for role, zone in ROLES.items()
        }
        self._move_zones_apart(Random(f"{seed} distance").choice(DISTANCES_MS))

    def _move_zones_apart(self, round_trip_ms: float) -> None:
        if round_trip_ms:
            delay_s = round_trip_ms / 2000
            for one, other in permutations(ZONES, 2):
                self.box.link(one, other, Link(delay_s * (1 - JITTER), delay_s * JITTER, LOSS))
            self.faults[f"zones {round_trip_ms:g} ms apart"] = 1

    @property
    def struck_ones(self) -> list[Client]:
        """Clients that a fault may choose."""
        return list(dict.fromkeys(self._clients.values()))

    @property
    def consumers(self) -> list[Client]:
        return [client for role, client in self._clients.items() if role.startswith(CONSUMERS)]

    def _compatible(self, names: Sequence[str]) -> list[str]:
        """A run has clocks that jump, or pauses; and it begins with a release or with this version.

        libfaketime lets a sleep fail whose end is over when it begins, as after a pause.
        """
        if release_unavailable_reason() or (len(names) > 1 and self.rng.random() > UPGRADE_SHARE):
            names = [each for each in names if each != UPGRADE]
        pauses = {each for each in names if each.startswith("pause")}
        if CLOCKS not in names or not pauses:
            return list(names)
        left_out = pauses if self.rng.random() < CLOCKS_SHARE else {CLOCKS}
        return [each for each in names if each not in left_out]

    # -- processes -----------------------------------------------------------------------------------------------------

    def _env(self, who: str, code: Path = ROOT) -> dict[str, str]:
        faked = [str(Path(__file__).with_name("faked"))] if CLOCKS in self._names else []
        return {
            **os.environ,
            "RUN_BROKER": f"fdb:///{self.box.cluster_file}",
            "RUN_OPTIONS": json.dumps(OPTIONS),
            "RUN_HISTORY": str(self.folder),
            "RUN_WHO": who,
            "RUN_DATABASE": str(self.folder / "shop.db"),
            "PYTHONPATH": os.pathsep.join([*faked, str(code), str(ROOT), str(ROOT / "tests")]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }

    def start(self, role: str) -> Actor:
        self._generations[role] += 1
        who = f"{role}.{self._generations[role]}"
        pool = {"prefork": "prefork", "other": self._pool}.get(role, "")
        command = _command(role, who, pool, f"{self.seed} {who}")
        log = self.folder / f"{who}.log"
        code = ROOT if self.released is None or role.startswith("web") else self.released
        client = self._clients[role]
        with log.open("w") as output:
            process = client.popen(
                [sys.executable, *command],
                self._env(who, code),
                clock=0 if CLOCKS in self._names else None,
                cwd=code,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        actor = Actor(role, who, client, process, log)
        self.actors.append(actor)
        return actor

    def stop(self, actor: Actor) -> None:
        """Tell it to end, and wait; a process that has not begun yet is waited for."""
        begun = _await(actor)
        if not begun:
            self.complaints.append(f"{actor.who} did not begin: {_last(actor.log)}")

        def end() -> None:
            with suppress(ProcessLookupError):
                actor.process.terminate()
            actor.process.wait(PATIENCE_S)

        # A program of ours ends when the calls of its threads have, each of which has a deadline.
        deadline = None if actor.role.startswith(("taker", "producer")) else STOP_S
        doubts = (subprocess.TimeoutExpired,)
        answer = self.recorder.call("stop", end, doubts=doubts, target=actor.who, deadline=deadline)
        if answer.kind != "ok":
            self._kill(actor, signal.SIGABRT)  # its log tells where its threads were
        elif actor.process.returncode:
            self.complaints.append(f"{actor.who} ended with {actor.process.returncode}: {_last(actor.log)}")
        self.actors.remove(actor)

    def kill(self, client: Client) -> None:
        for each in self.on(client):
            self._kill(each)
            self.actors.remove(each)

    def on(self, client: Client) -> list[Actor]:
        return [each for each in self.actors if each.client is client]

    def await_hold(self, client: Client) -> None:
        """Until one of its processes holds a message, if one does soon."""
        for _ in range(LOOKS):
            if any(read(self.folder, each.who, LATELY_BYTES).open for each in self.on(client)):
                return
            _pause(LOOK_S)

    def _kill(self, actor: Actor, signal_number: int = signal.SIGKILL) -> None:
        actor.send(signal_number)
        actor.process.wait(PATIENCE_S)

    def observe(self, act: str) -> None:
        command = [sys.executable, "-m", "tests.network.observer", act]
        try:
            if said := self._observer.run(command, 3 * PATIENCE_S, env=self._env(f"observer-{act}"), cwd=ROOT).strip():
                self.complaints.append(said)
        except RuntimeError as error:
            self.complaints += [str(error), json.dumps(self.box.status()["cluster"].get("messages"))]

    # -- the run -------------------------------------------------------------------------------------------------------

    def play(self, seconds: float) -> None:
        over = threading.Event()
        pulse = threading.Thread(target=self.recorder.pulse, args=[over])
        pulse.start()
        try:
            self._prepare_outbox()
            self.observe("declare")
            for role in ROLES:
                self.start(role)
            for each in self.actors:
                _await(each)
            self._strike(seconds)
            for each in list(self.actors):
                if each.role.startswith(PUBLISHERS):
                    self.stop(each)
            self.observe("drain")
            for each in list(self.actors):
                if each.process.poll() is not None:
                    self.complaints.append(f"{each.who} ended with {each.process.returncode}: {_last(each.log)}")
                self.stop(each)
            self.observe("look")
        finally:
            over.set()
            pulse.join()

    def _prepare_outbox(self) -> None:
        with closing(sqlite3.connect(self.folder / "shop.db")) as database:
            for statement in (DDL, INDEX_DDL):
                database.execute(statement)
            database.commit()

    def _strike(self, seconds: float) -> None:
        """One fault after the other, each kind as often; sometimes two at once, each healed at its own time.

        An upgrade is the first: what the release does under the others is not the question.
        """
        end_s, bag = time.monotonic() + seconds, [UPGRADE] * (self.released is not None)
        while time.monotonic() < end_s:
            _pause(self.rng.uniform(*QUIET_S))
            with ThreadPoolExecutor() as pool:
                healed = []
                for _ in range(self.rng.randint(1, MOST_AT_ONCE)):
                    bag = bag or self.rng.sample(self._names, len(self._names))
                    lasts_s, stack = self._begin(bag.pop())
                    healed.append(pool.submit(_heal, lasts_s, stack))
                    _pause(self.rng.uniform(0, lasts_s))
            for each in healed:
                each.result()
            self.box.heal()  # of the servers that ended meanwhile, too, as fdbmonitor does

    def _begin(self, name: str) -> tuple[float, ExitStack]:
        """For how long it lasts, and what heals it."""
        fault, stack = f"{name} {next(self._numbers)}", ExitStack()
        strike = FAULTS[name](self, self.rng)
        struck = [each.who for each in self.actors if each.client in strike.struck]
        self.recorder.note("fault", fault=fault, name=name, struck=struck)
        stack.callback(self.recorder.note, "healed", fault=fault)
        try:
            stack.enter_context(strike.hold)
        except RuntimeError:  # it can't be: a coordinator that was chosen can't be reached, all have been upgraded
            return 0.0, stack
        self.faults[name] += 1
        return strike.lasts_s, stack


def play(seed: int, seconds: float, folder: Path, names: Sequence[str] | None = None) -> Result:
    """Play one, and judge it. What its processes wrote and said stays in ``folder``."""
    folder = folder.absolute()
    if folder.exists():
        shutil.rmtree(folder)  # an earlier run's history would be taken for a part of this one
    folder.mkdir(parents=True)
    with Box(disk_mb=DISK_MB, longest_s=seconds + 900) as box:
        run = Run(box, folder, seed, names or list(FAULTS))
        try:
            run.play(seconds)
        finally:
            history = read(folder)
    return Result(seed, run.faults, len(history.events), judge(history), run.complaints)


def _machine(role: str) -> str:
    """Its publishers and its dashboard are a shop's."""
    return f"shop{role[-1]}" if role.startswith((*PUBLISHERS, "web")) else role


def _command(role: str, who: str, pool: str, seed: str) -> list[str]:
    if role.startswith("producer"):
        return ["-m", "tests.network.producer", seed]
    if role == "relay":
        outbox = ["-m", "celery_fdb.contrib.outbox", "-A", "tests.network.app"]
        return [*outbox, "--connect", "tests.network.app:connect", "--interval", "0.2"]
    if role.startswith("taker"):
        return ["-m", "tests.network.taker"]
    celery = ["-m", "kit.celery_program", "-A", "tests.network.app"]
    if role.startswith("web"):
        return [*celery, "fdb", "web"]
    if role.startswith("beat"):
        return [*celery, "beat", "-S", "tests.network.ticks:Ticks", "-l", "INFO"]
    options = ["-P", pool, "-c", "2", "-n", f"{who}@run", "--without-mingle", "--without-gossip", "-l", "INFO"]
    return [*celery, "worker", "-Q", "tasks,keyed", *options]


def _await(actor: Actor) -> bool:
    """Whether it has begun."""
    end_s = time.monotonic() + PATIENCE_S
    while not any(each in _read(actor.log) for each in BEGUN):
        if time.monotonic() > end_s or actor.process.poll() is not None:
            return False
        _pause(0.05)
    return True


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _heal(lasts_s: float, stack: ExitStack) -> None:
    with stack:
        _pause(lasts_s)


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


def _last(log: Path) -> str:
    return " | ".join(_read(log).strip().splitlines()[-4:])
