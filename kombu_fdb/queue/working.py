"""Working: the way of a message through the store, from its publication to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kombu_fdb.errors import LimitExceeded, MessageTooLarge, QueueError
from kombu_fdb.keyspace.layout import BUCKETS
from kombu_fdb.model import (
    LONGEST_KEY,
    LONGEST_TASK_ID,
    Death,
    Delivery,
    Lease,
    Publication,
)
from kombu_fdb.queue import (
    claim,
    publish,
    session,
    settle,
    together,
)
from kombu_fdb.queue.contention import Contention
from kombu_fdb.queue.looking import Looking
from kombu_fdb.queue.tally import CONFLICTS, CONTESTED, Event, Tally
from kombu_fdb.store.protocol import Transaction, Watch

__all__ = ["Working"]

#: What one claim takes at most; a claim's leases are numbered inside a block of its own.
MOST_LEASES = 4096
#: New messages of one transaction; a stamp's user version has 2 bytes.
MOST_STAMPED = 65_000
#: Estimates of rivals remembered at most.
MOST_ESTIMATES = 1000


class Working(Looking):
    """The verbs of publishers and consumers."""

    def publish(self, publications: Sequence[Publication], *, timeout_s: float | None = None) -> list[list[str]]:
        """Route and store all of them in one transaction, in this order; all or none.

        Returns for each the queues it reached; an empty list is an unroutable message, which is dropped. Raises
        ``MessageTooLarge`` (nothing stored), ``ExchangeNotFound``, ``LimitExceeded`` if together they exceed what one
        transaction holds (see :data:`~kombu_fdb.queue.publish.BATCH_BYTES`), ``CapacityExceeded`` (nothing stored),
        ``CommitUnknown``. Guarantee: DURABLE.
        """
        for publication in publications:
            self._check(publication)
        if together.gather(self, publications):
            return [self.route(each.exchange, each.routing_key) for each in publications]
        return self._publish(publications, timeout_s)

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
            self._publish(part)
        self._publish(last, verb=verb)

    def _publish(
        self,
        publications: Sequence[Publication],
        timeout_s: float | None = None,
        verb: Callable[[Transaction], None] | None = None,
    ) -> list[list[str]]:
        now_ms = self._clock.wall_ms()

        def body(tr: Transaction, tally: Tally) -> list[list[str]]:
            if verb is not None:
                verb(tr)
            return publish.publish(tr, self._graves, tally, publications, now_ms=now_ms)

        return self._write(body, self._publish_timeout_s if timeout_s is None else timeout_s)

    def publish_in(
        self, tr: Transaction, publications: Sequence[Publication], *, stamped: int = 0
    ) -> tuple[list[list[str]], int]:
        """As ``publish``, in a transaction of the caller's, who commits it, or does not, and runs it again.

        ``stamped``: how many messages this transaction has from earlier calls; the new number is returned beside the
        queues reached. Raises what ``publish`` raises before a commit, and ``LimitExceeded`` past
        :data:`MOST_STAMPED` messages.
        """
        for publication in publications:
            self._check(publication)
        tally = Tally(stamped)
        reached = publish.publish(tr, self._graves, tally, publications, now_ms=self._now())
        if tally.stamped > MOST_STAMPED:
            raise LimitExceeded("too many messages in one transaction", messages=tally.stamped, most=MOST_STAMPED)
        tally.write(tr, self.keys)
        return reached, tally.stamped

    def _check(self, publication: Publication) -> None:
        if len(publication.key.encode()) > LONGEST_KEY:
            raise QueueError("the fairness key is too long", key=publication.key[:80], longest_bytes=LONGEST_KEY)
        if len(publication.task_id.encode()) > LONGEST_TASK_ID:
            raise QueueError("the task id is too long", task_id=publication.task_id[:80], longest_bytes=LONGEST_TASK_ID)
        for dedup_id in (publication.dedup_id, publication.once_id):
            if len(dedup_id.encode()) > LONGEST_KEY:
                raise QueueError("the dedup id is too long", dedup_id=dedup_id[:80], longest_bytes=LONGEST_KEY)
        if len(publication.payload) > self.policy.max_message_size:
            raise MessageTooLarge(
                size=len(publication.payload),
                max_message_size=self.policy.max_message_size,
                fix="Store the data elsewhere and send a reference, or raise max_message_size",
            )

    def claim(
        self,
        session_id: bytes,
        queues: Sequence[str],
        limit: int,
        *,
        no_ack: Collection[str] = (),
        acks: Sequence[Lease] = (),
        consumers: Mapping[str, str] | None = None,
    ) -> list[Delivery]:
        """Lease up to ``limit`` ready messages of ``queues`` (in turn, from the first) to the session.

        Messages of a queue in ``no_ack`` are taken without a lease, at most once. ``acks`` are settled in the same
        transaction. ``consumers``: the tag of the consumer by queue; a queue with ``x-single-active-consumer`` serves
        one of them. Raises ``LeaseLost`` if the session was fenced: the caller opens another one. Guarantees:
        ONE-PLACE, ONE-OWNER; strict order while one consumer claims.
        """
        contention = self._contention_of(queues)
        limit = min(limit, MOST_LEASES)
        # One step of one counter, so that claims of several threads never share a number.
        first = next(self._claims) * MOST_LEASES
        contention.begin()
        tried: list[Delivery] = []

        def body(tr: Transaction, tally: Tally) -> list[Delivery]:
            if acks:
                settle.ack(tr, self.keys, tally, acks)
            window = claim.Window(
                session_id,
                first,
                limit,
                contention.next_slice(),
                self._clock.wall_ms(),
                self._rng.randrange(BUCKETS),
                consumers or {},
            )
            tried[:] = claim.claim(tr, self._graves, tally, queues, window, no_ack=no_ack)
            return list(tried)

        def on_conflict() -> None:
            self.lost_races += 1
            self._totals.note(_beaten(queues[0], tried))
            contention.lost()

        return self._write(body, on_conflict=on_conflict)

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

        def body(tr: Transaction) -> list[Watch] | None:
            return claim.arm(tr, self.keys, queues, session_id, consumers or {})

        return self._read(body)

    def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Delete these messages. False for each whose lease is lost: nothing was changed for it."""
        return self._write(lambda tr, tally: settle.ack(tr, self.keys, tally, leases))

    def release(
        self, leases: Sequence[Lease], *, counted: bool = True, due_ms: int = 0, details: dict[str, Any] | None = None
    ) -> list[bool]:
        """Hand messages back: to their original position, or due at ``due_ms``.

        ``counted``: the attempt counts against the delivery limit, past which the message is dead-lettered; an
        unstarted message is handed back uncounted. ``details`` stand in that death's entry. False for each lost lease.
        """

        def body(tr: Transaction, tally: Tally) -> list[bool]:
            return settle.release(
                tr, self._graves, tally, leases, self._now(), counted=counted, due_ms=due_ms, details=details
            )

        return self._write(body)

    def reject(self, leases: Sequence[Lease], *, reason: str = "rejected", **details: Any) -> list[bool]:
        """Dead-letter messages with this reason. False for each lost lease."""

        def body(tr: Transaction, tally: Tally) -> list[bool]:
            return settle.reject(tr, self._graves, tally, leases, self._now(), reason=reason, details=details)

        return self._write(body)

    def bury_copy(
        self,
        queue: str,
        publication: Publication,
        deaths: Sequence[Death] = (),
        *,
        reason: str = "rejected",
        details: dict[str, Any] | None = None,
    ) -> None:
        """Store a dead letter of a message that is no longer in the store, as if it had died in ``queue`` now.

        ``deaths``: its history. Raises as :meth:`publish`.
        """
        self._check(publication)
        publication = publication._replace(message_id=publication.message_id or self._ids())
        now_ms = self._now()

        def body(tr: Transaction, tally: Tally) -> None:
            publish.publish_dead(
                tr, self._graves, tally, queue, publication, deaths, now_ms, reason=reason, details=details
            )

        self._write(body, self._publish_timeout_s)

    def holds(self, leases: Sequence[Lease]) -> list[bool]:
        """Whether each lease still stands. Changes nothing: a lease lasts as long as its session beats."""
        return self._read(lambda tr: session.holds(tr, self.keys, leases))


def _beaten(queue: str, tried: Sequence[Delivery]) -> Mapping[Event, int]:
    """What a claim that began with ``queue`` and lost its race counts for."""
    tally = Tally()
    tally.note(queue, CONFLICTS)
    for each in tried:
        tally.note(each.queue, CONTESTED, each.key)
    return tally.events
