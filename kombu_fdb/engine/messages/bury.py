"""Bury: a message that will not be delivered again becomes a dead letter, or is deleted.

The transaction that takes a message out of its queue moves it to the queue's dead-letter exchange
(``x-dead-letter-exchange``, ``x-dead-letter-routing-key``). Where none is set, the message goes to ``<queue>.dead``,
which keeps it for :attr:`Environment.dead_ttl_ms`. Its history is that of RabbitMQ's ``x-death``
(https://www.rabbitmq.com/docs/dlx#effects): one entry per queue and reason, newest first, with a count.

An exchange that does not exist, routes nowhere, or routes to more than :data:`MOST_LETTERS` queues, counts as not set.
So a wrong name loses no message, and every burial fits into a transaction.

A message of any size, stored or from outside, can be dead-lettered to that many queues: what does not fit into the
burial's transaction is copied in advance (``copies.py``). The history is written once per queue, so the more queues
there are, the fewer old deaths are remembered.

A message of a newer version is not buried, as its history can't be read: it is kept for a newer process
(``forward_compatibility.py``).

If a full disk has no room for the death record of a message that a claim meets, the message *rests*: it is delayed for
:data:`REST_MS`, and the claim continues with the next message. Any other burial is refused, and tried again.

Three exceptions keep the set of messages finite. A message that cycles between queues, without being rejected in any of
them, is dropped before it re-enters one, as in RabbitMQ. A message that expires is dropped unless a dead-letter
exchange is set, as in RabbitMQ. A message that dies in ``<queue>.dead`` itself is deleted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kombu_fdb.engine import copies, forward_compatibility
from kombu_fdb.engine.messages.message import delete_rest, forget, put_delayed, put_ready, rank_in, unindex
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import ExchangeNotFound, FormatError
from kombu_fdb.keyspace.codec import Message, Record, encode_json, end_of_life, published_by
from kombu_fdb.keyspace.layout import priority_of, read_or
from kombu_fdb.model import NO_PRIORITY, Death, DeliveryInfo

DEAD_SUFFIX = ".dead"
#: A history must fit into a record, and a record into a value of the store (100,000 B). So the details of one death
#: are limited to this size as JSON, and only so many of the latest deaths keep theirs.
DETAILS_BYTES = 16_000
MOST_DETAILED = 4
#: The limit for a whole history; beyond it the oldest deaths are forgotten.
HISTORY_BYTES = 80_000
#: The limit for all letters of one message together, as one transaction writes them.
HISTORIES_BYTES = 3_000_000
#: How many queues one message can be dead-lettered to.
MOST_LETTERS = 1_000
REST_MS = 60_000


def drop_expired(work: Work, message: Message[bytes], record: Record) -> None:
    """End a message that has expired: dead-letter it if an exchange is set, else delete it."""
    if work.routing.queue(work.tr, message.queue).dead_letter_exchange is None:
        delete_rest(work, record, message.place)
    else:
        bury(work, message, "expired")


def bury_malformed(work: Work, message: Message[bytes], error: FormatError) -> None:
    """:func:`bury` a message that can't be read."""
    bury(work, message, "malformed", {"error": str(error)})


