"""The fetcher: what a connection asks the store for on its consumers' behalf. A state machine without a thread.

Model. A connection is *attended*

* while a drain runs, its callbacks included;
* for ``undrained_timeout`` after one, as a consuming program soon drains again;
* while it is registered with an event loop.

Otherwise it is *left alone*: its program sits at a prompt, or has forgotten its consumer. No timer checks that: a turn
checks before it claims. Then the fetcher is *asleep*: nothing is claimed or watched, and nothing happens until its bell
rings. While the connection is attended, a queue is *hungry* when it may have messages, *armed* when it was seen empty
and its bell is watched, or neither: due for its safety look. A turn, which is repeated, has these steps:

1. If other consumers compete for the same queues and there is room, wait in the wait queue with them
   (``process/combiner_client.py``). While another consumer is the first there, leave these queues out of steps 2 and 3
   (:class:`Claiming`).
2. Arm the watches of queues that are neither hungry nor armed. Those that are not empty are hungry.
3. Claim from the hungry queues that have room (``dispatch.py``), taking pending acks along; as the first of a wait
   queue, for the whole wait queue. Afterwards the queues before the last one that gave a message are no longer hungry;
   if room was left, none is. Begin again, unless all the room is used, no queue is to be watched, and no ack is left.
4. If there is nothing to claim, settle the acks that have waited for ``ack_delay_ms``, or twice as long while a few
   free places wait for more, as the claim that fills them takes the acks along.
5. Sleep until a bell rings (a watch fired, consumers or room changed, acks came), an ack or a free place has waited
   long enough, or the safety look is due (``poll_interval``). The store guarantees that watches fire, but a look costs
   little.

A message that is claimed, but not taken for ``undrained_timeout``, returns to its place, uncounted. Nothing more is
claimed for its channel until the program drains again: the program has forgotten its consumer, or works for an hour in
a callback. While the fetcher is asleep and holds nothing, an active consumer of a queue gives way.

No room is promised twice: a consumer in a wait queue may be granted its full demand at any time. So before it claims
for the same channels from a queue that has no wait queue (temporary, or with one active consumer), it leaves the wait
queue (:meth:`Claiming.restrict`). When it has rejoined the wait queue, and there is work there, the room is reserved
for the wait queue for :data:`WAIT_QUEUE_FIRST_S` (:meth:`Claiming.deferred`), so that neither starves the other.

Except on SQLite, the worker loops never wait for the store: they take what has arrived, and sleep on
:attr:`Fetcher.arrived`.

What happens at each failure:

* the session was fenced: waiting messages are dropped, and the next turn opens a new session and continues. If a
  consumed queue vanished with the session, the consumers get a connection error, and redeclare it.
* a consumed queue was deleted: its consumers end at the next safety look, and the next drain notifies them
  (``receiver.py``).
* the store fails: the fetcher has *failed*, and the consumer's next drain raises the error, as a connection error.
  ``recover``, when the connection is re-established, continues with the same consumers.
* a turn is interrupted anywhere: its acks are pending again. The session recovers messages that its claim had leased,
  but not yet noted (``process/client_session.py``). The next turn continues with those that it had not handed over or
  released (``dispatch.py``).

Time, chance and the store (through the process's client) are arguments, so a simulation can drive it like a thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from random import Random
from weakref import WeakSet

from amqp.exceptions import RecoverableConnectionError

from kombu_fdb import errors
from kombu_fdb.keyspace.codec import control_of
from kombu_fdb.model import NO_SESSION, Delivery, Lease, SessionId
from kombu_fdb.primitives.clock import in_step
from kombu_fdb.primitives.interruption import Signal, Ticket
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.wakeup import Bell, weakly
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.combiner_client import CombinerClient, Contention
from kombu_fdb.process.session_threads import MOST_DEFERRED
from kombu_fdb.transport.consuming.dispatch import Arrival, Credit, Dispatch, Plan, Subscription
from kombu_fdb.transport.consuming.watch_set import WatchSet
from kombu_fdb.transport.errors import CONNECTION_ERRORS, raise_as_operational
from kombu_fdb.transport.poison import is_workers

#: How long a wait queue that was left for another queue has precedence, in seconds from rejoining it.
WAIT_QUEUE_FIRST_S = 0.25


class Claiming:
    """How a fetcher claims: directly, or in a wait queue with others, taking acks along.

    A turn calls :meth:`stand` before it looks at any queue, and :meth:`restrict` and :meth:`claim` when it knows which
    queues are hungry. In between, it ignores :meth:`others`: the first consumer of their wait queue looks at them.
    """

    def __init__(self, client: Client, dispatch: Dispatch, combiner: CombinerClient) -> None:
        self.combiner = combiner
        self._client = client
        self._dispatch = dispatch
        #: Whether it has had a queue for which others may compete.
        self._began = False
        #: Whether the wait queue was left for another queue; and until when it therefore has precedence.
        self._owes_wait_queue = False
        self._wait_queue_first_until = 0.0

    @property
    def may_compete(self) -> bool:
        """If not, there is no wait queue to join. Checked in each turn."""
        return not self._began or self.combiner.contention.known or self.combiner.in_wait_queue

    def stand(self, session: ClientSession, now: float) -> Plan:
        """Join a wait queue, look, or leave, depending on other consumers and room; granted messages are arriving.

        Returns a plan with the wait queue's queues if this consumer has just become the first there, else with none.
        Raises what ``ClientSession.claim`` raises.
        """
        self.combiner.belong_to(session)
        if not self._began:
            self._begin()
        plan, combiner = self._contested(now), self.combiner
        queues = sorted(plan.queues)
        join = partial(combiner.join, session, queues, plan.limit)
        if combiner.in_wait_queue and (list(combiner.queues) != queues or combiner.want > plan.limit):
            combiner.leave()  # its grant might no longer fit
        elif queues and not combiner.in_wait_queue:
            self._with_acks(session, join)
            self._pay_wait_queue(queues, now)
        if self._dispatch.arriving or not combiner.attend(self._client.engine):
            plan.queues = []
        if queues and not self._dispatch.arriving and not combiner.in_wait_queue:  # it has left, or was evicted
            self._with_acks(session, join)
        return plan

    def _pay_wait_queue(self, queues: list[str], now: float) -> None:
        if self._owes_wait_queue and self._client.engine.messages.has_work(queues):
            self._wait_queue_first_until = now + WAIT_QUEUE_FIRST_S
        self._owes_wait_queue = False

    def deferred(self, plan: Plan, now: float) -> set[str]:
        """The queues that leave their room to the wait queue; ``plan`` notes for how long."""
        left_s = self._wait_queue_first_until - now
        if left_s <= 0 or not self.combiner.in_wait_queue:
            return set()
        plan.note(left_s)
        return self._dispatch.competing(self.combiner.queues)

    def _begin(self) -> None:
        shared = self._dispatch.shared
        self._began = bool(shared)
        if shared and not self._client.engine.writers_take_turns:
            self.combiner.contention.suspect(shared)

    def _contested(self, now: float) -> Plan:
        shared = self._contested_queues()
        return self._dispatch.plan(shared, now, now) if shared else Plan()

    def others(self) -> set[str]:
        """The queues that are left to other consumers, even if none of these has room."""
        return set() if self.combiner.is_first else self._contested_queues()

    def _contested_queues(self) -> set[str]:
        """Called in each turn, so the queues are collected only if others compete."""
        if not self.combiner.contention.known:
            return set()
        shared = self._dispatch.shared
        return shared if self.combiner.contention.is_contested(shared) else set()

    def restrict(self, plan: Plan) -> None:
        """Restrict the plan to what one transaction may claim (the wait queue's queues, or the others), and make room.

        If that means leaving the wait queue, messages granted there are arriving; then the plan is void. Raises what
        ``ClientSession.claim`` raises.
        """
        waited_for = self.combiner.queues
        if not waited_for:
            return
        are_waited_for = plan.queues[0] in waited_for  # it has waited longest, so neither part starves the other
        plan.queues = [queue for queue in plan.queues if (queue in waited_for) == are_waited_for]
        if not (are_waited_for or self._dispatch.competing(waited_for).isdisjoint(plan.queues)):
            self._owes_wait_queue = True
            self.combiner.leave()

    def claim(self, session: ClientSession, plan: Plan) -> None:
        """Carry out a restricted plan; the messages found are arriving.

        Raises what ``ClientSession.claim`` raises; then the acks that it took along are pending again.
        """
        if self.combiner.in_wait_queue and not set(self.combiner.queues).isdisjoint(plan.queues):
            self._dispatch.note_single(plan.queues, self.combiner.serve(plan.queues))
            return
        # If writers take turns, a claim gives way to no other.
        shared = set() if self._client.engine.writers_take_turns else self._dispatch.shared
        claim = partial(
            session.claim,
            plan.queues,
            plan.limit,
            no_ack=plan.leaseless,
            consumers=plan.consumers,
            gives_way=not shared.isdisjoint(plan.queues),
            stands=partial(self._dispatch.agrees, plan),
            into=self._dispatch.arriving,
        )
        try:
            self._with_acks(session, claim)
        except errors.Outrun:
            self.combiner.contention.contest(shared)

    def _with_acks(self, session: ClientSession, act: Callable[..., object]) -> None:
        acks: list[Lease] = []
        try:
            self._client.take_acks(acks)
            session_id = session.session_id
            if others := [lease for lease in acks if lease.session != session_id]:  # of a lost session
                acks[:] = [lease for lease in acks if lease.session == session.session_id]
                self._client.ack(others)
            act(acks=acks)
            self._client.settled(acks)  # the session was valid, so its leases were
        except BaseException as error:
            self._client.give_acks_back(acks, error)
            raise


#: With up to this many queues, the first consumer of a wait queue claims from all of them without knowing which have
#: messages. With more, a consumer also watches their bells while it waits, so that it knows which have messages when it
#: becomes the first.
FEW_QUEUES = 8

#: With this many, pending acks wait for no more.
MANY_ACKS = 64

logger = logging.getLogger(__name__)

#: The shortest and the longest rest after claims that found nothing, in seconds.
FIRST_REST_S = 0.0005
LONGEST_REST_S = 0.1


#: A drain takes a turn first if an ack is older than this many times ``ack_delay_ms``; a younger ack waits for a claim
#: that takes it along. After the last drain, an ack waits no longer than the thread's rest and its nap.
BUSY = 4


class Fetcher:
    """The fetcher of one connection. One thread at a time calls :meth:`turn`; any thread may call the rest."""

    def __init__(
        self, client: Client, watch_set: WatchSet, arrived: Bell, clock: Callable[[], float], rng: Random
    ) -> None:
        """``clock``: seconds from any start."""
        options = client.options
        self.arrived = arrived
        self.dispatch = Dispatch(
            options.claim_window,
            options.ack_delay_ms / 1000,
            options.undrained_timeout,
            clock,
            int(rng.uniform(0, 1000)),
        )
        #: What ended the turns; the consumer's next drain raises it.
        self.error: BaseException | None = None
        #: Whether the program does not drain.
        self.asleep = True
        #: The running drains. Only their threads refer to them, so each ends even if an exception skips
        #: :meth:`end_drain`.
        self._drains: WeakSet[Ticket] = WeakSet()
        self._attended_until = -inf
        #: Whether the connection is registered with an event loop.
        self._looped = False
        #: Whether the connection is that of a Celery worker (``poison.py``).
        self.is_workers = False
        self.client = client
        self._watch_set = watch_set
        self._clock = clock
        self._rng = rng
        longest_s = min(options.poll_interval, options.operation_timeout)
        self._claiming = Claiming(
            client,
            self.dispatch,
            CombinerClient(watch_set.bell.ring, clock, rng, longest_s, Contention(), self.dispatch.arriving),
        )
        self._ack_delay_s = options.ack_delay_ms / 1000
        self._session: ClientSession | None = None
        #: The session under which the store has registered all consumers; None if they must be registered again.
        self._entered: ClientSession | None = None
        self._cancels: deque[tuple[Subscription, bool, Signal]] = deque()
        #: Consumers that the store may have registered, until they are removed there, or another thread is to remove
        #: them.
        self._known: set[Subscription] = set()
        #: Whether the connection has ended: a registration that is still under way must be undone.
        self._given_up = False
        #: Consumers whose queues were deleted, and that have not been notified.
        self.ended: deque[Subscription] = deque()
        self._first_ack: float | None = None
        self._next_look = 0.0
        #: The values of the watched keys at the last glance.
        self._glanced: dict[bytes, bytes | None] = {}
        self._fruitless = 0
        #: Whether a queue may have messages, but its free places wait for more.
        self._room_waits = False
        #: Consumers that may be the active ones of their queues.
        self._active: set[str] = set()
        # How many looks were requested, and which request the last look that found no more has answered.
        self._called = 0
        self._answered = 0

    @property
    def session_id(self) -> SessionId:
        """The id of the session under which it claims; empty before the first turn."""
        return NO_SESSION if self._session is None else self._session.session_id

    # -- for consumers ---------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until something changes: all messages found have been handed over."""
        return self._answered == self._called and not self._watch_set.due

    def subscribe(self, subscription: Subscription, *, single: bool = False) -> None:
        """Claim for a consumer, from the next drain on; the bell must ring afterwards.

        ``single``: as in :meth:`.dispatch.Dispatch.add`.
        """
        self.client.in_session(partial(self._register, subscription))
        self.dispatch.add(subscription, single=single)
        self._entered = None  # afterwards: the session may have been lost
        self.is_workers = self.is_workers or is_workers(subscription.callback)
        self._watch_set.hungry.add(subscription.queue)
        self._called += 1

    @property
    def attended(self) -> bool:
        """Whether the program drains. Needs no lock: an exception may end a drain at any point."""
        return self._looped or len(self._drains) > 0 or self._clock() < self._attended_until

    def attend(self, drain: Ticket) -> None:
        """Note that a drain begins; :meth:`end_drain` must follow."""
        self._drains.add(drain)
        if self.asleep:
            self._wake()

    def end_drain(self, drain: Ticket) -> None:
        """Note that a drain has ended. Harmless if it has not begun."""
        self._attended_until = self._clock() + self.client.options.undrained_timeout
        self._drains.discard(drain)

    def attend_loop(self, *, registered: bool) -> None:
        """Note that an event loop delivers from now on, or no longer does."""
        self._looped = registered
        if self.asleep:
            self._wake()

    def _wake(self) -> None:
        self._called += 1
        self._watch_set.bell.ring()

    def cancel(self, subscription: Subscription, *, leave: bool) -> Signal:
        """End a consumer in the next turn, or :meth:`carry_out_cancels`. The signal is set when that is done."""
        done = Signal()  # not an event, which would stay locked if this thread were interrupted again
        self._cancels.append((subscription, leave, done))
        return done

    def forget(self, credit: Credit) -> None:
        """Forget a closed channel: its waiting messages are released. Never blocks."""
        self.dispatch.forget(credit)
        self._release_later()

    def leave(self, subscription: Subscription) -> None:
        """Remove a cancelled consumer from the store: its queue may vanish, or serve another one. Never raises."""
        subscription.leaves = True  # first: a registration that begins later sees it
        if subscription.session_id is None:
            return
        consumer = subscription.session_id, subscription.queue, subscription.tag
        remove = partial(self.client.remove_consumer, *consumer, partial(self._withdraw, subscription))
        try:
            self.dispatch.remove(subscription)  # first: afterwards, no claim planned for it commits
            if self.client.suspected:
                self.client.later(remove)
            else:
                remove()
        except errors.StoreError:
            self.client.suspected = True
            self.client.later(remove)
        self._known.discard(subscription)  # only now: after an interruption, the connection's end removes it

    def give_up_consumers(self) -> list[tuple[SessionId, str, str]]:
        """Note that all consumers leave. Returns them as the store knows them: session, queue, tag. Takes no lock."""
        self._given_up = True  # first: a registration that begins later sees it
        return [(each.session_id, each.queue, each.tag) for each in list(self._known) if each.session_id is not None]

    def _withdraw(self, subscription: Subscription) -> list[Lease]:
        self.dispatch.remove(subscription)
        return self.dispatch.to_release()

    def next(self, into: list[Arrival]) -> Arrival | None:
        """The next message to hand out, which is put ``into`` a list first. Raises the error that ended the turns."""
        dispatch = self.dispatch
        if dispatch.stalled:
            dispatch.stalled.clear()
            self._called += 1
            self._watch_set.ask()
        arrival = dispatch.next(into)
        if arrival is None:
            if self.error is not None:
                self.client.patience.wasted(0.0)  # it failed in another thread, but this one will connect again
                raise_as_operational(self.error)
                raise self.error
            return None
        if self._drains:  # not an event loop, whose turns prolong it
            self._watch_set.prolong_rest()
        if arrival.subscription.credit.is_low(dispatch.window):
            self._called += 1  # so that a drain that must not wait finds the next one, too
            self._watch_set.ask()
        return arrival

    def return_undelivered(self, hand: list[Arrival]) -> None:
        """Return messages to the front of their inboxes if no callback saw them before an interruption."""
        homeless = [lease for arrival in hand if (lease := self.dispatch.return_undelivered(arrival)) is not None]
        if homeless:
            self.client.release_later(homeless)
        if hand:
            self.arrived.ring()

    def on_ack(self, pending: int, enough: int) -> None:
        """Note that an ack was added to the client's list. The first one starts the clock, many end the wait."""
        is_first, is_enough = self._first_ack is None, pending >= min(enough, MANY_ACKS)
        if is_first:
            self._first_ack = self._clock()
        if is_first or is_enough:
            self._watch_set.ask(at_once=is_enough)

    @property
    def waits(self) -> bool:
        """Whether acks, or free places, wait for more."""
        return self._room_waits or self._first_ack is not None

    @property
    def owes_acks(self) -> bool:
        """Whether acks have waited too long for a claim that takes them along, although the program drains."""
        first = self._first_ack
        return first is not None and self._clock() - first >= BUSY * self._ack_delay_s

    def on_room(self) -> None:
        """Note that the prefetch, or the number of held messages, has changed."""
        self._watch_set.ask()
        self.arrived.ring()  # a message may wait that did not fit before

    def abandon(self) -> None:
        """Leave the wait queue, as there are no more consumers or turns. Never blocks; for finalizers, too."""
        self._claiming.combiner.abandon()

    def close(self) -> list[Lease]:
        """End the turns. Returns the leases of all messages that have arrived and were not handed out."""
        self.carry_out_cancels()
        self.dispatch.close()
        self.dispatch.place()
        self.abandon()
        return self.dispatch.to_release()

    # -- turns -------------------------------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Take a turn. Returns how long to sleep; 0: call again now, None: until the bell rings. May raise anything."""
        called, self._answered = self._called, -1
        self._watch_set.due = False
        self._watch_set.bell.clear()
        pause_s = self._step()
        if pause_s != 0 and not self._fruitless and not self._room_waits:
            self._answered = called
        return pause_s

    def fail(self, error: BaseException) -> None:
        """Note the error that a turn has raised: no more turns until :meth:`recover`."""
        if not isinstance(error, CONNECTION_ERRORS):
            logger.error("the receiver failed", exc_info=error)
            unexpected = errors.StoreUnavailable("the receiver failed", reason=repr(error))
            unexpected.__cause__ = error
            error = unexpected
        if isinstance(error, errors.StoreError):
            self.client.suspected = True
        self.error = error
        self.arrived.ring()

    def recover(self) -> None:
        """Resume after an error."""
        self.error = self._entered = None  # then the consumed queues are reported again
        self._glanced = {}
        self._watch_set.hungry.update(self.dispatch.queues)
        self.asleep = True

    def _step(self) -> float | None:
        """Do what is due. Returns how long to sleep: 0 to be called again at once, None until the bell rings."""
        self._hand_over()  # messages that an interrupted turn has left
        if self._cancels:
            self.carry_out_cancels()
        now = self._clock()
        self._release_untaken(now)
        self.asleep = True  # before the look: a drain that begins after it rings
        self.asleep = not self.attended
        if self.asleep:
            return self._sleep(now)
        if len(self.client.deferred_calls.open) >= MOST_DEFERRED:
            self._sleep(now)
            return LONGEST_REST_S
        try:
            session = self.client.session()
            if session is not self._entered:
                self._enter(session)
            if now >= self._next_look:
                wall_ms = self.client.engine.transactions.now()
                self._next_look = now + in_step(wall_ms, self._rng, self.client.options.poll_interval)
                self._glance(session)
            return self._serve_consumers(session, now)
        except errors.SessionLost:
            return 0  # the next step opens another session

    def _serve_consumers(self, session: ClientSession, now: float) -> float | None:
        dispatch, watch_set, claiming = self.dispatch, self._watch_set, self._claiming
        queues = dispatch.queues
        left_alone = others = set()
        wait_queue_again_s = None
        competes = claiming.may_compete
        if competes:
            first_for = claiming.stand(session, now)
            if dispatch.arriving:
                return self._hand_over()
            others = claiming.others()
            if len(first_for.queues) <= FEW_QUEUES:
                watch_set.hungry.update(first_for.queues)
            if len(others) <= FEW_QUEUES:
                queues -= others
            left_alone = others | claiming.deferred(first_for, now)
            wait_queue_again_s = first_for.again_s
        if unknown := watch_set.limit(queues):
            watch_set.arm(self.client.engine, unknown, session.session_id, dispatch.consumers)
        plan = dispatch.plan(watch_set.hungry - left_alone, now, self._first_ack)
        self._room_waits = plan.again_s is not None
        if plan.queues:
            claiming.restrict(plan)
            rest_s = self._hand_over() if dispatch.arriving else self._claim(session, plan)
            # A claim takes only some acks along.
            if rest_s == 0 and plan.uses_all and not (competes or self.client.acks):
                return max(min(self._next_look - now, self.client.options.undrained_timeout), 0.0005)
            return rest_s
        self._fruitless = 0
        self._flush_if_due(now)
        next_look_s = claiming.combiner.next_look_s()
        return self._pause(now, wait_queue_again_s, plan.again_s, self._next_look - now, next_look_s)

    def _sleep(self, now: float) -> float | None:
        """Leave the messages to others: the program does not drain, or the store refuses its rejections."""
        self._watch_set.disarm()
        self._watch_set.hungry.update(self.dispatch.queues)
        self._fruitless, self._room_waits = 0, False
        self._leave_wait_queue()
        self._flush_if_due(now)
        self._give_way()
        return self._pause(now)

    def _leave_wait_queue(self) -> None:
        """Leave the wait queue, and release what it has just granted."""
        with suppress(errors.SessionLost):
            self._claiming.combiner.leave()
            self.dispatch.turn_away()
            self._release_leaving()

    def _give_way(self) -> None:
        """In queues with a single active consumer, let others become active, unless this one has messages to settle.

        Only while no drain runs: a callback that works for an hour may have acknowledged its message already.
        """
        if self._active and not self.client.acks:
            idle = self._active & self.dispatch.unburdened
            if idle:
                self.client.leave(idle)
                self._active -= idle

    def _release_untaken(self, now: float) -> None:
        dropped = self.dispatch.withdraw_untaken(now)
        if dropped:
            logger.debug(
                "the program does not drain the connection, so claimed messages are released: %s",
                plural(dropped, "message"),
            )
            self._release_leaving()
            self.arrived.ring()  # so that an event loop that resumes is noticed

    def _release_leaving(self) -> None:
        """Release the leaving messages. Raises a ``StoreError``: then the client releases them as soon as it can."""
        leases = self.dispatch.to_release()
        if not leases:
            return
        try:
            if self.client.suspected:
                self.client.release_later(leases)
            else:
                self.client.release(leases)
        except errors.StoreError:
            self.dispatch.released(leases)
            raise
        self.dispatch.released(leases)

    def _pause(self, now: float, *until: float | None) -> float | None:
        pauses = [each for each in (*until, self.dispatch.next_withdrawal_s(now)) if each is not None]
        if self._first_ack is not None:
            pauses.append(self._first_ack + self._ack_wait_s - now)
        return max(min(pauses), 0.0005) if pauses else None

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _claim(self, session: ClientSession, plan: Plan) -> float:
        """Carry out the plan. Returns how long to rest before the next step."""
        self._active.update(plan.consumers.values())
        self._first_ack = None  # before the claim empties the list: a later ack rings
        self._claiming.claim(session, plan)
        self.dispatch.end_turn(plan.queues[0])
        found = self.dispatch.arriving
        gave = [each.queue for each in found]  # a copy: if a consumer ends, another thread removes its messages
        # A claim takes from one queue after another, so it has emptied the queues before the last that gave any.
        empty = plan.queues if len(gave) < plan.limit else plan.queues[: plan.queues.index(gave[-1])]
        self._watch_set.hungry.difference_update(empty)
        if found:
            self._fruitless = 0
            plan.uses_all = plan.uses_all and len(gave) == plan.limit
            return self._hand_over()
        # The messages had expired, or a competing consumer took them. Even if they can't be claimed, this must not be a
        # busy loop.
        self._fruitless += 1
        return min(FIRST_REST_S * (1 << min(self._fruitless, 10)), LONGEST_REST_S)

    def _hand_over(self) -> float:
        """Hand over what has arrived. Returns how long to rest before the next step."""
        if self.dispatch.arriving:
            self._begin_times_to_run(self.dispatch.arriving)
            self.dispatch.place()
            self.arrived.ring()
        self._release_later()
        return 0

    def _release_later(self) -> None:
        leases = self.dispatch.to_release()
        if leases:
            self.client.release_later(leases)
            self.dispatch.released(leases)

    def _begin_times_to_run(self, found: Iterable[Delivery]) -> None:
        """Start the times to run at the claim: a loop that hangs must not keep waiting messages either."""
        for each in list(found):  # a copy: if a consumer ends, another thread removes its messages
            if each.ttr_ms and each.leased:
                self.client.watch(
                    each,
                    started=weakly(self._has_begun, each.lease, otherwise=False),
                    gone=weakly(self.dispatch.overdue, each.lease, otherwise=None),
                )

    def _has_begun(self, lease: Lease) -> bool:
        return not self.dispatch.withdraw(lease)

    @property
    def _ack_wait_s(self) -> float:
        """How long an ack waits: twice as long if a claim is expected to take it along."""
        return self._ack_delay_s * (2 if self._room_waits else 1)

    def _flush_if_due(self, now: float) -> None:
        if not self.client.acks:
            self._first_ack = None
            return
        if self._first_ack is None:
            self._first_ack = now
        if now - self._first_ack >= self._ack_wait_s or len(self.client.acks) >= MANY_ACKS:
            self._first_ack = None
            self.client.flush_acks()

    # -- the session -------------------------------------------------------------------------------------------------

    def _enter(self, session: ClientSession) -> None:
        """Register all consumers under this session, and report the consumed queues."""
        self._entered = session  # before the dispatch is read: adding a consumer later resets this
        try:
            self._enter_all(session)
        except BaseException:
            self._entered = None
            raise

    def _enter_all(self, session: ClientSession) -> None:
        lost = None if self._session is session else self._session
        if lost is not None:
            self.dispatch.drop_session(lost.session_id)
            self._watch_set.disarm()  # the glance that found the session fenced has read nothing else
        self._session = session  # after the drop, which is repeated if interrupted
        if lost is not None and any(each.transient for each in self.dispatch.subscriptions):
            text = "the session was ended by another process, and its temporary queues with it"
            raise RecoverableConnectionError(text)
        for subscription in self.dispatch.subscriptions:
            if subscription.session_id != session.session_id or not subscription.registered:
                try:
                    self._register(subscription, session)
                except errors.QueueNotFound:  # deleted while the consumer had no session
                    self._end([subscription])
        self._watch_set.report(session, self.dispatch.queues)

    def _register(self, subscription: Subscription, session: ClientSession) -> None:
        """Register the consumer in the store, so that its queue does not vanish. Raises ``QueueNotFound``."""
        self._known.add(subscription)
        subscription.registered, subscription.session_id = False, session.session_id
        try:
            self.client.engine.queues.add_consumer(
                session.session_id,
                subscription.queue,
                subscription.tag,
                declared=subscription.declared or subscription.transient,
            )
            subscription.registered = True
        except errors.SessionLost:
            session.lose()
            raise
        except errors.QueueNotFound as error:
            if not subscription.transient:
                raise
            # Its last other consumer has left.
            raise RecoverableConnectionError(f"the temporary queue {subscription.queue!r} has vanished") from error
        finally:
            if subscription.leaves or self._given_up:  # another thread may have removed it before it was added
                self.client.later(partial(self.leave, subscription))

    def _glance(self, session: ClientSession) -> None:
        """Read the watched keys, and look again if they have changed since the last glance.

        Consumers end with their queue, as in RabbitMQ: its deletion has removed them from the store, which this
        detects. It also detects that a queue no longer has a single active consumer: while the one here is full, no
        claim would.
        """
        own = {
            (each.queue, each.tag): each
            for each in self.dispatch.subscriptions
            if each.session_id == session.session_id  # one just added may be registered under another
        }
        watch_set, combiner, keys = self._watch_set, self._claiming.combiner, self.client.engine.keys
        controls = {keys.control(queue): queue for queue in list(self.dispatch.single)}
        watched = [*watch_set.keys, *combiner.watched(keys), *controls]
        forgotten, values = session.glance([*own], watched, combiner.demand)
        if values != self._glanced:
            watch_set.disarm()
            combiner.look_again()
        else:
            combiner.is_spared()
        self._glanced = values
        single = [queue for key, queue in controls.items() if control_of(values[key]).single_active]
        self.dispatch.note_single(controls.values(), single)
        if forgotten:
            self._end([own[each] for each in forgotten])

    def _end(self, subscriptions: Iterable[Subscription]) -> None:
        """End consumers whose queue was deleted; the next drain notifies them."""
        for each in subscriptions:
            self.ended.append(each)  # first: after an interruption, it is ended twice, but notified once
            self.cancel(each, leave=True)
        self.carry_out_cancels()
        self.arrived.ring()

    def carry_out_cancels(self) -> None:
        """Carry out all pending cancels. Several threads may call this; a cancel that is interrupted is repeated."""
        for cancel in list(self._cancels):
            subscription, leave, done = cancel
            self._active.discard(subscription.tag)
            self.dispatch.remove(subscription)
            self._entered = None  # the consumed queues are reported again
            try:
                self._release_leaving()
            except errors.StoreError as error:  # the client does it as soon as it can
                self.client.suspected = True
                logger.debug("messages of a cancelled consumer can't be released yet: %s", error)
            if leave:
                self.leave(subscription)
            with suppress(ValueError):  # before the signal: afterwards the same consumer may return, and must stay
                self._cancels.remove(cancel)
            done.set()
