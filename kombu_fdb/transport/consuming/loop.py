"""An event loop (``kombu.asynchronous.Hub``) that serves a connection: it delivers and, on SQLite, takes turns.

Model. Celery's worker registers its connection with its loop, which watches the bell *arrived*. On a store whose
writers take turns, unless threads are greenlets, the loop also takes the fetcher's turns that are *due*. A turn is due
when a watch has fired, or when acks or free places suffice for a claim or have waited long enough (by a timer of the
loop). So no message passes from one thread to another. ``WatchSet.ask`` notes that a turn is due, and rings *arrived*.
The turn after a claim, which watches the queues that the claim has emptied, comes :data:`ROUNDS_AFTER_CLAIM` rounds
later. No turn follows a claim that has emptied no queue and has used all the room.

The receiver's thread (``receiver.py``) does everything else, and rests beside a loop that takes turns. If the loop
takes none for a moment, the thread looks: if nothing is due, it sleeps until something is. If a turn is due, the loop
has ended, or a callback works for long (with the solo pool, the callback is the task), so the thread takes that turn.

What happens at each failure:

* the store does not answer in a turn, or another process writes: the turn ends after :data:`.receiver.SLOW_S`, and the
  thread takes all turns for :data:`.receiver.SPARED_S`. The same happens if turns of over :data:`.receiver.HELD_UP_S`
  take more than :data:`.receiver.HELD_UP_SHARE` of the time. If the store has failed, the thread detects it, and the
  next delivery raises the error from the loop, upon which Celery connects again. Any other error has the same effect.
* the loop is reset, or ends silently: the thread takes the turns, until the loop is registered again.
* a signal for Celery's shutdown arrives in a turn: its handler runs after the turn. An exception from any other handler
  ends the turn; the next turn continues with the messages that it had in hand.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from kombu_fdb.transport.consuming.receiver import Receiver, deliver_next

#: How many messages are delivered in one go, and for how long, so that other descriptors get their turn.
MESSAGES = 64
DELIVERING_S = 0.01
#: The round that claims also delivers; in the next round, the pool writes the tasks to its children; then comes a turn.
ROUNDS_AFTER_CLAIM = 2


class Loop:
    """The registration of a connection with an event loop. :meth:`wake` may be called by any thread."""

    def __init__(self, hub: Any, receiver: Receiver, alive: Callable[[], Receiver | None]) -> None:
        """``alive``: the connection's receiver; None once the connection is closed, and in a forked child."""
        self.hub = hub
        self.thread = threading.get_ident()
        self._receiver = receiver
        self._alive = alive
        #: When the timer fires.
        self._timer_at = inf
        #: How many rounds later the next turn comes.
        self._rounds = 0
        hub.add_reader(receiver.fetcher.arrived, self.on_arrived)
        if receiver.may_be_driven:
            receiver.watch_set.loop = weakref.ref(self)
        receiver.fetcher.attend_loop(registered=True)

    def on_arrived(self) -> None:
        """Take a turn that is due, and deliver what has arrived. Raises connection errors: Celery reconnects."""
        receiver = self._alive()
        if receiver is None:
            return
        try:
            self._deliver(receiver)
        except BaseException:  # a signal handler's may have come after the bell was cleared, or in a turn
            receiver.watch_set.ask()
            raise

    def _deliver(self, receiver: Receiver) -> None:
        self._rounds = max(self._rounds - 1, 0)
        until_s = monotonic() + DELIVERING_S
        for _ in range(MESSAGES):
            if not self._deliver_next(receiver):
                if self._rounds:  # the bell rings
                    return
                receiver.fetcher.arrived.clear()
                if not self._deliver_next(receiver):
                    return
            if monotonic() >= until_s:  # with the solo pool, a delivery is the task itself
                break
        # The bell still rings, so the loop calls this again at once.

    def _deliver_next(self, receiver: Receiver) -> bool:
        if receiver.watch_set.due and not self._rounds:
            self._take_turn(receiver)
        return deliver_next(receiver.fetcher)

    def _take_turn(self, receiver: Receiver) -> None:
        pause_s = receiver.take_turn()
        if pause_s == 0:
            self._rounds = ROUNDS_AFTER_CLAIM
            receiver.watch_set.ask()
        elif pause_s is not None and receiver.fetcher.waits:
            self.take_turn_in(pause_s)

    def take_turn_in(self, seconds: float) -> None:
        """Take a turn after that time, if acks or free places still wait for more."""
        now = monotonic()
        moment = now + seconds
        if not now <= self._timer_at <= moment:  # an overdue timer may have been cleared, with all of the loop's timers
            self.hub.call_later(seconds, self._on_timer, moment)
            self._timer_at = moment  # then: if a signal handler raises in between, the next call sets another timer

    def _on_timer(self, moment: float) -> None:
        if moment != self._timer_at:  # an earlier timer was set after it
            return
        receiver = self._alive()
        if receiver is not None and receiver.fetcher.waits:
            receiver.watch_set.ask()  # the loop looks at the bell right after its timers
        self._timer_at = inf

    def wake(self) -> None:
        """Have the loop take the turn that is due."""
        self._receiver.fetcher.arrived.ring()

    def leave(self) -> None:
        """Stop serving the connection."""
        arrived, watch_set = self._receiver.fetcher.arrived, self._receiver.watch_set
        self._receiver.fetcher.attend_loop(registered=False)
        watch_set.loop = None
        watch_set.call_thread()
        # After a reset, the loop may use the number for another reader.
        callback, _ = self.hub.readers.get(arrived.fileno()) or (None, None)
        if callback == self.on_arrived:
            self.hub.remove_reader(arrived.fileno())
