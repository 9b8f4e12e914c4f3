"""Control: declare, bind, purge and delete; queues that vanish when nobody uses them; the store's format.

Every change of an exchange or its bindings sets the exchange's epoch, by which all processes notice
(``routing/tables.py``). A queue with ``x-expires`` or auto-delete stays while ``("consumer", queue, session, tag)``
exists for it; these records go with their session. Its idle time is measured like a session's silence: an observer sees
``("expiring", queue)`` unchanged for long enough by its own clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kombu_fdb.engine.messages.deadletter import drop
from kombu_fdb.engine.metrics import totals
from kombu_fdb.engine.scheduling import single, turns
from kombu_fdb.engine.stored.tally import DELAYED, LEASED, Tally
from kombu_fdb.engine.stored.walking import rows_from
from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES
from kombu_fdb.engine.topology import arguments
from kombu_fdb.errors import ExchangeNotFound, FormatError, NotEquivalent
from kombu_fdb.keyspace.codec import Record, decode_control, encode_control, outline_of, size_of
from kombu_fdb.keyspace.layout import FORMAT_VERSION, Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.routing.tables import PREDECLARED, Exchange, QueueDeclaration, declared_as
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = [
    "add_consumer",
    "bind",
    "check_format",
    "clear_if",
    "declare_exchange",
    "declare_queue",
    "delete_exchange",
    "delete_queue",
    "drop_consumers",
    "expire",
    "expiring",
    "last_stamp",
    "limited",
    "purge_part",
    "remove_consumer",
    "touch",
    "unbind",
]

MESSAGES_PER_PURGE = 500
#: The first bytes of a stamp: the version of the commit.
VERSION_BYTES = 10
#: The bound of a purge of a queue whose bell never rang: no bound.
NO_LAST = b"\xff" * VERSION_BYTES
#: Digits of a format version.
LONGEST_FORMAT = 10


# -- queues ------------------------------------------------------------------------------------------------------------


def declare_queue(tr: Transaction, keys: Keyspace, declaration: QueueDeclaration) -> None:
    """Create the queue, or update its arguments; declaring it again unchanged writes nothing but its last use.

    Raises ``NotEquivalent`` for an argument with a senseless value.
    """
    arguments.check(declaration)
    key, value = keys.queue(declaration.name), declaration.encode()
    stored = tr.get(key)
    if stored != value:
        tr.set(key, value)
        _tell_claims(tr, keys, declaration, stored)
    if "x-expires" in declaration.arguments:
        touch(tr, keys, declaration.name)


def _tell_claims(tr: Transaction, keys: Keyspace, declaration: QueueDeclaration, stored: bytes | None) -> None:
    """Change in the queue's control what the declaration changes; the rest of it stays as somebody set it."""
    before = declared_as(declaration.name, stored)
    old, new = (
        arguments.for_claims({} if before is None else before.arguments),
        arguments.for_claims(declaration.arguments),
    )
    changes = {name: value for name, value in new.items() if value != old[name]}
    if not changes:
        return
    key = keys.control(declaration.name)
    try:
        control = decode_control(tr.get(key))
    except FormatError:  # a newer version's, maybe: it is not ours to overwrite, and the queue is paused
        return
    tr.set(key, encode_control(dataclasses.replace(control, **changes)))
    if "single_active" in changes:
        single.vacate(tr, keys, declaration.name)


def delete_queue(
    tr: Transaction, keys: Keyspace, queue: str, *, if_unused: bool, if_empty: bool, if_idle: bool = False
) -> bool:
    """Remove the declaration and the bindings; the caller purges the messages. False if a condition forbids it."""
    # Serializable: a claim that commits meanwhile makes this transaction start again.
    if if_idle and any(tr.get(keys.count(queue, LEASED)) or b""):
        return False
    if if_unused and tr.get_range(*keys.consumers(queue), limit=1):
        return False
    if if_empty and any(tr.get_range(*range_of(p), limit=1) for p in (keys.ready(queue), keys.keyed(queue))):
        return False
    tr.clear(keys.queue(queue))
    tr.clear(keys.expiring(queue))
    tr.clear(keys.bell(queue))
    tr.clear_range(*keys.consumers(queue))
    # A message that comes with a key meanwhile must not lose its door: then this starts again.
    tr.add_read_conflict_range(*range_of(keys.keyed(queue)))
    for whole in keys.fairness(queue):
        tr.clear_range(*whole)
    for key in (keys.fair(queue), keys.control(queue), keys.single(queue), keys.relimit(queue)):
        tr.clear(key)
    totals.forget(tr, keys, queue)
    _unbind_queue(tr, keys, queue)
    return True


