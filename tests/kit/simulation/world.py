"""A run: the store, the processes on it, and the steps of a plan carried out one inside the other.

One thread. A step is what one thread of one process does in one go: it calls the engine, whose transactions come here
through the process's link. Just before one of its commits the steps that the plan has ``meanwhile`` are carried out
whole, so calls interleave exactly where FoundationDB lets them: between a transaction's reads and its commit. A
process that is killed stops at the point where it is; another takes its slot, as a supervisor would see to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from kit.faults import FaultyDatabase, Interrupted
from kit.simulation.acts.upkeep import SimulatedDuties
from kit.simulation.connection import Flag, SimulatedTransport
from kit.simulation.ledgers.clocks import ClockLedger, Skew
from kit.simulation.ledgers.ledger import Ledger
from kit.simulation.plan import Profile, Step
from kit.simulation.process import (
    Dice,
    Frame,
    Killed,
    Link,
    Process,
    ProcessClock,
    SimulatedSessions,
    StepFaults,
)
from kit.simulation.verbs import ConnectedMessages
from kit.simulation.violation import Violation
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.work import Environment
from kombu_fdb.errors import FormatError, KombuFDBError
from kombu_fdb.model import SessionId
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.settings.options import Options
from kombu_fdb.testing.clock import ManualClock

SESSION_TTL_S = 30.0
SWEEP_INTERVAL_S = 5.0
BEAT_INTERVAL_S = 5.0
CALL_TIMEOUT_S = 20.0
DEAD_LENGTH = 3
OPTIONS = Options(session_ttl=SESSION_TTL_S, sweep_interval=SWEEP_INTERVAL_S, operation_timeout=CALL_TIMEOUT_S)
#: Where the queues with a dead-letter exchange send their dead letters: to both of these.
GRAVES = ("graves", "cellar")

Action = Callable[["World", Frame], None]


class World:
    """Everything there is in one run. ``trace``: keep a history in words."""

    def __init__(
        self,
        profile: Profile,
        actions: dict[str, tuple[str, Action]],
        connect: Callable[[World, Process], SimulatedTransport] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        self.profile = profile
        self.trace = trace
        self.history: list[str] = []
        self.frames: list[Frame] = []
        self.clock = ManualClock()
        self.faults = StepFaults(self.frames)
        self.database = FaultyDatabase(clock=self.clock, rng=Dice(self.frames), faults=self.faults)
        self.processes: dict[int, Process] = {}
        self.ledger = Ledger(
            "sim", profile.queues, profile.delivery_limit, GRAVES, session_ttl_s=SESSION_TTL_S, exact=profile.exact
        )
        self.skew = Skew()
        self.clocks = ClockLedger(self.ledger.turns, self.skew)
        #: Seconds of outages that no observer may count.
        self.hidden_s = 0.0
        self._actions = actions
        self._connect = connect
        self._started = 0
        self.database.before_commit = self._before_commit
        self.database.after_commit = self._after_commit
        self.database.after_answer = self._after_answer
        self._set_up()

    def _set_up(self) -> None:
        with self.acting(Step("setup", "setup", 0, 1)):
            engine = self._engine("setup", ProcessClock(self.clock, self.frames))[0]
            engine.queues.declare_exchange(Exchange("dlx", "fanout"))
            for name in self.profile.queues:
                engine.queues.declare(self.declaration(name))
                if name in GRAVES:
                    engine.queues.bind(name, "dlx", "")

    def declaration(self, queue: str) -> QueueDeclaration:
        return QueueDeclaration(queue, arguments=dict(self.profile.queues[queue]))

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self, plan: Sequence[Step]) -> None:
        """Raises ``Violation``."""
        for step in plan:
            self.perform(step)

    def perform(self, step: Step) -> None:
        """Carry a step out, unless its process can't act now."""
        thread, action = self._actions[step.action]
        process = self._process(step.slot) if thread else None
        if process is not None and not self._can_act(process, thread):
            return
        with self.acting(step, process, thread) as frame:
            action(self, frame)

    def perform_as(self, slot: int, action: str) -> None:
        """A step that no plan has, and in which nothing goes wrong."""
        self.perform(Step(f"{action} of {slot}", action, slot, self._started))

    def acting(self, step: Step, process: Process | None = None, thread: str = "") -> Acting:
        """Put a frame on the stack; an error of the engine ends it."""
        return Acting(self, step, process, thread)

    def note(self, text: str) -> None:
        if self.trace:
            self.history.append(f"{self.clock.monotonic() - 1000:8.2f}  {'    ' * (len(self.frames) - 1)}{text}")

    def _process(self, slot: int) -> Process:
        if slot not in self.processes:
            self.start(slot)
        return self.processes[slot]

    def _can_act(self, process: Process, thread: str) -> bool:
        now = self.clock.monotonic()
        if process.cut_until <= now:
            process.link.cut = False
        return process.asleep_until <= now and thread not in process.busy

    def _before_commit(self) -> None:
        frame = self.frames[-1]
        frame.commits += 1
        if frame.commits - 1 == frame.step.at and frame.step.stopped != "after":
            self._let_others_act(frame)
        frame.operate()
        if frame.trouble("commit", frame.commits - 1) == (True, None):
            raise Killed

    def _after_answer(self) -> None:
        frame = self.frames[-1]
        frame.answered += 1
        frame.operate()
        if frame.commits - 1 == frame.step.at and frame.step.stopped == "after":
            self._let_others_act(frame)

    def _let_others_act(self, frame: Frame) -> None:
        """What the plan has meanwhile; for a process that is stopped, with all its threads, there may be much time."""
        if frame.step.stopped and frame.process is not None:
            self._stop(frame, frame.process)
        else:
            for step in frame.step.meanwhile:
                self.perform(step)
        if frame.process is not None and frame.process not in self.processes.values():
            raise Killed  # meanwhile

    def _stop(self, frame: Frame, process: Process) -> None:
        """SIGSTOP, and SIGCONT when the others have done what they do. Who is first to go on is chance."""
        self.note(f"{process.name} is stopped {frame.step.stopped} a commit")
        process.asleep_until = math.inf
        before, after = frame.rng.choice([(0, 0), (0, 1), (8, 1), (1, 8), (9, 0)])
        self._pass_stopped(before)
        for step in frame.step.meanwhile:
            self.perform(step)
        self._pass_stopped(after)
        if process in self.processes.values():
            process.asleep_until = 0.0
            self.note(f"{process.name} goes on")
            for first in frame.rng.sample(["beat", "duties"], frame.rng.randrange(3)):
                self._perform_again(process, first)

    def _pass_stopped(self, ticks: int) -> None:
        for _ in range(ticks):
            self.pass_time(BEAT_INTERVAL_S)
            for slot in sorted(self.processes):
                self.perform_as(slot, "duties")

    def _perform_again(self, process: Process, action: str) -> None:
        for slot, each in list(self.processes.items()):
            if each is process:
                self.perform_as(slot, action)

    def _after_commit(self, transaction: object, changes: list[tuple[bytes, bytes | None, bytes | None]]) -> None:
        author = getattr(transaction, "author", None)
        now_s = self.clock.monotonic()
        self.ledger.note(author, changes, now_s - self.hidden_s)
        born_s = getattr(transaction, "born_s", None)
        self.clocks.note(changes, now_s, took_s=0.0 if born_s is None else now_s - born_s)

    # -- processes and time ------------------------------------------------------------------------------------------

    def start(self, slot: int) -> Process:
        """A new process in this slot, without faults: it would only be started again."""
        self._started += 1
        name = f"{slot}{chr(96 + self._started) if self._started < 27 else self._started}"
        with self.acting(Step(name, "start", slot, self._started)):
            clock = ProcessClock(self.clock, self.frames)
            engine, link = self._engine(name, clock)
            client_session = self.open_client_session(engine)
            duties = self.duties(engine, clock, client_session.session_id)
            process = Process(name, engine, link, clock, client_session, duties, last_beat=self.clock.monotonic())
            self.processes[slot] = process
            self.note(f"process {name} starts")
            if self._connect is not None:
                process.connection = self._connect(self, process)
        return process

    def open_client_session(self, engine: Engine) -> ClientSession:
        """A session; what its threads would do are steps of the plan."""
        session = engine.sessions.open({}, ttl_s=SESSION_TTL_S)
        return ClientSession(engine, OPTIONS, session, Flag(), self.clock)

    def duties(self, engine: Engine, clock: ProcessClock, session: SessionId) -> SimulatedDuties:
        return SimulatedDuties(
            engine,
            clock,
            session,
            sweep_interval_s=SWEEP_INTERVAL_S,
            report=_no_aside,
            frames=self.frames,
            turn=self.profile.turn,
        )

    def _engine(self, name: str, clock: ProcessClock) -> tuple[Engine, Link]:
        ids = random.Random(name)
        link = Link(self.database, self.frames)
        engine = Engine(
            link,
            "sim",
            Environment(
                clock,
                lambda: ids.randbytes(16),
                Dice(self.frames),
                call_s=CALL_TIMEOUT_S,
                publish_s=CALL_TIMEOUT_S,
                delivery_limit=self.profile.delivery_limit,
                dead_length=DEAD_LENGTH,
            ),
        )
        engine.sessions = SimulatedSessions(engine, self.frames)
        if self._connect is not None:
            engine.messages = ConnectedMessages(engine, self.frames)
        return engine, link

    def kill(self, process: Process) -> None:
        """It is no more; its leases wait for the sweep."""
        self.note(f"process {process.name} is dead")
        self.processes = {slot: other for slot, other in self.processes.items() if other is not process}
        process.stop_waiting()

    def pass_time(self, seconds: float) -> None:
        """Let time pass. A live process beats in time whatever it does: its heartbeat has a thread of its own."""
        self.clock.advance(seconds)
        self.beat_all()

    def beat_all(self) -> None:
        now = self.clock.monotonic()
        for slot, process in sorted(self.processes.items()):
            if now - process.last_beat >= BEAT_INTERVAL_S:
                self.perform_as(slot, "beat")


