"""Dead letters: what happens to a message that will not be delivered again.

In the transaction that takes it out of its queue it goes to the queue's dead-letter exchange
(``x-dead-letter-exchange``, ``x-dead-letter-routing-key``), or, where none is set, to ``<queue>.dead``, which keeps it
for :attr:`Policy.dead_ttl_ms`. Its history grows by an entry as RabbitMQ's ``x-death`` has them
(https://www.rabbitmq.com/docs/dlx#effects): one per queue and reason, newest first, with a count.

An exchange that does not exist, or routes nowhere, counts as not set: nothing vanishes for a wrong name.

A message of any size can die into any number of queues, whether it stands in the store or comes from outside: what does
not fit into the transaction of its burial is copied beforehand (``copies.py``).

A message of a newer version is not buried, for its history can't be read: it is kept for who can (``newer.py``).

Three exceptions keep the set of messages finite. A message that only expires from queue to queue in a circle is dropped
when it would enter one for the second time, as in RabbitMQ. A message that dies of expiry is dropped unless a
dead-letter exchange is set, as in RabbitMQ. A message that dies in ``<queue>.dead`` itself is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.stored import copies, newer
from kombu_fdb.engine.stored.tally import DEAD, READY, Tally
from kombu_fdb.engine.stored.whereabouts import forget, note
from kombu_fdb.errors import ExchangeNotFound, FormatError
from kombu_fdb.keyspace.codec import (
    Record,
    chunks_of,
    decode_amount,
    decode_record,
    encode_json,
    encode_record,
    outline_of,
    size_of,
)
from kombu_fdb.keyspace.layout import Keyspace, priority_of
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import NO_PRIORITY, Death
from kombu_fdb.primitives.clock import IdSource
from kombu_fdb.routing.tables import RoutingTables
from kombu_fdb.store.protocol import Transaction

__all__ = ["Graves", "Policy", "bury", "drop", "drop_expired", "fitted", "trim"]

DEAD_SUFFIX = ".dead"
TRIMMED_PER_TRANSACTION = 200
#: A history must fit into a record, and a record into a value of the store (100,000 B): how large the details of one
#: death may be as JSON, and how many of the latest deaths keep theirs.
DETAILS_BYTES = 16_000
MOST_DETAILED = 4
#: How large a whole history may be; beyond it the oldest deaths are forgotten.
HISTORY_BYTES = 80_000


@dataclass(frozen=True, slots=True)
class Policy:
    """What a namespace does with messages that can't be handled. Sizes in bytes, times in milliseconds."""

    max_message_size: int = 8 * 1024 * 1024
    #: How often a message may come back from a consumer before it is dead-lettered; None for ever.
    delivery_limit: int | None = 20
    #: Whether rejected messages of a queue without a dead-letter exchange are kept in ``<queue>.dead``.
    keep_dead: bool = True
    dead_ttl_ms: int = 14 * 24 * 3600 * 1000
    #: How many of them ``<queue>.dead`` keeps, the newest.
    dead_length: int = 10_000


@dataclass(frozen=True, slots=True)
class Graves:
    """What burying needs to know besides the transaction."""

    keys: Keyspace
    routing: RoutingTables
    policy: Policy
    ids: IdSource

    def over_limit(self, tr: Transaction, queue: str, value: bytes, *, again: int = 1) -> bool:
        """Whether the record will have come back more often than it may, once it has come back ``again`` times."""
        limit = self.routing.delivery_limit(tr, queue, self.policy.delivery_limit)
        try:
            return limit is not None and outline_of(value).redeliveries + again > limit
        except FormatError:
            return True


def drop(tr: Transaction, keys: Keyspace, record: Record, place: bytes) -> None:
    """Delete what else there is of a message whose record, at ``place``, is gone."""
    forget(tr, keys, record.task_id, place)
    if record.chunks:
        tr.clear_range(*keys.bodies(record.message_id))


