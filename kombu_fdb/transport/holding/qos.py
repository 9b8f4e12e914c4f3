"""How a channel's deliveries are settled, as kombu asks for it.

Model. A delivery is *handed out* under a tag of its own (one per claim, never the publisher's), and then exactly one of

* acknowledged: it leaves the table at once, so that its place is free; the store hears of it a moment later;
* requeued or rejected: it leaves the table when the store has done it;
* overdue: its time to run has passed, and it was released in the consumer's stead (``process/time_to_run.py``). It
  stays in the table, as late, until the consumer settles it in vain: so a consumer that hangs gets no other message for
  it;
* released with everything else the channel holds when it closes. It counts as an attempt if one was made: the callback
  raised, or the worker's pool had begun with the task. Then it comes back as redelivered;
* orphaned: the connection failed, and the channel is gone, but the message may still be worked on. Its lease belongs to
  the process's session, not to the connection, so it stays valid: a late ack through the old ``Message`` succeeds. A
  message without references will never be settled, and is released by its finalizer.

Settling a tag that is not in the table changes nothing. Acks come from any thread. The table is the credit's
(``unacked.py``); the settler does what is to be done in the store.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from kombu.transport import virtual

from kombu_fdb.transport.holding.unacked import Credit, Settling

logger = logging.getLogger(__name__)

LATE = (
    "delivery %r was settled after its time to run (x-ttr, x-consumer-timeout): the message had been released, and may "
    "run twice. This settlement changes nothing; give such messages more time."
)


class QoS(virtual.QoS):
    """Per channel. The base class's table is replaced: it is keyed by the publisher's tag, and its acks go nowhere."""

    def __init__(self, credit: Credit, settler: Settling) -> None:
        # Without the base's finalizer: the client hands everything back at exit, of all channels.
        self._credit = credit
        self._held = credit.held
        self._settler = settler

    # -- room ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many are unsettled."""
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
        """How many more may be handed out; None for no limit."""
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
        """Acknowledge one, or with ``multiple`` all handed out up to this one, as AMQP has it."""
        if multiple:
            for earlier in [tag for tag in list(self._held.leases) if tag < delivery_tag]:
                self.ack(earlier)
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
        else:
            self._settler.ack(delivery_tag, lease)

    def explain(self, delivery_tag: int, details: dict[str, Any], *, reason: str = "rejected") -> None:
        """Why a held delivery is about to be rejected, or put back for the last time: for its dead letter.

        ``reason`` is that of a rejection; one that came back too often has its own.
        """
        self._held.explain(delivery_tag, reason, details)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Put it back where it was, counting the attempt; or dead-letter it. Raises a ``StoreError``: try again."""
        self._settle(delivery_tag, requeue=requeue)

    def release(self, delivery_tag: int, pause_ms: int) -> None:
        """Put it back, counting the attempt; no consumer gets it before the pause is over. Raises as :meth:`reject`."""
        self._settle(delivery_tag, requeue=True, pause_ms=pause_ms)

    def give_up(self, delivery_tag: int) -> None:
        """It could not be settled, and no caller will try again: another thread releases it, and the attempt counts."""
        self.note_attempt(delivery_tag)
        self._abandon(delivery_tag)
        self._held.drop(delivery_tag)
        self._settler.on_room()

    def _settle(self, delivery_tag: int, *, requeue: bool, pause_ms: int = 0) -> None:
        lease = self._held.leases.get(delivery_tag)
        if lease is None or delivery_tag in self._held.late:
            self._pop(delivery_tag)
            return
        # Its room is free only when it is back in the store: the next claim finds it at its place.
        reason, details = self._held.explanation(delivery_tag)
        self._settler.settle(lease, requeue=requeue, pause_ms=pause_ms, reason=reason, details=details)
        self._held.drop(delivery_tag)
        self._settler.on_room()

    def _pop(self, delivery_tag: int) -> None:
        """There is nothing to settle any more."""
        late = delivery_tag in self._held.late
        self._held.drop(delivery_tag)
        if late:
            logger.warning(LATE, delivery_tag)
            self._settler.on_room()
        else:
            logger.warning("delivery %r was settled before, or released when its channel closed: ignored", delivery_tag)

    def note_attempt(self, delivery_tag: int) -> None:
        """Its consumer has begun with it, and may never tell how that ended. However it comes back, that counts."""
        lease = self._held.leases.get(delivery_tag)
        if lease is not None:
            self._settler.note_attempt(lease)

    # -- all at once -------------------------------------------------------------------------------------------------

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Hand back all unsettled messages; the attempt counts. Errors are raised, not returned."""
        self._release_held(counted=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The channel closes: release, uncounted but for those with an attempt."""
        if self._held.leases:
            # Celery's own tests wait for this text.
            logger.info("Restoring %d unacknowledged message(s)", len(self))
        self._release_held(counted=False)

    def _release_held(self, *, counted: bool) -> None:
        held = dict(self._held.leases)
        for tag in self._held.drop_late():
            held.pop(tag, None)
        try:
            self._settler.release(list(held.values()), counted=counted)
        finally:  # else the client keeps them, to hand them back as soon as it can
            for tag in held:
                self._held.drop(tag)
        self._settler.on_room()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: there is no visibility timeout."""

    def orphan(self) -> None:
        """The connection is lost. Keep what is still worked on; release what can't be settled any more."""
        unreferenced = []
        self._held.drop_late()
        for tag, lease in list(self._held.leases.items()):
            message = self._held.message(tag)
            if message is None:
                unreferenced.append(lease)
                self._held.leases.pop(tag, None)
            else:
                weakref.finalize(message, self._abandon, tag).atexit = False
        # Even if there are none: from here on the settler knows its client, when the connection is forgotten.
        self._settler.release_later(unreferenced)

    def _abandon(self, delivery_tag: int) -> None:
        """A finalizer: must not block, and takes no lock."""
        lease = self._held.leases.pop(delivery_tag, None)
        if lease is not None:
            self._settler.release_later([lease])


class Message(virtual.Message):
    """What a channel delivers."""

    def reject_log_error(
        self, logger: logging.Logger, errors: tuple[type[Exception], ...], requeue: bool = False
    ) -> None:
        """How Celery rejects: what the store could not do is logged, and the message forgotten.

        So it would stay leased for as long as its worker lives. Instead another thread releases it, and it comes to be
        rejected again.
        """
        super().reject_log_error(logger, errors, requeue=requeue)
        if not self.acknowledged:
            self.channel.qos.give_up(self.delivery_tag)
