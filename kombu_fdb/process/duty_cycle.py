"""The duty cycle: heartbeats, the sweep of dead sessions, and the other duties, each in its turn.

Model. What a consumer process does besides consuming, as steps without threads. ``session_threads.py`` runs
:meth:`DutyCycle.beat` in one thread and :meth:`DutyCycle.serve` in another, so that a long sweep never delays a beat.
In a *beat* the session shows that it is alive, and reads what the duties need: its neighbours in the ring, the
promoter's record, and whether messages are kept for a newer version. So an idle process makes one transaction, not one
for the heartbeat and one for each duty. A session that was fenced is lost. A *turn* of the duties sets an alarm that
rings for each message delayed from then on, and recovers claims of unknown outcome. Then come one round of the duties
and the client's deferred calls. A step that fails has changed nothing that the next one depends on, so its thread
repeats it after a pause.

The duties (``duties.py``) are small objects that remember where they stopped. In a *round* each that is due gets a
:class:`~kombu_fdb.engine.parts.Budget` of :data:`TURN_S` and :data:`TURN_TRANSACTIONS`. A duty that has more to
do is due again in the next round, which follows at once. Promotion comes first, and again after each other duty that
had work, or when :data:`PROMOTION_S` have passed: ETAs and retries wait for one turn of one duty, not for all duties.
So each duty makes progress, however much work any other has. Duties that will be due within :data:`TOGETHER_S` share a
round, at the time of the last one, unless one of them is exact. So without work, there is one round a second.

Who does what. Every process sweeps its neighbours in the ring; if several try to end a dead session, they conflict, and
the first wins. Every process regains what older ones have kept for its version, as the promoter may be an older one.
One process does everything else. It holds the role ``promoter`` and renews its record every second round; another
process takes the role when it has seen the record unchanged for :data:`ROLE_TTL_S`, or when the holder has left it.
Processes that observe the holder in the ring look at the record each second, and so do those that have seen it
unchanged. All others read it with their beats, or every :data:`ROLE_TTL_S` if their beats are less frequent. Two
simultaneous holders are harmless: their transactions conflict.

The ring determines which session observes which, so that a dead one is found although not all observe all. Each process
observes the sessions that follow its own in the order of their random ids. It observes enough of them to see
:data:`LIVING` alive, and twice as many after each look that saw fewer. So :data:`LIVING` living sessions observe a dead
one, and a sweep of the whole fleet reads rows in proportion to the fleet, not to its square. BACK-SOON: a dead session
is ended within its time to live and one sweep, if fewer than :data:`LIVING` in a row died together. If only one of n
survives, that takes the time to live and ``log2(n / LIVING) + 2`` sweeps.

A process that can't beat, because one of its tasks lets nothing else run, is not dead. Guarantee: NOT-TWICE. The
heartbeat comes from a thread, and a task can block that thread indefinitely: C code that does not release the
interpreter, or, with eventlet, where the thread is a greenlet, any computation. But others can see that a process
computes: the kernel counts how long its threads run, or wait for a core. So an observer that is about to declare a
session dead looks at its process (``primitives/processes.py``). If that is on the same host, and has been busy for
:data:`SHARE` of the session's time to live since half of that time passed in silence, this counts as a beat. A process
that was killed, stopped or frozen, or that hangs without computing, gives no such sign, and is dead when its time is
over (BACK-SOON). A process that computes forever keeps its messages forever, like any task that does not end. On
SQLite, all processes that share a store are on one host, so each sees all others except those in other containers; on
FoundationDB, a process sees those on its own machine.

Reclaim: when a full disk has no room for a starting worker, rows of dead sessions are cleared. A worker that crashes
soon after its start leaves a session and declarations. Living workers sweep those, but if no worker can start, none
does. So a process whose write is refused looks at the sessions itself, each time, and ends the dead ones, by the rule
of all sweeps (``FailureDetector``). It remembers what it has seen while it reconnects; a process that gives up at once
can't judge.

A process that can't beat can't judge: a full disk that accepts no writes at all makes every session look silent. So
each of its looks includes a write like a beat's.

What happens at each failure:

* a step fails for a reason of its own (a row that can't be read, a message that fits into no transaction). The step is
  halved until that message is alone, and the message is set aside (``duties.py``): reported once, shown by the doctor,
  tried again later. The duty continues with the next message, session or queue, and the round with the next duty.
* the store does not answer, or a duty exceeds a deadline: the round ends with that error, and nothing has changed. The
  next round begins after that duty, so a duty that always takes too long never costs another its turn.
* the process dies: another one takes the role after :data:`ROLE_TTL_S`, and begins without memory. That is harmless: a
  duty only remembers where it stopped.

The observers count only successful looks, so an outage makes no session look dead.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from kombu_fdb.engine import parts
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.session import PROMOTER, Beat
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.processes import see
from kombu_fdb.process import duties
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.failure_detector import FailureDetector
from kombu_fdb.store.protocol import Watch

# -- is it computing? --------------------------------------------------------------------------------------------------


#: The part of the time to live for which a process must be busy, in its second half: a twentieth of that half. An idle
#: worker is busy for a tenth of that, a computing one all the time.
SHARE = 1 / 40


def spare_busy(
    engine: Engine, detector: FailureDetector[SessionId], before: Mapping[SessionId, float]
) -> dict[SessionId, float]:
    """Count silent sessions whose processes compute as alive. Call it after each look by the detector.

    Returns the next call's ``before``: for each session that has been silent for half its time, how long its process
    had been busy when that was noticed.
    """
    silent = dict(detector.half_silent())
    described = engine.sessions.describe(list(silent)) if silent else []
    noticed: dict[SessionId, float] = {}
    for (session_id, ttl_s), description in zip(silent.items(), described, strict=True):
        busy_s = _busy_s(description)
        if busy_s is None:
            continue
        began_s = before.get(session_id, busy_s)
        if busy_s - began_s >= ttl_s * SHARE:
            detector.note_alive(session_id)
        else:
            noticed[session_id] = began_s
    return noticed


def _busy_s(description: dict[str, object]) -> float | None:
    """How long the process has been busy; None if it is gone, or not on this host."""
    pid = description.get("pid")
    fingerprint, busy_s = see(pid) if isinstance(pid, int) and pid > 0 else ("", 0.0)
    return busy_s if fingerprint and fingerprint == description.get("process") else None


# -- the ring ----------------------------------------------------------------------------------------------------------


#: How many living sessions each process observes.
LIVING = 8
LEAST_PAUSE_S = 0.001


class Sweep(duties.Duty):
    """End dead sessions and release their messages. Guarantees BACK-SOON and NOT-TWICE.

    It uses the looks at the ring that the session's beats bring. It looks itself if none was brought for its interval,
    or when the time of a silent session is over.

    A process that can't beat can't judge: a store that answers reads but accepts no commits makes every session look
    silent.
    """

    def __init__(
        self, engine: Engine, clock: Clock, guard: duties.Guard, session_id: SessionId, interval_s: float
    ) -> None:
        self._guard = guard
        super().__init__("sweep", self._find_silent, self._end, self._next_look, everywhere=True)
        self._engine = engine
        self._clock = clock
        #: What the last beat has read, and when; another thread puts it here. Only the last: several looks at once
        #: could make a session silent without a look at its process in between.
        self.brought: deque[tuple[list[Beat], float]] = deque(maxlen=1)
        #: How many sessions to look at.
        self.window = LIVING
        self._session_id = session_id
        self._interval_s = interval_s
        self._detector: FailureDetector[SessionId] = FailureDetector()
        self._busy: dict[SessionId, float] = {}
        #: The last beats of the sessions to end, and where to continue with each.
        self._silent: dict[str, bytes] = {}
        self._cursors: dict[str, bytes] = {}
        self._looked_s = 0.0
        #: The sessions of the last look; None before the first one.
        self._observed: set[SessionId] | None = None
        #: How many messages have been released so far.
        self.released = 0

    def is_due(self, now: float) -> bool:
        """Also due as soon as a beat has brought a look."""
        return bool(self.brought) or super().is_due(now)

    def _find_silent(self) -> Collection[str]:
        self._look()
        silent = self._detector.silent()
        self._silent = {session_id.hex(): beat for session_id, beat in silent if session_id != self._session_id}
        self._cursors = {name: cursor for name, cursor in self._cursors.items() if name in self._silent}
        return self._silent

    def _next_look(self, is_spent: bool) -> float:
        # Rounding errors in sums of times are too small for a clock to advance by, hence the least pause.
        look_at = self._looked_s + min(self._interval_s, self._detector.next_silent_s())
        return 0.0 if is_spent else max(LEAST_PAUSE_S, look_at - self._clock.monotonic())

    def _look(self) -> None:
        if not self.brought:
            ring = self._engine.sessions.neighbours(self._session_id, self.window)
            self.brought.append((ring, self._clock.monotonic()))
        found, self._looked_s = self.brought.popleft()
        self._detector.look(found, self._looked_s)
        if self._session_id in dict(self._detector.half_silent()):
            self._detector.forget()
        self._busy = spare_busy(self._engine, self._detector, self._busy)
        others = [session_id for session_id, _, _ in found if session_id != self._session_id]
        self._observed = set(others)
        self.window = self._next_window(others)

    def observes(self, session_id: SessionId) -> bool:
        """Whether this process observes the session, by its last look."""
        return self._observed is None or session_id in self._observed

    def _next_window(self, others: list[SessionId]) -> int:
        """How many to look at next time, so that :data:`LIVING` of them are alive, as far as is known."""
        living = [number for number, each in enumerate(others, 1) if self._detector.is_alive(each)]
        if len(living) >= LIVING:
            return living[LIVING - 1]
        return max(LIVING, self.window if len(others) < self.window else self.window * 2)

    def _end(self, name: str) -> bool:
        """Do one step of ending a session. True if there is more to do."""
        session_id = SessionId(bytes.fromhex(name))
        cursor = self._cursors.get(name, b"")
        if not cursor and not self._engine.sessions.fence(session_id, self._silent[name]):
            return False
        cursor = self._release(name, session_id, cursor)
        if cursor:
            self._cursors[name] = cursor
            return True
        self._cursors.pop(name, None)
        return self._engine.sessions.forget_part(session_id)

    def _release(self, name: str, session_id: SessionId, cursor: bytes) -> bytes:
        """Returns where to continue. A lease that can't be released is skipped until the next sweep."""
        subject = f"{name} {cursor.hex()[-8:]}".rstrip()
        part = self._guard.attempt(self.name, subject, lambda: self._engine.sessions.release_part(session_id, cursor))
        if part is None:
            return self._engine.sessions.skip_lease(session_id, cursor)
        self.released += part[0]
        return part[1]


