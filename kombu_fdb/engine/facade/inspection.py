"""Inspection: what is in the store. Snapshot reads; nothing here changes or conflicts with anything."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.inspection import browse, inspect, pages
from kombu_fdb.engine.scheduling import limits, single
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.keyspace.layout import Range
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
    SessionId,
    View,
)
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

#: Queues and keys looked at in one transaction.
QUEUES_PER_LOOK = 50
KEYS_PER_LOOK = 1_000


class Inspection:
    """The verbs that only read."""

    def __init__(self, run: Transactions) -> None:
        self._run = run

    def consumers(self, queue: str) -> list[SessionId]:
        """The sessions that consumed the queue, or waited for it, at their last heartbeat."""
        return [
            session_id for session_id, beat, _ in self._run.read(session.beats) if queue in session.consumed_of(beat)
        ]

    def queue(self, name: str) -> QueueDeclaration | None:
        """Its declaration; None if there is no such queue."""
        return self._run.read(lambda work: self._run.routing.read_queue(work.tr, name))

    def exists(self, name: str) -> bool:
        """Whether there is such a queue. See :func:`kombu_fdb.engine.inspection.inspect.exists`."""
        return self._run.read(lambda work: inspect.exists(work, name))

    def consumer_count(self, queue: str) -> int:
        """How many consumers of connections it has."""
        return self._run.read(lambda work: inspect.consumer_count(work, queue))

    def queues(self) -> dict[str, QueueCounts]:
        """All queues that are declared or hold messages, with their counters."""
        return self._run.read(inspect.queues)

    def counts(self, queue: str) -> QueueCounts:
        """Its counters; zeros if there is no such queue. Guarantee: COUNTS."""
        return self._run.read(lambda work: inspect.counts(work, queue))

    def facts(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Declaration, control and age of these queues; in as many transactions as it takes."""
        found: dict[str, QueueFacts] = {}
        for start in range(0, len(queues), QUEUES_PER_LOOK):
            found |= self._facts(list(queues[start : start + QUEUES_PER_LOOK]))
        return found

    def _facts(self, queues: list[str]) -> dict[str, QueueFacts]:
        return self._run.read(lambda work: inspect.facts(work, queues))

    def sessions(self, *, held: bool = False) -> list[SessionFacts]:
        """Every session that is open or not yet cleaned up. ``held``: with the number of its messages."""
        return self._run.read(lambda work: inspect.sessions(work, held=held))

    def control(self, queue: str) -> QueueControl:
        """How the queue is worked on."""
        return self._run.read(lambda work: limits.read_control(work, queue))

    def limits(self, queue: str, key: str) -> KeyLimits:
        """What holds for the key: its own limits, or those of every key."""
        return self._run.read(lambda work: limits.read(work, queue, key))

    def keys_of(self, queue: str) -> dict[str, KeyCounts]:
        """The keys that have messages or limits. Guarantee: COUNTS."""
        return self._run.read(lambda work: inspect.keys_of(work, queue))

    def key_page(
        self, queue: str, *, after: str | None = None, limit: int = KEYS_PER_LOOK, prefix: str = ""
    ) -> dict[str, KeyCounts]:
        """:meth:`keys_of` in pages: up to ``limit`` keys by name, behind ``after``; empty at the end.

        ``prefix``: only those that begin with it.
        """
        return self._run.read(lambda work: inspect.key_page(work, queue, after, limit, prefix))

    def peek(self, queue: str, limit: int, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
        """What a lone consumer would get next. See :func:`kombu_fdb.engine.inspection.browse.peek`."""
        return self._run.read(lambda work: browse.peek(work, queue, limit, key=key, reverse=reverse))

    def delayed(self, queue: str, limit: int) -> list[Peeked]:
        """Up to ``limit`` delayed messages, the next due first."""
        return self._run.read(lambda work: browse.delayed(work, queue, limit))

    def snapshot(self, queue: str, limit: int) -> RoundSnapshot:
        """The current round and what waits behind it, of the first ``limit`` messages of the queue."""
        return self._run.read(lambda work: browse.snapshot(work, queue, limit))

    def taken(self, queue: str) -> list[Peeked]:
        """The messages under leases, by session."""
        return self._run.read(lambda work: browse.taken(work, queue))

    def find(self, queue: str, message_id: bytes) -> Peeked | None:
        """A message of the queue in any state. Reads the whole queue; may miss one that moves meanwhile."""
        row = self.find_row(queue, message_id)
        return None if row is None else self._run.read(lambda work: browse.look(work, queue, row))

    def find_row(self, queue: str, message_id: bytes) -> KeyValue | None:
        for begin, end in browse.ranges(self._run.keys, queue):
            row, following = None, begin
            while row is None and following < end:
                row, following = self._find_part(queue, message_id, (following, end))
            if row is not None:
                return row
        return None

    def _find_part(self, queue: str, message_id: bytes, whole: Range) -> tuple[KeyValue | None, bytes]:
        return self._run.read(lambda work: browse.find_part(work, queue, message_id, whole))

    def page(self, queue: str, view: View, limit: int) -> Page:
        """Some of its messages, at a cost that does not depend on the queue. See :func:`.pages.page`."""
        return self._run.read(lambda work: pages.page(work, queue, view, limit))

    def list_task(self, task_id: str) -> list[Listed]:
        """As :meth:`find_task`, with their positions."""
        return self._run.read(lambda work: pages.list_task(work, task_id))

    def read_at(self, queue: str, state: str, position: bytes) -> Listed | None:
        """The whole message at a page's position; None if it has moved."""
        return self._run.read(lambda work: pages.read_at(work, queue, state, position))

    def find_task(self, task_id: str) -> list[Peeked]:
        """The task's first 500 messages, in any state, wherever they are. Costs do not grow with the store."""
        return self._run.read(lambda work: pages.find_task(work, task_id))

    def exchange(self, name: str) -> Exchange | None:
        return self._run.read(lambda work: self._run.routing.read_exchange(work.tr, name))

    def exchanges(self) -> list[Exchange]:
        return self._run.read(inspect.exchanges)

    def bindings(self) -> list[tuple[str, str, str]]:
        """``(exchange, queue, routing key)`` of every binding."""
        return self._run.read(inspect.bindings)

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues a message would reach now."""
        return self._run.read(lambda work: self._run.routing.route(work.tr, exchange, routing_key))

    def active_consumer(self, queue: str) -> tuple[SessionId, str] | None:
        """Session and tag of the one consumer that a queue with ``x-single-active-consumer`` serves, or None."""
        return self._run.read(lambda work: single.active(work, queue))
