"""Taking jobs: one, many, or a loop over them.

Model. A take looks (:meth:`Take.first`, one claim). Only if nothing is there, it *waits*: it arms watches on the queues
and sleeps until one fires, its bell rings, or its time is over. Then it looks again. Arming also looks at the queues,
in the same transaction, so no job is missed between a claim and a watch.

A take ends ``operation_timeout`` after its own time, whatever the store does: each step gets what is left of that
(:meth:`Take._in_time`). A take without a timeout waits for as long as the store answers.

A take that waits while others take from the same queues stands in a wait queue with them
(``process/combiner_client.py``). Then it looks at the wait queue, and only the first one there watches the queues. A
take that stops waiting leaves the wait queue. A take that does not wait (``timeout=0``) claims past the wait queue.

At every moment, a claimed message is in :attr:`Take._found`, then held, then a job's. After an exception at any line (a
signal handler's) it is released: uncounted, as the program has not seen it, or, once there is a job, as a dropped one.
``poll_interval`` is the interval of an idle consumer's safety look (``options.py``); jobs are noticed by watches.

The same :class:`Take` serves a thread, which sleeps on a ``Bell``, and an event loop (:mod:`kombu_fdb.aio`).

A loop over jobs::

    jobs = broker.queue("jobs").consume()
    signal.signal(signal.SIGTERM, lambda *_: jobs.stop())
    for job in jobs:
        with job:
            work(job.payload)

A consumer takes one job when it is asked for one, and holds none itself: only the loop's present job is held, and a
loop that was left holds nothing. It waits as ``take`` does, and *ends* when ``limit`` jobs were taken, when none has
come for ``timeout`` seconds, when :meth:`Consumer.stop` was called, or with its broker. Any other error is raised from
the loop, and the same consumer may be asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from math import inf
from random import SystemRandom
from typing import TypeVar

from kombu_fdb.api.arguments import Stop, never, seconds
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.job import Job
from kombu_fdb.errors import InvalidArgument, Outrun, SessionLost, StoreUnavailable
from kombu_fdb.model import Delivery
from kombu_fdb.primitives.interruption import surely
from kombu_fdb.primitives.ranges import is_whole, shown
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.combiner_client import CombinerClient
from kombu_fdb.process.session_threads import MOST_DEFERRED
from kombu_fdb.store.protocol import Watch

# -- taking ------------------------------------------------------------------------------------------------------------


def take_many(
    connection: Connection,
    queues: Sequence[str],
    limit: int,
    timeout: float | None,
    *,
    in_order: bool = False,
    stopped: Stop = never,
) -> list[Job]:
    """Up to ``limit`` jobs; none if ``timeout`` seconds have passed, or it was ``stopped`` while it waited."""
    take = Take(connection, queues, limit, timeout, in_order=in_order)
    jobs = take.first()
    if not jobs and take.waits:
        with closing(Bell()) as bell:
            jobs = surely(lambda: _waited(take, bell, stopped), take.end)
    return jobs


def _waited(take: Take, bell: Bell, stopped: Stop) -> list[Job]:
    jobs: list[Job] = []
    while not jobs and _sleep(take, bell, stopped):
        jobs = take.now()
    return jobs or take.leave()


def _sleep(take: Take, bell: Bell, stopped: Stop) -> bool:
    """Sleep until there may be a job. False when the time is over, or when it was stopped."""
    if take.left_s <= 0:
        return False
    bell.clear()
    if stopped():  # asked after the bell was cleared: a later ring ends the sleep
        return False
    watches = take.arm(bell.ring)
    if watches is not None and not stopped():  # asked again: until the first arm, a stop did not know the bell
        bell.wait(take.shortest_s())
    disarm(watches)
    return True


def disarm(watches: Iterable[Watch] | None) -> None:
    """End the watches that :meth:`Take.arm` has returned."""
    for watch in watches or ():
        watch.cancel()


# -- one take ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class Take:
    """What one thread or task takes, until when, and how it waits. One step at a time."""

    #: Its place in a wait queue, and what wakes it, from its first wait on.
    _combiner: CombinerClient | None = None
    _ring: Callable[[], None] | None = None
    #: Where its queues are reported, for operators.
    _consumed: dict[object, Collection[str]] | None = None

    def __init__(
        self, connection: Connection, queues: Sequence[str], limit: int, timeout: float | None, *, in_order: bool
    ) -> None:
        """``timeout``: None for no limit, 0 for a single look. Raises ``InvalidArgument``.

        ``in_order``: always from the first of the queues on, not from each in turn.
        """
        timeout_s = _checked(queues, limit, timeout)
        self._connection = connection
        self._queues = queues
        self._limit = limit
        self._until_s = connection.now_s() + timeout_s
        self._in_order = in_order
        #: Whether it waits; otherwise it looks only once.
        self.waits = timeout_s > 0
        #: What was claimed, until there are jobs of it.
        self._found: list[Delivery] = []

    @property
    def left_s(self) -> float:
        """How many seconds are left; less than 0 when its time is over."""
        return self._until_s - self._connection.now_s()

    def _in_time(self, step: Callable[[], T]) -> T:
        """Run ``step``, which calls the store, within the time that is left. Guarantee: BOUNDED."""
        connection = self._connection
        return connection.client.patience.within(self.left_s + connection.options.operation_timeout, step)

    # -- looking -----------------------------------------------------------------------------------------------------

    def first(self) -> list[Job]:
        """The jobs that are there before it waits, if it does; then none if others compete."""
        if self.waits and self._is_contested:
            return []
        return self._jobs(partial(self._claim_alone, gives_way=self.waits))

    def now(self) -> list[Job]:
        """The jobs that are there now or, in a wait queue, those that it was granted."""
        return self._jobs(self._claim)

    def leave(self) -> list[Job]:
        """Leave the wait queue. Returns what was granted while the time ran out."""
        combiner = self._combiner
        return self._jobs(combiner.leave) if combiner is not None and combiner.in_wait_queue else []

    def _jobs(self, claim: Callable[[], object]) -> list[Job]:
        """Claim, and make jobs of what was found, which are dropped if the caller fails."""
        connection, found = self._connection, self._found
        try:
            _ = connection.engine  # of an open broker
            connection.taken = True
            connection.arriving[id(found)] = found
            deferred = connection.client.deferred_calls
            if len(deferred.open) >= MOST_DEFERRED:
                self._in_time(deferred.run)
            self._in_time(claim)
            if found and not connection.hold(found):
                connection.let_go([each.lease for each in found])
                return []
            for each in found:
                connection.watch(each)
            return [Job(connection, each) for each in found]
        except BaseException:  # from a signal handler: the program has not seen them
            connection.let_go([each.lease for each in found])
            raise
        finally:
            try:
                found.clear()
            finally:
                connection.arriving.pop(id(found), None)

    @property
    def _is_contested(self) -> bool:
        return self._connection.contention.is_contested(self._queues)

    def _claim(self) -> None:
        combiner = self._combiner
        if combiner is not None and (combiner.in_wait_queue or self._is_contested):  # else the contention has ended
            with suppress(SessionLost):  # the next look uses another session
                self._stand(combiner)
        else:
            self._claim_alone(gives_way=True)

    def _claim_alone(self, *, gives_way: bool) -> None:
        connection, names = self._connection, self._in_turn
        consumers = dict.fromkeys(names, connection.tag)

        def stands(_: Collection[str]) -> bool:
            return not connection.closed

        def claim(session: ClientSession) -> None:
            session.claim(names, self._limit, consumers=consumers, gives_way=gives_way, stands=stands, into=self._found)

        try:
            connection.client.in_session(claim)
        except Outrun:
            connection.contention.contest(names)

    def _stand(self, combiner: CombinerClient) -> None:
        connection = self._connection
        session = connection.client.session()
        combiner.belong_to(session)
        if not combiner.in_wait_queue:
            combiner.join(session, self._queues, self._limit, ())
        combiner.attend(connection.engine)
        if not self._found and combiner.is_first:
            combiner.serve(self._in_turn)

    @property
    def _in_turn(self) -> list[str]:
        return list(self._queues) if self._in_order else self._connection.in_turn(self._queues)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def arm(self, ring: Callable[[], None]) -> list[Watch] | None:
        """Watches that ring; None if there is a job now. Raises a ``StoreError``. :meth:`end` must follow in the end.

        ``ring`` wakes the thread or task that waits, from any thread; never blocks.
        """
        watches = self._in_time(partial(self._arm, ring))
        for watch in watches or ():
            watch.on_fire(ring)
        return watches

    def _arm(self, ring: Callable[[], None]) -> list[Watch] | None:
        connection, session = self._connection, self._connection.client.session()
        if self._consumed is None:
            self._begin(ring, session.consumed)
        combiner = self._combiner
        if combiner is not None and (combiner.in_wait_queue or self._is_contested) and not combiner.is_first:
            return [] if combiner.in_wait_queue else None
        consumers = dict.fromkeys(self._queues, connection.tag)
        return connection.engine.messages.arm(self._queues, session.session_id, consumers)

    def _begin(self, ring: Callable[[], None], consumed: dict[object, Collection[str]]) -> None:
        connection, options = self._connection, self._connection.options
        longest_s = min(options.poll_interval, options.operation_timeout)
        self._combiner = CombinerClient(
            ring, connection.now_s, SystemRandom(), longest_s, connection.contention, self._found
        )
        self._consumed, self._ring = consumed, ring
        connection.sleepers.add(ring)
        consumed[self] = self._queues

    def end(self) -> None:
        """Wait no more. Idempotent; never blocks."""
        if self._combiner is not None:
            self._combiner.abandon()
        if self._consumed is not None:
            self._consumed.pop(self, None)
        if self._ring is not None:
            self._connection.sleepers.discard(self._ring)

    def shortest_s(self) -> float:
        """How long to sleep at most."""
        next_look_s = None if self._combiner is None else self._combiner.next_look_s()
        bound_s = min(max(self.left_s, 0.0), self._connection.options.poll_interval)
        return bound_s if next_look_s is None else min(bound_s, next_look_s)


def _checked(queues: Collection[str], limit: int, timeout: float | None) -> float:
    """The timeout as a number to add to the clock; a negative one counts as 0. Raises ``InvalidArgument``."""
    if not queues or not is_whole(limit, 1):
        raise InvalidArgument("take at least one job from at least one queue", limit=shown(limit), queues=tuple(queues))
    return inf if timeout is None else max(seconds("timeout", timeout), 0.0)


# -- the loop ----------------------------------------------------------------------------------------------------------


class Consumer:
    """Get it from :meth:`.queue.Queue.consume` or :meth:`.broker.Broker.consume`. One thread iterates."""

    def __init__(
        self,
        connection: Connection,
        queues: Sequence[str],
        *,
        timeout: float | None,
        limit: int | None,
        in_order: bool = False,
    ) -> None:
        """Raises ``InvalidArgument``."""
        _checked(queues, 1 if limit is None else limit, timeout)
        self._connection = connection
        self._queues = queues
        self._timeout = timeout
        self._in_order = in_order
        self._left = limit
        self._stopped = False

    def stop(self) -> None:
        """End the loop; a job that it has stays its own. From any thread, also out of a signal handler; idempotent."""
        self._stopped = True
        self._connection.wake()

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Job:
        """The next job. Raises what ``take`` raises."""
        if self._ended:
            raise StopIteration
        try:
            jobs = take_many(
                self._connection, self._queues, 1, self._timeout, in_order=self._in_order, stopped=self._is_stopped
            )
        except StoreUnavailable:
            if self._connection.closed:
                raise StopIteration from None
            raise
        self._took(jobs)
        if not jobs:
            raise StopIteration
        return jobs[0]

    # For the asyncio API (``kombu_fdb.aio``), too: these never wait.

    def _is_stopped(self) -> bool:
        return self._stopped

    @property
    def _ended(self) -> bool:
        return self._stopped or self._left == 0 or self._connection.closed

    def _took(self, jobs: Sequence[Job]) -> None:
        """Note what was taken; if nothing was, the loop's time is over."""
        if not jobs:
            self._stopped = True
        elif self._left is not None:
            self._left -= len(jobs)