def bury(
    work: Work, message: Message[bytes], reason: str, details: dict[str, Any] | None = None, *, payload: bytes = b""
) -> None:
    """Move a message, which its caller has taken out of its queue, to where that queue's dead letters go.

    ``details`` go into its history, cut to :data:`DETAILS_BYTES`. ``payload``: that of a message from outside, if it
    may be copied in advance. Raises ``CopiesMissing``.
    """
    queue, place, value = message
    if forward_compatibility.keep(work, queue, value, place):
        return
    record = read_or(None, Record.decode, value) or Record.unreadable(value, work.environment.ids())
    record = record._replace(priority=record.priority or priority_of(place))
    published = _delivery_info(work, queue, record, payload)
    queues, delivery_info, is_declared = _route_letter(work, queue, published)
    targets = [target for target in queues if not _goes_in_circles(record.deaths, queue, target, reason)]
    if targets and work.rests:
        _rest(work, message, record)
        return
    work.effects.note(queue, "dead", record.key)
    if not targets:
        delete_rest(work, record, place)
        return
    work.tr.fill(moving=True)
    unindex(work, record.task_id, place)
    most_bytes = min(HISTORY_BYTES, HISTORIES_BYTES // len(targets))
    details = fitted(details or {}, min(DETAILS_BYTES, most_bytes // 2))
    keys = (published.routing_key,)
    death = Death(queue, reason, 1, work.now_ms, published.exchange, keys, details, first=not record.deaths)
    deaths = _remember(record.deaths, death, most_bytes)
    record = record._replace(redeliveries=0, seen=False, deaths=deaths, delivery_info=delivery_info)
    for target, copy in zip(targets, _copies(work, record, targets, place, payload), strict=True):
        _put(work, target, copy, declared=is_declared)


def _rest(work: Work, message: Message[bytes], record: Record) -> None:
    """Delay the message unchanged: that takes no extra room."""
    forget(work, message)
    rank = rank_in(work, message.queue, record.priority)
    put_delayed(work, message.queue, rank, work.now_ms + REST_MS, message.value)


def _put(work: Work, target: str, record: Record, *, declared: bool) -> None:
    """Store a letter by its key and priority; ``<queue>.dead`` keeps the order of the deaths."""
    # As in RabbitMQ, the message loses its own time to live at its first death; that of its new queue begins.
    ttl_ms = work.routing.queue(work.tr, target).message_ttl_ms
    if ttl_ms is None and not declared:
        ttl_ms = work.environment.dead_ttl_ms
    record = record._replace(expires_ms=end_of_life(work.now_ms, ttl_ms))
    if target.endswith(DEAD_SUFFIX):
        put_ready(work, target, "", work.keys.rank(NO_PRIORITY), record)
    else:
        put_ready(work, target, record.key, rank_in(work, target, record.priority), record)


def _route_letter(work: Work, queue: str, published: DeliveryInfo) -> tuple[list[str], DeliveryInfo, bool]:
    """The queues for the dead letters, exchange and routing key, and whether the queue's arguments set these."""
    declaration = work.routing.queue(work.tr, queue)
    exchange, routing_key = declaration.dead_letter_exchange, declaration.dead_letter_routing_key
    if exchange is not None:
        if routing_key is None:
            routing_key = published.routing_key
        queues = _route(work, exchange, routing_key)
        if queues:
            return queues, DeliveryInfo(exchange, routing_key), True
    if queue.endswith(DEAD_SUFFIX):
        return [], DeliveryInfo("", ""), False
    return [queue + DEAD_SUFFIX], DeliveryInfo("", queue + DEAD_SUFFIX), False


def _delivery_info(work: Work, queue: str, record: Record, payload: bytes) -> DeliveryInfo:
    """The exchange and key that brought the message to the queue; the queue's name if kombu did not publish it."""
    if record.delivery_info is not None:
        return record.delivery_info
    begin = payload or record.payload or work.tr.get(work.keys.body(record.message_id, 0), snapshot=True) or b""
    return published_by(begin) or DeliveryInfo("", queue)


def _route(work: Work, exchange: str, routing_key: str) -> list[str]:
    """The queues reached; none if the exchange is missing, unreadable or reaches too many: a burial must not fail."""
    try:
        queues = work.routing.route(work.tr, exchange, routing_key)
    except (ExchangeNotFound, FormatError):
        return []
    return queues if len(queues) <= MOST_LETTERS else []


def _goes_in_circles(deaths: tuple[Death, ...], queue: str, target: str, reason: str) -> bool:
    """RabbitMQ's rule: a message that re-enters a queue, and was not rejected since it died there, is dropped."""
    for death_queue, death_reason in [(queue, reason), *((death.queue, death.reason) for death in deaths)]:
        if death_reason == "rejected":
            return False
        if death_queue == target:
            return True
    return False


def _remember(deaths: tuple[Death, ...], death: Death, most_bytes: int) -> tuple[Death, ...]:
    """One entry per queue and reason, newest first; it still says when and how that first happened, as in RabbitMQ."""
    others = []
    for old in deaths:
        if (old.queue, old.reason) == (death.queue, death.reason):
            death = dataclasses.replace(
                death,
                count=old.count + death.count,
                exchange=old.exchange,
                routing_keys=old.routing_keys,
                first=old.first,
                since_ms=old.since_ms or old.time_ms,
            )
        else:
            others.append(old)
    kept = (death, *others)
    plain = tuple(dataclasses.replace(old, details={}) for old in kept[MOST_DETAILED:])
    return _within(kept[:MOST_DETAILED] + plain, most_bytes)


def _within(deaths: tuple[Death, ...], most_bytes: int) -> tuple[Death, ...]:
    """The newest deaths that fit; at least one."""
    sizes = accumulate(len(encode_json(dataclasses.asdict(death))) for death in deaths)
    most = sum(size <= most_bytes for size in sizes)
    return deaths[: max(most, 1)]


def fitted(details: dict[str, Any], most_bytes: int = DETAILS_BYTES) -> dict[str, Any]:
    """The details cut to this size: the longest is halved, emptied or left out; a traceback loses its beginning."""
    details = dict(details)
    while details and len(encode_json(details)) > most_bytes:
        name, value = max(details.items(), key=lambda item: len(encode_json(item[1])))
        half = len(value) // 2 if isinstance(value, str | list) else 0
        if half:
            details[name] = value[len(value) - half :] if name == "traceback" else value[:half]
        elif value:
            details[name] = ""
        else:
            del details[name]
    return details


def _copies(work: Work, record: Record, targets: Sequence[str], place: bytes, payload: bytes) -> list[Record]:
    """The message once per target. Chunks belong to one message id, so further copies get chunks of their own.

    Raises ``CopiesMissing`` for a message that is too large to be copied here, but may be copied in advance.
    """
    further = targets[1:]
    if (place or payload) and record.chunks and record.size * len(further) > copies.COPIED_BYTES:
        ids = copies.take(work, record, further, payload)
    else:
        ids = [work.environment.ids() for _ in further]
        _copy_chunks(work, record, ids)
    return [record, *(record._replace(message_id=each) for each in ids)]


def _copy_chunks(work: Work, record: Record, ids: list[bytes]) -> None:
    if not record.chunks or not ids:
        return
    rows = work.tr.get_range(*work.keys.bodies(record.message_id), snapshot=True)
    for (_message_id, number), chunk in work.keys.read(rows, bytes, int):
        for each in ids:
            work.tr.set(work.keys.body(each, number), chunk)
