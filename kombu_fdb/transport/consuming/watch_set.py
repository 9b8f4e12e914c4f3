"""The watch set: which queues may have messages, whose bells are watched, and whether the connection is drained at all.

Model. A connection is *attended*

* while a drain runs, its callbacks included;
* for ``patience_s`` seconds after one, as the next one follows soon in a program that consumes;
* while an event loop has it registered.

Before the first of these, and later whenever none holds, it is *left alone*: a program that sits at a prompt, or has
forgotten its consumer. No time is watched for that: a turn that wants to claim asks.

The watch set refers to nothing of the connection, so watches, bells and the session's heartbeat, which refer to the
watch set, do not keep the connection alive. The receiver's thread has nothing else while it sleeps; when the connection
is collected, or closed, the thread takes everything back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from time import monotonic
from weakref import WeakSet

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.threads import FairLock
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store.protocol import Watch

#: How long the thread rests when a drain has ended, in seconds: as long as an ack waits, within these bounds. A program
#: that then comes back with drains that must not wait takes no turns, and finds nothing before the thread has had one.
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.02
#: How many times as long as ``ack_delay_ms`` an ack may be old when a drain begins, and wait for a claim that takes it
#: along; an older one lets the drain take a turn. Behind the last drain come the thread's rest and its nap, at most.
BUSY = 4
#: How long the thread naps at most, in seconds.
LONGEST_NAP_S = 0.004

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
        #: Those that run.
        self.drains: WeakSet[Drain] = WeakSet()
        self._until = -inf

    @property
    def given(self) -> bool:
        return self.looped or len(self.drains) > 0 or self._clock() < self._until

    def end(self, drain: Drain) -> None:
        """Harmless if it has not begun."""
        self._until = self._clock() + self._patience_s
        self.drains.discard(drain)


# -- which queues ------------------------------------------------------------------------------------------------------


class WatchSet:
    """For the receiver's thread, but for :meth:`stop` and ``bell.ring``."""

    def __init__(self, bell: Bell, ack_delay_s: float = 0.0) -> None:
        self.bell = bell
        self.stopped = False
        #: Its holder takes a turn of the fetcher's.
        self.turns = FairLock()
        #: Until when the thread rests (``monotonic``), as drains take the turns; for ever while one does.
        self.rest_until = -inf
        #: For how long it does when a drain has ended that took a turn, or found a message. The thread need not be
        #: woken for each drain that comes meanwhile: it naps, each time twice as long. A drain that found no message
        #: and must not wait leaves the rest as it is: a loop of them would keep the thread from all turns, and take
        #: none itself.
        self.rest_s = max(min(ack_delay_s, LONGEST_REST_S), SHORTEST_REST_S)
        self._nap_s = SHORTEST_REST_S
        #: Wakes the thread alone.
        self.relief = Bell()
        #: The thread rests; and it does so until it is relieved.
        self._rests = self._rests_for_ever = False
        #: Queues that may have messages.
        self.hungry: set[str] = set()
        self._armed: dict[str, Watch] = {}
        self._session: ClientSession | None = None

    def limit(self, wanted: set[str]) -> list[str]:
        """Watch no others than these, and think of no others. Returns those of which nothing is known."""
        if self._armed:
            self.disarm([queue for queue in list(self._armed) if queue not in wanted])
        self.hungry &= wanted
        return sorted(wanted - self.hungry - self._armed.keys())

    def arm(self, engine: Engine, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]) -> None:
        """Watch the queues of :meth:`limit`; those that are not empty are hungry."""
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

    @property
    def keys(self) -> list[bytes]:
        """What is watched."""
        return [watch.key for watch in list(self._armed.values())]

    def report(self, session: ClientSession, queues: Collection[str]) -> None:
        """Show the session's heartbeat what is consumed."""
        if self._session is not session:
            self._withdraw_report()
        self._session = session
        session.consumed[self] = queues

    def _withdraw_report(self) -> None:
        if self._session is not None:
            self._session.consumed.pop(self, None)

    def sleep(self, pause_s: float | None) -> None:
        """The thread's, between two turns of its own."""
        if self.rest_until < monotonic():  # a drain that begins from here on rings, as the thread does not rest
            wait_for((self.bell, self.relief), pause_s)

    def rest(self) -> bool:
        """The thread's, while drains take the turns. False if it shall take them."""
        self.relief.clear()
        self._rests = self._rests_for_ever = True  # before the look: a drain that ends after it rings
        left_s = self.rest_until - monotonic()
        rests, rang = not self.stopped and left_s > 0, False
        naps, self._nap_s = self._nap_s, min(2 * self._nap_s, LONGEST_NAP_S)
        self._rests_for_ever = left_s == inf and naps >= LONGEST_NAP_S
        if rests:
            rang = self.relief.wait(None if self._rests_for_ever else naps if left_s == inf else max(left_s, naps))
        if not rests or rang:
            self._nap_s = SHORTEST_REST_S
        self._rests = self._rests_for_ever = False
        return rests

    def begin_drive(self) -> None:
        """A drain takes a turn, and sleeps until the next one. The thread rests, or it would sleep for too long."""
        self.rest_until = inf
        if not self._rests:
            self.relief.ring()

    def end_drive(self) -> None:
        """It does so no more. If no drain follows soon, the thread takes the turns. May be repeated."""
        self.rest_until = monotonic() + self.rest_s
        if self._rests_for_ever:
            self.relief.ring()

    def prolong_rest(self) -> None:
        """A drain has found a message, and the next one mostly follows soon.

        Another drain may begin or end meanwhile. Only a rest that has an end is moved: a rest without an end is ended
        by the drain that began it.
        """
        if -inf < self.rest_until < inf:
            self.rest_until = monotonic() + self.rest_s

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
