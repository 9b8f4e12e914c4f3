"""What a consumer process does besides consuming, as steps without threads: beat, and the duties in their turn.

Model. ``process/client.py`` calls :meth:`Heartbeat.run_once` from one thread and :meth:`Duties.run_once` from another,
so that a long sweep never delays a beat.

The duties (``ring.py``, ``duties.py``) are small objects that remember where they stopped. In a *round* each that is
due gets a :class:`~kombu_fdb.engine.stored.budget.Budget` of :data:`TURN_S` and :data:`TURN_TRANSACTIONS`; the one that
has more to do is due again in the next round, which follows at once. Promotion comes first, and once more after each
other duty that ran: ETAs and retries wait for one turn of one duty, not for the end of all. So however much work comes
in, and for whichever duty, each of them goes on.

Who does what. Every process sweeps its neighbours in the ring; who ends a dead one first wins, by a conflict. Every
process brings back what older ones kept for its version: the promoter may be one of those. All else is done by one
process, which holds the role ``promoter`` and renews its record each second; another takes the role when it saw the
record unchanged for :data:`ROLE_TTL_S`, or at once when the holder left it. Two holders at once are harmless: their
transactions conflict.

What happens at each failure:

* a step fails for a reason of its own (a row that can't be read, a message that fits into no transaction): it is halved
  down to that one message, and what remains is set aside (``round_robin.py``): told once, shown by the doctor, tried
  again later. The duty goes on with the next message, session or queue, and the round with the next duty.
* the store does not answer, or a duty runs into a deadline: the round ends with that error, nothing has changed, and
  the next one begins behind that duty, so that none that always takes too long keeps the others from their turn.
* the process dies: another one has the role after :data:`ROLE_TTL_S`, and begins without memory. All that a duty
  remembers is where it was.

The observers count only successful looks, so an outage makes no session look dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.stored.budget import Budget
from kombu_fdb.engine.upkeep.sweep import Observer
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.upkeep import duties
from kombu_fdb.process.upkeep.duties import Duty
from kombu_fdb.process.upkeep.ring import Jitter, Sweep
from kombu_fdb.process.upkeep.round_robin import Guard

logger = logging.getLogger(__name__)

PROMOTER = "promoter"
#: Longest time between two looks of the promoter at its role and of the others at the promoter, in seconds.
ROLE_INTERVAL_S = 1.0
#: How long a promoter may be silent, in seconds: what a delayed message is late by after its death.
ROLE_TTL_S = 5.0
#: What one duty may take before it is the others' turn, if none of its transactions is slow.
TURN_S = 0.25
TURN_TRANSACTIONS = 50


class Heartbeat:
    """Keeps one session alive."""

    def __init__(
        self, engine: Engine, session_id: SessionId, ttl_s: float, consumed: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """``consumed``: the queues, to be shown with the session."""
        self._engine = engine
        self._ttl_s = ttl_s
        self._consumed = consumed
        self.session_id = session_id

    def run_once(self) -> bool:
        """Beat. False if the session was fenced: stop, all its leases are lost."""
        return self._engine.sessions.beat(self.session_id, ttl_s=self._ttl_s, consumed=self._consumed())


class Role:
    """A role that one process holds at a time, as this one sees it."""

    def __init__(self, engine: Engine, clock: Clock, name: str, session_id: SessionId) -> None:
        self._engine = engine
        self._clock = clock
        self._name = name
        self._session_id = session_id
        self._observer: Observer[str] = Observer()
        self._renew_at = 0.0

    def hold(self) -> bool:
        """Take it if it is free, or keep it. False if another process has it."""
        now = self._clock.monotonic()
        if now < self._renew_at:
            return True  # held, and renewed a moment ago
        record = self._engine.sessions.role_record(self._name)
        self._observer.look([] if record is None else [(self._name, record, ROLE_TTL_S)], now)
        ours = record is not None and record.startswith(self._session_id)
        if not ours and record is not None and not self._observer.silent():
            return False
        held = self._engine.sessions.hold_role(self._name, self._session_id, record)
        self._renew_at = now + ROLE_INTERVAL_S / 2 if held else 0.0
        return held

    def leave(self) -> None:
        """Give it to the next, at once."""
        self._renew_at = 0.0
        self._engine.sessions.leave_role(self._name, self._session_id)


class Duties:
    """All of them, for one session's process. Not thread-safe: called by one thread."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        rng: Jitter,
        session_id: SessionId,
        *,
        sweep_interval_s: float,
        report: Callable[[str, str, Exception], None] | None = None,
    ) -> None:
        """``report`` is told, once, of what is set aside: duty, subject and error; by default it goes to the log."""
        guard = Guard(engine.upkeep, clock, report or _warn)
        self._clock = clock
        self._role = Role(engine, clock, PROMOTER, session_id)
        self._sweep = Sweep(engine, clock, guard, rng, session_id, sweep_interval_s)
        self._promotion = duties.Promotion(engine, clock, guard)
        self._newer = duties.Newer(engine, guard)
        self._unused = duties.UnusedQueues(engine, clock, guard, sweep_interval_s)
        self._leftovers = duties.Leftovers(engine, clock, guard)
        self._duties: list[Duty] = [
            self._promotion,
            self._sweep,
            self._newer,
            self._unused,
            duties.Deletions(engine, guard, sweep_interval_s),
            duties.Limits(engine, guard),
            duties.FullQueues(engine, guard),
            duties.DeadLetters(engine, guard),
            duties.ExpiredHeads(engine, clock, guard),
            duties.ExpiredMessages(engine, guard),
            duties.DedupIds(engine, guard),
            duties.Walk("clear full buckets", engine.upkeep.clear_buckets_part, guard),
            duties.Walk("clear marks of imports", engine.migrate.forget_marks_part, guard),
            self._leftovers,
            duties.Ghosts(engine, clock, guard),
            duties.Totals(engine, guard),
            duties.Samples(engine, clock, guard),
        ]
        self._due_at = dict.fromkeys(range(len(self._duties)), 0.0)
        self._first = 0

    def run_once(self) -> float:
        """One round. Returns in how many seconds to call again, at the latest. Raises a ``StoreError``."""
        order = [*range(self._first, len(self._duties)), *range(self._first)]
        self._due_at[0] = 0.0  # something may have been delayed meanwhile
        held: bool | None = None  # not asked yet
        for number in order:
            if self._clock.monotonic() < self._due_at[number]:
                continue
            self._first = (number + 1) % len(order)  # unless all goes well
            everybodys = self._duties[number] in (self._sweep, self._newer)
            if not everybodys and held is not False:
                held = self._role.hold()
            if everybodys or held:
                self._turn(number)
            if held and number:
                self._turn(0)
        self._first = 0
        return self._pause(held=bool(held))

    def _turn(self, number: int) -> None:
        # What fails is due again in a while, not at once.
        self._due_at[number] = self._clock.monotonic() + ROLE_INTERVAL_S
        pause_s = self._duties[number].run(self._budget())
        self._due_at[number] = self._clock.monotonic() + pause_s

    def _budget(self) -> Budget:
        return Budget(self._clock, seconds=TURN_S, transactions=TURN_TRANSACTIONS)

    def _pause(self, *, held: bool) -> float:
        """A process without a role looks after it; and after what all do."""
        own_at = [self._due_at[self._duties.index(each)] for each in (self._sweep, self._newer)]
        due_at = min(self._due_at.values()) if held else min(own_at)
        return max(0.0, min(due_at - self._clock.monotonic(), ROLE_INTERVAL_S))

    def stop(self) -> None:
        """Give the role to the next, at once."""
        self._role.leave()

    # -- one of them, to its end -----------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Look at the neighbours; end those that are dead. Returns how many messages came back."""
        before = self._sweep.released
        self._sweep.run(Budget(self._clock))
        return self._sweep.released - before

    def promote(self) -> float:
        """If this process has the role, make due messages ready. Returns the seconds until the next look."""
        return self._promotion.run(Budget(self._clock)) if self._role.hold() else ROLE_INTERVAL_S

    def expire_queues(self) -> int:
        """Delete queues with ``x-expires`` that were unused for as long. Returns how many."""
        before = self._unused.expired
        self._unused.run(Budget(self._clock))
        return self._unused.expired - before

    def clear_leftovers(self) -> None:
        """Clear rows of processes that are gone."""
        self._leftovers.run(Budget(self._clock))


def _warn(duty: str, subject: str, error: Exception) -> None:
    about = f"{duty!r} of {subject!r}" if subject else f"{duty!r}"
    logger.warning("the duty %s failed, is set aside and will be retried: %s", about, error, exc_info=error)
