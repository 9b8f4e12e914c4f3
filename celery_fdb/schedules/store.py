"""A beat's schedule in the store, as beat tells of it and pages show it.

What beats tell of their schedules, in the broker's store: one row an entry.

===================  ==========================================  ==============================
key                  value                                       written by
===================  ==========================================  ==============================
``("entry", name)``  JSON: the fields of :class:`.entry.Told`    a beat; cleared by a later one
===================  ==========================================  ==============================

All keys are behind ``("celery-fdb", namespace, "schedule")``. Several beats with the same entries overwrite each
other's rows, and the last one to speak is right. An entry that a beat had and has no more is cleared by that beat; one
that is gone since beat was started anew stays, is told of by no beat, and is cleared by a beat after :data:`KEPT_S`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from celery.schedules import crontab, schedule

from kombu_fdb import Broker
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack as pack_key
from kombu_fdb.keyspace.tuples import range_of, unpack_as
from kombu_fdb.primitives.clock import Clock, SystemClock
from kombu_fdb.primitives.ranges import MOST, is_number
from kombu_fdb.store.protocol import Database, KeyValue, Transaction
from kombu_fdb.store.retry import Retry
from kombu_fdb.store.tokens import CommitTokens

#: Ends a crontab as Celery writes it.
CELERYS_HINT = " (m/h/dM/MY/d)"
#: Characters of a text.
LONGEST = 500
#: What a foreign entry may end in.
BROKEN = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class Told(NamedTuple):
    """Moments in milliseconds since 1970 by beat's clock, None for never and for unknown.

    ``last_ms``: when beat published it last, ``next_ms``: when it will, ``runs``: how often it has. ``told_ms``: when
    beat said so; it says so again within ``again_s`` seconds.
    """

    name: str
    task: str
    timing: str
    queue: str
    last_ms: int | None
    next_ms: int | None
    runs: int
    told_ms: int
    again_s: float


def told_of(name: str, entry: Any, now_ms: int, again_s: float) -> Told:
    """Of what a scheduler has in its schedule, whatever that is."""
    try:
        runs = int(entry.total_run_count or 0)
        queue = str((entry.options or {}).get("queue") or "")
        last_ms = _ms(entry.last_run_at) if runs else None
        task, timing, next_ms = str(entry.task), text_of(entry.schedule), _next_ms(entry, now_ms)
    except BROKEN as error:
        task, timing, queue, last_ms, next_ms, runs = "", f"{type(error).__name__}: {error}", "", None, None, 0
    return Told(fit(name), fit(task), fit(timing), fit(queue), last_ms, next_ms, runs, now_ms, again_s)


def fit(text: str) -> str:
    """A text as it may be stored."""
    return text[:LONGEST].encode(errors="replace").decode()


def _next_ms(entry: Any, now_ms: int) -> int | None:
    """Beat's own reckoning: how long it is until then."""
    if entry.last_run_at is None:
        return None
    left = entry.schedule.remaining_estimate(entry.schedule.maybe_make_aware(entry.last_run_at))
    if not isinstance(left, timedelta):
        return None
    # Its clock was a moment ahead of ours, and a crontab's moments are whole seconds.
    return round(now_ms / 1000 + max(left.total_seconds(), 0)) * 1000


def _ms(at: Any) -> int | None:
    """Beat's moments are in UTC if they name no zone, unless the app says otherwise."""
    return int(at.timestamp() * 1000) if isinstance(at, datetime) and at.tzinfo else None


def text_of(timing: Any) -> str:
    """When an entry is due, in words, and in which zone if that matters."""
    if type(timing) is schedule:
        return f"every {timing.human_seconds.replace('.00 ', ' ')}"
    text = str(timing).removeprefix("<").removesuffix(">")
    return f"{text.removesuffix(CELERYS_HINT)} {timing.tz}" if isinstance(timing, crontab) else text


def pack(told: Told) -> bytes:
    return json.dumps(told[1:]).encode()


