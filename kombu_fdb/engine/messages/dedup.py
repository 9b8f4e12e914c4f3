"""Dedup: one message, however often it is published within a window. Guarantee: ONCE-PUBLISHED.

A publication with a ``dedup_id`` reads ``("dedup", exchange, routing_key, dedup_id)``, serializably: of two publishers
at once one has to run again, and then sees the other's. What it finds there, if the window is not over, makes it a
duplicate: nothing is stored for it, and its publisher is told the same as the first one's. So a publisher that does not
know whether its commit happened may simply publish again, and two schedulers may publish the same tick.

A publication that reaches no queue leaves no entry: what was stored nowhere is not in the store.

The window counts from the first publication, by the publishers' wall clocks: it begins by the clock of the first one
and ends by that of the one that asks, so it is longer or shorter by how far the two are apart. A duplicate does not
extend it, and the end of the message (acked, cancelled, dead) does not end it, as with SQS
(https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html).

A publication may have two ids. Its ``once_id`` tells it from all others: an outbox publishes a row again if it does not
know whether it did before. Its ``dedup_id`` makes calls one that their caller means to be one. A message is new only if
both are. One that comes again by its ``once_id`` leaves the other id as it is: that window counts from the first time.

An id counts for one exchange and routing key. Entries are cleared by the duties of the consumers, whose clocks decide
nothing as long as they are less than :data:`KEPT_MS` ahead of the publishers'.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.layout import Keyspace, readable
from kombu_fdb.model import Publication

ENTRIES_PER_TRANSACTION = 500
END_BYTES = 8
#: How much longer than its window an entry is kept.
KEPT_MS = 15 * 60 * 1000


def without_duplicates(
    work: Work, publications: Sequence[Publication], reached: Sequence[Sequence[str]]
) -> Sequence[Publication | None]:
    """The publications in their order, None for each that is in the store already or was earlier in this list.

    ``reached``: the queues of each.
    """
    entries = [_entry(work.keys, each, name) for each in publications for name, _ in _ids(each)]
    seen = {
        key
        for key, value in zip(entries, work.tr.get_many(entries), strict=True)
        if value and decode_end(value) > work.now_ms
    }
    return [
        None if queues and _is_duplicate(work, each, seen) else each
        for each, queues in zip(publications, reached, strict=True)
    ]


def _is_duplicate(work: Work, publication: Publication, seen: set[bytes]) -> bool:
    for name, window_ms in _ids(publication):
        entry = _entry(work.keys, publication, name)
        if entry in seen:
            return True
        seen.add(entry)
        end_ms = work.now_ms + window_ms
        work.tr.set(entry, end_ms.to_bytes(END_BYTES, "big"))
        work.tr.set(work.keys.dedup_end(end_ms, publication.exchange, publication.routing_key, name), b"")
    return False


def _ids(publication: Publication) -> list[tuple[str, int]]:
    """Each with its window, in the order in which they are looked at."""
    once = publication.once_id, publication.once_window_ms
    return [each for each in (once, (publication.dedup_id, publication.dedup_window_ms)) if each[0]]


def clear_ended(work: Work, limit: int, end_ms: int) -> int:
    """Clear up to ``limit`` entries whose window was over at ``end_ms``. Returns how many it looked at.

    An id that was published again since has an entry with a later end, which stays.
    """
    rows = work.tr.get_range(*work.keys.dedup_ended(end_ms), limit=limit, snapshot=True)
    entries = [entry for entry, _ in readable(rows, work.keys.dedup_of)]
    ended = (
        [value is not None and decode_end(value) <= end_ms for value in work.tr.get_many(entries)] if entries else []
    )
    for key in [*(key for key, _ in rows), *(entry for entry, is_over in zip(entries, ended, strict=True) if is_over)]:
        work.tr.clear(key)
    return len(rows)


def restore(work: Work, entries_: Sequence[tuple[str, str, str, int]]) -> None:
    """Open these windows of another store here too."""
    for exchange, routing_key, dedup_id, end_ms in entries_:
        work.tr.set(work.keys.dedup(exchange, routing_key, dedup_id), end_ms.to_bytes(END_BYTES, "big"))
        work.tr.set(work.keys.dedup_end(end_ms, exchange, routing_key, dedup_id), b"")


def _entry(keys: Keyspace, publication: Publication, name: str) -> bytes:
    return keys.dedup(publication.exchange, publication.routing_key, name)


def decode_end(value: bytes) -> int:
    """When a window is over, in ms; of a value that can't be read: it is."""
    return int.from_bytes(value, "big") if len(value) == END_BYTES else 0
