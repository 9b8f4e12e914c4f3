"""Overflow: what a full queue does (https://www.rabbitmq.com/docs/maxlength).

``x-max-length`` bounds the ready messages, ``x-max-length-bytes`` the bytes of their payloads: body, headers and
properties as they are stored. With both, the queue is full when either says so.

``x-overflow`` decides what gives way:

* ``drop-head`` (the default): the oldest of the least urgent messages of the key with the most ready messages. It is
  dead-lettered as ``maxlen`` if the queue has a dead-letter exchange, else deleted. Messages without a key count as one
  more key, so a queue without keys loses the oldest of its least urgent messages. :data:`MOST_KEYS` keys are compared;
  among these, no key gives way while another has more messages;
* ``reject-publish``: the publish, which fails with ``CapacityExceeded``; nothing is stored;
* ``reject-publish-dlx``: the new message, which goes to the dead-letter exchange instead. A transaction stores those of
  its messages that fit, in their order.

Model of ``drop-head``. A publish to a full queue stores its messages, without a conflict, and *then* lets the oldest
give way, in a transaction of its own (:func:`shed`). Concurrent publishers compete for the same oldest messages; one of
them removes the whole excess, and the others find that it is done. After :data:`ATTEMPTS` lost races the publisher
gives up: the next publish, or a duty of a consumer process (:func:`trim`), does it instead. So the head of a queue,
however large, never makes a publish fail or wait. A queue exceeds its maximum by at most as many messages as were
published at the same time, or by a process that died in between.

The counter is read at snapshot, so with ``reject-publish``, too, concurrent publishers may together exceed it by what
they publish, as RabbitMQ's do. The messages of one transaction stay together: with ``drop-head`` they are stored even
if they are more than the queue may hold, and give way to the next. If a new argument leaves a queue far too long, each
publish removes up to :data:`MOST_LEAVING`. Delayed messages do not count. They enter a full queue when they are due,
and so do dead letters; the duties make room for those afterwards. A queue without these arguments pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kombu_fdb.engine.messages.bury import bury
from kombu_fdb.engine.messages.message import delete, take_out
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import CapacityExceeded, FormatError
from kombu_fdb.keyspace.codec import Message, decode_amount, decode_count, size_of
from kombu_fdb.keyspace.layout import STAMP_BYTES, Range, range_of, split_place
from kombu_fdb.store.protocol import KeyValue

#: The values of ``x-overflow``.
MODES = DROP_HEAD, REJECT, REJECT_DLX = ("drop-head", "reject-publish", "reject-publish-dlx")
#: How many messages give way in one transaction, in addition to one for each new message.
MOST_LEAVING = 100
#: How many keys' backlogs are compared, in their order from the key of the newest message on, so that the tenant that
#: fills a queue is among them; and how many of these, largest first, have their messages read together.
MOST_KEYS = 1_000
CANDIDATES = 16
#: How often a publisher tries to shed the oldest.
ATTEMPTS = 3


class Load(NamedTuple):
    """A number of messages, and the bytes of their payloads. ``key``: that of the last of them."""

    messages: int = 0
    size: int = 0
    key: str = ""

    def grown(self, size: int, key: str = "") -> Load:
        """The load plus a message of ``size`` bytes."""
        return Load(self.messages + 1, self.size + size, key)


NOTHING = Load()
#: The ``max_load`` of a queue without limits.
NO_LIMIT = (None, None)


def judge(work: Work, coming: Mapping[str, Load]) -> tuple[dict[str, Load], Mapping[str, Load]]:
    """Decide on the messages ``coming`` to each queue. Raises ``CapacityExceeded``.

    Returns the queues whose new messages are to be dead-lettered unless they fit (:func:`fits`), with what is ready
    there, and those to be shed.
    """
    refusing = {}
    overfull = {}
    for (queue, new), ready in zip(coming.items(), _ready(work, coming), strict=True):
        excess = _excess(work, queue, ready, new)
        if excess == NOTHING:
            continue
        mode = work.routing.queue(work.tr, queue).overflow
        if mode == REJECT:
            raise _refusal(work, queue, ready, excess)
        if mode == REJECT_DLX:
            refusing[queue] = ready
        else:
            overfull[queue] = new
    return refusing, overfull


def fits(work: Work, queue: str, refusing: dict[str, Load], size: int) -> bool:
    """Whether one more message of ``size`` bytes fits into the queue. If so, it counts when the next one is judged."""
    grown = refusing[queue].grown(size)
    if _excess(work, queue, grown, NOTHING) != NOTHING:
        return False
    refusing[queue] = grown
    return True


def shed(work: Work, queue: str, own: Load) -> int:
    """Let the oldest give way to ``own``, the publisher's new messages, which do not give way to each other."""
    return _trim(work, queue, own, own.messages + MOST_LEAVING)


def trim(work: Work, limit: int, queue: str) -> int:
    """Let the oldest messages give way in a queue over its ``drop-head`` maximum, in parts. Returns how many did."""
    return _trim(work, queue, Load(), limit)


def _trim(work: Work, queue: str, least: Load, most_rows: int) -> int:
    (ready,) = _ready(work, [queue])
    excess = _excess(work, queue, ready, NOTHING, least)
    if excess == NOTHING or work.routing.queue(work.tr, queue).overflow != DROP_HEAD:
        return 0
    rows = _oldest(work, queue, (ready, excess), least.key, most_rows=most_rows)
    take_out(work, queue, rows)
    for key, value in rows:
        _give_way(work, Message(queue, key, value))
    return len(rows)


def _ready(work: Work, queues: Collection[str]) -> list[Load]:
    """The ready load of each queue, at snapshot, in one round trip."""
    counts = [work.keys.count(queue, "ready") for queue in queues]
    return [Load(*decode_amount(each)) for each in work.tr.get_many(counts, snapshot=True)] if counts else []


