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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from kombu_fdb.clock import Clock, IdSource
from kombu_fdb.errors import LimitExceeded, MessageTooLarge, QueueError
from kombu_fdb.keyspace.layout import BUCKETS, Keyspace
from kombu_fdb.model import (
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TASK_ID,
    Death,
    Delivery,
    KeyCounts,
    KeyLimits,
    Lease,
    Listed,
    Page,
    Peeked,
    Publication,
    QueueControl,
    QueueCounts,
    QueueFacts,
    RoundSnapshot,
    SessionFacts,
)
from kombu_fdb.queue import (
    browse,
    cancel,
    claim,
    control,
    deadletter,
    dedup,
    delay,
    inspect,
    keytotals,
    letters,
    limits,
    move,
    overflow,
    pages,
    publish,
    replay,
    session,
    settle,
    single,
    sweep,
    together,
    totals,
)
from kombu_fdb.queue.contention import Contention
from kombu_fdb.queue.replay import Moved
from kombu_fdb.queue.tally import CONFLICTS, READY, Tally
from kombu_fdb.routing.tables import Exchange, QueueDeclaration, RoutingTables
from kombu_fdb.store.protocol import Database, KeyValue, Transaction, Watch
from kombu_fdb.store.retry import CommitTokens, Retry

__all__ = ["Engine", "Policy"]

#: How long a session may be silent, in seconds.
SESSION_TTL_S = 30.0

#: What one claim takes at most; a claim's leases are numbered inside a block of its own.
MOST_LEASES = 4096

#: Queues and keys looked at in one transaction.
QUEUES_PER_LOOK = 50
KEYS_PER_LOOK = 1_000

