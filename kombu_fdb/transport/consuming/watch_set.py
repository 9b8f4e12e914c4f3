"""The watch set: which queues may have messages, whose bells are watched, and whether the connection is drained at all.

Whether the program is there to take what is claimed for a connection.

Model. A connection is *attended*

* while a drain runs, its callbacks included;
* for ``patience_s`` seconds after one, as the next one follows soon in a program that consumes;
* while an event loop has it registered.

Before the first of these, and later whenever none holds, it is *left alone*: a program that sits at a prompt, or has
forgotten its consumer. No time is watched for that: a turn that wants to claim asks.

What a receiver has in other hands: watches in the store, its bell, its line among the session's consumers.

It refers to nothing of the connection, so these hands do not keep the connection alive. The receiver's thread has it
and nothing else while it sleeps; when the connection is collected, or closed, the thread takes everything back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import inf
from time import monotonic
from weakref import WeakSet

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.locks import FairLock
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.membership import Membership
from kombu_fdb.store.protocol import Watch

# -- who drains --------------------------------------------------------------------------------------------------------


class Drain:
    """One that runs. Only the draining thread refers to it, so it ends even if an exception skips ``end``."""


class IdleTracker:
    """Of one connection. Thread-safe without a lock: an exception may end a drain at any point."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = monotonic) -> None:
        #: An event loop has it registered.
        self.looped = False
        self._patience_s = patience_s
        self._clock = clock
        self._drains: WeakSet[Drain] = WeakSet()
        self._until = float("-inf")

    @property
    def given(self) -> bool:
        return self.looped or len(self._drains) > 0 or self._clock() < self._until

    def begin(self, drain: Drain) -> None:
        self._drains.add(drain)

    def end(self, drain: Drain) -> None:
        """Harmless if it has not begun."""
        self._until = self._clock() + self._patience_s
        self._drains.discard(drain)


# -- which queues ------------------------------------------------------------------------------------------------------


class WatchSet:
    """For the receiver's thread, but for :meth:`stop` and ``bell.ring``."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.stopped = False
        #: Its holder takes a turn of the fetcher's.
        self.turns = FairLock()
        #: Until when the thread rests (``monotonic``), as drains take the turns; for ever while one does.
        self.rest_until = -inf
        #: Wakes the thread alone.
        self.relief = Bell()
        #: The thread rests; and it does so until it is relieved.
        self._rests = self._rests_for_ever = False
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
        if self.rest_until < monotonic():  # a drain that begins from here on rings, as the thread does not rest
            wait_for((self.bell, self.relief), pause_s)

    def rest(self) -> bool:
        """The thread's, while drains take the turns. False if it shall take them."""
        self.relief.clear()
        self._rests = self._rests_for_ever = True  # before the look: a drain that ends after it rings
        left_s = self.rest_until - monotonic()
        self._rests_for_ever = left_s == inf
        rests = not self.stopped and left_s > 0
        if rests:
            self.relief.wait(None if self._rests_for_ever else left_s)
        self._rests = self._rests_for_ever = False
        return rests

    def begin_drive(self) -> None:
        """A drain takes a turn, and sleeps until the next one. The thread rests, or it would sleep for too long."""
        self.rest_until = inf
        if not self._rests:
            self.relief.ring()

    def end_drive(self, patience_s: float) -> None:
        """It does so no more. If no drain follows soon, the thread takes the turns. May be repeated."""
        self.rest_until = monotonic() + patience_s
        if self._rests_for_ever:
            self.relief.ring()

    def call_thread(self) -> None:
        """It shall take a turn now: there is something that no drain may do."""
        self.rest_until = -inf
        self.relief.ring()

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
        """There are no turns for now: take back what others have."""
        self.disarm()
        self._withdraw_report()