def unpack(name: str, value: bytes) -> Told:
    """Raises ``FormatError`` for what no version of ours can have written."""
    try:
        found = Told(name, *json.loads(value))
    except (ValueError, TypeError, RecursionError):
        raise FormatError("unreadable entry of a schedule", entry=name[:80]) from None
    texts, moments = found[1:4], (found.last_ms, found.next_ms)
    numbers = (found.runs, found.told_ms, found.again_s, *(each for each in moments if each is not None))
    if not all(isinstance(each, str) for each in texts) or not all(is_number(each, -MOST, MOST) for each in numbers):
        raise FormatError("unreadable entry of a schedule", entry=name[:80])
    return found


#: That are read, and that one beat tells of.
MOST_ENTRIES = 1_000
#: Seconds for which an entry is kept that no beat tells of.
KEPT_S = 7 * 86_400.0


class ScheduleStore:
    """Of one namespace. Thread-safe. ``timeout_s``: deadline of each call, which then raises ``StoreUnavailable``."""

    def __init__(self, database: Database, namespace: str, *, clock: Clock, timeout_s: float) -> None:
        self._prefix = pack_key("celery-fdb", namespace, "schedule", "entry")
        self._timeout_s = timeout_s
        self._retry = Retry(database, clock, CommitTokens(_no_token), random.Random())

    def tell(self, entries: Iterable[Told], gone: Iterable[str] = ()) -> None:
        """Write these, and clear the others. Twice is as good as once."""

        def body(tr: Transaction) -> None:
            for name in gone:
                tr.clear(self._key(name))
            for each in entries:
                tr.fill()
                tr.set(self._key(each.name), pack(each))

        self._retry.repeat(body, timeout_s=self._timeout_s)

    def told(self) -> list[Told]:
        """All there are, by name. What can't be read is left out."""
        rows = self._page(*range_of(self._prefix))
        return [told for key, value in rows if (told := self._readable(key, value)) is not None]

    def forget_old(self, now_ms: int) -> Sequence[str]:
        """Clear entries that no beat has told of for :data:`KEPT_S`, in parts. Returns their names.

        Each part looks again as it clears: a beat may have told of an entry since it was read.
        """
        begin, end = range_of(self._prefix)
        forgotten: list[str] = []
        while rows := self._page(begin, end):
            old = list(self._old(rows, now_ms))
            if old:
                forgotten += self._retry.repeat(partial(self._clear_old, old, now_ms), timeout_s=self._timeout_s)
            begin = rows[-1][0] + b"\0"
        return forgotten

    def _clear_old(self, keys: Sequence[bytes], now_ms: int, tr: Transaction) -> list[str]:
        values = zip(keys, tr.get_many(keys), strict=True)
        old = self._old([(key, value) for key, value in values if value is not None], now_ms)
        for key in old:
            tr.clear(key)
        return list(old.values())

    def _old(self, rows: Iterable[KeyValue], now_ms: int) -> dict[bytes, str]:
        """The names of those that are, by key."""
        told = ((key, self._readable(key, value)) for key, value in rows)
        return {key: each.name for key, each in told if each is not None and now_ms - each.told_ms > KEPT_S * 1000}

    def _page(self, begin: bytes, end: bytes) -> list[KeyValue]:
        return self._retry.read(
            lambda tr: tr.get_range(begin, end, limit=MOST_ENTRIES, snapshot=True), timeout_s=self._timeout_s
        )

    def _key(self, name: str) -> bytes:
        return self._prefix + pack_key(name)

    def _readable(self, key: bytes, value: bytes) -> Told | None:
        try:
            return unpack(str(unpack_as(key[len(self._prefix) :], str)[0]), value)
        except FormatError:
            return None


def _no_token(slot: int) -> bytes:
    raise AssertionError(slot)


def schedule_of(broker: Broker, *, timeout_s: float | None = None) -> ScheduleStore:
    """What beats have told a broker."""
    timeout_s = broker.options.operation_timeout if timeout_s is None else timeout_s
    return ScheduleStore(broker.database, broker.location.namespace, clock=SystemClock(), timeout_s=timeout_s)
