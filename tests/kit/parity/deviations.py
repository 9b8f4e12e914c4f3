"""Deliberate differences from RabbitMQ: the table in the docs says which there are, a rule here says how each looks.

A rule is good for one step at a time. After one that *ends* a program nothing is compared: the queues of the two are
not the same any more. Of its own step a rule excuses what it *explains*, and what *follows* from that: a message that
only one of the two has got differs in every field. Each rule has a *witness*, a program that shows it: a rule that
explains nothing is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kit.parity.broker import Observation
from kit.parity.program import CHANNELS, LARGE_BYTES, QUEUES, SHORT_MS, Step, step

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"
_ROW = re.compile(r"^\| `([a-z0-9-]+)` \|", re.MULTILINE)
_HEADING = "### Differences, one by one"


class Difference(NamedTuple):
    """What was observed at one place: by RabbitMQ's program, and by ours."""

    place: tuple[str, ...]
    theirs: Any
    ours: Any


@dataclass(frozen=True)
class Seen:
    """A step, what came before it, and all that was observed of it on both sides. ``earlier``: before it, here."""

    before: Sequence[Step]
    step: Step
    theirs: Observation
    ours: Observation
    earlier: Sequence[Observation] = ()

    def arguments(self, queue: str) -> Mapping[str, Any]:
        """With which it was declared last."""
        for each in reversed([*self.before, self.step]):
            if each.verb == "declare_queue" and each.given["queue"] == queue and "arguments" in each.given:
                found: Mapping[str, Any] = each.given["arguments"]
                return found
        return {}

    def used(self, *, connection: bool = False) -> set[str]:
        """The queues that the step's channel, or its connection, has had messages of."""
        own = [
            name
            for name, its_connection in CHANNELS.items()
            if name == self.step.channel or (connection and its_connection == CHANNELS[self.step.channel])
        ]
        return {each.given["queue"] for each in self.before if each.channel in own and each.verb in ("get", "consume")}

    def has_had(self, label: str) -> int:
        """How often ours has delivered a message until now."""
        return _deliveries(label, [*self.earlier, self.ours])

    def errors(self) -> tuple[str | None, str | None]:
        """RabbitMQ's and ours."""
        return self.theirs.get(("error",)), self.ours.get(("error",))


def _deliveries(label: str, observed: Sequence[Observation]) -> int:
    return sum(place[-1] == "body" and value == label for each in observed for place, value in each.items())


@dataclass(frozen=True)
class Rule:
    """``explains``: whether a difference is of this kind. ``follows``: whether one comes with those."""

    explains: Callable[[Difference, Seen], bool]
    witness: Sequence[Step]
    ends: bool = False
    follows: Callable[[Difference, Seen], bool] = lambda difference, seen: False


def documented(text: str | None = None) -> list[str]:
    """The ids in the docs' table."""
    _, _, section = (PAGE.read_text(encoding="utf-8") if text is None else text).partition(_HEADING)
    return _ROW.findall(section.split("\n## ")[0])


def explain(differences: Sequence[Difference], seen: Seen, ids: Sequence[str]) -> tuple[dict[int, str], bool]:
    """For each difference by its number the id of the rule that explains it, and whether the program ends there."""
    found: dict[int, str] = {}
    for number, difference in enumerate(differences):
        cause = next((each for each in ids if RULES[each].explains(difference, seen)), None)
        if cause is not None:
            found[number] = cause
    causes = [each for each in ids if each in found.values()]
    for number, difference in enumerate(differences):
        cause = next((each for each in causes if RULES[each].follows(difference, seen)), None)
        if number not in found and cause is not None:
            found[number] = cause
    return found, any(RULES[each].ends for each in found.values())


# -- rules -------------------------------------------------------------------------------------------------------------


def _is_place(*place: str | None) -> Callable[[Difference, Seen], bool]:
    """None stands for anything."""

    def explains(difference: Difference, seen: Seen) -> bool:
        return len(place) == len(difference.place) and all(
            wanted in (None, there) for wanted, there in zip(place, difference.place, strict=True)
        )

    return explains


def _stays_open(difference: Difference, seen: Seen) -> bool:
    return difference == (("channel closed",), True, False)


def _is_dead_letter_queue(difference: Difference, seen: Seen) -> bool:
    return difference.place[0] == "queue" and difference.place[1].endswith(".dead")