def _unbind_queue(tr: Transaction, keys: Keyspace, queue: str) -> None:
    rows = tr.get_range(*keys.bindings_of(queue), snapshot=True)
    for (_queue, exchange, routing_key), _ in keys.read(rows, str, str, str):
        unbind(tr, keys, queue, exchange, routing_key)


def last_stamp(tr: Transaction, keys: Keyspace, queue: str) -> bytes:
    """The version of the last message that has come to the queue by now, or of a later one. Snapshot."""
    bell, alarm = tr.get_many([keys.bell(queue), keys.alarm], snapshot=True)
    return max(bell or b"", alarm or b"") or NO_LAST


def purge_part(
    tr: Transaction,
    keys: Keyspace,
    tally: Tally,
    queue: str,
    last: bytes,
    cursor: bytes,
    limit: int = MESSAGES_PER_PURGE,
) -> tuple[int, bytes]:
    """Delete those of up to ``limit`` ready and delayed messages that had come by ``last``.

    Returns how many, and where to go on; b"" at the end. What came later is left, and skipped as far as it stands
    together: so this comes to its end, however fast that is.
    """
    ranges = [range_of(prefix) for prefix in (keys.delayed(queue), keys.keyed(queue), keys.ready(queue))]
    rows, following = rows_from(tr, ranges, cursor, limit)
    purged = [row for row in rows if _came_by(last, row[0])]
    for key, value in purged:
        _purge(tr, keys, tally, queue, key, value)
    turns.leave_places(tr, keys, queue, [key for key, _ in purged])
    if following and not _came_by(last, rows[-1][0]):
        following = rows[-1][0][:-STAMP_BYTES] + b"\xff" * (STAMP_BYTES + 1)
    return len(purged), following


def _came_by(last: bytes, key: bytes) -> bool:
    return key[-STAMP_BYTES:][:VERSION_BYTES] <= last


def _purge(tr: Transaction, keys: Keyspace, tally: Tally, queue: str, key: bytes, value: bytes) -> None:
    tr.add_read_conflict_key(key)
    tr.clear(key)
    _drop(tr, keys, key, value)
    if key.startswith(keys.delayed(queue)):
        tally.change(queue, DELAYED, -1)
        return
    tally.unready(queue, size_of(value))
    if key.startswith(keys.keyed(queue)):
        tally.went(queue, keys.key_at(queue, key))


def _drop(tr: Transaction, keys: Keyspace, key: bytes, value: bytes) -> None:
    try:
        record: Record = outline_of(value)
    except FormatError:
        return
    drop(tr, keys, record, key)


# -- exchanges and bindings --------------------------------------------------------------------------------------------


def declare_exchange(tr: Transaction, keys: Keyspace, exchange: Exchange) -> None:
    """Create it. Raises ``NotEquivalent`` if it exists with another type."""
    key = keys.exchange(exchange.name)
    stored = tr.get(key)
    existing = PREDECLARED.get(exchange.name) if stored is None else Exchange.decode(exchange.name, stored)
    if existing is None:
        tr.set(key, exchange.encode())
        _change(tr, keys, exchange.name)
    elif existing.type != exchange.type:
        raise NotEquivalent(
            exchange=exchange.name,
            declared_type=existing.type,
            type=exchange.type,
            fix="Delete the exchange first, or use its type",
        )


def delete_exchange(tr: Transaction, keys: Keyspace, name: str, *, if_unused: bool) -> bool:
    """Remove it and its bindings."""
    bindings = keys.bindings(name)
    if if_unused and tr.get_range(*bindings, limit=1):
        return False
    for (_exchange, queue, routing_key), _ in keys.read(tr.get_range(*bindings), str, str, str):
        unbind(tr, keys, queue, name, routing_key)
    tr.clear(keys.exchange(name))
    _change(tr, keys, name)
    return True


def bind(tr: Transaction, keys: Keyspace, queue: str, exchange: str, routing_key: str) -> None:
    """Bind a queue to a named exchange; the default exchange reaches every queue by its name anyway."""
    if not exchange:
        return
    if tr.get(keys.exchange(exchange)) is None and exchange not in PREDECLARED:
        raise ExchangeNotFound(exchange=exchange, fix="Declare it before binding to it")
    key = keys.binding(exchange, queue, routing_key)
    if tr.get(key) is None:
        tr.set(key, b"")
        tr.set(keys.bound(queue, exchange, routing_key), b"")
        _change(tr, keys, exchange)


def unbind(tr: Transaction, keys: Keyspace, queue: str, exchange: str, routing_key: str) -> None:
    key = keys.binding(exchange, queue, routing_key)
    if tr.get(key) is None:
        return
    tr.clear(key)
    tr.clear(keys.bound(queue, exchange, routing_key))
    _change(tr, keys, exchange)


