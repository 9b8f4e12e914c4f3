"""Administration: queues, exchanges, limits and dead letters, as people and programs arrange them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kombu_fdb.engine.dead_letters import replay, scan
from kombu_fdb.engine.dead_letters.replay import Moved
from kombu_fdb.engine.facade.budget import Portion
from kombu_fdb.engine.facade.working import Working
from kombu_fdb.engine.inspection import browse, cancel, pages
from kombu_fdb.engine.messages import move
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.scheduling import limits, relimit
from kombu_fdb.engine.stored.effects import READY
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.topology import control
from kombu_fdb.errors import LimitExceeded, QueueError
from kombu_fdb.model import (
    LONGEST_NAME,
    KeyLimits,
    Peeked,
    QueueControl,
)
from kombu_fdb.primitives import ranges
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

__all__ = ["Administration"]

#: Transactions in which the process that changed limits tells everybody; the duties do what is left.
MOST_PARTS = 2_000


class Administration(Working):
    """The verbs of operators, and of declarations."""

    def replay(self, queue: str, limit: int) -> int:
        """Bring up to ``limit`` of the oldest messages of ``<queue>.dead`` back to ``queue``. Returns how many."""
        walk, cursor, total = self.walk(queue + DEAD_SUFFIX), b"", 0
        while total < limit:
            moved, cursor = self.replay_part(walk, cursor, limit - total)
            total += moved
            if not cursor:
                break
        return total

    def walk(self, dead: str, wanted: scan.Wanted | None = None) -> scan.Walk:
        """A walk through a queue of dead letters that begins now: what comes later is behind its end."""
        last = self._read(lambda work: work.tr.get(self.keys.bell(dead), snapshot=True))
        return scan.Walk(dead, wanted or scan.Wanted(), scan.NO_LAST if last is None else last)

    def letters_part(self, walk: scan.Walk, cursor: bytes, limit: int) -> tuple[list[Peeked], bytes]:
        """Up to ``limit`` dead letters, without changing them, and the cursor to go on with; b"" at both ends."""

        def body(work: Work) -> tuple[list[Peeked], bytes]:
            part = scan.look_through(work, walk, cursor, limit)
            return [browse.look(work, walk.dead, letter[:2]) for letter in part.letters], part.cursor

        return self._read(body)

    def replay_part(self, walk: scan.Walk, cursor: bytes, limit: int, *, to: str | None = None) -> Moved:
        """Bring up to ``limit`` dead letters back, in one transaction. Raises ``QueueNotFound``; nothing moved then."""

        def body(work: Work) -> Moved:
            return replay.replay_part(work, walk, cursor, limit, to=to)

        return self._write(body)

    def discard_part(self, walk: scan.Walk, cursor: bytes, limit: int) -> Moved:
        """Delete up to ``limit`` dead letters, in one transaction."""
        return self._write(lambda work: replay.discard_part(work, walk, cursor, limit))

    def declare_queue(self, declaration: QueueDeclaration) -> None:
        """Create a queue or update its arguments. Raises ``LimitExceeded`` if its name is over ``LONGEST_NAME``."""
        if ranges.utf8_bytes("queue's name", declaration.name) > LONGEST_NAME:
            raise LimitExceeded("the queue's name is too long", name=declaration.name[:80], longest_bytes=LONGEST_NAME)
        self._write(lambda work: control.declare_queue(work, declaration))
        self.routing.forget_queue(declaration.name)

    def set_control(self, queue: str, control: QueueControl) -> None:
        """Pause or resume a queue, choose when newcomers get their turn, limit every key without limits of its own."""
        self._write(lambda work: limits.set_control(work, queue, control))
        self.routing.forget_queue(queue)
        self.follow_limits(queue)

    def limit(self, queue: str, key: str, limits_: KeyLimits | None) -> None:
        """Set the limits of one key; None removes them. They count from the next claim on."""
        self._write(lambda work: limits.limit(work, queue, key, limits_))
        self.routing.forget_queue(queue)
        self.follow_limits(queue)

    def change_limits(self, queue: str, key: str, **changes: Any) -> KeyLimits:
        """Change these limits of one key, in one transaction; its others stay. Returns all of them."""
        changed = self._write(lambda work: limits.change(work, queue, key, changes))
        self.routing.forget_queue(queue)
        self.follow_limits(queue)
        return changed

    def change_control(self, queue: str, *, every_key: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Change these fields of the queue's control, and of its ``every_key``, in one transaction; others stay."""
        self._write(lambda work: limits.change_control(work, queue, changes, every_key or {}))
        self.routing.forget_queue(queue)
        self.follow_limits(queue)

    def follow_limits(self, queue: str, most_parts: int = MOST_PARTS) -> None:
        """Do what a change of the queue's limits has left to do (``relimit.py``), in up to so many transactions."""
        for _ in range(most_parts):
            if not self.follow_limits_part(queue):
                return

    def follow_limits_part(self, queue: str) -> bool:
        """Do a part of it, in one transaction. Returns whether there may be another."""
        return self._write(lambda work: relimit.part(work, queue))

    def delete(self, queue: str, message_id: bytes) -> bool:
        """Delete a message in any state; whoever holds it loses its lease. False if it is not there. As ``find``."""
        # Again if it moved in between.
        while (row := self._find(queue, message_id)) is not None:
            if self._delete(queue, row):
                return True
        return False

    def _delete(self, queue: str, row: KeyValue) -> bool:
        return self._write(lambda work: browse.delete(work, queue, row))

    def delete_at(self, queue: str, state: str, position: bytes, message_id: bytes) -> bool:
        """Delete a message at a page's position; False if it has moved. Whoever holds it loses its lease."""
        return self._write(lambda work: pages.delete_at(work, queue, state, position, message_id))

    def replay_at(self, dead: str, position: bytes, message_id: bytes) -> str | None:
        """Bring a dead letter at a page's position back to the queue it died in; None if it has moved.

        Returns that queue. Raises ``QueueError`` for a message that is no dead letter, or has outlived its time.
        """

        def body(work: Work) -> str | None:
            row = pages.row_at(work, dead, READY, position, message_id)
            return None if row is None else replay.replay_row(work, dead, row)

        return self._write(body)

    def take_back(self, task_id: str) -> list[Peeked]:
        """Delete the task's messages that nobody holds: ready, delayed and dead ones. Returns them."""
        return self._write(lambda work: cancel.take_back(work, task_id))

    def purge(self, queue: str) -> int:
        """Delete all ready and delayed messages that are there when it begins; leased ones stay. Returns how many.

        What comes meanwhile stays, and so does what becomes due in the meantime.
        """
        last = self._read(lambda work: control.last_stamp(work, queue))
        return self._purge(queue, last, b"")

    def _purge(self, queue: str, last: bytes, cursor: bytes) -> int:
        portion, total = Portion(control.MESSAGES_PER_PURGE), 0
        while True:
            purged, cursor = portion.run(partial(self._purge_part, queue, last, cursor))
            total += purged
            if not cursor:
                return total

    def _purge_part(self, queue: str, last: bytes, cursor: bytes, limit: int) -> tuple[int, bytes]:
        return self._write(lambda work: control.purge_part(work, queue, last, cursor, limit))

    def move(self, source: str, target: str, limit: int | None = None, *, key: str | None = None) -> int:
        """Move up to ``limit`` ready and delayed messages (None: all that are there when it begins), as they are.

        Returns how many. ``key``: only ready ones of this key. Raises ``QueueError`` if both are the same queue. See
        :mod:`kombu_fdb.engine.messages.move`.
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
        return self._write(lambda work: move.move(work, source, target, limit, key=key))

    def delete_queue(
        self, queue: str, *, if_unused: bool = False, if_empty: bool = False, if_idle: bool = False
    ) -> int | None:
        """Delete a queue, its bindings and its waiting messages. Returns how many messages; None if refused.

        ``if_idle``: refused while messages are in flight.
        """
        conditions = {"if_unused": if_unused, "if_empty": if_empty, "if_idle": if_idle}
        return self._delete_queue(queue, lambda work: control.delete_queue(work, queue, **conditions))

    def _delete_queue(self, queue: str, verb: Callable[[Work], bool]) -> int | None:
        """The messages go in the same transaction: what comes later is another queue's of that name.

        Those for which it is too small follow at once.
        """

        def verb_and_purge(work: Work, limit: int) -> tuple[bytes, int, bytes] | None:
            last = control.last_stamp(work, queue)
            if not verb(work):
                return None
            return last, *control.purge_part(work, queue, last, b"", limit)

        deleted = Portion(control.MESSAGES_PER_PURGE).run(
            lambda limit: self._write(lambda work: verb_and_purge(work, limit))
        )
        if deleted is None:
            return None
        self.routing.forget_queue(queue)
        last, purged, following = deleted
        return purged + (self._purge(queue, last, following) if following else 0)

    def declare_exchange(self, exchange: Exchange) -> None:
        """Create an exchange. Raises ``NotEquivalent`` if it has another type, ``QueueError`` for a long name."""
        ranges.check_text("exchange's name, which Celery takes from its queue,", exchange.name, LONGEST_NAME)
        self._write(lambda work: control.declare_exchange(work, exchange))

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange and its bindings; False if refused. The queues stay."""
        return self._write(lambda work: control.delete_exchange(work, name, if_unused=if_unused))

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Raises ``ExchangeNotFound``, and ``QueueError`` for a key of more than AMQP's 255 bytes. Idempotent."""
        for name, text in (("queue's name", queue), ("routing key", routing_key)):
            ranges.check_text(name, text, LONGEST_NAME)
        self._write(lambda work: control.bind(work, queue, exchange, routing_key))

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Idempotent."""
        self._write(lambda work: control.unbind(work, queue, exchange, routing_key))

    def check_format(self) -> None:
        """Raises ``FormatError`` if a newer version wrote this store; marks an empty one."""
        self._write(control.check_format)
