"""Settling: a channel's acks, rejections and releases, through the process's client.

A channel keeps the client it first consumed with, so that what it was given before its connection was lost can still be
settled: the leases are the session's, not the connection's. They are the process's as well: a forked child, which has a
copy of them, settles nothing, whatever it closes.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

from kombu_fdb.errors import ForkedError, StoreError
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.process.client import Client
from kombu_fdb.transport.holding.unacked import Credit

logger = logging.getLogger(__name__)

#: This many pending acks don't wait for more.
MANY_ACKS = 64


class Connected(Protocol):
    """A channel's connection, as its settler sees it."""

    @property
    def store(self) -> Client: ...

    def now_ms(self) -> int: ...

    def on_ack(self, pending: int, enough: int, *, was_blocked: bool) -> bool:
        """An ack waits, the ``pending``-th. False if no receiver runs that would settle it."""

    def on_room(self) -> None:
        """Room was made, or taken away."""


class Settling:
    """Settles what one channel was given. From any thread."""

    def __init__(self, connection: Connected, credit: Credit[Any]) -> None:
        self._connection = connection
        self._credit = credit
        self._client: Client | None = None
        self._pid = os.getpid()
        #: The channel is closed: another thread settles what comes now.
        self.ended = False

    @property
    def client(self) -> Client:
        """What the channel consumed with: stays the same when the connection is lost. Raises ``ForkedError``."""
        if os.getpid() != self._pid:  # as is_foreign, which each message would call three times
            raise ForkedError(
                "these messages were given to the parent process, which settles them",
                parent=self._pid,
                fix="Settle them there. What a child is to work on, it consumes through a connection of its own.",
            )
        if self._client is None:
            self._client = self._connection.store
        return self._client

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child of the process that was given the messages."""
        return os.getpid() != self._pid

    # -- acks --------------------------------------------------------------------------------------------------------

    def ack(self, tag: int, lease: Lease) -> None:
        """It leaves the table, and is settled soon: with others if a receiver runs, else at once.

        ``tag``: in the table, or of one that was handed out without acks. An exception out of a signal handler leaves
        it noted, or held, to be acknowledged again.
        """
        client, credit = self.client, self._credit
        try:
            if client.overdue.timers:
                client.overdue.forget((lease,))  # the consumer was in time, even if the store hears of it later
            client.acks.append(lease)
            credit.held.drop(tag)
        except BaseException:
            if lease in client.acks:
                credit.held.drop(tag)
            raise
        enough = max(1, credit.prefetch // 2) if credit.prefetch else MANY_ACKS  # for a claim of their own
        if self._connection.on_ack(len(client.acks), enough, was_blocked=credit.was_blocked):
            return
        if self.ended:
            client.nudge()
        else:
            client.flush_acks()

    # -- at once -----------------------------------------------------------------------------------------------------

    def settle(self, lease: Lease, *, requeue: bool, pause_ms: int, reason: str, details: dict[str, Any]) -> None:
        """Now. Raises a ``StoreError``; may be repeated. ``details`` go to the dead letter, if it becomes one."""
        if requeue:
            due_ms = self._connection.now_ms() + pause_ms if pause_ms else 0
            self.client.requeue([lease], details, due_ms=due_ms)
        else:
            self.client.reject([lease], reason=reason, **details)

    def refuse(self, delivery: Delivery, error: str, **details: str) -> None:
        """Dead-letter what no consumer can handle."""
        logger.error("dead-lettered message %s of queue %s: %s", delivery.message_id.hex(), delivery.queue, error)
        try:
            self.client.reject([delivery.lease], reason="malformed", error=error, **details)
        except StoreError:
            self.client.release_later([delivery.lease])

    def note_attempt(self, lease: Lease) -> None:
        """Whenever it is released, an attempt at it counts."""
        self.client.attempted.add(lease)

    def release(self, leases: list[Lease], *, counted: bool) -> None:
        """At once; if the store does not answer, as soon as it does. Raises a ``StoreError``, once in an outage."""
        if not leases:
            return
        client = self.client
        if client.suspected and not counted:
            client.release_later(leases)
            return
        try:
            client.release(leases, counted=counted)
        except StoreError:
            client.suspect()
            raise

    def release_later(self, leases: list[Lease]) -> None:
        """By another thread. For a finalizer: never blocks, takes no lock."""
        if not self.is_foreign:
            self.client.release_later(leases)

    # -- room --------------------------------------------------------------------------------------------------------

    def on_room(self) -> None:
        self._connection.on_room()
