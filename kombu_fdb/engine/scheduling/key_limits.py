"""Enforcement of a key's limits: how many messages a claim may serve now, and a publish may add (capacity).

Guarantee KEY-LIMIT.

A claim reads the limits serializably, and the queue's control, which says whether there are any (``claim.py``): so no
claim under the old limits commits after a change. The number in flight may be read at snapshot: acks only lower it, and
claims of one limited key exclude each other through its *bucket*, which each reads serializably and writes. While it is
unknown how many messages without a key are in flight (``limit_changes.py``), none may be taken.

A queue in which no key has limits pays nothing for this, as none of its keys is parked. A transaction that ends a
lease, and has read (as a conflict) that there are no limits, rings no bell.

Rates. Each key with a rate has one token bucket in the store (https://en.wikipedia.org/wiki/Token_bucket), kept by
clocks that may be wrong. ``("bucket", queue, key)`` holds the number of tokens, and the moment up to which they are
accounted for. A claim adds the tokens that have accrued since, takes one for each message, and advances the moment. A
key without the row has a full bucket. The time that has passed is measured in two ways, and the longer one counts:

* by the consumer's wall clock, if that is past the moment. The moment never goes back, so the refills of all consumers
  together amount to the advance of the fastest clock: the true time and, once, the difference between the clocks.
* by how long this process has known the very same row, on its monotonic clock (:func:`known_for_ms`). Each use of a
  bucket changes its row, so this time never exceeds the true one, whatever the wall clocks say. So no consumer is
  stopped by a clock that was set back, or by another process's clock that is far ahead.

A consumer may look at a row that it has not seen before. So the promoter, which has seen it since the key began to
wait, puts the accrued tokens into the bucket (:func:`credit`) before it rings for the key.

The moment advances by what was added, so no time is counted twice. Guarantee SKEW: in any time T, consumers use at most
``burst + rate * (T + skew)`` tokens, however many claims they make. ``skew`` is the difference between the wall clocks
of consumers and duties, plus the time a claim takes from reading the clock to its commit. This holds up to
:data:`FULL_FOR_MS` of skew. A moment more than a day ahead must come from a broken clock, and is reset: otherwise the
key would wait for it after each restart.

The duties clear a bucket that has been full for :data:`FULL_FOR_MS`: no row means a full bucket, too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kombu_fdb.engine import parts
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import CapacityExceeded
from kombu_fdb.keyspace.codec import control_of, decode_count, limits_of
from kombu_fdb.model import KeyLimits, QueueControl
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import KeyValue

#: A moment that is further ahead must come from a broken clock.
MOST_AHEAD_MS = 24 * 3600 * 1000
#: How long a bucket must have been full before its row is cleared, by the clock of the process that clears it: while
#: clocks differ by less, clearing grants no tokens.
FULL_FOR_MS = 10 * 60 * 1000
#: The limit for the numbers in a row; only a damaged row has a moment as late as this.
LAST_MS = 2**64 - 1
#: A key is looked at again after this time, however low its rate.
LONGEST_WAIT_MS = 24 * 3600 * 1000
BUCKETS_PER_PART = 500
#: How many rows are remembered; a forgotten row counts as seen for the first time.
MOST_SIGHTINGS = 20_000

_ROW = struct.Struct(">dQ")


class Bucket(NamedTuple):
    """``tokens`` at ``filled_ms``, a moment of the wall clocks that took part."""

    tokens: float
    filled_ms: int


#: What this process has seen in rows, by key: the value, and since when (monotonic clock).
Sightings = dict[bytes, tuple[bytes, float]]


def known_for_ms(sightings: Sightings, clock: Clock, key: bytes, value: bytes) -> int:
    """How long this process has seen the row unchanged, in ms; 0 if it was different, or absent, at the last look.

    Thread-safe.
    """
    now_s = clock.monotonic()
    before = sightings.get(key)
    if before is not None and before[0] == value:
        return int((now_s - before[1]) * 1000)
    if len(sightings) >= MOST_SIGHTINGS:
        sightings.clear()
    sightings[key] = value, now_s
    return 0


def refilled(row: bytes | None, limits: KeyLimits, now_ms: int, unchanged_ms: int) -> Bucket:
    """The bucket now. A row that can't be read counts as a full one."""
    bucket = _decode(row)
    if bucket is None:
        return Bucket(float(limits.burst), now_ms)
    assert limits.rate is not None
    passed_ms = max(now_ms - bucket.filled_ms, unchanged_ms, 0)
    tokens = min(float(limits.burst), bucket.tokens + passed_ms / 1000 * limits.rate)
    # At least a millisecond, because each use of the bucket must change its row.
    moment = bucket.filled_ms + max(passed_ms, 1)
    return Bucket(tokens, min(moment, max(now_ms, 0) + MOST_AHEAD_MS))


