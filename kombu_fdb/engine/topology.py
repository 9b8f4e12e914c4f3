"""Topology: declare (queue arguments are checked here), bind, purge, delete; queues that vanish; the store's format.

Every change of an exchange or its bindings sets the exchange's epoch, which shows all processes that it has changed
(``routing/tables.py``).

A queue is deleted in one transaction: declaration, bindings, and as many messages as fit. If there are more, the same
transaction writes ``("deleting", queue)``, and they follow in parts. So whichever process dies, the duties find the
rest; and all messages are deleted before the name is declared again. A queue that vanishes with its last consumer is
deleted in the transaction that removes that consumer; an exclusive queue's connection counts as one. While sessions
hold messages of the name, the row stays: messages of the deleted queue are deleted when they are released
(``messages/settle.py``), even if a new queue has its name.

A queue with ``x-expires`` or auto-delete stays while ``("consumer", queue, session, tag)`` exists for it. These records
are cleared with their session, or with their queue: so consumers learn of its deletion. Idle time is measured like a
session's silence: an observer sees ``("expiring", queue)`` unchanged for long enough by its own clock.

Queue arguments. AMQP's keep their names, units and meaning (https://www.rabbitmq.com/docs/queues#optional-arguments);
ours begin with ``x-fair-``. Unknown arguments are stored and ignored, as in RabbitMQ; but a misspelt one is an error,
as the queue would otherwise grow without its intended limit. A publish looks arguments up in the declaration, which is
cached (``routing/tables.py``). A claim can't use that cache, which may be a second old. So the arguments that a claim
needs are also in the queue's control record, which it reads anyway.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from kombu_fdb.engine import parts, session
from kombu_fdb.engine.messages import overflow
from kombu_fdb.engine.messages.message import delete, take_out
from kombu_fdb.engine.metrics import totals
from kombu_fdb.engine.scheduling import single
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import ExchangeNotFound, FormatError, InvalidArgument, NotEquivalent, QueueNotFound
from kombu_fdb.keyspace.codec import Message, decode_control, encode_settings
from kombu_fdb.keyspace.layout import FORMAT_VERSION, STAMP_BYTES, range_of
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.ranges import FLAG, MOST, TEXT, Kind, refused, shown
from kombu_fdb.routing.tables import PREDECLARED, Exchange, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

#: An exclusive queue's connection has an entry among its consumers, whose tag begins with this.
OWNER = "exclusive-"
#: The prefix of our own arguments.
OWN = "x-fair-"
#: A name this similar to one of ours is misspelt. None of RabbitMQ's others is: the nearest, ``x-priority``, reaches
#: 0.83.
LIKE = 0.88


def _whole(what: str, least: int, most: int = MOST) -> Kind:
    return Kind.whole(f"a whole number of {what}", least, most)


ARGUMENT_KINDS = {
    "x-message-ttl": _whole("milliseconds, 0 or more", 0),
    "x-expires": _whole("milliseconds, at least 1", 1),
    "x-max-length": _whole("messages, 0 or more", 0),
    "x-max-length-bytes": _whole("bytes, 0 or more", 0),
    "x-overflow": Kind(", ".join(overflow.MODES[:2]) + f" or {overflow.MODES[2]}", lambda v: v in overflow.MODES),
    "x-dead-letter-exchange": TEXT,
    "x-dead-letter-routing-key": TEXT,
    "x-delivery-limit": _whole("redeliveries; a negative number means no limit", -MOST),
    "x-max-priority": _whole("priorities from 0 to 255, of which there are 10 here", 0, 255),
    "x-single-active-consumer": FLAG,
    "x-consumer-timeout": _whole("milliseconds, at least 1", 1),
    "x-queue-type": Kind(
        "classic or quorum, which are the same here. A stream, whose consumers leave the messages there, is none",
        lambda value: value in ("classic", "quorum"),
    ),
    "x-max-age": Kind("for streams only. For messages that expire set x-message-ttl", lambda _: False),
    "x-fair-ageing": _whole("milliseconds of waiting that count as one priority, at least 1", 1),
}


def check_flags(declared: QueueDeclaration | Exchange, *names: str) -> None:
    """Raises ``InvalidArgument`` for values that, once stored, would make lists of queues unreadable."""
    for name in names:
        FLAG.check(name, getattr(declared, name))
    if not isinstance(declared.arguments, dict):
        raise InvalidArgument("arguments must be a dictionary", given=shown(declared.arguments))


def check_exchange(declared: Exchange) -> None:
    """Raises ``InvalidArgument``."""
    check_flags(declared, "durable", "auto_delete")
    alternate = declared.arguments.get("alternate-exchange")
    if not isinstance(alternate, str | None):
        raise InvalidArgument(
            "unusable argument",
            exchange=declared.name,
            fix="alternate-exchange must be a string",
            given=shown(alternate),
        )


def check(declaration: QueueDeclaration) -> None:
    """Raises ``InvalidArgument``, which names the argument and what it accepts. An argument of None counts as unset."""
    check_flags(declaration, "durable", "exclusive", "auto_delete")
    given = {name: value for name, value in declaration.arguments.items() if value is not None}
    for name in given.keys() - ARGUMENT_KINDS.keys():
        _check_name(declaration.name, name)
    for name, value, kind in refused(ARGUMENT_KINDS, given):
        raise InvalidArgument(
            "unusable queue argument", queue=declaration.name, fix=f"{name} is {kind.what}", **{name: value}
        )
    if "x-dead-letter-routing-key" in given and "x-dead-letter-exchange" not in given:
        raise InvalidArgument(
            "x-dead-letter-routing-key without x-dead-letter-exchange",
            queue=declaration.name,
            fix='Set the exchange too; "" is the default exchange',
        )


def _check_name(queue: str, name: str) -> None:
    own = name.startswith(OWN)
    ours = [each for each in ARGUMENT_KINDS if each.startswith(OWN)] if own else ARGUMENT_KINDS
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0 if own else LIKE)
    if near:
        raise InvalidArgument("unknown queue argument", queue=queue, name=name, fix=f"Did you mean {near[0]}?")


def for_claims(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`~kombu_fdb.model.QueueControl` that the arguments set."""
    ageing_ms = arguments.get("x-fair-ageing")
    return {
        "single_active": bool(arguments.get("x-single-active-consumer")),
        "consumer_timeout_ms": arguments.get("x-consumer-timeout") or 0,
        "ageing": None if ageing_ms is None else ageing_ms / 1000,
    }


