"""Ageing: who has waited long goes before the more urgent, so that strict priority starves no message.

With ``QueueControl.ageing`` (or the argument ``x-fair-ageing``) each so many seconds of waiting count as one priority
more, up to the most urgent. Of two that are equally urgent by this the one with the lower priority goes first: it has
waited longer. A message waits from its publication on, a delayed one from the moment it was due.

Versionstamps can't be compared with a clock, so the wall clocks of publishers and consumers decide; a wrong one gives a
message a better or worse turn, and harms nothing else. Inside one priority the order stays as it is.

Cost: a claim reads its window of every priority instead of the first ones, still in one round trip. A queue without
ageing pays nothing.
"""

from __future__ import annotations

import heapq
from itertools import islice

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.codec import published_at
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import URGENT
from kombu_fdb.store.protocol import KeyValue

#: The smaller, the earlier.
Urgency = tuple[int, int]


def urgency(priority: int, record: bytes, ageing_s: float, now_ms: int) -> Urgency:
    """Of a waiting message."""
    waited_s = max(0, now_ms - published_at(record, now_ms)) / 1000
    return max(0, URGENT - priority - int(waited_s / ageing_s)), priority


def oldest_first(work: Work, queue: str, ageing_s: float, want: int) -> list[KeyValue]:
    """The first ``want`` messages without a key."""
    priorities = range(URGENT + 1)
    windows = work.tr.get_ranges(
        [(*range_of(work.keys.items(queue, "", work.keys.rank(priority))), want) for priority in priorities],
        snapshot=True,
    )
    candidates = [[(priority, row) for row in rows] for priority, rows in zip(priorities, windows, strict=True)]
    # Merging compares the heads only, so that each priority keeps its order, whatever its publishers' clocks say.
    merged = heapq.merge(*candidates, key=lambda each: urgency(each[0], each[1][1], ageing_s, work.now_ms))
    return [row for _, row in islice(merged, want)]
