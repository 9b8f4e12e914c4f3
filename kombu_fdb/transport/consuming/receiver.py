"""Which thread takes the turns of a connection's reception (``reception.py``), and how it sleeps between them.

Model. One thread at a time has the *turns*; it repeats the reception's turn, and sleeps in between for as long as that
says, or until the reception's bell rings. It is

* a *drain*, on a store whose writers take turns, unless threads are greenlets: a thread that drains and finds nothing
  to deliver claims by itself, as long as it waits. So no message passes from one thread to another.
* the receiver's own *thread*, started with the first consumer: whenever no drain has the turns. On a store whose
  writers don't take turns it always has them.

While drains follow each other quickly, the thread *stands by*: it looks every now and then whether one has had the
turns since, and takes them itself if none has, as a callback works for long: acks are settled, and messages claimed,
meanwhile. While a drain sleeps, the thread does, too, until it is *relieved*: the drain wakes.

The thread ends when it is told to, or when the reception has failed; ``restart``, when the connection is established
again, begins another one.

* an exception out of a signal handler ends a drain in the middle of a turn: the next turn goes on with what that had in
  hand, whichever thread takes it.
* a turn fails in a drain: the drain raises the error, and the thread ends.
* the connection is dropped: :meth:`Receiver.stop` returns what was waiting; what is being claimed goes back when it
  arrives.
* the connection is collected without having been closed: between two turns the thread refers to the receiver weakly, so
  it does not keep it alive; it ends when the finalizer calls :meth:`Receiver.abandon`.
"""

from __future__ import annotations

import random
import threading
import weakref
from time import monotonic

from kombu_fdb.model import Lease
from kombu_fdb.primitives.locks import Turn, surely
from kombu_fdb.primitives.threads import in_hub, instead_of_threads, start
from kombu_fdb.primitives.wakeup import Bell, wait_for
from kombu_fdb.process.client import Client
from kombu_fdb.transport.consuming.lookout import Lookout
from kombu_fdb.transport.consuming.reception import Reception
from kombu_fdb.transport.consuming.subscription import Subscription

__all__ = ["Receiver"]

#: How long ``cancel`` waits, in seconds.
CANCEL_S = 1.0
#: How often a thread that stands by looks, as a part of the time that an ack may wait, and in seconds at least.
LOOKS_PER_ACK = 2
SHORTEST_LOOK_S = 0.001
#: A drain whose turn takes longer than this leaves the turns to the thread for a while: the store's writers are slow
#: just now, and a drain has a deadline of its own.
SLOW_S = 0.1
SPARED_S = 5.0


