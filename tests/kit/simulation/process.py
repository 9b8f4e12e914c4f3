"""The machinery around an engine in a simulated process: its clock, its link to the store, chance and faults.

A *frame* is one step under way. Frames lie on a stack: while a step commits, others may be carried out whole. Chance,
faults and the question whose commit this is are always those of the frame on top.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kit.faults import LATEST_LANDING_S, Fault, Faults, FaultyDatabase, FaultyTransaction, Interrupted
from kit.simulation.acts.upkeep import SimulatedDuties
from kit.simulation.connection import SimulatedTransport
from kit.simulation.plan import Step
from kit.simulation.violation import Violation
from kombu_fdb.engine.facade.engine import Engine, Sessions
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import Delivery, Lease, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store.protocol import Watch
from kombu_fdb.testing.clock import ManualClock

# What goes wrong is in the plan, and is no news.
logging.getLogger(ClientSession.__module__).addHandler(logging.NullHandler())


class Killed(BaseException):
    """The process of this step is no more; not an ``Exception``, so that no handler in it catches it."""


@dataclass(eq=False, slots=True)
class Frame:
    """A step under way. ``verb`` is what it is doing right now: it decides which changes are its right."""

    step: Step
    process: Process | None
    rng: random.Random
    verb: str
    #: Whether what it releases counts as delivered.
    counted: bool = True
    #: Whether what it claims is gone with that.
    no_ack: bool = False
    begins: int = 0
    reads: int = 0
    commits: int = 0
    #: Writing commits of which it has heard that they happened.
    answered: int = 0
    #: Begins, reads, commits and answers.
    operations: int = 0
    #: Leases that it has settled before it closes: none of these may come back.
    settled: frozenset[Lease] = frozenset()
    #: The earliest and the latest its process's wall clock showed in this step: what was due then may be handed out.
    earliest_ms: int = 2**63
    latest_ms: int = 0
    #: Its verb stays: nothing else is done in it.
    is_verb: bool = False
    #: What that clock showed when a publication with a dedup id was begun.
    began_ms: int = 0

    @property
    def actor(self) -> Process:
        """Whose step it is."""
        assert self.process is not None
        return self.process

    def operate(self) -> Fault | None:
        """The next operation of the store, and what goes wrong with it. Raises ``Killed``."""
        self.operations += 1
        struck, fault = self.trouble("operation", self.operations - 1)
        if struck and fault is None:
            raise Killed
        return fault

    def trouble(self, point: str, number: int) -> tuple[bool, Fault | None]:
        """Whether something is to go wrong here, and what; (True, None) is death."""
        for trouble in self.step.troubles:
            if trouble.point == point and trouble.number == number:
                return True, trouble.fault
        return False, None


class Dice(random.Random):
    """The chance of the process that is acting."""

    def __init__(self, frames: list[Frame]) -> None:
        self._frames: list[Frame] = frames
        super().__init__(0)

    def random(self) -> float:
        return self._frames[-1].rng.random()

    def getrandbits(self, k: int, /) -> int:
        return self._frames[-1].rng.getrandbits(k)


class StepFaults(Faults):
    """What goes wrong is written in the steps; in an outage, everything."""

    def __init__(self, frames: list[Frame]) -> None:
        super().__init__()
        self._frames = frames
        self.outage: Fault | None = None

    def next_at_commit(self, *, can_conflict: bool) -> Fault | None:
        if self.outage is not None:
            return self.outage
        frame = self._frames[-1]
        struck, fault = frame.trouble("commit", frame.commits - 1)
        if not struck:
            struck, fault = frame.trouble("operation", frame.operations - 1)
        watches = (Fault.WATCH_LOST, Fault.WATCH_FOR_NOTHING)
        if not struck or fault in watches or (fault is Fault.CONFLICT and not can_conflict):
            return None
        return self._count(fault)

    def next_at_read(self) -> Fault | None:
        if self.outage is not None:
            return self.outage
        frame = self._frames[-1]
        frame.reads += 1
        at_once = frame.operate()
        struck, fault = frame.trouble("read", frame.reads - 1)
        return self._count(fault if struck else at_once)

    def loses_watch(self) -> bool:
        return self._watch_trouble(Fault.WATCH_LOST)

    def fires_for_nothing(self) -> bool:
        return self._watch_trouble(Fault.WATCH_FOR_NOTHING)

    def landing(self) -> tuple[float, bool] | None:
        rng = self._frames[-1].rng
        lateness_s = rng.choice([None, 0.0, rng.uniform(0.0, LATEST_LANDING_S)])
        return None if lateness_s is None else (lateness_s, rng.random() < 0.5)

    def _watch_trouble(self, fault: Fault) -> bool:
        frame = self._frames[-1]
        struck = frame.trouble("commit", frame.commits - 1) == (True, fault)
        if struck:
            self._count(fault)
        return struck


class ProcessClock(Clock):
    """Durations are everybody's; what o'clock it is, each machine has its own opinion."""

    def __init__(self, shared: ManualClock, frames: list[Frame]) -> None:
        self._shared = shared
        self._frames = frames
        self.offset_ms = 0

    def wall_ms(self) -> int:
        now_ms = self._shared.wall_ms() + self.offset_ms
        frame = self._frames[-1]
        frame.latest_ms = max(frame.latest_ms, now_ms)
        frame.earliest_ms = min(frame.earliest_ms, now_ms)
        return now_ms

    def monotonic(self) -> float:
        return self._shared.monotonic()

    def sleep(self, seconds: float) -> None:
        self._shared.sleep(seconds)


class SimulatedSessions(Sessions):
    """The real ones, that say when they recover, or end a session, in the middle of another verb."""

    def __init__(self, engine: Engine, frames: list[Frame]) -> None:
        super().__init__(engine.transactions, engine.queues)
        self.frames = frames

    def recover(self, session_id: SessionId, first: int) -> int:
        with self._as("recover"):
            return super().recover(session_id, first)

    def close(self, session_id: SessionId) -> int:
        with self._as("close"):
            return super().close(session_id)

    @contextmanager
    def _as(self, verb: str) -> Iterator[None]:
        frame = self.frames[-1]
        before, frame.verb = frame.verb, verb
        try:
            yield
        finally:
            frame.verb = before


class Link:
    """A process's way to the store: can be cut, ends with its process, and tells whose each transaction is."""

    commit_may_be_unknown = True
    writers_take_turns = False

    def __init__(self, database: FaultyDatabase, frames: list[Frame]) -> None:
        self._database = database
        self._frames = frames
        self.cut = False

    def begin(self, *, timeout_s: float, read_only: bool = False) -> FaultyTransaction:
        if timeout_s <= 0.001:
            raise Violation("BOUNDED", "an attempt was begun after the deadline of its call")
        frame = self._frames[-1]
        frame.begins += 1
        frame.operate()
        struck, fault = frame.trouble("begin", frame.begins - 1)
        if struck:
            raise Killed if fault is None else Interrupted
        if self.cut:
            raise StoreUnavailable("the link is cut")
        transaction = self._database.begin(timeout_s=timeout_s, read_only=read_only)
        # As it is now: the commit may land when the frame does something else.
        transaction.author = frame if frame.is_verb or frame.verb == frame.step.action else replace(frame)
        return transaction

    def close(self) -> None:
        """The database is everybody's."""


