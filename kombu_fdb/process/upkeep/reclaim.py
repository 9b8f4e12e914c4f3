"""Reclaim: where a full disk has no room for who starts, what dead sessions have left is cleared.

Each start of a worker that crashes soon after leaves a session and declarations. Living workers sweep those; where none
can start any more, none would. So a process whose write is refused looks at the sessions itself, each time, and ends
those that have died, by the rule of all sweeps (``sweep.Observer``). It remembers what it has seen while it connects
again and again. A process that gives up at once has seen nothing.

Who can't beat can't judge: a full disk that takes no writes at all makes every session look silent. So to each look
belongs a write of the kind of a beat.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.stored.batches import Budget
from kombu_fdb.engine.upkeep.sweep import Observer
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.upkeep.duty_cycle import Computing

#: So soon after a look another one would see nothing new, in seconds.
PAUSE_S = 0.1
#: Of one call that was refused, in seconds.
TURN_S = 1.0


class Reclaim:
    """Of one process and store. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._observer: Observer[SessionId] = Observer()
        self._computing = Computing()
        self._look_at = 0.0
        self._lock = threading.Lock()

    def run(self, engine: Engine) -> bool:
        """A write was refused. True if room was made since, so that it may be tried again."""
        if not self._lock.acquire(blocking=False):  # another thread is at it, or this one's own write was refused
            return False
        try:
            return self._clock.monotonic() >= self._look_at and self._run(engine)
        except KombuFDBError:
            self._observer.forget()
            return False
        finally:
            self._lock.release()

    def _run(self, engine: Engine) -> bool:
        self._look_at = self._clock.monotonic() + PAUSE_S
        self._observer.look(engine.sessions.beats_of_a_writer(), self._clock.monotonic())
        self._computing.spare(engine, self._observer)
        budget, ended = Budget(self._clock, seconds=TURN_S), 0
        for session_id, beat in self._observer.silent():
            if budget.spend() and engine.sessions.fence(session_id, beat):
                ended += 1
                with suppress(KombuFDBError):  # of its messages, which a sweep brings back one by one
                    engine.sessions.release(session_id)
        return ended > 0
