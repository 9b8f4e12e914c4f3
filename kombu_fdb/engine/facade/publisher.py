"""Publisher: messages on their way into the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from kombu_fdb.engine.facade.transactions import Transactions
from kombu_fdb.engine.messages import again, overflow, publish, together
from kombu_fdb.engine.messages.bury import Cause
from kombu_fdb.engine.stored.effects import Effects
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import CommitUnknown, KombuFDBError, StoreError
from kombu_fdb.model import Death, Publication
from kombu_fdb.primitives import ranges
from kombu_fdb.store.protocol import Transaction
from kombu_fdb.store.tokens import Doubt

logger = logging.getLogger(__name__)

#: How long a publisher tries to let the oldest of a full queue give way, in seconds.
SHED_TIMEOUT_S = 1.0


class Publisher:
    """The verbs of publishers."""

    def __init__(self, run: Transactions) -> None:
        self._run = run
        #: Publications that may be stored; outlives the engine where its owner says so.
        self.doubts = again.Doubts(run.clock)

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
            return self._route(publications)
        timeout_s = self._run.timeouts.publish_s if timeout_s is None else timeout_s
        return self._publish_again(publications, timeout_s) if self.doubts else self._publish(publications, timeout_s)

    def _route(self, publications: Sequence[Publication]) -> list[list[str]]:
        return self._run.read(lambda work: publish.route(work, publications))

    def _publish_again(self, publications: Sequence[Publication], timeout_s: float) -> list[list[str]]:
        """Those that an earlier call has stored count as published; the others are."""
        deadline = self._run.clock.monotonic() + timeout_s
        taken = [self.doubts.take(each) for each in publications]
        stored: list[list[str] | None] | None = None
        try:
            stored = self._resolve(taken, timeout_s)
            left = [each for each, reached in zip(publications, stored, strict=True) if reached is None]
            now = iter(self._publish(left, max(deadline - self._run.clock.monotonic(), 0.001)) if left else [])
            return [next(now) if reached is None else reached for reached in stored]
        except BaseException:
            for number, (publication, doubted) in enumerate(zip(publications, taken, strict=True)):
                # What was fenced, and published now, has a doubt of its own if it needs one.
                if doubted is not None and (stored is None or stored[number] is not None):
                    self.doubts.keep(publication, doubted)
            raise

    def _resolve(self, taken: Sequence[again.Doubted | None], timeout_s: float) -> list[list[str] | None]:
        """For each where it is, if an earlier call has stored it. Raises ``CommitUnknown``: it can't be told now."""
        deadline = self._run.clock.monotonic() + timeout_s
        try:
            return [
                doubted.reached
                if doubted and self._run.retry.resolve(doubted.doubt, timeout_s=deadline - self._run.clock.monotonic())
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
            self._publish_again(part, self._run.timeouts.publish_s)
        self._publish(last, verb=verb)

    def _publish(
        self,
        publications: Sequence[Publication],
        timeout_s: float | None = None,
        verb: Callable[[Transaction], None] | None = None,
    ) -> list[list[str]]:
        clock = self._run.clock
        timeout_s = self._run.timeouts.publish_s if timeout_s is None else timeout_s
        deadline = clock.monotonic() + timeout_s
        doubt: Doubt[publish.Published] = Doubt()
        named = publish.named(publications, self._run.ids)
        for each in publications:
            if each.exchange:
                self._run.routing.prepare(each.exchange, each.routing_key)

        body: Callable[[Work], publish.Published] = partial(publish.publish, publications=named, beforehand=True)
        if verb is not None:
            body = partial(_with, verb, body)
        try:
            reached, overfull = self._run.write(body, timeout_s, doubt=doubt, now_ms=clock.wall_ms())
            for queue, own in overfull.items():
                self._shed(queue, own, deadline - clock.monotonic())
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
            self._run.write(body, min(timeout_s, SHED_TIMEOUT_S))
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
        reached, overfull = publish.publish(self._run.work(tr, effects), publications)
        effects.write(tr, self._run.keys)
        for queue, own in overfull.items():  # what is too much by now; ours are not there before the caller commits
            self._shed(queue, overflow.Load(key=own.key), self._run.timeouts.call_s)
        return reached, effects.stamped

    def check(self, publication: Publication) -> None:
        """Raises ``MessageTooLarge``, and ``InvalidArgument`` or ``QueueError`` for what no store can hold."""
        ranges.check_publication(publication)
        if len(publication.payload) > self._run.policy.max_message_size:
            self._run.check_size(publication.payload)

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
        if not burial.begin(self._run.clock, self._run.ids):
            return
        dead, cause = publish.DeadCopy(queue, burial.publication, deaths), Cause(reason, details)

        def body(work: Work) -> None:
            publish.publish_dead(work, dead, cause, beforehand=True)

        self._run.write(body, self._run.timeouts.publish_s, doubt=burial.doubt, now_ms=self._run.now())


def _with(
    verb: Callable[[Transaction], None], body: Callable[[Work], publish.Published], work: Work
) -> publish.Published:
    verb(work.tr)
    return body(work)
