"""The ring: who observes whom, so that a dead session is found without everybody looking at everybody.

Each process observes the sessions that follow its own in the order of their ids, which are random: as many as it takes
to see :data:`LIVING` of them alive, and twice as many at each look that does not. So a dead session is observed by that
many living ones, and a sweep of the whole fleet reads rows in proportion to the fleet, not to its square. BACK-SOON: a
session is ended within its time to live and one sweep, if fewer than :data:`LIVING` in a row died together; if only one
of n survives, within its time to live and ``log2(n / LIVING) + 2`` sweeps.
"""

from __future__ import annotations

from typing import Protocol

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.stored.budget import Budget
from kombu_fdb.engine.upkeep.sweep import Observer
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.upkeep.computing import Computing
from kombu_fdb.process.upkeep.round_robin import Guard, RoundRobin

#: How many living sessions each process observes.
LIVING = 8
LEAST_PAUSE_S = 0.001


class Jitter(Protocol):
    """What is needed of chance."""

    def uniform(self, a: float, b: float) -> float: ...


class Sweep:
    """End dead sessions and bring their messages back. Guarantees BACK-SOON and NOT-TWICE.

    A process that can't beat can't judge: a store that answers reads and takes no commits makes every session look
    silent.
    """

    name = "sweep"

    def __init__(
        self, engine: Engine, clock: Clock, guard: Guard, rng: Jitter, session_id: SessionId, interval_s: float
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._session_id = session_id
        self._interval_s = interval_s
        self._subjects = RoundRobin(guard, self.name)
        self._guard = guard
        self._rng = rng
        self._observer: Observer[SessionId] = Observer()
        self._computing = Computing()
        self._window = LIVING
        self._cursors: dict[str, bytes] = {}
        #: Messages brought back so far.
        self.released = 0

    def run(self, budget: Budget) -> float:
        self._look()
        silent = {
            session_id.hex(): beat for session_id, beat in self._observer.silent() if session_id != self._session_id
        }
        self._cursors = {name: cursor for name, cursor in self._cursors.items() if name in silent}
        self._subjects.run(silent.keys(), lambda name: self._end(name, silent[name]), budget)
        # Jitter, so that the processes of a fleet don't sweep in step; but not a sweep later than it may be.
        # Of a sum of times a rounding error is left, which no clock moves on by: hence the least pause.
        pause_s = min(
            self._interval_s * self._rng.uniform(0.8, 1.0), max(LEAST_PAUSE_S, self._observer.next_silent_s())
        )
        return 0.0 if budget.is_spent else pause_s

    def _look(self) -> None:
        found = self._engine.sessions.neighbours(self._session_id, self._window)
        self._observer.look(found, self._clock.monotonic())
        if self._session_id in dict(self._observer.half_silent()):
            self._observer.forget()
        self._computing.spare(self._engine, self._observer)
        others = [session_id for session_id, _, _ in found if session_id != self._session_id]
        self._window = self._next_window(others)

    def _next_window(self, others: list[SessionId]) -> int:
        """How many to look at the next time: so many that :data:`LIVING` of them live, as far as is known."""
        living = [number for number, each in enumerate(others, 1) if self._observer.is_alive(each)]
        if len(living) >= LIVING:
            return living[LIVING - 1]
        return max(LIVING, self._window if len(others) < self._window else self._window * 2)

    def _end(self, name: str, last_beat: bytes) -> bool:
        """One step of ending a session. True if there is more to do."""
        session_id = SessionId(bytes.fromhex(name))
        cursor = self._cursors.get(name, b"")
        if not cursor and not self._engine.sessions.fence(session_id, last_beat):
            return False
        cursor = self._release(name, session_id, cursor)
        if cursor:
            self._cursors[name] = cursor
            return True
        self._cursors.pop(name, None)
        return self._engine.sessions.forget_part(session_id)

    def _release(self, name: str, session_id: SessionId, cursor: bytes) -> bytes:
        """Where to go on. A lease that can't be brought back is skipped, and tried again with the next sweep."""
        subject = f"{name} {cursor.hex()[-8:]}".rstrip()
        part = self._guard.attempt(self.name, subject, lambda: self._engine.sessions.release_part(session_id, cursor))
        if part is None:
            return self._engine.sessions.skip_lease(session_id, cursor)
        self.released += part[0]
        return part[1]
