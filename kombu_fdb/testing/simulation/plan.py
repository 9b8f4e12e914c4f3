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

from kombu_fdb.testing.faults import Fault

__all__ = ["PROFILES", "Profile", "Step", "Trouble", "make_plan", "walk"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong in a step.

    ``point``: ``begin``, ``read`` or ``commit``; ``number``: which of the step's, from 0. ``fault``: None if the
    process is killed there: at ``begin`` between two transactions, at ``commit`` with its writes unsent.
    """

    point: str
    number: int
    fault: Fault | None

    def __str__(self) -> str:
        return f"{self.fault.value if self.fault else 'killed'} at {self.point} {self.number}"


@dataclass(frozen=True, slots=True)
class Step:
    """One action of the process in ``slot``, or of the world. ``number`` names it for good."""

    number: str
    action: str
    slot: int
    seed: int
    troubles: tuple[Trouble, ...] = ()
    #: What others do before commit ``at`` of this step, after its reads.
    meanwhile: tuple[Step, ...] = ()
    at: int = 0

    def __str__(self) -> str:
        troubles = f" [{', '.join(map(str, self.troubles))}]" if self.troubles else ""
        return f"{self.number} {self.action} of {self.slot}{troubles}"


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
    #: What others do in a step, if not the same as at other times.
    rivals: Mapping[str, int] | None = None
    #: Of messages: how many are delayed, expire, are large, are urgent.
    delayed: float = 0.3
    expiring: float = 0.1
    large: float = 0.15
    urgent: float = 0.2
    delivery_limit: int = 6
    #: How many rivals each consumer believes to have at least: it then claims behind the head of the ring, too.
    rivalry: float = 1.0
    #: One consumer at a time, so that turns follow each other exactly.
    exact: bool = False

    def bounded(self, queue: str) -> bool:
        """Whether what is published there may be gone at once."""
        return not {"x-max-length", "x-max-length-bytes"}.isdisjoint(self.queues.get(queue, {}))

    def single_active(self, queue: str) -> bool:
        """Whether it serves one consumer at a time."""
        return "x-single-active-consumer" in self.queues.get(queue, {})


LIFE = {"publish": 32, "claim": 32, "ack": 16, "release": 6, "reject": 3, "duties": 14, "beat": 3, "pass": 14}
STORMS = {"die": 2, "close": 1, "freeze": 2, "jump": 1, "outage": 1, "recovery": 1, "cut": 1, "start": 1}
CONTROL = {"limit": 3, "pause": 1, "purge": 1, "delete": 2, "replay": 1, "wait": 3, "calm": 1, "garble": 1} | {
    "cancel": 2,
    "move": 1,
    "repeat": 2,
}

PROFILES: Mapping[str, Profile] = {
    "everything": Profile(LIFE | STORMS | CONTROL, {"plain": {}, "fair": {}, "full": {"x-max-length": 3}}),
    "claims": Profile(
        {"publish": 12, "claim": 16, "ack": 8, "release": 4, "purge": 5, "delete": 3, "pass": 2, "wait": 3},
        {"plain": {}},
        rivals={"claim": 8, "ack": 2, "delete": 2, "purge": 1, "publish": 1},
        meanwhile=0.6,
        delayed=0.0,
    ),
    "sessions": Profile(
        {"publish": 12, "claim": 18, "ack": 8, "reject": 2, "release": 4, "duties": 8, "beat": 4, "pass": 4, "tick": 30}
        | {"die": 2, "freeze": 5, "cut": 2, "close": 3, "calm": 1},
        {"plain": {}},
        rivals={"duties": 4, "ack": 6, "wake": 10, "close": 8, "claim": 4, "sweep": 8},
        meanwhile=0.8,
        kill=0.06,
        delayed=0.0,
    ),
    "outages": Profile(
        {"publish": 4, "claim": 8, "ack": 2, "duties": 16, "pass": 12, "outage": 5, "recovery": 3, "beat": 2},
        {"plain": {}},
        trouble=0.3,
        delayed=0.0,
    ),
    "delays": Profile(
        {"publish": 12, "claim": 8, "ack": 4, "release": 6, "promote": 10, "duties": 6, "pass": 14, "jump": 3}
        | {"die": 1, "start": 1},
        rivals={"promote": 6, "publish": 4, "pass": 2, "jump": 1, "claim": 2, "purge": 1},
        meanwhile=0.6,
        delayed=0.7,
    ),
    "fair": Profile(
        {"publish": 14, "claim": 14, "ack": 6, "release": 6, "pass": 2, "reject": 1, "purge": 1, "delete": 2},
        {"fair": {}},
        keys=("", "k", "t/1", "t/2"),
        rivals={"claim": 8, "release": 5, "publish": 3, "ack": 2, "purge": 1},
        meanwhile=0.8,
        delayed=0.0,
        urgent=0.3,
        rivalry=2.5,
    ),
    "limits": Profile(
        {"publish": 14, "claim": 20, "ack": 10, "release": 4, "limit": 5, "pause": 1, "pass": 2, "duties": 2, "die": 1},
        {"fair": {}},
        keys=("", "k"),
        rivals={"claim": 10, "ack": 6, "limit": 2, "release": 2, "publish": 6},
        meanwhile=0.8,
        delayed=0.0,
        urgent=0.5,
        rivalry=2.5,
    ),
    "one key": Profile(
        {"publish": 20, "claim": 24, "ack": 12, "limit": 8},
        {"fair": {}},
        keys=("k",),
        rivals={"publish": 6, "claim": 10, "ack": 2},
        meanwhile=0.9,
        trouble=0.0,
        kill=0.0,
        delayed=0.0,
        expiring=0.0,
        urgent=0.5,
        rivalry=2.5,
    ),
    "turns": Profile(
        {"publish": 30, "claim": 16, "ack": 10, "release": 1},
        {"fair": {}},
        keys=("", "k", "l", "m", "n"),
        rivals={"publish": 8, "release": 1},
        trouble=0.0,
        delayed=0.0,
        expiring=0.0,
        urgent=0.0,
        exact=True,
    ),
    "poison": Profile(
        {"publish": 16, "claim": 24, "release": 18, "reject": 4, "garble": 3, "duties": 8, "pass": 10, "die": 3}
        | {"replay": 3, "ack": 2, "calm": 2},
        {"plain": {}, "fair": {}, "graves": {}, "cellar": {}}
        | {"mortal": {"x-dead-letter-exchange": "dlx", "x-delivery-limit": 2, "x-message-ttl": 60_000}},
        delivery_limit=3,
        kill=0.06,
        delayed=0.1,
        expiring=0.3,
    ),
    "full": Profile(
        {"publish": 20, "claim": 10, "ack": 6, "release": 4, "reject": 4, "pass": 4, "replay": 2, "duties": 2},
        {
            "head": {"x-max-length": 3},
            "head-dlx": {"x-max-length": 2, "x-dead-letter-exchange": "dlx"},
            "refuse": {"x-max-length": 3, "x-overflow": "reject-publish"},
            "refuse-dlx": {"x-max-length": 3, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "dlx"},
            "fair-head": {"x-max-length": 4},
            "bytes": {"x-max-length-bytes": 40},
            "graves": {},
            "cellar": {},
        },
        delayed=0.1,
    ),
    "vanishing": Profile(
        {"publish": 10, "claim": 8, "ack": 6, "consume": 4, "leave": 8, "tick": 40, "die": 1, "drop": 2} | {"calm": 1},
        {"brief": {"x-expires": 8_000}, "plain": {}, "fair-brief": {"x-expires": 12_000}},
        rivals={"consume": 8, "publish": 6, "duties": 2, "leave": 1},
        meanwhile=0.7,
        delayed=0.2,
    ),
    "tasks": Profile(
        {"publish": 14, "claim": 10, "ack": 5, "release": 6, "reject": 5, "cancel": 10, "promote": 3, "duties": 4}
        | {"pass": 4, "move": 4, "walk": 2, "purge": 1, "die": 1},
        rivals={"cancel": 5, "promote": 3, "release": 4, "move": 4, "claim": 4, "publish": 2, "walk": 1},
        meanwhile=0.7,
        delayed=0.4,
    ),
    "repeats": Profile(
        {"repeat": 40, "tidy": 14, "pass": 20, "claim": 6, "ack": 4, "purge": 2},
        {"plain": {}},
        rivals={"repeat": 10, "tidy": 2, "pass": 2},
        meanwhile=0.7,
        trouble=0.3,
        delayed=0.2,
        expiring=0.0,
    ),
    "letters": Profile(
        {"publish": 12, "claim": 14, "reject": 16, "walk": 10, "discard": 3, "replay": 2, "ack": 1, "cancel": 1}
        | {"pass": 2, "duties": 2},
        rivals={"walk": 8, "discard": 3, "claim": 4, "reject": 3, "replay": 2},
        meanwhile=0.8,
        kill=0.08,
        delayed=0.0,
        expiring=0.05,
    ),
    "single": Profile(
        {"publish": 14, "claim": 30, "ack": 8, "release": 3, "resign": 10, "pass": 2, "tick": 10, "die": 1, "close": 12}
        | {"freeze": 2, "cut": 1, "wait": 2, "pause": 2, "duties": 2, "sweep": 6},
        {"single": {"x-single-active-consumer": True}},
        rivals={"claim": 14, "resign": 3, "wake": 2, "sweep": 10, "close": 8, "duties": 1, "publish": 1},
        meanwhile=0.9,
        kill=0.05,
        delayed=0.0,
        expiring=0.0,
    ),
}

#: Faults of a commit, with their weights.
_AT_COMMIT = {
    Fault.CONFLICT: 4,
    Fault.ANSWER_LOST_APPLIED: 4,
    Fault.ANSWER_LOST_NOT_APPLIED: 3,
    Fault.COMMIT_LATE: 2,
    Fault.TOO_OLD: 1,
    Fault.UNAVAILABLE: 2,
    Fault.WATCH_LOST: 2,
    Fault.WATCH_FOR_NOTHING: 2,
}
_AT_READ = {Fault.TOO_OLD: 1, Fault.UNAVAILABLE: 1}


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
        rivals = weights if profile.rivals is None else profile.rivals
        count, at = rng.choice([1, 1, 2, 4]), rng.choice([0, 0, 0, 1, 2])
        near = [*slots, slot]  # other threads of the same process as often as others
        meanwhile = tuple(_step(rng, profile, f"{number}.{n}", rivals, depth + 1, near) for n in range(count))
    (action,) = rng.choices([*weights], [*weights.values()])
    return Step(number, action, slot, rng.getrandbits(32), _troubles(rng, profile), meanwhile, at)


def _troubles(rng: random.Random, profile: Profile) -> tuple[Trouble, ...]:
    troubles = []
    if rng.random() < profile.trouble:
        (fault,) = rng.choices([*_AT_COMMIT], [*_AT_COMMIT.values()])
        troubles.append(Trouble("commit", rng.choice([0, 0, 1, 2]), fault))
        if rng.random() < 0.3:
            (fault,) = rng.choices([*_AT_READ], [*_AT_READ.values()])
            troubles.append(Trouble("read", rng.randrange(6), fault))
    if rng.random() < profile.kill:
        troubles.append(Trouble(rng.choice(["begin", "commit"]), rng.choice([0, 1, 1, 2, 3]), None))
    return tuple(troubles)
