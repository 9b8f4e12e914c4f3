"""Allowance: how many messages of a key a claim may serve now, by the key's limits.

Guarantee KEY-LIMIT. The limits are read serializably, and so is the queue's control, which says whether there are any
(``claim.py``), so no claim by the old ones commits after a change. The number in flight may be read at snapshot: acks
only lower it, and claims of one limited key exclude each other through its *bucket*, which each reads serializably and
writes. While it is not known how many messages without a key are in flight (``limits.py``), none may be taken.

A queue in which no key has limits pays nothing for any of it: none of its keys is parked, so a transaction that ends a
lease, and has read that (as a conflict), rings no bell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kombu_fdb.engine.scheduling import limits, rates
from kombu_fdb.engine.scheduling.rates import Bucket, Sightings
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.codec import decode_count, limits_of
from kombu_fdb.model import KeyLimits, QueueControl

UNLIMITED = 2**31
#: Keys whose numbers are read at once.
TOGETHER = 64


def control_keys(work: Work, queues: Sequence[str]) -> list[bytes]:
    """The rows that say how queues are worked on, and whether their keys have limits. Each is read as a conflict."""
    keys = [work.keys.control(queue) for queue in queues]
    for key in keys:
        work.tr.add_read_conflict_key(key)
    return keys


def note_unlimited(work: Work, controls: Iterable[tuple[str, QueueControl]]) -> None:
    """By their :func:`control_keys`: where no key has limits, no key waits for the end of a lease."""
    work.effects.unlimited.update(queue for queue, control in controls if not control.limits_keys)


@dataclass(slots=True)
class Allowance:
    """How many messages of a key may be served now; ``wait_ms``: when to look again if a rate is in the way."""

    messages: int
    weight: int = 1
    priority: int | None = None
    wait_ms: int = 0


class Allowances:
    """The allowances of one queue's keys, for one claim."""

    def __init__(self, work: Work, queue: str, control: QueueControl, sightings: Sightings | None) -> None:
        self._tr = work.tr
        self._keys = work.keys
        self._queue = queue
        self._control = control
        self._now_ms = work.now_ms
        self._sightings = sightings
        self._limits: dict[str, KeyLimits] = {}
        #: Bucket and number in flight, as they were found.
        self._found: dict[str, tuple[bytes | None, int]] = {}
        self._rows: dict[str, bytes | None] = {}
        self._flights: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}
        self._counting = False

    def load(self, wanted: Collection[str]) -> None:
        """Read the keys' limits, only where a key of the queue has limits; else they cost nothing."""
        asked = sorted(set(wanted) - self._limits.keys())
        if not asked or not self._control.limits_keys:
            return
        counting = [self._keys.relimit(self._queue)] if "" in asked else []
        values = self._tr.get_many([self._keys.limits(self._queue, key) for key in asked] + counting)
        for key, value in zip(asked, values, strict=False):
            self._limits[key] = self._control.every_key if value is None else limits_of(value)
        if counting:
            self._counting = limits.is_counting(values[-1])

    def weight(self, key: str) -> int:
        return self._limits[key].weight if key in self._limits else 1

    def priority(self, key: str) -> int | None:
        return self._limits[key].priority if key in self._limits else None

    def of(self, key: str) -> Allowance:
        """What the key may have now."""
        limits = self._limits.get(key)
        if limits is None:
            return Allowance(UNLIMITED)
        if limits.paused:
            return Allowance(0)
        free, wait_ms = UNLIMITED, 0
        if limits.max_in_flight is not None:
            free = limits.max_in_flight - self._in_flight(key)
        if limits.rate is not None:
            bucket = self._bucket(key, limits)
            free = min(free, int(bucket.tokens))
            wait_ms = rates.wait_ms(bucket, limits)
        return Allowance(free, limits.weight, limits.priority, wait_ms)

    def used(self, key: str, messages: int) -> None:
        """So many messages of the key are served."""
        limits = self._limits.get(key)
        if limits is None or not messages:
            return
        if limits.max_in_flight is not None:
            self._flights[key] += messages
        if limits.rate is not None:
            bucket = self._bucket(key, limits)
            self._buckets[key] = left = bucket._replace(tokens=bucket.tokens - messages)
            self._tr.set(self._keys.bucket(self._queue, key), rates.encode(left))

    def _in_flight(self, key: str) -> int:
        if key == "" and self._counting:
            return UNLIMITED
        if key not in self._flights:
            self._exclude_rivals(key)
            self._flights[key] = self._find(key)[1]
        return self._flights[key]

    def _bucket(self, key: str, limits: KeyLimits) -> Bucket:
        if key not in self._buckets:
            row = self._exclude_rivals(key)
            self._buckets[key] = rates.refilled(row, limits, self._now_ms, self._unchanged_ms(key, row))
        return self._buckets[key]

    def _unchanged_ms(self, key: str, row: bytes | None) -> int:
        if not row or self._sightings is None:
            return 0
        return self._sightings.unchanged_ms(self._keys.bucket(self._queue, key), row)

    def _exclude_rivals(self, key: str) -> bytes | None:
        """Claims of one limited key exclude each other: each has its bucket as a conflict, and writes it.

        Clearing what is not there is a write as well, and leaves no row.
        """
        if key not in self._rows:
            bucket = self._keys.bucket(self._queue, key)
            self._tr.add_read_conflict_key(bucket)
            self._rows[key] = stored = self._find(key)[0]
            if stored:
                self._tr.set(bucket, stored)
            else:
                self._tr.clear(bucket)
        return self._rows[key]

    def _find(self, key: str) -> tuple[bytes | None, int]:
        """Also reads those of keys that may be asked for next: one round trip for :data:`TOGETHER` of them."""
        if key not in self._found:
            others = (each for each, limits in self._limits.items() if each not in self._found and _counts(limits))
            keys = [key, *islice((each for each in others if each != key), TOGETHER - 1)]
            rows = [
                *(self._keys.bucket(self._queue, each) for each in keys),
                *(self._keys.flight(self._queue, each) for each in keys),
            ]
            values = self._tr.get_many(rows, snapshot=True)
            for each, bucket, flight in zip(keys, values, values[len(keys) :], strict=False):
                self._found[each] = bucket, decode_count(flight)
        return self._found[key]


def _counts(limits: KeyLimits) -> bool:
    return not limits.paused and (limits.max_in_flight is not None or limits.rate is not None)
