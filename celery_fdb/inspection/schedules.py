"""Beat's schedule in the broker's store: how beat reports it, and how pages read it.

There is one row per entry.

====================  ======================================  ============================================
key                   value                                   written by
====================  ======================================  ============================================
``("entry", name)``   JSON: the fields of an ``EntryReport``  a beat; cleared by a later one
``("paused", name)``  nothing                                 a person, who clears it; a beat, with the entry
====================  ======================================  ============================================

All keys are behind ``("celery-fdb", namespace, "schedule")``. Several beats with the same entries overwrite each
other's rows, and the last report counts. A beat clears an entry that it had and no longer has, unless it is paused:
another beat may still have it. An entry that no beat has reported for :data:`KEPT_S` is cleared with its pause.

Beat's reports let pages show the schedule without the app. After each tick beat hands over its schedule. Entries that
were published since their last report are reported, at most once a second; all of them each :data:`ALL_S`. A beat that
sleeps long reports when it wakes. If the store does not answer within :data:`TIMEOUT_S`, beat goes on and tries again
after :data:`PAUSE_S`: only pages are out of date then. A broker of another kind gets no reports.

Before it publishes an entry, beat asks whether it is paused, so that all beats pause at once; while the store does not
answer, the last answer holds. The ticks of a paused entry are skipped, and are not made up for.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from celery_fdb import brokers
from kombu_fdb import Broker
from kombu_fdb.errors import FormatError, KombuFDBError, OptionError
from kombu_fdb.keyspace.layout import pack as pack_key
from kombu_fdb.keyspace.layout import range_of, readable, unpack_as
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import MOST, is_number
from kombu_fdb.store.protocol import Database, KeyValue, Transaction
from kombu_fdb.store.retry import Retry

# -- the store ---------------------------------------------------------------------------------------------------------


#: The end of a crontab as Celery writes it.
CELERYS_HINT = " (m/h/dM/MY/d)"
#: The most characters of a text.
LONGEST = 500
#: Errors that an entry may raise: an application's own schedule class may raise any.
BROKEN = (Exception,)


class EntryReport(NamedTuple):
    """Moments in milliseconds since 1970 by beat's clock, None for never and for unknown.

    ``last_ms``: when beat published it last, ``next_ms``: when it will, ``runs``: how often it has. ``reported_ms``:
    when beat reported it; it reports it again within ``again_s`` seconds.
    """

    name: str
    task: str
    timing: str
    queue: str
    last_ms: int | None
    next_ms: int | None
    runs: int
    reported_ms: int
    again_s: float


def configured(app: Celery) -> dict[str, Any]:
    """The entries of the app's ``beat_schedule``, by name, each as it is written there."""
    return {str(name): each for name, each in (app.conf.beat_schedule or {}).items()}


def entry_of(app: Celery | None, name: str, written: Any) -> ScheduleEntry:
    """The entry as beat builds it. Raises what building it raises."""
    return ScheduleEntry(**{**written, "name": name, "app": app}) if isinstance(written, Mapping) else written


def report_of(name: str, entry: Any, now_ms: int, again_s: float) -> EntryReport:
    """The report of an entry of a scheduler. An entry that raises is reported with its error as the timing."""
    try:
        runs = int(entry.total_run_count or 0)
        queue = queue_of(entry)
        last_ms = ms_of(entry.last_run_at) if runs else None
        task, timing, next_ms = str(entry.task), text_of(entry.schedule), _next_ms(entry, now_ms)
    except BROKEN as error:
        task, timing, queue, last_ms, next_ms, runs = "", f"{type(error).__name__}: {error}", "", None, None, 0
    return EntryReport(fit(name), fit(task), fit(timing), fit(queue), last_ms, next_ms, runs, now_ms, again_s)


def queue_of(entry: Any) -> str:
    """The queue that an entry names; "" for none."""
    return str((entry.options or {}).get("queue") or "")


def fit(text: str) -> str:
    """A text as it may be stored."""
    return text[:LONGEST].encode(errors="replace").decode()


def _next_ms(entry: Any, now_ms: int) -> int | None:
    """When the entry runs next, by beat's own calculation."""
    if entry.last_run_at is None:
        return None
    left = entry.schedule.remaining_estimate(entry.schedule.maybe_make_aware(entry.last_run_at))
    if not isinstance(left, timedelta):
        return None
    # Beat's clock was a moment ahead of ours, and a crontab's moments are whole seconds.
    return round(now_ms / 1000 + max(left.total_seconds(), 0)) * 1000


def ms_of(at: Any) -> int | None:
    """A moment of beat's in milliseconds since 1970; None for anything but a ``datetime`` with a time zone."""
    return int(at.timestamp() * 1000) if isinstance(at, datetime) and at.tzinfo else None


