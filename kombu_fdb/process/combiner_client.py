"""A consumer among its competitors: alone, or in a wait queue with them (``engine/scheduling/wait_queue.py``).

Model. For each set of queues a consumer is

* *alone*: it claims directly. On a store whose writers take turns, every consumer does.
* *contested*: a competing claim was faster than its own, or others are in the wait queue. It *joins* the wait queue
  whenever it has room, before it knows whether there is work: its demand stays there even while it is idle. In the wait
  queue it *waits*, or is the *first*; only the first consumer looks at the queues, watches their bells and claims. It
  is alone again when it has served :data:`LONELY` times in a row, and no other consumer was in the
  wait queue or served it in between.

A long-lived consumer *suspects* others at first, and counts as alone once it has served the wait queue. Otherwise, when
a deployment starts, the first claims of all its workers would conflict with each other.

Its owner, a single thread, calls :meth:`CombinerClient.attend` in each turn. A client never sleeps; it says when it
wants to be called again, and rings when a watch has fired.

What happens at each failure. Waiting consumers also look without being woken, the one right behind the first at least
twice a second; it is woken when it gets that place. A consumer that twice sees the same consumer first, with work both
times and its patience over in between, evicts that consumer and looks again. The consumers of one connection share what
they have seen. If the first two consumers are dead, the third one evicts them. A consumer that was evicted, or whose
demand was given up (``client_session.py``), finds that out at its next look and joins again. An owner that ends leaves
the wait queue, or abandons its demand, which the duties thread then ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import Delivery, Demand, Lease
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store.protocol import Watch

#: A consumer is alone again after this many services without another consumer.
LONELY = 16
#: The patience: how long the first consumer may do nothing while there is work, in seconds; a waiting consumer's first
#: look comes after the same time. If a service takes longer, because the machine is busy or the messages are large, all
#: are more patient: :data:`PATIENT` times what a service takes up to its commit, or what the server's last one took in
#: all if that is longer; and twice as long after each eviction. Otherwise consumers would evict each other while they
#: work. The patience is stored in the wait queue, so no consumer has to learn it by itself. It shrinks slowly:
#: otherwise, if quick and slow services alternated, all the slow ones would be wasted. Each service leaves at least the
#: part :data:`LEFT` of it, so it takes fourteen services to shrink from its longest to its shortest.
PATIENCE_S = 0.25
MOST_PATIENCE_S = 5.0
PATIENT = 4.0
LEFT = 0.8
#: The longest pause of the consumer right behind the first, and of the two behind that. Then the shortest pause of all
#: but the second, in multiples of the patience: if hundreds wait and services are slow, all are served before their
#: next look, and looks that find nothing new would cost half of all processor time. Then how often, in seconds, those
#: further back look for work, which only they can do if all ahead of them are dead.
NEXT_S = 0.4
NEAR_S = 1.0
UNHURRIED = 1.5
SELDOM_S = 4.0
#: How many longest pauses to postpone a look that the owner's glance has made unnecessary: past its next glance.
SPARED = 1.25
#: By which factor each pause may exceed the previous one.
GROWTH = 2.0
#: How many wait queues are remembered as contested.
MOST_WAIT_QUEUES = 100


@dataclass(slots=True)
class FirstWaiter:
    """The first consumer of a wait queue, as the consumers of one connection see it. ``row``: its key.

    ``work_s``: since when it has been seen there with work waiting. ``ask_at``: when a consumer far back looks for work
    again.
    """

    row: bytes = b""
    work_s: float | None = None
    ask_at: float = 0.0


class Contention:
    """Which wait queues are contested, as one connection knows it. Thread-safe; a wrong guess costs time."""

    def __init__(self) -> None:
        #: How many times in a row each wait queue was seen without other consumers.
        self._contested: dict[bytes, int] = {}
        #: How long the last service took, in any wait queue. This and the next are shared by all clients: each waiting
        #: ``take`` has its own, and a short-lived client alone would never evict.
        self.service_s = 0.0
        self._firsts: dict[bytes, FirstWaiter] = {}

    @property
    def known(self) -> bool:
        """Whether any wait queue is contested."""
        return bool(self._contested)

    def is_contested(self, queues: Iterable[str]) -> bool:
        return bool(self._contested) and wait_queue.name([*queues]) in self._contested

    def contest(self, queues: Iterable[str]) -> None:
        """Note that a competing consumer was faster."""
        self._note(wait_queue.name([*queues]), 0)

    def suspect(self, queues: Iterable[str]) -> None:
        """Note that others may compete: join the wait queue once, to see whether others are there."""
        self._note(wait_queue.name([*queues]), LONELY - 1)

    def first_of(self, name: bytes) -> FirstWaiter:
        """The consumer seen as the first of this wait queue."""
        if len(self._firsts) > MOST_WAIT_QUEUES:
            self._firsts.clear()
        return self._firsts.setdefault(name, FirstWaiter())

    def served(self, name: bytes, *, alone: bool, took_s: float) -> None:
        """Note that the first consumer has served the wait queue, with or without a sign of others."""
        self.service_s = took_s
        times = self._contested.get(name, 0) + 1 if alone else 0
        if times < LONELY:
            self._note(name, times)
        else:
            self.end(name)

    def end(self, name: bytes) -> None:
        """Note that this wait queue is of no use."""
        self._contested.pop(name, None)

    def _note(self, name: bytes, times: int) -> None:
        if len(self._contested) >= MOST_WAIT_QUEUES:
            self._contested.clear()
        self._contested[name] = times


class CombinerClient:
    """An owner's place in one wait queue at a time. For one thread; ``ring`` and :meth:`abandon` are for any."""

    def __init__(
        self,
        ring: Callable[[], None],
        clock: Callable[[], float],
        spread: Random,
        longest_s: float,
        contention: Contention,
        into: list[Delivery],
    ) -> None:
        """``clock``: seconds from any start. ``longest_s``: the longest time between two looks.

        ``into``: its owner's list, which receives the messages from the wait queue.
        """
        self.contention = contention
        self._into = into
        self._ring = ring
        self._clock = clock
        self._spread = spread
        self._longest_s = longest_s
        self._session: ClientSession | None = None
        self._demand: Demand | None = None
        self._queues: tuple[str, ...] = ()
        self._patience_s = PATIENCE_S
        #: Whether its owner has ended; another thread may set this while the owner's thread joins.
        self._abandoned = False
        self._reset()

    def _reset(self) -> None:
        self._watches: list[Watch] = []
        self._rung = True
        self._fired = False
        self._due_s = 0.0
        #: Whether it is close behind the first, or work is waiting; and whether it must check for work itself.
        self._is_near = self._has_to_ask = False
        self._pause_s = PATIENCE_S
        #: The wait queue as seen when this became the first; after a service that found nothing, only itself.
        self._waiting: wait_queue.Waiting | None = None
        self._server = b""
        self._has_just_joined = True

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def in_wait_queue(self) -> bool:
        return self._demand is not None

    @property
    def is_first(self) -> bool:
        return self._demand is not None and self._waiting is not None

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues in whose wait queue it is."""
        return self._queues if self._demand is not None else ()

    @property
    def demand(self) -> Demand | None:
        """The demand with which it waits."""
        return self._demand

    @property
    def want(self) -> int:
        """How many messages it waits for."""
        return 0 if self._demand is None else self._demand.want

    def next_look_s(self) -> float | None:
        """In how many seconds it wants to be called again."""
        if self._demand is None:
            return None
        return 0.0 if self._rung else max(0.0, self._due_s - self._clock())

    # -- moves -------------------------------------------------------------------------------------------------------

    def join(self, session: ClientSession, queues: Sequence[str], want: int, acks: Sequence[Lease]) -> None:
        """Wait for ``want`` messages of ``queues``. Raises what ``ClientSession.claim`` raises."""
        self.belong_to(session)
        self._reset()
        self._queues = tuple(queues)
        self._demand = demand = session.demand(wait_queue.name(queues), want)
        try:
            session.join(demand, self._queues, acks, self._into)
        except BaseException:
            self._end(demand)
            raise
        if self._abandoned:
            session.give_up(demand.first)
            self._end(demand)

    def attend(self, engine: Engine) -> bool:
        """Look, if a look is due. Returns whether it has become the first consumer.

        Raises what ``ClientSession.claim`` raises.
        """
        demand = self._demand
        if demand is None or not (self._rung or self._clock() >= self._due_s):
            return False
        fired, timed, was_first = self._fired, not self._rung, self.is_first
        self._rung = self._fired = False
        self._disarm()
        try:
            standing = self._of().look(demand, fired=fired)
        except BaseException:
            self._rung, self._fired = True, fired  # the change that woke it is still unseen
            raise
        if not standing.waits:
            self._end(demand)
            return False
        self._patience_s = _bounded(standing.patience_s)
        if standing.is_first:
            self._lead(standing)
        else:
            self._wait(engine, demand, standing, timed)
        return self.is_first and not was_first

    def _lead(self, standing: wait_queue.Standing) -> None:
        """Note that it is the first; its next service includes the waiters that it has just seen."""
        if self._waiting is None or len(standing.waiting) > 1:
            self._waiting = standing.waiting
        self._server = standing.server
        self._is_near = self._has_to_ask = False
        self._due_s = self._clock() + self._longest_s

    def _wait(self, engine: Engine, demand: Demand, standing: wait_queue.Standing, timed: bool) -> None:
        """``timed``: it looks because its pause has ended, not because it was woken."""
        now = self._clock()
        self._waiting = None
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * GROWTH, self._longest_s)
        first = self.contention.first_of(demand.wait_queue)
        asks = standing.behind is not None or first.work_s is not None or now >= first.ask_at
        is_back, self._has_just_joined = self._has_just_joined and standing.first == first.row, False
        if standing.first != first.row:
            first.row, first.work_s = standing.first, None
        if (self._has_to_ask or (asks and (timed or is_back))) and self._is_idle(engine, first, now):
            engine.messages.evict(demand, standing.first, _bounded(2 * self._patience_s))  # which wakes this client
            self._pause_s = PATIENCE_S
        if standing.is_next:
            pause_s = min(pause_s, NEXT_S)
        else:
            pause_s = max(pause_s if standing.behind is None else min(pause_s, NEAR_S), UNHURRIED * self._patience_s)
        if first.work_s is not None:
            pause_s = min(pause_s, self._patience_s)
        self._is_near = standing.behind is not None or first.work_s is not None
        self._due_s = now + self._spread.uniform(pause_s, pause_s * 1.25)
        self._watches = standing.watches
        for watch in standing.watches:
            watch.on_fire(self._fire)
        if self._demand is not demand:  # it was abandoned
            self._disarm()

    def _is_idle(self, engine: Engine, first: FirstWaiter, now: float) -> bool:
        """Whether the first consumer has had work for longer than the patience, and has not served."""
        first.ask_at = now + SELDOM_S
        has_work, self._has_to_ask = engine.messages.has_work(self._queues), False
        if not has_work:
            first.work_s = None
            return False
        if first.work_s is None:
            first.work_s = now
        return now - first.work_s >= self._patience_s

    def _fire(self) -> None:
        self._rung = self._fired = True
        self._ring()

    def look_again(self) -> None:
        """Have the next turn look, and check for work: a bell may have rung for a dead first consumer."""
        self._due_s, self._has_to_ask = 0.0, True

    def is_spared(self) -> None:
        """Postpone the next look: the owner has read the keys of :meth:`watched`, and none has changed.

        Those right behind the first look at the wait queue itself, to replace it in time if it dies.
        """
        if not (self._is_near or self._has_to_ask):
            self._due_s = max(self._due_s, self._clock() + self._longest_s * SPARED)

    def watched(self, keys: Keyspace) -> list[bytes]:
        """The keys that show whether there is anything to do: its demand, and its queues' bells."""
        demand = self._demand
        return [] if demand is None else [keys.demand(demand.session, demand.first), *map(keys.bell, self._queues)]

    def serve(self, queues: Sequence[str]) -> Collection[str]:
        """As the first consumer, claim from ``queues`` for all in the wait queue.

        Returns the queues that have a single active consumer: if there are any, it leaves the wait queue, and has to
        claim for itself. Raises what ``ClientSession.claim`` raises.
        """
        waiting, demand = self._waiting, self._demand
        if waiting is None or demand is None:
            return ()
        began_s, last_s = self._clock(), self.contention.service_s

        def patience() -> float:
            # Most of hundreds of consumers have never served before; and this service's commit is still to come.
            takes_s = max(last_s, self._clock() - began_s)
            return _bounded(max(PATIENT * takes_s, LEFT * self._patience_s))

        served = self._of().serve(demand, queues, waiting, patience)
        if served.single:
            self.leave()
            self.contention.end(demand.wait_queue)
        elif served.ended:
            self._waiting, self._rung = None, True  # the next look finds out how
        elif served.deliveries:
            alone = len(waiting) == 1 and self._server == demand.session
            self.contention.served(demand.wait_queue, alone=alone, took_s=self._clock() - began_s)
            self._end(demand)
        else:
            # Nothing is there, and usually a single message comes next. It is claimed without a look at the wait queue;
            # the service after that sees which consumers have joined.
            self._waiting = {row: each for row, each in waiting.items() if each == demand}
        return served.single

    def leave(self) -> None:
        """Leave the wait queue, with what was granted before. Raises what ``ClientSession.claim`` raises."""
        demand = self._demand
        if demand is not None:
            self._disarm()
            self._of().leave(demand)
            self._end(demand)

    def abandon(self) -> None:
        """Have the duties thread leave for it, and release what was granted. Never blocks; for finalizers, too."""
        self._abandoned = True  # first: a join under way sees it
        demand, session = self._demand, self._session
        if demand is not None and session is not None:
            session.give_up(demand.first)
            self._end(demand)

    def belong_to(self, session: ClientSession) -> None:
        """Switch to another session: demands end with their session."""
        if self._session is not session:
            if self._demand is not None:
                self._end(self._demand)
            self._session = session

    def _end(self, demand: Demand) -> None:
        self._disarm()
        if self._demand is demand:
            self._demand = None

    def _disarm(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()

    def _of(self) -> ClientSession:
        assert self._session is not None, "it has joined"
        return self._session


def _bounded(patience_s: float) -> float:
    return min(max(PATIENCE_S, patience_s), MOST_PATIENCE_S)
