"""The ground of the engine: one namespace of one store, and how a verb is run in a transaction of it.

The engine is a chain of classes, each with the verbs of one kind, which may use those of the classes before it:
``transactions`` (this one), ``looking`` (what is there), ``working`` (publish, claim, settle), ``administration``
(declare, limit, move, delete, replay), ``upkeep`` (sessions and duties), ``engine`` (all of it).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

from kombu_fdb.engine.facade.budget import Portion
from kombu_fdb.engine.messages import again
from kombu_fdb.engine.metrics import keytotals, totals
from kombu_fdb.engine.scheduling.contention import Contention
from kombu_fdb.engine.scheduling.rates import Sightings
from kombu_fdb.engine.stored import copies
from kombu_fdb.engine.stored.effects import Effects
from kombu_fdb.engine.stored.policy import Policy
from kombu_fdb.engine.stored.session import LEASES_PER_CLAIM
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.primitives.clock import Clock, IdSource
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.patience import Patience
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.store.retry import Retry
from kombu_fdb.store.tokens import CommitTokens, Doubt

__all__ = ["Environment", "Timeouts", "Transactions"]

T = TypeVar("T")


class Environment(NamedTuple):
    """What a process brings: time, ids nobody else has, and chance."""

    clock: Clock
    ids: IdSource
    rng: random.Random


class Timeouts(NamedTuple):
    """Deadlines in seconds: of each call, and of a publish."""

    call_s: float = 5.0
    publish_s: float = 10.0


class Transactions:
    """Runs verbs."""

    def __init__(
        self,
        database: Database,
        namespace: str,
        environment: Environment,
        policy: Policy | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        clock, ids, rng = environment
        self.keys = Keyspace(namespace)
        self.policy = policy or Policy()
        self.routing = RoutingTables(self.keys, clock)
        self._totals = totals.Totals(self.keys, clock)
        self._busiest = keytotals.Busiest()
        self._database = database
        self._clock = clock
        self._ids = ids
        self._rng = rng
        self._timeout_s, self._publish_timeout_s = timeouts or Timeouts()
        client = ids()
        tokens = CommitTokens(lambda slot: self.keys.token(client, slot))
        self._retry = Retry(database, clock, tokens, rng)
        self.patience = self._retry.patience
        self._claims = count(1)
        self._windows = Portion(LEASES_PER_CLAIM)
        self._settlements = Portion(LEASES_PER_CLAIM)
        #: Of the duties' steps, by their name.
        self._portions: dict[str, Portion] = {}
        self._chunks = Portion(copies.CHUNKS_PER_TRANSACTION)
        self._sightings = Sightings(clock)
        self._contention: dict[tuple[str, ...], Contention] = {}
        #: Publications that may be stored; outlives the engine where its owner says so.
        self.doubts = again.Doubts(clock)
        #: How often a rival's claim was faster, since the engine was made.
        self.lost_races = 0

    def be_patient_as(self, patience: Patience) -> None:
        """Share what the process may waste when it ends."""
        self.patience = self._retry.patience = patience

    def _now(self) -> int:
        return self._clock.wall_ms()

    def _read(self, verb: Callable[[Work], T]) -> T:
        """Run a verb that only looks."""
        return self._retry.read(lambda tr: verb(self._work(tr, Effects())), timeout_s=self._timeout_s)

    def _work(self, tr: Transaction, effects: Effects) -> Work:
        now_ms = self._now()
        return Work(tr, self.keys, self.routing, self.policy, self._ids, now_ms, effects)

    def _write(
        self,
        verb: Callable[[Work], T],
        timeout_s: float | None = None,
        on_conflict: Callable[[], None] | None = None,
        doubt: Doubt[T] | None = None,
    ) -> T:
        """Run a verb until it commits, within ``timeout_s``, with what it counts and whom it wakes."""
        deadline = self._clock.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return self._write_once(verb, deadline - self._clock.monotonic(), on_conflict, doubt)
            except copies.CopiesMissing as missing:
                if doubt is not None:
                    doubt.forget()  # a run that looks for copies has found that none before it has committed
                self._copy(missing, deadline)

    def _write_once(
        self,
        verb: Callable[[Work], T],
        timeout_s: float,
        on_conflict: Callable[[], None] | None,
        doubt: Doubt[T] | None,
    ) -> T:
        share, effects = self._totals.due(), Effects()

        def body(tr: Transaction) -> T:
            nonlocal effects
            effects = Effects()
            result = verb(self._work(tr, effects))
            effects.write(tr, self.keys)
            if share is not None:
                share.join(tr, effects.events)
            return result

        try:
            result = self._retry(body, timeout_s=timeout_s, on_conflict=on_conflict, doubt=doubt)
        except BaseException:
            if share is not None:
                share.failed()
            raise
        if share is not None:
            share.committed(effects.events)
        elif effects.events:
            self._totals.note(effects.events)
        return result

    def _copy(self, missing: copies.CopiesMissing, deadline: float) -> None:
        """Copy the chunks of a message for the queues that it is about to be buried in."""
        for target in missing.targets:
            while not self._chunks.run(partial(self._copy_part, missing, target, self._ids(), deadline)):
                pass

    def _copy_part(self, missing: copies.CopiesMissing, target: str, new_id: bytes, deadline: float, most: int) -> bool:
        return self._retry(
            lambda tr: copies.copy_part(self._work(tr, Effects()), missing, target, new_id, most),
            timeout_s=deadline - self._clock.monotonic(),
        )
