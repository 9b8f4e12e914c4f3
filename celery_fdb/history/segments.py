"""Segments: which one is written to, and when the oldest is deleted.

Model. A segment is *open* while it is the newest, then *closed*, until *trim* clears it. A flush writes into the newest
one, or opens the next if that is full or has been open for long enough (``options.py``). Two workers may open the same
one at the same time: both write the same key, and one moment stands. Trim clears closed segments, the oldest first:
while there are more runs than the bound leaves room for, and those that were opened longer ago than the bound says,
which includes an open one that no worker writes to any more. So there are never more runs than the bound, but for what
several workers flush at the same moment, and none is older.

A flush conflicts with a trim of the segment that it writes to, and then writes into another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from celery_fdb.history.counters import SLOTS
from celery_fdb.history.layout import HistoryKeys
from celery_fdb.history.options import LARGEST_SEGMENT, History
from kombu_fdb.keyspace.layout import readable
from kombu_fdb.store.protocol import KeyValue, Transaction

#: Deleted in one transaction.
TRIM_SEGMENTS = 4
#: So many runs are never flushed into one: a damaged counter must not have all the others cleared.
MOST_COUNTED = 10 * LARGEST_SEGMENT
#: Read at once: more than any bounds leave.
MOST_SEGMENTS = 2_000


class Segment(NamedTuple):
    number: int
    opened_ms: int
    runs: int = 0


def read(tr: Transaction, keys: HistoryKeys, *, limit: int = MOST_SEGMENTS) -> list[Segment]:
    """The newest ones, the oldest of them first."""
    return _segments(keys, reversed(tr.get_range(*keys.segments, limit=2 * limit, reverse=True, snapshot=True)))


def newest_first(tr: Transaction, keys: HistoryKeys) -> list[int]:
    """Their numbers."""
    return [each.number for each in reversed(read(tr, keys))]


def _segments(keys: HistoryKeys, rows: Iterable[KeyValue]) -> list[Segment]:
    found: dict[int, Segment] = {}
    for (number, is_runs), value in readable(rows, keys.split_segment):
        amount = _number(value)
        if not is_runs:
            found[number] = Segment(number, amount)
        elif number in found:
            found[number] = found[number]._replace(runs=min(amount, MOST_COUNTED))
    return list(found.values())


def _number(value: bytes) -> int:
    """One that can't be read is the largest: a segment with it is full, and no worker writes into it."""
    return int.from_bytes(value, "little") if len(value) == 8 else 2**64 - 1


def choose(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> tuple[int, bool]:
    """Where a flush writes to, and whether it was opened for that."""
    found = read(tr, keys, limit=1)
    if found:
        last = found[-1]
        if last.runs < bounds.segment_runs and now_ms - last.opened_ms < bounds.segment_ms:
            tr.add_read_conflict_key(keys.segment(last.number))
            return last.number, False
    number = found[-1].number + 1 if found else 1
    tr.set(keys.segment(number), now_ms.to_bytes(8, "little"))
    return number, True


def trim(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> int:
    """Clear up to :data:`TRIM_SEGMENTS` of those that the bounds leave no room for. Returns how many."""
    found = read(tr, keys)
    too_many = sum(each.runs for each in found) - (bounds.runs - bounds.segment_runs)
    cleared = 0
    # Each was opened before the next one, whatever the clock of who opened it said.
    opened_ms = [*accumulate((each.opened_ms for each in reversed(found)), min)][::-1]
    for each, opened in zip(found[:TRIM_SEGMENTS], opened_ms, strict=False):
        is_closed = each is not found[-1]
        if not (is_closed and too_many > 0) and now_ms - opened < bounds.max_age * 1000:
            break
        too_many -= each.runs
        tr.clear_range(*keys.inside(each.number))
        tr.clear(keys.segment(each.number))
        tr.clear(keys.segment_runs(each.number))
        cleared += 1
    for length_s, kept_s in SLOTS.items():
        tr.clear_range(*keys.slots(length_s, 0, max(now_ms // 1000 - kept_s, 0)))
    return cleared
