"""How a job is taken: what is there now, and how it is waited for.

Model. A take looks (:func:`take_now`, one claim), and only if nothing is there it *waits*: it arms watches on the
queues and sleeps until one fires, somebody rings, or its time is over; then it looks again. Arming looks at the queues
in the same transaction, so nothing falls between a claim and a watch.

What was claimed is in a hand, then held, then a job's, at every moment; an exception at any line (a signal handler's)
lets it go back uncounted, as nobody has seen it. ``poll_interval`` is the safety look of every idle consumer
(``options.py``), not how a job is noticed.

The same :class:`Wait` serves a thread, which sleeps on a ``Bell``, and an event loop (``kombu_fdb/aio/taking.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from kombu_fdb.api.arguments import seconds
from kombu_fdb.api.connection import Connection, Sleeper
from kombu_fdb.api.job import Job
from kombu_fdb.api.pace import Stop, never
from kombu_fdb.errors import InvalidArgument, SessionLost
from kombu_fdb.model import Delivery
from kombu_fdb.primitives.ranges import is_whole, shown
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.store.protocol import Watch

__all__ = ["Wait", "check_take", "take_many", "take_now"]

S = TypeVar("S", bound=Sleeper)


def check_take(queues: Collection[str], limit: int, timeout: float | None = None) -> float | None:
    """Raises ``InvalidArgument``. Returns the timeout as the clock can add it."""
    if not queues or not is_whole(limit, 1):
        raise InvalidArgument("take at least one job from at least one queue", limit=shown(limit), queues=tuple(queues))
    return None if timeout is None else seconds("timeout", timeout)


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
    timeout = check_take(queues, limit, timeout)
    deadline = None if timeout is None else monotonic() + timeout
    jobs = take_now(connection, queues, limit, in_order=in_order)
    if not jobs and timeout != 0:
        with Wait(connection, queues, Bell()) as wait:
            while not jobs and _sleep(wait, deadline, stopped):
                jobs = take_now(connection, queues, limit, in_order=in_order)
    return jobs


def _sleep(wait: Wait[Bell], deadline: float | None, stopped: Stop) -> bool:
    """Until there may be a job; False at the deadline, or when it was stopped."""
    left_s = None if deadline is None else deadline - monotonic()
    if left_s is not None and left_s <= 0:
        return False
    wait.sleeper.clear()
    if stopped():  # looked at after the clearing: what rings later ends the sleep
        return False
    watches = wait.arm()
    if watches is not None:
        wait.sleeper.wait(wait.shortest_s(left_s))
    wait.disarm(watches)
    return True


class Wait(Generic[S]):
    """One sleeper's wait for jobs of some queues."""

    def __init__(self, connection: Connection, queues: Sequence[str], sleeper: S) -> None:
        self.sleeper = sleeper
        self._connection = connection
        self._queues = queues
        self._consumed: dict[object, Collection[str]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def arm(self) -> list[Watch] | None:
        """Watches that ring the sleeper; None if there is a job now. Raises a ``StoreError``."""
        connection, membership = self._connection, self._connection.client.membership()
        if self._consumed is None:
            self._begin(membership.consumed)
        consumers = dict.fromkeys(self._queues, connection.tag)
        watches = connection.engine.messages.arm(self._queues, membership.session_id, consumers)
        for watch in watches or ():
            watch.on_fire(self.sleeper.ring)
        return watches

    def _begin(self, consumed: dict[object, Collection[str]]) -> None:
        self._consumed = consumed
        self._connection.add_sleeper(self.sleeper)
        consumed[self.sleeper] = self._queues

    def disarm(self, watches: Iterable[Watch] | None) -> None:
        for watch in watches or ():
            watch.cancel()

    def end(self) -> None:
        """Idempotent; never blocks."""
        if self._consumed is not None:
            self._consumed.pop(self.sleeper, None)
        self._connection.remove_sleeper(self.sleeper)
        close = getattr(self.sleeper, "close", None)
        if close is not None:
            close()

    def shortest_s(self, left_s: float | None) -> float:
        """How long to sleep at most."""
        interval_s = self._connection.options.poll_interval
        return interval_s if left_s is None else min(left_s, interval_s)


# -- one look ----------------------------------------------------------------------------------------------------------


def take_now(connection: Connection, queues: Sequence[str], limit: int, *, in_order: bool) -> list[Job]:
    """What is there now: from the claim on in the hand, and then in jobs, which are dropped if nobody gets them."""
    hand: list[Delivery] = []
    try:
        _claim(connection, queues, limit, hand, in_order=in_order)
        if hand and not connection.hold(hand):
            _let_go(connection, hand)
            return []
        for each in hand:
            connection.watch(each)
        return [Job(connection, each) for each in hand]
    except BaseException:  # from a signal handler: nobody has seen them
        _let_go(connection, hand)
        raise


def _let_go(connection: Connection, hand: Sequence[Delivery]) -> None:
    connection.let_go([each.lease for each in hand])


def _claim(connection: Connection, queues: Sequence[str], limit: int, hand: list[Delivery], *, in_order: bool) -> None:
    names = list(queues) if in_order else connection.in_turn(queues)
    _ = connection.engine  # of an open broker
    consumers = dict.fromkeys(names, connection.tag)
    connection.taken = True
    try:
        connection.client.membership().claim(names, limit, consumers=consumers, hand=hand)
    except SessionLost:  # the next one is as good
        connection.client.membership().claim(names, limit, consumers=consumers, hand=hand)