def trim(
    tr: Transaction, graves: Graves, tally: Tally, queue: str, now_ms: int, limit: int = TRIMMED_PER_TRANSACTION
) -> int:
    """Drop a part of what ``<queue>.dead`` keeps no longer: the expired, and the oldest beyond its length.

    Those that wait among the messages of their key, as they do after a delay, go last. Done by the duties now and then,
    not by each burial, which therefore never conflicts. Returns how many.
    """
    keys = graves.keys
    stored = tr.get(keys.count(queue, READY), snapshot=True)
    excess = decode_amount(stored)[0] - graves.policy.dead_length
    ranges = [(*range_of(prefix), limit) for prefix in (keys.ready(queue), keys.keyed(queue))]
    unkeyed, keyed = tr.get_ranges(ranges, snapshot=True)
    dropped: list[bytes] = []
    for key, value in (unkeyed + keyed)[:limit]:
        record = _readable(graves, value, outline_of)
        if len(dropped) < excess or 0 < record.expires_ms <= now_ms:
            _drop_letter(tr, keys, tally, queue, key, value, record)
            dropped.append(key)
    turns.leave_places(tr, keys, queue, dropped)
    return len(dropped)


def _drop_letter(
    tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: bytes, value: bytes, record: Record
) -> None:
    tr.add_read_conflict_key(key)
    tr.clear(key)
    tally.unready(queue, size_of(value))
    if fair_key := keys.key_at(queue, key):
        tally.went(queue, fair_key)
    drop(tr, keys, record, key)


def drop_expired(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    queue: str,
    record: Record,
    value: bytes,
    now_ms: int,
    *,
    place: bytes,
) -> None:
    """A message outlived its time: dead-lettered if an exchange is set, else gone."""
    if graves.routing.dead_letter_exchange(tr, queue) is None:
        drop(tr, graves.keys, record, place)
    else:
        bury(tr, graves, tally, queue, value, "expired", now_ms, place=place)


def bury(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    queue: str,
    value: bytes,
    reason: str,
    now_ms: int,
    *,
    place: bytes,
    details: dict[str, Any] | None = None,
    payload: bytes = b"",
) -> None:
    """Move a record, which its caller has taken out of its ``place`` in ``queue``, to where its dead letters go.

    ``place``: b"" for a message from outside. ``payload``: then what to copy it from, if that may be done beforehand.
    Raises ``CopiesMissing``.
    """
    if newer.keep(tr, graves.keys, tally, queue, value, place):
        return
    record = _readable(graves, value)
    tally.note(queue, DEAD, record.key)
    record = record._replace(priority=record.priority or priority_of(place))
    way = _way(tr, graves, queue)
    targets = [target for target in way.queues if not _goes_in_circles(record.deaths, target, reason)]
    if not targets:
        drop(tr, graves.keys, record, place)
        return
    forget(tr, graves.keys, record.task_id, place)
    death = Death(queue, reason, 1, now_ms, way.exchange, (way.routing_key,), fitted(details or {}))
    deaths = _remember(record.deaths, death)
    for target, message in zip(targets, _copies(tr, graves, record, targets, place, payload), strict=True):
        # The message's own time to live ends with its first death (RabbitMQ); that of its new queue begins.
        ttl_ms = graves.routing.message_ttl_ms(tr, target) if way.declared else graves.policy.dead_ttl_ms
        expires_ms = 0 if ttl_ms is None else now_ms + ttl_ms
        _store(tr, graves.keys, tally, target, message, deaths, expires_ms, ranked=not target.endswith(DEAD_SUFFIX))


def _readable(graves: Graves, value: bytes, read: Callable[[bytes], Record] = decode_record) -> Record:
    """The record; of unreadable bytes, one whose payload they are, so that nothing is lost and a person can look."""
    try:
        return read(value)
    except FormatError:
        return Record(graves.ids(), 0, 0, 0, 0, len(value), value, ())


class _Way(NamedTuple):
    """Where dead letters go, and by which exchange and key; ``declared``: as the queue's arguments say."""

    queues: list[str]
    exchange: str = ""
    routing_key: str = ""
    declared: bool = False


def _way(tr: Transaction, graves: Graves, queue: str) -> _Way:
    exchange = graves.routing.dead_letter_exchange(tr, queue)
    if exchange is not None:
        routing_key = graves.routing.dead_letter_routing_key(tr, queue)
        queues = _route(tr, graves, exchange, routing_key)
        if queues:
            return _Way(queues, exchange, routing_key, declared=True)
    if queue.endswith(DEAD_SUFFIX) or not graves.policy.keep_dead:
        return _Way([])
    return _Way([queue + DEAD_SUFFIX], routing_key=queue + DEAD_SUFFIX)