def declared_for_claims(work: Work, queue: str) -> dict[str, Any]:
    """:func:`for_claims` of the queue as it is declared now."""
    declaration = QueueDeclaration.if_readable(queue, work.tr.get(work.keys.queue(queue)))
    return for_claims({} if declaration is None else declaration.arguments)


MESSAGES_PER_PURGE = 500
#: Follows the version of a deleted queue that may have only held messages left.
HELD = b"\xff" * (STAMP_BYTES - parts.VERSION_BYTES)
#: How many consumers of an ended session one transaction removes.
CONSUMERS_PER_TRANSACTION = 25
#: Digits of a format version.
LONGEST_FORMAT = 10


# -- queues ------------------------------------------------------------------------------------------------------------


def declare_queue(work: Work, declaration: QueueDeclaration) -> bool:
    """Create the queue, or update its arguments; declaring it again unchanged only writes its last use.

    False if the deletion of an earlier queue of that name must be finished first. Raises ``InvalidArgument`` for an
    unusable argument.
    """
    check(declaration)
    key, value = work.keys.queue(declaration.name), declaration.encode()
    stored = work.tr.get(key)
    if stored is None and len(work.tr.get(work.keys.deleting(declaration.name)) or HELD) == parts.VERSION_BYTES:
        return False
    if stored != value:
        before = QueueDeclaration.if_readable(declaration.name, stored)
        work.tr.set(key, value)
        _update_control(work, declaration, before)
        if before is not None and before.expires_ms is not None:
            work.tr.clear(work.keys.expiring(declaration.name))
    if declaration.expires_ms is not None:
        touch(work, declaration.name)
    return True