_DYING_KEY = "x-dead-letter-routing-key"
_DYING = {"x-dead-letter-exchange": "", _DYING_KEY: "q1"}
_EXPIRING = {"x-message-ttl": SHORT_MS, **_DYING}
_FULL = {"x-max-length": 0, "x-overflow": "reject-publish"}


def _counts_attempts(difference: Difference, seen: Seen) -> bool:
    """No more than there were. RabbitMQ counts in quorum queues only, and from 0 on."""
    place, theirs, ours = difference
    if place[-1] != "header x-delivery-count":
        return False
    queue = place[1] if place[0] == "delivered" else seen.step.given["queue"]
    is_quorum = seen.arguments(queue).get("x-queue-type") == "quorum"
    label = str(seen.ours.get((*place[:-1], "body")))
    is_number = ours is not None and 1 <= ours < seen.has_had(label)
    return (is_number or (is_quorum and ours is None)) and isinstance(theirs, int) == is_quorum


#: By RabbitMQ.
_IS_REFUSED = Difference(("error",), "PreconditionFailed", None)


def _made_by_a_message(difference: Difference, seen: Seen) -> bool:
    """Something is in a queue that RabbitMQ does not have, and that was not here before: so it is none that stayed."""
    place, theirs, ours = difference
    is_new = not seen.earlier or seen.earlier[-1].get(place) is None
    is_declared = seen.step.verb == "declare_queue" and place[:2] == ("queue", seen.step.given["queue"])
    is_made = place[0] == "queue" and place[-1] == "ready" and theirs is None and bool(ours)
    return is_made and is_new and not is_declared


def _is_made_by_a_message(difference: Difference, seen: Seen) -> bool:
    """RabbitMQ returned that message, if its publisher wanted that; and here a queue has come by itself."""
    place, theirs, ours = difference
    if place[0] == "returned":
        return bool(seen.step.given.get("mandatory")) and ours is None
    ready = (*place[:2], "ready")
    made = _made_by_a_message(Difference(ready, seen.theirs.get(ready), seen.ours.get(ready)), seen)
    return place[-1] == "consumers" and theirs is None and ours == 0 and made


def _is_another_that_was_had(difference: Difference, seen: Seen) -> bool:
    """From a quorum queue each has got a message that was there before, but not the same one."""
    place, theirs, ours = difference
    if place[-1] != "body" or None in (theirs, ours) or place[0] not in ("result", "delivered"):
        return False
    queue = place[1] if place[0] == "delivered" else seen.step.given["queue"]
    is_quorum = seen.arguments(queue).get("x-queue-type") == "quorum"
    return is_quorum and all(_deliveries(each, seen.earlier) for each in (theirs, ours))


def _is_of_another_that_was_had(difference: Difference, seen: Seen) -> bool:
    body = (*difference.place[:-1], "body")
    return _is_another_that_was_had(Difference(body, seen.theirs.get(body), seen.ours.get(body)), seen)


def _is_taken(difference: Difference, seen: Seen) -> bool:
    """By a get, on RabbitMQ only."""
    place, theirs, ours = difference
    if place[0] == "result":
        return ours is None
    is_left = place == ("queue", seen.step.given["queue"], "ready") and None not in (theirs, ours)
    return is_left and bool(ours - theirs == 1)


def _as_its_channel_closed(difference: Difference, seen: Seen, *, connection: bool = False) -> bool:
    """On RabbitMQ: consumers are gone, and what it had is ready again, or with others."""
    place, theirs, ours = difference
    if len(place) == 1:
        return (place[0] in ("channel closed", "code") and ours is None) or (place[0] == "result" and theirs is None)
    return place[0] in ("queue", "delivered") and place[1] in seen.used(connection=connection)


def _as_a_quorum_queue_refused(difference: Difference, seen: Seen) -> bool:
    """RabbitMQ has closed the connection, and here the step did what it does to any queue."""
    place, theirs, ours = difference
    if place == ("code",):
        return theirs in (405, 540)
    if place[:1] == ("result",):
        return theirs is None
    its_queue = seen.step.given["queue"]
    is_deleted = (place[:2] == ("queue", its_queue) and ours is None) or (place == ("cancelled",) and theirs is None)
    if seen.step.verb == "delete_queue" and is_deleted:
        return True
    if seen.step.verb in ("get", "consume") and place[:2] in (("queue", its_queue), ("delivered", its_queue)):
        return True
    return _as_its_channel_closed(difference, seen, connection=True)


