"""The receiver: which thread takes the turns of a connection's fetcher (``fetcher.py``), and how callbacks are called.

Model. A lock ensures that only one thread at a time runs a turn of the fetcher. Between two turns the thread sleeps,
without the lock, for as long as the turn said, or until the fetcher's bell rings. It is

* a *drain*, on a store whose writers take turns, unless threads are greenlets: a thread that drains and finds nothing
  to deliver takes turns while it waits. So no message passes from one thread to another.
* likewise an *event loop*, usually a Celery worker's, where a turn is due (``loop.py``).
* the receiver's own *thread*, which the first consumer starts: always on a store whose writers don't take turns,
  elsewhere while neither a drain nor a loop takes turns.

The thread is in one of four states. It *works*: it takes turns, and sleeps between them. A drain that takes a turn
sends it to *rest*, for as long as that drain waits, and a moment longer, as the next drain usually follows soon. If
none does, because a callback runs for long, the thread works again, so that acks are settled and messages are claimed.
While drains follow each other, it is not woken for each: it *naps*, checks whether a drain has come, and naps for
longer. A drain that finds acks that have waited too long takes a turn before it delivers (:meth:`Receiver.catch_up`).
The thread *ends* after :meth:`Receiver.stop` or :meth:`Receiver.abandon`.

Two drains, or a drain and the thread, may sleep on one bell. They wake together, and one of them takes the next turn.

What happens at each failure:

* the store fails in a turn, or one of the thread's turns raises another error: the fetcher has *failed*. The next drain
  raises the error, and the thread sleeps until the connection is established again (:meth:`Receiver.restart`).
* an exception raised by a signal handler, or one that is not the store's, ends a drain in the middle of a turn: the
  drain raises it unchanged. The next turn, in any thread, continues with the messages that it had in hand. If the cause
  persists, the thread's next turn fails, too.
* an exception ends the thread (a signal handler's, if threads are greenlets): the fetcher has failed, and ``restart``
  starts another thread.
* a drain's turn takes long, as another process holds the write lock: the drain ends late, by at most
  ``operation_timeout``, and for :data:`SPARED_S` only the thread takes turns.
* another thread closes the connection: it waits for the turn that is under way, and no other turn begins.
* the connection is dropped: :meth:`Receiver.stop` does not wait, and returns the waiting messages' leases; messages
  that are just being claimed are released when they arrive.
* the connection is collected without having been closed: between two turns the thread refers to the receiver weakly, so
  it does not keep it alive; the thread ends when the finalizer calls :meth:`Receiver.abandon`.
"""

from __future__ import annotations

import random
import threading
import weakref
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from kombu_fdb.errors import KombuFDBError, StoreUnavailable
from kombu_fdb.model import Lease
from kombu_fdb.primitives.interruption import (
    Lock,
    Ticket,
    in_hub,
    instead_of_threads,
    start,
    surely,
    undisturbed,
    would_wait_for_itself,
)
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.client import Client
from kombu_fdb.transport.consuming.dispatch import Arrival, Subscription
from kombu_fdb.transport.consuming.fetcher import Fetcher
from kombu_fdb.transport.consuming.watch_set import WatchSet
from kombu_fdb.transport.errors import CONNECTION_ERRORS
from kombu_fdb.transport.poison import fault_in, give_back

# -- to the callback ---------------------------------------------------------------------------------------------------


