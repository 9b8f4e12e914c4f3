"""The thread that drives a connection's reception (``reception.py``).

Model. It is started with the first consumer, and repeats the reception's turn, sleeping in between for as long as that
says, or until its bell rings. It ends when it is told to, or when the reception has failed; ``restart``, when the
connection is established again, begins another one.

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
from kombu_fdb.primitives.threads import in_hub, start
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client import Client
from kombu_fdb.transport.consuming.lookout import Lookout
from kombu_fdb.transport.consuming.reception import Reception
from kombu_fdb.transport.consuming.subscription import Subscription

__all__ = ["Receiver"]

#: How long ``cancel`` waits, in seconds.
CANCEL_S = 1.0


class Receiver:
    """One per connection that consumes. Public methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lookout = Lookout(Bell())
        self.reception = Reception(client, self._lookout, Bell(), monotonic, random.Random())
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._cancels_wait = True

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
        elif signals and self._cancels_wait:
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
            self._lookout.bell.close()
        return leases

    def abandon(self) -> None:
        """The connection was collected: have the thread end. For a finalizer: takes no lock, asks no store."""
        self._lookout.stop()
        self.reception.abandon()
        self.reception.arrived.close()
        if self._thread is None or not self._thread.is_alive():
            self._lookout.bell.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._lookout), name="kombu-fdb-receiver", daemon=True
        )
        start(self._thread)

    def turn(self) -> float | None:
        """One of the thread's. Returns for how long to sleep, None for ever. Raises ``_Ended`` after an error."""
        self._cancels_wait = True
        try:
            return self.reception.turn()
        except Exception as error:  # the consumer's next drain raises it
            self.reception.fail(error)
            raise _Ended from error


class _Ended(Exception):
    """The thread has met an error."""


def _serve(reference: weakref.ref[Receiver], lookout: Lookout) -> None:
    """The thread: holds the receiver during a step only, so that a connection nobody refers to is collected."""
    try:
        while not lookout.stopped:
            pause_s = _turn(reference)
            # Asked once more: the turn may have cleared the bell just as it was rung to end the thread.
            if pause_s != 0 and not lookout.stopped:
                lookout.bell.wait(pause_s)
    except _Ended:
        return  # its bell stays: the receiver may be restarted
    except BaseException as error:  # out of a signal handler, where threads are greenlets; or no memory is left
        _fail(reference, error)
        if not isinstance(error, Exception):
            raise
    finally:
        lookout.leave()
    lookout.bell.close()


def _fail(reference: weakref.ref[Receiver], error: BaseException) -> None:
    receiver = reference()
    if receiver is not None:
        receiver.reception.fail(error)


def _turn(reference: weakref.ref[Receiver]) -> float | None:
    receiver = reference()
    if receiver is None:
        raise _Ended
    return receiver.turn()