@dataclass(eq=False)
class Process:
    """A worker process: an engine, a session, its duties, and what it believes to hold."""

    name: str
    engine: Engine
    link: Link
    clock: ProcessClock
    client_session: ClientSession
    duties: SimulatedDuties
    held: dict[Lease, Delivery] = field(default_factory=dict)
    last_beat: float = 0.0
    asleep_until: float = 0.0
    cut_until: float = 0.0
    #: What it settled without hearing that it was done: acks, and others that it no longer works on.
    unsettled: list[tuple[str, list[Lease]]] = field(default_factory=list)
    #: What its worker could not reject: another thread does it, so it does not come back while the process lives.
    rejected: set[Lease] = field(default_factory=set)
    #: Which of its threads are in a step.
    busy: set[str] = field(default_factory=set)
    watches: list[Watch] = field(default_factory=list)
    woken: bool = True
    #: In how many seconds its duties want to be called again.
    pause_s: float = 0.0
    waits_until: float = 0.0
    #: Through which its messages come, if they do not come from the engine straight.
    connection: SimulatedTransport | None = None
    #: The deferred calls of its client, then.
    deferred: Callable[[], None] | None = None
    #: Every session it ever had.
    sessions: set[SessionId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sessions.add(self.session)

    @property
    def session(self) -> SessionId:
        return self.client_session.session_id

    def begin(self, client_session: ClientSession, duties: Callable[..., SimulatedDuties], now_s: float) -> None:
        """Another session."""
        self.client_session = client_session
        self.sessions.add(self.session)
        self.duties = duties(self.engine, self.clock, self.session)
        self.last_beat = now_s

    def wake(self) -> None:
        self.woken = True

    def stop_waiting(self) -> None:
        for watch in self.watches:
            watch.cancel()
        self.watches, self.woken = [], True
        if self.connection is not None:
            self.connection.end()