def _update_control(work: Work, declaration: QueueDeclaration, before: QueueDeclaration | None) -> None:
    """Update the queue's control with what the declaration changes; other fields stay as they were set."""
    old, new = (
        for_claims({} if before is None else before.arguments),
        for_claims(declaration.arguments),
    )
    changes = {name: value for name, value in new.items() if value != old[name]}
    if not changes:
        return
    key = work.keys.control(declaration.name)
    try:
        control = decode_control(work.tr.get(key))
    except FormatError:  # perhaps a newer version's: do not overwrite it; the queue is paused
        return
    work.tr.set(key, encode_settings(dataclasses.replace(control, **changes)))
    if "single_active" in changes:
        single.vacate(work, declaration.name)


def delete_queue(
    work: Work, queue: str, *, if_unused: bool = False, if_empty: bool = False, if_idle: bool = False
) -> bytes | None:
    """Remove the declaration and the bindings. None if a condition forbids it.

    Returns a version: the messages that were in the queue by then are to be purged (:func:`purge_part`).
    """
    # Serializable: a concurrent claim makes this transaction start again.
    if if_idle and any(work.tr.get(work.keys.count(queue, "leased")) or b""):
        return None
    if if_unused and count_consumers(consumer_tags(work, queue)):
        return None
    if if_empty and any(
        work.tr.get_range(*range_of(p), limit=1) for p in (work.keys.ready(queue), work.keys.keyed(queue))
    ):
        return None
    last = last_stamp(work, queue)
    if _has_held(work, queue):
        to_be_purged(work, queue, last, HELD)
    work.tr.clear(work.keys.queue(queue))
    work.tr.clear(work.keys.expiring(queue))
    work.tr.clear(work.keys.bell(queue))
    work.tr.clear_range(*work.keys.consumers(queue))
    # A concurrent message with a key must not lose its arrival: it makes this start again.
    work.tr.add_read_conflict_range(*range_of(work.keys.keyed(queue)))
    for rows in work.keys.fairness(queue):
        work.tr.clear_range(*rows)
    for key in (work.keys.fair(queue), work.keys.control(queue), work.keys.single(queue), work.keys.relimit(queue)):
        work.tr.clear(key)
    totals.forget(work, [queue])
    _unbind_queue(work, queue)
    return last


def _unbind_queue(work: Work, queue: str) -> None:
    rows = work.tr.get_range(*work.keys.bindings_of(queue))
    for (_queue, exchange, routing_key), _ in work.keys.read(rows, str, str, str):
        _clear_binding(work, queue, exchange, routing_key)


def has_come_since(work: Work, queue: str, mark: bytes) -> bool:
    """Whether a message may have arrived since ``mark``. A concurrent one makes this transaction start again."""
    mark = bytes(parts.VERSION_BYTES) if mark == parts.NO_LAST else mark  # nothing had arrived
    bell, delayed = work.tr.get(work.keys.bell(queue)) or b"", range_of(work.keys.delayed(queue))
    work.tr.add_read_conflict_range(*delayed)
    if bell > mark or (work.tr.get(work.keys.alarm, snapshot=True) or b"") <= mark:
        return bell > mark
    rows = work.tr.get_range(*delayed, limit=MESSAGES_PER_PURGE, snapshot=True)  # all queues share the alarm
    return len(rows) == MESSAGES_PER_PURGE or not all(parts.came_by(mark, key) for key, _ in rows)


def last_stamp(work: Work, queue: str) -> bytes:
    """The version of the last message that has arrived in the queue, or a later one. Snapshot."""
    bell, alarm = work.tr.get_many([work.keys.bell(queue), work.keys.alarm], snapshot=True)
    return max(bell or b"", alarm or b"") or parts.NO_LAST


