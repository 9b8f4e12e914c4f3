"""The ground of the engine: one namespace of one store, and how a verb is run in a transaction of it.

The engine is a chain of classes, each with the verbs of one kind, which may use those of the classes before it:
``transactions`` (this one), ``looking`` (what is there), ``working`` (publish, claim, settle), ``administration``
(declare, limit, move, delete, replay), ``upkeep`` (sessions and duties), ``engine`` (all of it).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from kombu_fdb.clock import Clock, IdSource
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.queue import (
    deadletter,
    keytotals,
    totals,
)
from kombu_fdb.queue.contention import Contention
from kombu_fdb.queue.deadletter import Policy
from kombu_fdb.queue.tally import Tally
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.store.retry import CommitTokens, Retry

__all__ = ["Transactions"]


T = TypeVar("T")


class Transactions:
    """Runs verbs."""

    def __init__(
        self,
        database: Database,
        namespace: str,
        *,
        clock: Clock,
        ids: IdSource,
        rng: random.Random,
        policy: Policy | None = None,
        timeout_s: float = 5.0,
        publish_timeout_s: float = 10.0,
    ) -> None:
        self.keys = Keyspace(namespace)
        self.policy = policy or Policy()
        self.routing = RoutingTables(self.keys, clock)
        self._totals = totals.Totals(self.keys, clock)
        self._busiest = keytotals.Busiest()
        self._database = database
        self._clock = clock
        self._ids = ids
        self._rng = rng
        self._timeout_s = timeout_s
        self._publish_timeout_s = publish_timeout_s
        client = ids()
        tokens = CommitTokens(lambda slot: self.keys.token(client, slot))
        self._retry = Retry(database, clock, tokens, rng)
        self._claims = count(1)
        self._graves = deadletter.Graves(self.keys, self.routing, self.policy, ids)
        self._contention: dict[tuple[str, ...], Contention] = {}
        #: How often a rival's claim was faster, since the engine was made.
        self.lost_races = 0

    def _now(self) -> int:
        return self._clock.wall_ms()

    def _read(self, verb: Callable[[Transaction], T]) -> T:
        return self._retry.read(verb, timeout_s=self._timeout_s)

    def _write(
        self,
        verb: Callable[[Transaction, Tally], T],
        timeout_s: float | None = None,
        on_conflict: Callable[[], None] | None = None,
    ) -> T:
        share, tally = self._totals.due(), Tally()

        def body(tr: Transaction) -> T:
            nonlocal tally
            tally = Tally()
            result = verb(tr, tally)
            tally.write(tr, self.keys)
            if share is not None:
                share.join(tr, tally.events)
            return result

        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            result = self._retry(body, timeout_s=timeout_s, on_conflict=on_conflict)
        except BaseException:
            if share is not None:
                share.failed()
            raise
        if share is not None:
            share.committed(tally.events)
        elif tally.events:
            self._totals.note(tally.events)
        return result