def _excess(work: Work, queue: str, ready: Load, new: Load, least: Load = NOTHING) -> Load:
    """By how much the queue will exceed its maximum. ``least``: what may stay whatever the limit."""
    most = work.routing.queue(work.tr, queue).max_load
    messages, size = (_over(*each) for each in zip(ready[:2], new[:2], most, least[:2], strict=True))
    return Load(messages, size)


def _over(ready: int, new: int, most: int | None, least: int) -> int:
    return 0 if most is None else max(0, ready + new - max(most, least))


def _refusal(work: Work, queue: str, ready: Load, excess: Load) -> CapacityExceeded:
    most_messages, most_bytes = work.routing.queue(work.tr, queue).max_load
    fix = "Nothing was stored: publish it again later, or raise the queue's {}."
    if excess.messages:
        fix = fix.format("x-max-length")
        return CapacityExceeded(queue=queue, current_size=ready.messages, capacity=most_messages, fix=fix)
    fix = fix.format("x-max-length-bytes")
    return CapacityExceeded(queue=queue, unit="bytes", current_size=ready.size, capacity=most_bytes, fix=fix)


def _oldest(work: Work, queue: str, of: tuple[Load, Load], came: str, *, most_rows: int) -> list[KeyValue]:
    """The messages that give way, at most ``most_rows``.

    ``of``: what is ready, and the excess. ``came``: the key of the message that overfilled the queue.
    """
    ready, excess = of
    found: dict[bytes, bytes] = {}
    freed = Load()
    likely = max(excess.messages, -(-excess.size * ready.messages // max(ready.size, 1)))
    for key, value in _from_largest(work, queue, ready.messages, came, max(1, min(likely, most_rows))):
        if key in found:
            continue
        found[key] = value
        freed = freed.grown(size_of(value))
        enough = freed.messages >= excess.messages and freed.size >= excess.size
        if enough or freed.messages == most_rows:
            break
    return list(found.items())


def _from_largest(work: Work, queue: str, ready: int, came: str, part: int) -> Iterator[KeyValue]:
    """The messages to shed, in order: the next of the key with the most ready ones; among equals, the oldest."""
    backlogs = _backlogs(work, queue, ready, came, part)
    largest = sorted(backlogs, key=backlogs.__getitem__, reverse=True)
    for first in range(0, len(largest), CANDIDATES):
        yield from _in_turn(work, queue, {key: backlogs[key] for key in largest[first : first + CANDIDATES]}, part)
    for prefix in (work.keys.ready(queue), work.keys.keyed(queue)):
        yield from _from_head(work, queue, range_of(prefix), part)


def _backlogs(work: Work, queue: str, ready: int, came: str, leaving: int) -> dict[str, int]:
    """The numbers of ready messages of the keys that are compared, in their order from ``came`` on; at snapshot.

    If there are more keys than that, the count of messages without a key stops once ``leaving`` of them could leave and
    they would still be the most numerous.
    """
    begin, end = work.keys.backlogs(queue)
    own = work.keys.backlog(queue, came) if came else begin
    ranges = [(own, end, MOST_KEYS), (begin, own, MOST_KEYS)]
    parts = work.tr.get_ranges([each for each in ranges if each[0] < each[1]], snapshot=True)
    rows = [row for part in parts for row in part][:MOST_KEYS]
    backlogs = {key: decode_count(value) for (_queue, key), value in work.keys.read(rows, str, str)}
    if len(rows) < MOST_KEYS:
        backlogs[""] = ready - sum(backlogs.values())
    else:
        enough = min(max(backlogs.values(), default=0) + leaving, MOST_LEAVING)
        keyless = work.tr.get_range(*range_of(work.keys.ready(queue)), limit=enough, snapshot=True)
        backlogs[""] = len(keyless)
    return backlogs


def _in_turn(work: Work, queue: str, backlogs: Mapping[str, int], part: int) -> Iterator[KeyValue]:
    """The messages of these keys, always the next one of the key that has the most left."""
    # For each key: minus its backlog, the stamp and the row of its head; "" and None before its head is read.
    heap: list[tuple[int, bytes, str, KeyValue | None]] = [(-each, b"", key, None) for key, each in backlogs.items()]
    heapify(heap)
    heads: dict[str, Iterator[KeyValue]] = {}
    while heap:
        number, _stamp, key, head = heappop(heap)
        if head is None:
            heads[key] = _from_head(work, queue, work.keys.all_items(queue, key), part)
        else:
            yield head
            number += 1
        following = next(heads[key], None)
        if following is not None:
            heappush(heap, (number, following[0][-STAMP_BYTES:], key, following))


def _from_head(work: Work, queue: str, within: Range, part: int) -> Iterator[KeyValue]:
    """The messages of the last rank in the range, oldest first, then those of the rank before."""
    begin, end = within
    while last := work.tr.get_range(begin, end, limit=1, reverse=True, snapshot=True):
        try:
            key, rank = split_place(work.keys.place(queue, last[0][0]))
        except FormatError:  # it has no rank
            end = last[0][0]
            yield last[0]
            continue
        end = work.keys.items(queue, key, rank)
        yield from _in_parts(work, *range_of(end), part)


def _in_parts(work: Work, begin: bytes, end: bytes, part: int) -> Iterator[KeyValue]:
    while rows := work.tr.get_range(begin, end, limit=part, snapshot=True):
        yield from rows
        if len(rows) < part:
            return
        begin = rows[-1][0] + b"\x00"


def _give_way(work: Work, message: Message[bytes]) -> None:
    if work.routing.queue(work.tr, message.queue).dead_letter_exchange is None:
        delete(work, message)
    else:
        bury(work, message, "maxlen")