def _route(tr: Transaction, graves: Graves, exchange: str, routing_key: str) -> list[str]:
    """An exchange that is not there, or unreadable, must not stop whoever buries, often a sweep; it reaches nobody."""
    try:
        return graves.routing.route(tr, exchange, routing_key)
    except (ExchangeNotFound, FormatError):
        return []


def _goes_in_circles(deaths: tuple[Death, ...], target: str, reason: str) -> bool:
    """RabbitMQ's rule: a message that comes to a queue again without ever having been rejected is dropped."""
    return "rejected" not in (reason, *(death.reason for death in deaths)) and any(
        death.queue == target for death in deaths
    )


def _remember(deaths: tuple[Death, ...], death: Death) -> tuple[Death, ...]:
    """One entry per queue and reason, the newest first."""
    others = [old for old in deaths if (old.queue, old.reason) != (death.queue, death.reason)]
    count = sum(old.count for old in deaths if old not in others)
    kept = (dataclasses.replace(death, count=count + 1), *others)
    return _within(kept[:MOST_DETAILED] + tuple(dataclasses.replace(old, details={}) for old in kept[MOST_DETAILED:]))


def _within(deaths: tuple[Death, ...]) -> tuple[Death, ...]:
    """The newest of them that fit into :data:`HISTORY_BYTES`; at least one."""
    sizes = accumulate(len(encode_json(dataclasses.asdict(death))) for death in deaths)
    most = sum(size <= HISTORY_BYTES for size in sizes)
    return deaths[: max(most, 1)]


def fitted(details: dict[str, Any]) -> dict[str, Any]:
    """The details within :data:`DETAILS_BYTES`: the longest are halved; of a traceback the end stays."""
    details = dict(details)
    while len(encode_json(details)) > DETAILS_BYTES:
        name, value = max(details.items(), key=lambda item: len(encode_json(item[1])))
        half = len(value) // 2 if isinstance(value, str | list) else 0
        details[name] = value[len(value) - half :] if name == "traceback" else value[:half] if half else ""
    return details


def _copies(
    tr: Transaction, graves: Graves, record: Record, targets: list[str], place: bytes, payload: bytes
) -> list[Record]:
    """The message once per target. Chunks belong to one message id, so further copies get chunks of their own.

    Raises ``CopiesMissing`` for a message that is too large to be copied here, and may be copied beforehand.
    """
    further = targets[1:]
    if (place or payload) and record.chunks and record.size * len(further) > copies.COPIED_BYTES:
        ids = copies.take(tr, graves.keys, record, further, payload)
    else:
        ids = [graves.ids() for _ in further]
        _copy_chunks(tr, graves.keys, record, ids)
    return [record, *(record._replace(message_id=each) for each in ids)]


def _copy_chunks(tr: Transaction, keys: Keyspace, record: Record, ids: list[bytes]) -> None:
    if not record.chunks or not ids:
        return
    rows = tr.get_range(*keys.bodies(record.message_id), snapshot=True)
    for (_message_id, number), chunk in keys.read(rows, bytes, int):
        for each in ids:
            tr.set(keys.body(each, number), chunk)


def _store(
    tr: Transaction,
    keys: Keyspace,
    tally: Tally,
    target: str,
    record: Record,
    deaths: tuple[Death, ...],
    expires_ms: int,
    *,
    ranked: bool,
) -> None:
    """``ranked``: by its priority, as RabbitMQ does; ``<queue>.dead`` keeps the order of the deaths."""
    value = encode_record(
        record.message_id,
        record.payload,
        published_ms=record.published_ms,
        expires_ms=expires_ms,
        deaths=deaths,
        key=record.key,
        chunks=record.chunks or None,
        size=record.size,
        ttr_ms=record.ttr_ms,
        task_id=record.task_id,
        priority=record.priority,
    )
    if not record.chunks:
        for number, chunk in enumerate(chunks_of(record.payload)):
            tr.set(keys.body(record.message_id, number), chunk)
    rank = record.priority if ranked else NO_PRIORITY
    prefix, user_version = keys.ready_prefix(target, rank), tally.next_user_version()
    tr.set_versionstamped_key(prefix, user_version, value)
    note(tr, keys, record.task_id, prefix, user_version)
    tally.ready(target, record.size)
