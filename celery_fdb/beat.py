"""Several beats that together publish one message per tick.

Run ``celery beat -S celery_fdb.beat.Scheduler`` on two machines, and each entry is published once. With another
scheduler, such as django-celery-beat's, use ``class Scheduler(OncePerTick, DatabaseScheduler)``.

Each message has a once id (``kombu_fdb/engine/messages/publish.py``) made of the entry's name and its *tick*. The tick
must be the same in all beats, although their clocks differ and they started at different times:

* ``crontab``: the latest time of the crontab that is not after now. It is the same while the clocks differ by less than
  the distance between two such times. A beat that was down finds that another one published what it would make up for.
* an interval: the number of the current interval since 1970. A beat's ticks are at least one interval apart, so a lone
  beat loses none. Either of two beats may be first, so two messages may be nearer or farther apart than the interval,
  but each interval has at most one. Celery rounds the due time of a ``relative`` one down, to a local day, an hour, a
  minute or a second, so its interval is a whole number of these.
* others (``solar``): the due time by the schedule itself, to the minute; ``clocked``: its time.

This fails if clocks differ by more than an interval, or are set back by more than one, or if an entry changes at
different times in different beats. A ``dedup_id`` of the entry's own options or its task's counts beside it. Other
brokers ignore the headers, and every beat publishes.

They also report to the broker's store what is in their schedules, and when each entry ran and will run: the dashboard
shows it, and pauses an entry for all of them.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import celery
from celery.beat import PersistentScheduler
from celery.schedules import crontab, schedule

from celery_fdb.inspection.schedules import ScheduleSync

logger = logging.getLogger(__name__)

__all__ = ["OncePerTick", "Scheduler", "tick_of"]

#: How far back the latest moment of a crontab is looked for; the first that has one is searched.
LOOKBACKS = (
    *(timedelta(minutes=2), timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=366)),
    timedelta(days=4 * 366 + 1),
)
#: Seconds for which a tick is remembered: two of its periods, in these bounds.
SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 3_600.0, 31 * 86_400.0
HOUR_S, DAY_S = 3_600, 86_400


class OncePerTick:
    """A mixin that stands before a class of :class:`celery.beat.Scheduler`."""

    _sync: ScheduleSync | None = None
    #: The entry that Celery has just advanced, until its message is published.
    _reserved: Any = None

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        """Do one tick of beat's own, then report to the store what has changed (``inspection/schedules.py``)."""
        pause_s = super().tick(*args, **kwargs)  # type: ignore[misc]  # a mixin
        again_s = self._synced().look(self.schedule)  # type: ignore[attr-defined]  # Scheduler's
        return pause_s if again_s is None or not pause_s else min(pause_s, again_s)

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        super().close()  # type: ignore[misc]  # a mixin

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Publish a tick that is due, unless a person has paused the entry."""
        if self._synced().skips(entry):
            logger.info("beat: %s is paused, and this tick is not published", entry.name)
        else:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]  # a mixin

    def _synced(self) -> ScheduleSync:
        if self._sync is None:
            self._sync = ScheduleSync(self.app, self.max_interval)  # type: ignore[attr-defined]  # Scheduler's
        return self._sync

    def reserve(self, entry: Any) -> Any:
        """Advance the entry. Celery counts its interval from this moment, so its tick is this moment's."""
        self._reserved = super().reserve(entry)  # type: ignore[misc]  # a mixin
        return self._reserved

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Publish the entry's message with its tick's id.

        The store may have taken a while to say that the entry is not paused. Of two ticks, the first of which waited
        for longer, the later moments are less than an interval apart.
        """
        if advance:
            self.reserve(entry)
        reserved, self._reserved = self._reserved, None
        since = reserved.last_run_at if reserved is not None and reserved.name == entry.name else None
        tick, period_s = _tick_at(entry, since or entry.schedule.now())
        headers = dict(entry.options.get("headers") or {})
        headers.setdefault("once_id", f"beat:{entry.name}:{tick}")
        headers.setdefault("once_window", min(max(2 * period_s, SHORTEST_WINDOW_S), LONGEST_WINDOW_S))
        marked = _with_options(entry, {**entry.options, "headers": headers})
        return super().apply_async(marked, producer=producer, advance=False, **kwargs)  # type: ignore[misc]  # a mixin


def _with_options(entry: Any, options: dict[str, Any]) -> Any:
    """A copy of the entry with other options.

    ``copy.copy`` would make it as Celery unpickles one, with arguments that the class of another scheduler does not
    take: django-celery-beat's is made of a row.
    """
    copied = object.__new__(type(entry))
    vars(copied).update(vars(entry), options=options)
    return copied


class Scheduler(OncePerTick, PersistentScheduler):
    """Celery's default scheduler, once per tick."""


def tick_of(entry: Any) -> tuple[str, float]:
    """Which tick of the entry is due now, and how long until the next one, in seconds."""
    return _tick_at(entry, entry.schedule.now())


def _tick_at(entry: Any, moment: datetime) -> tuple[str, float]:
    timing = entry.schedule
    now = timing.maybe_make_aware(moment)
    if isinstance(timing, crontab):
        return _latest(timing, now)
    if isinstance(timing, schedule):
        period_s = max(timing.seconds, 0.001)
        if timing.relative:
            return _rounded(now, period_s), period_s
        return str(int(_elapsed_s(now) // period_s)), period_s
    clocked = getattr(timing, "clocked_time", None)
    # The estimate is counted from the present, which is later than the moment if the store was slow to answer.
    due = clocked or (timing.maybe_make_aware(timing.now()) + timing.remaining_estimate(entry.last_run_at))
    return str(round(due.timestamp() / 60)), 86_400.0


def _elapsed_s(now: datetime) -> float:
    """Seconds since 1970 as Celery counts an interval: before 5.7 by the local clock, also when that is set forward."""
    return (now if tuple(celery.VERSION[:2]) >= (5, 7) else now.replace(tzinfo=UTC)).timestamp()


def _rounded(now: datetime, period_s: float) -> str:
    """The number of the interval of a relative schedule (``celery.utils.time.delta_resolution``)."""
    if period_s >= DAY_S:
        unit_s, units = DAY_S, now.toordinal()
    elif period_s >= HOUR_S:  # an hour of the local clock: some time zones are half an hour off
        unit_s, units = HOUR_S, int((_elapsed_s(now) - 60 * now.minute - now.second) // HOUR_S)
    else:
        unit_s = 60 if period_s >= 60 else 1
        units = int(_elapsed_s(now) // unit_s)
    return str(units // max(1, int(period_s // unit_s)))


def _latest(timing: crontab, now: datetime) -> tuple[str, float]:
    for lookback in LOOKBACKS:
        moment = _next(timing, now - lookback)
        if moment <= now:
            break
    else:  # beat says that the entry is due, so its tick is of this minute
        return str(int(now.timestamp() // 60)), SHORTEST_WINDOW_S
    while (following := _next(timing, moment)) <= now:
        moment = following
    return str(int(moment.timestamp() // 60)), (following - moment).total_seconds()


def _next(timing: crontab, after: datetime) -> datetime:
    start, delta, _ = timing.remaining_delta(after)
    moment: datetime = start + delta
    return moment