def purge_part(work: Work, limit: int, queue: str, last: bytes, cursor: bytes = b"") -> tuple[int, bytes]:
    """Look at up to ``limit`` ready and delayed messages, and delete those that were there by ``last``.

    Returns how many, and where to continue; b"" at the end, which also finishes a deletion up to ``last``.
    """
    ranges = [range_of(prefix) for prefix in (work.keys.delayed(queue), work.keys.keyed(queue), work.keys.ready(queue))]
    purged, following = parts.rows_by(work, ranges, cursor, limit, last)
    for row in purged:  # chunks first: SQLite then frees whole pages, and writes few of them to a full disk
        delete(work, Message(queue, *row))
    take_out(work, queue, purged)
    if not following:
        deleting = work.tr.get(work.keys.deleting(queue))
        if deleting is not None and deleting <= last:
            if _has_held(work, queue):
                to_be_purged(work, queue, deleting[: parts.VERSION_BYTES], HELD)
            else:
                work.tr.clear(work.keys.deleting(queue))
    return len(purged), following


# -- exchanges and bindings --------------------------------------------------------------------------------------------


def declare_exchange(work: Work, exchange: Exchange) -> None:
    """Create the exchange. Raises ``NotEquivalent`` if it exists and routes differently, and ``InvalidArgument``."""
    check_exchange(exchange)
    key = work.keys.exchange(exchange.name)
    stored = work.tr.get(key)
    existing = PREDECLARED.get(exchange.name) if stored is None else Exchange.decode(exchange.name, stored)
    if existing is None:
        work.tr.set(key, exchange.encode())
        _change(work, exchange.name)
    elif existing.type != exchange.type:
        raise NotEquivalent(
            exchange=exchange.name,
            declared_type=existing.type,
            type=exchange.type,
            fix="Delete the exchange first, or use its type",
        )
    elif existing.alternate != exchange.alternate:
        raise NotEquivalent(
            exchange=exchange.name,
            declared_alternate=existing.alternate,
            alternate=exchange.alternate,
            fix="Delete the exchange first, or use its alternate-exchange",
        )


def delete_exchange(work: Work, name: str, *, if_unused: bool = False) -> bool:
    """Delete an exchange and its bindings; False if refused. The queues stay."""
    bindings = work.keys.bindings(name)
    if if_unused and work.tr.get_range(*bindings, limit=1):
        return False
    for (_exchange, queue, routing_key), _ in work.keys.read(work.tr.get_range(*bindings), str, str, str):
        _clear_binding(work, queue, name, routing_key)
    work.tr.clear(work.keys.exchange(name))
    _change(work, name)
    return True


def bind(work: Work, queue: str, exchange: str, routing_key: str) -> None:
    """Bind a queue to a named exchange; the default exchange reaches every queue by its name anyway."""
    if not exchange:
        return
    if work.tr.get(work.keys.exchange(exchange)) is None and exchange not in PREDECLARED:
        raise ExchangeNotFound(exchange=exchange, fix="Declare it before binding to it")
    key = work.keys.binding(exchange, queue, routing_key)
    if work.tr.get(key) is None:
        work.tr.set(key, b"")
        work.tr.set(work.keys.bound(queue, exchange, routing_key), b"")
        _change(work, exchange)


def unbind(work: Work, queue: str, exchange: str, routing_key: str) -> None:
    if work.tr.get(work.keys.binding(exchange, queue, routing_key)) is not None:
        _clear_binding(work, queue, exchange, routing_key)


def _clear_binding(work: Work, queue: str, exchange: str, routing_key: str) -> None:
    """Clear a binding that the caller has read as a conflict."""
    work.tr.clear(work.keys.binding(exchange, queue, routing_key))
    work.tr.clear(work.keys.bound(queue, exchange, routing_key))
    _change(work, exchange)


def _change(work: Work, exchange: str) -> None:
    work.tr.set_versionstamped_value(work.keys.epoch(exchange))


# -- queues that vanish ------------------------------------------------------------------------------------------------


def touch(work: Work, queue: str) -> None:
    """Note that a queue with ``x-expires`` was used."""
    work.tr.set_versionstamped_value(work.keys.expiring(queue))


