"""Which deliveries a channel has handed out and not settled, and how many more it may have.

Model. A delivery is *handed out* under a tag of its own (one per claim, never the publisher's), and then exactly one of

* acknowledged: it leaves the table at once, so that its place is free; the store hears of it a moment later;
* requeued or rejected: it leaves the table when the store has done it;
* overdue: its time to run has passed, and it was handed back in the consumer's stead (``process/overdue.py``). It stays
  in the table, as late, until the consumer settles it in vain: so a consumer that hangs gets no other message for it;
* handed back, uncounted, with everything else the channel holds when it closes;
* orphaned: the connection failed, and the channel is gone, but the message may still be worked on. Its lease belongs to
  the process's session, not to the connection, so it stays valid: a late ack through the old ``Message`` succeeds. A
  message that nobody refers to any more will never be settled, and is handed back by its finalizer.

Settling a tag that is not in the table changes nothing. Acks come from any thread.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

from kombu_fdb.model import Lease

if TYPE_CHECKING:
    from kombu_fdb.transport.channel import Channel

__all__ = ["QoS"]

logger = logging.getLogger(__name__)

LATE = (
    "delivery %r was settled after its time to run (x-ttr, x-consumer-timeout): the message had been released, and may "
    "run twice. This settlement changes nothing; give such messages more time."
)


class QoS(virtual.QoS):
    """Per channel. The base class's table is replaced: it is keyed by the publisher's tag, and its acks go nowhere."""

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        # Without the base's finalizer: the client hands everything back at exit, of all channels.
        self.channel = channel
        self.prefetch_count = prefetch_count or 0
        self._delivered: dict[int, Lease] = {}  # type: ignore[assignment]
        self._messages: dict[int, weakref.ref[Any]] = {}
        self._explanations: dict[int, tuple[str, dict[str, Any]]] = {}
        self._late: set[int] = set()
        self._orphaned = False

    # -- room ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many are unsettled."""
        return len(self._delivered)

    def can_consume(self) -> bool:
        return not self.prefetch_count or len(self._delivered) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        """How many more may be handed out; None for no limit."""
        if not self.prefetch_count:
            return None
        return max(self.prefetch_count - len(self._delivered), 0)

    # -- in ----------------------------------------------------------------------------------------------------------

    def hold(self, delivery_tag: int, lease: Lease) -> None:
        """The delivery is about to be handed out."""
        self._delivered[delivery_tag] = lease

    def unhold(self, delivery_tag: int) -> bool:
        """It was not handed out after all. False if it was not held."""
        held = delivery_tag in self._delivered
        self.drop(delivery_tag)
        return held

    def has(self, lease: Lease) -> bool:
        """Whether it is held under any tag."""
        return lease in list(self._delivered.values())

    def holds(self, delivery_tag: int) -> bool:
        """Whether it was handed out with acks and is not settled."""
        return delivery_tag in self._delivered

    def append(self, message: Any, delivery_tag: int) -> None:
        """Remember the message of a held delivery, weakly."""
        self._messages[delivery_tag] = weakref.ref(message)

    def drop(self, delivery_tag: int) -> None:
        """It is settled, or was no message after all."""
        self._explanations.pop(delivery_tag, None)
        self._messages.pop(delivery_tag, None)
        self._delivered.pop(delivery_tag, None)
        self._late.discard(delivery_tag)

    def overdue(self, lease: Lease) -> None:
        """The message was handed back without its consumer. From any thread."""
        self._late.update([tag for tag, held in list(self._delivered.items()) if held == lease])

    def get(self, delivery_tag: int) -> Any:
        """The unsettled message of this tag. Raises ``KeyError``."""
        return self._messages[delivery_tag]()

    # -- out ---------------------------------------------------------------------------------------------------------

    def ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Acknowledge one, or with ``multiple`` all handed out up to this one, as AMQP has it."""
        if multiple:
            for earlier in [tag for tag in list(self._delivered) if tag < delivery_tag]:
                self.ack(earlier)
        lease = self._delivered.get(delivery_tag)
        if lease is None or delivery_tag in self._late:
            self._pop(delivery_tag)
            return
        try:
            self.channel.note_ack(lease)
            self.drop(delivery_tag)
        except BaseException:  # out of a signal handler: it is noted, or still held and can be acknowledged again
            if lease in self.channel.client.acks:
                self.drop(delivery_tag)
            raise
        self.channel.acknowledged()

    def explain(self, delivery_tag: int, details: dict[str, Any], *, reason: str = "rejected") -> None:
        """Why a held delivery is about to be rejected, or put back for the last time: for its dead letter.

        ``reason`` is that of a rejection; one that came back too often has its own.
        """
        if delivery_tag in self._delivered:
            self._explanations[delivery_tag] = reason, details

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Put it back where it was, counting the attempt; or dead-letter it. Raises a ``StoreError``: try again."""
        self._settle(delivery_tag, requeue=requeue)

    def give_back(self, delivery_tag: int, pause_ms: int) -> None:
        """Put it back, counting the attempt, for nobody before the pause is over. Raises as :meth:`reject`."""
        self._settle(delivery_tag, requeue=True, pause_ms=pause_ms)

    def _settle(self, delivery_tag: int, *, requeue: bool, pause_ms: int = 0) -> None:
        lease = self._delivered.get(delivery_tag)
        if lease is None or delivery_tag in self._late:
            self._pop(delivery_tag)
            return
        # Its room is free only when it is back in the store: the next claim finds it at its place.
        reason, details = self._explanations.get(delivery_tag, ("rejected", {}))
        self.channel.settle(lease, requeue=requeue, pause_ms=pause_ms, reason=reason, details=details)
        self.drop(delivery_tag)
        self.channel.on_room()

    def _pop(self, delivery_tag: int) -> None:
        """There is nothing to settle any more."""
        late = delivery_tag in self._late
        self.drop(delivery_tag)
        if late:
            logger.warning(LATE, delivery_tag)
            self.channel.on_room()
        else:
            self._warn(delivery_tag)

    @staticmethod
    def _warn(delivery_tag: int) -> None:
        logger.warning("delivery %r was settled before, or released when its channel closed: ignored", delivery_tag)

    def leave(self) -> list[Lease]:
        """All that is unsettled, which is somebody else's business from now on. Takes no lock."""
        held, self._delivered = self._delivered, {}
        leases = [lease for tag, lease in held.items() if tag not in self._late]
        self._late = set()
        return leases

    # -- all at once -------------------------------------------------------------------------------------------------

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Hand back all unsettled messages; the attempt counts. Errors are raised, not returned."""
        self._hand_back(counted=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The channel closes: hand back, uncounted."""
        if self._delivered:
            # Celery's own tests wait for this text.
            logger.info("Restoring %d unacknowledged message(s)", len(self._delivered))
        self._hand_back(counted=False)

    def _hand_back(self, *, counted: bool) -> None:
        held = dict(self._delivered)
        for tag in list(self._late):  # not ours any more
            held.pop(tag, None)
            self.drop(tag)
        try:
            self.channel.hand_back(list(held.values()), counted=counted)
        finally:  # else the client keeps them, to hand them back as soon as it can
            for tag in held:
                self.drop(tag)
        self.channel.on_room()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: there is no visibility timeout."""

    def orphan(self) -> None:
        """The connection is lost. Keep what is still worked on; hand back what nobody can settle any more."""
        unreferenced = []
        for tag in list(self._late):
            self.drop(tag)
        for tag, lease in list(self._delivered.items()):
            reference = self._messages.get(tag)
            message = None if reference is None else reference()
            if message is None:
                unreferenced.append(lease)
                self._delivered.pop(tag, None)
            else:
                weakref.finalize(message, self._abandon, tag).atexit = False
        self.channel.hand_back_later(unreferenced)

    def _abandon(self, delivery_tag: int) -> None:
        """A finalizer: must not block, and takes no lock."""
        lease = self._delivered.pop(delivery_tag, None)
        if lease is not None:
            self.channel.hand_back_later([lease])
