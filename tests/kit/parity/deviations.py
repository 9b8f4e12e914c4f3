"""Deliberate differences from RabbitMQ: the table in the docs says which there are, a rule here says how each looks.

A rule is good for one step at a time. One that *ends* a program explains all that differs in its step, and what
follows is not compared: the queues of the two are not the same any more. Each has a *witness*, a program that shows it:
a rule that explains nothing is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kit.parity.broker import Observation
from kit.parity.program import SHORT_MS, Step, step

__all__ = ["RULES", "Difference", "Rule", "Seen", "documented", "explain"]

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
    """A step, what came before it, and all that was observed of it on both sides."""

    before: Sequence[Step]
    step: Step
    theirs: Observation
    ours: Observation

    def arguments(self, queue: str) -> Mapping[str, Any]:
        """With which it was declared last."""
        for each in reversed([*self.before, self.step]):
            if each.verb == "declare_queue" and each.given["queue"] == queue and "arguments" in each.given:
                found: Mapping[str, Any] = each.given["arguments"]
                return found
        return {}

    def errors(self) -> tuple[str | None, str | None]:
        """RabbitMQ's and ours."""
        return self.theirs.get(("error",)), self.ours.get(("error",))


@dataclass(frozen=True)
class Rule:
    """``explains``: whether a difference is of this kind."""

    explains: Callable[[Difference, Seen], bool]
    witness: Sequence[Step]
    ends: bool = False


def documented(text: str | None = None) -> list[str]:
    """The ids in the docs' table."""
    _, _, section = (PAGE.read_text(encoding="utf-8") if text is None else text).partition(_HEADING)
    return _ROW.findall(section.split("\n## ")[0])


def explain(differences: Sequence[Difference], seen: Seen, ids: Sequence[str]) -> tuple[dict[int, str], bool]:
    """For each difference by its number the id of the rule that explains it, and whether the program ends there."""
    found: dict[int, str] = {}
    for number, difference in enumerate(differences):
        for each in ids:
            if RULES[each].explains(difference, seen):
                found[number] = each
                break
    ending = [each for each in found.values() if RULES[each].ends]
    if ending:
        found = {number: found.get(number, ending[0]) for number in range(len(differences))}
    return found, bool(ending)


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


_DYING = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q1"}
_EXPIRING = {"x-message-ttl": SHORT_MS, **_DYING}
_FULL = {"x-max-length": 0, "x-overflow": "reject-publish"}


def _made_by_a_publish(difference: Difference, seen: Seen) -> bool:
    """Something is in a queue that RabbitMQ does not have, and it is not a dead letter."""
    place, theirs, ours = difference
    return place[0] == "queue" and place[-1] == "ready" and theirs is None and ours is not None


def _counts_gets_as_consumers(difference: Difference, seen: Seen) -> bool:
    is_count = _is_place("queue", None, "consumers")(difference, seen) and None not in difference[1:]
    is_more = is_count and difference.theirs > difference.ours
    return is_more and seen.arguments(difference.place[1]).get("x-queue-type") == "quorum"


def _was_returned_without_an_attempt(difference: Difference, seen: Seen) -> bool:
    is_kept = _is_place("queue", None, "ready")(difference, seen) and (difference.theirs or 0) < (difference.ours or 0)
    is_limited = is_kept and "x-delivery-limit" in seen.arguments(difference.place[1])
    return is_limited and any(each.verb.startswith("close_") for each in [*seen.before, seen.step])


def _drops_least_urgent(difference: Difference, seen: Seen) -> bool:
    arguments = seen.arguments(str(seen.step.given.get("queue")))
    is_shed = {"x-max-priority", "x-max-length"} <= arguments.keys() and "x-overflow" not in arguments
    return is_shed and difference.place[0] in ("result", "delivered") and difference.place[-1] == "body"


def _expires_behind_others(difference: Difference, seen: Seen) -> bool:
    return seen.step.given.get("behind", False) and _is_place("queue", None, "ready")(difference, seen)


def _enters_a_full_queue(difference: Difference, seen: Seen) -> bool:
    place, theirs, ours = difference
    if not _is_place("queue", None, "ready")(difference, seen) or None in (theirs, ours):
        return False
    arguments = seen.arguments(place[1])
    full = arguments.get("x-max-length") == theirs
    return bool(full and ours > theirs and str(arguments.get("x-overflow")).startswith("reject-publish"))


def _refuses_all(difference: Difference, seen: Seen) -> bool:
    return seen.errors() == ("MessageNacked", "MessageNacked") and difference.place[0] in ("queue", "delivered")


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
        lambda difference, seen: difference.place[-1] == "header x-delivery-count",
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
    ),
    "redeclared-arguments": Rule(
        lambda difference, seen: seen.step.verb == "declare_queue" and seen.errors() == ("PreconditionFailed", None),
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "declare_queue", queue="q0", arguments={"x-max-length": 1}),
        ],
        ends=True,
    ),
    "unknown-delivery-tag": Rule(
        lambda difference, seen: seen.step.verb == "ack_again" and seen.errors() == ("PreconditionFailed", None),
        [
            step(0, "declare_queue", queue="q0"),
            step(1, "publish", exchange="", key="q0"),
            step(2, "get", queue="q0"),
            step(3, "ack", at=0),
            step(4, "ack_again"),
        ],
        ends=True,
    ),
    "exclusive-not-locked": Rule(
        lambda difference, seen: bool(seen.step.given.get("exclusive")) and difference.theirs is None,
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
    ),
    "prefetch-of-channel": Rule(
        lambda difference, seen: (
            _is_place("queue", None, "ready")(difference, seen)
            and any(each.verb == "qos" and not each.given.get("of_channel", True) for each in seen.before)
        ),
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
    ),
    "queue-without-declaration": Rule(_made_by_a_publish, [step(0, "publish", exchange="", key="q0")], ends=True),
    "drops-least-urgent": Rule(
        _drops_least_urgent,
        [
            step(0, "declare_queue", queue="q0", arguments={"x-max-priority": 9, "x-max-length": 1}),
            step(1, "publish", exchange="", key="q0", priority=0),
            step(2, "publish", exchange="", key="q0", priority=9),
            step(3, "get", queue="q0"),
        ],
        ends=True,
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
}
