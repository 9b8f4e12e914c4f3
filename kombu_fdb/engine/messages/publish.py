"""Publish: route a message and store a copy in each queue it reaches.

A publish to the default exchange reads nothing and never conflicts: the position is the versionstamp of the commit, so
queue order is commit order. (The seeds' "read the last index, add a random suffix" costs a read and loses the order.)
A named exchange costs one snapshot read, of its epoch; see ``routing/tables.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from kombu_fdb.engine.messages.bury import Cause, bury
from kombu_fdb.engine.messages.dedup import without_duplicates
from kombu_fdb.engine.messages.message import Subqueue, from_outside, put_delayed, put_ready
from kombu_fdb.engine.messages.overflow import NO_VERDICT, Load, Verdict, judge
from kombu_fdb.engine.scheduling import limits
from kombu_fdb.engine.stored.effects import PUBLISHED, Effects
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import LimitExceeded
from kombu_fdb.keyspace.codec import INLINE_BYTES, Record
from kombu_fdb.model import Death, Publication
from kombu_fdb.primitives.clock import IdSource

__all__ = [
    "BATCH_BYTES",
    "BATCH_MESSAGES",
    "MOST_STAMPED",
    "DeadCopy",
    "Published",
    "expires_at",
    "named",
    "publish",
    "publish_dead",
]

#: What callers put into one transaction at most; FoundationDB's limit is 10,000,000 B with keys and conflict ranges.
BATCH_BYTES = 4_000_000
#: A stamp's user version has 2 bytes; far fewer keep a transaction short.
BATCH_MESSAGES = 2_000
#: Copies of messages in one transaction at most; the user version of a stamp has 2 bytes.
MOST_STAMPED = 65_000


class Published(NamedTuple):
    """The queues each message reached, and those that the oldest must give way in now, with what came to them."""

    reached: list[list[str]]
    overfull: Mapping[str, Load]


def named(publications: Sequence[Publication], ids: IdSource) -> list[Publication]:
    """The same, each that has chunks with an id, by which a run finds what was copied for it after the run before."""
    return [
        each if each.message_id or len(each.payload) <= INLINE_BYTES else each._replace(message_id=ids())
        for each in publications
    ]


def publish(work: Work, publications: Sequence[Publication], *, beforehand: bool = False) -> Published:
    """Store all of them in order. Raises ``CapacityExceeded``, and ``LimitExceeded`` if they have too many copies.

    ``beforehand``: a refused message that is too large for several queues may be copied beforehand; ``CopiesMissing``
    is raised then. The publications are :func:`named`, and the same in the next run, as is its moment.
    """
    reached = _route(work, publications)
    _check_stamps(work.effects, reached)
    fresh = without_duplicates(work, publications, reached)
    refusing, overfull = _judge(work, fresh, reached)
    destinations: dict[str, _Destination] = {}
    if any(not work.routing.queue(work.tr, each).empties_itself for each in {*chain.from_iterable(reached)}):
        work.tr.fill()
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is None:
            continue
        for queue, one in zip(queues, _one_for_each(publication, queues), strict=True):
            work.effects.note(queue, PUBLISHED, one.key)
            if one.due_ms > work.now_ms or queue not in refusing:
                destination = destinations.get(queue)
                if destination is None:
                    destination = destinations[queue] = _Destination(work, queue)
                destination.put(one)
            else:
                refused = one if one.message_id else one._replace(message_id=work.ids())
                publish_dead(work, DeadCopy(queue, refused), Cause("maxlen"), beforehand=beforehand)
    for destination in destinations.values():
        destination.check_capacity()
    return Published(reached, overfull)


def _route(work: Work, publications: Sequence[Publication]) -> list[list[str]]:
    """The queues of each; those of one exchange and routing key are looked up once."""
    known: dict[tuple[str, str], list[str]] = {}
    reached = []
    for each in publications:
        address = each.exchange, each.routing_key
        queues = known.get(address)
        if queues is None:
            queues = known[address] = work.routing.route(work.tr, *address)
        reached.append(queues)
    return reached


def _one_for_each(publication: Publication, queues: Sequence[str]) -> list[Publication]:
    """Its copies: if it has an id, each has one, the first one that of the publication; the same in each run."""
    if len(queues) < 2 or not publication.message_id:
        return [publication] * len(queues)
    further = [blake2b(publication.message_id + queue.encode(), digest_size=16).digest() for queue in queues[1:]]
    return [publication, *(publication._replace(message_id=each) for each in further)]


def _check_stamps(effects: Effects, reached: Sequence[list[str]]) -> None:
    messages = effects.stamped + sum(map(len, reached))
    if messages > MOST_STAMPED:
        raise LimitExceeded(
            "too many messages in one transaction", messages=messages, most=MOST_STAMPED, fix="Publish fewer at once."
        )


def _judge(work: Work, fresh: Sequence[Publication | None], reached: Sequence[list[str]]) -> Verdict:
    """What becomes of them in full queues; of queues without a limit nothing is reckoned."""
    queues = {*chain.from_iterable(reached)}
    limited = {each for each in queues if work.routing.queue(work.tr, each).max_load != (None, None)}
    if not limited:
        return NO_VERDICT
    coming: dict[str, tuple[int, int]] = {}
    for publication, queues_ in zip(fresh, reached, strict=True):
        if publication is not None and publication.due_ms <= work.now_ms:
            for queue in limited.intersection(queues_):
                messages, size = coming.get(queue, (0, 0))
                coming[queue] = messages + 1, size + len(publication.payload)
    return judge(work, coming)


class _Destination:
    """A queue as one publish sees it, however many messages it stores there."""

    __slots__ = ("_keys", "_queue", "_ttl_ms", "_work")

    def __init__(self, work: Work, queue: str) -> None:
        self._work = work
        self._queue = queue
        self._ttl_ms = work.routing.queue(work.tr, queue).message_ttl_ms
        #: Of messages that are ready at once.
        self._keys: set[str] = set()

    def put(self, publication: Publication) -> None:
        """Store one copy."""
        work, queue, due_ms = self._work, self._queue, publication.due_ms
        priority = publication.priority and min(publication.priority, work.routing.queue(work.tr, queue).max_priority)
        to = Subqueue(queue, publication.key, work.keys.rank(priority))
        if due_ms > work.now_ms:
            put_delayed(work, to, due_ms, self._record(publication, due_ms))
        else:
            put_ready(work, to, self._record(publication, work.now_ms))
            if publication.key:
                self._keys.add(publication.key)

    def check_capacity(self) -> None:
        """After the last one. Raises ``CapacityExceeded``, and the transaction stores nothing."""
        if self._keys:
            limits.check_capacity(
                self._work, self._queue, self._keys, self._work.routing.control(self._work.tr, self._queue)
            )

    def _record(self, publication: Publication, start_ms: int) -> Record:
        ttl_ms, expires_ms = _shorter(publication.ttl_ms, self._ttl_ms), publication.expires_ms
        return Record.of(
            publication.message_id or self._work.ids(),
            publication.payload,
            published_ms=self._work.now_ms,
            expires_ms=expires_at(start_ms, ttl_ms, expires_ms) if ttl_ms is not None or expires_ms else 0,
            key=publication.key,
            ttr_ms=publication.ttr_ms,
            task_id=publication.task_id,
        )


class DeadCopy(NamedTuple):
    """A message from outside, which needs a message id, that dies as if in ``queue``. ``deaths``: its history."""

    queue: str
    publication: Publication
    deaths: Sequence[Death] = ()


def publish_dead(work: Work, copy: DeadCopy, cause: Cause, *, beforehand: bool = False) -> None:
    """Bury a message that does not stand in the store. ``beforehand``: as for :func:`publish`."""
    queue, publication, deaths = copy
    record = Record.of(
        publication.message_id,
        publication.payload,
        published_ms=work.now_ms,
        expires_ms=0,
        deaths=deaths,
        key=publication.key,
        ttr_ms=publication.ttr_ms,
        task_id=publication.task_id,
        priority=publication.priority,
    )
    bury(work, from_outside(work, queue, record), cause, payload=publication.payload if beforehand else b"")


def expires_at(start_ms: int, ttl_ms: int | None, expires_ms: int) -> int:
    """The earlier of the two ends; 0 for never. A time to live of 0 is legal (RabbitMQ: unless consumed at once)."""
    ends = [end for end in (expires_ms, None if ttl_ms is None else start_ms + ttl_ms) if end]
    return min(ends, default=0)


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