def expiring(work: Work) -> list[tuple[str, bytes, int]]:
    """Queues with ``x-expires`` and no consumer: name, last use, allowed idle time in milliseconds.

    A queue whose declaration can't be read is left out: it is unknown whether it may be deleted. So is one that has no
    ``x-expires`` any more.
    """
    consumers = work.keys.read(work.tr.get_range(*work.keys.all_consumers, snapshot=True), str, bytes, str)
    used = {queue for (queue, _session, tag), _ in consumers if count_consumers([tag])}
    rows = work.keys.read(work.tr.get_range(*work.keys.all_expiring, snapshot=True), str)
    idle = [(queue, last_use) for (queue,), last_use in rows if queue not in used]
    declared = work.tr.get_many([work.keys.queue(queue) for queue, _ in idle], snapshot=True) if idle else []
    found = [(*row, _expires_ms(row[0], value)) for row, value in zip(idle, declared, strict=True)]
    return [(queue, last_use, expires_ms) for queue, last_use, expires_ms in found if expires_ms is not None]


def limited_queues(work: Work) -> list[str]:
    """Queues with a maximum of messages or bytes."""
    return _declared_with(work, "x-max-length", "x-max-length-bytes")


def ttl_queues(work: Work) -> list[str]:
    """Queues whose messages have a time to live, or are dead-lettered on expiry."""
    return _declared_with(work, "x-message-ttl", "x-dead-letter-exchange")


def _declared_with(work: Work, *arguments: str) -> list[str]:
    """Queues with one of these arguments."""
    rows = work.keys.read(work.tr.get_range(*work.keys.all_queues, snapshot=True), str)
    declared = [QueueDeclaration.if_readable(name, value) for (name,), value in rows]
    return [each.name for each in declared if each is not None and not each.arguments.keys().isdisjoint(arguments)]


def _expires_ms(queue: str, value: bytes | None) -> int | None:
    """The allowed idle time; 0 if the queue is no longer declared: clear its record at once.

    None if the declaration can't be read, or has no ``x-expires`` any more.
    """
    if value is None:
        return 0
    declaration = QueueDeclaration.if_readable(queue, value)
    return None if declaration is None else declaration.expires_ms


def expire(work: Work, queue: str, last_use: bytes) -> bytes | None:
    """Delete the queue, like :func:`delete_queue`, if it is still unused. Conflicts with every use until this commits.

    If it is already deleted, only its record is cleared: a process that did not know has noted a use after the
    deletion, and messages published to the name since then do not expire.
    """
    noted, declared = work.tr.get_many([work.keys.expiring(queue), work.keys.queue(queue)])
    if noted != last_use:
        return None
    if declared is None:
        work.tr.clear(work.keys.expiring(queue))
        return None
    return delete_queue(work, queue, if_unused=True)


def add_consumer(work: Work, session_id: SessionId, queue: str, tag: str, *, declared: bool = False) -> None:
    """Keep a queue that can vanish (``x-expires``, auto-delete) alive while this session consumes it.

    ``declared``: raise ``QueueNotFound`` if the queue is not. Raises ``SessionLost`` if the session was fenced.
    """
    session.require(work, session_id)
    if declared and work.tr.get(work.keys.queue(queue)) is None:
        raise QueueNotFound(queue=queue, fix="Declare it again.")
    own = work.keys.consumer(queue, session_id, tag)
    work.tr.add_read_conflict_key(own)  # its removal prevents a late commit whose answer was lost
    work.tr.set(own, b"")


def remove_consumer(work: Work, session_id: SessionId, queue: str, tag: str) -> bytes | None:
    """Remove a consumer, and an auto-delete queue whose last one it was. Returns what :func:`delete_queue` returns.

    An exclusive queue that is not auto-delete also waits for its connection. A consumer that its session's end has
    removed already deletes nothing: a new queue may have that name by now.
    """
    key = work.keys.consumer(queue, session_id, tag)
    stood, declared, own = work.tr.get_many([key, work.keys.queue(queue), work.keys.session(session_id)])
    if own is not None:  # else the session's end makes room, once its messages are released
        single.leave(work, queue, session_id, tag)
    work.tr.clear(key)
    declaration = QueueDeclaration.if_readable(queue, declared)
    if stood is None or declaration is None:
        return None
    if declaration.expires_ms is not None:
        touch(work, queue)
    if not (declaration.auto_delete or declaration.exclusive):
        return None
    left = _consumers(work, queue)
    if declaration.auto_delete:  # an exclusive queue's connection also counts if it has another session by now
        left = [(session, each) for session, each in left if count_consumers([each]) or session != session_id]
    return None if left else delete_queue(work, queue)


