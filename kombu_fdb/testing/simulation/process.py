"""The machinery around an engine in a simulated process: its clock, its link to the store, chance and faults.

A *frame* is one step under way. Frames lie on a stack: while a step commits, others may be carried out whole. Chance,
faults and the question whose commit this is are always those of the frame on top.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.queue.engine import Engine
from kombu_fdb.queue.keeper import Duties
from kombu_fdb.store.protocol import Watch
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.faults import Fault, Faults
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.memory_transaction import MemoryTransaction
from kombu_fdb.testing.simulation.plan import Step

__all__ = ["Dice", "Frame", "Killed", "Link", "Process", "ProcessClock", "StepFaults", "Violation"]


class Violation(AssertionError):
    """A guarantee does not hold. ``guarantee`` is its tag."""

    def __init__(self, guarantee: str, text: str) -> None:
        super().__init__(f"{guarantee}: {text}")
        self.guarantee = guarantee


class Killed(BaseException):
    """The process of this step is no more; not an ``Exception``, so that nobody in it handles it."""


@dataclass(eq=False, slots=True)
class Frame:
    """A step under way. ``verb`` is what it is doing right now: it decides which changes are its right."""

    step: Step
    process: Process | None
    rng: random.Random
    verb: str
    #: Whether what it hands back counts as delivered.
    counted: bool = True
    begins: int = 0
    reads: int = 0
    commits: int = 0
    #: The latest its process's wall clock showed in this step: what was due then may be handed out.
    latest_ms: int = 0
    #: What that clock showed when a publication with a dedup id was begun.
    began_ms: int = 0

    @property
    def actor(self) -> Process:
        """Whose step it is."""
        assert self.process is not None
        return self.process

    def trouble(self, point: str, number: int) -> tuple[bool, Fault | None]:
        """Whether something is to go wrong here, and what; (True, None) is death."""
        for trouble in self.step.troubles:
            if trouble.point == point and trouble.number == number:
                return True, trouble.fault
        return False, None


class Dice(random.Random):
    """The chance of whoever is acting."""

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
        watches = (Fault.WATCH_LOST, Fault.WATCH_FOR_NOTHING)
        if not struck or fault in watches or (fault is Fault.CONFLICT and not can_conflict):
            return None
        return self._count(fault)

    def next_at_read(self) -> Fault | None:
        if self.outage is not None:
            return self.outage
        frame = self._frames[-1]
        frame.reads += 1
        struck, fault = frame.trouble("read", frame.reads - 1)
        return self._count(fault) if struck else None

    def loses_watch(self) -> bool:
        return self._watch_trouble(Fault.WATCH_LOST)

    def fires_for_nothing(self) -> bool:
        return self._watch_trouble(Fault.WATCH_FOR_NOTHING)

    def coin(self) -> bool:
        return self._frames[-1].rng.random() < 0.5

    def _watch_trouble(self, fault: Fault) -> bool:
        frame = self._frames[-1]
        struck = frame.trouble("commit", frame.commits - 1) == (True, fault)
        if struck:
            self._count(fault)
        return struck


class ProcessClock:
    """Durations are everybody's; what o'clock it is, each machine has its own opinion."""

    def __init__(self, shared: ManualClock, frames: list[Frame]) -> None:
        self._shared = shared
        self._frames = frames
        self.offset_ms = 0

    def wall_ms(self) -> int:
        now_ms = self._shared.wall_ms() + self.offset_ms
        frame = self._frames[-1]
        frame.latest_ms = max(frame.latest_ms, now_ms)
        return now_ms

    def monotonic(self) -> float:
        return self._shared.monotonic()

    def sleep(self, seconds: float) -> None:
        self._shared.sleep(seconds)


class Link:
    """A process's way to the store: can be cut, ends with its process, and tells whose each transaction is."""

    commit_may_be_unknown = True

    def __init__(self, database: MemoryDatabase, frames: list[Frame]) -> None:
        self._database = database
        self._frames = frames
        self.cut = False

    def begin(self, *, timeout_s: float, read_only: bool = False) -> MemoryTransaction:
        if timeout_s <= 0.001:
            raise Violation("BOUNDED", "an attempt was begun after the deadline of its call")
        frame = self._frames[-1]
        frame.begins += 1
        if frame.trouble("begin", frame.begins - 1)[0]:
            raise Killed
        if self.cut:
            raise StoreUnavailable("the link is cut")
        transaction = self._database.begin(timeout_s=timeout_s, read_only=read_only)
        transaction.author = frame
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
    session: bytes
    duties: Duties
    held: dict[Lease, Delivery] = field(default_factory=dict)
    last_beat: float = 0.0
    asleep_until: float = 0.0
    cut_until: float = 0.0
    #: A claim of unknown outcome: recover before the next.
    in_doubt: bool = False
    #: Which of its threads are in a step.
    busy: set[str] = field(default_factory=set)
    watches: list[Watch] = field(default_factory=list)
    woken: bool = True
    waits_until: float = 0.0
    #: Every session it ever had.
    sessions: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sessions.add(self.session)

    def wake(self) -> None:
        self.woken = True

    def stop_waiting(self) -> None:
        for watch in self.watches:
            watch.cancel()
        self.watches, self.woken = [], True
