"""How a storm strikes: by progress, never by time.

A strike comes after the n-th further step of the victim's kind, n being the seed's. A frozen process is thawed when
the others have made as much progress again, or when they have finished everything, what it held included: for that its
session has to be fenced. Either ends after ``LONGEST_FREEZE_S``, since a process that is frozen with SQLite's write
lock in its hand stops all others for as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar

from .stage import OPTIONS, Actor, Stage

LONGEST_FREEZE_S = 4 * OPTIONS["session_ttl"]
MOST_STEPS = 40

T = TypeVar("T")
Strike = Callable[[Stage, Actor, str], None]


def kill(stage: Stage, victim: Actor, step: str) -> None:
    stage.kill(victim)


def freeze(stage: Stage, victim: Actor, step: str) -> None:
    with stage.frozen(victim):
        stage.progress(step, stage.rng.randint(1, MOST_STEPS), LONGEST_FREEZE_S)


def freeze_until_fenced(stage: Stage, victim: Actor, step: str) -> None:
    with stage.frozen(victim):
        stage.ledger.wait(stage.ledger.is_done, LONGEST_FREEZE_S)


def rounds_of(rng: Random, kinds: list[T], rounds: int) -> Iterator[T]:
    """Each kind as often as the others, in the seed's order."""
    bag: list[T] = []
    for _ in range(rounds):
        bag = bag or rng.sample(kinds, len(kinds))
        yield bag.pop()


def strike(stage: Stage, role: str, step: str, how: Strike) -> None:
    """After some more steps, strike one of a role; it is a complaint if the steps do not come."""
    stage.expect(step, stage.rng.randint(1, MOST_STEPS))
    if alive := stage.alive(role):
        how(stage, stage.rng.choice(alive), step)
