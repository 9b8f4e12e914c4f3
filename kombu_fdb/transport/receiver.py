"""The thread that talks to the store for the consumers of one connection.

Model. A queue is *hungry* when it may have messages, *armed* when it was seen empty and its bell is watched, or
neither: just subscribed to, or due for its safety look. The thread repeats one step:

1. Arm the watches of queues that are neither hungry nor armed. If one of them is not empty, all of them are hungry.
2. Claim from the hungry queues that have room (``dispatch.py``), taking pending acks along. A window that was not
   filled ends their hunger. Begin again.
3. If there is nothing to claim, settle the acks that have waited for ``ack_delay_ms``.
4. Sleep until a bell rings (a watch fired, consumers or room changed, acks came), an ack or a free place has waited
   long enough, or the safety look is due (``poll_interval``): watches are promised, but looking costs little.

The worker loops never wait for the store: they take what has arrived, and sleep on :attr:`Receiver.arrived`.

What happens at each failure:

* the session was fenced: what waits is dropped, the next step opens a new session and goes on. If a consumed queue
  vanished with the session, the consumers get :exc:`~kombu_fdb.transport.errors.SessionLost`, and declare it again.
* the store fails: the thread ends and the error is raised by the consumer's next drain, as the connection error it is.
  ``restart``, when the connection is established again, goes on with the same consumers.
* the connection is dropped: :meth:`stop` returns what was waiting; what is being claimed goes back when it arrives.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from time import monotonic

from kombu_fdb.client import Client
from kombu_fdb.errors import LeaseLost, StoreError, StoreUnavailable
from kombu_fdb.membership import Membership
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.store.protocol import Watch
from kombu_fdb.transport.dispatch import Arrival, Dispatch, Plan, Subscription
from kombu_fdb.transport.errors import CONNECTION_ERRORS, SessionLost
from kombu_fdb.wakeup import Bell

__all__ = ["Receiver"]

logger = logging.getLogger(__name__)

#: This many pending acks don't wait for more.
MANY_ACKS = 64
#: How long ``cancel`` waits, in seconds.
CANCEL_S = 1.0
#: Rests after claims that brought nothing, in seconds.
FIRST_REST_S = 0.0005
LONGEST_REST_S = 0.1


class Receiver:
    """One per connection that consumes. Public methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self.arrived = Bell()
        self.dispatch = Dispatch(client.options.claim_window, client.options.ack_delay_ms / 1000)
        #: Nothing to do until something changes: what there was has been handed over.
        self.idle = False
        self._client = client
        self._ack_delay_s = client.options.ack_delay_ms / 1000
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._error: BaseException | None = None
        self._membership: Membership | None = None
        self._hungry: set[str] = set()
        self._armed: dict[str, Watch] = {}
        self._cancels: deque[tuple[Subscription, bool, threading.Event]] = deque()
        self._first_ack: float | None = None
        self._next_look = 0.0
        self._fruitless = 0

    # -- for consumers ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopped

    def subscribe(self, subscription: Subscription) -> None:
        """Begin to claim for a consumer."""
        self._register(subscription, self._client.membership())
        self.dispatch.add(subscription)
        self._hungry.add(subscription.queue)
        self.idle = False
        if self._thread is None:
            self._start()
        self._bell.ring()

    def cancel(self, subscription: Subscription, *, leave: bool = True) -> None:
        """End a consumer; what was claimed for it and not handed out goes back to its place, and its queue may vanish.

        The thread does it, between two claims; this waits for it, but not for long. Celery cancels from inside a signal
        handler, so no lock is taken here that the interrupted code may hold. Never raises.
        """
        done = threading.Event()
        self._cancels.append((subscription, leave, done))
        self._bell.ring()
        if not self.running or threading.current_thread() is self._thread:
            self._carry_out_cancels()
        else:
            done.wait(CANCEL_S)

    def leave(self, subscription: Subscription) -> None:
        """The store forgets a cancelled consumer; its queue may vanish, or serve another one. Never raises."""
        try:
            self.unregister(subscription)
        except StoreError:
            self._client.later(partial(self.unregister, subscription))

    def next(self) -> Arrival | None:
        """The next message to hand out. Raises the error that ended the thread."""
        if self.dispatch.resume():
            self._bell.ring()
        arrival = self.dispatch.next()
        if arrival is None:
            if self._error is not None:
                raise self._error
        elif self.dispatch.is_low(arrival.subscription.channel):
            self._bell.ring()
        return arrival

    def on_ack(self, pending: int, enough: int) -> None:
        """An ack was added to the client's list. The first starts the clock, many end the wait."""
        if self._first_ack is None or pending >= min(enough, MANY_ACKS):
            self._bell.ring()

    def on_room(self) -> None:
        """Prefetch or the number of held messages changed."""
        self._bell.ring()
        self.arrived.ring()  # something may wait that did not fit before

    def restart(self) -> None:
        """Go on after an error."""
        if self._error is not None and not self._stopped:
            self._error = None
            self._disarm(self._armed)
            self._hungry.update(self.dispatch.queues)
            self._start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def stop(self, timeout_s: float) -> list[Lease]:
        """End the thread, waiting for it at most ``timeout_s`` seconds. Returns what was waiting. Final."""
        self._stopped = True
        self._bell.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        self._carry_out_cancels()
        leases = self.dispatch.close()
        self.arrived.close()
        self._bell.close()
        return leases

    # -- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kombu-fdb-receiver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._bell.clear()
                pause_s = self._step()
                if pause_s > 0:
                    self.idle = self._first_ack is None and not self._fruitless
                    self._bell.wait(pause_s)
                self.idle = False
        except Exception as error:  # noqa: BLE001 - the consumer's next drain raises it
            self._fail(error)
        finally:
            self._disarm(self._armed)
            if self._membership is not None:
                self._membership.consumed.pop(self, None)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, CONNECTION_ERRORS):
            logger.error("the receiver failed", exc_info=error)
            unexpected = StoreUnavailable("the receiver failed", reason=repr(error))
            unexpected.__cause__ = error
            error = unexpected
        if isinstance(error, StoreError):
            self._client.suspect()
        self._error = error
        self.arrived.ring()

    def _step(self) -> float:
        """Do what is to be done. Returns for how long to sleep; 0 to be called again at once."""
        self._carry_out_cancels()
        membership = self._current_membership()
        now = monotonic()
        if now >= self._next_look:
            self._next_look = now + self._client.options.poll_interval * random.uniform(0.75, 1.0)
            self._disarm(self._armed)
        membership.consumed[self] = self.dispatch.queues
        self._arm()
        plan = self.dispatch.plan(self._hungry, now)
        if plan.queues:
            return self._claim(membership, plan)
        self._fruitless = 0
        self._flush_if_due(now)
        return self._pause(plan, now)

    def _pause(self, plan: Plan, now: float) -> float:
        until = [self._next_look - now]
        if plan.again_s is not None:
            until.append(plan.again_s)
        if self._first_ack is not None:
            until.append(self._first_ack + self._ack_delay_s - now)
        return max(min(until), 0.0005)

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _claim(self, membership: Membership, plan: Plan) -> float:
        """Returns how long to rest before the next step."""
        try:
            found = self._claim_and_settle(membership, plan)
        except LeaseLost:
            return 0  # the next step opens another session
        if len(found) < plan.limit:
            self._hungry.difference_update(plan.queues)
        if found:
            self._fruitless = 0
            self._hand_over(found, plan.leaseless)
            return 0
        # What is there was expired, or a rival took it. Should it ever be unclaimable, this is no busy loop.
        self._fruitless += 1
        return min(FIRST_REST_S * (1 << min(self._fruitless, 10)), LONGEST_REST_S)

    def _claim_and_settle(self, membership: Membership, plan: Plan) -> list[Delivery]:
        self._first_ack = None  # before the list is emptied: an ack that comes after it rings
        pending = self._client.take_acks()
        ours = [lease for lease in pending if lease.session == membership.session_id]
        try:
            if len(ours) < len(pending):
                self._client.ack([lease for lease in pending if lease.session != membership.session_id])
            found = membership.claim(
                plan.queues, plan.limit, no_ack=plan.leaseless, acks=ours, consumers=plan.consumers
            )
        except BaseException:
            self._client.acks.extendleft(reversed(ours))
            raise
        # The session stood, so did its leases.
        self._client.settled(ours)
        return found

    def _hand_over(self, found: list[Delivery], leaseless: Collection[str]) -> None:
        homeless = self.dispatch.place(found)
        self._begin_times_to_run(each for each in found if each.queue not in leaseless)
        self.arrived.ring()
        if homeless:
            lost = {each.lease for each in found if each.queue in leaseless}
            self._client.release_later([lease for lease in homeless if lease not in lost])

    def _begin_times_to_run(self, found: Iterable[Delivery]) -> None:
        """From the claim on: a loop that hangs must not keep what waits for it either."""
        for each in found:
            if each.ttr_ms:
                self._client.watch(
                    each,
                    started=partial(self._has_begun, each.lease),
                    gone=partial(self.dispatch.overdue, each.lease),
                )

    def _has_begun(self, lease: Lease) -> bool:
        return not self.dispatch.withdraw(lease)

    def _flush_if_due(self, now: float) -> None:
        if not self._client.acks:
            self._first_ack = None
            return
        if self._first_ack is None:
            self._first_ack = now
        if now - self._first_ack >= self._ack_delay_s or len(self._client.acks) >= MANY_ACKS:
            self._first_ack = None
            self._client.flush_acks()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Watch the queues known to be empty; if one of them is not, all of them are hungry."""
        wanted = self.dispatch.queues
        self._disarm(queue for queue in list(self._armed) if queue not in wanted)
        self._hungry &= wanted
        queues = sorted(wanted - self._hungry - self._armed.keys())
        if not queues:
            return
        session_id = b"" if self._membership is None else self._membership.session_id
        watches = self._client.engine.arm(queues, session_id, self.dispatch.consumers)
        if watches is None:
            self._hungry.update(queues)
            return
        for queue, watch in zip(queues, watches, strict=True):
            self._armed[queue] = watch
            watch.on_fire(partial(self._on_fire, queue, watch))

    def _on_fire(self, queue: str, watch: Watch) -> None:
        """From any thread, also from native ones."""
        if self._armed.get(queue) is watch:
            self._armed.pop(queue, None)
        self._hungry.add(queue)
        self._bell.ring()

    def _disarm(self, queues: Iterable[str]) -> None:
        for queue in list(queues):
            watch = self._armed.pop(queue, None)
            if watch is not None:
                watch.cancel()

    # -- the session -------------------------------------------------------------------------------------------------

    def _current_membership(self) -> Membership:
        membership = self._client.membership()
        previous, self._membership = self._membership, membership
        if previous is not None and previous is not membership:
            self.dispatch.drop_session(previous.session_id)
            if any(each.transient for each in self.dispatch.subscriptions):
                raise SessionLost("the session was ended by another process, and its temporary queues with it")
        for subscription in self.dispatch.subscriptions:
            if subscription.session_id != membership.session_id:
                self._register(subscription, membership)
        return membership

    def _register(self, subscription: Subscription, membership: Membership) -> None:
        """Let the store know, so that the queue does not vanish under the consumer."""
        self._client.engine.add_consumer(membership.session_id, subscription.queue, subscription.tag)
        subscription.session_id = membership.session_id

    def unregister(self, subscription: Subscription) -> None:
        """The counterpart; deletes an auto-delete queue with its last consumer. Raises a ``StoreError``."""
        if subscription.session_id is not None:
            self._client.engine.remove_consumer(subscription.session_id, subscription.queue, subscription.tag)

    def _carry_out_cancels(self) -> None:
        while self._cancels:
            subscription, leave, done = self._cancels.popleft()
            try:
                self._client.release(self.dispatch.remove(subscription))
            except StoreError as error:  # the client does it as soon as it can
                logger.debug("messages of a cancelled consumer can't be handed back yet: %s", error)
            if leave:
                self.leave(subscription)
            done.set()