def _change(tr: Transaction, keys: Keyspace, exchange: str) -> None:
    tr.set_versionstamped_value(keys.epoch(exchange))


# -- queues that vanish ------------------------------------------------------------------------------------------------


def touch(tr: Transaction, keys: Keyspace, queue: str) -> None:
    """Note a use of a queue with ``x-expires``."""
    tr.set_versionstamped_value(keys.expiring(queue))


def expiring(tr: Transaction, keys: Keyspace) -> list[tuple[str, bytes, int]]:
    """Queues with ``x-expires`` and no consumer: name, last use, allowed idle time in milliseconds.

    One whose declaration can't be read is not among them: nobody knows whether it may go.
    """
    consumers = keys.read(tr.get_range(*keys.all_consumers, snapshot=True), str, bytes, str)
    used = {queue for (queue, _session, _tag), _ in consumers}
    rows = keys.read(tr.get_range(*keys.all_expiring, snapshot=True), str)
    idle = [(queue, last_use) for (queue,), last_use in rows if queue not in used]
    declared = tr.get_many([keys.queue(queue) for queue, _ in idle], snapshot=True) if idle else []
    found = [(*row, _expires_ms(row[0], value)) for row, value in zip(idle, declared, strict=True)]
    return [(queue, last_use, expires_ms) for queue, last_use, expires_ms in found if expires_ms is not None]


def limited(tr: Transaction, keys: Keyspace) -> list[str]:
    """Queues with a maximum of messages or bytes."""
    rows = keys.read(tr.get_range(*keys.all_queues, snapshot=True), str)
    declared = [declared_as(name, value) for (name,), value in rows]
    maxima = {"x-max-length", "x-max-length-bytes"}
    return [each.name for each in declared if each is not None and maxima & each.arguments.keys()]


def _expires_ms(queue: str, value: bytes | None) -> int | None:
    """0 for a queue that is not declared any more: its record goes at once. None if it can't be read."""
    declaration = declared_as(queue, value)
    if declaration is None:
        return 0 if value is None else None
    return int(declaration.arguments.get("x-expires") or 0)


def expire(tr: Transaction, keys: Keyspace, queue: str, last_use: bytes) -> bool:
    """Delete the queue if it is still unused; conflicts with every use until this commits."""
    if tr.get(keys.expiring(queue)) != last_use:
        return False
    return delete_queue(tr, keys, queue, if_unused=True, if_empty=False)


def add_consumer(tr: Transaction, keys: Keyspace, session_id: bytes, queue: str, tag: str) -> None:
    tr.set(keys.consumer(queue, session_id, tag), b"")


def remove_consumer(tr: Transaction, keys: Keyspace, session_id: bytes, queue: str, tag: str) -> bool:
    """Whether an auto-delete queue has lost its last consumer by this."""
    single.leave(tr, keys, queue, session_id, tag)
    tr.clear(keys.consumer(queue, session_id, tag))
    declaration = declared_as(queue, tr.get(keys.queue(queue)))
    if declaration is None:
        return False
    if "x-expires" in declaration.arguments:
        touch(tr, keys, queue)
    vanishes = declaration.auto_delete or declaration.exclusive
    return vanishes and not tr.get_range(*keys.consumers(queue), limit=1)


def drop_consumers(tr: Transaction, keys: Keyspace, session_id: bytes) -> list[str]:
    """Remove all consumers of a session that is gone. Returns the auto-delete queues left without one."""
    orphans = []
    rows = keys.read(tr.get_range(*keys.all_consumers, snapshot=True), str, bytes, str)
    for (queue, session, tag), _ in rows:
        if session == session_id and remove_consumer(tr, keys, session_id, queue, tag):
            orphans.append(queue)
    return orphans


# -- the rest ----------------------------------------------------------------------------------------------------------


def clear_if(tr: Transaction, rows: Sequence[KeyValue]) -> int:
    """Clear those rows that still have these values. Returns how many."""
    values = tr.get_many([key for key, _ in rows])
    same = [key for (key, value), stored in zip(rows, values, strict=True) if stored == value]
    for key in same:
        tr.clear(key)
    return len(same)


def check_format(tr: Transaction, keys: Keyspace) -> None:
    """Raises ``FormatError`` if the namespace was written by a newer version; marks a new one as ours."""
    stored = tr.get(keys.format)
    if stored is None:
        tr.set(keys.format, b"%d" % FORMAT_VERSION)
    elif not stored.isdigit() or len(stored) > LONGEST_FORMAT or int(stored) > FORMAT_VERSION:
        raise FormatError(
            "the store was written by a newer celery-fdb",
            stored=stored[:LONGEST_FORMAT].decode(errors="replace"),
            supported=FORMAT_VERSION,
            fix="Upgrade celery-fdb in this process",
        )
