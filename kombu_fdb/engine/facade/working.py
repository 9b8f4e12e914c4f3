"""Working: the way of a message through the store, from its publication to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from kombu_fdb.engine.facade.looking import Looking
from kombu_fdb.engine.messages import again, claim, overflow, publish, settle, together
from kombu_fdb.engine.messages.bury import Cause
from kombu_fdb.engine.scheduling.contention import Contention
from kombu_fdb.engine.scheduling.window import Window
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.effects import CONFLICTS, CONTESTED, Effects, Event
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import CommitUnknown, KombuFDBError, MessageTooLarge, StoreError
from kombu_fdb.keyspace.layout import BUCKETS
from kombu_fdb.model import (
    ClaimTerms,
    Death,
    Delivery,
    Lease,
    Publication,
)
from kombu_fdb.primitives import ranges
from kombu_fdb.store.protocol import Transaction, Watch
from kombu_fdb.store.tokens import Doubt

__all__ = ["Working"]

logger = logging.getLogger(__name__)

#: How long a publisher tries to let the oldest of a full queue give way, in seconds.
SHED_TIMEOUT_S = 1.0
#: Estimates of rivals remembered at most.
MOST_ESTIMATES = 1000
NO_TERMS = ClaimTerms()


class Working(Looking):
    """The verbs of publishers and consumers."""

    def publish(self, publications: Sequence[Publication], *, timeout_s: float | None = None) -> list[list[str]]:
        """Route and store all of them in one transaction, in this order; all or none.

        Returns for each the queues it reached; an empty list is an unroutable message, which is dropped. Raises
        ``MessageTooLarge`` (nothing stored), ``ExchangeNotFound``, ``LimitExceeded`` if together they exceed what one
        transaction holds (see :data:`~kombu_fdb.engine.messages.publish.BATCH_BYTES`), ``CapacityExceeded`` (nothing
        stored), ``CommitUnknown``: published again by this process, they are stored once (``again.py``). Guarantee:
        DURABLE.
        """
        for publication in publications:
            self.check(publication)
        if together.gather(self, publications):
            return [self.route(each.exchange, each.routing_key) for each in publications]
        timeout_s = self._publish_timeout_s if timeout_s is None else timeout_s
        return self._publish_again(publications, timeout_s) if self.doubts else self._publish(publications, timeout_s)

    def _publish_again(self, publications: Sequence[Publication], timeout_s: float) -> list[list[str]]:
        """Those that an earlier call has stored count as published; the others are."""
        deadline = self._clock.monotonic() + timeout_s
        taken = [self.doubts.take(each) for each in publications]
        stored: list[list[str] | None] | None = None
        try:
            stored = self._resolve(taken, timeout_s)
            left = [each for each, reached in zip(publications, stored, strict=True) if reached is None]
            now = iter(self._publish(left, max(deadline - self._clock.monotonic(), 0.001)) if left else [])
            return [next(now) if reached is None else reached for reached in stored]
        except BaseException:
            for number, (publication, doubted) in enumerate(zip(publications, taken, strict=True)):
                # What was fenced, and published now, has a doubt of its own if it needs one.
                if doubted is not None and (stored is None or stored[number] is not None):
                    self.doubts.put_back(publication, doubted)
            raise

    def _resolve(self, taken: Sequence[again.Doubted | None], timeout_s: float) -> list[list[str] | None]:
        """For each where it is, if an earlier call has stored it. Raises ``CommitUnknown``: it can't be told now."""
        deadline = self._clock.monotonic() + timeout_s
        try:
            return [
                doubted.reached
                if doubted and self._retry.resolve(doubted.doubt, timeout_s=deadline - self._clock.monotonic())
                else None
                for doubted in taken
            ]
        except StoreError as error:
            if isinstance(error, CommitUnknown):
                raise
            raise CommitUnknown("it may be stored since an earlier call, and the store failed since") from error

    @contextmanager
    def atomically(self, verb: Callable[[Transaction], None]) -> Iterator[None]:
        """What this thread publishes inside of the block is stored when it ends, in one transaction with ``verb``.

        Only if the block ends without an exception, and ``verb`` raises none: else nothing is stored. ``verb`` may run
        several times and reads before anything is written. More than one transaction holds is published in front of it.
        Raises what ``publish`` raises.
        """
        with together.gathering(self) as gathered:
            yield
        *first, last = together.parts(gathered)
        for part in first:
            self._publish_again(part, self._publish_timeout_s)
        self._publish(last, verb=verb)

    def _publish(
        self,
        publications: Sequence[Publication],
        timeout_s: float | None = None,
        verb: Callable[[Transaction], None] | None = None,
    ) -> list[list[str]]:
        now_ms = self._clock.wall_ms()
        timeout_s = self._publish_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.monotonic() + timeout_s
        doubt: Doubt[publish.Published] = Doubt()
        named = publish.named(publications, self._ids)

        def body(work: Work) -> publish.Published:
            if verb is not None:
                verb(work.tr)
            return publish.publish(work._replace(now_ms=now_ms), named, beforehand=True)

        try:
            reached, overfull = self._write(body, timeout_s, doubt=doubt)
            for queue, own in overfull.items():
                self._shed(queue, own, deadline - self._clock.monotonic())
            return reached
        except BaseException:  # of the caller's too: a signal handler's, gevent's timeout
            if doubt.may_have_happened and verb is None:
                self.doubts.note(publications, doubt)
            raise

    def _shed(self, queue: str, own: overflow.Load, timeout_s: float) -> None:
        """Let the oldest give way. What fails here is left to the next publish and the duties: ours has happened."""
        attempts = count()

        def body(work: Work) -> None:
            if next(attempts) < overflow.ATTEMPTS:
                overflow.shed(work, queue, own)

        try:
            self._write(body, min(timeout_s, SHED_TIMEOUT_S))
        except KombuFDBError as error:
            logger.debug("the queue %r is over its maximum: %s", queue, error)

    def publish_in(
        self, tr: Transaction, publications: Sequence[Publication], *, stamped: int = 0
    ) -> tuple[list[list[str]], int]:
        """As ``publish``, in a transaction of the caller's, who commits it, or does not, and runs it again.

        ``stamped``: how many messages this transaction has from earlier calls; the new number is returned beside the
        queues reached. Raises what ``publish`` raises before a commit, and ``LimitExceeded`` past
        :data:`~kombu_fdb.engine.messages.publish.MOST_STAMPED` messages. What these messages are too much for a queue
        with ``drop-head`` gives way to the next publish, or by the duties. One that a queue refuses goes into all its
        dead-letter queues in this transaction, which has to hold it as often.
        """
        for publication in publications:
            self.check(publication)
        effects = Effects(stamped)
        reached, overfull = publish.publish(self._work(tr, effects), publications)
        effects.write(tr, self.keys)
        for queue in overfull:  # what is too much by now; these messages are not there before the caller commits
            self._shed(queue, overflow.Load(), self._timeout_s)
        return reached, effects.stamped

    def check(self, publication: Publication) -> None:
        """Raises ``MessageTooLarge``, and ``InvalidArgument`` or ``QueueError`` for what no store can hold."""
        ranges.check_publication(publication)
        if len(publication.payload) > self.policy.max_message_size:
            raise MessageTooLarge(
                size=len(publication.payload),
                max_message_size=self.policy.max_message_size,
                fix="Store the data elsewhere and send a reference, or raise max_message_size",
            )

    def claim(
        self, session_id: bytes, queues: Sequence[str], limit: int, *, terms: ClaimTerms = NO_TERMS
    ) -> list[Delivery]:
        """Lease up to ``limit`` ready messages of ``queues`` (in turn, from the first) to the session.

        Fewer if they are large: as many as one transaction holds (``room.py``), and at least one if there is one.
        ``terms.first``: what :meth:`reserve` returned, for a caller who may have to :meth:`recover` this claim. Raises
        ``SessionLost`` if the session was fenced: the caller opens another one. Guarantees: ONE-PLACE, ONE-OWNER;
        strict order while one consumer claims.
        """
        return self._windows.run(
            lambda most: self._claim(session_id, queues, most, terms), min(limit, session.LEASES_PER_CLAIM)
        )

    def _claim(self, session_id: bytes, queues: Sequence[str], limit: int, terms: ClaimTerms) -> list[Delivery]:
        contention = self._contention_of(queues)
        number = self.reserve() if terms.first is None else terms.first
        contention.begin()
        tried: list[Delivery] = []

        def body(work: Work) -> list[Delivery]:
            if terms.acks:
                settle.ack(work, terms.acks)
            window = Window(
                session_id,
                number,
                limit,
                slice=contention.next_slice(),
                first_door=self._rng.randrange(BUCKETS),
                sightings=self._sightings,
                consumers=terms.consumers,
            )
            tried[:] = claim.claim(work, queues, window, no_ack=terms.no_ack)
            return list(tried)

        def on_conflict() -> None:
            self.lost_races += 1
            self._totals.note(_beaten(queues[0], tried))
            contention.lost()

        return self._write(body, on_conflict=on_conflict)

    def reserve(self) -> int:
        """The number of the first lease of a claim that is to begin.

        One step of one counter, so that claims of several threads never share a number.
        """
        return next(self._claims) * session.LEASES_PER_CLAIM

    def _contention_of(self, queues: Sequence[str]) -> Contention:
        if len(self._contention) >= MOST_ESTIMATES:  # reply queues come and go; estimates are quickly made again
            self._contention.clear()
        return self._contention.setdefault(tuple(sorted(queues)), Contention(self._rng))

    def arm(
        self, queues: Sequence[str], session_id: bytes = b"", consumers: Mapping[str, str] | None = None
    ) -> list[Watch] | None:
        """Watches that fire when a message becomes ready in one of ``queues``; None if one is ready now.

        Of a queue whose active consumer is not among the session's ``consumers``: when that may have changed.
        """

        def body(work: Work) -> list[Watch] | None:
            return claim.arm(work, queues, session_id, consumers or {})

        return self._read(body)

    def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Delete these messages. False for each whose lease is lost: nothing was changed for it.

        This verb and the next two act on all of them in one transaction if it holds them, else in parts.
        """
        return self._settle(leases, settle.ack)

    def release(
        self, leases: Sequence[Lease], *, counted: bool = True, due_ms: int = 0, details: dict[str, Any] | None = None
    ) -> list[bool]:
        """Hand messages back: to their original position, or due at ``due_ms``.

        ``counted``: the attempt counts against the delivery limit, past which the message is dead-lettered; an
        unstarted message is handed back uncounted. ``details`` stand in that death's entry. False for each lost lease.
        """
        how = settle.Release(counted, due_ms, details)
        return self._settle(leases, lambda work, part: settle.release(work, part, how))

    def reject(self, leases: Sequence[Lease], *, reason: str = "rejected", **details: Any) -> list[bool]:
        """Dead-letter messages with this reason. False for each lost lease."""
        cause = Cause(reason, details)
        return self._settle(leases, lambda work, part: settle.reject(work, part, cause))

    def _settle(self, leases: Sequence[Lease], verb: Callable[[Work, Sequence[Lease]], list[bool]]) -> list[bool]:
        settled: list[bool] = []

        def part(most: int) -> list[bool]:
            begin = len(settled)
            return self._write(lambda work: verb(work, leases[begin : begin + most]))

        while len(settled) < len(leases):
            settled += self._settlements.run(part, len(leases) - len(settled))
        return settled

    def bury_copy(
        self,
        queue: str,
        copy: Publication | again.Burial,
        deaths: Sequence[Death] = (),
        *,
        reason: str = "rejected",
        details: dict[str, Any] | None = None,
    ) -> None:
        """Store a dead letter of a message that is no longer in the store, as if it had died in ``queue`` now.

        ``deaths``: its history. Of any size, into as many queues as :mod:`~kombu_fdb.engine.messages.bury` says: into
        all of them, or none. Raises as :meth:`publish`. May be called again with the same ``Burial``, and buries once.
        """
        burial = copy if isinstance(copy, again.Burial) else again.Burial(copy)
        self.check(burial.publication)
        if not burial.begin(self._clock, self._ids):
            return
        dead, cause = publish.DeadCopy(queue, burial.publication, deaths), Cause(reason, details)
        now_ms = self._now()

        def body(work: Work) -> None:
            publish.publish_dead(work._replace(now_ms=now_ms), dead, cause, beforehand=True)

        self._write(body, self._publish_timeout_s, doubt=burial.doubt)

    def holds(self, leases: Sequence[Lease]) -> list[bool]:
        """Whether each lease still stands. Changes nothing: a lease lasts as long as its session beats."""
        return self._read(lambda work: session.holds(work, leases))


def _beaten(queue: str, tried: Sequence[Delivery]) -> Mapping[Event, int]:
    """What a claim that began with ``queue`` and lost its race counts for."""
    effects = Effects()
    effects.note(queue, CONFLICTS)
    for each in tried:
        effects.note(each.queue, CONTESTED, each.key)
    return effects.events
