"""Overflow: what a full queue does (https://www.rabbitmq.com/docs/maxlength).

``x-max-length`` bounds the ready messages, ``x-max-length-bytes`` the bytes of their payloads: body, headers and
properties as they are stored. With both, the queue is full when either says so.

``x-overflow`` says what gives way, before the new messages are stored and in the same transaction:

* ``drop-head`` (the default): the oldest of the least urgent ready messages, dead-lettered as ``maxlen`` if the queue
  has a dead-letter exchange, else gone;
* ``reject-publish``: the publish, with ``CapacityExceeded``; nothing is stored;
* ``reject-publish-dlx``: the new message, which goes to the dead-letter exchange instead.

The counter is read at snapshot, so concurrent publishers may overshoot by as many messages as they are, as RabbitMQ's
do. What comes in one transaction stays together: with ``drop-head`` it is stored even if it is more than the queue may
hold, and gives way to the next. A queue that has become far too long by a new argument shrinks by :data:`MOST_LEAVING`
at each publish. Delayed messages need no room, and enter a full queue when they are due, as do dead letters; the duties
of any consumer process make room for those afterwards (:func:`trim`). A queue without these arguments pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from kombu_fdb.errors import CapacityExceeded, FormatError
from kombu_fdb.keyspace.codec import decode_amount, decode_record, size_of
from kombu_fdb.keyspace.layout import split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.queue.deadletter import Graves, bury, drop
from kombu_fdb.queue.tally import READY, Tally
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["make_room", "trim"]

DROP_HEAD = "drop-head"
REJECT = "reject-publish"
REJECT_DLX = "reject-publish-dlx"

#: Messages that give way in one transaction at most, besides one for each that comes.
MOST_LEAVING = 100


class Load(NamedTuple):
    """So many messages with so many bytes of payload."""

    messages: int = 0
    size: int = 0

    def grown(self, size: int) -> Load:
        """With one more message, of ``size`` bytes."""
        return Load(self.messages + 1, self.size + size)


def make_room(
    tr: Transaction, graves: Graves, tally: Tally, coming: Mapping[str, tuple[int, int]], now_ms: int
) -> Collection[str]:
    """Room for so many messages and bytes ``coming`` to each queue.

    Returns the queues whose new messages are to be dead-lettered instead.

    All is read before anything gives way. A dead letter may go to another of the queues, and a range that holds a
    versionstamped key of the same transaction can't be read. Raises ``CapacityExceeded``.
    """
    refusing = []
    leaving: list[tuple[str, KeyValue]] = []
    for queue, new in coming.items():
        full = _full(tr, graves, queue, Load(*new))
        if full is None:
            continue
        mode = graves.routing.overflow(tr, queue) or DROP_HEAD
        if mode == REJECT:
            raise _refusal(queue, full)
        if mode == REJECT_DLX:
            refusing.append(queue)
        else:
            rows = _oldest(tr, graves, queue, full, most_rows=new[0] + MOST_LEAVING)
            leaving += [(queue, row) for row in rows]
    for queue, (key, value) in leaving:
        _give_way(tr, graves, tally, queue, key, value, now_ms)
    return refusing


def trim(tr: Transaction, graves: Graves, tally: Tally, queue: str, now_ms: int) -> int:
    """Make a queue fit that grew by other ways than publishing: dead letters, what came due, what was handed back.

    By parts, and only where the oldest give way: no publisher is there to be told. Returns how many gave way.
    """
    full = _full(tr, graves, queue, Load())
    if full is None or (graves.routing.overflow(tr, queue) or DROP_HEAD) != DROP_HEAD:
        return 0
    rows = _oldest(tr, graves, queue, full, most_rows=MOST_LEAVING)
    for key, value in rows:
        _give_way(tr, graves, tally, queue, key, value, now_ms)
    return len(rows)


class _Full(NamedTuple):
    """A queue that has less room than is needed: what is ready, what may be, and how much too much there will be."""

    ready: Load
    most: tuple[int | None, int | None]
    excess: Load


def _full(tr: Transaction, graves: Graves, queue: str, new: Load) -> _Full | None:
    """None if there is room for ``new``, or no limit."""
    most = graves.routing.max_load(tr, queue)
    if most == (None, None):
        return None
    ready = Load(*decode_amount(tr.get(graves.keys.count(queue, READY), snapshot=True)))
    excess = Load(*(_excess(*each) for each in zip(ready, new, most, strict=True)))
    return None if excess == Load() else _Full(ready, most, excess)


def _excess(ready: int, new: int, most: int | None) -> int:
    """How much too much there will be."""
    return 0 if most is None else max(0, ready + new - most)


def _refusal(queue: str, full: _Full) -> CapacityExceeded:
    fix = "Nothing was stored: publish it again later, or raise the queue's {}."
    if full.excess.messages:
        size, most, fix = full.ready.messages, full.most[0], fix.format("x-max-length")
        return CapacityExceeded(queue=queue, current_size=size, capacity=most, fix=fix)
    size, most, fix = full.ready.size, full.most[1], fix.format("x-max-length-bytes")
    return CapacityExceeded(queue=queue, unit="bytes", current_size=size, capacity=most, fix=fix)


def _oldest(tr: Transaction, graves: Graves, queue: str, full: _Full, *, most_rows: int) -> list[KeyValue]:
    """The messages that give way, at most ``most_rows``."""
    ready, _most, excess = full
    found: list[KeyValue] = []
    freed = Load()
    likely = max(excess.messages, -(-excess.size * ready.messages // max(ready.size, 1)))
    for row in _from_head(tr, graves, queue, max(1, min(likely, most_rows))):
        found.append(row)
        freed = freed.grown(size_of(row[1]))
        enough = freed.messages >= excess.messages and freed.size >= excess.size
        if enough or freed.messages == most_rows:
            break
    return found


def _from_head(tr: Transaction, graves: Graves, queue: str, part: int) -> Iterator[KeyValue]:
    """The last rank's messages from the first on, of those without a key if there are any, then the rank before."""
    for prefix in (graves.keys.ready(queue), graves.keys.keyed(queue)):
        begin, end = range_of(prefix)
        while last := tr.get_range(begin, end, limit=1, reverse=True, snapshot=True):
            key, rank = split_place(graves.keys.place(queue, last[0][0]))
            end = graves.keys.items(queue, key, rank)
            yield from _in_parts(tr, *range_of(end), part)


def _in_parts(tr: Transaction, begin: bytes, end: bytes, part: int) -> Iterator[KeyValue]:
    while rows := tr.get_range(begin, end, limit=part, snapshot=True):
        yield from rows
        if len(rows) < part:
            return
        begin = rows[-1][0] + b"\x00"


def _give_way(tr: Transaction, graves: Graves, tally: Tally, queue: str, key: bytes, value: bytes, now_ms: int) -> None:
    tr.add_read_conflict_key(key)
    tr.clear(key)
    tally.unready(queue, size_of(value))
    fair_key, _rank = split_place(graves.keys.place(queue, key))
    if fair_key:
        tally.went(queue, fair_key)
    if graves.routing.dead_letter_exchange(tr, queue) is not None:
        bury(tr, graves, tally, queue, value, "maxlen", now_ms, place=key)
        return
    try:
        drop(tr, graves.keys, decode_record(value), key)
    except FormatError:  # no payload to be found
        return
