"""Overflow: what a queue with ``x-max-length`` does when it is full (https://www.rabbitmq.com/docs/maxlength).

``x-overflow`` says what gives way, before the new messages are stored and in the same transaction:

* ``drop-head`` (the default): the oldest of the least urgent ready messages, dead-lettered as ``maxlen`` if the queue
  has a dead-letter exchange, else gone;
* ``reject-publish``: the publish, with ``CapacityExceeded``; nothing is stored;
* ``reject-publish-dlx``: the new message, which goes to the dead-letter exchange instead.

The counter is read at snapshot, so concurrent publishers may overshoot by as many messages as they are, as RabbitMQ's
do. A queue without the argument pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kombu_fdb.errors import CapacityExceeded, FormatError
from kombu_fdb.keyspace.codec import decode_record
from kombu_fdb.keyspace.layout import split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.queue.deadletter import Graves, bury, drop
from kombu_fdb.queue.tally import READY, Tally
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["make_room"]

DROP_HEAD = "drop-head"
REJECT = "reject-publish"
REJECT_DLX = "reject-publish-dlx"


def make_room(tr: Transaction, graves: Graves, tally: Tally, coming: Mapping[str, int], now_ms: int) -> Collection[str]:
    """Room for ``coming`` messages by queue. Returns the queues whose new messages are to be dead-lettered instead.

    All is read before anything gives way. A dead letter may go to another of the queues, and a range that holds a
    versionstamped key of the same transaction can't be read.
    """
    refusing = []
    leaving: list[tuple[str, KeyValue]] = []
    for queue, number in coming.items():
        size, excess = _excess(tr, graves, queue, number)
        if excess <= 0:
            continue
        mode = graves.routing.overflow(tr, queue) or DROP_HEAD
        if mode == REJECT:
            raise CapacityExceeded(queue=queue, current_size=size, capacity=size + number - excess)
        if mode == REJECT_DLX:
            refusing.append(queue)
        else:
            leaving += [(queue, row) for row in _oldest(tr, graves, queue, min(excess, size))]
    for queue, (key, value) in leaving:
        _give_way(tr, graves, tally, queue, key, value, now_ms)
    return refusing


def _excess(tr: Transaction, graves: Graves, queue: str, coming: int) -> tuple[int, int]:
    """How many messages are ready, and how many too many there will be; zeros for a queue without a maximum."""
    capacity = graves.routing.max_length(tr, queue)
    if capacity is None:
        return 0, 0
    stored = tr.get(graves.keys.count(queue, READY), snapshot=True)
    size = int.from_bytes(stored or b"", "little", signed=True)
    return size, size + coming - capacity


def _oldest(tr: Transaction, graves: Graves, queue: str, number: int) -> list[KeyValue]:
    """The first messages of the last rank, of those without a key if there are any, and so on."""
    found: list[KeyValue] = []
    for prefix in (graves.keys.ready(queue), graves.keys.keyed(queue)):
        begin, end = range_of(prefix)
        while len(found) < number and (last := tr.get_range(begin, end, limit=1, reverse=True, snapshot=True)):
            place = graves.keys.place(queue, last[0][0])
            key, rank = split_place(place)
            begin_of_rank = graves.keys.items(queue, key, rank)
            found += tr.get_range(*range_of(begin_of_rank), limit=number - len(found), snapshot=True)
            end = begin_of_rank
    return found


def _give_way(tr: Transaction, graves: Graves, tally: Tally, queue: str, key: bytes, value: bytes, now_ms: int) -> None:
    tr.add_read_conflict_key(key)
    tr.clear(key)
    tally.change(queue, READY, -1)
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
