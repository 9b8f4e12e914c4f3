"""A beat tells the store of its schedule, so that pages show it without the app.

Model. After each tick beat hands over its schedule. Entries that were published since they were told of are told, at
most once a second; all of them each :data:`ALL_S`. A beat that sleeps long tells when it wakes. If the store does not
answer within :data:`TIMEOUT_S`, beat goes on and tries again after :data:`PAUSE_S`: nothing is lost but what pages
show. A broker of another kind is told nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_fdb.brokers.address import broker_of
from celery_fdb.brokers.lazy import Holding, common_ms
from celery_fdb.schedules.store import MOST_ENTRIES, fit, schedule_of, told_of
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError, OptionError
from kombu_fdb.primitives.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

#: Seconds: between two tellings, between tellings of all, of one call, after a failure.
LEAST_S, ALL_S, TIMEOUT_S, PAUSE_S = 1.0, 60.0, 2.0, 60.0


class ScheduleSync:
    """Of one beat; not thread-safe. ``max_interval_s``: how long beat sleeps at most."""

    def __init__(self, app: Celery, max_interval_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._again_s = ALL_S + max_interval_s
        self._holding = Holding(lambda: _open(app))
        self._is_ours = True
        self._next_s = self._all_s = 0.0
        #: Of those that were told of, when each had been published last.
        self._told: dict[str, Any] = {}

    def look(self, schedule: Mapping[str, Any]) -> float | None:
        """Tell what is new. Returns in how many seconds it wants to look again; None: whenever beat wakes."""
        now_s = self._clock.monotonic()
        if not self._is_ours:
            return None
        is_all = now_s >= self._all_s
        seen = {fit(str(name)): each for name, each in list(schedule.items())[:MOST_ENTRIES]}
        new = [name for name, each in seen.items() if is_all or self._is_new(name, each)]
        gone = self._told.keys() - seen.keys()
        if not new and not gone:
            return None
        if now_s < self._next_s:
            return self._next_s - now_s
        if self._tell({name: seen[name] for name in new}, gone, forget=is_all):
            self._told = {name: _mark(each) for name, each in seen.items()}
            self._next_s, self._all_s = now_s + LEAST_S, now_s + ALL_S if is_all else self._all_s
        else:
            self._next_s = now_s + PAUSE_S
        return None

    def _is_new(self, name: str, entry: Any) -> bool:
        return name not in self._told or self._told[name] != _mark(entry)

    def _tell(self, entries: Mapping[str, Any], gone: set[str], *, forget: bool) -> bool:
        now_ms = self._clock.wall_ms()
        told = [told_of(name, each, now_ms, self._again_s) for name, each in entries.items()]
        try:
            broker = self._holding.broker()
            store = schedule_of(broker, timeout_s=TIMEOUT_S)
            store.tell(told, gone)
            if forget:
                store.forget_old(common_ms(broker.inspect.sessions(), now_ms))
        except OptionError:
            self._is_ours = False  # another kind of broker; who publishes there is told what is wrong
            return False
        except KombuFDBError as error:
            logger.warning("the store was not told of beat's schedule: %s", error)
            self._holding.forget()
            return False
        return True

    def close(self) -> None:
        """Give the store back."""
        self._holding.close()


def _mark(entry: Any) -> Any:
    """Changes when it is published; what else changes is told with all the others."""
    return getattr(entry, "last_run_at", None)


def _open(app: Celery) -> Broker:
    url, options = broker_of(app)
    return Broker.open(url, **options)