def encode(bucket: Bucket) -> bytes:
    return _ROW.pack(*bucket)


def wait_ms(bucket: Bucket, limits: KeyLimits) -> int:
    """How long until there is a token; 0 if there is one."""
    if bucket.tokens >= 1:
        return 0
    assert limits.rate is not None
    return int(min((1 - bucket.tokens) / limits.rate * 1000, LONGEST_WAIT_MS - 1)) + 1


def _decode(row: bytes | None) -> Bucket | None:
    if row is None or len(row) != _ROW.size:
        return None
    bucket = Bucket(*_ROW.unpack(row))
    return bucket if math.isfinite(bucket.tokens) else None


def read_buckets(work: Work, of: Sequence[tuple[str, str]], sightings: Sightings) -> list[tuple[KeyValue, int] | None]:
    """The rows of these queues' and keys' buckets, at snapshot, and how many ms this process has seen them unchanged.

    None where there is no row.
    """
    wanted = [work.keys.bucket(queue, key) for queue, key in of]
    rows = zip(wanted, work.tr.get_many(wanted, snapshot=True) if wanted else [], strict=True)
    clock = work.environment.clock
    return [None if row is None else ((key, row), known_for_ms(sightings, clock, key, row)) for key, row in rows]


def credit(work: Work, buckets: Iterable[tuple[KeyValue, int] | None]) -> None:
    """Put into the ``buckets`` the tokens that have accrued while this process saw them unchanged (monotonic clock).

    ``buckets`` come from :func:`read_buckets`. The new row's moment advances by that time, so it is not counted again.
    """
    known = [each for each in buckets if each is not None]
    for (row, unchanged_ms), limits in zip(known, _limits(work, [row for row, _ in known]), strict=True):
        bucket = _decode(row[1])
        if bucket is not None and limits.rate is not None and unchanged_ms > 0:
            tokens = min(float(limits.burst), bucket.tokens + unchanged_ms / 1000 * limits.rate)
            work.tr.add_read_conflict_key(row[0])
            work.tr.set(row[0], encode(Bucket(tokens, min(bucket.filled_ms + unchanged_ms, LAST_MS))))


def clear_full(work: Work, cursor: bytes = b"") -> bytes:
    """Clear the full ones among some token buckets. Returns where to continue; b"" at the end."""
    rows, following = parts.rows_from(work.tr, [work.keys.all_buckets], cursor, BUCKETS_PER_PART)
    for row, limits in zip(rows, _limits(work, rows), strict=True):
        if _is_full(row[1], limits, work.now_ms):
            work.tr.add_read_conflict_key(row[0])
            work.tr.clear(row[0])
    return following


def _limits(work: Work, rows: list[KeyValue]) -> list[KeyLimits]:
    names = [next(work.keys.read([row], str, str), (("", ""), b""))[0] for row in rows]
    asked = [each for queue, key in names for each in (work.keys.limits(queue, key), work.keys.control(queue))]
    values = work.tr.get_many(asked, snapshot=True) if asked else []
    return [
        control_of(control).every_key if own is None else limits_of(own)
        for own, control in zip(values[::2], values[1::2], strict=True)
    ]


def _is_full(row: bytes, limits: KeyLimits, now_ms: int) -> bool:
    bucket = _decode(row)
    if bucket is None or limits.rate is None:
        return True
    missing_ms = max(0.0, limits.burst - bucket.tokens) / limits.rate * 1000
    return now_ms - bucket.filled_ms >= missing_ms + FULL_FOR_MS


# -- allowances --------------------------------------------------------------------------------------------------------


#: How the row of a change of limits begins in its first phase (``limit_changes.py``).
COUNTING = b"L"
UNLIMITED = 2**31
#: How many keys' numbers are read at once.
TOGETHER = 64


