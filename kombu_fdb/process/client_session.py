"""A session of this process: a state machine without a thread.

Model. A session is *open* until :meth:`ClientSession.close`, or until a process fences it; then it is *lost* for good,
and the owner opens another one, which inherits nothing. Two threads maintain a session (``session_threads.py``,
``duty_cycle.py``).

A claim is *under way* from before its transaction begins until its messages are in the list that its owner passed to
it. From then on the owner is responsible for them (``transport/consuming/dispatch.py``, ``api/consumer.py``). A claim
that ends in between (the answer was lost, the commit may still succeed, a signal handler raised an exception) is
*suspect*, and empties that list. The duties thread, or the next claim, makes sure that it holds nothing and never will
(``Sessions.recover``). Nothing here takes a lock, so no exception can leave one behind; single operations of
dictionaries and sets are atomic.

A claim that is given up does not commit, unless its commit has been sent; then its recovery releases what it has
leased. A consumer that ends gives up its claims that are under way. What these and the suspect claims hold is released
before another consumer becomes active (``single.py``).

A demand in a wait queue (``combiner_client.py``) is under way like a claim, from its join until its owner has collected
what it was granted, or has left. Each look by the owner confirms that. If the owner stops looking (after an exception,
or with its thread), the demand becomes suspect, like a claim that lasts too long, and so ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, compress, count

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling.wait_queue import Standing, Waiting
from kombu_fdb.engine.session import LEASES_PER_CLAIM
from kombu_fdb.errors import CommitUnknown, KombuFDBError, SessionLost
from kombu_fdb.model import ClaimTerms, Delivery, Demand, Lease, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.settings.options import Options

logger = logging.getLogger(__name__)

#: How many bytes of queues' names a heartbeat shows: about a thousand queues.
MOST_CONSUMED_BYTES = 25_000
#: A claim lasts no longer than its deadline; after this many deadlines, it no longer counts as under way.
CLAIM_TIMEOUTS = 3
#: How many ended demands one join clears.
MOST_CLEARED = 100


@dataclass(slots=True)
class _Claim:
    """A claim or demand that is under way. A look updates only this object, so one that was given up stays given up.

    ``into``: its owner's list, initially empty. ``tags``: the consumers for which it claims, where only one may be
    active.
    """

    into: list[Delivery]
    seen_s: float
    tags: Collection[str] = ()


class ClientSession:
    """One session. Thread-safe."""

    def __init__(self, engine: Engine, options: Options, session_id: SessionId, bell: Bell, clock: Clock) -> None:
        """``bell`` wakes its duties thread."""
        self.pid = os.getpid()
        self.session_id = session_id
        self.lost = False
        #: The leases that this process knows it has.
        self.known: set[Lease] = set()
        #: Which queues each consumer of this process consumes, for operators who look at the sessions.
        self.consumed: dict[object, Collection[str]] = {}
        self.bell = bell
        #: The threads that maintain it, and whether they should end.
        self.threads: list[threading.Thread] = []
        self.ended = threading.Event()
        self._engine = engine
        self._options = options
        #: Each claim that is under way, by its first lease number, as last seen.
        self._claims: dict[int, _Claim] = {}
        #: Claims that have ended with an unknown outcome, each with a serial number: one that is noted again during its
        #: recovery must be recovered again, as its commit may have come in between.
        self._suspects: set[tuple[int, int]] = set()
        self._notes = count()
        #: Demands that have ended for good; the next join clears their rows.
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
        """Have the threads end, and wait for them briefly.

        The session stays open until it is closed, or fenced by others.
        """
        self._end_threads()
        patience, began = self._engine.transactions.patience, self._clock.monotonic()
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for thread in others:
            left_s = began + self._options.operation_timeout - self._clock.monotonic()
            thread.join(timeout=patience.allow(max(left_s, 0.0)))
        if any(thread.is_alive() for thread in others):
            patience.wasted(self._clock.monotonic() - began)

    def _end_threads(self) -> None:
        self.ended.set()
        self.bell.ring()

    @property
    def queues(self) -> list[str]:
        """The queues that this session consumes, up to :data:`MOST_CONSUMED_BYTES`."""
        names = sorted({queue for queues in list(self.consumed.values()) for queue in queues})
        sizes = accumulate(len(name.encode()) for name in names)
        return [name for name, size in zip(names, sizes, strict=True) if size <= MOST_CONSUMED_BYTES]

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
        into: list[Delivery] | None = None,
    ) -> list[Delivery]:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.claim` for this session. ``acks`` must be its own.

        First releases what an earlier claim of unknown outcome may have leased. Takes no lock, so each thread has its
        full deadline, however many threads claim. Also raises ``Outrun`` if the claim was given up before its commit.

        ``stands``: as in ``ClaimTerms``. It must return false once one of the ``consumers`` has ended, as
        :meth:`end_consumers` can't give up a claim that begins later.

        ``into``: the owner's empty list for the messages, which is returned.
        """
        first = self._engine.messages.reserve()
        tags = (consumers or {}).values()
        claim = self._claims[first] = _Claim([] if into is None else into, self._clock.monotonic(), tags)
        try:
            if self._suspects:
                self.recover()
            deliveries = self._engine.messages.claim(
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
            self._conclude(first, claim, deliveries, no_ack)
            return claim.into
        except BaseException as error:  # also from outside: a signal handler's, gevent's timeout
            self._failed(first, claim, error)
            self._claims.pop(first, None)
            raise

    def _conclude(
        self, first: int, claim: _Claim, deliveries: Sequence[Delivery], no_ack: Collection[str] = ()
    ) -> bool:
        """Keep a claim's messages. False if it was given up: it took too long, or its consumer has ended."""
        self.known.update([each.lease for each in deliveries if each.queue not in no_ack])
        claim.into.extend(deliveries)
        if self._claims.pop(first, None) is not None:
            return True
        self._suspect(first)
        claim.into.clear()
        return False

    def _failed(self, first: int, claim: _Claim | None, error: BaseException) -> None:
        """Give up a claim or demand of unknown outcome; if the session was fenced, note that it is lost."""
        if isinstance(error, SessionLost):
            self.lose()
            self._claims.pop(first, None)
        elif claim is not None and (not isinstance(error, KombuFDBError) or isinstance(error, CommitUnknown)):
            self._suspect(first)
            claim.into.clear()

    def give_up(self, first: int) -> None:
        """Give up a claim, if it is still under way: the owner of an ended one may have used its messages.

        If it ends at this moment, a single call into C decides, as in ``move`` (``interruption.py``). Never blocks; for
        finalizers, too.
        """
        self._suspects.update(compress([(first, next(self._notes))], map(self._claims.pop, [first], [None])))
        self.bell.ring()

    def _suspect(self, first: int) -> None:
        """Note that a claim may have leased, or may yet lease, unknown messages."""
        self._suspects.add((first, next(self._notes)))
        self._claims.pop(first, None)  # only now: a claim that has just ended sees that it was given up
        self.bell.ring()

    # -- in a wait queue -----------------------------------------------------------------------------------------

    def demand(self, wait_queue: bytes, want: int) -> Demand:
        """Make the demand for :meth:`join`, so that the caller can give it up whatever interrupts the join."""
        return Demand(wait_queue, self.session_id, self._engine.messages.reserve(), min(want, LEASES_PER_CLAIM))

    def join(self, demand: Demand, queues: Sequence[str], acks: Sequence[Lease], into: list[Delivery]) -> None:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.join` for this session.

        ``into``: as in :meth:`claim`; the methods below put the demand's messages there.
        """
        self.recover()
        claim = self._claims[demand.first] = _Claim(into, self._clock.monotonic())
        over = list(self._over)[:MOST_CLEARED]
        try:
            self._engine.messages.join(demand, acks, queues=queues, over=over)
            self._over.difference_update(over)
            if demand.first not in self._claims:  # it was given up, and perhaps recovered, before this join
                self._suspect(demand.first)
        except BaseException as error:
            self._failed(demand.first, claim, error)
            self._claims.pop(demand.first, None)
            raise

    def _seen(self, demand: Demand) -> _Claim | None:
        """Note that its owner has looked. None if it has ended: its owner gets no more messages.

        An exception may have kept its owner from noting that.
        """
        claim = self._claims.get(demand.first)
        if claim is not None:
            claim.seen_s = self._clock.monotonic()
        return claim

    def look(self, demand: Demand, *, fired: bool = False) -> Standing:
        """The demand's standing in its wait queue."""
        claim = self._seen(demand)
        try:
            standing, deliveries = self._engine.messages.look(demand, fired=fired)
            if not standing.waits:
                self._receive(demand, claim, deliveries)
            return standing
        except BaseException as error:
            self._failed(demand.first, claim, error)
            raise

    def glance(
        self, consumers: Sequence[tuple[str, str]], keys: Sequence[bytes], demand: Demand | None
    ) -> tuple[list[tuple[str, str]], dict[bytes, bytes | None]]:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.glance` for the owner of this demand, if it has one."""
        if demand is not None:
            self._seen(demand)
        try:
            return self._engine.messages.glance(self.session_id, consumers, keys)
        except SessionLost:
            self.lose()
            raise

    def serve(self, demand: Demand, queues: Sequence[str], seen: Waiting, patience: Callable[[], float]) -> Served:
        """Claim for the wait queue."""
        claim = self._seen(demand)
        try:
            served = self._engine.messages.serve(demand, queues, seen, patience)
            if served.deliveries:
                self._receive(demand, claim, served.deliveries)
            return served
        except BaseException as error:
            self._failed(demand.first, claim, error)
            raise

    def _receive(self, demand: Demand, claim: _Claim | None, deliveries: Sequence[Delivery]) -> None:
        if claim is not None and self._conclude(demand.first, claim, deliveries):
            self._over.add(demand.first)

    def leave(self, demand: Demand) -> None:
        """Leave the wait queue, with what was granted before."""
        claim = self._seen(demand)
        try:
            if self._engine.messages.leave(demand):
                self.look(demand, fired=True)
            elif self._claims.pop(demand.first, None) is not None:
                self._over.add(demand.first)
        except BaseException as error:
            self._failed(demand.first, claim, error)
            raise

    def end_consumers(self, tags: Collection[str]) -> None:
        """End the claims of these consumers before another becomes active: afterwards, they hold nothing.

        Raises a ``StoreError``: try again.
        """
        for first, claim in list(self._claims.items()):
            if not set(tags).isdisjoint(claim.tags):
                self.give_up(first)
        with suppress(SessionLost):  # then the session's end lets others become active
            self.recover()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Release what claims of unknown outcome have leased.

        Raises ``SessionLost``, or a ``StoreError``: the next call tries again.
        """
        for suspect in list(self._suspects):
            first, _ = suspect
            try:
                self._engine.sessions.recover(self.session_id, first)
            except SessionLost:
                self.lose()
                raise
            block = range(first, first + LEASES_PER_CLAIM)
            self.known.difference_update([lease for lease in list(self.known) if lease.number in block])
            self._suspects.discard(suspect)

    def watch_claims(self) -> None:
        """Recover, also from claims under way for too long, which two exceptions in a row must have ended.

        For the duties thread. Raises what :meth:`recover` raises.
        """
        longest_s = CLAIM_TIMEOUTS * self._options.operation_timeout
        for first, claim in list(self._claims.items()):
            if self._clock.monotonic() - claim.seen_s > longest_s:
                self.give_up(first)
        self.recover()

    def lose(self) -> None:
        """Note that the session was fenced."""
        if self.lost:
            return
        self.lost = True
        self._end_threads()
        logger.warning(
            "this process was silent for longer than session_ttl (%g s) and was declared dead: what it held (%s) was "
            "released, and what it has started, or handed to its pool, may run twice",
            self._options.session_ttl,
            plural(len(self.known), "message"),
        )
