"""The queue for Python programs without Kombu or Celery.

::

    with Broker.open("fdb+sqlite:////var/lib/app/broker.db") as broker:
        jobs = broker.queue("jobs")
        jobs.put("build 42", key="alice", priority=5, delay=1.5)
        job = jobs.take(timeout=10)  # a Job, or None
        job.ack()

It is the same store and engine: what Celery or Kombu puts there can be counted, peeked at, paused, limited and kicked
here. Their messages have an envelope (``transport/encoding/envelope.py``), so put and take each kind by the same means.
All brokers and Kombu connections of a process with equal options share one client, and so one session: one heartbeat,
which begins when something is first taken.

Names are the field's: a job is *put*, *taken*, and then *acked*, *released* or *buried*; buried ones are *kicked* back.
Times are seconds. Every call ends within the options' timeouts, but ``take``, which waits as long as it is told to.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kombu_fdb.api.deadletters import DeadLetters
from kombu_fdb.api.job import Job, due_at
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.messages.publish import BATCH_BYTES, BATCH_MESSAGES
from kombu_fdb.errors import CapacityExceeded, LeaseLost, OptionError, QueueError, StoreError, StoreUnavailable
from kombu_fdb.model import (
    NO_PRIORITY,
    URGENT,
    Delivery,
    KeyCounts,
    KeyLimits,
    Lease,
    Peeked,
    Publication,
    QueueControl,
    QueueCounts,
    RoundSnapshot,
)
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.ranges import is_number, milliseconds, utf8_bytes
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.primitives.weakly import weakly
from kombu_fdb.process.client import Client, client_for
from kombu_fdb.process.connect import Opened
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.location import Location, locate, parse_url
from kombu_fdb.settings.options import Options, parse_options

__all__ = ["Broker", "Job", "Queue"]

#: Messages shown by ``snapshot`` unless told otherwise, of each of its parts.
SNAPSHOT_MESSAGES = 1_000

#: Stands in the history of a job that was dropped too often.
DROPPED = {"error": "its consumer had dropped it without settling it"}

_brokers = count(1)


class Broker:
    """An open broker. Thread-safe; not for a forked child, which opens its own (``ForkedError``).

    One that nobody refers to any more, its queues and jobs included, closes by itself: what it held goes back.
    """

    # For one whose constructor raised, and which is collected all the same.
    _closed = True
    _taken = False

    def __init__(self, client: Client, *, connect_timeout: float | None = None) -> None:
        """Use :meth:`open`. A ``Client`` of its own makes a broker with a session of its own, as of another process."""
        self.client = client
        self._held: set[Lease] = set()
        #: As which consumer it takes, where only one is active (``engine/scheduling/single.py``).
        self._tag = f"broker-{next(_brokers)}"
        self._taken = False
        self._turns: dict[str, int] = {}
        self._services = count(1)
        self._lock = Lock()
        self._sleepers: set[Bell] = set()
        self._closed = True  # until it has opened
        client.attach(self, timeout_s=client.options.connect_timeout if connect_timeout is None else connect_timeout)
        self._closed = False

    @classmethod
    def open(cls, url: str, **options: Any) -> Self:
        """Open a store. ``url``: :mod:`kombu_fdb.settings.location`; ``options``: :mod:`kombu_fdb.settings.options`.

        Raises ``OptionError``, or within ``connect_timeout`` seconds ``StoreUnavailable`` or ``FormatError``.
        """
        parsed = parse_options(options)
        return cls(client_for(locate(parse_url(url), parsed), parsed), connect_timeout=parsed.connect_timeout)

    @classmethod
    def on(cls, location: Location, opened: Opened, **options: Any) -> Self:
        """A broker with a session of its own on a store that is open already, and is closed with it: for tests."""
        return cls(Client(location, parse_options(options), opened))

    def close(self) -> None:
        """Hand back what was taken here and not settled, at once and uncounted; end every waiting ``take``. Idempotent.

        If the store does not answer, the session's end brings the jobs back.
        """
        if os.getpid() != self.client.pid:
            return  # the parent's
        with self._lock:
            closed, self._closed = self._closed, True
            held, self._held = self._held, set()
            for bell in self._sleepers:
                bell.ring()
        if closed:
            return
        try:
            self.client.release(held)
            if self._taken:
                self.client.leave([self._tag])
        except StoreError:  # the client has noted them, and the session's end brings them back anyway
            pass
        finally:
            self.client.detach(self)

    def __del__(self) -> None:
        """Collected without having been closed. Runs in any thread at any moment: takes no lock and never waits."""
        if self._closed or sys.is_finalizing() or os.getpid() != self.client.pid:
            return
        if self._taken:
            self.client.later(partial(_end, self.client, list(self._held), self._tag))
        self.client.abandon(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue(self, name: str, **declaration: Any) -> Queue:
        """A queue by name; asks the store for nothing unless it is declared at the same time.

        ``declaration``: :class:`~kombu_fdb.routing.tables.QueueDeclaration`'s fields, above all ``arguments`` with
        AMQP's names, such as ``{"x-max-length": 128, "x-overflow": "reject-publish"}``. Raises ``NotEquivalent`` for a
        senseless argument. A queue needs no declaration to be used. Of a queue with ``x-single-active-consumer`` one
        broker is served, from its first ``take`` until it is closed.
        """
        if declaration:
            self.engine.queues.declare(QueueDeclaration(name, **declaration))
        return Queue(self, name)

    def queues(self) -> dict[str, QueueCounts]:
        """All queues that are declared or hold messages."""
        return self.engine.inspect.queues()

    @property
    def engine(self) -> Engine:
        """Raises ``StoreUnavailable`` when closed, ``ForkedError`` in a child."""
        if self._closed:
            raise StoreUnavailable("the broker is closed", location=str(self.client.location))
        return self.client.engine

    @property
    def options(self) -> Options:
        return self.client.options

    # -- tasks by their ids ----------------------------------------------------------------------------------------

    def find(self, task_id: str) -> list[Peeked]:
        """The messages of a task (Celery's task id, or ``put``'s), in whatever queue and state; none if it is done."""
        return self.engine.inspect.find_task(task_id)

    def cancel(self, task_id: str) -> int:
        """Take a task back that nobody has begun: ready, delayed or dead. Needs no worker. Returns how many messages.

        What a worker holds stays with it; :meth:`find` shows it as leased.
        """
        return len(self.engine.messages.take_back(task_id))

    def dead_letters(self, dead_queue: str) -> DeadLetters:
        """Those in a queue that a dead-letter exchange leads to, or in any ``<queue>.dead``."""
        return DeadLetters(self, dead_queue)

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(
        self, queues: Iterable[Queue | str], timeout: float | None = None, *, in_order: bool = False
    ) -> Job | None:
        """The next job of several queues; None after ``timeout`` seconds (None: for ever, 0: don't wait).

        The queues have their turns: first comes the one that was served longest ago. ``in_order``: the first of them
        that has a job, always. It sleeps until the store reports a change. (Many sub-queues with priorities,
        capacities and a switch each are rather the keys of one queue, see :meth:`Queue.limit`.)
        """
        names = [each.name if isinstance(each, Queue) else each for each in queues]
        jobs = self.take_many(names, 1, timeout, in_order=in_order)
        return jobs[0] if jobs else None

    def take_many(
        self, queues: Sequence[str], limit: int, timeout: float | None = None, *, in_order: bool = False
    ) -> list[Job]:
        """Up to ``limit`` jobs in one transaction, at least one unless ``timeout`` seconds have passed."""
        if limit < 1 or not queues:
            raise OptionError("take at least one job from at least one queue", limit=limit, queues=tuple(queues))
        deadline = None if timeout is None else monotonic() + timeout
        jobs = self._take(queues, limit, in_order=in_order)
        if not jobs and timeout != 0:
            with self._sleeper(queues) as bell:
                while not jobs and self._sleep(bell, queues, deadline):
                    jobs = self._take(queues, limit, in_order=in_order)
        return jobs

    def _take(self, queues: Sequence[str], limit: int, *, in_order: bool) -> list[Job]:
        """What is there now: from the claim on in the hand, and then in jobs, which are dropped if nobody gets them."""
        hand: list[Delivery] = []
        try:
            self._claim(queues, limit, hand, in_order=in_order)
            if hand and not self._hold(hand):
                self._let_go(hand)
                return []
            for each in hand:
                self.watch(each)
            return [Job(self, each) for each in hand]
        except BaseException:  # from a signal handler: nobody has seen them
            self._let_go(hand)
            raise

    def _let_go(self, found: Sequence[Delivery]) -> None:
        """Back to their places, by the duties thread."""
        leases = [each.lease for each in found]
        self._held.difference_update(leases)
        self.client.release_later(leases)

    def _claim(self, queues: Sequence[str], limit: int, hand: list[Delivery], *, in_order: bool) -> None:
        names = list(queues) if in_order else sorted(queues, key=lambda name: self._turns.get(name, 0))
        _ = self.engine  # of an open broker
        consumers = dict.fromkeys(names, self._tag)
        self._taken = True
        try:
            self.client.membership().claim(names, limit, consumers=consumers, hand=hand)
        except LeaseLost:  # the session was fenced; the next one is as good
            self.client.membership().claim(names, limit, consumers=consumers, hand=hand)

    def _hold(self, found: Sequence[Delivery]) -> bool:
        """False if the broker was closed while it claimed."""
        with self._lock:
            self._held.update([each.lease for each in found])
            self._turns.update({each.queue: next(self._services) for each in found})
            return not self._closed

    @contextmanager
    def _sleeper(self, queues: Sequence[str]) -> Iterator[Bell]:
        bell = Bell()
        consumed = self.client.membership().consumed
        with self._lock:
            self._sleepers.add(bell)
        consumed[bell] = queues
        try:
            yield bell
        finally:
            del consumed[bell]
            with self._lock:
                self._sleepers.discard(bell)
            bell.close()

    def _sleep(self, bell: Bell, queues: Sequence[str], deadline: float | None) -> bool:
        """Wait until there may be a job; False at the deadline.

        Arming the watches looks at the queues in the same transaction, so nothing falls between a claim and a watch.
        ``poll_interval`` is the safety look of every idle consumer (``options.py``), not how a job is noticed.
        """
        left_s = None if deadline is None else deadline - monotonic()
        if left_s is not None and left_s <= 0:
            return False
        bell.clear()
        watches = self.engine.messages.arm(
            queues, self.client.membership().session_id, dict.fromkeys(queues, self._tag)
        )
        for watch in watches or ():
            watch.on_fire(bell.ring)
        if watches is not None:
            interval_s = self.options.poll_interval
            bell.wait(interval_s if left_s is None else min(left_s, interval_s))
        for watch in watches or ():
            watch.cancel()
        return True

    # -- for its jobs ----------------------------------------------------------------------------------------------

    def settled(self, lease: Lease) -> None:
        """A job of this broker is no longer held."""
        with self._lock:
            self._held.discard(lease)
        self.client.settled([lease])

    def watch(self, delivery: Delivery) -> None:
        """Begin a job's time to run, if it has one."""
        self.client.watch(delivery, gone=weakly(self.settled, delivery.lease, otherwise=None))

    def dropped(self, lease: Lease) -> None:
        """A job was collected before it was settled. For a finalizer: takes no lock and never waits."""
        if os.getpid() == self.client.pid and not sys.is_finalizing() and lease in self._held:
            self.client.later(partial(self.client.requeue, [lease], DROPPED))
            self._held.discard(lease)


class Queue:
    """One queue of a broker. Get it from :meth:`Broker.queue`."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name

    def __repr__(self) -> str:
        return f"<Queue {self.name} of {self.broker.client.location}>"

    @property
    def _engine(self) -> Engine:
        return self.broker.engine

    @property
    def dead_letters(self) -> DeadLetters:
        """What died here and is kept in ``<queue>.dead``: count, list, replay, discard."""
        return DeadLetters(self.broker, self.name + DEAD_SUFFIX)

    @property
    def dead(self) -> Queue:
        """Where its dead letters are, unless it has a dead-letter exchange: read it like any other."""
        return Queue(self.broker, self.name + DEAD_SUFFIX)

    # -- in --------------------------------------------------------------------------------------------------------

    def put(
        self,
        payload: bytes | str,
        *,
        key: str = "",
        priority: int | None = None,
        delay: float = 0,
        ttl: float | None = None,
        ttr: float | None = None,
        task_id: str = "",
        dedup_id: str = "",
        dedup_window: float | None = None,
    ) -> bytes:
        """Store a job and return its id. Guarantee: DURABLE when it returns.

        ``key``: whose it is, for fair scheduling; "" is a key of its own. ``priority``: 0 to 9, where 9 is the most
        urgent and 0 the default; with the option ``priority_order="redis"`` 0 is both. ``delay``: not before so many
        seconds. ``ttl``: seconds until it is dropped or dead-lettered if nobody took it, counted from the end of the
        delay. ``ttr``: seconds its consumer has from taking it on; then it goes back, and the attempt counts. A text is
        stored in UTF-8.

        ``task_id``: for :meth:`Broker.find` and :meth:`Broker.cancel`. ``dedup_id``: another job with it that is put
        into this queue within ``dedup_window`` seconds (by default the option's) is not stored; the id returned for it
        is nobody's.

        Raises ``CapacityExceeded`` with the payload as ``item``, ``MessageTooLarge``, ``OptionError``; nothing is
        stored then. ``CommitUnknown``: it may be stored; put again by this process within five minutes, it is stored
        once, and if that was by the earlier call, the id returned is nobody's.
        """
        publication = self._publication(payload, key, priority, delay, ttl, ttr)._replace(
            task_id=task_id,
            dedup_id=dedup_id,
            dedup_window_ms=self._window_ms(dedup_window),
        )
        try:
            self._engine.publisher.publish([publication])
        except CapacityExceeded as error:
            raise CapacityExceeded(error.text, **error.attributes, item=payload) from None
        return publication.message_id

    def put_many(
        self,
        payloads: Iterable[bytes | str],
        *,
        key: str = "",
        priority: int | None = None,
        delay: float = 0,
        ttl: float | None = None,
        ttr: float | None = None,
    ) -> list[bytes]:
        """Store jobs in this order, all or none up to 2,000 of 4,000,000 B together; a longer list in such parts.

        Returns the ids. Raises as :meth:`put`, without ``item``.
        """
        publications = [self._publication(each, key, priority, delay, ttl, ttr) for each in payloads]
        for part in _parts(publications):
            self._engine.publisher.publish(part)
        return [each.message_id for each in publications]

    def _publication(
        self, payload: bytes | str, key: str, priority: int | None, delay: float, ttl: float | None, ttr: float | None
    ) -> Publication:
        utf8_bytes("key", key)
        return Publication(
            "",
            self.name,
            _bytes(payload),
            priority=self._priority(priority),
            due_ms=due_at(delay),
            ttl_ms=None if ttl is None else _positive_ms("ttl", ttl),
            key=key,
            ttr_ms=0 if ttr is None else _positive_ms("ttr", ttr),
            message_id=random_id(),
        )

    def _window_ms(self, given: float | None) -> int:
        return _positive_ms("dedup_window", self.broker.options.dedup_window if given is None else given)

    def _priority(self, given: int | None) -> int:
        zero_first = self.broker.options.priority_order == "redis"
        priority = 0 if given is None else given
        if priority not in range(NO_PRIORITY, URGENT + 1):
            raise OptionError("priority must be 0 to 9", given=given)
        return URGENT - priority if zero_first else priority

    # -- out -------------------------------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Job | None:
        """The next job; None after ``timeout`` seconds (None: wait for ever, 0: don't wait)."""
        return self.broker.take([self], timeout)

    def take_many(self, limit: int, timeout: float | None = None) -> list[Job]:
        """Up to ``limit`` jobs in one transaction: those there are, and at least one unless the time is over."""
        return self.broker.take_many([self.name], limit, timeout)

    # -- looking ---------------------------------------------------------------------------------------------------

    def stats(self) -> QueueCounts:
        """How many jobs are ready, delayed and leased (in flight). Guarantee: COUNTS."""
        return self._engine.inspect.counts(self.name)

    def count(self) -> int:
        """How many jobs wait for a consumer now."""
        return self.stats().ready

    __len__ = count

    def __bool__(self) -> bool:
        """A queue is something even when it is empty."""
        return True

    def keys(self) -> dict[str, KeyCounts]:
        """The keys that have jobs or limits."""
        return self._engine.inspect.keys_of(self.name)

    def peek(self, limit: int = 1, *, key: str | None = None, reverse: bool = False) -> list[Peeked]:
        """The jobs a lone consumer would get next, in that order, without taking them.

        ``key``: of this key only. ``reverse``: the last ones first; a queue with keys has a last one only per ``key``
        (``QueueError``).
        """
        return self._engine.inspect.peek(self.name, limit, key=key, reverse=reverse)

    def find(self, job_id: bytes) -> Peeked | None:
        """A job in any state, without changing it; None if it is not in the queue. Reads the whole queue."""
        return self._engine.inspect.find(self.name, job_id)

    def taken(self) -> list[Peeked]:
        """The jobs in flight; ``owner`` is the session of whoever took it."""
        return self._engine.inspect.taken(self.name)

    def consumers(self) -> list[bytes]:
        """The sessions of those who waited for a job, or consumed the queue through Kombu, at their last heartbeat."""
        return self._engine.inspect.consumers(self.name)

    def snapshot(self, limit: int = SNAPSHOT_MESSAGES) -> RoundSnapshot:
        """The rest of the current round, and each key's jobs behind it; of ``limit`` with and as many without a key."""
        return self._engine.inspect.snapshot(self.name, limit)

    @property
    def declaration(self) -> QueueDeclaration | None:
        """How it was declared; None if it was not."""
        return self._engine.inspect.queue(self.name)

    # -- order and limits ------------------------------------------------------------------------------------------

    def pause(self, key: str | None = None) -> None:
        """Hand out no more jobs, of the whole queue or of one key; it still accepts new ones up to its capacity."""
        self._pause(key, paused=True)

    def resume(self, key: str | None = None) -> None:
        """The counterpart; consumers that wait are woken."""
        self._pause(key, paused=False)

    def _pause(self, key: str | None, *, paused: bool) -> None:
        if key is None:
            self._engine.queues.change_control(self.name, paused=paused)
        else:
            self._engine.queues.change_limits(self.name, key, paused=paused)

    def limit(self, key: str, **limits: Any) -> KeyLimits:
        """Change limits of one key, :class:`~kombu_fdb.model.KeyLimits`'s fields; the others stay. Returns all of them.

        They count from the next job on. ``priority`` here is 9 for the most urgent whatever ``priority_order`` says.
        Raises ``OptionError``.
        """
        return self._engine.queues.change_limits(self.name, key, **limits)

    def unlimit(self, key: str) -> None:
        """What holds for every key holds for this one again."""
        self._engine.queues.limit(self.name, key, None)

    def limit_every_key(self, **limits: Any) -> None:
        """Change the limits of all keys without limits of their own."""
        self._engine.queues.change_control(self.name, every_key=limits)

    def control(self, **changes: Any) -> QueueControl:
        """Change fields of :class:`~kombu_fdb.model.QueueControl` (``newcomer``), if any are given; returns it."""
        if changes:
            self._engine.queues.change_control(self.name, **changes)
        return self._engine.inspect.control(self.name)

    # -- removing and bringing back --------------------------------------------------------------------------------

    def kick(self, limit: int = 1, *, dead_queue: str | None = None) -> int:
        """Bring up to ``limit`` buried jobs back, oldest first, with key, priority and history. Returns how many.

        ``dead_queue``: where the dead letters of a queue with a dead-letter exchange are; those that died elsewhere
        stay there. See :mod:`kombu_fdb.engine.dead_letters.replay` for what they lose. Raises ``QueueNotFound``.
        """
        if dead_queue is None:
            return self._engine.dead_letters.replay(self.name, limit)
        return self.broker.dead_letters(dead_queue).replay(limit, queue=self.name)

    def delete(self, job: Peeked | Job | bytes) -> bool:
        """Delete a job in any state. False if it is not there. Reads the queue.

        Whoever holds it finds its lease lost.
        """
        job_id = job if isinstance(job, bytes) else job.message_id if isinstance(job, Peeked) else job.id
        return self._engine.messages.delete(self.name, job_id)

    def purge(self) -> int:
        """Delete all jobs but those in flight. Returns how many."""
        return self._engine.queues.purge(self.name)

    def drop(self) -> int:
        """Delete the queue, its bindings and its jobs. Returns how many jobs.

        Raises ``QueueError`` while jobs are in flight or consumers are subscribed; nothing is deleted then.
        """
        deleted = self._engine.queues.delete(self.name, if_unused=True, if_idle=True)
        if deleted is None:
            raise QueueError(
                "the queue is in use", queue=self.name, fix="Settle its jobs and end its consumers, or purge it."
            )
        return deleted


def _end(client: Client, held: list[Lease], tag: str) -> None:
    """What ``close`` does in the store. Raises a ``StoreError``: try again."""
    client.release(held)
    client.leave([tag])


def _bytes(payload: bytes | str) -> bytes:
    """Raises ``OptionError``."""
    if isinstance(payload, str):
        utf8_bytes("payload", payload)
        return payload.encode()
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise OptionError("a payload is bytes or a text", given=type(payload).__name__, fix="Try json.dumps(payload).")
    return bytes(payload)


def _positive_ms(name: str, seconds: float) -> int:
    """Rounded up to whole milliseconds."""
    if not is_number(seconds, 0, math.inf) or seconds == 0:
        raise OptionError(f"{name} must be more than 0 seconds", given=seconds)
    return milliseconds(name, seconds)


def _parts(publications: list[Publication]) -> Iterator[list[Publication]]:
    part: list[Publication] = []
    size = 0
    for each in publications:
        if part and (len(part) == BATCH_MESSAGES or size + len(each.payload) > BATCH_BYTES):
            yield part
            part, size = [], 0
        part.append(each)
        size += len(each.payload)
    if part:
        yield part