#: Transactions for one overfull queue in one go, at most.
MOST_TRIMS = 100
#: New messages of one transaction; a stamp's user version has 2 bytes.
MOST_STAMPED = 65_000

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
        self._totals = totals.Totals(self.keys, clock)
        self._busiest = keytotals.Busiest()
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
        self._graves = deadletter.Graves(self.keys, self.routing, self.policy, ids)
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

    # -- out -------------------------------------------------------------------------------------------------------

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
            return claim.claim(tr, self._graves, tally, queues, window, no_ack=no_ack)

        def on_conflict() -> None:
            self.lost_races += 1
            self._totals.note({(queues[0], CONFLICTS): 1})
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

    # -- settle ----------------------------------------------------------------------------------------------------

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

    # -- dead letters ----------------------------------------------------------------------------------------------

    def replay(self, queue: str, limit: int) -> int:
        """Bring up to ``limit`` of the oldest messages of ``<queue>.dead`` back to ``queue``. Returns how many."""
        walk, cursor, total = self.walk(queue + deadletter.DEAD_SUFFIX), b"", 0
        while total < limit:
            moved, cursor = self.replay_part(walk, cursor, limit - total)
            total += moved
            if not cursor:
                break
        return total

    def walk(self, dead: str, wanted: letters.Wanted | None = None) -> letters.Walk:
        """A walk through a queue of dead letters that begins now: what comes later is behind its end."""
        last = self._read(lambda tr: tr.get(self.keys.bell(dead), snapshot=True))
        return letters.Walk(dead, wanted or letters.Wanted(), letters.NO_LAST if last is None else last)

    def letters_part(self, walk: letters.Walk, cursor: bytes, limit: int) -> tuple[list[Peeked], bytes]:
        """Up to ``limit`` dead letters, without changing them, and the cursor to go on with; b"" at both ends."""

        def body(tr: Transaction) -> tuple[list[Peeked], bytes]:
            part = letters.look_through(tr, self.keys, walk, cursor, limit)
            return [browse.look(tr, self.keys, walk.dead, letter[:2]) for letter in part.letters], part.cursor

        return self._read(body)

    def replay_part(self, walk: letters.Walk, cursor: bytes, limit: int, *, to: str | None = None) -> Moved:
        """Bring up to ``limit`` dead letters back, in one transaction. Raises ``QueueNotFound``; nothing moved then."""

        def body(tr: Transaction, tally: Tally) -> Moved:
            return replay.replay_part(tr, self._graves, tally, walk, cursor, limit, now_ms=self._now(), to=to)

        return self._write(body)

    def discard_part(self, walk: letters.Walk, cursor: bytes, limit: int) -> Moved:
        """Delete up to ``limit`` dead letters, in one transaction."""
        return self._write(lambda tr, tally: replay.discard_part(tr, self._graves, tally, walk, cursor, limit))

    # -- sessions --------------------------------------------------------------------------------------------------

    def open_session(self, description: dict[str, str | int], *, ttl_s: float = SESSION_TTL_S) -> bytes:
        """Begin to be a consumer; returns the session's id, which must be beaten several times in ``ttl_s`` seconds."""
        session_id = self._ids()
        self._write(lambda tr, _: session.open_session(tr, self.keys, session_id, description, ttl_s, self._now()))
        return session_id

    def beat(self, session_id: bytes, *, ttl_s: float = SESSION_TTL_S, consumed: Sequence[str] = ()) -> bool:
        """Show that the session is alive, and which queues it consumes. False if it was fenced: its leases are lost."""
        return self._write(lambda tr, _: session.beat(tr, self.keys, session_id, ttl_s, consumed, self._now()))

    def consumers(self, queue: str) -> list[bytes]:
        """The sessions that consumed the queue, or waited for it, at their last heartbeat."""
        return [session_id for session_id, beat, _ in self.beats() if queue in session.consumed_of(beat)]

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
            return sweep.release_part(tr, self._graves, tally, session_id, self._now(), counted=counted)

        while released := self._write(body):
            total += released
        for queue in self._write(lambda tr, _: control.drop_consumers(tr, self.keys, session_id)):
            self.delete_queue(queue, if_unused=True)
        self._write(lambda tr, _: sweep.forget(tr, self.keys, session_id))
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
        return self._write(lambda tr, tally: deadletter.trim(tr, self._graves, tally, queue, self._now()))

    def clear_dedup(self) -> int:
        """Clear dedup ids whose window is over. Returns how many."""
        total = 0
        while cleared := self._write(lambda tr, _: dedup.clear_ended(tr, self.keys, self._now())):
            total += cleared
        return total

    def trim_full(self) -> int:
        """Let the oldest give way in queues that grew over their maximum by dead letters or due ones. How many."""
        return sum(self._trim_full(queue) for queue in self._read(lambda tr: control.limited(tr, self.keys)))

    def _trim_full(self, queue: str) -> int:
        total = 0
        for _ in range(MOST_TRIMS):  # its dead letters may come back to it
            dropped = self._write(lambda tr, tally: overflow.trim(tr, self._graves, tally, queue, self._now()))
            if not dropped:
                break
            total += dropped
        return total

    def tokens(self) -> list[tuple[bytes, bytes]]:
        """All commit tokens, for an Observer."""
        return self._read(lambda tr: tr.get_range(*self.keys.all_tokens, snapshot=True))

    def clear_token(self, key: bytes, value: bytes) -> bool:
        """Clear a token that is still what was observed."""
        return self._write(lambda tr, _: control.clear_if(tr, key, value))

    # -- queues and routing ----------------------------------------------------------------------------------------

    def declare_queue(self, declaration: QueueDeclaration) -> None:
        """Create a queue or update its arguments. Raises ``LimitExceeded`` if its name is over ``LONGEST_NAME``."""
        if len(declaration.name.encode()) > LONGEST_NAME:
            raise LimitExceeded("the queue's name is too long", name=declaration.name[:80], longest_bytes=LONGEST_NAME)
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

    def facts(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Declaration, control and age of these queues; in as many transactions as it takes."""
        found: dict[str, QueueFacts] = {}
        for start in range(0, len(queues), QUEUES_PER_LOOK):
            found |= self._facts(list(queues[start : start + QUEUES_PER_LOOK]))
        return found

    def _facts(self, queues: list[str]) -> dict[str, QueueFacts]:
        return self._read(lambda tr: inspect.facts(tr, self.keys, queues))

    def sessions(self, *, held: bool = False) -> list[SessionFacts]:
        """Every session that is open or not yet cleaned up. ``held``: with the number of its messages."""
        return self._read(lambda tr: inspect.sessions(tr, self.keys, held=held))

    def totals(self) -> dict[str, dict[str, int]]:
        """How many messages ever were published, claimed, acked, ... by queue and event (``totals.py``).

        ``""`` is for lost leases, whose queue nobody knows.
        """
        return self._read(lambda tr: totals.read(tr, self.keys))

    def add_totals(self, *, timeout_s: float | None = None) -> None:
        """Add what this process has counted so far, now. On an error it is not counted."""
        share = self._totals.share()
        if share.taken:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            self._retry(lambda tr: self._totals.write(tr, share.taken), timeout_s=timeout_s)

    def key_totals(self) -> dict[str, keytotals.KeyTotals]:
        """The same by queue, key and event, of the busiest keys; key "": of a queue's others (``keytotals.py``)."""
        found: dict[str, keytotals.KeyTotals] = {}
        begin = self.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, found[queue], begin = part
        return found

    def _key_totals(self, begin: bytes) -> tuple[str, keytotals.KeyTotals, bytes] | None:
        return self._read(lambda tr: keytotals.read_next(tr, self.keys, begin))

    def trim_totals(self) -> None:
        """Forget the totals of queues that are gone, and all but the busiest keys. For one thread."""
        for queue in self.totals().keys() - self.queues().keys() - {""}:
            self._forget_totals(queue)
        for queue, names in self._busiest.surplus(self.key_totals()):
            for start in range(0, len(names), keytotals.KEYS_PER_FOLD):
                self._fold_totals(queue, names[start : start + keytotals.KEYS_PER_FOLD])

    def _fold_totals(self, queue: str, names: Sequence[str]) -> None:
        self._write(lambda tr, _: keytotals.fold(tr, self.keys, queue, names))

    def _forget_totals(self, queue: str) -> None:
        self._write(lambda tr, _: totals.forget(tr, self.keys, queue))

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

    def key_page(self, queue: str, *, after: str | None = None, limit: int = KEYS_PER_LOOK) -> dict[str, KeyCounts]:
        """:meth:`keys_of` in pages: up to ``limit`` keys by name, behind ``after``; empty at the end."""
        return self._read(lambda tr: inspect.key_page(tr, self.keys, queue, after, limit))

    def peek(self, queue: str, limit: int, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
        """What a lone consumer would get next. See :func:`kombu_fdb.queue.browse.peek`."""
        now_ms = self._now()
        return self._read(lambda tr: browse.peek(tr, self.keys, queue, limit, key=key, reverse=reverse, now_ms=now_ms))

    def delayed(self, queue: str, limit: int) -> list[Peeked]:
        """Up to ``limit`` delayed messages, the next due first."""
        return self._read(lambda tr: browse.delayed(tr, self.keys, queue, limit))

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

    def page(
        self,
        queue: str,
        state: str,
        limit: int,
        *,
        after: bytes = b"",
        key: str | None = None,
        reverse: bool = False,
    ) -> Page:
        """Some messages of a state, at a cost that does not depend on the queue. See :func:`.pages.page`."""
        return self._read(
            lambda tr: pages.page(tr, self.keys, queue, state, limit, after=after, key=key, reverse=reverse)
        )

    def list_task(self, task_id: str) -> list[Listed]:
        """All messages of the task with their positions, in any state. Costs do not grow with the store."""
        return self._read(lambda tr: pages.list_task(tr, self.keys, task_id))

    def read_at(self, queue: str, state: str, position: bytes) -> Listed | None:
        """The whole message at a page's position; None if it has moved."""
        return self._read(lambda tr: pages.read_at(tr, self.keys, queue, state, position))

    def delete_at(self, queue: str, state: str, position: bytes, message_id: bytes) -> bool:
        """Delete a message at a page's position; False if it has moved. Whoever holds it loses its lease."""
        return self._write(lambda tr, tally: pages.delete_at(tr, self.keys, tally, queue, state, position, message_id))

    def replay_at(self, dead: str, position: bytes, message_id: bytes) -> str | None:
        """Bring a dead letter at a page's position back to the queue it died in; None if it has moved.

        Returns that queue. Raises ``QueueError`` for a message that is no dead letter, or has outlived its time.
        """

        def body(tr: Transaction, tally: Tally) -> str | None:
            row = pages.row_at(tr, self.keys, dead, READY, position, message_id)
            return None if row is None else replay.replay_row(tr, self._graves, tally, dead, row, self._now())

        return self._write(body)

    def find_task(self, task_id: str) -> list[Peeked]:
        """All messages of the task, in any state, wherever they are. Costs do not grow with the store."""
        return self._read(lambda tr: cancel.find_task(tr, self.keys, task_id))

    def take_back(self, task_id: str) -> list[Peeked]:
        """Delete the task's messages that nobody holds: ready, delayed and dead ones. Returns them."""
        return self._write(lambda tr, tally: cancel.take_back(tr, self.keys, tally, task_id))

    def purge(self, queue: str) -> int:
        """Delete all ready and delayed messages; leased ones stay. Returns how many."""
        total = 0
        while deleted := self._write(lambda tr, tally: control.purge_part(tr, self.keys, tally, queue)):
            total += deleted
        return total

    def move(self, source: str, target: str, limit: int | None = None, *, key: str | None = None) -> int:
        """Move up to ``limit`` ready and delayed messages (None: all that are there when it begins), as they are.

        Returns how many. ``key``: only ready ones of this key. Raises ``QueueError`` if both are the same queue. See
        :mod:`kombu_fdb.queue.move`.
        """
        if source == target:
            raise QueueError("a queue can't be moved into itself", queue=source, fix="Name another target.")
        if limit is None:
            counts = self.counts(source)
            limit = counts.ready + counts.delayed
        total, moved = 0, 1
        while moved and total < limit:
            moved = self._move_part(source, target, min(limit - total, move.MESSAGES_PER_TRANSACTION), key)
            total += moved
        return total

    def _move_part(self, source: str, target: str, limit: int, key: str | None) -> int:
        return self._write(lambda tr, tally: move.move(tr, self.keys, tally, source, target, limit, key=key))

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

    def leave(self, session_id: bytes, tags: Collection[str]) -> None:
        """These consumers of the session are active nowhere any more: others take over."""
        self._write(lambda tr, _: single.leave_all(tr, self.keys, session_id, tags))

    def active_consumer(self, queue: str) -> tuple[bytes, str] | None:
        """Session and tag of the one consumer that a queue with ``x-single-active-consumer`` serves; None if nobody."""
        return self._read(lambda tr: single.active(tr, self.keys, queue))

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
        share, tally = self._totals.due(), Tally()

        def body(tr: Transaction) -> T:
            nonlocal tally
            tally = Tally()
            result = verb(tr, tally)
            tally.write(tr, self.keys)
            if share is not None:
                share.join(tr, tally.events)
            return result

        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            result = self._retry(body, timeout_s=timeout_s, on_conflict=on_conflict)
        except BaseException:
            if share is not None:
                share.failed()
            raise
        if share is not None:
            share.committed(tally.events)
        elif tally.events:
            self._totals.note(tally.events)
        return result


def _parts(items: list[Lease], size: int) -> list[list[Lease]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