def deliver_next(fetcher: Fetcher) -> bool:
    """Deliver the next message. False if there is none. Raises the fetcher's error, and what the callback raises.

    If a consumer has ended with its queue, call its ``on_cancel`` instead.
    """
    if fetcher.ended:
        ended = fetcher.ended[0]
        try:
            ended.on_cancel(ended)
        finally:
            fetcher.ended.popleft()
        return True
    hand: list[Arrival] = []
    try:
        while fetcher.next(hand) is not None:
            arrival = hand[0]
            message, callback = _open(arrival, fetcher), arrival.subscription.callback
            if message is None:
                hand = []
                fetcher.on_room()  # its place is free, which no ack will report
                continue
            try:
                hand = []  # no call between this and the callback: Python handles signals after each call
                callback(message)
            except BaseException as error:
                if isinstance(error, CONNECTION_ERRORS):
                    raise
                if not fetcher.is_workers:
                    if arrival.tag in arrival.subscription.credit.held.leases:
                        fetcher.client.attempted.add(arrival.delivery.lease)
                    raise
                if not isinstance(error, Exception):
                    raise
                delivery = arrival.delivery
                name = f"message {delivery.message_id.hex()} of queue {delivery.queue}"
                give_back(message, error, name, delivery.redeliveries)  # the error stops here; the message is released
            return True
    except BaseException:
        fetcher.return_undelivered(hand)  # messages that no callback has seen
        raise
    return False


def _open(arrival: Arrival, fetcher: Fetcher) -> Any:
    """The message; None if it was unreadable, and has been dead-lettered."""
    subscription, delivery, tag = arrival
    message = subscription.open(delivery, tag, subscription.consumer_tag)
    if message is None:
        return None
    fault = fault_in(message, subscription.callback) if fetcher.is_workers else None
    if fault is not None:
        subscription.credit.held.drop(tag)
        fetcher.client.refuse(delivery, **fault)
        return None
    if subscription.no_ack and delivery.leased:
        subscription.ack(tag, delivery.lease)
    return message


# -- the receiver ------------------------------------------------------------------------------------------------------


#: How long ``cancel`` waits, in seconds.
CANCEL_S = 1.0
#: A drain, or a loop, whose turn takes longer than this leaves the turns to the thread for a while: the store's writers
#: are slow now, and a drain has its own deadline.
SLOW_S = 0.1
SPARED_S = 5.0
#: A loop's turn that takes longer than this holds up the worker, in seconds; and the part of the loop's time that such
#: turns may take. An occasional checkpoint stays within it; a disk on which every commit takes that long does not.
HELD_UP_S, HELD_UP_SHARE = 0.01, 0.05


