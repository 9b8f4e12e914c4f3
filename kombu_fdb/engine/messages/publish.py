"""Publish: route a message and store a copy in each queue it reaches.

A publish to the default exchange reads nothing and never conflicts: the position is the versionstamp of the commit, so
queue order is commit order. (The seeds' "read the last index, add a random suffix" costs a read and loses the order.)
A named exchange costs one snapshot read, of its epoch; see ``routing/tables.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from kombu_fdb.engine.messages.bury import Cause, bury
from kombu_fdb.engine.messages.dedup import without_duplicates
from kombu_fdb.engine.messages.message import Subqueue, from_outside, put_delayed, put_ready
from kombu_fdb.engine.messages.overflow import NO_LIMIT, NO_VERDICT, NOTHING, Load, Verdict, judge
from kombu_fdb.engine.scheduling import limits
from kombu_fdb.engine.stored.effects import PUBLISHED
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import LimitExceeded
from kombu_fdb.keyspace.codec import INLINE_BYTES, Record
from kombu_fdb.model import NO_PRIORITY, Death, Publication
from kombu_fdb.primitives.clock import IdSource
from kombu_fdb.routing.tables import QueueDeclaration

#: What callers put into one transaction at most; FoundationDB's limit is 10,000,000 B with keys and conflict ranges.
BATCH_BYTES = 4_000_000
#: A stamp's user version has 2 bytes; far fewer keep a transaction short.
BATCH_MESSAGES = 2_000
#: Copies of messages in one transaction at most; the user version of a stamp has 2 bytes.
MOST_STAMPED = 65_000

_ADDRESS = itemgetter(0, 1)


class Published(NamedTuple):
    """The queues each message reached, and those that the oldest must give way in now, with what came to them."""

    reached: list[list[str]]
    overfull: Mapping[str, Load]


def named(publications: Sequence[Publication], ids: IdSource) -> Sequence[Publication]:
    """The same, each that has chunks with an id, by which a run finds what was copied for it after the run before."""
    for each in publications:
        if not each.message_id and len(each.payload) > INLINE_BYTES:
            break
    else:
        return publications
    return [
        each if each.message_id or len(each.payload) <= INLINE_BYTES else each._replace(message_id=ids())
        for each in publications
    ]


def publish(work: Work, publications: Sequence[Publication], *, beforehand: bool = False) -> Published:
    """Store all of them in order. Raises ``CapacityExceeded``, and ``LimitExceeded`` if they have too many copies.

    ``beforehand``: a refused message that is too large for several queues may be copied beforehand; ``CopiesMissing``
    is raised then. The publications are :func:`named`, and the same in the next run, as is its moment.
    """
    now_ms = work.now_ms
    reached = route(work, publications)
    fresh = without_duplicates(work, publications, reached)
    declared = work.routing.queues(work.tr, dict.fromkeys(chain.from_iterable(reached)))
    fills = has_maximum = False
    for queue in declared.values():
        fills = fills or not queue.empties_itself
        has_maximum = has_maximum or queue.max_load != NO_LIMIT
    if fills:  # the disk, unless all of them empty themselves
        work.tr.fill()
    # Of queues without a maximum nothing is reckoned.
    refusing, overfull = _judge(work, declared, fresh, reached) if has_maximum else NO_VERDICT
    keys: dict[str, set[str]] = {}
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is None:
            continue
        copies = _copies(publication, queues) if len(queues) > 1 else (publication,)
        for name, one in zip(queues, copies, strict=False):
            work.effects.note(name, PUBLISHED, one.key)
            if one.due_ms > now_ms or name not in refusing:
                _store(work, declared[name], one)
                if one.key and one.due_ms <= now_ms:
                    keys.setdefault(name, set()).add(one.key)
            else:
                refused = one if one.message_id else one._replace(message_id=work.ids())
                publish_dead(work, DeadCopy(name, refused), Cause("maxlen"), beforehand=beforehand)
    if keys:
        limits.check_capacity(work, keys)
    return Published(reached, overfull)


def route(work: Work, publications: Sequence[Publication]) -> list[list[str]]:
    """The queues of each."""
    reached = work.routing.routes(work.tr, [*map(_ADDRESS, publications)])
    messages = work.effects.stamped + sum(map(len, reached))
    if messages > MOST_STAMPED:
        raise LimitExceeded(
            "too many messages in one transaction", messages=messages, most=MOST_STAMPED, fix="Publish fewer at once."
        )
    return reached


def _judge(
    work: Work,
    declared: Mapping[str, QueueDeclaration],
    fresh: Sequence[Publication | None],
    reached: Sequence[Sequence[str]],
) -> Verdict:
    """What becomes of what is ready now in queues that are full."""
    coming: dict[str, Load] = {}
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is not None and publication.due_ms <= work.now_ms:
            for queue in queues:
                if declared[queue].max_load != NO_LIMIT:
                    coming[queue] = coming.get(queue, NOTHING).grown(len(publication.payload), publication.key)
    return judge(work, coming)


def _copies(publication: Publication, queues: Sequence[str]) -> Sequence[Publication]:
    """One for each queue. If it has an id, so has each, the first one that of the publication; the same in each run."""
    if not publication.message_id:
        return [publication] * len(queues)
    further = [blake2b(publication.message_id + queue.encode(), digest_size=16).digest() for queue in queues[1:]]
    return [publication, *(publication._replace(message_id=each) for each in further)]


def _store(work: Work, queue: QueueDeclaration, publication: Publication) -> None:
    """One copy."""
    _exchange, _routing_key, payload, priority, due_ms, ttl_ms, expires_ms, key, ttr_ms, task_id = publication[:10]
    if queue.message_ttl_ms is not None:
        ttl_ms = queue.message_ttl_ms if ttl_ms is None else min(ttl_ms, queue.message_ttl_ms)
    is_delayed = due_ms > work.now_ms
    if ttl_ms is not None or expires_ms:
        expires_ms = expires_at(due_ms if is_delayed else work.now_ms, ttl_ms, expires_ms)
    record = Record.of(
        publication.message_id or work.ids(),
        payload,
        published_ms=work.now_ms,
        expires_ms=expires_ms,
        key=key,
        ttr_ms=ttr_ms,
        task_id=task_id,
        priority=priority if priority > queue.max_priority else NO_PRIORITY,  # what it has in a queue that has more
    )
    to = Subqueue(queue.name, key, work.keys.rank(min(priority, queue.max_priority)))
    if is_delayed:
        put_delayed(work, to, due_ms, record)
    else:
        put_ready(work, to, record)


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
