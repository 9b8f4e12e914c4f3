"""Programs: what a user of kombu does, step by step. Pure data, made from one seed.

A step names queues, exchanges and channels, and messages by where they stand among those that its channel holds. So a
program with some of its steps left out is still a program, which is what makes a failing one small (``shrink.py``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

#: Channel -> its connection.
CHANNELS = {"a1": "a", "a2": "a", "b1": "b"}
QUEUES = ("q0", "q1", "q2", "q3")
#: Exchange -> its type.
EXCHANGES = {"direct": "direct", "topic": "topic", "fanout": "fanout"}
KEYS = ("red", "red.dark", "blue", "blue.dark.warm")
BINDINGS = (*KEYS, "#", "*", "red.*", "*.dark.#", "blue.#")
#: How long messages and queues live that are to expire; a step that makes one waits for its end.
SHORT_MS = 30
#: How long those live that are not to expire in a program.
LONG_MS = 3_600_000
#: The size of a large body. Half of it is more than all else that a program puts in a queue.
LARGE_BYTES = 1 << 16
STEPS = 28


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``channel``. ``number`` names it, and its message, for good."""

    number: int
    verb: str
    channel: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{self.number:3} {self.channel}.{self.verb}({given})"


def step(number: int, verb: str, channel: str = "a1", /, **given: Any) -> Step:
    """For programs that a person writes."""
    return Step(number, verb, channel, given)


def make_program(seed: int) -> list[Step]:
    """The program of a seed."""
    return _Maker(random.Random(f"program {seed}")).make()


