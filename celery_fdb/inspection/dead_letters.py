"""Dead letters as people see them: their queues, and groups by what they died of.

So a person sees three causes and not 40,000 letters. They are counted among the first ``most`` letters of one queue, or
of all queues of dead letters, in parts: the cost does not depend on the queues, and the page says among how many it has
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from celery_fdb.inspection.filters import Cause, Filter, cause_of
from celery_fdb.inspection.message import error_line, reason_of
from celery_fdb.inspection.overview import Overview, QueueView
from celery_fdb.inspection.time_formats import moment
from kombu_fdb import Broker
from kombu_fdb.errors import QueueError
from kombu_fdb.model import Listed, Peeked, Spot


def dead_queues(broker: Broker, seen: Overview) -> dict[str, set[str]]:
    """Each queue of dead letters, and the queues whose letters it holds."""
    homes = {each.name: {each.dead_of} for each in seen.queues if each.dead_of is not None}
    for each in seen.queues:
        for name in _led_to(broker, each):
            homes.setdefault(name, set()).add(each.name)
    return homes


def _led_to(broker: Broker, view: QueueView) -> list[str]:
    exchange = view.arguments.get("x-dead-letter-exchange")
    routing_key = view.arguments.get("x-dead-letter-routing-key") or view.name
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        return []
    try:
        return broker.topology.route(exchange, routing_key)
    except QueueError:  # it is not there, so the letters are in <queue>.dead
        return []


#: How many letters are counted unless more are asked for, and how many in one transaction.
MOST_COUNTED = 10_000
PART = 500
#: Transactions in which letters of all queues are counted: there may be many queues with few letters.
MOST_PARTS = 2 * MOST_COUNTED // PART


@dataclass(slots=True)
class Group:
    """Letters of one cause.

    ``example``: where the latest of them stands, and in which queue; ``said``: what its error said. ``reason``:
    in a person's words. ``first_ms``, ``last_ms``: when the first and the last died. ``queues``: how many of
    them are in each.
    """

    cause: Cause
    example: Spot
    example_in: str
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0
    said: str = ""
    reason: str = ""
    queues: dict[str, int] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return self.cause.task

    @property
    def error(self) -> str:
        return self.cause.error

    @property
    def first(self) -> datetime:
        return moment(self.first_ms)

    @property
    def last(self) -> datetime:
        return moment(self.last_ms)

    @property
    def filter(self) -> Filter:
        """The filter by which its letters are listed, replayed and discarded."""
        return Filter(cause=self.cause)

    def add(self, queue: str, listed: Listed) -> None:
        """One more letter."""
        death = next(iter(listed.message.deaths), None)
        died_ms = death.time_ms if death else 0
        self.count += 1
        self.queues[queue] = self.queues.get(queue, 0) + 1
        self.first_ms = min(self.first_ms or died_ms, died_ms)
        if died_ms >= self.last_ms:
            self.last_ms, self.example, self.example_in = died_ms, listed.spot, queue
            details = death.details if death else {}
            self.said, self.reason = error_line(details), reason_of(self.cause.reason, details)


@dataclass(frozen=True, slots=True)
class Groups:
    """The largest first, among ``counted`` of ``total`` letters. ``is_whole``: among all of them."""

    groups: list[Group]
    counted: int
    total: int
    is_whole: bool


def group(broker: Broker, queue: str, wanted: Filter | None = None, *, most: int = MOST_COUNTED) -> Groups:
    """The dead letters of the queue that holds them, such as ``celery.dead``."""
    return _count(broker, [queue], wanted, most, parts=-(-most // PART))


def group_all(
    broker: Broker, queues: Sequence[str], wanted: Filter | None = None, *, most: int = MOST_COUNTED
) -> Groups:
    """The dead letters of all these queues, a part of each in turn.

    Where a dead-letter exchange leads to a queue that has messages of its own, those are not counted.
    """
    return _count(broker, queues, wanted, most, parts=MOST_PARTS, only_dead=True)


def _count(
    broker: Broker, queues: Sequence[str], wanted: Filter | None, most: int, *, parts: int, only_dead: bool = False
) -> Groups:
    wanted = wanted or Filter()
    groups: dict[Cause, Group] = {}
    counted = 0
    todo = deque((each, b"") for each in queues)
    while todo and counted < most and parts:
        queue, after = todo.popleft()
        page = broker.queue(queue).page(min(PART, most - counted), after=after)
        counted += len(page.messages)
        for each in page.messages:
            if wanted.matches(each.message) and (not only_dead or died_elsewhere(each.message, queue)):
                cause = cause_of(each.message)
                groups.setdefault(cause, Group(cause, each.spot, queue)).add(queue, each)
        if page.following:
            todo.append((queue, page.following))
        parts -= 1
    total = sum(broker.queue(each).count() for each in queues[:MOST_PARTS])
    return Groups(sorted(groups.values(), key=lambda each: (-each.count, each.cause)), counted, total, not todo)


def died_elsewhere(message: Peeked, queue: str) -> bool:
    """Whether it is a dead letter in this queue, and not one of the queue's own messages, or replayed to it."""
    return bool(message.deaths) and message.deaths[0].queue != queue
