"""The plan of a run: who does what, what others do meanwhile, and what goes wrong. Pure data, made from one seed.

A step carries its own seed, from which everything is drawn that it decides when it is carried out. So a plan with some
of its steps left out is still a plan, in which the others do what they did before as far as they can: that is what
makes a failing one small enough to read (``shrink.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.faults import Fault


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong in a step.

    ``point``: ``begin``, ``read`` or ``commit``; ``number``: which of the step's, from 0. ``fault``: None if the
    process is killed there: at ``begin`` between two transactions, at ``commit`` with its writes unsent. What a signal
    handler raises strikes at any of them: between two transactions, in a body, or when its commit has happened.
    ``operation``: any of them, counted together, and the answers of commits: what has landed is not known yet then.
    """

    point: str
    number: int
    fault: Fault | None

    def __str__(self) -> str:
        return f"{self.fault.value if self.fault else 'killed'} at {self.point} {self.number}"


@dataclass(frozen=True, slots=True)
class Step:
    """One action of the process in ``slot``, or of the world. ``number`` names it for good.

    ``stopped``: its whole process gets SIGSTOP at commit ``at``: ``before`` it is sent, or ``after`` it has happened
    and before its answer arrives. SIGCONT follows when the others have done what they do meanwhile.
    """

    number: str
    action: str
    slot: int
    seed: int
    troubles: tuple[Trouble, ...] = ()
    #: What others do before commit ``at`` of this step, after its reads.
    meanwhile: tuple[Step, ...] = ()
    at: int = 0
    stopped: str = ""

    def __str__(self) -> str:
        troubles = f" [{', '.join(map(str, self.troubles))}]" if self.troubles else ""
        stopped = f" [stopped {self.stopped} commit {self.at}]" if self.stopped else ""
        return f"{self.number} {self.action} of {self.slot}{troubles}{stopped}"


#: Faults of a commit, with their weights.
AT_COMMIT: Mapping[Fault, int] = {
    Fault.CONFLICT: 4,
    Fault.ANSWER_LOST_APPLIED: 4,
    Fault.ANSWER_LOST_NOT_APPLIED: 3,
    Fault.COMMIT_LATE: 2,
    Fault.INTERRUPTED: 1,
    Fault.TOO_OLD: 1,
    Fault.UNAVAILABLE: 2,
    Fault.WATCH_LOST: 2,
    Fault.WATCH_FOR_NOTHING: 2,
}
#: So many have two looks at a wait queue, a look at the queues, and a service.
MOST_OPERATIONS = 24
AT_READ: Mapping[Fault, int] = {Fault.TOO_OLD: 1, Fault.UNAVAILABLE: 1}


@dataclass(frozen=True)
class Profile:
    """A kind of weather: which actions, over what, how hostile. Uniform chaos finds little; each has a focus."""

    #: Action -> weight (``actions.py``).
    weights: Mapping[str, int]
    #: Queue -> its arguments. Those named ``fair...`` get messages with keys.
    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"plain": {}, "fair": {}})
    keys: Sequence[str] = ("", "k", "l", "t/1", "t/2")
    slots: int = 3
    steps: int = 150
    #: Chances of a step: that others act in it, that the store fails, that its process is killed.
    meanwhile: float = 0.4
    trouble: float = 0.15
    kill: float = 0.03
    #: That its process is stopped at a commit, and that an exception strikes before one.
    stopped: float = 0.0
    interrupted: float = 0.0
    #: That its process is killed at any operation of the store, or has done one and never hears of it.
    struck: float = 0.0
    #: What fails at a commit, with weights.
    at_commit: Mapping[Fault, int] = field(default_factory=lambda: AT_COMMIT)
    #: What others do in a step, if not the same as at other times.
    others: Mapping[str, int] | None = None
    #: How many messages a publish has.
    batches: Sequence[int] = (1, 1, 1, 3)
    #: Of messages: how many are delayed, expire, are large, are urgent.
    delayed: float = 0.3
    expiring: float = 0.1
    large: float = 0.15
    urgent: float = 0.2
    delivery_limit: int = 6
    #: Of claims: how many take messages without a lease.
    no_ack: float = 0.0
    #: Turns are counted: nothing takes messages but claims, and each commits where it is made.
    exact: bool = False
    #: By how many seconds a wall clock is set, and how far off the true time it may be then.
    jumps: Sequence[int] = (-300, -30, 30, 300)
    most_off_s: int = 600
    #: Rates that keys are given; none: the usual limits.
    rates: Sequence[tuple[float, int]] = ()
    #: Whether messages come through the transport, not from the engine straight.
    connected: bool = False
    #: Whether they know from the beginning that others compete.
    contested: bool = False
    #: Transactions that a duty has in its turn; 0: as many as in a real process.
    turn: int = 0

    def bounded(self, queue: str) -> bool:
        """Whether what is published there may be gone at once."""
        return not {"x-max-length", "x-max-length-bytes"}.isdisjoint(self.queues.get(queue, {}))

    def single_active(self, queue: str) -> bool:
        """Whether it serves one consumer at a time."""
        return "x-single-active-consumer" in self.queues.get(queue, {})


def make_plan(seed: int, profile: Profile) -> list[Step]:
    """The steps of one seed."""
    rng = random.Random(f"plan {seed}")
    slots = range(profile.slots)
    return [_step(rng, profile, str(number), profile.weights, 0, slots) for number in range(profile.steps)]


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """Every step, those inside of others too."""
    for step in steps:
        yield step
        yield from walk(step.meanwhile)


def _step(
    rng: random.Random, profile: Profile, number: str, weights: Mapping[str, int], depth: int, slots: Sequence[int]
) -> Step:
    meanwhile: tuple[Step, ...] = ()
    at = 0
    slot = rng.choice(slots)
    if depth < 2 and rng.random() < profile.meanwhile / (1 + depth):
        others = weights if profile.others is None else profile.others
        count, at = rng.choice([1, 1, 2, 4]), rng.choice([0, 0, 0, 1, 2])
        near = [*slots, slot]  # other threads of the same process as often as others
        meanwhile = tuple(_step(rng, profile, f"{number}.{n}", others, depth + 1, near) for n in range(count))
    (action,) = rng.choices([*weights], [*weights.values()])
    # A chance of nothing is not asked: seeds of profiles without it stay what they are.
    stopped = rng.choice(["before", "after", "after"]) if profile.stopped and rng.random() < profile.stopped else ""
    return Step(number, action, slot, rng.getrandbits(32), _troubles(rng, profile), meanwhile, at, stopped)


def _troubles(rng: random.Random, profile: Profile) -> tuple[Trouble, ...]:
    troubles = []
    if rng.random() < profile.trouble:
        (fault,) = rng.choices([*profile.at_commit], [*profile.at_commit.values()])
        troubles.append(Trouble("commit", rng.choice([0, 0, 1, 2]), fault))
        if rng.random() < 0.3:
            (fault,) = rng.choices([*AT_READ], [*AT_READ.values()])
            troubles.append(Trouble("read", rng.randrange(6), fault))
    if profile.interrupted and rng.random() < profile.interrupted:
        troubles.append(Trouble(rng.choice(["begin", "read", "read"]), rng.randrange(5), Fault.INTERRUPTED))
    if rng.random() < profile.kill:
        troubles.append(Trouble(rng.choice(["begin", "commit"]), rng.choice([0, 1, 1, 2, 3]), None))
    if profile.struck and rng.random() < profile.struck:
        troubles.append(Trouble("operation", rng.randrange(MOST_OPERATIONS), None))
    return tuple(troubles)