def consumer_tags(work: Work, queue: str, *, snapshot: bool = False) -> list[str]:
    """The tags of its consumers, and of the entries for an exclusive queue's connection."""
    return [tag for _session, tag in _consumers(work, queue, snapshot=snapshot)]


def _consumers(work: Work, queue: str, *, snapshot: bool = False) -> list[tuple[SessionId, str]]:
    rows = work.keys.read(work.tr.get_range(*work.keys.consumers(queue), snapshot=snapshot), str, bytes, str)
    return [(session_id, tag) for (_queue, session_id, tag), _ in rows]


def count_consumers(tags: Sequence[str]) -> int:
    """How many of the tags are those of consumers."""
    return sum(not tag.startswith(OWNER) for tag in tags)


def drop_consumers(work: Work, limit: int, session_id: SessionId) -> tuple[list[str], bool]:
    """Remove up to ``limit`` consumers of a fenced session, and the auto-delete and exclusive queues left without one.

    Returns these queues, whose messages are to be purged, and whether the session has further consumers.
    """
    vanished: list[tuple[str, bytes]] = []
    rows = work.keys.read(work.tr.get_range(*work.keys.all_consumers, snapshot=True), str, bytes, str)
    own = [(queue, tag) for (queue, owner, tag), _ in rows if owner == session_id]
    for queue, tag in own[:limit]:
        last = remove_consumer(work, session_id, queue, tag)
        if last is not None:
            vanished.append((queue, last))
    counts = [work.keys.count(queue, state) for queue, _ in vanished for state in ("ready", "delayed")]
    held = work.tr.get_many(counts, snapshot=True) if counts else []
    for number, (queue, last) in enumerate(vanished):
        if any(held[2 * number : 2 * number + 2]):
            to_be_purged(work, queue, last)
    return [queue for queue, _ in vanished], len(own) > limit


def _has_held(work: Work, queue: str) -> bool:
    return any(work.tr.get(work.keys.count(queue, "leased"), snapshot=True) or b"")


def to_be_purged(work: Work, queue: str, last: bytes, held: bytes = b"") -> None:
    """Note that messages of a deleted queue, those up to ``last``, are still to be purged.

    ``held``: :data:`HELD` if the others are gone.
    """
    if last != parts.NO_LAST:
        work.tr.set(work.keys.deleting(queue), last + held)


def queues_being_deleted(work: Work) -> list[str]:
    """Deleted queues that still have messages to be purged."""
    rows = work.tr.get_range(*work.keys.all_deleting, limit=1_000, snapshot=True)
    return [queue for (queue,), _ in work.keys.read(rows, str)]


def being_deleted(work: Work, queue: str) -> bytes | None:
    """The version up to which a deleted queue's messages are to be purged; None if none are."""
    return work.tr.get(work.keys.deleting(queue), snapshot=True)


# -- the rest ----------------------------------------------------------------------------------------------------------


def clear_if(work: Work, rows: Sequence[KeyValue]) -> int:
    """Clear the rows that still have these values. Returns how many."""
    values = work.tr.get_many([key for key, _ in rows])
    same = [key for (key, value), stored in zip(rows, values, strict=True) if stored == value]
    for key in same:
        work.tr.clear(key)
    return len(same)


def check_format(work: Work) -> None:
    """Raises ``FormatError`` if a newer version wrote the namespace; writes this version into a new one."""
    stored = work.tr.get(work.keys.format)
    if stored is None:
        work.tr.set(work.keys.format, b"%d" % FORMAT_VERSION)
    elif not stored.isdigit() or len(stored) > LONGEST_FORMAT or int(stored) > FORMAT_VERSION:
        raise FormatError(
            "the store was written by a newer celery-fdb",
            stored=stored[:LONGEST_FORMAT].decode(errors="replace"),
            supported=FORMAT_VERSION,
            fix="Upgrade celery-fdb in this process",
        )