def _no_aside(duty: str, subject: str, error: Exception | None) -> None:
    """Nothing here is a reason to set something aside, and nothing may be hidden by it."""
    if isinstance(error, Violation):
        raise error
    raise Violation("BOUNDED", f"{duty} of {subject!r} is set aside: {error!r}") from error


class Acting:
    """One frame on the stack, and what may come out of it."""

    def __init__(self, world: World, step: Step, process: Process | None, thread: str) -> None:
        self._world = world
        self._thread = thread
        self._frame = Frame(step, process, random.Random(step.seed), step.action)

    def __enter__(self) -> Frame:
        frame, process = self._frame, self._frame.process
        if process is not None:
            process.busy.add(self._thread)
        self._world.frames.append(frame)
        return frame

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        world, process = self._world, self._frame.process
        try:
            return self._judge(world, process, error)
        finally:
            world.frames.pop()
            if process is not None:
                process.busy.discard(self._thread)

    @staticmethod
    def _judge(world: World, process: Process | None, error: BaseException | None) -> bool:
        """Whether the error is one a caller of the engine has to live with."""
        if isinstance(error, Killed):
            if process is not None and process in world.processes.values():
                world.kill(process)
            return True
        if isinstance(error, FormatError):
            raise Violation("POISON-ENDS", f"malformed bytes reached the caller: {error}") from error
        if isinstance(error, (KombuFDBError, Interrupted)):
            world.note(f"-> {error!r}")
            return True
        if isinstance(error, Exception) and not isinstance(error, Violation):
            raise Violation("BOUNDED", f"the engine raised {error!r}") from error
        return False
