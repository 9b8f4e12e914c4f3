"""Groups: dead letters by what they died of, so that a person sees three causes and not 40,000 letters.

Counted among the first ``most`` letters of the queue, in parts: what it costs does not depend on the queue, and the
page says among how many it has counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from celery_fdb.inspection.filters import NONE, Filter
from celery_fdb.inspection.moments import moment
from kombu_fdb import Broker
from kombu_fdb.engine.dead_letters.scan import task_of
from kombu_fdb.model import Listed, Peeked, Spot

__all__ = ["MOST_COUNTED", "PART", "Group", "Groups", "group"]

#: Letters that are counted unless somebody asks for more, and of them in one transaction.
MOST_COUNTED = 10_000
PART = 500


@dataclass(slots=True)
class Group:
    """Letters of one task that died of one error for one reason; "" for what they have not.

    ``example``: where the latest of them stands; ``first_ms``, ``last_ms``: when the first and the last died.
    """

    task: str
    error: str
    reason: str
    example: Spot
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0

    @property
    def first(self) -> datetime:
        return moment(self.first_ms)

    @property
    def last(self) -> datetime:
        return moment(self.last_ms)

    @property
    def filter(self) -> Filter:
        """By which its letters are listed, replayed and discarded."""
        return Filter(task=self.task or NONE, error=self.error or NONE, reason=self.reason or NONE)

    def add(self, listed: Listed, died_ms: int) -> None:
        """One more letter."""
        self.count += 1
        self.first_ms = min(self.first_ms or died_ms, died_ms)
        if died_ms >= self.last_ms:
            self.last_ms, self.example = died_ms, listed.spot


@dataclass(frozen=True, slots=True)
class Groups:
    """The largest first, among ``counted`` of ``total`` letters. ``is_whole``: among all of them."""

    groups: list[Group]
    counted: int
    total: int
    is_whole: bool


def group(broker: Broker, queue: str, wanted: Filter | None = None, *, most: int = MOST_COUNTED) -> Groups:
    """The dead letters of the queue that holds them, such as ``celery.dead``."""
    found: dict[tuple[str, str, str], Group] = {}
    counted, following = 0, b""
    while counted < most:
        page = broker.queue(queue).page(min(PART, most - counted), after=following)
        for each in page.messages:
            if wanted is None or wanted.matches(each.message):
                _add(found, each)
        counted += len(page.messages)
        following = page.following or b""
        if not following:
            break
    groups = sorted(found.values(), key=lambda each: (-each.count, each.task, each.error, each.reason))
    return Groups(groups, counted, broker.queue(queue).count(), not following)


def _add(found: dict[tuple[str, str, str], Group], listed: Listed) -> None:
    cause = _cause(listed.message)
    deaths = listed.message.deaths
    found.setdefault(cause, Group(*cause, listed.spot)).add(listed, deaths[0].time_ms if deaths else 0)


def _cause(message: Peeked) -> tuple[str, str, str]:
    death = message.deaths[0] if message.deaths else None
    error = death.details.get("error_class") if death else ""
    return task_of(message), error if isinstance(error, str) else "", death.reason if death else ""
