"""The watch set: which queues may have messages, whose bells are watched, and who takes the next turn.

The watch set does not refer to the connection, so watches, bells and the session's heartbeat, which refer to the watch
set, do not keep the connection alive. While it sleeps, the receiver's thread refers only to the watch set; when the
connection is collected or closed, the thread cancels the watches and withdraws the report to the heartbeat.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any
from weakref import ReferenceType

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.interruption import FairLock
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store.protocol import Watch

#: How long the thread rests after a drain, in seconds: as long as an ack waits, within these bounds. A program that
#: then drains with a timeout of 0 takes no turns, and finds nothing until the thread has taken one.
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.02
#: How many times longer the thread rests beside an event loop that takes turns.
BESIDE_LOOP = 8
#: The thread's longest nap, in seconds.
LONGEST_NAP_S = 0.004


class WatchSet:
    """For the thread that takes a turn. Drains may also change the thread's rest, and any thread may stop it."""

    def __init__(self, bell: Bell, ack_delay_s: float = 0.0) -> None:
        self.bell = bell
        self.stopped = False
        #: The lock whose holder takes a turn of the fetcher.
        self.turns = FairLock()
        #: Until when the thread rests, because drains take the turns (``monotonic``); infinite while a drain takes
        #: them.
        self.rest_until = -inf
        #: How long it rests after a drain that took a turn, or found a message. The thread need not be woken for each
        #: drain in that time: it naps, each time twice as long. A drain with a timeout of 0 that found no message does
        #: not prolong the rest: a loop of such drains would keep the thread from all turns, and take none itself.
        self.rest_s = max(min(ack_delay_s, LONGEST_REST_S), SHORTEST_REST_S)
        self._nap_s = SHORTEST_REST_S
        #: A reference to the event loop that takes turns (``loop.Loop``), if one does.
        self.loop: ReferenceType[Any] | None = None
        #: Whether a turn of the loop is due.
        self.due = False
        #: When the next turn comes if nothing happens before (``monotonic``).
        self.next_at = -inf
        #: Wakes the thread alone.
        self.relief = Bell()
        #: Whether the thread rests; and whether only ``relief`` ends that.
        self._rests = self._until_relieved = False
        #: Queues that may have messages.
        self.hungry: set[str] = set()
        self._armed: dict[str, Watch] = {}
        self._session: ClientSession | None = None

    def limit(self, wanted: set[str]) -> list[str]:
        """Forget all queues but these. Returns those of them that are neither hungry nor armed."""
        if self._armed:
            self.disarm([queue for queue in list(self._armed) if queue not in wanted])
        self.hungry &= wanted
        return sorted(wanted - self.hungry - self._armed.keys())

    def arm(self, engine: Engine, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]) -> None:
        """Watch the queues of :meth:`limit`; those that are not empty are hungry."""
        hungry, watches = engine.messages.arm_empty(queues, session_id, consumers)
        self.hungry |= hungry
        for queue, watch in watches.items():
            try:
                self._armed[queue] = watch
                watch.on_fire(partial(self._on_fire, queue, watch))
            except BaseException:  # from a signal handler: the watch may never be noted
                self.disarm([queue])
                raise

    def _on_fire(self, queue: str, watch: Watch) -> None:
        """Called by any thread, even a native one."""
        if self._armed.get(queue) is watch:
            self._armed.pop(queue, None)
        self.hungry.add(queue)
        loop = None if self.loop is None else self.loop()
        if loop is None:
            self.bell.ring()
        else:
            self.due = True
            loop.wake()

    def disarm(self, queues: Iterable[str] | None = None) -> None:
        """Stop watching these queues, or all."""
        for queue in list(self._armed if queues is None else queues):
            watch = self._armed.pop(queue, None)
            if watch is not None:
                watch.cancel()

    @property
    def keys(self) -> list[bytes]:
        """The keys that are watched."""
        return [watch.key for watch in list(self._armed.values())]

    def report(self, session: ClientSession, queues: Collection[str]) -> None:
        """Have the session's heartbeat show which queues are consumed."""
        if self._session is not session:
            self._withdraw_report()
        self._session = session
        session.consumed[self] = queues

    def _withdraw_report(self) -> None:
        if self._session is not None:
            self._session.consumed.pop(self, None)

    # -- who takes the next turn -------------------------------------------------------------------------------------

    def ask(self, *, at_once: bool = True) -> None:
        """Request a turn, now or when acks have waited: from the event loop, or from the thread if the loop is late."""
        loop = None if self.loop is None else self.loop()
        if loop is None:
            self.bell.ring()
            return
        in_a_moment = not at_once and loop.thread == threading.get_ident()
        if in_a_moment or not self._rests:  # a due turn does not prolong the rest: a callback may ask repeatedly
            self.rest_beside_loop()
        if in_a_moment:
            loop.take_turn_in(self.rest_s * (2 if self.hungry else 1))  # as Fetcher._ack_wait_s
        else:
            self.due = True
            loop.wake()

    def rest_beside_loop(self) -> None:
        """Let the thread rest: it takes turns only if the loop takes none, because it has ended or a callback works."""
        self.rest_until = monotonic() + min(BESIDE_LOOP * self.rest_s, LONGEST_REST_S)
        if not self._rests:
            self.relief.ring()

    def sleep(self, pause_s: float | None) -> None:
        """Let the thread sleep between two turns of its own."""
        if self.rest_until < monotonic():  # a drain that begins later rings, as the thread does not rest
            wait_for((self.bell, self.relief), pause_s)

    def rest(self) -> bool:
        """Let the thread rest while drains take the turns. False if it should take them itself."""
        self.relief.clear()
        self._rests = self._until_relieved = True  # before the look: a drain that ends after it rings
        left_s = self.rest_until - monotonic()
        rests, rang = not self.stopped and left_s > 0, False
        naps, self._nap_s = self._nap_s, min(2 * self._nap_s, LONGEST_NAP_S)
        self._until_relieved = left_s == inf and naps >= LONGEST_NAP_S
        if rests:
            rang = self.relief.wait(None if self._until_relieved else naps if left_s == inf else max(left_s, naps))
        if not rests or rang:
            self._nap_s = SHORTEST_REST_S
        self._rests = self._until_relieved = False
        return rests

    def idle_beside_loop_s(self) -> float:
        """How long nothing will be due, beside an event loop that would take the turn; 0 without one."""
        if self.loop is None or self.loop() is None or self.due or self.bell.wait(0):
            return 0
        return self.next_at - monotonic()

    def begin_drive(self) -> None:
        """Have the thread rest while a drain takes turns, as its own sleep may be too long."""
        self.rest_until = inf
        if not self._rests:
            self.relief.ring()

    def end_drive(self) -> None:
        """Note that the drain takes no more turns. If no other follows soon, the thread takes them. Idempotent."""
        self.rest_until = monotonic() + self.rest_s
        if self._until_relieved:
            self.relief.ring()

    def prolong_rest(self) -> None:
        """Note that a drain has found a message, so that the next drain usually follows soon.

        Another drain may begin or end at the same time. Only a finite rest is prolonged: an infinite one is ended by
        the drain that began it.
        """
        if -inf < self.rest_until < inf:
            self.rest_until = monotonic() + self.rest_s

    def call_thread(self) -> None:
        """Have the thread take a turn now, as drains can't, or may not."""
        self.rest_until = -inf
        self.bell.ring()
        self.relief.ring()

    def stop(self) -> None:
        """Have the thread end. Takes no lock: a finalizer may call it."""
        self.stopped = True
        self.bell.ring()
        self.relief.ring()

    def close(self) -> None:
        """Close the bells; no thread may sleep here afterwards."""
        self.bell.close()
        self.relief.close()

    def leave(self) -> None:
        """Cancel the watches, and withdraw the report to the heartbeat: no turns follow for now."""
        self.disarm()
        self._withdraw_report()
