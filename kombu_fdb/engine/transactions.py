"""What the engine is built on: one namespace of one store, and how a verb runs in a transaction there.

A verb is a function of a :class:`~.stored.work.Work`. The groups of verbs (``facade``) share one
:class:`Transactions`. A group's method that is one transaction is one line, which names the verb: ``counts =
read(inspect.counts)``. A method with more to do is written out.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kombu_fdb.engine import copies, parts
from kombu_fdb.engine.metrics import totals
from kombu_fdb.engine.scheduling.key_limits import Sightings
from kombu_fdb.engine.work import Effects, Environment, Event, Work
from kombu_fdb.errors import KombuFDBError, MessageTooLarge, StoreFull
from kombu_fdb.keyspace.layout import Keyspace, Range
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.protocol import Database, KeyValue, Transaction
from kombu_fdb.store.retry import Doubt, Patience, Retry

P = ParamSpec("P")
T = TypeVar("T")

#: The errors that one message may cause and so hold up others: it is too large, or its bytes make no sense.
IN_THE_WAY = (KombuFDBError, ArithmeticError, LookupError, TypeError, ValueError, struct.error)


class Transactions:
    """Runs verbs."""

    def __init__(self, database: Database, namespace: str, environment: Environment) -> None:
        self.environment = environment
        self.clock, self.ids, self.rng = environment.clock, environment.ids, environment.rng
        self.keys = Keyspace(namespace)
        self.routing = RoutingTables(self.keys, self.clock)
        self.totals = totals.PendingTotals(self.keys, self.clock)
        self.sightings: Sightings = {}
        #: As in ``Window``.
        self.fair_queues: set[str] = set()
        client = self.ids()
        self.retry = Retry(
            database, self.clock, self.rng, Patience(self.clock), lambda slot: self.keys.token(client, slot)
        )
        #: Whether the outcome of a commit may be unknown.
        self.may_be_unknown = database.commit_may_be_unknown
        #: Whether writers wait for each other, so that none has to run again: then consumers need no wait queue.
        self.writers_take_turns = database.writers_take_turns
        self.patience = self.retry.patience
        #: Called when a full disk has refused a write. Returns whether to try the write again.
        self.make_room: Callable[[], bool] = lambda: False
        #: Batches of the duties' steps, by name.
        self._batches: dict[str, parts.AdaptiveBatch] = {}
        self._chunks = parts.AdaptiveBatch(copies.CHUNKS_PER_TRANSACTION)

    def share_patience(self, patience: Patience) -> None:
        """Share another engine's patience: how long the process may wait when it ends."""
        self.patience = self.retry.patience = patience

    def as_one(self, call: Callable[[], T]) -> T:
        """Call ``call``, whose verbs share one verb's deadline, and return its result. Guarantee: BOUNDED."""
        return self.patience.within(self.environment.call_s, call)

    def now(self) -> int:
        return self.clock.wall_ms()

    def check_size(self, payload: bytes) -> None:
        """Raises ``MessageTooLarge`` for a payload over ``max_message_size``."""
        if len(payload) > self.environment.max_message_size:
            raise MessageTooLarge(
                size=len(payload),
                max_message_size=self.environment.max_message_size,
                fix="Store the data elsewhere and send a reference, or raise max_message_size",
            )

    def read(self, verb: Callable[[Work], T]) -> T:
        """Run a verb that only reads."""
        return self.retry.read(lambda tr: verb(self.work(tr, Effects())), timeout_s=self.environment.call_s)

    def scan(self, whole: Range, most: int) -> Iterator[KeyValue]:
        """All rows of a range, up to ``most`` of them in each transaction. At snapshot."""
        begin, end = whole
        while True:
            rows = self.read(partial(_rows, begin, end, most))
            yield from rows
            if len(rows) < most:
                return
            begin = rows[-1][0] + b"\x00"

    def work(self, tr: Transaction, effects: Effects) -> Work:
        """The ``Work`` of one run in ``tr``."""
        return Work(tr, self.keys, self.routing, self.environment, self.clock.wall_ms(), effects)

    def part(self, verb: Callable[Concatenate[Work, int, P], T], most: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a step with as many messages as fit into its transaction, or with fewer, down to one, if one fails it."""
        name = f"{verb.__module__}.{verb.__qualname__}"
        batch = self._batches.setdefault(name, parts.AdaptiveBatch(most, halved_by=IN_THE_WAY))
        return batch.run(lambda limit: self.write(lambda work: verb(work, limit, *args, **kwargs)))

    def write(
        self,
        verb: Callable[[Work], T],
        timeout_s: float | None = None,
        on_conflict: Callable[[], None] | None = None,
        doubt: Doubt[T] | None = None,
        now_ms: int | None = None,
    ) -> T:
        """Run a verb until it commits, within ``timeout_s``, and write its effects.

        ``now_ms``: one moment for all runs; None: each run has its own.
        """
        timeout_s = self.environment.call_s if timeout_s is None else timeout_s
        deadline = self.clock.monotonic() + timeout_s
        events: dict[Event, int] = {}
        share: dict[Event, int] | None = None
        is_counted = False

        def body(tr: Transaction) -> T:
            nonlocal events, is_counted
            effects = Effects()
            events = effects.events
            moment_ms = self.clock.wall_ms() if now_ms is None else now_ms
            result = verb(Work(tr, self.keys, self.routing, self.environment, moment_ms, effects))
            effects.write(tr, self.keys)
            if share is not None:
                is_counted = not tr.read_only
                if is_counted:
                    self.totals.write(tr, Counter(events) + Counter(share))
            return result

        while True:
            is_counted = False
            share = None if self.clock.monotonic() < self.totals.next_s else self.totals.share()
            try:
                if self.may_be_unknown:
                    result = self.retry(body, timeout_s=timeout_s, on_conflict=on_conflict, doubt=doubt)
                else:
                    result = self.retry.repeat(body, timeout_s=timeout_s, on_conflict=on_conflict)
            except BaseException as error:
                if share:  # the transaction failed, but its share was counted
                    self.totals.note(share)
                if not self._is_mended(error, deadline, doubt):
                    raise
                timeout_s = deadline - self.clock.monotonic()
            else:
                for counted in () if is_counted else (events, share):
                    if counted:
                        self.totals.note(counted)
                return result

    def _is_mended(self, error: BaseException, deadline: float, doubt: Doubt[Any] | None) -> bool:
        """Whether the cause of a failure is gone: a full disk has room again, or a large message has its copies."""
        if isinstance(error, StoreFull):
            # Other processes may use up the room as quickly as it is made.
            is_late = self.clock.monotonic() >= deadline or not self.patience.allow(1.0)
            return not (error.fills or error.moves or is_late) and self.make_room()
        if not isinstance(error, copies.CopiesMissing):
            return False
        if doubt is not None:
            doubt.forget()  # a run that asks for copies has seen that no earlier run committed
        self._copy(error, deadline)
        return True

    def _copy(self, missing: copies.CopiesMissing, deadline: float) -> None:
        """Copy a message's chunks for the queues in which it is about to be buried."""
        for target in missing.targets:
            while not self._chunks.run(partial(self.copy_part, missing, target, self.ids(), deadline)):
                pass

    def copy_part(self, missing: copies.CopiesMissing, target: str, new_id: bytes, deadline: float, most: int) -> bool:
        return self.retry(
            lambda tr: copies.copy_part(self.work(tr, Effects()), missing, target, new_id, most),
            timeout_s=deadline - self.clock.monotonic(),
        )


def _rows(begin: bytes, end: bytes, most: int, work: Work) -> list[KeyValue]:
    return work.tr.get_range(begin, end, limit=most, snapshot=True)


# -- groups of verbs ---------------------------------------------------------------------------------------------------


class Verbs:
    """Verbs on one subject, each of which runs in transactions of ``run``."""

    def __init__(self, run: Transactions) -> None:
        self._run = run


def read(verb: Callable[Concatenate[Work, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of :class:`Verbs`: the verb, in a transaction that only reads."""

    @wraps(verb)
    def method(self: Verbs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run.read(lambda work: verb(work, *args, **kwargs))

    return method


def write(verb: Callable[Concatenate[Work, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of :class:`Verbs`: the verb, in a transaction that is repeated until it commits."""

    @wraps(verb)
    def method(self: Verbs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run.write(lambda work: verb(work, *args, **kwargs))

    return method
