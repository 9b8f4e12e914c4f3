"""A queue: publish to it, take from it, look into it, and change how it is worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack, get_args

from kombu_fdb.api.arguments import Named, check_limit, check_name, queue_names
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.consumer import Consumer, take_many
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.api.job import Job, due_at
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.messages.publish import split_batch
from kombu_fdb.errors import CapacityExceeded, InvalidArgument, QueueError
from kombu_fdb.model import (
    URGENT,
    KeyCounts,
    KeyLimits,
    Listed,
    Page,
    Part,
    Peeked,
    Publication,
    QueueControl,
    QueueCounts,
    RoundSnapshot,
    SessionId,
    Spot,
    State,
    View,
)
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.ranges import LONGEST_S, PRIORITY, Kind, is_number, milliseconds, shown, utf8
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.options import Options

# -- publications ------------------------------------------------------------------------------------------------------


def publication(
    options: Options,
    queue: str,
    payload: bytes | str,
    *,
    key: str,
    priority: int | None,
    delay: float,
    ttl: float | None,
    ttr: float | None,
) -> Publication:
    """Raises ``InvalidArgument``."""
    utf8("key", key)
    return Publication(
        "",
        queue,
        _bytes(payload),
        priority=_priority(options, priority),
        due_ms=due_at(delay),
        ttl_ms=None if ttl is None else positive_ms("ttl", ttl),
        key=key,
        ttr_ms=0 if ttr is None else positive_ms("ttr", ttr),
        message_id=random_id(),
    )


def _priority(options: Options, given: int | None) -> int:
    zero_first = options.priority_order == "redis"
    priority = 0 if given is None else given
    PRIORITY.check("priority", priority)
    return URGENT - priority if zero_first else priority


def _bytes(payload: bytes | str) -> bytes:
    if isinstance(payload, str):
        return utf8("payload", payload)
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        given = type(payload).__name__
        raise InvalidArgument("a payload is bytes or a string", given=given, fix="Try json.dumps(payload).")
    return bytes(payload)


_POSITIVE = Kind(
    "more than 0 seconds",
    lambda value: is_number(value, 0, LONGEST_S) and value > 0,
    fix=f"At most {LONGEST_S:,}, which is 100 years.",
)


def positive_ms(name: str, seconds: float) -> int:
    """Rounded up to whole milliseconds. Raises ``InvalidArgument``."""
    _POSITIVE.check(name, seconds)
    return milliseconds(name, seconds)


# -- the queue ---------------------------------------------------------------------------------------------------------


class LimitChanges(TypedDict, total=False):
    """:class:`~kombu_fdb.model.KeyLimits`'s fields; those left out stay as they are."""

    paused: bool
    weight: int
    max_in_flight: int | None
    rate: float | None
    burst: int
    capacity: int | None
    priority: int | None


class ControlChanges(TypedDict, total=False):
    """The fields of :class:`~kombu_fdb.model.QueueControl` that are set here; those left out stay as they are."""

    paused: bool
    newcomer: Literal["next", "current", "first"]
    ageing: float | None
    every_key: Mapping[str, Any]


#: The default limits: jobs of each part of ``snapshot``; jobs of a ``page``; keys after one.
SNAPSHOT_MESSAGES = 1_000
PAGE = 100
KEYS = 1_000


