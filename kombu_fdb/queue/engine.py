"""The only door to the queue: opens transactions and runs the verbs in them.

One engine serves one namespace of one store in one process. It holds no thread and no connection to Celery; it is told
the time, and every method may be called from any thread.

What a caller must know about failure (``store/retry.py``): every method either happened entirely, or raised and did not
happen, with one exception. If it raises ``CommitUnknown``, the store stopped answering during the commit:

* ``publish``: the message may be stored. Publishing again may store it twice.
* ``claim``: messages may be leased to the session without the caller knowing them. ``recover`` finds and releases them;
  the owner of the session calls it before it claims again.
* ``ack``, ``release``, ``reject``: call again with the same leases; what has happened stays as it is.
* all others: call again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from kombu_fdb.clock import Clock, IdSource
from kombu_fdb.errors import MessageTooLarge, QueueError
from kombu_fdb.keyspace.layout import BUCKETS, Keyspace
from kombu_fdb.model import (
    LONGEST_KEY,
    Delivery,
    KeyCounts,
    KeyLimits,
    Lease,
    Peeked,
    Publication,
    QueueControl,
    QueueCounts,
    RoundSnapshot,
)
from kombu_fdb.queue import (
    browse,
    claim,
    control,
    deadletter,
    delay,
    inspect,
    limits,
    publish,
    replay,
    session,
    settle,
    sweep,
)
from kombu_fdb.queue.contention import Contention
from kombu_fdb.queue.tally import Tally
from kombu_fdb.routing.tables import Exchange, QueueDeclaration, RoutingTables
from kombu_fdb.store.protocol import Database, KeyValue, Transaction, Watch
from kombu_fdb.store.retry import CommitTokens, Retry

__all__ = ["Engine", "Policy"]

#: How long a session may be silent, in seconds.
SESSION_TTL_S = 30.0

#: What one claim takes at most; a claim's leases are numbered inside a block of its own.
MOST_LEASES = 4096

#: Estimates of rivals remembered at most.
MOST_ESTIMATES = 1000

T = TypeVar("T")
Policy = settle.Policy


class Engine:
    """Publish, claim and settle messages.

    ``timeout_s``: deadline of each call but ``publish``, whose is ``publish_timeout_s``.
    Raises ``StoreUnavailable`` from every method when its deadline passes.
    """

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
        self._contention: dict[tuple[str, ...], Contention] = {}
        #: How often a rival's claim was faster, since the engine was made.
        self.lost_races = 0

    # -- in --------------------------------------------------------------------------------------------------------

    def publish(self, publications: Sequence[Publication], *, timeout_s: float | None = None) -> list[list[str]]:
        """Route and store all of them in one transaction, in this order; all or none.

        Returns for each the queues it reached; an empty list is an unroutable message, which is dropped. Raises
        ``MessageTooLarge`` (nothing stored), ``ExchangeNotFound``, ``LimitExceeded`` if together they exceed what one
        transaction holds (see :data:`~kombu_fdb.queue.publish.BATCH_BYTES`), ``CapacityExceeded`` (nothing stored),
        ``CommitUnknown``. Guarantee: DURABLE.
        """
        for publication in publications:
            self._check(publication)
        now_ms = self._clock.wall_ms()

        def body(tr: Transaction, tally: Tally) -> list[list[str]]:
            return publish.publish(tr, self._context(), tally, publications, now_ms=now_ms)

        return self._write(body, self._publish_timeout_s if timeout_s is None else timeout_s)

    def _check(self, publication: Publication) -> None:
        if len(publication.key.encode()) > LONGEST_KEY:
            raise QueueError("the fairness key is too long", key=publication.key[:80], longest_bytes=LONGEST_KEY)
        if len(publication.payload) > self.policy.max_message_size:
            raise MessageTooLarge(
                size=len(publication.payload),
                max_message_size=self.policy.max_message_size,
                fix="Store the data elsewhere and send a reference, or raise max_message_size",
            )

    # -- out -------------------------------------------------------------------------------------------------------

    def claim(
        self,
        session_id: bytes,
        queues: Sequence[str],
        limit: int,
        *,
        no_ack: Collection[str] = (),
        acks: Sequence[Lease] = (),
    ) -> list[Delivery]:
        """Lease up to ``limit`` ready messages of ``queues`` (in turn, from the first) to the session.

        Messages of a queue in ``no_ack`` are taken without a lease, at most once. ``acks`` are settled in the same
        transaction. Raises ``LeaseLost`` if the session was fenced: the caller opens another one. Guarantees:
        ONE-PLACE, ONE-OWNER; strict order while one consumer claims.
        """
        contention = self._contention_of(queues)
        limit = min(limit, MOST_LEASES)
        # One step of one counter, so that claims of several threads never share a number.
        first = next(self._claims) * MOST_LEASES
        contention.begin()

        def body(tr: Transaction, tally: Tally) -> list[Delivery]:
            if acks:
                settle.ack(tr, self.keys, tally, acks)
            window = claim.Window(
                session_id, first, limit, contention.next_slice(), self._clock.wall_ms(), self._rng.randrange(BUCKETS)
            )
            return claim.claim(tr, self._context(), tally, queues, window, no_ack=no_ack)

        def on_conflict() -> None:
            self.lost_races += 1
            contention.lost()

        return self._write(body, on_conflict=on_conflict)

    def _contention_of(self, queues: Sequence[str]) -> Contention:
        if len(self._contention) >= MOST_ESTIMATES:  # reply queues come and go; estimates are quickly made again
            self._contention.clear()
        return self._contention.setdefault(tuple(sorted(queues)), Contention(self._rng))

    def _context(self) -> deadletter.Graves:
        return deadletter.Graves(self.keys, self.routing, self.policy, self._ids)

    def arm(self, queues: Sequence[str]) -> list[Watch] | None:
        """Watches that fire when a message becomes ready in one of ``queues``; None if one is ready now."""

        def body(tr: Transaction) -> list[Watch] | None:
            return claim.arm(tr, self.keys, queues)

        return self._read(body)

    # -- settle ----------------------------------------------------------------------------------------------------

    def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Delete these messages. False for each whose lease is lost: nothing was changed for it."""
        return self._write(lambda tr, tally: settle.ack(tr, self.keys, tally, leases))

    def release(
        self, leases: Sequence[Lease], *, counted: bool = True, due_ms: int = 0, details: dict[str, str] | None = None
    ) -> list[bool]:
        """Hand messages back: to their original position, or due at ``due_ms``.

        ``counted``: the attempt counts against the delivery limit, past which the message is dead-lettered; an
        unstarted message is handed back uncounted. ``details`` stand in that death's entry. False for each lost lease.
        """

        def body(tr: Transaction, tally: Tally) -> list[bool]:
            return settle.release(
                tr, self._context(), tally, leases, self._now(), counted=counted, due_ms=due_ms, details=details
            )

        return self._write(body)

    def reject(self, leases: Sequence[Lease], *, reason: str = "rejected", **details: str) -> list[bool]:
        """Dead-letter messages with this reason. False for each lost lease."""

        def body(tr: Transaction, tally: Tally) -> list[bool]:
            return settle.reject(tr, self._context(), tally, leases, self._now(), reason=reason, details=details)

        return self._write(body)

    def holds(self, leases: Sequence[Lease]) -> list[bool]:
        """Whether each lease still stands. Changes nothing: a lease lasts as long as its session beats."""
        return self._read(lambda tr: session.holds(tr, self.keys, leases))

    def replay(self, queue: str, limit: int) -> int:
        """Bring up to ``limit`` of the oldest messages of ``<queue>.dead`` back. Returns how many."""
        total, taken = 0, limit
        while taken and total < limit:
            taken, moved = self._replay_part(queue, limit - total)
            total += moved
        return total

    def _replay_part(self, queue: str, limit: int) -> tuple[int, int]:
        limit = min(limit, replay.MESSAGES_PER_TRANSACTION)
        return self._write(lambda tr, tally: replay.replay(tr, self._context(), tally, queue, limit, self._now()))

    # -- sessions --------------------------------------------------------------------------------------------------

    def open_session(self, description: dict[str, str | int], *, ttl_s: float = SESSION_TTL_S) -> bytes:
        """Begin to be a consumer; returns the session's id, which must be beaten several times in ``ttl_s`` seconds."""
        session_id = self._ids()
        self._write(lambda tr, _: session.open_session(tr, self.keys, session_id, description, ttl_s))
        return session_id

    def beat(self, session_id: bytes, *, ttl_s: float = SESSION_TTL_S) -> bool:
        """Show that the session is alive. False if it was fenced: all its leases are lost."""
        return self._write(lambda tr, _: session.beat(tr, self.keys, session_id, ttl_s))

    def recover(self, session_id: bytes, known: Collection[Lease]) -> int:
        """Release, uncounted, what the session holds besides ``known`` (after a claim of unknown outcome)."""
        held = self._read(lambda tr: session.leases(tr, self.keys, session_id))
        unknown = [lease for lease in held if lease not in known]
        return sum(sum(self.release(part, counted=False)) for part in _parts(unknown, sweep.LEASES_PER_TRANSACTION))

    def close_session(self, session_id: bytes) -> int:
        """End the session and hand all its messages back, uncounted, at their positions. Returns how many."""
        self._write(lambda tr, _: session.fence(tr, self.keys, session_id))
        return self.release_session(session_id, counted=False)

    def beats(self) -> list[tuple[bytes, bytes, float]]:
        """All sessions' last heartbeats and times to live, for a :class:`~kombu_fdb.queue.sweep.Observer`."""
        return self._read(lambda tr: session.beats(tr, self.keys))

    def fence(self, session_id: bytes, last_beat: bytes) -> bool:
        """End a silent session, unless it has beaten since ``last_beat``. Its leases are lost from here on."""
        return self._write(lambda tr, _: session.fence(tr, self.keys, session_id, last_beat=last_beat))

    def release_session(self, session_id: bytes, *, counted: bool = True) -> int:
        """Bring the messages of a fenced session back, in parts; idempotent. Guarantee: BACK-SOON."""
        total = 0

        def body(tr: Transaction, tally: Tally) -> int:
            return sweep.release_part(tr, self._context(), tally, session_id, self._now(), counted=counted)

        while released := self._write(body):
            total += released
        for queue in self._write(lambda tr, _: control.drop_consumers(tr, self.keys, session_id)):
            self.delete_queue(queue, if_unused=True)
        return total

    # -- duties of whoever holds a role ----------------------------------------------------------------------------

    def hold_role(self, role: str, session_id: bytes, observed: bytes | None) -> bool:
        """Take or keep a role; ``observed`` is a holder's record the caller saw unchanged for too long."""
        return self._write(lambda tr, _: session.hold_role(tr, self.keys, role, session_id, observed))

    def role_record(self, role: str) -> bytes | None:
        return self._read(lambda tr: tr.get(self.keys.role(role)))

    def leave_role(self, role: str, session_id: bytes) -> None:
        self._write(lambda tr, _: session.leave_role(tr, self.keys, role, session_id))

    def promote(self) -> tuple[int, int | None]:
        """Make due messages ready. Returns how many, and when the next one is due. Guarantee: NOT-EARLY."""
        promoted, next_due = 0, self._thaw()
        for queue in self._read(lambda tr: delay.waiting(tr, self.keys)):
            moved, due_ms = self._promote_queue(queue)
            promoted += moved
            next_due = due_ms if next_due is None else min(next_due, due_ms or next_due)
        return promoted, next_due

    def _thaw(self) -> int | None:
        if not self._read(lambda tr: tr.get_range(*self.keys.all_thaws, limit=1, snapshot=True)):
            return None
        return self._write(lambda tr, _: delay.thaw(tr, self.keys, self._now()))

    def _promote_queue(self, queue: str) -> tuple[int, int | None]:
        total = 0
        while True:
            moved, due_ms = self._write(lambda tr, tally: delay.promote(tr, self.keys, tally, queue, self._now()))
            total += moved
            if moved < delay.MESSAGES_PER_TRANSACTION:
                return total, due_ms

    def watch_alarm(self) -> Watch:
        """Fires when a message was delayed, so that the promoter looks again."""
        return self._read(lambda tr: tr.watch(self.keys.alarm))

    def expiring_queues(self) -> list[tuple[str, bytes, int]]:
        """Unused queues with ``x-expires``: name, last use, and the milliseconds they may stay unused."""
        return self._read(lambda tr: control.expiring(tr, self.keys))

    def expire_queue(self, queue: str, last_use: bytes) -> bool:
        """Delete a queue unless it was used since ``last_use``."""
        return self._delete_queue(queue, lambda tr: control.expire(tr, self.keys, queue, last_use)) is not None

    def trim_dead(self) -> int:
        """Drop what the queues ``<queue>.dead`` keep no longer. Returns how many."""
        total = 0
        for queue in self.queues():
            while queue.endswith(deadletter.DEAD_SUFFIX) and (dropped := self._trim(queue)):
                total += dropped
        return total

    def _trim(self, queue: str) -> int:
        return self._write(lambda tr, tally: deadletter.trim(tr, self._context(), tally, queue, self._now()))

    def tokens(self) -> list[tuple[bytes, bytes]]:
        """All commit tokens, for an Observer."""
        return self._read(lambda tr: tr.get_range(*self.keys.all_tokens, snapshot=True))

    def clear_token(self, key: bytes, value: bytes) -> bool:
        """Clear a token that is still what was observed."""
        return self._write(lambda tr, _: control.clear_if(tr, key, value))

    # -- queues and routing ----------------------------------------------------------------------------------------

    def declare_queue(self, declaration: QueueDeclaration) -> None:
        """Create a queue or update its arguments."""
        self._write(lambda tr, _: control.declare_queue(tr, self.keys, declaration))
        self.routing.forget_queue(declaration.name)

    def queue(self, name: str) -> QueueDeclaration | None:
        """Its declaration; None if there is no such queue."""
        return self._read(lambda tr: self.routing.read_queue(tr, name))

    def queues(self) -> dict[str, QueueCounts]:
        """All queues that are declared or hold messages, with their counters."""
        return self._read(lambda tr: inspect.queues(tr, self.keys))

    def counts(self, queue: str) -> QueueCounts:
        """Its counters; zeros if there is no such queue. Guarantee: COUNTS."""
        return self._read(lambda tr: inspect.counts(tr, self.keys, queue))

    def control(self, queue: str) -> QueueControl:
        """How the queue is worked on."""
        return self._read(lambda tr: limits.read_control(tr, self.keys, queue))

    def set_control(self, queue: str, control: QueueControl) -> None:
        """Pause or resume a queue, choose when newcomers get their turn, limit every key without limits of its own."""
        self._write(lambda tr, tally: limits.set_control(tr, self.keys, tally, queue, control))
        self.routing.forget_queue(queue)

    def limits(self, queue: str, key: str) -> KeyLimits:
        """What holds for the key: its own limits, or those of every key."""
        return self._read(lambda tr: limits.read(tr, self.keys, queue, key))

    def limit(self, queue: str, key: str, limits_: KeyLimits | None) -> None:
        """Set the limits of one key; None removes them. They count from the next claim on."""
        self._write(lambda tr, tally: limits.limit(tr, self.keys, tally, queue, key, limits_))
        self.routing.forget_queue(queue)

    def change_limits(self, queue: str, key: str, **changes: Any) -> KeyLimits:
        """Change these limits of one key, in one transaction; its others stay. Returns all of them."""
        changed = self._write(lambda tr, tally: limits.change(tr, self.keys, tally, queue, key, changes))
        self.routing.forget_queue(queue)
        return changed

    def change_control(self, queue: str, *, every_key: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Change these fields of the queue's control, and of its ``every_key``, in one transaction; others stay."""
        self._write(lambda tr, tally: limits.change_control(tr, self.keys, tally, queue, changes, every_key or {}))
        self.routing.forget_queue(queue)

    def keys_of(self, queue: str) -> dict[str, KeyCounts]:
        """The keys that have messages or limits. Guarantee: COUNTS."""
        return self._read(lambda tr: inspect.keys_of(tr, self.keys, queue))

    def peek(self, queue: str, limit: int, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
        """What a lone consumer would get next. See :func:`kombu_fdb.queue.browse.peek`."""
        now_ms = self._now()
        return self._read(lambda tr: browse.peek(tr, self.keys, queue, limit, key=key, reverse=reverse, now_ms=now_ms))

    def snapshot(self, queue: str, limit: int) -> RoundSnapshot:
        """The current round and what waits behind it, of the first ``limit`` messages of the queue."""
        return self._read(lambda tr: browse.snapshot(tr, self.keys, queue, limit))

    def taken(self, queue: str) -> list[Peeked]:
        """The messages under leases, by session."""
        return self._read(lambda tr: browse.taken(tr, self.keys, queue))

    def find(self, queue: str, message_id: bytes) -> Peeked | None:
        """A message of the queue in any state. Reads the whole queue; may miss one that moves meanwhile."""
        row = self._find(queue, message_id)
        return None if row is None else self._read(lambda tr: browse.look(tr, self.keys, queue, row))

    def delete(self, queue: str, message_id: bytes) -> bool:
        """Delete a message in any state; whoever holds it loses its lease. False if it is not there. As ``find``."""
        # Again if it moved in between.
        while (row := self._find(queue, message_id)) is not None:
            if self._delete(queue, *row):
                return True
        return False

    def _delete(self, queue: str, key: bytes, value: bytes) -> bool:
        return self._write(lambda tr, tally: browse.delete(tr, self.keys, tally, queue, key, value))

    def _find(self, queue: str, message_id: bytes) -> KeyValue | None:
        for begin, end in browse.ranges(self.keys, queue):
            row, following = None, begin
            while row is None and following < end:
                row, following = self._find_part(queue, message_id, following, end)
            if row is not None:
                return row
        return None

    def _find_part(self, queue: str, message_id: bytes, begin: bytes, end: bytes) -> tuple[KeyValue | None, bytes]:
        return self._read(lambda tr: browse.find_part(tr, self.keys, queue, message_id, begin, end))

    def purge(self, queue: str) -> int:
        """Delete all ready and delayed messages; leased ones stay. Returns how many."""
        total = 0
        while deleted := self._write(lambda tr, tally: control.purge_part(tr, self.keys, tally, queue)):
            total += deleted
        return total

    def delete_queue(
        self, queue: str, *, if_unused: bool = False, if_empty: bool = False, if_idle: bool = False
    ) -> int | None:
        """Delete a queue, its bindings and its waiting messages. Returns how many messages; None if refused.

        ``if_idle``: refused while messages are in flight.
        """
        conditions = {"if_unused": if_unused, "if_empty": if_empty, "if_idle": if_idle}
        return self._delete_queue(queue, lambda tr: control.delete_queue(tr, self.keys, queue, **conditions))

    def _delete_queue(self, queue: str, verb: Callable[[Transaction], bool]) -> int | None:
        """The messages go in the same transaction: what comes later is another queue's of that name.

        Those for which it is too small follow at once.
        """

        def body(tr: Transaction, tally: Tally) -> int | None:
            return control.purge_part(tr, self.keys, tally, queue) if verb(tr) else None

        purged = self._write(body)
        if purged is None:
            return None
        self.routing.forget_queue(queue)
        return purged + (self.purge(queue) if purged >= control.MESSAGES_PER_PURGE else 0)

    def declare_exchange(self, exchange: Exchange) -> None:
        """Create an exchange. Raises ``NotEquivalent`` if it exists with another type."""
        self._write(lambda tr, _: control.declare_exchange(tr, self.keys, exchange))

    def exchange(self, name: str) -> Exchange | None:
        return self._read(lambda tr: self.routing.read_exchange(tr, name))

    def exchanges(self) -> list[Exchange]:
        return self._read(lambda tr: inspect.exchanges(tr, self.keys))

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange and its bindings; False if refused. The queues stay."""
        return self._write(lambda tr, _: control.delete_exchange(tr, self.keys, name, if_unused=if_unused))

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Raises ``ExchangeNotFound``. Idempotent."""
        self._write(lambda tr, _: control.bind(tr, self.keys, queue, exchange, routing_key))

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Idempotent."""
        self._write(lambda tr, _: control.unbind(tr, self.keys, queue, exchange, routing_key))

    def bindings(self) -> list[tuple[str, str, str]]:
        """``(exchange, queue, routing key)`` of every binding."""
        return self._read(lambda tr: inspect.bindings(tr, self.keys))

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues a message would reach now."""
        return self._read(lambda tr: self.routing.route(tr, exchange, routing_key))

    def add_consumer(self, session_id: bytes, queue: str, tag: str) -> None:
        """Keep a queue that can vanish (``x-expires``, auto-delete) alive while this session consumes it."""
        self._write(lambda tr, _: control.add_consumer(tr, self.keys, session_id, queue, tag))

    def remove_consumer(self, session_id: bytes, queue: str, tag: str) -> None:
        """Deletes an auto-delete queue with its last consumer."""
        if self._write(lambda tr, _: control.remove_consumer(tr, self.keys, session_id, queue, tag)):
            self.delete_queue(queue, if_unused=True)

    def touch(self, queue: str) -> None:
        """Note that a queue with ``x-expires`` was used."""
        self._write(lambda tr, _: control.touch(tr, self.keys, queue))

    def check_format(self) -> None:
        """Raises ``FormatError`` if a newer version wrote this store; marks an empty one."""
        self._write(lambda tr, _: control.check_format(tr, self.keys))

    # -- how ---------------------------------------------------------------------------------------------------------

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
        def body(tr: Transaction) -> T:
            tally = Tally()
            result = verb(tr, tally)
            tally.write(tr, self.keys)
            return result

        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._retry(body, timeout_s=timeout_s, on_conflict=on_conflict)


def _parts(items: list[Lease], size: int) -> list[list[Lease]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
