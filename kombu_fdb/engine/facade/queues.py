"""Queues: declare, bind, limit, purge and delete them; expire those that are unused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from kombu_fdb.engine import parts, topology
from kombu_fdb.engine.scheduling import limit_changes, single
from kombu_fdb.engine.transactions import Verbs, read, write
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import LimitExceeded
from kombu_fdb.model import LONGEST_NAME, KeyLimits, QueueControl, SessionId
from kombu_fdb.primitives.ranges import LONGEST_S, check_text, utf8
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

T = TypeVar("T")

#: How many transactions the process that changes limits runs by itself; the duties do the rest.
MOST_PARTS = 2_000


class Queues(Verbs):
    """The verbs that declare and administer queues."""

    touch = write(topology.touch)
    expiring = read(topology.expiring)
    being_deleted = read(topology.queues_being_deleted)
    add_consumer = write(topology.add_consumer)
    delete_exchange = write(topology.delete_exchange)
    unbind = write(topology.unbind)
    follow_limits_part = write(limit_changes.part)

    def declare(self, declaration: QueueDeclaration, *, owner: tuple[SessionId, str] | None = None) -> None:
        """Create a queue or update its arguments. Raises ``LimitExceeded`` if its name is over ``LONGEST_NAME``.

        ``owner``: a session and a tag that count as a consumer of the queue from its creation. So an exclusive queue
        ends with its owner even if the owner never consumes. Raises ``SessionLost``.
        """
        if len(utf8("queue's name", declaration.name)) > LONGEST_NAME:
            raise LimitExceeded("the queue's name is too long", name=declaration.name[:80], longest_bytes=LONGEST_NAME)

        def body(work: Work) -> bool:
            declared = topology.declare_queue(work, declaration)
            if declared and owner is not None:
                topology.add_consumer(work, owner[0], declaration.name, owner[1])
            return declared

        while not self._run.write(body):
            self.finish_deletion(declaration.name)
        self._run.routing.forget_queue(declaration.name)

    def got_from(self, queue: str) -> None:
        """Note a request for a single message: with ``x-expires``, the queue's idle time restarts."""
        declared = self._run.routing.known(queue)
        if declared is None:
            declared = self._run.read(lambda work: work.routing.queue(work.tr, queue))
        if declared.expires_ms is not None:
            self.touch(queue)

    def delete(
        self,
        queue: str,
        *,
        if_unused: bool = False,
        if_empty: bool = False,
        if_idle: bool = False,
        mark: bytes = b"",
    ) -> int | None:
        """Delete a queue, its bindings and its waiting messages. Returns how many messages; None if refused.

        ``if_idle``: refused while messages are in flight. ``mark``: refused if a message has arrived since.
        """
        conditions = {"if_unused": if_unused, "if_empty": if_empty, "if_idle": if_idle}

        def verb(work: Work) -> bytes | None:
            has_others = bool(mark) and topology.has_come_since(work, queue, mark)
            return None if has_others else topology.delete_queue(work, queue, **conditions)

        deleted = self._delete(queue, verb)
        return None if deleted is None else self._purge_rest(queue, deleted)

    def _delete(self, queue: str, verb: Callable[[Work], bytes | None]) -> tuple[bytes, int, bytes] | None:
        """Delete the messages in the same transaction: later ones belong to a new queue of that name.

        The caller, or a duty, deletes those that do not fit. Returns the version up to which messages are deleted, how
        many were deleted, and where to continue; b"" at the end.
        """

        def verb_and_purge(work: Work, limit: int) -> tuple[bytes, int, bytes] | None:
            last = verb(work)
            if last is None:
                return None
            purged, following = topology.purge_part(work, limit, queue, last)
            if following:
                topology.to_be_purged(work, queue, last)
            return last, purged, following

        deleted = self._run.part(verb_and_purge, topology.MESSAGES_PER_PURGE)
        if deleted is not None:
            self._run.routing.forget_queue(queue)
        return deleted

    def _purge_rest(self, queue: str, deleted: tuple[bytes, int, bytes]) -> int:
        """Purge the rest of a queue that :meth:`_delete` has deleted. Returns how many messages were deleted in all."""
        last, purged, following = deleted
        return purged + (self._purge(queue, last, following) if following else 0)

    def finish_deletion_part(self, queue: str, cursor: bytes = b"") -> bytes:
        """Purge a part of a deleted queue, in one transaction. Returns where to continue; b"" at the end."""
        last = self._run.read(lambda work: topology.being_deleted(work, queue))
        return b"" if last is None else self._purge_part(queue, last, cursor)[1]

    def finish_deletion(self, queue: str) -> None:
        """Purge the rest of a deleted queue."""
        cursor = self.finish_deletion_part(queue)
        while cursor:
            cursor = self.finish_deletion_part(queue, cursor)

    def purge(self, queue: str) -> int:
        """Delete all ready and delayed messages that are there when it begins; leased ones stay. Returns how many.

        A message that is published, or becomes due, during the purge stays.
        """
        return self._purge(queue, self.last(queue))

    def last(self, queue: str) -> bytes:
        """The mark up to which :meth:`purge_some` deletes: messages that are published later stay."""
        return parts.split_mark(self._run.read(lambda work: topology.last_stamp(work, queue)))[0]

    def purge_some(self, queue: str, mark: bytes = b"") -> tuple[int, bytes]:
        """Run one transaction of :meth:`purge`. Returns how many, and the next ``mark``; b"" first and at the end."""
        return self._run.as_one(partial(self._purge_some, queue, mark))

    def _purge_some(self, queue: str, mark: bytes) -> tuple[int, bytes]:
        last, cursor = parts.split_mark(mark or self.last(queue))
        purged, cursor = self._purge_part(queue, last, cursor)
        return purged, parts.mark(last, cursor)

    def _purge(self, queue: str, last: bytes, cursor: bytes = b"") -> int:
        total = 0
        while True:
            purged, cursor = self._purge_part(queue, last, cursor)
            total += purged
            if not cursor:
                return total

    def _purge_part(self, queue: str, last: bytes, cursor: bytes) -> tuple[int, bytes]:
        return self._run.part(topology.purge_part, topology.MESSAGES_PER_PURGE, queue, last, cursor)

    def expire(self, queue: str, last_use: bytes) -> bool:
        """Delete a queue unless it was used since ``last_use``."""
        return self._delete(queue, lambda work: topology.expire(work, queue, last_use)) is not None

    def remove_consumer(self, session_id: SessionId, queue: str, tag: str) -> None:
        """Remove a consumer; an auto-delete queue is deleted with its last one."""
        deleted = self._delete(queue, lambda work: topology.remove_consumer(work, session_id, queue, tag))
        if deleted is not None:
            self._purge_rest(queue, deleted)

    def drop_consumers_part(self, session_id: SessionId) -> bool:
        """Remove some consumers of a fenced session, and the auto-delete and exclusive queues that end with them.

        The duties purge these queues. True if the session has further consumers.
        """
        vanished, more = self._run.part(topology.drop_consumers, topology.CONSUMERS_PER_TRANSACTION, session_id)
        for queue in vanished:
            self._run.routing.forget_queue(queue)
        return more

    def leave(self, session_id: SessionId, tags: Collection[str]) -> None:
        """Make these consumers of the session inactive in all queues: others take over.

        Consumers of a fenced session are left alone: its end makes them inactive, once its messages are released.
        """

        def body(work: Work) -> None:
            work.tr.add_read_conflict_key(work.keys.session(session_id))
            asked = [work.keys.session(session_id)], [(*work.keys.all_singles, 0)]
            (own,), (records,) = work.tr.get_together(*asked, snapshot=True)
            if own is not None:
                single.leave_each(work, session_id, records, tags)

        self._run.write(body)

    def set_control(self, queue: str, control: QueueControl) -> None:
        """Pause or resume a queue, set where new keys enter its ring, limit keys that have no limits of their own."""

        def verb(work: Work) -> None:
            limit_changes.set_control(work, queue, control, partial(topology.declared_for_claims, work, queue))

        self._change(queue, verb)

    def reset_control(self, queue: str) -> None:
        """Undo all changes of the queue's control: its arguments apply again."""

        def verb(work: Work) -> None:
            declared = partial(topology.declared_for_claims, work, queue)
            ageing = declared()["ageing"]
            control = QueueControl(ageing=None if ageing is None else min(ageing, LONGEST_S))
            limit_changes.set_control(work, queue, control, declared)

        self._change(queue, verb)

    def change_control(self, queue: str, *, every_key: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Change these fields of the queue's control, and of its ``every_key``, in one transaction."""
        self._change(queue, lambda work: limit_changes.change_control(work, queue, changes, every_key or {}))

    def limit(self, queue: str, key: str, limits_: KeyLimits | None) -> None:
        """Set the limits of one key; None removes them. They apply from the next claim on."""
        self._change(queue, lambda work: limit_changes.limit(work, queue, key, limits_))

    def change_limits(self, queue: str, key: str, **changes: Any) -> KeyLimits:
        """Change these limits of one key, in one transaction; its others stay. Returns all of them."""
        return self._change(queue, lambda work: limit_changes.change(work, queue, key, changes))

    def _change(self, queue: str, verb: Callable[[Work], T]) -> T:
        """Change a queue's settings, and follow the change up."""
        changed = self._run.write(verb)
        self._run.routing.forget_queue(queue)
        self.follow_limits(queue)
        return changed

    def follow_limits(self, queue: str) -> None:
        """Follow up a change of the queue's limits (``limit_changes.py``); after many parts, the duties do the rest."""
        for _ in range(MOST_PARTS):
            if not self.follow_limits_part(queue):
                return

    def declare_exchange(self, exchange: Exchange) -> None:
        """Create an exchange. Raises ``NotEquivalent`` if it has another type, ``QueueError`` for a long name."""
        check_text("exchange's name, which Celery takes from its queue,", exchange.name, LONGEST_NAME)
        self._run.write(lambda work: topology.declare_exchange(work, exchange))

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Bind a queue. Idempotent. Raises ``ExchangeNotFound``, and ``QueueError`` for a key over AMQP's 255 bytes."""
        for name, text in (("queue's name", queue), ("routing key", routing_key)):
            check_text(name, text, LONGEST_NAME)
        self._run.write(lambda work: topology.bind(work, queue, exchange, routing_key))
