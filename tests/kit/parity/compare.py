"""One program on RabbitMQ and on our transport, observation by observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kit.parity.broker import Broker, Observation
from kit.parity.deviations import Difference, Seen, explain
from kit.parity.program import Step

#: A broker that is not at rest in this time is observed as it is; before a difference is believed, it gets more.
PATIENCE_S = 0.5
MORE_PATIENCE_S = 2.0
#: RabbitMQ has races of its own: of what it did in one of so many runs, ours may do any.
RUNS = 3

#: Opens a broker for one program, with so much patience.
Open = Callable[[float], Broker]


@dataclass(frozen=True)
class Verdict:
    """``unexplained``: the differences of the first step with one that no rule explains. ``shown``: the rules that
    explained others."""

    unexplained: Sequence[Difference] = ()
    step: Step | None = None
    shown: frozenset[str] = frozenset()

    def __str__(self) -> str:
        lines = [f"  {each.place}: RabbitMQ {each.theirs!r}, ours {each.ours!r}" for each in self.unexplained]
        return "\n".join([f"{self.step}", *lines])


def compare(
    program: Sequence[Step], theirs: Sequence[Observation], ours: Sequence[Observation], ids: Sequence[str]
) -> Verdict:
    """``ids``: of the rules that explain differences."""
    shown: set[str] = set()
    for at, (step, rabbits, own) in enumerate(zip(program, theirs, ours, strict=True)):
        found = [
            Difference(place, rabbits.get(place), own.get(place))
            for place in sorted({*rabbits, *own})
            if rabbits.get(place) != own.get(place)
        ]
        explained, ends = explain(found, Seen(program[:at], step, rabbits, own, ours[:at]), ids)
        shown |= {*explained.values()}
        unexplained = [each for number, each in enumerate(found) if number not in explained]
        if unexplained:
            return Verdict(unexplained, step, frozenset(shown))
        if ends:
            break
    return Verdict(shown=frozenset(shown))


@dataclass
class Bench:
    """RabbitMQ, and a store of ours."""

    rabbitmq: Open
    ours: Open
    ids: Sequence[str]
    #: Of each program that was run.
    shown: set[str] = field(default_factory=set)

    def verdict(self, program: Sequence[Step]) -> Verdict:
        """Patiently, and again, before a difference is believed."""
        first = self.glance(program)
        for _ in range(RUNS - 1):
            if not first.unexplained:
                break
            first = self._compare(program, MORE_PATIENCE_S)
        self.shown |= first.shown
        return first

    def glance(self, program: Sequence[Step]) -> Verdict:
        """Once; for a program that is known to differ."""
        return self._compare(program, PATIENCE_S)

    def _compare(self, program: Sequence[Step], patience_s: float) -> Verdict:
        theirs, ours = (_run(program, each, patience_s) for each in (self.rabbitmq, self.ours))
        return compare(program, theirs, ours, self.ids)


def _run(program: Sequence[Step], open_broker: Open, patience_s: float) -> list[Observation]:
    broker = open_broker(patience_s)
    try:
        broker.settle()
        return [broker.perform(each) for each in program]
    finally:
        broker.close()