def _shares_a_window(difference: Difference, seen: Seen) -> bool:
    """A channel has several consumers, one of them of this queue, and it was told to limit each by itself."""
    for name in CHANNELS:
        own = [each for each in seen.before if each.channel == name]
        limits = [each for each in own if each.verb == "qos"]
        queues = [each.given["queue"] for each in own if each.verb == "consume"]
        is_limited = bool(limits) and not limits[-1].given.get("of_channel", True)
        if is_limited and len(queues) > 1 and difference.place[1] in queues:
            return True
    return False


def _is_left_by_a_shared_window(difference: Difference, seen: Seen) -> bool:
    _, theirs, ours = difference
    is_left = _is_place("queue", None, "ready")(difference, seen) and None not in (theirs, ours) and theirs < ours
    return is_left and _shares_a_window(difference, seen)


def _waits_for_a_shared_window(difference: Difference, seen: Seen) -> bool:
    return difference.place[0] == "delivered" and difference.ours is None and _shares_a_window(difference, seen)


def _is_open_to_others(difference: Difference, seen: Seen) -> bool:
    """Another connection looks at it: RabbitMQ does not let it."""
    is_declared = seen.step.verb == "declare_queue" and bool(seen.step.given.get("exclusive"))
    places = [("queue", seen.step.given.get("queue"), field) for field in ("ready", "consumers")]
    return is_declared and difference.place in places and difference.theirs is None and difference.ours == 0


def _knows_no_headers_exchange(difference: Difference, seen: Seen) -> bool:
    is_declared = seen.step.verb == "declare_exchange" and seen.step.given["type"] == "headers"
    return is_declared and difference == (("error",), None, "PreconditionFailed")


def _is_refused(difference: Difference, seen: Seen) -> bool:
    """Here, where RabbitMQ has an exchange, or a message, more."""
    place, theirs, ours = difference
    if place in (("code",), ("channel closed",)):
        return theirs is None
    is_there = place[0] == "exchange" and place[1] == seen.step.given["exchange"] and theirs
    return bool(is_there) or (place == ("queue", seen.step.given.get("key"), "ready") and bool(theirs - ours == 1))


def _counts_headers(difference: Difference, seen: Seen) -> bool:
    """A publish that only what is counted beside its body makes too large."""
    arguments = seen.arguments(str(seen.step.given.get("key")))
    return arguments.get("x-max-length-bytes", LARGE_BYTES) < LARGE_BYTES // 2 and difference == (
        ("error",),
        None,
        "MessageNacked",
    )


def _counts_gets_as_consumers(difference: Difference, seen: Seen) -> bool:
    is_count = _is_place("queue", None, "consumers")(difference, seen) and None not in difference[1:]
    is_more = is_count and difference.theirs > difference.ours
    return is_more and seen.arguments(difference.place[1]).get("x-queue-type") == "quorum"


def _was_returned_without_an_attempt(difference: Difference, seen: Seen) -> bool:
    is_kept = _is_place("queue", None, "ready")(difference, seen) and (difference.theirs or 0) < (difference.ours or 0)
    is_limited = is_kept and "x-delivery-limit" in seen.arguments(difference.place[1])
    is_closed = any(each.verb.startswith("close_") for each in [*seen.before, seen.step])
    return is_limited and (is_closed or seen.errors()[0] is not None)  # an error closes as well


def _drops_least_urgent(difference: Difference, seen: Seen) -> bool:
    arguments = seen.arguments(str(seen.step.given.get("queue")))
    is_shed = {"x-max-priority", "x-max-length"} <= arguments.keys() and "x-overflow" not in arguments
    return is_shed and difference.place[0] in ("result", "delivered") and difference.place[-1] == "body"


def _drops_another(difference: Difference, seen: Seen) -> bool:
    """Which differs by what was drawn from the same program."""
    return difference.place[:-1] == ("result",) and difference.place[-1] == "priority"


def _expires_behind_others(difference: Difference, seen: Seen) -> bool:
    return seen.step.given.get("behind", False) and _is_place("queue", None, "ready")(difference, seen)


def _enters_a_full_queue(difference: Difference, seen: Seen) -> bool:
    place, theirs, ours = difference
    arguments = seen.arguments(place[1]) if len(place) > 1 else {}
    if place[0] == "delivered" and "x-max-length-bytes" in arguments and theirs is None:  # to a consumer, at once
        return (*place[:-1], "header x-first-death-queue") in seen.ours
    if not _is_place("queue", None, "ready")(difference, seen) or None in (theirs, ours):
        return False
    full = arguments.get("x-max-length") == theirs or "x-max-length-bytes" in arguments
    refuses = full and str(arguments.get("x-overflow")).startswith("reject-publish")
    before = [each for queue in QUEUES if (each := seen.arguments(queue)).get(_DYING_KEY) == place[1]]
    has_expired = any({"x-message-ttl", "x-overflow"} <= each.keys() for each in before)  # there, once it had entered
    return bool(ours > theirs and (refuses or has_expired))