class _Maker:
    """Draws a small topology first, declares most of it, and then does anything with it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.steps: list[Step] = []
        self.has_priorities = rng.random() < 0.25
        self.queues = QUEUES[: rng.choice([2, 3, 3, 4])]
        self.short = rng.choice(self.queues) if rng.random() < 0.3 else None
        self.arguments = {queue: self._arguments(queue) for queue in self.queues}
        self.auto_delete = {queue: rng.random() < 0.1 for queue in self.queues}
        self.alternates = {each: rng.choice(["", *EXCHANGES]) for each in EXCHANGES if rng.random() < 0.3}
        self.has_large = any("x-max-length-bytes" in each for each in self.arguments.values())
        self.verbs = dict(VERBS)

    def make(self) -> list[Step]:
        rng = self.rng
        for exchange in EXCHANGES:
            if rng.random() < 0.8:
                self._declare_exchange(exchange)
        for queue in self.queues:
            if rng.random() < 0.9:
                self._declare_queue(queue)
        for _ in range(rng.choice([2, 4, 6])):
            self._bind()
        while len(self.steps) < STEPS + 10:
            (verb,) = rng.choices([*self.verbs], [*self.verbs.values()])
            getattr(self, f"_{verb}")()
        return self.steps

    def _add(self, verb: str, **given: Any) -> None:
        self.steps.append(Step(len(self.steps), verb, self.rng.choice(["a1", "a1", "a2", "b1"]), given))

    def _queue(self) -> str:
        return self.rng.choice(self.queues if self.rng.random() < 0.97 else QUEUES)

    def _queue_that_is_there(self) -> str:
        """Or was: others go by themselves. A message to one that is not there makes it here, and ends a program."""
        there = dict.fromkeys(self.queues, False)
        for each in self.steps:
            if each.verb in ("declare_queue", "delete_queue") and not each.given.get("passive"):
                there[each.given["queue"]] = each.verb == "declare_queue"
        found = [queue for queue, is_there in there.items() if is_there]
        return self.rng.choice(found) if found and self.rng.random() < 0.99 else self._queue()

    def _arguments(self, queue: str) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {}
        if self.has_priorities:
            found["x-max-priority"] = rng.choice([3, 9])
        elif rng.random() < 0.12:
            found["x-queue-type"] = "quorum"
            if rng.random() < 0.7:
                found["x-delivery-limit"] = rng.choice([0, 1, 2])
        if "x-queue-type" not in found:  # a quorum queue is full when it has noticed it
            found |= self._limits()
        if queue == self.short:
            found["x-message-ttl"] = SHORT_MS
        elif rng.random() < 0.1:
            found["x-message-ttl"] = LONG_MS
        if rng.random() < 0.1:
            found["x-expires"] = LONG_MS
        if rng.random() < 0.12:
            found["x-single-active-consumer"] = True
        return found | self._dead_letters(queue)

    def _limits(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {}
        if rng.random() < 0.3:
            found["x-max-length"] = rng.choice([0, 1, 1, 2, 2, 3])
        if rng.random() < 0.15:  # between two numbers of large bodies: what is counted beside them is not the same here
            found["x-max-length-bytes"] = rng.choice([0, 1, 1, 2]) * LARGE_BYTES + LARGE_BYTES // 2
        if found and self.has_priorities:  # which message gives way is another one here
            found["x-overflow"] = rng.choice(["reject-publish", "reject-publish-dlx"])
        elif found and rng.random() < 0.7:
            found["x-overflow"] = rng.choice(["drop-head", "reject-publish", "reject-publish-dlx"])
        if found.get("x-overflow", "drop-head") == "drop-head":
            # A consumer that waits gets what is too much for the queue alone, or not: queue-arguments.md.
            least = {"x-max-length": 1, "x-max-length-bytes": 2 * LARGE_BYTES + LARGE_BYTES // 2}
            found |= {name: max(found[name], limit) for name, limit in least.items() if name in found}
        return found

    def _dead_letters(self, queue: str) -> dict[str, Any]:
        """What expires at once comes to rest elsewhere: a circle of the rejected has no end."""
        rng = self.rng
        if rng.random() < 0.4:
            return {}
        if queue == self.short:
            others = [each for each in self.queues if each != self.short]
            return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": rng.choice(others)}
        found: dict[str, Any] = {"x-dead-letter-exchange": rng.choice(["", *EXCHANGES])}
        if rng.random() < (0.9 if not found["x-dead-letter-exchange"] else 0.3):
            found["x-dead-letter-routing-key"] = rng.choice([*self.queues, *KEYS])
        return found

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _declare_exchange(self, exchange: str | None = None) -> None:
        rng = self.rng
        exchange = exchange or rng.choice([*EXCHANGES])
        kind = EXCHANGES[exchange] if rng.random() < 0.97 else rng.choice([*EXCHANGES.values()])
        given = {"alternate": self.alternates[exchange]} if exchange in self.alternates else {}
        if rng.random() < 0.02:
            given = {"alternate": rng.choice([*EXCHANGES])}
        self._add("declare_exchange", exchange=exchange, type=kind, **given)

    def _look_for_exchange(self) -> None:
        self._add("declare_exchange", exchange=self.rng.choice([*EXCHANGES]), type="direct", passive=True)

    def _delete_exchange(self) -> None:
        self._add("delete_exchange", exchange=self.rng.choice([*EXCHANGES]), if_unused=self.rng.random() < 0.5)

    def _declare_queue(self, queue: str | None = None) -> None:
        queue = queue or self._queue()
        if queue not in self.arguments:
            return
        arguments = self.arguments[queue]
        if self.rng.random() < 0.02:
            arguments = {**arguments, "x-expires": 2 * LONG_MS}
        self._add("declare_queue", queue=queue, arguments=arguments, auto_delete=self.auto_delete[queue])

    def _look_for_queue(self) -> None:
        self._add("declare_queue", queue=self._queue(), passive=True)

    def _delete_queue(self) -> None:
        rng = self.rng
        self._add("delete_queue", queue=self._queue(), if_unused=rng.random() < 0.4, if_empty=rng.random() < 0.4)

    def _purge(self) -> None:
        self._add("purge", queue=self._queue())

    def _bind(self) -> None:
        rng = self.rng
        self._add("bind", queue=self._queue(), exchange=rng.choice([*EXCHANGES]), key=rng.choice(BINDINGS))

    def _unbind(self) -> None:
        bound = [each.given for each in self.steps if each.verb == "bind"]
        self._add("unbind", **self.rng.choice(bound)) if bound else None

    def _publish(self) -> None:
        rng = self.rng
        exchange = rng.choice(["", "", *EXCHANGES])
        key = rng.choice(KEYS) if exchange else self._queue_that_is_there()
        given: dict[str, Any] = {"exchange": exchange, "key": key}
        if rng.random() < 0.2:
            given["mandatory"] = True
        if self.has_priorities and rng.random() < 0.7:
            given["priority"] = rng.choice([0, 1, 2, 5, 9])
        if rng.random() < 0.1:
            given["expiration_ms"] = LONG_MS
        if rng.random() < 0.15:
            given["headers"] = rng.choice(HEADERS)
        if rng.random() < 0.1:
            given["correlation_id"] = rng.choice(["c", "", None])
        if self.has_large and rng.random() < 0.6:
            given["size"] = rng.choice([1, 1, 1, 2]) * LARGE_BYTES
        self._add("publish", **given)

    def _publish_expiring(self) -> None:
        self._add("publish_expiring", queue=self._queue())

    def _get(self) -> None:
        self._add("get", queue=self._queue(), no_ack=self.rng.random() < 0.3)

    def _consume(self) -> None:
        rng = self.rng
        self._add("consume", queue=self._queue(), tag=rng.choice(["c0", "c1", "c2"]), no_ack=rng.random() < 0.2)

    def _cancel(self) -> None:
        self._add("cancel", tag=self.rng.choice(["c0", "c1", "c2"]))

    def _qos(self) -> None:
        self._add("qos", count=self.rng.choice([0, 1, 1, 2, 3]))

    def _ack(self) -> None:
        self._add("ack", at=self.rng.randrange(4), multiple=self.rng.random() < 0.15)

    def _ack_all(self) -> None:
        self._add("ack_all")

    def _ack_again(self) -> None:
        self._add("ack_again")

    def _reject(self) -> None:
        self._add("reject", at=self.rng.randrange(4), requeue=self.rng.random() < 0.35)

    def _recover(self) -> None:
        self._add("recover")

    def _close_channel(self) -> None:
        self._add("close_channel")

    def _close_connection(self) -> None:
        self._add("close_connection")

    def _expire_queue(self) -> None:
        self._add("expire_queue", dead_letters=self.rng.random() < 0.5)

    def _leave_exclusive(self) -> None:
        self._add("leave_exclusive", auto_delete=self.rng.random() < 0.5)


#: Verb -> weight.
VERBS: Mapping[str, int] = {
    "publish": 30,
    "publish_expiring": 3,
    "get": 12,
    "consume": 8,
    "cancel": 3,
    "qos": 3,
    "ack": 8,
    "reject": 12,
    "recover": 2,
    "ack_all": 1,
    "ack_again": 1,
    "purge": 1,
    "declare_queue": 4,
    "look_for_queue": 1,
    "delete_queue": 2,
    "declare_exchange": 2,
    "look_for_exchange": 1,
    "delete_exchange": 1,
    "bind": 2,
    "unbind": 1,
    "close_channel": 2,
    "close_connection": 1,
    "expire_queue": 1,
    "leave_exclusive": 1,
}
HEADERS: Sequence[Mapping[str, Any]] = (
    {"n": 7, "s": "text"},
    {"nested": {"list": [1, "two", True]}},
    {"none": None},
    {"price": Decimal("1.50"), "at": datetime(2031, 12, 31, 23, 59, 59)},  # noqa: DTZ001 - AMQP has no zones
)
