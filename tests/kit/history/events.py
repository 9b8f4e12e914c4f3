"""Reads a history: the calls, deliveries and faults in it, and what may be compared with what.

Model. An event *precedes* another if both were read off one monotonic clock, or off one process's own file, and it
was earlier there. Of two events of machines with different clocks neither precedes the other, so no check finds
anything wrong with their order.

A *delivery* is the time for which a process certainly held a message: from the answer that brought it, or from the
start of its task, to the moment when its settlement was asked for, or when its task ended. The lease is never shorter.

A *fault* names the processes that it *struck*, and lasts. It excuses what a session does that lost its messages only if
it lasted long enough for others to take the session for dead: ``session_ttl``, less one beat of its heart and a second
for the fault to take hold.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

#: How a settlement that was asked for is told, by its answer.
SETTLED = {
    ("ack", "ok"): "done",
    ("ack", "info"): "perhaps",
    ("release", "ok"): "released",
    ("release", "info"): "released",
    ("bury", "ok"): "buried",
    ("bury", "info"): "perhaps",
}
#: What each event has.
COMMON = ("who", "clock", "mono_s", "wall_s", "kind", "pid", "number")
#: Faults in which the store answers, and takes no writes.
REFUSING = {"locked", "disk full"}
#: What only the store can answer, and how long it answers none of that, in seconds, if it does not answer at all.
ASKING, SILENT_S = ("take", "ack", "release"), 5.0
#: A session beats six times in its TTL.
BEATS = 6


@dataclass(frozen=True, eq=False)
class Event:
    """One line of a history; ``number`` counts those of one process."""

    who: str
    clock: str
    mono_s: float
    wall_s: float
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    number: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def precedes(self, other: Event) -> bool:
        if self.clock == other.clock:
            return self.mono_s < other.mono_s
        return (self.who, self.pid) == (other.who, other.pid) and self.number < other.number

    def told(self) -> str:
        fields = " ".join(f"{name}={value}" for name, value in self.fields.items() if value not in (None, "", "call"))
        return f"{self.mono_s:.3f} {self.who} {self.kind} {fields}"


class Call(NamedTuple):
    """An invocation and its answer; none if its process was killed, or never got one."""

    invoked: Event
    answered: Event | None

    @property
    def outcome(self) -> str:
        return self.answered.kind if self.answered is not None else "info"

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.invoked,) if self.answered is None else (self.invoked, self.answered)

    def is_before(self, other: Event) -> bool:
        """Whether it was certainly over by then."""
        return self.answered is not None and self.answered.precedes(other)


class Delivery(NamedTuple):
    """``how`` it ended: done, perhaps, released, buried, retried, refused (it was lost), or open."""

    message: str
    begun: Event
    ended: Event | None
    how: str
    asked: Event | None = None
    settled: Call | None = None

    @property
    def owner(self) -> str:
        return self.begun.who

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.begun,) if self.ended is None else (self.begun, self.ended)


class Fault(NamedTuple):
    """``struck``: the processes that it cut off or stopped; of one that struck the cluster, none."""

    name: str
    struck: frozenset[str]
    begun: Event
    over: Event | None

    @property
    def stops(self) -> bool:
        """Whether those that it struck did nothing at all meanwhile."""
        return self.name.startswith(("kill", "pause"))

    def overlap_s(self, begin: Event, end: Event) -> float:
        """For how long it lasted between two moments."""
        if begin.clock != self.begun.clock:
            return 0.0
        until_s = end.mono_s if self.over is None else min(end.mono_s, self.over.mono_s)
        return max(0.0, until_s - max(begin.mono_s, self.begun.mono_s))


class History:
    """All events of a run, in the order of their clocks."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda each: (each.clock, each.mono_s, each.who, each.number))

    @cached_property
    def setup(self) -> Mapping[str, Any]:
        """What the run had set: ``session_ttl``, ``sweep_interval``, and its queues with what they promise."""
        return next((each.fields for each in self.events if each.kind == "setup"), {})

    @cached_property
    def final(self) -> Event | None:
        """What was in the store when all had ended."""
        return next((each for each in reversed(self.events) if each.kind == "final"), None)

    def queues(self, trait: str) -> dict[str, Any]:
        """Those that have been set up with a trait, and its value."""
        queues = self.setup.get("queues", {})
        return {name: traits[trait] for name, traits in queues.items() if trait in traits}

    @property
    def ttl_s(self) -> float:
        return float(self.setup.get("session_ttl", 30.0))

    @cached_property
    def released(self) -> set[str]:
        """Processes of the release with which the run began: their code is not that of the one which set it up."""
        code = {each.who: each["folder"] for each in self.events if each.kind == "code"}
        own = {code.get(each.who) for each in self.events if each.kind == "setup"}
        return {who for who, folder in code.items() if folder not in own}

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """By their verbs."""
        answers = {each["call"]: each for each in self.events if each.kind in {"ok", "fail", "info"}}
        found = defaultdict[str, list[Call]](list)
        for each in self.events:
            if each.kind == "invoke":
                found[each["op"]].append(Call(each, answers.get(each["call"])))
        return found

    @cached_property
    def publishes(self) -> dict[str, list[Call]]:
        """By the message's name, in the order of their invocations."""
        found = defaultdict[str, list[Call]](list)
        for call in self.calls["publish"]:
            found[call.invoked["message"]].append(call)
        return found

    def attempts(self, message: str) -> int:
        """How often it may be stored. To publish again after an unknown outcome stores it once."""
        return sum(each.outcome != "fail" and not each.invoked["again"] for each in self.publishes[message])

    def of(self, message: str, field: str) -> Any:
        """What its publisher has said of it."""
        return next((each.invoked[field] for each in self.publishes.get(message, [])), None)

    @cached_property
    def deliveries(self) -> dict[str, list[Delivery]]:
        """By the message's name, in the order in which they began."""
        found = defaultdict[str, list[Delivery]](list)
        for each in sorted([*self._of_tasks(), *self._of_takes()], key=lambda each: each.begun.mono_s):
            found[each.message].append(each)
        return found

    @property
    def open(self) -> list[Delivery]:
        """Those that have not ended."""
        return [each for deliveries in self.deliveries.values() for each in deliveries if each.how == "open"]

    def _of_tasks(self) -> Iterator[Delivery]:
        open_ = defaultdict[tuple[str, int, str], list[Event]](list)
        for each in self.events:
            if each.kind == "start":
                open_[each.who, each.pid, each["message"]].append(each)
            elif each.kind == "end" and (begun := open_[each.who, each.pid, each["message"]]):
                yield Delivery(each["message"], begun.pop(), each, each["how"])
        for (_, _, message), begun in open_.items():
            yield from (Delivery(message, each, None, "open") for each in begun)

    def _of_takes(self) -> Iterator[Delivery]:
        settled = {call.invoked["take"]: call for op in ("ack", "release", "bury") for call in self.calls[op]}
        for take in self.calls["take"]:
            if take.answered is None or not take.answered["message"]:
                continue
            call = settled.get(take.invoked["call"])
            how = "open" if call is None else SETTLED.get((call.invoked["op"], call.outcome), "refused")
            ended = None if call is None else call.invoked
            yield Delivery(take.answered["message"], take.answered, ended, how, take.invoked, call)

    def key(self, message: str) -> tuple[str, str]:
        return self.of(message, "queue"), self.of(message, "key") or ""

    @cached_property
    def faults(self) -> list[Fault]:
        over = {each["fault"]: each for each in self.events if each.kind == "healed"}
        return [
            Fault(each["name"], frozenset(each["struck"] or ()), each, over.get(each["fault"]))
            for each in self.events
            if each.kind == "fault"
        ]

    def ends(self, fault: Fault) -> Event | None:
        """When it was over for those that it struck: never for what was killed, though another was started instead."""
        return None if fault.name == "kill" else fault.over

    def severe(self, who: str) -> list[Fault]:
        """Those after which others may have taken the process for dead."""
        enough_s = self.ttl_s * (1 - 1 / BEATS) - 1
        last = self.events[-1]
        return [
            each
            for each in self.faults
            if who in each.struck
            and (each.name == "kill" or each.overlap_s(each.begun, self.ends(each) or last) >= enough_s)
        ]

    def parted(self, delivery: Delivery) -> Event | None:
        """When its owner may have lost the message without knowing, if it may.

        A severe fault counts while it holds the message, and shortly before: what its process had claimed by then it
        still begins. So does its end, if it could not settle its messages. A process of the release with which the run
        began may lose any: its prefork worker forgets what a child has just begun.
        """
        before_s = delivery.begun.mono_s - 2 * self.ttl_s
        excuses = [
            each.begun
            for each in self.severe(delivery.owner)
            if (over := self.ends(each)) is None or over.clock != delivery.begun.clock or over.mono_s > before_s
        ]
        excuses += [delivery.begun] * (delivery.owner in self.released)
        excuses += self.ended_in_vain.get(delivery.owner, ())
        return min(excuses, key=lambda each: each.mono_s, default=None)

    @cached_property
    def ended_in_vain(self) -> dict[str, list[Event]]:
        """When processes ended that could not settle their messages: killed as they did not end, or left by the store.

        It took no writes for as long as the end lasted, or answered no consumer then and shortly before.
        """
        answers = [each.answered for op in ASKING for each in self.calls[op] if each.answered is not None]
        found = defaultdict[str, list[Event]](list)
        for stop in self.calls["stop"]:
            ended = stop.answered
            if ended is None:
                continue
            since_s = stop.invoked.mono_s - SILENT_S
            outcomes = {
                each.kind for each in answers if each.clock == ended.clock and since_s <= each.mono_s <= ended.mono_s
            }
            refused = any(
                each.name in REFUSING
                and each.begun.precedes(stop.invoked)
                and (each.over is None or ended.precedes(each.over))
                for each in self.faults
            )
            if stop.outcome == "info" or outcomes == {"info"} or refused:
                found[stop.invoked["target"]].append(ended)
        return found

    @cached_property
    def stored(self) -> dict[str, list[tuple[str, str]]]:
        """What was left at the end: queue and state of each, by the message's name."""
        found = defaultdict[str, list[tuple[str, str]]](list)
        for message, queue, state in (self.final["messages"] if self.final else None) or ():
            found[message].append((queue, state))
        return found

    @cached_property
    def offsets_s(self) -> dict[str, tuple[float, float]]:
        """Of each monotonic clock: the least and the most by which a wall clock beside it was ahead of it."""
        found: dict[str, tuple[float, float]] = {}
        for each in self.events:
            offset = each.wall_s - each.mono_s
            least, most = found.get(each.clock, (offset, offset))
            found[each.clock] = (min(least, offset), max(most, offset))
        return found

    def idle_s(self, call: Call, end: Event) -> float:
        """For how long its process, or the one that it meant, stood still meanwhile."""
        struck = {call.invoked.who, call.invoked["target"]}
        paused: float = sum(
            each.overlap_s(call.invoked, end) for each in self.faults if each.struck & struck and each.stops
        )
        for each in self._stalls:
            own = (each.who, each.pid) == (call.invoked.who, call.invoked.pid)
            if own and call.invoked.mono_s < each.mono_s and each.mono_s - each["seconds"] < end.mono_s:
                paused += min(each["seconds"], each.mono_s - call.invoked.mono_s)
        return paused

    def stood_s(self, begin: Event, end: Event) -> float:
        """For how long the machine did meanwhile: what processes tell of that no fault stopped."""
        stopped = {who for each in self.faults if each.stops for who in each.struck}
        meanwhile = [each for each in self._stalls if begin.precedes(each) and each.precedes(end)]
        return sum(float(each["seconds"]) for each in meanwhile if each.who not in stopped)

    @cached_property
    def _stalls(self) -> list[Event]:
        return [each for each in self.events if each.kind == "stall"]


def read(folder: str | Path, who: str = "*", last_bytes: int = sys.maxsize) -> History:
    """All files of a run, or the last lines of a process's.

    A last line without its end was cut off by a kill, or by a full disk.
    """
    events = []
    for path in sorted(Path(folder).glob(f"{who}-*.jsonl")):
        with path.open("rb") as file:
            begin = max(0, path.stat().st_size - last_bytes)
            file.seek(begin)
            for line in file.readlines()[begin > 0 :]:  # where it begins in the middle of one
                if line.endswith(b"\n"):
                    row = json.loads(line)
                    common = {name: row.pop(name) for name in COMMON}
                    events.append(Event(**common, fields=row))
    return History(events)