def _goes_on_from_a_full_queue(difference: Difference, seen: Seen) -> bool:
    """On RabbitMQ, to the dead-letter exchange of the queue that refuses a dead letter."""
    declared = [
        seen.arguments(queue) for queue in {each.given["queue"] for each in seen.before if each.verb == "declare_queue"}
    ]
    goes_on = any(
        each.get("x-overflow") == "reject-publish-dlx" and "x-dead-letter-exchange" in each for each in declared
    )
    return goes_on and _has_more_there(difference)


def _has_more_there(difference: Difference) -> bool:
    """RabbitMQ has a message that ours has not."""
    place, theirs, ours = difference
    is_ready = place[0] == "queue" and place[-1] == "ready" and None not in (theirs, ours) and theirs > ours
    return is_ready or (place[0] == "delivered" and ours is None)


def _refuses_all(difference: Difference, seen: Seen) -> bool:
    return seen.errors() == ("MessageNacked", "MessageNacked") and _has_more_there(difference)


def _expires_at_once(difference: Difference, seen: Seen) -> bool:
    """RabbitMQ has given it to a consumer that waited."""
    is_at_once = seen.step.verb == "publish" and seen.step.given.get("expiration_ms") == 0
    return is_at_once and difference.place[0] == "delivered" and difference.ours is None


def _goes_on_counting(difference: Difference, seen: Seen) -> bool:
    """RabbitMQ, from the deaths that a publisher has written into the headers."""
    published = any("x-death" in each.given.get("headers", ()) for each in seen.before if each.verb == "publish")
    return published and difference.place[-1].startswith(("x-death ", "header x-first-death-"))


def _has_deaths_in_another_order(difference: Difference, seen: Seen) -> bool:
    """Three or more, all of them the same, the newest one first on both sides."""
    if not difference.place[-1].startswith("x-death "):
        return False

    def queues(observed: Observation) -> list[Any]:
        message = difference.place[:-1]
        found = (observed.get((*message, f"x-death {number} queue")) for number in range(len(observed)))
        return [queue for queue in found if queue is not None]

    theirs, ours = queues(seen.theirs), queues(seen.ours)
    return len(ours) > 2 and sorted(theirs) == sorted(ours) and bool(theirs[0] == ours[0])


def _knows_bindings_by_arguments(difference: Difference, seen: Seen) -> bool:
    """RabbitMQ still has one of several with the same key."""
    bound = any(each.verb == "bind" and each.given.get("arguments") for each in seen.before)
    return bound and seen.step.verb == "publish" and _has_more_there(difference)


def _is_another_type(difference: Difference, seen: Seen) -> bool:
    place, theirs, ours = difference
    if not place[-1].startswith("header "):
        return False
    if isinstance(ours, bytes):
        return bool(theirs == ours.decode())
    return isinstance(ours, datetime) and bool(theirs == ours.astimezone(UTC).replace(tzinfo=None, microsecond=0))


_DEATH = {"queue": "q0", "reason": "rejected", "count": 1, "exchange": "", "routing-keys": ["q0"]}