def text_of(timing: Any) -> str:
    """When an entry is due, in words, with the time zone of a crontab."""
    if type(timing) is schedule:
        return f"every {timing.human_seconds.replace('.00 ', ' ')}"
    text = str(timing).removeprefix("<").removesuffix(">")
    return fit(f"{text.removesuffix(CELERYS_HINT)} {timing.tz}" if isinstance(timing, crontab) else text)


def pack(report: EntryReport) -> bytes:
    return json.dumps(report[1:]).encode()


def unpack(name: str, value: bytes) -> EntryReport:
    """Raises ``FormatError`` for what no version of ours can have written."""
    try:
        found = EntryReport(name, *json.loads(value))
    except (ValueError, TypeError, RecursionError):
        raise FormatError("unreadable entry of a schedule", entry=name[:80]) from None
    texts, moments = found[1:4], (found.last_ms, found.next_ms)
    numbers = (found.runs, found.reported_ms, found.again_s, *(each for each in moments if each is not None))
    if not all(isinstance(each, str) for each in texts) or not all(is_number(each, -MOST, MOST) for each in numbers):
        raise FormatError("unreadable entry of a schedule", entry=name[:80])
    return found


#: The most entries that are read, and that one beat reports.
MOST_ENTRIES = 1_000
#: Seconds for which an entry is kept that no beat reports.
KEPT_S = 7 * 86_400.0


class ScheduleStore:
    """The schedules of one namespace. Thread-safe.

    ``timeout_s``: deadline of each call, which then raises ``StoreUnavailable``.
    """

    def __init__(self, database: Database, namespace: str, *, clock: Clock, timeout_s: float) -> None:
        self._prefix = pack_key("celery-fdb", namespace, "schedule", "entry")
        self._paused = pack_key("celery-fdb", namespace, "schedule", "paused")
        self._timeout_s = timeout_s
        self._retry = Retry(database, clock, random.Random())

    def report(self, entries: Iterable[EntryReport], gone: Iterable[str] = ()) -> None:
        """Write these entries, and clear the others that are not paused. Idempotent."""

        def body(tr: Transaction) -> None:
            for name in gone:
                if tr.get(self._paused + pack_key(name)) is None:
                    tr.clear(self._key(name))
            for each in entries:
                tr.fill()
                tr.set(self._key(each.name), pack(each))

        self._retry.repeat(body, timeout_s=self._timeout_s)

    def reports(self) -> list[EntryReport]:
        """All reported entries, by name. What can't be read is left out."""
        return list(self._readable(self._page(*range_of(self._prefix))))

    def pause(self, name: str) -> None:
        """Pause an entry: beats no longer publish it."""
        self._retry.repeat(lambda tr: tr.set(self._paused + pack_key(fit(name)), b""), timeout_s=self._timeout_s)

    def resume(self, name: str) -> None:
        """Resume an entry, from its next tick on."""
        self._retry.repeat(lambda tr: tr.clear(self._paused + pack_key(fit(name))), timeout_s=self._timeout_s)

    def paused(self) -> set[str]:
        """The names of entries that beats don't publish."""
        return {name for name, _ in readable(self._page(*range_of(self._paused)), partial(_name, self._paused))}

    def is_paused(self, name: str) -> bool:
        """Whether this entry is paused."""
        key = self._paused + pack_key(fit(name))
        return self._retry.read(lambda tr: tr.get(key), timeout_s=self._timeout_s) is not None

    def forget_old(self, now_ms: int) -> Sequence[str]:
        """Clear entries that no beat has reported for :data:`KEPT_S`, in parts. Returns their names.

        Each part looks again as it clears: a beat may have reported an entry since it was read.
        """
        begin, end = range_of(self._prefix)
        forgotten: list[str] = []
        while rows := self._page(begin, end):
            names = self._old(rows, now_ms)
            if names:
                forgotten += self._retry.repeat(partial(self._clear_old, names, now_ms), timeout_s=self._timeout_s)
            begin = rows[-1][0] + b"\0"
        return forgotten

    def _clear_old(self, names: Iterable[str], now_ms: int, tr: Transaction) -> list[str]:
        keys = [self._key(each) for each in names]
        values = zip(keys, tr.get_many(keys), strict=True)
        old = self._old([(key, value) for key, value in values if value is not None], now_ms)
        for name in old:
            tr.clear(self._key(name))
            tr.clear(self._paused + pack_key(name))
        return old

    def _old(self, rows: Iterable[KeyValue], now_ms: int) -> list[str]:
        return [each.name for each in self._readable(rows) if now_ms - each.reported_ms > KEPT_S * 1000]

    def _page(self, begin: bytes, end: bytes) -> list[KeyValue]:
        return self._retry.read(
            lambda tr: tr.get_range(begin, end, limit=MOST_ENTRIES, snapshot=True), timeout_s=self._timeout_s
        )

    def _key(self, name: str) -> bytes:
        return self._prefix + pack_key(name)

    def _readable(self, rows: Iterable[KeyValue]) -> Iterator[EntryReport]:
        for name, value in readable(rows, partial(_name, self._prefix)):
            with suppress(FormatError):
                yield unpack(name, value)