class Receiver:
    """One per connection that consumes. Public methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.watch_set = WatchSet(Bell(), client.options.ack_delay_ms / 1000)
        self.fetcher = Fetcher(client, self.watch_set, Bell(), monotonic, random.Random())
        self._thread: threading.Thread | None = None
        self._starting = Lock()
        self._cancels_wait = True
        #: Until when only the thread takes turns.
        self._spared_until = -inf
        #: When a turn last held up the loop.
        self._held_up_at = -inf

    @property
    def alive(self) -> bool:
        """Whether its thread has not ended yet, even if it should."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def running(self) -> bool:
        """Whether turns are taken."""
        # Called for each message, so without ``is_alive``: a thread that dies has failed the fetcher.
        return self._thread is not None and not self.watch_set.stopped and self.fetcher.error is None

    @property
    def failed(self) -> bool:
        return self.fetcher.error is not None

    def subscribe(self, subscription: Subscription, *, single: bool) -> None:
        """Claim for a consumer, from the next drain on. ``single``: as in :meth:`.dispatch.Dispatch.add`."""
        self.fetcher.subscribe(subscription, single=single)
        with self._starting:
            if self._thread is None:
                self._start()
        self.watch_set.bell.ring()

    def cancel(self, *subscriptions: Subscription, leave: bool = True) -> None:
        """End consumers; messages claimed for them, but not handed out, are released, and their queues may vanish.

        The thread ends them between two claims. This call waits for that briefly, and only once while the store does
        not answer. Celery cancels inside a signal handler, so this takes no lock that the interrupted code may hold;
        with gevent, that handler runs where nothing may wait, so there the call does not wait. Never raises.
        """
        signals = [self.fetcher.cancel(each, leave=leave) for each in subscriptions]
        self.watch_set.bell.ring()
        if in_hub():
            return
        if not self.running or threading.current_thread() is self._thread:
            self.fetcher.carry_out_cancels()
        elif signals and self._cancels_wait and not self.watch_set.turns.mine:
            self.watch_set.call_thread()
            self._cancels_wait = signals[-1].wait(self._client.patience.allow(CANCEL_S))

    def restart(self) -> None:
        """Resume after an error."""
        if self.failed and not self.watch_set.stopped:
            self.fetcher.recover()
            if not self.alive:
                self._start()
            self.watch_set.bell.ring()

    def stop(self, timeout_s: float) -> list[Lease]:
        """End the thread and the turns, waiting for at most ``timeout_s`` seconds. Returns what was waiting. Final."""
        watch_set, deadline = self.watch_set, monotonic() + timeout_s
        first = not watch_set.stopped
        watch_set.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        if first:
            watch_set.turns.acquire(Ticket(), deadline - monotonic())  # for good
        leases = self.fetcher.close()
        self.fetcher.arrived.close()
        if thread is None or not thread.is_alive():
            watch_set.close()
        return leases

    def abandon(self) -> None:
        """Have the thread of a collected connection end. For a finalizer: takes no lock, calls no store."""
        self.watch_set.stop()
        self.fetcher.abandon()
        self.fetcher.arrived.close()
        if self._thread is None or not self._thread.is_alive():
            self.watch_set.close()

    # -- turns -------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something may have arrived, for at most ``timeout_s`` seconds; None: without a limit.

        For a drain, which takes the fetcher's turns while it waits, if it may. Raises ``StoreError`` in a signal
        handler that has interrupted such a turn.
        """
        ticket = Ticket()
        if self.watch_set.turns.mine:
            raise would_wait_for_itself()
        if not (self._may_drive() and surely(lambda: self._drive(ticket, timeout_s), lambda: self._end_drive(ticket))):
            if self.watch_set.due:  # the ring for the loop has woken this drain, and may not wake the loop
                self.watch_set.call_thread()
            self.fetcher.arrived.wait(timeout_s)

    def catch_up(self) -> None:
        """Have a drain take a turn, if it may: acks have waited for too long, although messages are there."""
        ticket = Ticket()
        if self._may_drive():
            surely(lambda: self._drive(ticket, 0), lambda: self._end_drive(ticket))

    @property
    def may_be_driven(self) -> bool:
        """Whether threads other than its own may take turns at all."""
        # Eventlet lets only one greenlet wait for a descriptor.
        return self._client.engine.writers_take_turns and not instead_of_threads()

    def _may_drive(self) -> bool:
        return (
            self.running and self.may_be_driven and monotonic() >= self._spared_until and not len(self.watch_set.turns)
        )

    def _drive(self, ticket: Ticket, timeout_s: float | None) -> bool:
        """Take a turn, and sleep for as long as it says. False if another thread was faster."""
        watch_set, began = self.watch_set, monotonic()
        if not watch_set.turns.acquire(ticket, 0):
            return False
        watch_set.begin_drive()
        # Any other exception may come from a signal handler: it must not fail the fetcher.
        step = partial(self.turn, (KombuFDBError, *CONNECTION_ERRORS))
        longest_s = inf if timeout_s is None else max(timeout_s, 0.0) + self._client.options.operation_timeout
        pause_s = self._client.patience.within(longest_s, step)
        watch_set.turns.release(ticket)
        took_s = monotonic() - began
        if took_s > SLOW_S:
            self._spared_until = began + took_s + SPARED_S
        elif pause_s != 0 and self.fetcher.error is None and not self.fetcher.arrived.wait(0):
            pauses = [each for each in (pause_s, None if timeout_s is None else timeout_s - took_s) if each is not None]
            wait_for((watch_set.bell, self.fetcher.arrived), max(min(pauses), 0) if pauses else None)
        return True

    def take_turn(self) -> float | None:
        """Take a turn in the thread of an event loop. Returns in how many seconds the next one is due there.

        After :data:`SLOW_S` it stops waiting for the store: the thread continues. Celery shuts down inside a signal
        handler, which may take seconds and calls the broker: that runs after the turn.
        """
        ticket, watch_set = Ticket(), self.watch_set
        if not self._may_drive():
            watch_set.due = False
            watch_set.call_thread()
            return None
        return undisturbed(
            partial(surely, partial(self._turn_of_loop, ticket), lambda: watch_set.turns.release(ticket))
        )

    def _turn_of_loop(self, ticket: Ticket) -> float | None:
        watch_set, began = self.watch_set, monotonic()
        try:
            if watch_set.turns.acquire(ticket, 0):
                pause_s = self._client.patience.within(SLOW_S, partial(self.turn, late=(StoreUnavailable,)))
                ended, before = monotonic(), self._held_up_at
                if ended - began > HELD_UP_S:
                    self._held_up_at = ended
                if ended - began <= max(HELD_UP_S, HELD_UP_SHARE * (ended - before)):
                    watch_set.rest_beside_loop()
                    return pause_s
                self._spared_until = ended + SPARED_S
        except StoreUnavailable:  # another process writes, or the store has failed: the thread finds out
            self._spared_until = monotonic() + SPARED_S
        watch_set.call_thread()
        return None

    def _end_drive(self, ticket: Ticket) -> None:
        self.watch_set.turns.release(ticket)
        if monotonic() < self._spared_until:
            self.watch_set.call_thread()
        else:
            self.watch_set.end_drive()

    def _start(self) -> None:
        thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self.watch_set), name="kombu-fdb-receiver", daemon=True
        )
        self._thread = thread
        try:
            start(thread)
        except BaseException:
            if thread.ident is None:  # the next consumer starts another; if this one starts after all, they take turns
                self._thread = None
            raise

    def step(self) -> float | None:
        """A step of the thread: a turn, if no other thread takes one. Returns how long to sleep; None: until rung."""
        if self.failed:
            self.watch_set.bell.clear()  # as no turn does
            return 0 if self.fetcher.error is None else None  # checked again: ``restart`` may have just rung
        if not self.fetcher.waits and (idle_s := self.watch_set.idle_beside_loop_s()) > 0:
            return idle_s
        ticket, turns = Ticket(), self.watch_set.turns
        return surely(
            lambda: self.turn() if turns.acquire(ticket, self.watch_set.rest_s) else 0, lambda: turns.release(ticket)
        )

    def turn(
        self, failures: tuple[type[BaseException], ...] = (Exception,), *, late: tuple[type[BaseException], ...] = ()
    ) -> float | None:
        """``late``: the errors that mean too little time."""
        self._cancels_wait, watch_set = True, self.watch_set
        watch_set.next_at = -inf
        try:
            pause_s = self.fetcher.turn()
            watch_set.next_at = inf if pause_s is None else monotonic() + pause_s
            return pause_s
        except late:
            raise
        except failures as error:  # the next drain raises it
            self.watch_set.leave()
            self.fetcher.fail(error)
            return None

    def die(self, error: BaseException) -> None:
        """Note that the thread ends unexpectedly."""
        self._thread = None  # first: afterwards it may be restarted
        self.fetcher.fail(error)


def _serve(reference: weakref.ref[Receiver], watch_set: WatchSet) -> None:
    """The thread: holds the receiver during a step only, so that an unreferenced connection is collected."""
    try:
        while not watch_set.stopped:
            if watch_set.rest():
                continue
            pause_s = _step(reference, watch_set)
            # Checked again: the turn may have cleared the bell just as it was rung to end the thread.
            if pause_s != 0 and not watch_set.stopped:
                watch_set.sleep(pause_s)
    except BaseException as error:  # from a signal handler, if threads are greenlets; or no memory is left
        watch_set.leave()
        receiver = reference()
        if receiver is not None:
            receiver.die(error)
        if not isinstance(error, Exception):
            raise
        return  # its bell stays open: the receiver may be restarted
    watch_set.leave()
    watch_set.close()


def _step(reference: weakref.ref[Receiver], watch_set: WatchSet) -> float | None:
    receiver = reference()
    if receiver is None:
        watch_set.stop()
        return 0
    return receiver.step()
