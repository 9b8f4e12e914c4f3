"""A session of this process: a state machine without a thread.

Model. A session is *open* until :meth:`ClientSession.close`, or until a process fences it; then it is *lost* for good,
and the owner opens another one, which inherits nothing. Two threads maintain a session (``session_threads.py``), by
steps of their own (``duty_cycle.py``).

A claim is *under way* from before its transaction begins until its messages are recorded as known. A claim that ends in
between (the answer was lost, the commit may still succeed, an exception came out of a signal handler at any line) is
*suspect*: the duties thread, or the next claim, makes sure that it holds nothing and never will (``Sessions.recover``).
Nothing here takes a lock, so no exception can leave one behind; single operations of dictionaries and sets are atomic.

A claim that is given up does not commit any more, unless its commit was already sent; then its recovery releases what
it leased. A consumer that ends gives up the claims that are under way for it. What these and the suspect claims hold is
released before another consumer becomes active (``single.py``).

A demand in a line of rivals (``line_member.py``) is under way like a claim, from its join until its owner has collected
what it was granted, or has left; each look of the owner shows that it still is. If the owner stops looking (after an
exception, or with its thread), the demand becomes suspect, like a claim that lasts too long, and so ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling.line import Standing, Waiter
from kombu_fdb.engine.stored.session import LEASES_PER_CLAIM
from kombu_fdb.errors import CommitUnknown, KombuFDBError, SessionLost
from kombu_fdb.model import ClaimTerms, Delivery, Demand, Lease, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.plural import plural
from kombu_fdb.settings.options import Options

logger = logging.getLogger(__name__)

#: How many queues a heartbeat shows.
MOST_CONSUMED = 100
#: A claim lasts no longer than its deadline; after this many times that, it no longer counts as under way.
CLAIM_TIMEOUTS = 3
#: How many ended demands one join clears.
MOST_CLEARED = 100


class Threads(Protocol):
    """The threads that maintain a session."""

    def ring(self) -> None:
        """Have the duties done soon. Never blocks."""

    def end(self) -> None:
        """Have them end. Never blocks."""

    def join(self) -> None:
        """Wait for their end, but not for long."""


@dataclass(slots=True)
class _Underway:
    """A claim or demand that is under way. A look updates this object only, so one that was given up stays given up.

    ``tags``: the consumers for which it claims, where only one is active.
    """

    seen_s: float
    tags: Collection[str] = ()


class ClientSession:
    """One session. Thread-safe."""

    def __init__(self, engine: Engine, options: Options, session_id: SessionId, threads: Threads, clock: Clock) -> None:
        self.pid = os.getpid()
        self.session_id = session_id
        self.lost = False
        #: Leases that this process has and knows of.
        self.known: set[Lease] = set()
        #: Which queues each consumer of this process consumes, for operators who look at the sessions.
        self.consumed: dict[object, Collection[str]] = {}
        self.threads = threads
        self._engine = engine
        self._options = options
        #: Each claim that is under way, by the first number of its leases, as last seen.
        self._claims: dict[int, _Underway] = {}
        #: Claims that have ended with an unknown outcome.
        self._suspects: dict[int, _Underway] = {}
        #: Demands that have ended for good: the next join clears their rows.
        self._over: set[int] = set()
        self._clock = clock

    def close(self) -> None:
        """Stop the threads, and release whatever is still held. Raises a ``StoreError``."""
        self.stop()
        if self.lost:
            return
        held = self._engine.sessions.close(self.session_id)
        if held:
            logger.info("Restoring %d unacknowledged message(s)", held)

    def stop(self) -> None:
        """Have the threads end, and wait for them. The session stays open until it is closed, or fenced by others."""
        self.threads.end()
        self.threads.join()

    @property
    def queues(self) -> list[str]:
        """The queues that this session consumes, up to :data:`MOST_CONSUMED`."""
        return sorted({queue for queues in list(self.consumed.values()) for queue in queues})[:MOST_CONSUMED]

    # -- claiming --------------------------------------------------------------------------------------------------

    def claim(
        self,
        queues: Sequence[str],
        limit: int,
        *,
        no_ack: Collection[str] = (),
        acks: Sequence[Lease] = (),
        consumers: Mapping[str, str] | None = None,
        gives_way: bool = False,
        stands: Callable[[Collection[str]], bool] = lambda _: True,
        hand: list[Delivery] | None = None,
    ) -> list[Delivery]:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.claim` for this session. ``acks`` must be its own.

        First releases what an earlier claim of unknown outcome may have leased. Takes no lock, so each thread has its
        full deadline, however many threads claim. Raises ``Outrun`` also if the claim was given up before its commit.

        ``stands``: as in ``ClaimTerms``; false if one of the ``consumers`` has ended, as :meth:`end_consumers` can't
        give up a claim that begins later.

        ``hand``: an empty list for what is found, so that the caller knows what to release even if a signal handler
        raises between the end of this call and the caller's next line.
        """
        hand = [] if hand is None else hand
        first = self._engine.messages.reserve()
        underway = self._claims[first] = _Underway(self._clock.monotonic(), (consumers or {}).values())
        try:
            if self._suspects:
                self.recover()
            found = self._engine.messages.claim(
                self.session_id,
                queues,
                limit,
                terms=ClaimTerms(
                    no_ack,
                    acks,
                    consumers or {},
                    first,
                    gives_way,
                    lambda single: first in self._claims and stands(single),
                ),
            )
            self.known.update([each.lease for each in found if each.queue not in no_ack])
            hand.extend(found)
            self._conclude(first, hand, underway)
            return hand
        except BaseException as error:  # the caller's too: a signal handler's, gevent's timeout
            self._failed(first, error, hand, underway)
            self._claims.pop(first, None)
            raise

    def _conclude(self, first: int, hand: list[Delivery], underway: _Underway | None = None) -> None:
        """Keep what a claim brought, unless it was given up: because it took too long, or its consumer has ended."""
        if self._claims.pop(first, None) is None:
            self.give_up(first, underway)
            hand.clear()

    def _failed(
        self, first: int, error: BaseException, hand: list[Delivery], underway: _Underway | None = None
    ) -> None:
        """Give up a claim or demand of unknown outcome; if the session was fenced, note that it is lost."""
        if isinstance(error, SessionLost):
            self.lose()
            self._claims.pop(first, None)
        elif not isinstance(error, KombuFDBError) or isinstance(error, CommitUnknown):
            self.give_up(first, underway)
            hand.clear()

    def give_up(self, first: int, underway: _Underway | None = None) -> None:
        """Give up a claim that may have leased, or may yet, unknown messages. Never blocks; for finalizers, too."""
        self._suspects[first] = underway or self._claims.get(first) or _Underway(self._clock.monotonic())
        self._claims.pop(first, None)  # only now: a claim that ends meanwhile sees that it was given up
        self.threads.ring()

    # -- in a line of rivals -----------------------------------------------------------------------------------------

    def demand(self, line: bytes, want: int) -> Demand:
        """Make the demand to :meth:`join` with, so that the caller can give it up whatever interrupts the join."""
        return Demand(line, self.session_id, self._engine.messages.reserve(), min(want, LEASES_PER_CLAIM))

    def join(self, demand: Demand, queues: Sequence[str], acks: Sequence[Lease]) -> None:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.join` for this session."""
        self.recover()
        self._claims[demand.first] = _Underway(self._clock.monotonic())
        over = list(self._over)[:MOST_CLEARED]
        try:
            self._engine.messages.join(demand, acks, queues=queues, over=over)
            self._over.difference_update(over)
        except BaseException as error:
            self._failed(demand.first, error, [])
            self._claims.pop(demand.first, None)
            raise

    def look(self, demand: Demand, hand: list[Delivery], *, fired: bool = False) -> Standing:
        """How the demand stands, and what it was granted; ``hand`` as in :meth:`claim`."""
        underway = self._claims.get(demand.first)
        if underway is not None:
            underway.seen_s = self._clock.monotonic()
        try:
            standing, found = self._engine.messages.look(demand, fired=fired)
            if not standing.waits:
                self._receive(demand, found, hand)
            return standing
        except BaseException as error:
            self._failed(demand.first, error, hand)
            raise

    def glance(
        self, consumers: Sequence[tuple[str, str]], keys: Sequence[bytes], demand: Demand | None
    ) -> tuple[list[tuple[str, str]], dict[bytes, bytes | None]]:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.glance` of the owner of this demand, if it has one."""
        underway = None if demand is None else self._claims.get(demand.first)
        if underway is not None:
            underway.seen_s = self._clock.monotonic()
        try:
            return self._engine.messages.glance(self.session_id, consumers, keys)
        except SessionLost:
            self.lose()
            raise

    def serve(
        self,
        demand: Demand,
        queues: Sequence[str],
        rows: Sequence[Waiter],
        hand: list[Delivery],
        patience: Callable[[], float],
    ) -> Served:
        """Claim for the line; ``hand`` as in :meth:`claim`."""
        try:
            served = self._engine.messages.serve(demand, queues, rows, patience)
            if served.deliveries:
                self._receive(demand, served.deliveries, hand)
            return served
        except BaseException as error:
            self._failed(demand.first, error, hand)
            raise

    def _receive(self, demand: Demand, found: Sequence[Delivery], hand: list[Delivery]) -> None:
        self.known.update([each.lease for each in found])
        hand.extend(found)
        self._conclude(demand.first, hand)
        if demand.first not in self._suspects:
            self._over.add(demand.first)

    def leave(self, demand: Demand, hand: list[Delivery]) -> None:
        """Leave the line; what was granted before is put into ``hand``, as in :meth:`claim`."""
        try:
            if self._engine.messages.leave(demand):
                self.look(demand, hand, fired=True)
            elif self._claims.pop(demand.first, None) is not None:
                self._over.add(demand.first)
        except BaseException as error:
            self._failed(demand.first, error, hand)
            raise

    def end_consumers(self, tags: Collection[str]) -> None:
        """End the claims of these consumers before another one becomes active: after that, they hold nothing.

        Raises a ``StoreError``: try again.
        """
        for first, underway in list(self._claims.items()):
            if not set(tags).isdisjoint(underway.tags):
                self.give_up(first, underway)
        with suppress(SessionLost):  # then the session's end makes room for others
            self.recover()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Release what claims of unknown outcome have leased.

        Raises ``SessionLost``, or a ``StoreError``: the next call tries again.
        """
        for first in list(self._suspects):
            try:
                self._engine.sessions.recover(self.session_id, first)
            except SessionLost:
                self.lose()
                raise
            self._suspects.pop(first, None)
            block = range(first, first + LEASES_PER_CLAIM)
            self.known.difference_update([lease for lease in list(self.known) if lease.number in block])

    def watch_claims(self) -> None:
        """Recover, also from claims under way for longer than they can last, which two exceptions at once have ended.

        For the duties thread. Raises what :meth:`recover` raises.
        """
        longest_s = CLAIM_TIMEOUTS * self._options.operation_timeout
        for first, underway in list(self._claims.items()):
            if self._clock.monotonic() - underway.seen_s > longest_s and self._claims.pop(first, None) is not None:
                self._suspects[first] = underway
        self.recover()

    def lose(self) -> None:
        """Note that the session was fenced."""
        if self.lost:
            return
        self.lost = True
        self.threads.end()
        logger.warning(
            "this process was silent for longer than session_ttl (%g s) and was declared dead: what it held (%s) was "
            "released, and what it has already started may run twice",
            self._options.session_ttl,
            plural(len(self.known), "message"),
        )
