"""Filters: which messages of a queue a page shows, which of them an action changes, and dead letters by cause.

A queue has no index of its tasks or errors, so a search looks through its messages in their order, in parts, until the
page is full or :data:`MOST_LOOKED_AT` were looked at. Then the page says so, and the next one goes on there: what it
costs does not depend on the queue.

The same filter selects the messages that a page shows and those that an action changes. Its fields, in a form or an
address, are all optional:

============= =====================================================================================================
``task``      the name of the Celery task; ``shop.*`` for all that begin so
``key``       the fairness key, empty for messages without one
``error``     the class of the exception of the last death, with or without its module; of a message that waits to be
              retried, of its last attempt, if the app has ``celery_fdb.install``
``reason``    why it died last: rejected, expired, delivery_limit, maxlen, malformed, or an application's
``home``      the queue in which it died last
``text``      a part of the task's id, or of the message's
``arguments`` a part of the task's arguments, as its publisher wrote them; for those who may see bodies
``since``     ISO 8601; a dead letter died then or later, any other message waits since then or later
``until``     the same, exclusive
============= =====================================================================================================

``-`` for task, error or reason finds those that have none.

The command line's conditions on a death also ask for ``died``: a queue that a dead-letter exchange leads to may hold
messages of its own, which wait, and may have an attempt's error.

A page that shows the letters of one cause sends ``cause`` instead: a JSON list of exactly the task, error and reason of
the last death, "" for none. Nothing in it is a pattern, because a publisher may give its task any name.

Pages group dead letters by cause, so that a person sees three causes and not 40,000 letters. They are counted among the
first ``most`` letters of one queue, or of all queues of dead letters, in parts: the cost does not depend on the queues,
and the page says among how many it has counted.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from functools import cached_property
from typing import Any, NamedTuple

from celery_fdb.inspection import formats
from celery_fdb.inspection.message import error_line, reason_of
from celery_fdb.inspection.overview import Overview, QueueView
from kombu_fdb import Broker
from kombu_fdb.api.queue import Queue
from kombu_fdb.engine.dead_letters import LetterWalk, error_of, is_class, task_names_of, task_of
from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.keyspace.codec import headers_of
from kombu_fdb.model import Listed, Peeked, Spot, State
from kombu_fdb.primitives.ranges import LATEST_MS, shown

# -- search ------------------------------------------------------------------------------------------------------------


#: How many messages one page of a search looks at, and how many in one transaction.
MOST_LOOKED_AT = 2_000
PART = 200


def search(
    queue: Queue,
    wanted: Filter,
    limit: int,
    *,
    state: State = "ready",
    reverse: bool = False,
    after: bytes = b"",
    most: int = sys.maxsize,
) -> tuple[list[Listed], int, bytes | None]:
    """Up to ``limit`` messages that match, how many were looked at, and where the next page begins; None at the end.

    ``after``: where this page begins. ``most``: how many messages to look at. ``reverse``: begin at the queue's end.
    """
    key = _subqueue(queue, wanted.key) if state == "ready" else None
    matching: list[Listed] = []
    looked_at, following = 0, after or None
    for number in range(1 + MOST_LOOKED_AT // PART):
        size = min(PART if number else limit, most - looked_at)
        page = queue.page(size, state=state, after=following, key=key, reverse=reverse)
        looked_at += len(page.messages)
        following = page.following
        matching += [each for each in page.messages if wanted.matches(each.message)]
        if len(matching) >= limit or following is None or looked_at >= most:
            break
    if len(matching) > limit:
        return matching[:limit], looked_at, matching[limit - 1].position
    return matching, looked_at, following


def _subqueue(queue: Queue, key: str | None) -> str | None:
    """The key whose messages alone are searched; None for all, as dead letters stand among messages without a key."""
    if key is None:
        return None
    found = queue.keys(prefix=key, limit=1)
    return key if key in found and found[key].ready else None


# -- filters -----------------------------------------------------------------------------------------------------------


#: The reasons for which a queue dead-letters a message, each with what a page calls it. An application may have others.
REASONS = {
    "rejected": "failed or rejected",
    **{each: each for each in ("expired", "delivery_limit", "maxlen", "malformed")},
}
#: The value of a field that finds messages without a task, an error or a reason.
NONE = "-"
TEXTS = ("task", "error", "reason", "home", "text", "arguments")
FIELDS = (*TEXTS, "key", "since", "until", "cause")


class Cause(NamedTuple):
    """Why a message was dead-lettered; "" for what is missing."""

    task: str
    error: str
    reason: str


def cause_of(message: Peeked) -> Cause:
    """The cause of the last death."""
    return Cause(task_of(message), error_of(message), message.deaths[0].reason if message.deaths else "")


@dataclass(frozen=True)
class Filter:
    """A message matches if all given fields do. "" and None: any value; but ``key`` "": messages without a key."""

    task: str = ""
    key: str | None = None
    error: str = ""
    reason: str = ""
    home: str = ""
    text: str = ""
    arguments: str = ""
    since_ms: int | None = None
    until_ms: int | None = None
    cause: Cause | None = None
    died: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, str], zone: tzinfo = UTC) -> Filter:
        """Read the filter from fields. ``zone``: that of moments which name none. Raises ``InvalidArgument``."""
        texts = {name: fields.get(name, "").strip() for name in TEXTS}
        since_ms, until_ms = (moment_ms(name, fields.get(name, ""), zone) for name in ("since", "until"))
        cause = _cause(fields.get("cause"))
        died = "died" in fields
        return cls(**texts, key=fields.get("key"), since_ms=since_ms, until_ms=until_ms, cause=cause, died=died)

    def fields(self) -> dict[str, str]:
        """The filter as fields, moments in UTC."""
        found = {name: getattr(self, name) for name in TEXTS if getattr(self, name)}
        if self.key is not None:
            found["key"] = self.key
        for name, ms in (("since", self.since_ms), ("until", self.until_ms)):
            if ms is not None:
                found[name] = datetime.fromtimestamp(ms / 1000, UTC).isoformat()
        if self.cause is not None:
            found["cause"] = json.dumps(self.cause)
        return found | ({"died": "yes"} if self.died else {})

    def __str__(self) -> str:
        """The filter as a question names it: ``task=shop.pay, error=CardDeclined``; "" if all messages match."""
        told = replace(self, died=False).fields() or self.fields()  # dead letters have died, of course
        if "reason" in told:
            told["reason"] = REASONS.get(self.reason, self.reason)
        if self.cause is not None:
            del told["cause"]
            reason = reason_of(self.cause.reason, {"error_class": self.cause.error} if self.cause.error else {})
            told |= {
                name: value and repr(value) for name, value in self.cause._replace(reason=reason)._asdict().items()
            }
        return ", ".join(f"{name}={value or '(none)'}" for name, value in told.items())

    def __bool__(self) -> bool:
        """Whether the filter leaves anything out."""
        return self != Filter()

    # -- the choice --------------------------------------------------------------------------------------------------

    def matches(self, message: Peeked) -> bool:
        """Whether the message matches. ``message.payload`` may be a beginning that holds the headers."""
        return self._walk.matches(message) and self._walk.matches_payload(message)

    @cached_property
    def _walk(self) -> LetterWalk:
        return LetterWalk("", b"", **self.conditions())

    def conditions(self) -> dict[str, Any]:
        """The filter as conditions of ``DeadLetters``. What the engine can check itself needs no payloads read."""
        reason = self.reason if self.reason != NONE else ""
        of_death = self if self.died else Filter()  # else the error may be an attempt's, the moment that of a publish
        error = of_death.error if of_death.error != NONE else ""
        checked: dict[str, Any] = {
            "key": self.key,
            "queue": self.home or None,
            "reason": reason or None,
            "error": error or None,
            "died_after_ms": of_death.since_ms,
            "died_before_ms": of_death.until_ms,
        }
        rest = replace(self, key=None, home="", reason="" if reason else self.reason, error="" if error else self.error)
        if self.died:
            rest = replace(rest, since_ms=None, until_ms=None)
        if any(checked[name] is not None for name in checked.keys() - {"key"}):
            rest = replace(rest, died=False)
        return {**checked, "where": rest._matches} if rest else checked

    def _matches(self, message: Peeked) -> bool:
        """Whether the message matches by what the engine does not check, or only of dead letters."""
        death = message.deaths[0] if message.deaths else None
        at_ms = death.time_ms if death else message.published_ms
        return (
            bool(death or not self.died)
            and (self.reason != NONE or not (death and death.reason))
            and (not self.error or is_class(error_of(message), _wanted(self.error)))
            and (self.since_ms is None or at_ms >= self.since_ms)
            and (self.until_ms is None or at_ms < self.until_ms)
            and (self.cause is None or self.cause == cause_of(message))
            and (not self.text or self.text.lower() in f"{message.task_id} {message.message_id.hex()}".lower())
            and (not self.task or any(_is_task(each, self.task) for each in task_names_of(message)))
            and (not self.arguments or self.arguments.lower() in _arguments_of(message).lower())
        )


def _cause(text: str | None) -> Cause | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or [type(each) for each in found] != [str] * len(Cause._fields):
        fix = "Open the page of causes again, and begin from there."
        raise InvalidArgument("the cause must be a list of a task, an error and a reason", got=shown(text), fix=fix)
    return Cause(*found)


def _wanted(text: str) -> str:
    return "" if text == NONE else text


def _arguments_of(message: Peeked) -> str:
    """The arguments of the Celery task, as they were published; "" if it has none."""
    headers = headers_of(message.payload)
    return f"{headers.get('argsrepr') or ''} {headers.get('kwargsrepr') or ''}"


def _is_task(found: str, wanted: str) -> bool:
    if wanted.endswith("*"):
        return found.startswith(wanted[:-1])
    return found == _wanted(wanted)


def moment_ms(name: str, text: str, zone: tzinfo) -> int | None:
    """A moment in milliseconds since 1970; None for an empty text."""
    if not text.strip():
        return None
    try:
        return min(max(int(formats.read(text, zone).timestamp() * 1000), 1), LATEST_MS)  # 0 is no bound of the history
    except (ValueError, OverflowError):
        fix = "Write it as 2031-12-31T23:59, or with a zone as 2031-12-31T23:59+00:00."
        raise InvalidArgument(f"{name} must be a date and time", given=shown(text), fix=fix) from None


# -- dead letters ------------------------------------------------------------------------------------------------------


def dead_queues(broker: Broker, seen: Overview) -> dict[str, set[str]]:
    """Each queue of dead letters, and the queues whose letters it holds."""
    homes = {each.name: {each.dead_of} for each in seen.queues if each.dead_of is not None}
    for each in seen.queues:
        for name in _led_to(broker, each):
            homes.setdefault(name, set()).add(each.name)
    return homes


def _led_to(broker: Broker, view: QueueView) -> list[str]:
    exchange = view.arguments.get("x-dead-letter-exchange")
    routing_key = view.arguments.get("x-dead-letter-routing-key")
    routing_key = view.name if routing_key is None else routing_key
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        return []
    try:
        return broker.topology.route(exchange, routing_key)
    except QueueError:  # the exchange is not there, so the letters are in <queue>.dead
        return []


#: How many letters are counted unless more are asked for, and how many in one transaction.
MOST_COUNTED = 10_000
COUNTED_AT_ONCE = 500
#: The most transactions of a count over several queues: there may be many queues with few letters.
MOST_PARTS = 2 * MOST_COUNTED // COUNTED_AT_ONCE


@dataclass(slots=True)
class LetterGroup:
    """Dead letters of one cause.

    ``example``, ``example_in``: where the latest of them stands, and its queue; ``said``: the text of its error.
    ``reason``: in a person's words. ``first_ms``, ``last_ms``: when the first and the last died. ``queues``: how many
    letters each queue holds.
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
        return formats.moment(self.first_ms)

    @property
    def last(self) -> datetime:
        return formats.moment(self.last_ms)

    @property
    def filter(self) -> Filter:
        """The filter by which its letters are listed, replayed and discarded."""
        return Filter(cause=self.cause)

    def add(self, queue: str, listed: Listed) -> None:
        """Count one more letter."""
        death = next(iter(listed.message.deaths), None)
        died_ms = death.time_ms if death else 0
        self.count += 1
        self.queues[queue] = self.queues.get(queue, 0) + 1
        self.first_ms = min(self.first_ms or died_ms, died_ms)
        if died_ms >= self.last_ms:
            self.last_ms, self.example, self.example_in = died_ms, listed.spot, queue
            details = death.details if death else {}
            self.said, self.reason = error_line(details), reason_of(self.cause.reason, details)