# -- reclaim -----------------------------------------------------------------------------------------------------------


#: How long after a look another one would see nothing new, in seconds.
PAUSE_S = 0.1
#: The time that one refused call may spend, in seconds.
RECLAIM_S = 1.0


class Reclaim:
    """Clears rows of dead sessions for one process and store. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._detector: FailureDetector[SessionId] = FailureDetector()
        self._busy: dict[SessionId, float] = {}
        self._look_at = 0.0
        self._lock = threading.Lock()

    def run(self, engine: Engine) -> bool:
        """Make room after a refused write. True if room was made, so that the write may be tried again."""
        if not self._lock.acquire(blocking=False):  # another thread does it, or a write of this very call was refused
            return False
        try:
            return self._clock.monotonic() >= self._look_at and self._run(engine)
        except KombuFDBError:
            self._detector.forget()
            return False
        finally:
            self._lock.release()

    def _run(self, engine: Engine) -> bool:
        self._look_at = self._clock.monotonic() + PAUSE_S
        self._detector.look(engine.sessions.beats_of_a_writer(), self._clock.monotonic())
        self._busy = spare_busy(engine, self._detector, self._busy)
        budget, ended = parts.Budget(self._clock, seconds=RECLAIM_S), 0
        for session_id, beat in self._detector.silent():
            if budget.spend() and engine.sessions.fence(session_id, beat):
                ended += 1
                with suppress(KombuFDBError):  # else a sweep releases its messages one by one
                    engine.sessions.release(session_id)
        return ended > 0


# -- the rounds of the duties ------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: Longest time between two rounds, and between two looks of the promoter's observers at its record, in seconds.
ROLE_INTERVAL_S = 1.0
#: How long a promoter may be silent, in seconds. After its death, a delayed message is late by that plus two looks at
#: the role; if its observers died as well, by twice that plus two looks.
ROLE_TTL_S = 5.0
#: The first round after this many seconds renews the promoter's record.
RENEW_S = 1.5
#: How long a duty that is not exact waits for others, in seconds, so that one wake-up serves them all.
TOGETHER_S = 0.05
#: While other duties only look, promotion looks at this interval, in seconds.
PROMOTION_S = 0.05
#: How long one duty may take before the others have their turns, if none of its transactions is slow.
TURN_S = 0.25
TURN_TRANSACTIONS = 50


class PromoterRole:
    """The role ``promoter``, which one process holds at a time, as seen by this one."""

    def __init__(
        self, engine: Engine, clock: Clock, session_id: SessionId, observes: Callable[[SessionId], bool]
    ) -> None:
        """``observes``: whether this process observes a session in the ring."""
        self._engine = engine
        self._clock = clock
        self._session_id = session_id
        self._observes = observes
        self._detector: FailureDetector[str] = FailureDetector()
        #: The record as a beat has seen it, and when; another thread puts it here.
        self.brought: tuple[bytes | None, float] | None = None
        #: When it was renewed; 0.0 while another process has the role.
        self._renew_at = 0.0
        #: When to look again at another process's role; and whether looks are so rare that a beat's suffices.
        self._look_at = 0.0
        self._is_seldom = False

    @property
    def held(self) -> bool:
        """Whether this process had the role at its last look."""
        return self._renew_at > 0

    def hold(self) -> bool:
        """Take the role if it is free, or renew it. False if another process has it."""
        now = self._clock.monotonic()
        if now < self._renew_at:
            return True  # held, and renewed a moment ago
        if self.held and self._take(None, now):
            return True
        brought, self.brought = self.brought, None
        if not self._is_seldom:  # a look is due, and the beat's is older
            brought = None
        if brought is None and now < self._look_at:
            return False
        if brought is None:
            brought = self._engine.sessions.role_record(PROMOTER), now
        self._is_seldom = False
        record, at_s = brought
        self._detector.look([] if record is None else [(PROMOTER, record, ROLE_TTL_S)], at_s)
        if record is not None and not record.startswith(self._session_id) and not self._detector.silent():
            holder = SessionId(record[: len(self._session_id)])
            self._is_seldom = self._detector.is_alive(PROMOTER) and not self._observes(holder)
            self._look_at = now + (ROLE_TTL_S if self._is_seldom else ROLE_INTERVAL_S)
            return False
        return self._take(record, now)

    def _take(self, observed: bytes | None, now: float) -> bool:
        self._renew_at = self._look_at = 0.0
        if self._engine.sessions.hold_role(PROMOTER, self._session_id, observed):
            self._renew_at = now + RENEW_S
        return self.held

    def leave(self) -> None:
        """Free the role for the next process, at once."""
        self._renew_at = 0.0
        self._engine.sessions.leave_role(PROMOTER, self._session_id)


class DutyCycle:
    """All duties of one session's process. One thread beats; another serves, and leaves at the end."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        session_id: SessionId,
        *,
        sweep_interval_s: float,
        report: Callable[[str, str, Exception | None], None] | None = None,
    ) -> None:
        """``report``: as the guard's (``duties.py``), once per subject that is set aside; the default logs it."""
        self._guard = guard = duties.Guard(engine.upkeep, clock, report or _warn)
        self._engine = engine
        self._clock = clock
        #: The watch that fires for each message that is delayed.
        self._alarm: Watch | None = None
        #: When the beating thread last ran, for the thread that stands in for it.
        self.beat_s = 0.0
        self.sweep_duty = Sweep(engine, clock, guard, session_id, sweep_interval_s)
        self._role = PromoterRole(engine, clock, session_id, self.sweep_duty.observes)
        #: Until when, by what the last beat has read, no message is assumed to be kept for a newer version.
        self._none_newer_until = 0.0
        promotion, *others = duties.table(engine, clock, guard, sweep_interval_s, self._may_be_newer)
        self._duties = [promotion, self.sweep_duty, *others]
        self._first = 0
        #: When promotion had its last turn.
        self._promoted_s = 0.0

    @property
    def promotes(self) -> bool:
        """Whether this process makes delayed messages ready, and does all other duties of the role."""
        return self._role.held

    def beat(self, session: ClientSession, ttl_s: float) -> bool:
        """Show that the session lives, and what it consumes. False if it was fenced: stop, all its leases are lost."""
        seen = self._engine.sessions.beat(
            session.session_id, ttl_s=ttl_s, consumed=session.queues, most=self.sweep_duty.window
        )
        if seen is None:
            session.lose()
        else:
            self.bring(*seen)
        return not session.lost

    def serve(self, session: ClientSession, deferred: Callable[[], None], *, rang: bool) -> float:
        """Take a turn. Returns in how many seconds to call again, at the latest.

        Raises a ``StoreError``, or ``SessionLost``.
        """
        if rang:
            self._cancel_alarm()
        if self.promotes and self._alarm is None:  # before the look: a message that is delayed later fires it
            self._alarm = self._engine.sessions.watch_alarm()
            self._alarm.on_fire(session.bell.ring)
        session.watch_claims()
        try:
            pause_s = self.run_once()
        finally:  # a full disk may refuse a duty in every round
            deferred()
        if not self.promotes:  # a whole fleet would wake up for each delayed message
            self._cancel_alarm()
        elif self._alarm is None:  # it has just become the promoter
            return 0.0
        return pause_s

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def leave(self, session: ClientSession) -> None:
        """End the turns: cancel the alarm, and leave the role."""
        self._cancel_alarm()
        if session.lost:
            return
        try:
            self.stop()
        except KombuFDBError as error:
            logger.debug("could not leave the role: %s", error)

    def bring(self, ring: list[Beat], promoter: bytes | None, newer: bool) -> None:
        """Take over what the session's beat has read, so that no duty has to look itself. For the thread that beats."""
        now = self._clock.monotonic()
        self._none_newer_until = 0.0 if newer else now + duties.NEWER_INTERVAL_S
        self._role.brought = promoter, now
        self.sweep_duty.brought.append((ring, now))

    def _may_be_newer(self) -> bool:
        return self._clock.monotonic() >= self._none_newer_until

    def run_once(self) -> float:
        """One round. Returns in how many seconds to call again, at the latest. Raises a ``StoreError``."""
        order = [*range(self._first, len(self._duties)), *range(self._first)]
        promotion = self._duties[0]
        promotion.due_at = 0.0  # a message may have been delayed since
        held: bool | None = None  # not asked yet
        for number in order:
            duty = self._duties[number]
            if not duty.is_due(self._clock.monotonic()):
                continue
            self._first = (number + 1) % len(order)  # unless the round succeeds
            if not duty.everywhere and held is not False:
                held = self._role.hold()
            worked = (duty.everywhere or held) and self._turn(duty)
            if held and duty is not promotion and (worked or self._clock.monotonic() - self._promoted_s > PROMOTION_S):
                self._turn(promotion)
        self._first = 0
        return self._pause(held=bool(held))

    def _turn(self, duty: duties.Duty) -> bool:
        """Give a duty its turn. Returns whether it has used its budget."""
        duty.due_at = self._clock.monotonic() + ROLE_INTERVAL_S  # a failing duty is due again later, not at once
        budget = self._budget()
        pause_s = duty.run(self._guard, budget)
        now = self._clock.monotonic()
        duty.due_at = now + pause_s
        if duty is self._duties[0]:
            self._promoted_s = now
        return budget.is_used

    def _budget(self) -> parts.Budget:
        """The budget of one turn; a simulation chooses another."""
        return parts.Budget(self._clock, seconds=TURN_S, transactions=TURN_TRANSACTIONS)

    def _pause(self, *, held: bool) -> float:
        """Seconds until the next duties are due (only those that it has), or the next look at the role."""
        now, waiting = self._clock.monotonic(), [each for each in self._duties if held or each.everywhere]
        first = min(now + ROLE_INTERVAL_S, *(each.due_at for each in waiting))
        together = [each.due_at for each in waiting if first <= each.due_at <= first + TOGETHER_S]
        exact = [each.due_at for each in waiting if each.is_exact]
        return max(0.0, min(max(together, default=first), *exact, math.inf) - now)

    def stop(self) -> None:
        """Free the role for the next process, at once."""
        self._role.leave()


def _warn(duty: str, subject: str, error: Exception | None) -> None:
    which = f"{duty!r} of {subject!r}" if subject else f"{duty!r}"
    if error is None:
        logger.warning("the duty %s succeeded again", which)
        return
    unexpected = None if isinstance(error, KombuFDBError) else error
    logger.warning("the duty %s failed, is set aside and will be retried: %s", which, error, exc_info=unexpected)
