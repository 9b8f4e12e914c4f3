"""A session of this process: a state machine without a thread.

Model. A membership is *open* until :meth:`Membership.close`, or until somebody fenced it; then it is *lost*, and stays
so: the owner opens another one. All states are one way. Two threads keep it (``session_threads.py``), by steps of their
own (``turns.py``).

A claim is *under way* from before its transaction begins until its messages are recorded as known. One that ends in
between (the answer was lost, the commit may still land, an exception came out of a signal handler at any line) is
*suspect*: the duties thread, or the next claim, makes sure that it holds nothing and never will (``Sessions.recover``).
Nothing here takes a lock, so no exception can leave one behind; single operations of dictionaries and sets are atomic.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.stored.session import LEASES_PER_CLAIM
from kombu_fdb.errors import CommitUnknown, KombuFDBError, SessionLost
from kombu_fdb.model import ClaimTerms, Delivery, Lease, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.plural import plural
from kombu_fdb.settings.options import Options

__all__ = ["Membership", "Threads"]

logger = logging.getLogger(__name__)

#: Queues shown by a heartbeat at most.
MOST_CONSUMED = 100
#: A claim lasts no longer than its deadline; after so many of those it is not under way any more.
CLAIM_TIMEOUTS = 3


class Threads(Protocol):
    """Those that keep a session."""

    def ring(self) -> None:
        """Have the duties done soon. Never blocks."""

    def end(self) -> None:
        """They shall end. Never blocks."""

    def join(self) -> None:
        """Wait for that, but not for long."""


class Membership:
    """One session. Thread-safe."""

    def __init__(self, engine: Engine, options: Options, session_id: SessionId, threads: Threads, clock: Clock) -> None:
        self.pid = os.getpid()
        self.session_id = session_id
        self.lost = False
        #: Leases that this process has and knows of.
        self.known: set[Lease] = set()
        #: What each consumer of this process consumes, for those who look at the sessions.
        self.consumed: dict[object, Collection[str]] = {}
        self.threads = threads
        self._engine = engine
        self._options = options
        #: By the first number of its leases, since when each claim is under way.
        self._claims: dict[int, float] = {}
        #: Claims that have ended without anybody knowing how.
        self._suspects: set[int] = set()
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
        """Have the threads end, and wait for them. The session stands until it is closed, or taken for dead."""
        self.threads.end()
        self.threads.join()

    @property
    def queues(self) -> list[str]:
        """What is consumed in its name, or the first :data:`MOST_CONSUMED` of that."""
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
        hand: list[Delivery] | None = None,
    ) -> list[Delivery]:
        """:meth:`~kombu_fdb.engine.facade.messages.Messages.claim` for this session. ``acks`` must be its own.

        Hands back first what an earlier claim may have leased unknown to anybody. Takes no lock: each call ends by its
        own deadline, however many threads claim.

        ``hand``: an empty list for what is found. Who brings it knows what he has to release, also when an exception
        out of a signal handler strikes between the end of this call and the next line of his.
        """
        hand = [] if hand is None else hand
        self.recover()
        first = self._engine.messages.reserve()
        self._claims[first] = self._clock.monotonic()
        try:
            found = self._engine.messages.claim(
                self.session_id,
                queues,
                limit,
                terms=ClaimTerms(no_ack=no_ack, acks=acks, consumers=consumers or {}, first=first),
            )
            self.known.update([each.lease for each in found if each.queue not in no_ack])
            hand.extend(found)
            if self._claims.pop(first, None) is None:  # it took so long that it was given up
                self._suspect(first)
                hand.clear()
            return hand
        except SessionLost:
            self._claims.pop(first, None)
            self.lose()
            raise
        except BaseException as error:  # of the caller's too: a signal handler's, gevent's timeout
            if not isinstance(error, KombuFDBError) or isinstance(error, CommitUnknown):
                self._suspect(first)
                hand.clear()
            self._claims.pop(first, None)
            raise

    def _suspect(self, first: int) -> None:
        """A claim has leased what nobody knows of, or may still."""
        self._suspects.add(first)
        self.threads.ring()

    def recover(self) -> None:
        """Hand back what claims of unknown outcome have leased.

        Raises ``SessionLost``, or a ``StoreError``: it is tried again.
        """
        for first in list(self._suspects):
            try:
                self._engine.sessions.recover(self.session_id, first)
            except SessionLost:
                self.lose()
                raise
            self._suspects.discard(first)
            block = range(first, first + LEASES_PER_CLAIM)
            self.known.difference_update([lease for lease in list(self.known) if lease.number in block])

    def watch_claims(self) -> None:
        """Recover, also claims that are longer under way than they can last: ended by two exceptions at once.

        For the duties thread. Raises as :meth:`recover`.
        """
        longest_s = CLAIM_TIMEOUTS * self._options.operation_timeout
        for first, began_s in list(self._claims.items()):
            if self._clock.monotonic() - began_s > longest_s and self._claims.pop(first, None) is not None:
                self._suspects.add(first)
        self.recover()

    def lose(self) -> None:
        """The session was fenced."""
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