class Allowances:
    """What the limits of one queue's keys allow, for one claim."""

    def __init__(self, work: Work, queue: str, control: QueueControl, sightings: Sightings | None) -> None:
        self._tr = work.tr
        self._keys = work.keys
        self._queue = queue
        self._control = control
        self._now_ms = work.now_ms
        self._clock = work.environment.clock
        self._sightings = sightings
        self._limits: dict[str, KeyLimits] = {}
        #: Bucket and number in flight of each key, as read.
        self._found: dict[str, tuple[bytes | None, int]] = {}
        self._rows: dict[str, bytes | None] = {}
        self._flights: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}
        #: Whether messages in flight without a key are still being counted.
        self._counting = False

    def load(self, wanted: Collection[str]) -> None:
        """Read the keys' limits; nothing if no key of the queue has limits."""
        asked = sorted(set(wanted) - self._limits.keys())
        if not asked or not self._control.limits_keys:
            return
        counting = [self._keys.relimit(self._queue)] if "" in asked else []
        values = self._tr.get_many([self._keys.limits(self._queue, key) for key in asked] + counting)
        for key, value in zip(asked, values, strict=False):
            self._limits[key] = self._control.every_key if value is None else limits_of(value)
        if counting:
            self._counting = (values[-1] or b"").startswith(COUNTING)

    def weight(self, key: str) -> int:
        return self._limits[key].weight if key in self._limits else 1

    def priority(self, key: str) -> int | None:
        return self._limits[key].priority if key in self._limits else None

    def free(self, key: str) -> int:
        """How many messages of the key may be served now."""
        limits = self._limits.get(key)
        if limits is None:
            return UNLIMITED
        if limits.paused:
            return 0
        free = UNLIMITED
        if limits.max_in_flight is not None:
            free = limits.max_in_flight - self._in_flight(key)
        if limits.rate is not None:
            free = min(free, int(self._bucket(key, limits).tokens))
        return free

    def wait_ms(self, key: str) -> int:
        """In how many ms to look again if the key's rate is used up; else 0."""
        limits = self._limits.get(key)
        if limits is None or limits.paused or limits.rate is None:
            return 0
        return wait_ms(self._bucket(key, limits), limits)

    def used(self, key: str, messages: int) -> None:
        """Note that this many messages of the key are served."""
        limits = self._limits.get(key)
        if limits is None or not messages:
            return
        if limits.max_in_flight is not None:
            self._flights[key] += messages
        if limits.rate is not None:
            bucket = self._bucket(key, limits)
            self._buckets[key] = left = bucket._replace(tokens=bucket.tokens - messages)
            self._tr.set(self._keys.bucket(self._queue, key), encode(left))

    def _in_flight(self, key: str) -> int:
        if key == "" and self._counting:
            return UNLIMITED
        if key not in self._flights:
            self._exclude_others(key)
            self._flights[key] = self._find(key)[1]
        return self._flights[key]

    def _bucket(self, key: str, limits: KeyLimits) -> Bucket:
        if key not in self._buckets:
            row = self._exclude_others(key)
            self._buckets[key] = refilled(row, limits, self._now_ms, self._unchanged_ms(key, row))
        return self._buckets[key]

    def _unchanged_ms(self, key: str, row: bytes | None) -> int:
        if not row or self._sightings is None:
            return 0
        return known_for_ms(self._sightings, self._clock, self._keys.bucket(self._queue, key), row)

    def _exclude_others(self, key: str) -> bytes | None:
        """Make claims of one limited key exclude each other: each reads its bucket as a conflict, and writes it.

        Clearing an absent row is a write as well, and leaves no row.
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
        """The key's bucket and number in flight; reads those of up to :data:`TOGETHER` likely keys with them."""
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


# -- how many a key may have ready -------------------------------------------------------------------------------------


def check_capacity(work: Work, keys: Mapping[str, Mapping[str, int]]) -> None:
    """Check that what is about to be ready fits. Raises ``CapacityExceeded`` for the first key that is full.

    ``keys``: how many messages are added to each key, by queue. Read at snapshot, in one round trip: concurrent
    publishers may overshoot a little. A delayed message needs no room: when it is due it enters even a full key, so the
    retry of a running task is not lost.
    """
    controls = work.routing.controls(work.tr, keys)
    asked = [(queue, key) for queue, control in controls.items() if _has_capacities(control) for key in keys[queue]]
    rows = [row for each in asked for row in (work.keys.limits(*each), work.keys.backlog(*each))]
    found = work.tr.get_many(rows, snapshot=True) if rows else []
    for (queue, key), own, backlog in zip(asked, found[::2], found[1::2], strict=True):
        capacity = (controls[queue].every_key if own is None else limits_of(own)).capacity
        before = decode_count(backlog)
        if capacity is not None and before + keys[queue][key] > capacity:
            raise CapacityExceeded(
                queue=queue,
                key=key,
                current_size=max(before, capacity),
                capacity=capacity,
                fix="Nothing was stored: publish it again later, or raise the key's capacity.",
            )


def _has_capacities(control: QueueControl) -> bool:
    return control.limited or control.every_key.capacity is not None