class Queue:
    """One queue of a broker. Get it from :meth:`.broker.Broker.queue`."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self.connection = connection

    def __repr__(self) -> str:
        return f"<Queue {self.name} of {self.connection.client.location}>"

    @property
    def _engine(self) -> Engine:
        return self.connection.engine

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
        urgent and 0 the default; with the option ``priority_order="redis"`` 0 is both. ``delay``: seconds before which
        it is not handed out. ``ttl``: seconds until it is dropped or dead-lettered if it was not taken, counted from
        the end of the delay. ``ttr``: how many seconds its consumer has, from the take on; then it is released, and the
        attempt counts. A text is stored in UTF-8.

        ``task_id``: for :meth:`Broker.find` and :meth:`Broker.cancel`. ``dedup_id``: another job with it that is put
        into this queue within ``dedup_window`` seconds (by default the option's) is not stored; the id returned for it
        belongs to no job.

        Raises ``CapacityExceeded`` with the payload as ``item``, ``MessageTooLarge``, ``InvalidArgument``; nothing is
        stored then. After ``CommitUnknown`` it may be stored; if this process puts it again within five minutes, it is
        stored once, and if the earlier call stored it, the id that is returned belongs to no job.
        """
        options = self.connection.options
        made = publication(
            options, self.name, payload, key=key, priority=priority, delay=delay, ttl=ttl, ttr=ttr
        )._replace(
            task_id=task_id,
            dedup_id=dedup_id,
            dedup_window_ms=positive_ms("dedup_window", options.dedup_window if dedup_window is None else dedup_window),
        )
        try:
            self._engine.publisher.publish([made])
        except CapacityExceeded as error:
            raise CapacityExceeded(error.text, **error.attributes, item=payload) from None
        return made.message_id

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

        Returns the ids. Raises what :meth:`put` raises, without ``item``.
        """
        options = self.connection.options
        made = [
            publication(options, self.name, each, key=key, priority=priority, delay=delay, ttl=ttl, ttr=ttr)
            for each in payloads
        ]
        for part in split_batch(made, lambda each: (1, len(each.payload))):
            self._engine.publisher.publish(part)
        return [each.message_id for each in made]

    # -- out -------------------------------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Job | None:
        """The next job; None after ``timeout`` seconds (None: no limit, 0: don't wait)."""
        jobs = self.take_many(1, timeout)
        return jobs[0] if jobs else None

    def take_many(self, limit: int, timeout: float | None = None) -> list[Job]:
        """Up to ``limit`` jobs in one transaction: those there are, and at least one unless the time is over."""
        return take_many(self.connection, [self.name], limit, timeout)

    def consume(self, *, timeout: float | None = None, limit: int | None = None) -> Consumer:
        """``for job in queue.consume()``: one job after the other, never more than one held (:mod:`.api.consumer`).

        The loop ends after ``limit`` jobs, when none has come for ``timeout`` seconds (None: no limit), by
        :meth:`.Consumer.stop`, and when the broker is closed.
        """
        return Consumer(self.connection, [self.name], timeout=timeout, limit=limit)

    @property
    def dead_letters(self) -> DeadLetters:
        """What died here and is kept in ``<queue>.dead``: count, list, replay, discard."""
        return DeadLetters(self.connection, self.name + DEAD_SUFFIX)

    # -- looking ---------------------------------------------------------------------------------------------------

    def stats(self) -> QueueCounts:
        """How many jobs are ready, delayed and leased (in flight). Guarantee: COUNTS."""
        return self._engine.inspect.counts(self.name)

    def count(self) -> int:
        """How many jobs wait for a consumer now."""
        return self.stats().ready

    def keys(self, *, after: str | None = None, limit: int | None = None, prefix: str = "") -> dict[str, KeyCounts]:
        """The keys that have jobs or limits; with ``limit`` only so many, in the order of their names, after ``after``.

        ``prefix``: only those that begin with it; up to 1,000 of them without ``limit``.
        """
        check_limit(limit)
        _check_keys(after, prefix)
        if limit is None and after is None and not prefix:
            return self._engine.inspect.keys_of(self.name)
        most = KEYS if limit is None else limit
        return self._engine.inspect.key_page(self.name, after=after, limit=most, prefix=prefix)

    def peek(
        self, limit: int = 1, *, state: State = "ready", key: str | None = None, reverse: bool = False
    ) -> list[Peeked]:
        """The jobs a lone consumer would get next, in that order, without taking them.

        ``key``: of this key only. ``reverse``: the last ones first; a queue with keys has a last one only per ``key``
        (``QueueError``). ``state``: ``"delayed"`` for those that are not due, the next due first; ``"leased"`` for
        those in flight, whose ``owner`` is the session of its taker.
        """
        check_limit(limit)
        _check_keys(key)
        if _known(state) == "ready":
            return self._engine.inspect.peek(self.name, limit, key=key, reverse=reverse)
        found = (
            self._engine.inspect.delayed(self.name, limit)
            if state == "delayed"
            else self._engine.inspect.taken(self.name)
        )
        if reverse:
            found.reverse()
        return [each for each in found if key in {None, each.key}][:limit]

    def page(
        self,
        limit: int = PAGE,
        *,
        state: State = "ready",
        after: bytes | None = None,
        key: str | None = None,
        reverse: bool = False,
    ) -> Page:
        """Some jobs of a state with the beginnings of their payloads, at a cost that does not grow with the queue.

        ``after``: :attr:`~kombu_fdb.model.Page.following` of the page before. ``key``: ready ones of this key only.
        """
        check_limit(limit, 1)
        _check_keys(key)
        return self._engine.inspect.page(self.name, View(_known(state), key, after or b"", reverse), limit)

    def each(self, state: State = "ready") -> Iterator[Peeked]:
        """All jobs of a state, page by page, those of a key in their order; one that moves meanwhile may be missed."""
        after: bytes | None = None
        while True:
            page = self.page(state=state, after=after)
            for listed in page.messages:
                whole = listed if len(listed.message.payload) == listed.size else self.at(listed.spot)
                if whole is not None:
                    yield whole.message
            if page.following is None:
                return
            after = page.following

    def at(self, spot: Spot) -> Listed | None:
        """The whole job where a page has shown it; None if it has moved."""
        _check_spot(spot)
        listed = self._engine.inspect.read_at(self.name, spot.state, spot.position)
        return None if listed is None or listed.message.message_id != spot.message_id else listed

    def find(self, job_id: bytes) -> Peeked | None:
        """A job in any state, without changing it; None if it is not in the queue. Reads the whole queue."""
        return self._engine.inspect.find(self.name, job_id)

    def consumers(self) -> list[SessionId]:
        """The sessions that waited for a job, or consumed the queue through Kombu, at their last heartbeat."""
        return self._engine.inspect.consumers(self.name)

    def snapshot(self, limit: int = SNAPSHOT_MESSAGES) -> RoundSnapshot:
        """The rest of the current round, and each key's jobs after it; ``limit`` with a key, and as many without."""
        check_limit(limit)
        return self._engine.inspect.snapshot(self.name, limit)

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
        _check_keys(key)
        if key is None:
            self._engine.queues.change_control(self.name, paused=paused)
        else:
            self._engine.queues.change_limits(self.name, key, paused=paused)

    def limit(self, key: str, **changes: Unpack[LimitChanges]) -> KeyLimits:
        """Change limits of one key, :class:`~kombu_fdb.model.KeyLimits`'s fields; the others stay. Returns all of them.

        They apply from the next job on. ``priority`` here is 9 for the most urgent whatever ``priority_order`` says.
        Raises ``InvalidArgument``.
        """
        return self._engine.queues.change_limits(self.name, check_name("key", key), **changes)

    def limits(self, key: str | None = None) -> KeyLimits:
        """The limits that apply to the key; without a key, those of every key that has none of its own."""
        _check_keys(key)
        return self.control().every_key if key is None else self._engine.inspect.limits(self.name, key)

    def unlimit(self, key: str) -> None:
        """Remove the key's own limits; those of every key apply again."""
        self._engine.queues.limit(self.name, check_name("key", key), None)

    def limit_every_key(self, **changes: Unpack[LimitChanges]) -> None:
        """Change the limits of all keys without limits of their own."""
        self._engine.queues.change_control(self.name, every_key={**changes})

    def control(self, **changes: Unpack[ControlChanges]) -> QueueControl:
        """Change fields of :class:`~kombu_fdb.model.QueueControl` (``newcomer``), if any are given; returns it."""
        if changes:
            self._engine.queues.change_control(self.name, **changes)
        return self._engine.inspect.control(self.name)

    def reset_control(self) -> None:
        """Undo all changes of its settings; also for a queue whose settings can't be read (``FormatError``)."""
        self._engine.queues.reset_control(self.name)

    # -- moving and removing ---------------------------------------------------------------------------------------

    def move(self, target: Named | str, limit: int | None = None, *, key: str | None = None) -> int:
        """Move up to ``limit`` ready and delayed jobs (None: all there are now) to the end of another queue.

        They stay as they are. ``key``: only ready ones of this key. Returns how many. Raises ``QueueError``. To replay
        dead letters, see :attr:`dead_letters`.
        """
        (name,) = queue_names([target])
        check_limit(limit)
        _check_keys(key)
        return self._engine.messages.move(self.name, name, limit, key=key)

    def move_part(self, target: Named | str, mark: bytes, *, key: str | None = None) -> Part:
        """Move up to 200 of those that had come by ``mark`` (:meth:`mark`) in one transaction; the others stay.

        ``mark``: for a further part, :attr:`~kombu_fdb.model.Part.following` of the part before. Raises what
        :meth:`move` raises.
        """
        (name,) = queue_names([target])
        _check_keys(key)
        moved, following = self._engine.messages.move_some(self.name, name, mark, key=key)
        return Part(moved, following or None)

    def delete(self, job: Peeked | Job | Spot | bytes) -> bool:
        """Delete a job in any state. False if it is not there. Its holder finds the lease lost.

        Reads the queue; at the spot where a page has shown it, it costs the same in any queue.
        """
        if isinstance(job, Spot):
            return self._engine.messages.delete_at(self.name, job.state, job.position, job.message_id)
        # An asyncio job has an id, too.
        job_id = job.message_id if isinstance(job, Peeked) else getattr(job, "id", job)
        if not isinstance(job_id, bytes):
            raise InvalidArgument("not a job, its id or its spot", given=shown(job))
        return self._engine.messages.delete(self.name, job_id)

    def reschedule(self, spot: Spot, delay: float = 0, *, payload: bytes | None = None) -> bool:
        """Make a ready or delayed job, at the spot where a page has shown it, due in ``delay`` seconds; 0: now.

        ``payload``: replaces its payload. False if it has moved. Raises ``QueueError`` if a session holds it or it
        expires before that, ``MessageTooLarge``, ``InvalidArgument``.
        """
        _check_spot(spot)
        return self._engine.messages.reschedule(self.name, spot, due_at(delay), payload=payload)

    def purge(self) -> int:
        """Delete all jobs but those in flight. Returns how many."""
        return self._engine.queues.purge(self.name)

    def mark(self) -> bytes:
        """The mark for the first part, if jobs that come from now on are to stay: for a confirmation in between.

        For :meth:`purge_part`, and of a queue of dead letters for their parts.
        """
        return self._engine.queues.last(self.name)

    def purge_part(self, mark: bytes = b"") -> Part:
        """Delete up to 500 of them in one transaction: for callers that show progress, or don't wait for the end.

        ``mark``: :attr:`~kombu_fdb.model.Part.following` of the part before. What came after the first one stays.
        """
        purged, following = self._engine.queues.purge_some(self.name, mark)
        return Part(purged, following or None)

    def drop(self, mark: bytes = b"") -> int:
        """Delete the queue, its bindings and its jobs. Returns how many jobs.

        Raises ``QueueError`` while jobs are in flight or consumers are subscribed, or if one has come after the
        :meth:`mark`; nothing is deleted then.
        """
        deleted = self._engine.queues.delete(self.name, if_unused=True, if_idle=True, mark=mark)
        if deleted is None:
            raise QueueError(
                "the queue is in use", queue=self.name, fix="Settle its jobs and end its consumers, or purge it."
            )
        return deleted


def _check_keys(*keys: str | None) -> None:
    for key in keys:
        if key is not None:
            check_name("key", key)


def _check_spot(given: object) -> None:
    if not isinstance(given, Spot):
        raise InvalidArgument("not a spot", given=shown(given), fix="Pass Listed.spot, of a page.")


def _known(state: State) -> State:
    """Raises ``InvalidArgument`` for a typo: an empty answer would look like an empty queue."""
    known = get_args(State)
    if state not in known:
        raise InvalidArgument("no such state of a job", given=state, fix=f"Known states: {', '.join(known)}.")
    return state