def group(
    broker: Broker,
    queues: Sequence[str],
    wanted: Filter | None = None,
    *,
    most: int = MOST_COUNTED,
    only_dead: bool = False,
) -> tuple[list[LetterGroup], int, bool]:
    """Group the first dead letters of these queues, such as ``celery.dead``, a part of each queue in turn.

    Returns the groups, the largest first; how many letters were counted; and whether these are all there are.

    ``only_dead``: leave out a queue's own messages, for a queue that a dead-letter exchange leads to.
    """
    parts = max(MOST_PARTS, -(-most // COUNTED_AT_ONCE))
    wanted = wanted or Filter()
    groups: dict[Cause, LetterGroup] = {}
    counted = 0
    todo = deque((each, b"") for each in queues)
    while todo and counted < most and parts:
        queue, after = todo.popleft()
        page = broker.queue(queue).page(min(COUNTED_AT_ONCE, most - counted), after=after)
        counted += len(page.messages)
        for each in page.messages:
            if wanted.matches(each.message) and (not only_dead or died_elsewhere(each.message, queue)):
                cause = cause_of(each.message)
                groups.setdefault(cause, LetterGroup(cause, each.spot, queue)).add(queue, each)
        if page.following:
            todo.append((queue, page.following))
        parts -= 1
    return sorted(groups.values(), key=lambda each: (-each.count, each.cause)), counted, not todo


def letters_in(broker: Broker, queues: Sequence[str]) -> int:
    """How many letters the first :data:`MOST_PARTS` of these queues hold."""
    return sum(broker.queue(each).count() for each in queues[:MOST_PARTS])


def died_elsewhere(message: Peeked, queue: str) -> bool:
    """Whether the message is a dead letter in this queue, and not one of the queue's own messages.

    A replayed message is the queue's own again. So is a message in the queue in which it died first: the queue's
    dead-letter exchange may lead to a queue where messages wait for their next attempt, and from there back.
    """
    own = {death.queue for death in message.deaths if death.first}
    return bool(message.deaths) and queue not in {message.deaths[0].queue, *own}
