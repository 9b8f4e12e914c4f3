"""Publish: route a message and store a copy in each queue it reaches.

A publish to the default exchange reads nothing and never conflicts: the position is the versionstamp of the commit, so
queue order is commit order. (The seeds' "read the last index, add a random suffix" costs a read and loses the order.)
A named exchange costs one snapshot read, of its epoch; see ``routing/tables.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kombu_fdb.engine.messages.deadletter import Graves, bury
from kombu_fdb.engine.messages.dedup import without_duplicates
from kombu_fdb.engine.messages.overflow import Load, judge
from kombu_fdb.engine.scheduling import limits
from kombu_fdb.engine.stored.tally import PUBLISHED, Tally
from kombu_fdb.engine.stored.whereabouts import note
from kombu_fdb.errors import LimitExceeded
from kombu_fdb.keyspace.codec import INLINE_BYTES, chunks_of, encode_record, size_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import STAMP_CODE
from kombu_fdb.model import Death, Publication
from kombu_fdb.primitives.clock import IdSource
from kombu_fdb.store.protocol import Transaction

__all__ = [
    "BATCH_BYTES",
    "BATCH_MESSAGES",
    "MOST_STAMPED",
    "Published",
    "expires_at",
    "named",
    "publish",
    "publish_dead",
    "put",
    "store_delayed",
    "store_ready",
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


def publish(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    publications: Sequence[Publication],
    *,
    now_ms: int,
    beforehand: bool = False,
) -> Published:
    """Store all of them in order. Raises ``CapacityExceeded``, and ``LimitExceeded`` if they have too many copies.

    ``beforehand``: a refused message that is too large for several queues may be copied beforehand; ``CopiesMissing``
    is raised then. The publications are :func:`named`, and the same in the next run.
    """
    routing = graves.routing
    reached = [routing.route(tr, each.exchange, each.routing_key) for each in publications]
    _check_stamps(tally, reached)
    fresh = without_duplicates(tr, graves.keys, publications, now_ms)
    refusing, overfull = judge(tr, graves, _coming(fresh, reached, now_ms))
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is None:
            continue
        for queue, one in zip(queues, _one_for_each(publication, queues), strict=True):
            tally.note(queue, PUBLISHED, one.key)
            if one.due_ms > now_ms or queue not in refusing:
                _put(tr, graves, tally, queue, one, now_ms)
            else:
                refused = one if one.message_id else one._replace(message_id=graves.ids())
                publish_dead(tr, graves, tally, queue, refused, (), now_ms, reason="maxlen", beforehand=beforehand)
    return Published(reached, overfull)


def _one_for_each(publication: Publication, queues: Sequence[str]) -> list[Publication]:
    """Its copies: if it has an id, each has one, the first one that of the publication; the same in each run."""
    if not publication.message_id or len(queues) < 2:
        return [publication] * len(queues)
    further = [blake2b(publication.message_id + queue.encode(), digest_size=16).digest() for queue in queues[1:]]
    return [publication, *(publication._replace(message_id=each) for each in further)]


def _check_stamps(tally: Tally, reached: Sequence[list[str]]) -> None:
    messages = tally.stamped + sum(map(len, reached))
    if messages > MOST_STAMPED:
        raise LimitExceeded(
            "too many messages in one transaction", messages=messages, most=MOST_STAMPED, fix="Publish fewer at once."
        )


def _coming(
    publications: Sequence[Publication | None], reached: Sequence[list[str]], now_ms: int
) -> dict[str, tuple[int, int]]:
    """How many messages and bytes become ready in each queue at once."""
    coming: dict[str, tuple[int, int]] = {}
    for publication, queues in zip(publications, reached, strict=True):
        if publication is not None and publication.due_ms <= now_ms:
            for queue in queues:
                messages, size = coming.get(queue, (0, 0))
                coming[queue] = messages + 1, size + len(publication.payload)
    return coming


def _put(tr: Transaction, graves: Graves, tally: Tally, queue: str, publication: Publication, now_ms: int) -> None:
    keys, routing = graves.keys, graves.routing
    if publication.key:
        limits.check_capacity(tr, keys, tally, queue, publication.key, routing.control(tr, queue))
    if publication.priority and publication.priority > (most_urgent := routing.max_priority(tr, queue)):
        publication = publication._replace(priority=most_urgent)
    ttl_ms = _shorter(publication.ttl_ms, routing.message_ttl_ms(tr, queue))
    message_id = publication.message_id or graves.ids()
    put(tr, keys, tally, queue, publication, ttl_ms=ttl_ms, now_ms=now_ms, message_id=message_id)


def publish_dead(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    queue: str,
    publication: Publication,
    deaths: Sequence[Death],
    now_ms: int,
    *,
    reason: str,
    details: dict[str, Any] | None = None,
    beforehand: bool = False,
) -> None:
    """Bury a message that does not stand in the store, as if it had died in ``queue``. It needs a message id.

    ``beforehand``: as for :func:`publish`.
    """
    record = encode_record(
        publication.message_id,
        publication.payload,
        published_ms=now_ms,
        expires_ms=0,
        deaths=deaths,
        key=publication.key,
        ttr_ms=publication.ttr_ms,
        task_id=publication.task_id,
        priority=publication.priority,
    )
    _put_chunks(tr, graves.keys, publication.message_id, publication.payload)
    payload = publication.payload if beforehand else b""
    bury(tr, graves, tally, queue, record, reason, now_ms, place=b"", details=details, payload=payload)


def _put_chunks(tr: Transaction, keys: Keyspace, message_id: bytes, payload: bytes) -> None:
    for number, chunk in enumerate(chunks_of(payload)):
        tr.set(keys.body(message_id, number), chunk)


def put(
    tr: Transaction,
    keys: Keyspace,
    tally: Tally,
    queue: str,
    publication: Publication,
    *,
    ttl_ms: int | None,
    now_ms: int,
    message_id: bytes,
) -> None:
    """Store one copy in one queue."""
    payload = publication.payload
    start_ms = max(now_ms, publication.due_ms)
    record = encode_record(
        message_id,
        payload,
        published_ms=now_ms,
        expires_ms=expires_at(start_ms, ttl_ms, publication.expires_ms),
        key=publication.key,
        ttr_ms=publication.ttr_ms,
        task_id=publication.task_id,
    )
    _put_chunks(tr, keys, message_id, payload)
    rank, task_id = keys.rank(publication.priority), publication.task_id
    if publication.due_ms > now_ms:
        store_delayed(tr, keys, tally, queue, publication.due_ms, rank, record, task_id=task_id)
    else:
        store_ready(tr, keys, tally, queue, publication.key, rank, record, task_id=task_id)


def store_ready(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: str, rank: bytes, record: bytes, *, task_id: str
) -> None:
    """Put a record at the end of its rank, among the messages of its key if it has one."""
    prefix, user_version = keys.items(queue, key, rank) + STAMP_CODE, tally.next_user_version()
    tr.set_versionstamped_key(prefix, user_version, record)
    note(tr, keys, task_id, prefix, user_version)
    tally.ready(queue, size_of(record))
    if key:
        tally.came(queue, key, rank)


def store_delayed(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, due_ms: int, rank: bytes, record: bytes, *, task_id: str
) -> None:
    """Keep a record out of the ready range until it is due. Guarantee: NOT-EARLY."""
    prefix, user_version = keys.delayed_prefix(queue, due_ms, rank), tally.next_user_version()
    tr.set_versionstamped_key(prefix, user_version, record)
    note(tr, keys, task_id, prefix, user_version)
    tr.set(keys.waiting(queue), b"")
    tally.delayed(queue)


def expires_at(start_ms: int, ttl_ms: int | None, expires_ms: int) -> int:
    """The earlier of the two ends; 0 for never. A time to live of 0 is legal (RabbitMQ: unless consumed at once)."""
    ends = [end for end in (expires_ms, None if ttl_ms is None else start_ms + ttl_ms) if end]
    return min(ends, default=0)


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
