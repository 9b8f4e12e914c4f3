"""A channel's unacked messages: how those that were handed out are settled.

Model. *The table* has the deliveries that the channel holds (:class:`Held`). A delivery is handed out under its own tag
(one per claim, never the publisher's). Then it is exactly one of

* acknowledged: it leaves the table at once, so that its place is free; the store learns of the ack a moment later;
* requeued or rejected: it leaves the table when the store has committed that. After an error, a Celery worker does not
  retry: then it leaves the table once another thread has taken over the retries (:meth:`Message.reject_log_error`);
* overdue: its time to run has passed, and it was released on the consumer's behalf (``process/time_to_run.py``). It
  stays in the table, marked as late, until the consumer tries to settle it, which has no effect. So a consumer that
  hangs gets no other message in its place;
* released with everything else the channel holds when it closes. If an attempt was made (the callback raised, or the
  worker's pool had begun the task), it counts, and the message returns as redelivered;
* orphaned: the connection has failed, and the channel is closed, but the message may still be in progress. The channel
  keeps the client it first consumed with, and the lease belongs to the process's session, not to the connection, so it
  stays valid: a late ack through the old ``Message`` succeeds. An unreferenced message will never be settled, so its
  finalizer releases it.

Settling a tag that is not in the table changes nothing. Leases belong to the process: a forked child has copies of
them, but settles nothing, whatever it closes.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from kombu.transport import virtual

from kombu_fdb.errors import ForkedError, StoreError
from kombu_fdb.model import Lease
from kombu_fdb.primitives.interruption import surely
from kombu_fdb.process.client import Client
from kombu_fdb.transport.connection import BrokerConnection
from kombu_fdb.transport.consuming.dispatch import Credit
from kombu_fdb.transport.consuming.fetcher import MANY_ACKS

logger = logging.getLogger(__name__)

LATE = (
    "delivery %r was settled after its time to run (x-ttr, x-consumer-timeout): the message had been released, and may "
    "run twice. This settlement changes nothing; give such messages more time."
)


class QoS(virtual.QoS):
    """The unacked messages of one channel. Thread-safe.

    Replaces the base's table, which uses the publisher's tag as its key, and whose acks do nothing.
    """

    def __init__(self, connection: BrokerConnection, credit: Credit) -> None:
        # Not the base's constructor, which adds a finalizer: at exit the client releases everything, for all channels.
        self._connection = connection
        self._credit = credit
        self._held = credit.held
        self._client: Client | None = None
        self._pid = os.getpid()
        #: Whether the channel is closed: then another thread settles.
        self.ended = False

    @property
    def client(self) -> Client:
        """The client with which the channel consumes, even after a lost connection. Raises ``ForkedError``."""
        if os.getpid() != self._pid:  # ``is_foreign`` inlined: each message would call it twice
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
        """Whether this is a forked child of the process that received the messages."""
        return os.getpid() != self._pid

    # -- room ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many deliveries are unsettled."""
        return len(self._held.leases)

    @property
    def prefetch_count(self) -> int:
        return self._credit.prefetch

    @prefetch_count.setter
    def prefetch_count(self, count: int) -> None:
        self._credit.prefetch = count or 0

    @property
    def can_consume(self) -> Callable[[], bool]:
        return self._credit.can_consume

    @can_consume.setter
    def can_consume(self, replaced: Callable[[], bool]) -> None:
        self._credit.can_consume = replaced

    def can_consume_max_estimate(self) -> int | None:
        """How many more messages may be handed out; None for no limit."""
        if not self._credit.prefetch:
            return None
        return max(self._credit.prefetch - self._held.consumed, 0)

    # -- in ----------------------------------------------------------------------------------------------------------

    def holds(self, delivery_tag: int) -> bool:
        """Whether it was handed out with acks and is not settled."""
        return delivery_tag in self._held.leases

    def append(self, message: Any, delivery_tag: int) -> None:
        """Remember the message of a held delivery, weakly."""
        self._held.messages[delivery_tag] = weakref.ref(message)

    def get(self, delivery_tag: int) -> Any:
        """The unsettled message of this tag. Raises ``KeyError``."""
        return self._held.messages[delivery_tag]()

    # -- out ---------------------------------------------------------------------------------------------------------

    def ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Acknowledge one delivery; with ``multiple`` all up to this one, or all for tag 0, as in AMQP."""
        if multiple:
            for earlier in [tag for tag in list(self._held.leases) if tag < delivery_tag or not delivery_tag]:
                self.ack(earlier)
            if not delivery_tag:
                return
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
        else:
            self.ack_lease(delivery_tag, lease)

    def ack_lease(self, tag: int, lease: Lease) -> None:
        """Take the delivery out of the table, and settle it soon: with others if a receiver runs, else at once.

        ``tag``: one in the table, or that of a delivery without acks. After a signal handler's exception, either the
        ack is noted, or the delivery is still held and can be acknowledged again.
        """
        client, credit = self.client, self._credit
        try:
            if client.time_to_run.timers:
                client.time_to_run.forget((lease,))  # the consumer was in time, even if the ack is stored later
            client.acks.append(lease)
            credit.held.drop(tag)
        except BaseException:
            if lease in client.acks:
                credit.held.drop(tag)
            raise
        enough = max(1, credit.prefetch // 2) if credit.prefetch else MANY_ACKS  # to be worth a claim
        if self._connection.on_ack(len(client.acks), enough, was_blocked=credit.was_blocked):
            return
        if self.ended:
            client.nudge()
        else:
            client.flush_acks()

    def explain(self, delivery_tag: int, details: dict[str, Any], *, reason: str = "rejected") -> None:
        """Note, for its dead letter, why a held delivery is about to be rejected, or requeued for the last time.

        ``reason`` is for a rejection; a message over its delivery limit gets a reason of its own.
        """
        self._held.explain(delivery_tag, reason, details)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Dead-letter it; with ``requeue``, release it, counting the attempt. Raises a ``StoreError``: try again."""
        self._settle(delivery_tag, requeue=requeue)

    def release(self, delivery_tag: int, pause_ms: int) -> None:
        """Release it, counting the attempt; no consumer gets it before the pause is over. Raises a ``StoreError``."""
        self._settle(delivery_tag, requeue=True, pause_ms=pause_ms)

    def settle_later(self, delivery_tag: int, *, requeue: bool) -> None:
        """Have another thread reject a delivery, or requeue it, because its consumer will not retry."""
        lease = self._held.leases.get(delivery_tag)

        def settle() -> None:
            if lease is not None and delivery_tag not in self._held.late:
                reason, details = self._held.explanation(delivery_tag)
                self.client.settle_later(lease, details, reason=reason, requeue=requeue)

        def forget() -> None:
            self._held.drop(delivery_tag)
            self._connection.on_room()

        surely(settle, forget)

    def _settle(self, delivery_tag: int, *, requeue: bool, pause_ms: int = 0) -> None:
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
            return
        # Its room is freed only after its release: then the next claim finds it at its place.
        reason, details = self._held.explanation(delivery_tag)
        if requeue:
            due_ms = self._connection.now_ms() + pause_ms if pause_ms else 0
            self.client.requeue([lease], details, due_ms=due_ms)
        else:
            self.client.reject([lease], reason=reason, **details)
        self._held.drop(delivery_tag)
        self._connection.on_room()

    def _pop(self, delivery_tag: int) -> None:
        """Forget a delivery that is settled."""
        late = delivery_tag in self._held.late
        self._held.drop(delivery_tag)
        if late:
            logger.warning(LATE, delivery_tag)
            self._connection.on_room()
        else:
            logger.warning("delivery %r was settled before, or released when its channel closed: ignored", delivery_tag)

    def note_attempt(self, delivery_tag: int) -> None:
        """Note that its consumer has begun, and may never report the end: any release counts as an attempt."""
        lease = self._held.leases.get(delivery_tag)
        if lease is not None:
            self.client.attempted.add(lease)

    # -- all at once -------------------------------------------------------------------------------------------------

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Release all unsettled messages, counting the attempt. Errors are raised, not returned."""
        self._release_held(counted=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """When the channel closes, release all messages; only attempts that were made count."""
        if self._held.leases:
            # Celery's own tests wait for this text.
            logger.info("Restoring %d unacknowledged message(s)", len(self))
        self._release_held(counted=False)

    def _release_held(self, *, counted: bool) -> None:
        held = dict(self._held.leases)
        for tag in self._held.drop_late():
            held.pop(tag, None)
        try:
            self._release(list(held.values()), counted=counted)
        except BaseException as error:
            if not isinstance(error, StoreError):  # a signal handler's, perhaps before the client took over the leases
                self._release_later(list(held.values()))
            raise
        finally:  # after an error, the client releases them as soon as it can
            for tag in held:
                self._held.drop(tag)
        self._connection.on_room()

    def _release(self, leases: list[Lease], *, counted: bool) -> None:
        """Release now, or as soon as the store answers. Raises a ``StoreError``; uncounted, only once per outage."""
        if not leases:
            return
        client = self.client
        if client.suspected and not counted:
            client.release_later(leases)
            return
        try:
            client.release(leases, counted=counted)
        except StoreError:
            client.suspected = True
            raise

    def orphan(self) -> None:
        """After a lost connection: keep messages in progress; release those that can no longer be settled."""
        unreferenced = []
        self._held.drop_late()
        for tag, lease in list(self._held.leases.items()):
            message = self._held.message(tag)
            if message is None:
                unreferenced.append(lease)
                self._held.leases.pop(tag, None)
            else:
                weakref.finalize(message, self._abandon, tag).atexit = False
        # Even if there are none, so that the client is noted before the connection is forgotten.
        self._release_later(unreferenced)

    def _abandon(self, delivery_tag: int) -> None:
        """Release an unreferenced message. A finalizer: must not block, and takes no lock."""
        lease = self._held.leases.pop(delivery_tag, None)
        if lease is not None:
            self._release_later([lease])

    def _release_later(self, leases: list[Lease]) -> None:
        """Release in another thread. For a finalizer: never blocks, takes no lock."""
        if not self.is_foreign:
            self.client.release_later(leases)


class Message(virtual.Message):
    """The message that a channel delivers."""

    def reject_log_error(
        self, logger: logging.Logger, errors: tuple[type[Exception], ...], requeue: bool = False
    ) -> None:
        """Reject for a Celery worker, which only logs a store's error and forgets the message.

        So another thread repeats the rejection until the store answers. As with a late ack, the message stays leased
        until then, so its task, which has run, does not run again while its worker lives. Guarantee: NOT-TWICE.
        """
        super().reject_log_error(logger, errors, requeue=requeue)
        if not self.acknowledged:
            self.channel.qos.settle_later(self.delivery_tag, requeue=requeue)
