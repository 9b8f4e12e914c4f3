"""What a receiver has in other hands: watches in the store, its bell, its line among the session's consumers.

It refers to nothing of the connection, so these hands do not keep the connection alive. The receiver's thread has it
and nothing else while it sleeps; when the connection is collected, or closed, the thread takes everything back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.membership import Membership
from kombu_fdb.store.protocol import Watch

__all__ = ["Lookout"]


class Lookout:
    """For the receiver's thread, but for :meth:`stop` and ``bell.ring``."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.stopped = False
        #: Queues that may have messages.
        self.hungry: set[str] = set()
        self._armed: dict[str, Watch] = {}
        self._membership: Membership | None = None

    def arm(self, engine: Engine, wanted: set[str], session_id: SessionId, consumers: Mapping[str, str]) -> None:
        """Watch the queues known to be empty; those that are not are hungry."""
        self.disarm(queue for queue in list(self._armed) if queue not in wanted)
        self.hungry &= wanted
        queues = sorted(wanted - self.hungry - self._armed.keys())
        if not queues:
            return
        hungry, watches = engine.messages.arm_empty(queues, session_id, consumers)
        self.hungry |= hungry
        for queue, watch in watches.items():
            self._armed[queue] = watch
            watch.on_fire(partial(self._on_fire, queue, watch))

    def _on_fire(self, queue: str, watch: Watch) -> None:
        """From any thread, also from native ones."""
        if self._armed.get(queue) is watch:
            self._armed.pop(queue, None)
        self.hungry.add(queue)
        self.bell.ring()

    def disarm(self, queues: Iterable[str] | None = None) -> None:
        """Watch these no more, or none at all."""
        for queue in list(self._armed if queues is None else queues):
            watch = self._armed.pop(queue, None)
            if watch is not None:
                watch.cancel()

    def report(self, membership: Membership, queues: Collection[str]) -> None:
        """Show the session's heartbeat what is consumed."""
        self._withdraw_report(unless=membership)
        self._membership = membership
        membership.consumed[self] = queues

    def _withdraw_report(self, unless: Membership | None = None) -> None:
        if self._membership is not None and self._membership is not unless:
            self._membership.consumed.pop(self, None)

    def stop(self) -> None:
        """Have the thread end. Takes no lock: a finalizer may call it."""
        self.stopped = True
        self.bell.ring()

    def leave(self) -> None:
        """The thread ends: take back what others have."""
        self.disarm()
        self._withdraw_report()
