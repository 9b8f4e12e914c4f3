"""Work: what a verb is given, whatever it does: one transaction, and all that is known around it."""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.engine.stored.effects import Effects
from kombu_fdb.engine.stored.policy import Policy
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.primitives.clock import IdSource
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.protocol import Transaction


class Work(NamedTuple):
    """One run of a verb in one transaction. A verb that has to run again gets another one."""

    tr: Transaction
    keys: Keyspace
    routing: RoutingTables
    policy: Policy
    ids: IdSource
    #: Wall clock: the same moment for all that this run does.
    now_ms: int
    #: What the run counts and whom it wakes; written at its end. A run that only looks has none to speak of.
    effects: Effects
    #: What would be dead-lettered rests instead: there is no room for the story of its death.
    rests: bool = False