RULES: Mapping[str, Rule] = {
    "channel-stays-open": Rule(_stays_open, [step(0, "declare_queue", queue="q0", passive=True)]),
    "dead-letters-kept": Rule(
        _is_dead_letter_queue,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
            step(3, "reject", at=0, requeue=False),
        ],
    ),
    "death-time": Rule(
        lambda difference, seen: difference[1:] == ("datetime", "int"),
        [
            step(0, "declare_queue", queue="q0", arguments=_EXPIRING),
            step(1, "declare_queue", queue="q1"),
            step(2, "publish", exchange="", key="q0"),
            step(3, "get", queue="q1"),
        ],
    ),
    "last-death": Rule(
        lambda difference, seen: difference.place[-1].startswith("header x-last-death-") and difference.theirs is None,
        [
            step(0, "declare_queue", queue="q0", arguments=_EXPIRING),
            step(1, "declare_queue", queue="q1"),
            step(2, "publish", exchange="", key="q0"),
            step(3, "get", queue="q1"),
        ],
    ),
    "delivery-count": Rule(
        _counts_attempts,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
            step(3, "reject", at=0, requeue=True),
            step(4, "get", queue="q0"),
        ],
    ),
    "dead-letters-enter": Rule(
        _enters_a_full_queue,
        [
            step(0, "declare_queue", queue="q0", arguments=_DYING),
            step(1, "declare_queue", queue="q1", arguments=_FULL),
            step(2, "publish", exchange="", key="q0"),
            step(3, "get", queue="q0"),
            step(4, "reject", at=0, requeue=False),
        ],
        ends=True,
        follows=_goes_on_from_a_full_queue,
    ),
    "single-active-get": Rule(
        lambda difference, seen: (
            seen.step.verb == "get"
            and difference.place == ("result", "body")
            and difference.ours is None
            and "x-single-active-consumer" in seen.arguments(seen.step.given["queue"])
        ),
        [
            step(0, "declare_queue", queue="q0", arguments={"x-single-active-consumer": True}),
            step(1, "qos", count=1),
            step(2, "consume", queue="q0", tag="c0"),
            step(3, "publish", exchange="", key="q0"),
            step(4, "publish", exchange="", key="q0"),
            step(5, "get", queue="q0"),
        ],
        ends=True,
        follows=_is_taken,
    ),
    "redeclared-arguments": Rule(
        lambda difference, seen: seen.step.verb == "declare_queue" and difference == _IS_REFUSED,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "declare_queue", queue="q0", arguments={"x-max-length": 1}),
        ],
        ends=True,
        follows=_as_its_channel_closed,
    ),
    "unknown-delivery-tag": Rule(
        lambda difference, seen: seen.step.verb == "ack_again" and difference == _IS_REFUSED,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
            step(3, "ack", at=0),
            step(4, "ack_again"),
        ],
        ends=True,
        follows=_as_its_channel_closed,
    ),
    "exclusive-not-locked": Rule(
        _is_open_to_others,
        [step(0, "declare_queue", queue="q0", exclusive=True)],  # another connection looks
        ends=True,
    ),
    "exchange-stays": Rule(
        lambda difference, seen: difference.place[0] == "exchange" and difference[1:] == (False, True),
        [
            step(0, "declare_exchange", exchange="fanout", type="fanout", auto_delete=True),
            step(1, "declare_queue", queue="q0"),
            step(2, "bind", queue="q0", exchange="fanout", key=""),
            step(3, "unbind", queue="q0", exchange="fanout", key=""),
        ],
        ends=True,
    ),
    "delivery-limit-of-attempts": Rule(
        _was_returned_without_an_attempt,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-queue-type": "quorum", "x-delivery-limit": 0}),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
            step(3, "close_channel"),
        ],
        ends=True,
    ),
    "quorum-consumer-count": Rule(
        _counts_gets_as_consumers,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-queue-type": "quorum"}),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
        ],
    ),
    "quorum-return-order": Rule(
        _is_another_that_was_had,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-queue-type": "quorum"}),
            step(1, "publish", exchange="", key="q0"),
            step(2, "publish", exchange="", key="q0"),
            step(3, "get", queue="q0"),
            step(4, "get", queue="q0"),
            step(5, "reject", at=1, requeue=True),
            step(6, "reject", at=0, requeue=True),
            step(7, "get", queue="q0"),
        ],
        ends=True,
        follows=_is_of_another_that_was_had,
    ),
    "quorum-queues": Rule(
        lambda difference, seen: (
            difference.place == ("error",)
            and difference.theirs in ("AMQPNotImplementedError", "ResourceLocked")
            and seen.arguments(seen.step.given["queue"]).get("x-queue-type") == "quorum"
        ),
        [
            step(0, "declare_queue", queue="q0", arguments={"x-queue-type": "quorum"}),
            step(1, "delete_queue", queue="q0", if_unused=True),
        ],
        ends=True,
        follows=_as_a_quorum_queue_refused,
    ),
    "prefetch-of-channel": Rule(
        _is_left_by_a_shared_window,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "declare_queue", queue="q1"),
            step(2, "qos", count=1, of_channel=False),
            step(3, "consume", queue="q0", tag="c0"),
            step(4, "consume", queue="q1", tag="c1"),
            step(5, "publish", exchange="", key="q0"),
            step(6, "publish", exchange="", key="q1"),
        ],
        ends=True,
        follows=_waits_for_a_shared_window,
    ),
    "queue-without-declaration": Rule(
        _made_by_a_message,
        [step(0, "publish", exchange="", key="q0", mandatory=True)],
        ends=True,
        follows=_is_made_by_a_message,
    ),
    "drops-least-urgent": Rule(
        _drops_least_urgent,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-max-priority": 9, "x-max-length": 1}),
            step(1, "publish", exchange="", key="q0", priority=0),
            step(2, "publish", exchange="", key="q0", priority=9),
            step(3, "get", queue="q0"),
        ],
        ends=True,
        follows=_drops_another,
    ),
    "expired-behind-others": Rule(
        _expires_behind_others,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0"),
            step(2, "publish_expiring", queue="q0", behind=True),
        ],
        ends=True,
    ),
    "headers-exchange": Rule(
        _knows_no_headers_exchange,
        [step(0, "declare_exchange", exchange="topic", type="headers")],
        ends=True,
        follows=_is_refused,
    ),
    "bytes-of-messages": Rule(
        _counts_headers,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-max-length-bytes": 2, "x-overflow": "reject-publish"}),
            step(1, "publish", exchange="", key="q0"),
        ],
        ends=True,
        follows=_is_refused,
    ),
    "full-queue-refuses-all": Rule(
        _refuses_all,
        [
            step(0, "declare_exchange", exchange="fanout", type="fanout"),
            step(1, "declare_queue", queue="q0", arguments=_FULL),
            step(2, "declare_queue", queue="q1"),
            step(3, "bind", queue="q0", exchange="fanout", key=""),
            step(4, "bind", queue="q1", exchange="fanout", key=""),
            step(5, "publish", exchange="fanout", key=""),
        ],
        ends=True,
    ),
    "full-queue-dead-letters-quietly": Rule(
        lambda difference, seen: (
            seen.errors() == ("MessageNacked", None) and difference.place[0] in ("error", "channel closed", "result")
        ),
        [
            step(0, "declare_queue", queue="q0", arguments=_FULL | {"x-overflow": "reject-publish-dlx"}),
            step(1, "publish", exchange="", key="q0"),
        ],
    ),
    "expires-at-once": Rule(
        _expires_at_once,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "consume", queue="q0", tag="c0"),
            step(2, "publish", exchange="", key="q0", expiration_ms=0),
        ],
        ends=True,
    ),
    "published-deaths": Rule(
        _goes_on_counting,
        [
            step(0, "declare_queue", queue="q0", arguments=_DYING),
            step(1, "declare_queue", queue="q1"),
            step(2, "publish", exchange="", key="q0", headers={"x-death": [_DEATH]}),
            step(3, "get", queue="q0"),
            step(4, "reject", at=0, requeue=False),
            step(5, "get", queue="q1"),
        ],
    ),
    "death-order": Rule(
        _has_deaths_in_another_order,
        [
            *(
                step(
                    at, "declare_queue", queue=f"q{at}", arguments=_DYING | {"x-dead-letter-routing-key": f"q{at + 1}"}
                )
                for at in range(3)
            ),
            step(3, "declare_queue", queue="q3"),
            step(4, "publish", exchange="", key="q0"),
            step(5, "get", queue="q0"),
            step(6, "reject", at=0, requeue=False),
            step(7, "get", queue="q1"),
            step(8, "reject", at=0, requeue=False),
            step(9, "get", queue="q2"),
            step(10, "reject", at=0, requeue=False),
            step(11, "get", queue="q3"),
        ],
    ),
    "binding-arguments": Rule(
        _knows_bindings_by_arguments,
        [
            step(0, "declare_exchange", exchange="direct", type="direct"),
            step(1, "declare_queue", queue="q0"),
            step(2, "bind", queue="q0", exchange="direct", key="red", arguments={"n": 1}),
            step(3, "bind", queue="q0", exchange="direct", key="red", arguments={"n": 2}),
            step(4, "unbind", queue="q0", exchange="direct", key="red", arguments={"n": 1}),
            step(5, "publish", exchange="direct", key="red"),
        ],
        ends=True,
    ),
    "reserved-names": Rule(
        lambda difference, seen: difference == (("error",), "AccessRefused", None),
        [step(0, "declare_queue", queue="amq.mine")],
        ends=True,
        follows=_as_its_channel_closed,
    ),
    "header-types": Rule(
        _is_another_type,
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0", headers={"b": b"ab", "t": datetime(2031, 1, 1, 0, 0, 0, 7, UTC)}),
            step(2, "get", queue="q0"),
        ],
    ),
}
