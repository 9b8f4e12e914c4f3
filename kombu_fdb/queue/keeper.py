"""What a consumer process does besides consuming, as steps without threads: beat, sweep, promote, expire.

Model. ``client.py`` calls :meth:`Heartbeat.run_once` from one thread and :meth:`Duties.run_once` from another, so that
a long sweep never delays a beat. Each step is short and bounded. A step that fails with a store error changes nothing
and is called again; the observers count only successful looks, so an outage makes nobody look dead.

Every process sweeps sessions and expires queues: who is first wins, by a conflict. Promoting is done by one process,
which holds the role ``promoter`` and renews its record each second; another takes the role when it saw the record
unchanged for :data:`ROLE_TTL_S`, or at once when the holder left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kombu_fdb.clock import Clock
from kombu_fdb.queue.engine import Engine
from kombu_fdb.queue.sweep import Observer

__all__ = ["PROMOTER", "Duties", "Heartbeat"]

PROMOTER = "promoter"
#: Longest time between two looks of the promoter at its role and of the others at the promoter, in seconds.
ROLE_INTERVAL_S = 1.0
#: How long a promoter may be silent, in seconds: what a delayed message is late by after its death.
ROLE_TTL_S = 5.0
#: Commit tokens of processes that are gone are cleared after this time, in seconds; retries end in far less.
TOKEN_TTL_S = 900.0
TOKEN_INTERVAL_S = 200.0


class Jitter(Protocol):
    def uniform(self, a: float, b: float) -> float: ...


class Heartbeat:
    """Keeps one session alive."""

    def __init__(
        self, engine: Engine, session_id: bytes, ttl_s: float, consumed: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """``consumed``: the queues, to be shown to whoever looks at the sessions."""
        self._engine = engine
        self._ttl_s = ttl_s
        self._consumed = consumed
        self.session_id = session_id

    def run_once(self) -> bool:
        """Beat. False if the session was fenced: stop, all its leases are lost."""
        return self._engine.beat(self.session_id, ttl_s=self._ttl_s, consumed=self._consumed())


class Duties:
    """Sweep, promote, expire, for one session's process. Not thread-safe: called by one thread."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        rng: Jitter,
        session_id: bytes,
        *,
        sweep_interval_s: float,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._session_id = session_id
        self._sweep_interval_s = sweep_interval_s
        self._sessions: Observer[bytes] = Observer()
        self._queues: Observer[str] = Observer()
        self._roles: Observer[str] = Observer()
        self._tokens: Observer[bytes] = Observer()
        self._next_sweep = 0.0
        self._renew_role = 0.0
        self._next_tokens = clock.monotonic() + TOKEN_INTERVAL_S

    def run_once(self) -> float:
        """Do what is due. Returns in how many seconds to call again, at the latest."""
        now = self._clock.monotonic()
        if now >= self._next_sweep:
            # Jitter, so that the processes of a fleet don't sweep in step.
            self._next_sweep = now + self._sweep_interval_s * self._rng.uniform(0.8, 1.0)
            self.sweep()
            # Not a sweep later than it may be.
            self._next_sweep = min(self._next_sweep, now + self._sessions.next_silent_s())
            self.expire_queues()
        if now >= self._next_tokens:
            self._next_tokens = now + TOKEN_INTERVAL_S
            self.clear_tokens()
            self._engine.trim_dead()
            self._engine.trim_full()
            self._engine.clear_dedup()
            self._engine.trim_totals()
        pause = self.promote()
        return max(0.0, min(pause, self._next_sweep - self._clock.monotonic()))

    def stop(self) -> None:
        """Give the role to the next, at once."""
        self._renew_role = 0.0
        self._engine.leave_role(PROMOTER, self._session_id)

    def sweep(self) -> int:
        """Look at all sessions; end those that are dead and bring their messages back. Returns how many messages.

        Whoever can't beat can't judge: a store that answers reads and takes no commits makes everybody look silent.
        """
        self._sessions.look(self._engine.beats(), self._clock.monotonic())
        if self._sessions.is_half_silent(self._session_id):
            self._sessions.forget()
        released = 0
        for session_id, last_beat in self._sessions.silent():
            if session_id != self._session_id and self._engine.fence(session_id, last_beat):
                released += self._engine.release_session(session_id)
        return released

    def promote(self) -> float:
        """If this process is the promoter, make due messages ready. Returns the seconds until the next look."""
        if not self._hold_role():
            return ROLE_INTERVAL_S
        _, next_due_ms = self._engine.promote()
        if next_due_ms is None:
            return ROLE_INTERVAL_S
        return min(max(0.0, (next_due_ms - self._clock.wall_ms()) / 1000), ROLE_INTERVAL_S)

    def _hold_role(self) -> bool:
        now = self._clock.monotonic()
        if now < self._renew_role:
            return True  # held, and renewed a moment ago
        record = self._engine.role_record(PROMOTER)
        self._roles.look([] if record is None else [(PROMOTER, record, ROLE_TTL_S)], now)
        ours = record is not None and record.startswith(self._session_id)
        if not ours and record is not None and not self._roles.silent():
            return False
        held = self._engine.hold_role(PROMOTER, self._session_id, record)
        self._renew_role = now + ROLE_INTERVAL_S / 2 if held else 0.0
        return held

    def expire_queues(self) -> int:
        """Delete queues with ``x-expires`` that nobody used for as long. Returns how many."""
        found = self._engine.expiring_queues()
        idle = [(queue, last_use, max(expires_ms, 1) / 1000) for queue, last_use, expires_ms in found]
        self._queues.look(idle, self._clock.monotonic())
        return sum(self._engine.expire_queue(queue, last_use) for queue, last_use in self._queues.silent())

    def clear_tokens(self) -> int:
        """Clear commit tokens of processes that are gone. Returns how many."""
        tokens = [(key, value, TOKEN_TTL_S) for key, value in self._engine.tokens()]
        self._tokens.look(tokens, self._clock.monotonic())
        return sum(self._engine.clear_token(key, value) for key, value in self._tokens.silent())
