"""What a receiver has in other hands: watches in the store, its bell, its line among the session's consumers.

It refers to nothing of the connection, so these hands do not keep the connection alive. The receiver's thread has it
and nothing else while it sleeps; when the connection is collected, or closed, the thread takes everything back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.locks import FairLock
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.membership import Membership
from kombu_fdb.store.protocol import Watch

__all__ = ["Lookout"]

#: How long a thread rests at most while a drain sleeps.
LONGEST_REST_S = 5.0


class Lookout:
    """For the receiver's thread, but for :meth:`stop` and ``bell.ring``."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.stopped = False
        #: Its holder takes the reception's turns; how many drains have had it, and how many the thread knows of.
        self.turns = FairLock()
        self.driven = self._seen = 0
        #: A drain has the turns, and sleeps.
        self.drain_sleeps = False
        #: Wakes the thread alone.
        self.relief = Bell()
        #: The thread stands by, and looks for itself soon.
        self.stands_by = False
        self._called = False
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

    def sleep(self, pause_s: float | None) -> None:
        """The thread's, between two turns of its own."""
        wait_for((self.bell, self.relief), pause_s)

    def stand_by(self, look_s: float) -> bool:
        """Wait, while drains take the turns; for ``look_s`` seconds before the next look. False if none has since."""
        self.relief.clear()
        called, self._called = self._called, False
        if self.stopped or called or not (len(self.turns) or self.driven != self._seen):
            return False
        self._seen = self.driven
        self.stands_by = True
        self.relief.wait(LONGEST_REST_S if self.drain_sleeps and len(self.turns) else look_s)
        self.stands_by = False
        return True

    def begin_drive(self) -> None:
        """A drain takes a turn. The thread stands by from now on: the drain may be the last one."""
        self.driven += 1
        if not self.stands_by:
            self.relief.ring()

    def call_thread(self) -> None:
        """It shall not stand by: there is something that no drain does."""
        self._called = True
        self.relief.ring()

    @property
    def sees_acks(self) -> bool:
        """Whether acks are settled soon although the bell does not ring: the thread looks, or the next drain."""
        return self.stands_by and not len(self.turns)

    def stop(self) -> None:
        """Have the thread end. Takes no lock: a finalizer may call it."""
        self.stopped = True
        self.bell.ring()
        self.relief.ring()

    def close(self) -> None:
        """No thread sleeps here any more."""
        self.bell.close()
        self.relief.close()

    def leave(self) -> None:
        """The thread ends: take back what others have."""
        self.stands_by = False
        self.disarm()
        self._withdraw_report()