class Receiver:
    """One per connection that consumes. Public methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lookout = Lookout(Bell())
        self.reception = Reception(client, self._lookout, Bell(), monotonic, random.Random())
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._cancels_wait = True
        self._look_s = max(client.options.ack_delay_ms / 1000 / LOOKS_PER_ACK, SHORTEST_LOOK_S)
        #: The thread whose drain has the turns, and until when none may take them.
        self._driver = 0
        self._spared_until = float("-inf")

    @property
    def alive(self) -> bool:
        """Whether its thread has not ended yet, were it told to or not."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self.alive and not self._lookout.stopped

    @property
    def failed(self) -> bool:
        return self.reception.error is not None

    def subscribe(self, subscription: Subscription) -> None:
        """Begin to claim for a consumer, from the next drain on."""
        self.reception.subscribe(subscription)
        with self._starting:
            if self._thread is None:
                self._start()
        self._lookout.bell.ring()

    def cancel(self, *subscriptions: Subscription, leave: bool = True) -> None:
        """End consumers; what was claimed for them and not handed out goes back, and their queues may vanish.

        The thread does it, between two claims; this waits for it, but not for long, and only once while the store does
        not answer. Celery cancels from inside a signal handler, so no lock is taken here that the interrupted code may
        hold; and with gevent that handler runs where nothing may wait, so there this doesn't. Never raises.
        """
        signals = [self.reception.cancel(each, leave=leave) for each in subscriptions]
        self._lookout.bell.ring()
        if in_hub():
            return
        if not self.running or threading.current_thread() is self._thread:
            self.reception.carry_out_cancels()
        elif signals and self._cancels_wait and self._driver != threading.get_ident():
            self._lookout.call_thread()
            self._cancels_wait = signals[-1].wait(self._client.patience.allow(CANCEL_S))

    def restart(self) -> None:
        """Go on after an error."""
        if self.failed and not self._lookout.stopped:
            self.reception.recover()
            self._start()

    def stop(self, timeout_s: float) -> list[Lease]:
        """End the thread, waiting for it at most ``timeout_s`` seconds. Returns what was waiting. Final."""
        self._lookout.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        leases = self.reception.close()
        self.reception.arrived.close()
        if thread is None or not thread.is_alive():
            self._lookout.close()
        return leases

    def abandon(self) -> None:
        """The connection was collected: have the thread end. For a finalizer: takes no lock, asks no store."""
        self._lookout.stop()
        self.reception.abandon()
        self.reception.arrived.close()
        if self._thread is None or not self._thread.is_alive():
            self._lookout.close()

    # -- turns -------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something may have arrived, for at most ``timeout_s`` seconds; None is for ever.

        A drain does, which takes the reception's turns meanwhile if it may.
        """
        turn = Turn()
        if not (self._may_drive() and surely(lambda: self._drive(turn, timeout_s), lambda: self._end_drive(turn))):
            self.reception.arrived.wait(timeout_s)

    def _may_drive(self) -> bool:
        return (
            self.running
            and self._client.engine.writers_take_turns
            and monotonic() >= self._spared_until
            and not instead_of_threads()  # eventlet lets only one greenlet wait for a descriptor
        )

    def _drive(self, turn: Turn, timeout_s: float | None) -> bool:
        """Take one turn, and sleep for as long as it says. False if another thread has the turns."""
        lookout, began = self._lookout, monotonic()
        if not lookout.turns.acquire(turn, 0):
            return False
        self._driver = threading.get_ident()
        lookout.begin_drive()
        try:
            pause_s = self.turn()
        except _Ended:  # the next look raises the error, and the thread finds it
            lookout.call_thread()
            return True
        took_s = monotonic() - began
        if took_s > SLOW_S:
            self._spared_until = began + took_s + SPARED_S
        elif pause_s != 0:
            pauses = [each for each in (pause_s, None if timeout_s is None else timeout_s - took_s) if each is not None]
            lookout.drain_sleeps = True
            wait_for((lookout.bell, self.reception.arrived), max(min(pauses), 0) if pauses else None)
        return True

    def _end_drive(self, turn: Turn) -> None:
        lookout = self._lookout
        if lookout.turns.head is turn:
            self._driver = 0
            if lookout.drain_sleeps:
                lookout.drain_sleeps = False
                lookout.relief.ring()
        lookout.turns.release(turn)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._lookout, self._look_s), name="kombu-fdb-receiver", daemon=True
        )
        start(self._thread)

    def step(self) -> float | None:
        """A turn of the thread's, unless a drain has the turns. Returns as :meth:`turn`, and raises ``_Ended``."""
        if self.failed or self._thread is not threading.current_thread():
            raise _Ended
        turn, turns = Turn(), self._lookout.turns
        return surely(lambda: self.turn() if turns.acquire(turn, 0) else 0, lambda: turns.release(turn))

    def turn(self) -> float | None:
        """Returns for how long to sleep, None for ever. Raises ``_Ended`` after an error."""
        self._cancels_wait = True
        try:
            return self.reception.turn()
        except Exception as error:  # the consumer's next drain raises it
            self.reception.fail(error)
            raise _Ended from error


class _Ended(Exception):
    """The thread has met an error."""


def _serve(reference: weakref.ref[Receiver], lookout: Lookout, look_s: float) -> None:
    """The thread: holds the receiver during a step only, so that a connection nobody refers to is collected."""
    try:
        while not lookout.stopped:
            if lookout.stand_by(look_s):
                continue
            pause_s = _step(reference)
            # Asked once more: the turn may have cleared the bell just as it was rung to end the thread.
            if pause_s != 0 and not lookout.stopped:
                lookout.sleep(pause_s)
    except _Ended:
        return  # its bell stays: the receiver may be restarted
    except BaseException as error:  # out of a signal handler, where threads are greenlets; or no memory is left
        _fail(reference, error)
        if not isinstance(error, Exception):
            raise
    finally:
        lookout.leave()
    lookout.close()


def _fail(reference: weakref.ref[Receiver], error: BaseException) -> None:
    receiver = reference()
    if receiver is not None:
        receiver.reception.fail(error)


def _step(reference: weakref.ref[Receiver]) -> float | None:
    receiver = reference()
    if receiver is None:
        raise _Ended
    return receiver.step()