def _name(prefix: bytes, key: bytes) -> str:
    return str(unpack_as(key[len(prefix) :], str)[0])


def schedule_of(broker: Broker, *, timeout_s: float | None = None) -> ScheduleStore:
    """The schedules that beats have reported to a broker."""
    timeout_s = broker.options.operation_timeout if timeout_s is None else timeout_s
    return ScheduleStore(broker.database, broker.location.namespace, clock=Clock(), timeout_s=timeout_s)


# -- beat --------------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: Seconds: between two reports, between reports of all, for one call, after a failure.
LEAST_S, ALL_S, TIMEOUT_S, PAUSE_S = 1.0, 60.0, 2.0, 60.0


class ScheduleSync:
    """The reports of one beat, and the pauses that it obeys. Not thread-safe.

    ``max_interval_s``: how long beat sleeps at most.
    """

    def __init__(self, app: Celery, max_interval_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._again_s = ALL_S + max_interval_s

        def open_broker() -> Broker:
            url, options = brokers.broker_of(app)
            return Broker.open(url, **options)

        self._holding = brokers.LazyBroker(open_broker)
        self._is_ours = True
        self._next_s = self._all_s = 0.0
        #: For each reported entry, when it had been published last.
        self._reported: dict[str, Any] = {}
        #: The entries that are paused, as last read, with when each was published before.
        self._skipped: dict[str, Any] = {}

    def skips(self, entry: Any) -> bool:
        """Whether the due tick of a paused entry is to be skipped. ``entry``: as it was before the tick."""
        name = fit(str(entry.name))
        if self._is_paused(name):
            self._skipped.setdefault(name, entry.last_run_at if entry.total_run_count else None)
        else:
            self._skipped.pop(name, None)
        return name in self._skipped

    def _is_paused(self, name: str) -> bool:
        last = name in self._skipped
        hears_not = f"beat does not hear whether {name} is paused"
        return self._is_ours and self._ask(lambda store, _: store.is_paused(name), hears_not, last)

    def _ask(self, ask: Callable[[ScheduleStore, Broker], bool], failed: str, otherwise: bool) -> bool:
        """The answer of the store; ``otherwise``, with a warning that it ``failed``, if there is none."""
        try:
            broker = self._holding.broker()
            return ask(schedule_of(broker, timeout_s=TIMEOUT_S), broker)
        except OptionError:
            self._is_ours = False  # another kind of broker; a publish there raises what is wrong
            return False
        except KombuFDBError as error:
            logger.warning("%s: %s", failed, error)
            self._holding.forget()
        return otherwise

    def look(self, schedule: Mapping[str, Any]) -> float | None:
        """Report what is new. Returns the seconds until the next look; None: at beat's next tick."""
        now_s = self._clock.monotonic()
        if not self._is_ours:
            return None
        is_all = now_s >= self._all_s
        seen = {fit(str(name)): each for name, each in list(schedule.items())[:MOST_ENTRIES]}
        new = [name for name, each in seen.items() if is_all or self._reported.get(name, self) != _mark(each)]
        gone = self._reported.keys() - seen.keys()
        if not new and not gone:
            return None
        if now_s < self._next_s:
            return self._next_s - now_s
        if self._tell({name: seen[name] for name in new}, gone, forget=is_all):
            self._reported = {name: _mark(each) for name, each in seen.items()}
            self._next_s, self._all_s = now_s + LEAST_S, now_s + ALL_S if is_all else self._all_s
        else:
            self._next_s = now_s + PAUSE_S
        return None

    def _tell(self, entries: Mapping[str, Any], gone: set[str], *, forget: bool) -> bool:
        now_ms = self._clock.wall_ms()
        reports = [report_of(name, each, now_ms, self._again_s) for name, each in entries.items()]
        skipped = self._skipped  # the last ticks of those entries were not published
        reports = [
            each._replace(last_ms=ms_of(skipped[each.name])) if each.name in skipped else each for each in reports
        ]

        def report(store: ScheduleStore, broker: Broker) -> bool:
            store.report(reports, gone)
            if forget:
                store.forget_old(brokers.common_ms(broker.inspect.sessions(), now_ms))
            return True

        return self._ask(report, "beat's schedule was not reported to the store", otherwise=False)

    def close(self) -> None:
        """Give the store back."""
        self._holding.close()


def _mark(entry: Any) -> Any:
    """A mark that changes when the entry is published. Other changes are reported with the next full report."""
    return getattr(entry, "last_run_at", None)
