"""An event loop (``kombu.asynchronous.Hub``) that delivers what has arrived and, where it may, takes the turns.

Model. Celery's worker registers its connection with its loop. The loop watches two bells:

* *arrived*: on it the loop delivers;
* the fetcher's own, on a store whose writers take turns: on it, and when the last turn said so, the loop takes a turn
  (``receiver.py``) and delivers what that has claimed. So no message passes from one thread to another.

While the loop takes the turns, the receiver's thread rests until one is *overdue*: a callback works for long, as the
solo pool does, where the callback runs the task. Then the thread takes the turns, until the loop comes back.

The loop *lends* the turns to the thread, and does not watch the fetcher's bell meanwhile (it would come back at once,
again and again), while another thread is in the middle of one, and for longer when one took long
(:attr:`.receiver.Receiver.spared_s`).

What happens at each failure:

* the store fails in a turn: the next delivery raises the error out of the loop, on which Celery connects again.
* the loop is reset, or ends without telling: the thread finds the next turn overdue. Registered again, the loop has the
  turns again.
* an exception out of a signal handler ends a turn: it comes out of the loop. The next turn goes on with what that one
  had in hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from time import monotonic
from typing import Any

from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.transport.consuming.receiver import Receiver, deliver_next

#: How many messages are delivered in one go, and for how long, so that other descriptors get their turn.
MESSAGES = 64
DELIVERING_S = 0.01


class LoopRegistration:
    """A connection that an event loop serves. All but :meth:`leave` is called by the loop."""

    def __init__(self, loop: Any, receiver: Receiver, alive: Callable[[], Receiver | None]) -> None:
        """``alive``: the connection's receiver; None once the connection is closed, and in a forked child."""
        self.loop = loop
        self._receiver = receiver
        self._alive = alive
        #: When timers of the loop's will call, the next one first.
        self._timers: list[float] = []
        loop.add_reader(receiver.fetcher.arrived, self.on_arrived)
        receiver.fetcher.attend_loop(registered=True)
        self._take_turns()

    def _take_turns(self) -> None:
        if self._receiver.may_be_driven:
            self.loop.add_reader(self._receiver.bell, self.on_bell)
            self.loop.call_soon(self.on_bell)  # before the bell rings, which wakes the thread as well

    def on_arrived(self) -> None:
        """Deliver what has arrived. Raises connection errors, on which Celery reconnects."""
        receiver = self._alive()
        if receiver is None:
            return
        until_s = monotonic() + DELIVERING_S
        for _ in range(MESSAGES):
            if not deliver_next(receiver.fetcher):
                receiver.fetcher.arrived.clear()
                if not deliver_next(receiver.fetcher):
                    return
            if monotonic() >= until_s:  # with the solo pool, a delivery is the task itself
                break
        # The bell is still rung: the loop comes back at once.

    def on_bell(self) -> None:
        """Take a turn. What it brings has a turn of the loop's for itself."""
        receiver = self._alive()
        if receiver is None or not self._is_registered(receiver.bell, self.on_bell):
            return
        pause_s = receiver.take_turn()
        if (spared_s := receiver.spared_s) > 0:
            self._remove(receiver.bell, self.on_bell)
            self.loop.call_later(spared_s, self._come_back)
        elif pause_s == 0:
            receiver.bell.ring()
        elif pause_s is not None:
            self._call_in(pause_s)

    def _come_back(self) -> None:
        if self._alive() is self._receiver and self._is_registered(self._receiver.fetcher.arrived, self.on_arrived):
            self._take_turns()

    def _call_in(self, pause_s: float) -> None:
        """Take a turn then, or earlier: a timer that calls before that is enough."""
        moment = monotonic() + pause_s
        if not self._timers or moment < self._timers[0]:
            heapq.heappush(self._timers, moment)
            self.loop.call_later(pause_s, self._on_timer)

    def _on_timer(self) -> None:
        heapq.heappop(self._timers)
        self.on_bell()

    def leave(self) -> None:
        """The loop serves the connection no more."""
        self._receiver.fetcher.attend_loop(registered=False)
        self._remove(self._receiver.fetcher.arrived, self.on_arrived)
        self._remove(self._receiver.bell, self.on_bell)

    def _remove(self, bell: Bell, callback: Callable[[], None]) -> None:
        if self._is_registered(bell, callback):
            self.loop.remove_reader(bell)

    def _is_registered(self, bell: Bell, callback: Callable[[], None]) -> bool:
        """After a reset, the loop may use the number for another reader."""
        return (self.loop.readers.get(bell.fileno()) or (None, None))[0] == callback
