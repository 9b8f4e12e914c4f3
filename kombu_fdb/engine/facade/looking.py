"""Looking: what is in the store. Snapshot reads; nothing here changes or conflicts with anything."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.facade.transactions import Transactions
from kombu_fdb.engine.inspection import browse, cancel, inspect, pages
from kombu_fdb.engine.metrics import keytotals, totals
from kombu_fdb.engine.scheduling import limits, single
from kombu_fdb.engine.stored import session
from kombu_fdb.model import (
    KeyCounts,
    KeyLimits,
    Listed,
    Page,
    Peeked,
    QueueControl,
    QueueCounts,
    QueueFacts,
    RoundSnapshot,
    SessionFacts,
)
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

__all__ = ["Looking"]

#: Queues and keys looked at in one transaction.
QUEUES_PER_LOOK = 50
KEYS_PER_LOOK = 1_000


class Looking(Transactions):
    """The verbs that only read."""

    def consumers(self, queue: str) -> list[bytes]:
        """The sessions that consumed the queue, or waited for it, at their last heartbeat."""
        return [session_id for session_id, beat, _ in self.beats() if queue in session.consumed_of(beat)]

    def beats(self) -> list[tuple[bytes, bytes, float]]:
        """All sessions' last heartbeats and times to live, for a :class:`~kombu_fdb.engine.upkeep.sweep.Observer`."""
        return self._read(lambda tr: session.beats(tr, self.keys))

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

    def key_totals(self) -> dict[str, keytotals.KeyTotals]:
        """The same by queue, key and event, of the busiest keys; key "": of a queue's others (``keytotals.py``)."""
        found: dict[str, keytotals.KeyTotals] = {}
        begin = self.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, found[queue], begin = part
        return found

    def _key_totals(self, begin: bytes) -> tuple[str, keytotals.KeyTotals, bytes] | None:
        return self._read(lambda tr: keytotals.read_next(tr, self.keys, begin))

    def control(self, queue: str) -> QueueControl:
        """How the queue is worked on."""
        return self._read(lambda tr: limits.read_control(tr, self.keys, queue))

    def limits(self, queue: str, key: str) -> KeyLimits:
        """What holds for the key: its own limits, or those of every key."""
        return self._read(lambda tr: limits.read(tr, self.keys, queue, key))

    def keys_of(self, queue: str) -> dict[str, KeyCounts]:
        """The keys that have messages or limits. Guarantee: COUNTS."""
        return self._read(lambda tr: inspect.keys_of(tr, self.keys, queue))

    def key_page(self, queue: str, *, after: str | None = None, limit: int = KEYS_PER_LOOK) -> dict[str, KeyCounts]:
        """:meth:`keys_of` in pages: up to ``limit`` keys by name, behind ``after``; empty at the end."""
        return self._read(lambda tr: inspect.key_page(tr, self.keys, queue, after, limit))

    def peek(self, queue: str, limit: int, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
        """What a lone consumer would get next. See :func:`kombu_fdb.engine.inspection.browse.peek`."""
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

    def find_task(self, task_id: str) -> list[Peeked]:
        """All messages of the task, in any state, wherever they are. Costs do not grow with the store."""
        return self._read(lambda tr: cancel.find_task(tr, self.keys, task_id))

    def exchange(self, name: str) -> Exchange | None:
        return self._read(lambda tr: self.routing.read_exchange(tr, name))

    def exchanges(self) -> list[Exchange]:
        return self._read(lambda tr: inspect.exchanges(tr, self.keys))

    def bindings(self) -> list[tuple[str, str, str]]:
        """``(exchange, queue, routing key)`` of every binding."""
        return self._read(lambda tr: inspect.bindings(tr, self.keys))

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues a message would reach now."""
        return self._read(lambda tr: self.routing.route(tr, exchange, routing_key))

    def active_consumer(self, queue: str) -> tuple[bytes, str] | None:
        """Session and tag of the one consumer that a queue with ``x-single-active-consumer`` serves; None if nobody."""
        return self._read(lambda tr: single.active(tr, self.keys, queue))
