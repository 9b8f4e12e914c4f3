"""Messages: consumers claim them, alone or in a wait queue, and settle them; operators delete, cancel and move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from kombu_fdb.engine import edit, parts, session
from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.messages import claim, move, settle, watch
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.scheduling.window import Window
from kombu_fdb.engine.transactions import Transactions, Verbs, read, write
from kombu_fdb.engine.work import Effects, Event, Work
from kombu_fdb.errors import LimitExceeded, Outrun, QueueError, StoreFull
from kombu_fdb.keyspace.layout import BUCKETS
from kombu_fdb.model import LONGEST_NAME, ClaimTerms, Delivery, Demand, Lease, Peeked, SessionId, Spot
from kombu_fdb.primitives.ranges import check_text
from kombu_fdb.store.retry import Doubt

NO_TERMS = ClaimTerms()


class Messages(Verbs):
    """The verbs on messages that are in the store."""

    has_work = read(watch.has_work)
    arm_empty = read(watch.arm)
    arm = read(watch.arm_all)
    glance = read(watch.glance)
    join = write(claim.join)
    holds = read(session.holds)
    delete_at = write(edit.delete_at)
    _look = read(claim.look)
    _move_part = write(move.move)

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        super().__init__(run)
        self._inspect = inspect
        self._claims = count(1)
        self._windows = parts.AdaptiveBatch(session.LEASES_PER_CLAIM)
        self._settlements = parts.AdaptiveBatch(session.LEASES_PER_CLAIM)
        self._services = parts.AdaptiveBatch(claim.MOST_MESSAGES, halved_by=(LimitExceeded, Outrun))
        #: How often this engine lost a claim to a competing consumer.
        self.lost_races = 0

    def claim(
        self, session_id: SessionId, queues: Sequence[str], limit: int, *, terms: ClaimTerms = NO_TERMS
    ) -> list[Delivery]:
        """Lease up to ``limit`` ready messages of ``queues`` (in turn, from the first) to the session.

        It leases fewer if they are large: as many as fit into one transaction (``window.py``), but at least one if
        there is any. ``terms.first``: what :meth:`reserve` returned, for a caller that may have to recover this claim
        (``Sessions.recover``). Raises ``SessionLost`` if the session was fenced: the caller opens another one. Raises
        ``Outrun`` if it gives way to waiters (``terms.gives_way``), or if ``terms.stands`` returns false. Guarantees:
        ONE-PLACE, ONE-OWNER; strict order.
        """
        return self._windows.run(
            lambda most: self._claim(session_id, queues, most, terms), min(limit, session.LEASES_PER_CLAIM)
        )

    def _claim(self, session_id: SessionId, queues: Sequence[str], limit: int, terms: ClaimTerms) -> list[Delivery]:
        try:
            return self._claim_once(session_id, queues, limit, terms)
        except StoreFull as error:
            if not error.moves:
                raise
        return self._claim_once(session_id, queues, limit, terms, rests=True)

    def _claim_once(
        self, session_id: SessionId, queues: Sequence[str], limit: int, terms: ClaimTerms, *, rests: bool = False
    ) -> list[Delivery]:
        """``rests``: as in ``Work``."""
        number = self.reserve() if terms.first is None else terms.first
        tried: list[Delivery] = []
        gives_way = may_give_way = terms.gives_way and not self._run.writers_take_turns
        was_beaten = False

        def body(work: Work) -> list[Delivery]:
            nonlocal gives_way
            window = self._window(session_id, number, limit)
            window.consumers = terms.consumers
            window.gives_way = may_give_way and not doubt.is_open
            window.apart = was_beaten
            window.no_ack = terms.no_ack
            work = work._replace(rests=rests)
            tried[:] = claim.claim(work, queues, window, terms.acks)
            if not terms.stands(window.single):  # after the reads: later, it would seal the session, and conflict
                raise Outrun
            gives_way = may_give_way and not window.single  # such a queue has no wait queue
            return list(tried)

        def on_conflict() -> None:
            nonlocal was_beaten
            was_beaten = True
            self._lost(queues, tried)
            if gives_way and not doubt.is_open:
                raise Outrun

        doubt: Doubt[list[Delivery]] = Doubt()
        return self._run.write(body, on_conflict=on_conflict, doubt=doubt)

    def _window(self, session_id: SessionId, number: int, limit: int) -> Window:
        """The window of one attempt."""
        bucket = self._run.rng.randrange(BUCKETS)
        return Window(session_id, number, limit, bucket, self._run.fair_queues, self._run.sightings)

    def _lost(self, queues: Sequence[str], tried: Sequence[Delivery]) -> None:
        self.lost_races += 1
        self._run.totals.note(_beaten(queues[0], tried))

    def reserve(self) -> int:
        """The number of the first lease of a new claim.

        Takes one step of one counter, so claims of several threads never share a number.
        """
        return next(self._claims) * session.LEASES_PER_CLAIM

    # -- a wait queue of consumers (``scheduling/wait_queue.py``) ------------------------------------------------------

    def look(self, demand: Demand, *, fired: bool = False) -> tuple[wait_queue.Standing, list[Delivery]]:
        """The demand's state, what it was granted, and watches that fire when either may have changed.

        ``fired``: such a watch has fired, so a grant is likely. Granted messages that can't be read are dead-lettered.
        """
        standing, (deliveries, malformed) = self._look(demand, fired=fired)
        for lease, error in malformed:
            self.reject([lease], reason="malformed", error=str(error))
        return standing, deliveries

    def serve(
        self,
        demand: Demand,
        queues: Sequence[str],
        seen: wait_queue.Waiting,
        patience: Callable[[], float] = lambda: 0.0,
    ) -> Served:
        """Claim for all waiters, as the first consumer. ``seen``: the wait queue as a :meth:`look` found it.

        ``patience``: returns the waiters' new patience in seconds; called in each attempt, right before its commit.
        Raises ``SessionLost``. Guarantees: ONE-PLACE, ONE-OWNER, FAIR.

        A consumer that bypasses the wait queue claims few messages, so it is faster than a service, which claims many.
        The service would lose one race after another while the whole wait queue waits for it. So each lost race halves
        its size.
        """
        tried: list[Served] = []

        def body(work: Work, most: int) -> Served:
            window = self._window(demand.session, demand.first, most)
            served = claim.serve(work, queues, demand, seen, window)
            if served.deliveries or served.others:
                wait_queue.served(work, demand, patience())
            tried[:] = [served]
            return served

        def run(most: int) -> Served:
            doubt: Doubt[Served] = Doubt()
            on_conflict = partial(lost, doubt, most)
            return self._run.write(lambda work: body(work, most), on_conflict=on_conflict, doubt=doubt)

        def lost(doubt: Doubt[Served], most: int) -> None:
            self._lost(queues, [delivery for each in tried for delivery in each.deliveries])
            if most > 1 and not doubt.is_open:
                raise Outrun

        wanted = sum(each.want for each in seen.values())
        return self._services.run(run, max(wanted, 1))

    def leave(self, demand: Demand) -> bool:
        """Leave the wait queue. True if the demand had been granted messages."""
        return self._run.write(lambda work: wait_queue.end(work, demand.session, demand.first)) == wait_queue.GRANTED

    def evict(self, demand: Demand, first: bytes, patience_s: float = 0.0) -> None:
        """End the wait of the consumer in row ``first`` of the demand's wait queue, because it does not serve.

        ``patience_s``: the other waiters' new patience.
        """
        self._run.write(lambda work: wait_queue.evict(work, demand.wait_queue, first, patience_s))

    # -- settling ------------------------------------------------------------------------------------------------------

    def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Delete these messages. False for each one whose lease is lost: it was left unchanged.

        Like the next two verbs, this settles all messages in one transaction if they fit, else in parts.
        """
        return self._settle(leases, settle.ack)

    def release(
        self,
        leases: Sequence[Lease],
        *,
        counted: bool = True,
        seen: bool = False,
        due_ms: int = 0,
        details: dict[str, Any] | None = None,
    ) -> list[bool]:
        """Release messages: to their old places, or delayed until ``due_ms``.

        ``counted``: the attempt counts against the delivery limit; beyond it the message is dead-lettered with these
        ``details``. A message that was not started is released uncounted, and marked if a consumer has ``seen`` it.
        False for each lost lease.
        """
        attempt: settle.Attempt = "counted" if counted else "seen" if seen else "none"
        return self._settle(leases, lambda work, part: settle.release(work, part, attempt, due_ms, details))

    def reject(self, leases: Sequence[Lease], *, reason: str = "rejected", **details: Any) -> list[bool]:
        """Dead-letter messages with this reason. False for each lost lease."""
        return self._settle(leases, lambda work, part: settle.reject(work, part, reason, details))

    def _settle(self, leases: Sequence[Lease], verb: Callable[[Work, Sequence[Lease]], list[bool]]) -> list[bool]:
        settled: list[bool] = []

        def part(most: int) -> list[bool]:
            begin = len(settled)
            return self._run.write(lambda work: verb(work, leases[begin : begin + most]))

        while len(settled) < len(leases):
            settled += self._settlements.run(part, len(leases) - len(settled))
        return settled

    def delete(self, queue: str, message_id: bytes) -> bool:
        """Delete a message in any state; a lease on it is lost. False if it is not found."""
        # Search again if it has moved since the search.
        while (row := self._inspect.find_row(queue, message_id)) is not None:
            if self._delete(queue, row):
                return True
        return False

    _delete = write(edit.delete)

    def reschedule(self, queue: str, spot: Spot, due_ms: int, *, payload: bytes | None = None) -> bool:
        """Reschedule a ready or delayed message at a page's position; False if it has moved.

        See :mod:`kombu_fdb.engine.edit`. Raises ``QueueError``, ``FormatError``, ``MessageTooLarge``.
        """
        self._run.check_size(payload or b"")
        return self._run.write(lambda work: edit.reschedule(work, queue, spot, due_ms, payload))

    def cancel(self, task_id: str) -> list[Peeked]:
        """Delete a task's messages that no session holds: ready, delayed and dead ones. Returns them."""
        taken, following = self._cancel_part(task_id, b"")
        while following:
            found, following = self._cancel_part(task_id, following)
            taken += found
        return taken

    _cancel_part = write(edit.cancel)

    def move(self, source: str, target: str, limit: int | None = None, *, key: str | None = None) -> int:
        """Move up to ``limit`` ready and delayed messages (None: all that are there when it begins).

        Returns how many. ``key``: only ready ones of this key. Raises ``QueueError`` if both are the same queue, or the
        target's name is invalid. See :mod:`kombu_fdb.engine.messages.move`.
        """
        _check_move(source, target)
        if limit is None:
            counts = self._inspect.counts(source)
            limit = counts.ready + counts.delayed
        total, moved = 0, 1
        while moved and total < limit:
            moved = self._move_part(source, target, min(limit - total, move.MESSAGES_PER_TRANSACTION), key=key)
            total += moved
        return total

    def move_some(self, source: str, target: str, mark: bytes, *, key: str | None = None) -> tuple[int, bytes]:
        """Move, in one transaction, some of the messages up to a mark. Returns how many, and the next mark.

        ``mark``: from :meth:`~kombu_fdb.engine.facade.queues.Queues.last`, or from the previous part; b"" at the end.
        """
        _check_move(source, target)
        by = parts.split_mark(mark)
        moved, cursor = self._run.part(move.move_some, move.MESSAGES_PER_TRANSACTION, (source, key), target, by)
        return moved, parts.mark(by[0], cursor)


def _check_move(source: str, target: str) -> None:
    if source == target:
        raise QueueError("a queue can't be moved into itself", queue=source, fix="Name another target.")
    check_text("queue's name", target.removesuffix(DEAD_SUFFIX), LONGEST_NAME)


def _beaten(queue: str, tried: Sequence[Delivery]) -> Mapping[Event, int]:
    """The events to count for a claim that began with ``queue`` and lost its race."""
    effects = Effects()
    effects.note(queue, "conflicts")
    for each in tried:
        effects.note(each.queue, "contested", each.key)
    return effects.events
