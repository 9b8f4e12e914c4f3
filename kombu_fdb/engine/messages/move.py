"""Move: messages from one queue, unchanged, to the end of another.

A message leaves its queue and enters the other in one transaction (ONE-PLACE). It keeps id, payload, key, priority, due
time, expiry, redeliveries and history of deaths, and the messages of one key and priority keep their order. A priority
above the target's ``x-max-priority`` counts as that maximum there, but in full in a later queue that allows it. In its
new queue it counts as published through the default exchange: a consumer that publishes it again does not send it to
the old queue. The capacity of a key is not checked. A target that grows beyond its maximum is trimmed by its own rule,
so callers check that first.
"""

from __future__ import annotations

from itertools import accumulate

from kombu_fdb.engine import parts
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.messages.message import forget, put_delayed, put_ready, rank_in, take_out
from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace.codec import Message, Record
from kombu_fdb.keyspace.layout import Keyspace, range_of, read_or, split_place
from kombu_fdb.model import NO_PRIORITY, DeliveryInfo, Rank
from kombu_fdb.store.protocol import KeyValue

MESSAGES_PER_TRANSACTION = 200
#: The bytes of all records; what else a message adds to a transaction is small.
MOST_BYTES = 2_000_000


def move(work: Work, source: str, target: str, limit: int, *, key: str | None = None) -> int:
    """Move up to ``limit`` messages, ready ones first, then delayed ones. Returns how many.

    ``key``: only ready ones of this key. Conflicts with a claim, or another move, of the same messages.
    """
    ready, delayed = _rows(work, source, limit, key)
    _put(work, source, target, ready, delayed)
    return len(ready) + len(delayed)


def move_some(
    work: Work, limit: int, which: tuple[str, str | None], target: str, by: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """Move up to ``limit`` messages. Returns how many, and where to continue; b"" at the end.

    ``which``: the queue, and a key or None. ``by``: a mark, and a cursor to start from. Messages that arrived after the
    mark stay.
    """
    (source, key), (last, cursor) = which, by
    if key is None:
        prefixes = (work.keys.delayed(source), work.keys.keyed(source), work.keys.ready(source))
        ranges = [range_of(prefix) for prefix in prefixes]
    else:
        ranges = [work.keys.all_items(source, key)]
    rows, following = parts.rows_by(work, ranges, cursor, limit, last)
    meant = [row for row in rows if _is_readable(work.keys, row[0])]
    moved = _light(meant)
    if len(moved) < len(meant):
        following = moved[-1][0] + b"\x00"
    delayed = work.keys.delayed(source)
    _put(
        work,
        source,
        target,
        [row for row in moved if not row[0].startswith(delayed)],
        [row for row in moved if row[0].startswith(delayed)],
    )
    return len(moved), following


def _put(work: Work, source: str, target: str, ready: list[KeyValue], delayed: list[KeyValue]) -> None:
    _take(work, source, ready + delayed)
    was_dead = source.endswith(DEAD_SUFFIX)
    stays_dead = was_dead and target.endswith(DEAD_SUFFIX)  # there a letter waits without its key and priority
    for name, value in ready:
        key, rank = split_place(work.keys.place(source, name))
        moved = _by_name(target, value)
        if was_dead and not stays_dead and isinstance(moved, Record):
            key = moved.key
        if not stays_dead:
            rank, moved = _ranked(work, target, rank, moved)
        put_ready(work, target, key, rank, moved)
    for name, value in delayed:
        due_ms, rank = work.keys.split_delayed(source, name)
        rank, moved = _ranked(work, target, rank, _by_name(target, value))
        put_delayed(work, target, rank, due_ms, moved)


def _take(work: Work, source: str, rows: list[KeyValue]) -> None:
    take_out(work, source, rows)
    for name, value in rows:
        forget(work, Message(source, name, value))


def _by_name(target: str, value: bytes) -> Record | bytes:
    record = read_or(None, Record.decode, value)
    return value if record is None else record._replace(delivery_info=DeliveryInfo("", target))


def _ranked(work: Work, target: str, rank: Rank, moved: Record | bytes) -> tuple[Rank, Record | bytes]:
    """The message's rank in its new queue, capped by the queue's maximum priority, and the message."""
    priority = (moved.priority if isinstance(moved, Record) else NO_PRIORITY) or work.keys.priority(rank)
    allowed = rank_in(work, target, priority)
    if not isinstance(moved, Record):
        return allowed, moved
    kept = NO_PRIORITY if allowed == work.keys.rank(priority) else priority
    return allowed, moved._replace(priority=kept)


def _rows(work: Work, source: str, limit: int, key: str | None) -> tuple[list[KeyValue], list[KeyValue]]:
    if key is not None:
        rows = work.tr.get_range(*work.keys.all_items(source, key), limit=limit, snapshot=True)
        return _light([row for row in rows if _is_readable(work.keys, row[0])]), []
    prefixes = (work.keys.ready(source), work.keys.keyed(source), work.keys.delayed(source))
    found = work.tr.get_ranges([(*range_of(each), limit) for each in prefixes], snapshot=True)
    unkeyed, keyed, delayed = ([row for row in rows if _is_readable(work.keys, row[0])] for rows in found)
    ready = _light((unkeyed + keyed)[:limit])
    return ready, [] if ready else _light(delayed)


def _is_readable(keys: Keyspace, key: bytes) -> bool:
    """Whether the place can be read; a message at an unreadable place stays there."""
    return read_or(None, keys.queue_of, key) is not None


def _light(rows: list[KeyValue]) -> list[KeyValue]:
    """As many rows as fit into one transaction, and at least one: a dead letter's history may be long."""
    sizes = accumulate(len(value) for _, value in rows)
    return [row for number, (row, size) in enumerate(zip(rows, sizes, strict=True)) if not number or size <= MOST_BYTES]
